"""How much of Gloo's communication hides behind compute where cores are free for it.

    python -m bench.hiding --mib 8 --rounds 7

On a machine whose cores all compute, Gloo's threads take their time from the compute that they run
beside. So compute is stood for by waiting, as for a device that works by itself: each of a model's
blocks waits in forward, and twice as long in backward. A step's exposed communication is

    seconds of a step, sharded - seconds of the same step, unwrapped

and what is hidden is the rest of what communication takes where there is no compute at all. Two
ranks; the process group moves every byte (no peer memory).
"""

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

import fullshard

from .ranks import Rank, RankGroup
from .tables import Progress, Spread, Table, add_output_options, emit, positive, spread

_NUM_RANKS = 2
_NUM_BLOCKS = 6
_WIDTH = 1024
_NUM_WARM_UP_STEPS = 3
_IMPLEMENTATIONS = ("local", "fsdp2", "fullshard-pg")


class _Wait(torch.autograd.Function):
    """Compute that needs a block's weight, takes this long, and none of this machine's cores."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        ctx.save_for_backward(weight)
        time.sleep(seconds)
        return x + weight[0, 0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        time.sleep(2 * ctx.seconds)
        return grad, torch.full_like(weight, 1e-3), None


class _Block(nn.Module):
    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(nbytes // 4 // _WIDTH, _WIDTH))
        self.seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Wait.apply(x, self.weight, self.seconds)  # type: ignore[no-untyped-call]
        return y


class Training:
    """One rank that trains blocks which wait."""

    def __init__(self, rank: Rank, *, implementation: str, nbytes: int) -> None:
        rank.init_gloo()
        self._blocks = [_Block(nbytes) for _ in range(_NUM_BLOCKS)]
        self._model = nn.Sequential(*self._blocks)
        shard = _SHARD.get(implementation)
        if shard is not None:
            mesh = init_device_mesh("cpu", (rank.count,))
            for module in (*self._blocks, self._model):
                shard(module, mesh=mesh)
        for _ in range(_NUM_WARM_UP_STEPS):
            self._step()

    def run(self, seconds: float) -> float:
        """Return the seconds of a step whose blocks wait ``seconds`` in forward."""
        for block in self._blocks:
            block.seconds = seconds
        dist.barrier()
        start = time.perf_counter()
        self._step()
        dist.barrier()
        return time.perf_counter() - start

    def _step(self) -> None:
        self._model(torch.ones(1, 1, requires_grad=True)).sum().backward()
        self._model.zero_grad()


def _shard_fullshard(module: nn.Module, **options: Any) -> None:
    fullshard.set_default_comm("process_group")
    fullshard.fully_shard(module, **options)


_SHARD: dict[str, Callable[..., object]] = {
    "fsdp2": fsdp.fully_shard,
    "fullshard-pg": _shard_fullshard,
}


@dataclass
class Measured:
    """Seconds of a step, one entry a round: with compute, and communication alone."""

    step: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)


Results = dict[str, Measured]


def measure(*, nbytes: int, seconds: float, num_rounds: int = 7) -> Results:
    """Time every implementation's step, with and without compute; they take turns."""
    progress = Progress("hiding", num_stages=num_rounds + 1)
    results = {name: Measured() for name in _IMPLEMENTATIONS}
    with ExitStack() as stack:
        groups = {}
        for name in results:
            build = partial(Training, implementation=name, nbytes=nbytes)
            groups[name] = stack.enter_context(RankGroup(name, build, num_ranks=_NUM_RANKS))
        for group in groups.values():
            group.wait_imported()
        progress.advance("warms up")
        for group in groups.values():
            group.call("build")
        for index in range(num_rounds):
            progress.advance(f"round {index + 1} of {num_rounds}")
            for name, group in groups.items():
                results[name].step.append(max(group.call("run", seconds).values))
                results[name].alone.append(max(group.call("run", 0.0).values))
    progress.finish()
    return results


def hidden(results: Results, name: str) -> Spread:
    """Return the share of an implementation's communication that costs a step no time."""
    local, own = results["local"], results[name]
    shares = [
        1 - (step - compute) / max(alone - rest, 1e-9)
        for step, alone, compute, rest in zip(
            own.step, own.alone, local.step, local.alone, strict=True
        )
    ]
    return spread(shares)


def build_table(results: Results, *, nbytes: int, seconds: float) -> Table:
    headings = ["", "step ms", "without compute ms", "communication hidden"]
    table = Table("communication behind compute, over Gloo", headings)
    for name, own in results.items():
        times = [f"{1e3 * median(values):.1f}" for values in (own.step, own.alone)]
        table.rows.append([name, *times, "" if name == "local" else str(hidden(results, name))])
    table.notes = [
        f"{_NUM_RANKS} ranks, {_NUM_BLOCKS} blocks of {nbytes >> 20} MiB that wait "
        f"{1e3 * seconds:.0f} ms in forward and twice that in backward"
    ]
    return table


def results_json(results: Results) -> dict[str, Any]:
    return {"hiding": {name: asdict(measured) for name, measured in results.items()}}


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.hiding", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--mib", type=positive, default=8, help="bytes of a block's parameters")
    parser.add_argument("--ms", type=positive, default=40, help="what a block's forward takes")
    parser.add_argument("--rounds", type=positive, default=7)
    add_output_options(parser)
    return parser.parse_args()


def main() -> int:
    options = _parse_options()
    nbytes, seconds = options.mib << 20, options.ms / 1e3
    results = measure(nbytes=nbytes, seconds=seconds, num_rounds=options.rounds)
    emit(options, [build_table(results, nbytes=nbytes, seconds=seconds)], results_json(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
