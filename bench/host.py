"""Host time per unit and step, with a process group that moves nothing.

    python -m bench.host --world-sizes 8 1024

The fake backend answers every collective at once, so one process can be rank 0 of any number of
ranks and what remains is what the sharding engine itself costs. Per unit and step that is

    (seconds of forward and backward, sharded - the same, unwrapped) / units

At many ranks the fake backend is not free: its all-gather copies the shard once for every rank. The
time inside the backend's own calls is taken in the same steps, by a clock around each call, and
shown beside it; the rest is the engine's.

The model is 48 small blocks and a root with a norm, each a unit. The optimizer is timed apart: one
AdamW step on the sharded parameters, as it is and with `fullshard.step_on_shards`, over one on plain
tensors of the same local shapes, in the same process. Every implementation and world size has its
own process; they take turns, round by round.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import fullshard

from .ranks import Rank, RankGroup
from .tables import (
    Progress,
    Spread,
    Table,
    add_output_options,
    emit,
    positive,
    ratio_spread,
    spread,
)

_NUM_BLOCKS = 48
_NUM_UNITS = _NUM_BLOCKS + 1
_WIDTH = 64
_NUM_WARM_UP_STEPS = 5
_SECONDS_FOR_A_ROUND = 0.25

# What every implementation's collectives end in, by the names of torch's releases.
_BACKEND_METHODS = (
    "all_gather_single",
    "reduce_scatter_single",
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced",
    "allreduce",
)


class SmallBlock(nn.Module):
    """Six parameters and little arithmetic, so that the host's work shows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, _WIDTH)
        self.down = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


class SmallModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SmallBlock() for _ in range(_NUM_BLOCKS))
        self.norm = nn.LayerNorm(_WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.norm(x)
        return y


class Subject(NamedTuple):
    """An implementation pretending to be one of `world_size` ranks; ("local", 1) is unwrapped."""

    implementation: str
    world_size: int

    def __str__(self) -> str:
        if self == LOCAL:
            return self.implementation
        return f"{self.implementation}, {self.world_size:,} ranks"


LOCAL = Subject("local", 1)


class BackendClock:
    """Adds up the seconds inside the process group's own methods, of this process from now on."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in _BACKEND_METHODS:
            method = getattr(dist.ProcessGroup, name, None)
            if method is not None:
                setattr(dist.ProcessGroup, name, self._timed(method))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            work = method(*args, **options)
            self.seconds += time.perf_counter() - start
            return work

        return timed


class StepSeconds(NamedTuple):
    """Seconds per step: forward and backward, of it inside the backend, and the optimizer.

    The latter on what was sharded as it is, on its shards, and on plain tensors.
    """

    compute: float
    backend: float
    optimizer: float
    shard_optimizer: float
    plain_optimizer: float


class HostTraining:
    """One subject's process: the model, its optimizers, and one on plain tensors of its shapes."""

    def __init__(self, subject: Subject) -> None:
        torch.manual_seed(0)
        self._clock = BackendClock()
        self._model: nn.Module = SmallModel()
        if subject != LOCAL:
            dist.init_process_group(
                "fake", store=FakeStore(), rank=0, world_size=subject.world_size
            )
            mesh = init_device_mesh("cpu", (subject.world_size,))
            self._model = _SHARD[subject.implementation](self._model, mesh)
        self._x = torch.randn(4, _WIDTH)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._on_shards = fullshard.step_on_shards(torch.optim.AdamW(self._model.parameters()))
        self._plain = _plain_optimizer(self._model)
        self._num_steps = 1
        self._shards_first = False

    def warm_up(self) -> None:
        """Fill caches, and choose the steps of a round by what one takes."""
        for _ in range(_NUM_WARM_UP_STEPS):
            seconds = sum(self.run())
        self._num_steps = max(1, round(_SECONDS_FOR_A_ROUND / seconds))

    def run(self) -> StepSeconds:
        """Train one round and return each part's median over its steps."""
        steps = [self._step() for _ in range(self._num_steps)]
        return StepSeconds(*(median(column) for column in zip(*steps, strict=True)))

    def _step(self) -> StepSeconds:
        self._clock.seconds = 0.0
        compute = _seconds(self._forward_backward)
        backend = self._clock.seconds
        self._share_gradients()
        optimizer = _seconds(self._optimizer.step)
        # In turns: what runs second finds its code in the caches.
        self._shards_first = not self._shards_first
        on_shards = _seconds(self._on_shards.step) if self._shards_first else 0.0
        plain = _seconds(self._plain.step)
        on_shards = on_shards or _seconds(self._on_shards.step)
        self._plain.zero_grad()  # the engine uses memory of gradients again that nobody refers to
        return StepSeconds(compute, backend, optimizer, on_shards, plain)

    def _forward_backward(self) -> None:
        self._model.zero_grad()
        self._model(self._x).sum().backward()

    def _share_gradients(self) -> None:
        """Give the plain tensors the same gradients: arithmetic can be slow with some numbers."""
        (group,) = self._plain.param_groups
        for parameter, plain in zip(self._model.parameters(), group["params"], strict=True):
            plain.grad = None if parameter.grad is None else _local(parameter.grad)


def _shard_fsdp2(model: SmallModel, mesh: DeviceMesh, *, library: Any) -> nn.Module:
    for block in model.blocks:
        library.fully_shard(block, mesh=mesh)
    library.fully_shard(model, mesh=mesh)
    return model


def _shard_fsdp1(model: SmallModel, mesh: DeviceMesh, *, library: Any) -> nn.Module:
    wrapped: nn.Module = library.FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        auto_wrap_policy=ModuleWrapPolicy({SmallBlock}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    return wrapped


_SHARD: dict[str, Callable[[Any, DeviceMesh], nn.Module]] = {
    "fsdp1": partial(_shard_fsdp1, library=fsdp),
    "fsdp2": partial(_shard_fsdp2, library=fsdp),
    "fullshard": partial(_shard_fsdp2, library=fullshard),
    "fullshard-fsdp1": partial(_shard_fsdp1, library=fullshard),
}


def _plain_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the same optimizer over plain copies of the local tensors."""
    return torch.optim.AdamW([nn.Parameter(_local(p).clone()) for p in model.parameters()])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def build_host_training(_rank: Rank, *, subject: Subject) -> HostTraining:
    return HostTraining(subject)


@dataclass
class Measured:
    """Microseconds of host time per unit and step, and optimizer ratios, one entry per round.

    `backend_us` is the part of the former inside the fake backend's calls, `engine_us` the rest.
    """

    unit_us: list[float] = field(default_factory=list)
    backend_us: list[float] = field(default_factory=list)
    optimizer_ratio: list[float] = field(default_factory=list)
    shard_optimizer_ratio: list[float] = field(default_factory=list)

    @property
    def engine_us(self) -> list[float]:
        return [total - of_it for total, of_it in zip(self.unit_us, self.backend_us, strict=True)]


def measure(world_sizes: Sequence[int], *, num_rounds: int = 15) -> dict[Subject, Measured]:
    """Measure PyTorch's and our two APIs at every world size, against the unwrapped model."""
    subjects = [Subject(name, size) for size in world_sizes for name in _SHARD]
    progress = Progress("host", num_stages=num_rounds + 1)
    results = {subject: Measured() for subject in subjects}
    with ExitStack() as stack:
        groups = {}
        for subject in [LOCAL, *subjects]:
            build = partial(build_host_training, subject=subject)
            groups[subject] = stack.enter_context(RankGroup(str(subject), build, num_ranks=1))
        for group in groups.values():
            group.wait_imported()
        progress.advance("warms up")
        for group in groups.values():
            group.call("build")
            group.call("warm_up")
        for index in range(num_rounds):
            progress.advance(f"round {index + 1} of {num_rounds}")
            seconds: dict[Subject, StepSeconds] = {
                subject: group.call("run").values[0] for subject, group in groups.items()
            }
            for subject, result in results.items():
                _record(result, seconds[subject], seconds[LOCAL])
    progress.finish()
    return results


def _record(result: Measured, sharded: StepSeconds, local: StepSeconds) -> None:
    result.unit_us.append(1e6 * (sharded.compute - local.compute) / _NUM_UNITS)
    result.backend_us.append(1e6 * sharded.backend / _NUM_UNITS)
    result.optimizer_ratio.append(sharded.optimizer / sharded.plain_optimizer)
    result.shard_optimizer_ratio.append(sharded.shard_optimizer / sharded.plain_optimizer)


def over_fsdp2(results: dict[Subject, Measured], subject: Subject) -> Spread:
    """Return the ratio of host times to FSDP2's at the same world size, round by round."""
    base = results[Subject("fsdp2", subject.world_size)]
    return ratio_spread(results[subject].unit_us, base.unit_us)


def build_table(results: dict[Subject, Measured]) -> Table:
    headings = [
        "us per unit and step",
        "total",
        "of it backend",
        "engine",
        "total over FSDP2",
        "AdamW over plain tensors",
        "with step_on_shards",
    ]
    table = Table("host time, fake backend", headings)
    for subject, result in results.items():
        times = map(median, (result.unit_us, result.backend_us, result.engine_us))
        ratios = (
            over_fsdp2(results, subject),
            spread(result.optimizer_ratio),
            spread(result.shard_optimizer_ratio),
        )
        table.rows.append([str(subject), *(f"{t:.0f}" for t in times), *map(str, ratios)])
    table.notes = [
        f"{_NUM_BLOCKS} blocks and a root; less the unwrapped model's time in the same round"
    ]
    return table


def results_json(results: dict[Subject, Measured]) -> dict[str, Any]:
    return {
        "host": [{**subject._asdict(), **asdict(result)} for subject, result in results.items()]
    }


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.host", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--world-sizes", type=positive, nargs="+", default=[8, 1024])
    parser.add_argument("--rounds", type=positive, default=15)
    add_output_options(parser)
    return parser.parse_args()


def main() -> int:
    options = _parse_options()
    results = measure(options.world_sizes, num_rounds=options.rounds)
    emit(options, [build_table(results)], results_json(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
