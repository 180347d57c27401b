"""What the engine sets up for a device."""

import platform
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fullshard.engine.runtime import out_of_context
from tests.fresh import in_fresh_forks

_COUNT_MAPPED = """
import ctypes, torch
from fullshard.engine.runtime import Runtime

class Info(ctypes.Structure):  # mallinfo(3): the fourth counts blocks that the system mapped
    _fields_ = [(f"field{i}", ctypes.c_int) for i in range(10)]

mallinfo = ctypes.CDLL(None).mallinfo
mallinfo.restype = Info

def count_mapped():
    before = mallinfo().field3
    blocks = [torch.empty(20 << 20, dtype=torch.uint8) for _ in range(2)]
    return mallinfo().field3 - before

before = count_mapped()
Runtime.of(torch.device("cpu"))
print(before, count_mapped())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have no threshold")
def test_large_blocks_come_from_the_heap_that_stays_mapped() -> None:
    (done,) = in_fresh_forks(_COUNT_MAPPED)
    assert done.out.split() == ["2", "0"], done.err


def test_out_of_context_nothing_that_the_caller_has_entered_holds() -> None:
    with torch.inference_mode(), torch.autograd.graph.saved_tensors_hooks(_refuse, _refuse):
        product = out_of_context(lambda: torch.ones(1, requires_grad=True) * torch.ones(1))
    assert product.requires_grad


def test_out_of_context_works_while_python_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(*_: object) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    assert out_of_context(lambda: 3) == 3


def _refuse(_: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a hook on saved tensors was called")
