"""The table of what takes memory, when an allocation fails: `watch.out_of_memory`.

No test here has a GPU: what CUDA's allocator calls is called with numbers.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.engine.module_state import state_of
from fullshard.engine.restoring import is_lack
from fullshard.engine.runtime import Runtime
from fullshard.errors import AllocationError, CheckpointError, PeerLostError
from fullshard.process_hooks import Hook
from fullshard.watch import out_of_memory
from tests.api import Api
from tests.fresh import in_warm_forks
from tests.harness import mesh_of, on_ranks, rank

pytestmark = pytest.mark.ours("has no such table")

MIB = 2**20
_SIZES = (2, 700 * MIB, 8192 * MIB, 300 * MIB)  # device, bytes asked for, total, free


def _trained(api: Api) -> Any:
    """Return a model, one step of AdamW after it was sharded, with gradients."""
    blocks = [nn.Sequential(nn.Linear(64, 64)) for _ in range(2)]
    for block in blocks:
        api.fully_shard(block, mesh=mesh_of(2))
    model = api.fully_shard(nn.Sequential(*blocks, nn.Linear(64, 1)), mesh=mesh_of(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    return model, optimizer


@contextlib.contextmanager
def _logged(model: Any, **planted: Any) -> Iterator[list[str]]:
    """Yield what is logged, with this model alone; planted: what the device's allocator tells."""
    said: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fullshard")
    logger.addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(out_of_memory, "_last_s", [-out_of_memory._PAUSE_S])
        patch.setattr(out_of_memory, "roots", [state_of(model)])
        for name, nbytes in planted.items():
            patch.setattr(Runtime, name, nbytes)
        yield said
    logger.removeHandler(handler)


@on_ranks(2)
def test_what_the_allocator_calls_writes_a_table(api: Api) -> None:
    model, _optimizer = _trained(api)
    with _logged(model, allocated_nbytes=6000 * MIB, reserved_nbytes=7000 * MIB) as said:
        out_of_memory._observe(*_SIZES)
        out_of_memory._observe(*_SIZES)  # a library tries again: one table is enough
    (text,) = said
    for fact in (f"cuda:2, rank {rank()}: 700.0 MiB", "300.0 MiB of 8,192.0 MiB are free"):
        assert fact in text
    for category in ("sharded parameters", "gradient shards", "optimizer state"):
        assert f"\n{category} " in text
    assert "1,000.0 MiB more, as cache" in text
    assert "Outside of it 892.0 MiB" in text
    assert "expandable_segments:True" in text


@on_ranks(2)
def test_it_says_what_to_do_about_what_is_most(api: Api) -> None:
    model, _optimizer = _trained(api)

    def told(asked: int, resident: int) -> str:
        with _logged(model), pytest.MonkeyPatch.context() as patch:
            patch.setattr(out_of_memory, "_before", [300 * MIB])
            patch.setattr(out_of_memory, "resident_nbytes", lambda: resident)
            error = RuntimeError(f"not enough memory: you tried to allocate {asked} bytes.")
            return out_of_memory.explain_lack(error) or ""

    of_batches, of_python = told(100 * MIB, 900 * MIB), told(100 * MIB, 310 * MIB)
    for said in (of_batches, of_python):
        assert "bytes.\n" in said
        assert "300.0 MiB of it since before" in said
        assert "100.0 MiB were asked for, and " in said
    assert "activations and other: take smaller" in of_batches
    assert "there before training" in of_python
    assert "activations" not in of_python
    (last,) = told(10**15, 310 * MIB).splitlines()[-1:]
    assert "more than all that is held" in last


def test_what_another_rank_lacks_is_not_this_one_s() -> None:
    text = "rank 1 ended: can't allocate memory: you tried to allocate 8 bytes"
    lost = PeerLostError(text)
    wrapped = RuntimeError(f"step 3: {text}")
    wrapped.__cause__ = lost
    assert not any(map(is_lack, (lost, wrapped, CheckpointError(text))))
    own = RuntimeError(text)
    own.__context__ = PeerLostError("rank 1 left")
    assert all(map(is_lack, (own, AllocationError(text), MemoryError())))


@on_ranks(1)
def test_it_never_raises(api: Api) -> None:
    with _logged(nn.Linear(1, 1)) as said:  # which has no state to ask
        out_of_memory._observe(*_SIZES)
    assert not said


def test_it_is_attached_once_and_only_for_cuda(monkeypatch: Any) -> None:
    class Unit:
        device = torch.device("cuda", 0)

    class Root:
        all_units = (Unit(),)

    attached: list[Any] = []
    monkeypatch.setattr(out_of_memory, "OUT_OF_MEMORY", Hook("CUDA", attached.append))
    monkeypatch.setattr(out_of_memory, "attach_out_of_memory_observer", attached.append)
    for _ in range(2):
        out_of_memory.observe_allocator(Root())  # type: ignore[arg-type]
    assert len(attached) == 1
    Unit.device = torch.device("cpu")
    monkeypatch.setattr(out_of_memory, "OUT_OF_MEMORY", Hook("CUDA", attached.append))
    out_of_memory.observe_allocator(Root())  # type: ignore[arg-type]
    assert len(attached) == 1


_PROGRAM = """
import torch
import torch.distributed as dist
from torch import nn
from fullshard import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)))
out = model(torch.ones(4, 512))
out.register_hook(lambda grad: {plant})
out.sum().backward()
"""


def test_a_program_that_host_memory_ends_says_what_took_it_and_others_do_not() -> None:
    plants = (
        "torch.empty(1 << 60, dtype=torch.uint8, device='cpu')",
        "exec('raise MemoryError')",
        "1 / 0",
    )
    programs = [_PROGRAM.format(plant=plant) for plant in plants]
    *ended_by_memory, other = in_warm_forks(*programs)
    for run in ended_by_memory:
        assert run.code == 1
        assert "memory on cpu, rank 0" in run.err
        assert "sharded parameters  2.0 MiB\n" in run.err
        assert "Traceback" in run.err
    assert other.code == 1
    assert "ZeroDivisionError" in other.err
    assert "Out of memory" not in other.err
