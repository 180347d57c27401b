"""What the engine sets up for a device."""

import platform
import subprocess
import sys

import pytest

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
    command = [sys.executable, "-c", _COUNT_MAPPED]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.split() == ["2", "0"]
