"""Operations that a device would be given in a step, by lane, with a process group that moves nothing.

    python -m bench.launches

Below autograd, and where collectives are called, every operation is seen that touches memory: what
would be a kernel, a copy or a collective on a device. Views and allocations are none. A unit's
share is

    (operations of forward and backward, sharded - the same, unwrapped) / units

Ours runs with streams (`engine.runtime`) that only say which lane is current; of PyTorch's engine,
which has none on the CPU, collectives and other operations are told apart. Ours calls collectives
as it calls NCCL's, where those of a unit are one launch. Layers are small, which are packed, or of
256 KiB, which travel by themselves. Nothing is timed: a step takes the same number every time, and
that is checked.
"""

import argparse
import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fullshard
from fullshard.comm.process_group import ProcessGroupComm
from fullshard.engine.runtime import Lane, Runtime
from fullshard.plan.layout import DirectRule

from .tables import Table, add_output_options, emit

_NUM_RANKS = 8
_NUM_BLOCKS = 8
_NUM_WARM_UP_STEPS = 4  # the first passes are watched: `engine/checks/writes.py`
_WIDTHS = {"layers of 16 KiB": 64, "layers of 256 KiB": 256}

# They return memory, or change what a tensor is over, and touch no element.
_UNTOUCHING = ("empty", "new_empty", "set_", "resize_", "lift_fresh")
_COLLECTIVES = ("c10d", "_c10d_functional")
_NOTHING = ("profiler",)
# PyTorch's own operators for FSDP2 all copy, though one says that it returns views.
_COPYING = ("fsdp",)


class Block(nn.Module):
    """A norm and two square layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


def _make_model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(_NUM_BLOCKS)), nn.LayerNorm(width))


class LaneRuntime(Runtime):
    """A runtime with streams by name: ``current`` says on which lane operations are."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.has_streams = True
        self.current = Lane.COMPUTE

    @contextlib.contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        before, self.current = self.current, lane
        try:
            yield
        finally:
            self.current = before

    def record(self) -> None:
        return None

    def wait(self, event: object) -> None:
        return None

    def finish(self, event: object) -> None:
        return None


class LaunchCounter(TorchDispatchMode):
    """Counts operations that touch memory, by lane and by whether they are collectives."""

    def __init__(self, runtime: LaneRuntime) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._runtime = runtime

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        namespace, _, name = function._schema.name.partition("::")
        if namespace in _COLLECTIVES:
            self.counts[f"{self._runtime.current.name}: collectives"] += 1
        elif namespace in _COPYING or (
            namespace not in _NOTHING
            and not name.startswith(_UNTOUCHING)
            and not _is_view(function, args, result)
        ):
            self.counts[f"{self._runtime.current.name}: kernels"] += 1
        return result


def _is_view(function: Any, args: Any, result: Any) -> bool:
    """Whether an operation writes to nothing, and returns nothing but memory that it was given."""
    if any(each.alias_info and each.alias_info.is_write for each in function._schema.arguments):
        return False
    given = {_address(each) for each in pytree.tree_leaves(args) if isinstance(each, torch.Tensor)}
    results = [each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
    return bool(results) and all(_address(each) in given for each in results)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class Launches:
    """What one implementation gives a device in a step, beside the model's own operations."""

    implementation: str
    model: str
    collectives: int
    kernels: int
    side_lanes: int

    @property
    def total(self) -> int:
        return self.collectives + self.kernels


def measure() -> list[Launches]:
    """Count PyTorch's FSDP2's operations and ours, in this process, on every model."""
    found = []
    runtime = LaneRuntime(torch.device("cpu"))
    with _fake_world(), mock.patch.object(Runtime, "of", return_value=runtime):
        for name, width in _WIDTHS.items():
            alone = _count(_make_model(width), width, runtime)
            for implementation, shard in _SHARD.items():
                counts = _count(shard(_make_model(width)), width, runtime)
                kernels = sum(n for what, n in counts.items() if what.endswith("kernels"))
                side = sum(n for what, n in counts.items() if not what.startswith("COMPUTE"))
                found.append(
                    Launches(
                        implementation,
                        name,
                        collectives=sum(counts.values()) - kernels,
                        kernels=kernels - sum(alone.values()),
                        side_lanes=side,
                    )
                )
    return found


def _count(model: nn.Module, width: int, runtime: LaneRuntime) -> Counter[str]:
    """Count the operations of a step's forward and backward; asserts that two steps are alike."""
    x = torch.randn(4, width)
    steps = []
    for _ in range(_NUM_WARM_UP_STEPS + 2):
        model.zero_grad()
        with LaunchCounter(runtime) as counter:
            model(x).sum().backward()
        steps.append(counter.counts)
    assert steps[-1] == steps[-2], steps
    return steps[-1]


@contextlib.contextmanager
def _fake_world() -> Iterator[None]:
    """Be rank 0 of ranks that answer at once; ours calls collectives as it calls NCCL's."""
    made = ProcessGroupComm.__init__

    def make(comm: ProcessGroupComm, *args: Any) -> None:
        made(comm, *args)
        comm.is_nccl, comm.rule = True, DirectRule(even=True, min_nbytes=1 << 16)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=_NUM_RANKS)
    try:
        with mock.patch.object(ProcessGroupComm, "__init__", make):
            yield
    finally:
        dist.destroy_process_group()


def _shard_by(library: Any) -> Callable[[nn.Sequential], nn.Module]:
    def shard(model: nn.Sequential) -> nn.Module:
        mesh = init_device_mesh("cpu", (_NUM_RANKS,))
        for block in model:
            library.fully_shard(block, mesh=mesh)
        library.fully_shard(model, mesh=mesh)
        return model

    return shard


_SHARD = {"fsdp2": _shard_by(fsdp), "fullshard": _shard_by(fullshard)}


def over_fsdp2(results: list[Launches], model: str) -> float:
    """Return our operations over FSDP2's, on one model."""
    ours, theirs = (
        next(r.total for r in results if (r.implementation, r.model) == (name, model))
        for name in ("fullshard", "fsdp2")
    )
    return ours / theirs


def build_table(results: list[Launches]) -> Table:
    headings = [
        "operations a step",
        "collectives",
        "kernels",
        "of both on side lanes",
        "over FSDP2",
    ]
    table = Table("launches, fake backend, 8 ranks", headings)
    for name in _WIDTHS:
        table.rows.append([name])
        for each in (result for result in results if result.model == name):
            is_ours = each.implementation == "fullshard"
            table.rows.append(
                [
                    each.implementation,
                    str(each.collectives),
                    str(each.kernels),
                    str(each.side_lanes) if is_ours else "",
                    f"{over_fsdp2(results, name):.2f}" if is_ours else "",
                ]
            )
    table.notes = [f"{_NUM_BLOCKS + 1} units; less the unwrapped model's own operations"]
    return table


def results_json(results: list[Launches]) -> dict[str, Any]:
    return {"launches": [asdict(result) for result in results]}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.launches", description=(__doc__ or "").partition("\n")[0]
    )
    add_output_options(parser)
    options = parser.parse_args()
    results = measure()
    emit(options, [build_table(results)], results_json(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
