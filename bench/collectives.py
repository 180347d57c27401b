"""All-gather and reduce-scatter on one host, over a memory copy of the same bytes.

    python -m bench.collectives --ranks 2 4 --mib 1 64

The bytes are those of the full tensor: what an all-gather writes on each rank, and what a
reduce-scatter reads. All ranks copy memory at the same time, as they would communicate at the same
time. An operation's time is the slowest rank's, per call, over a few calls in a row.

fullshard's operations are timed the way the engine uses them: gradients and parameters lie where
the engine has them, and peer memory pays for the fences that make reading it safe.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fullshard.comm.interface import Comm, Sum
from fullshard.comm.select import select_comm
from fullshard.plan.builders import rows_layout
from fullshard.plan.layout import BucketLayout, ParamSpec
from fullshard.policies import CommChoice

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

MEMORY_COPY = "memory copy"
_WIDTH = 512  # elements of a row
_ROWS_OF_A_MIB = (1 << 20) // (4 * _WIDTH)
_SECONDS_FOR_A_TURN = 0.2
_MAX_CALLS = 200


# The names as of torch 2.13, which warns about the old ones that torch 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Operation(NamedTuple):
    """A collective in one form; `kind` groups the forms that have the same result."""

    kind: str
    form: str

    def __str__(self) -> str:
        return f"{self.kind}, {self.form}" if self.form else self.kind


class Collectives:
    """One rank's buffers of one size, and every operation on them as a call without arguments."""

    def __init__(self, rank: Rank) -> None:
        rank.init_gloo()
        self._num_ranks = rank.count
        self._calls: dict[Operation, Callable[[], object]] = {}
        self._num_calls: dict[Operation, int] = {}

    def allocate(self, nbytes: int) -> list[Operation]:
        """Make buffers for a full tensor of `nbytes` float32 and return the operations."""
        full = torch.ones(nbytes // 4)
        other = torch.ones(nbytes // 4)
        shard = torch.ones(nbytes // 4 // self._num_ranks)

        def exchange_and_sum() -> None:
            dist.all_to_all_single(other, full)
            torch.sum(other.view(self._num_ranks, -1), dim=0, out=shard)

        self._calls = {
            Operation(MEMORY_COPY, ""): lambda: other.copy_(full),
            Operation("all-gather", "Gloo"): lambda: _all_gather(full, shard),
            Operation("reduce-scatter", "Gloo"): lambda: _reduce_scatter(shard, full),
            Operation("reduce-scatter", "Gloo all-to-all + sum"): exchange_and_sum,
        }
        for choice in (CommChoice.PROCESS_GROUP, CommChoice.PEER_MEMORY):
            self._calls |= _fullshard_calls(choice, full)
        return list(self._calls)

    def warm_up(self, operation: Operation) -> None:
        """Touch all memory, then agree on how many calls fill a turn."""
        call = self._calls[operation]
        call()
        dist.barrier()
        start = time.perf_counter()
        call()
        slowest = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        num_calls = int(_SECONDS_FOR_A_TURN / slowest.item())
        self._num_calls[operation] = min(_MAX_CALLS, max(1, num_calls))

    def run(self, operation: Operation) -> float:
        """Return this rank's seconds per call."""
        call, num_calls = self._calls[operation], self._num_calls[operation]
        dist.barrier()
        start = time.perf_counter()
        for _ in range(num_calls):
            call()
        return (time.perf_counter() - start) / num_calls


def _fullshard_calls(
    choice: CommChoice, gradient: torch.Tensor
) -> dict[Operation, Callable[[], object]]:
    """Return the engine's operations on a unit with one parameter as large as `gradient`."""
    assert dist.group.WORLD is not None
    comm = select_comm(dist.group.WORLD, torch.device("cpu"), choice)
    shape = (gradient.numel() // _WIDTH, _WIDTH)
    spec = ParamSpec("weight", shape, torch.float32, torch.float32)
    (bucket,) = rows_layout([spec], shard_size=comm.size, rule=comm.rule).buckets
    form = f"fullshard {choice.value.replace('_', ' ')}"
    calls: dict[Operation, Callable[[], object]] = {
        Operation("all-gather", form): _all_gather_call(comm, bucket),
        Operation("reduce-scatter", form): _reduce_scatter_call(comm, bucket, gradient.view(shape)),
    }
    if choice is CommChoice.PEER_MEMORY:
        calls[Operation("all-gather", f"{form}, in place")] = lambda: comm.fence("bench")
    return calls


def _all_gather_call(comm: Comm, bucket: BucketLayout) -> Callable[[], None]:
    shards = comm.allocate_shards(bucket, torch.device("cpu"), pin_memory=False)
    unsharded = torch.zeros(bucket.unsharded_numel)

    def call() -> None:
        comm.fence("bench: shards are written")
        comm.all_gather(shards, unsharded, label="bench").wait()
        comm.fence("bench: shards are read")

    return call


def _reduce_scatter_call(
    comm: Comm, bucket: BucketLayout, gradient: torch.Tensor
) -> Callable[[], None]:
    comm.prepare([comm.staged_nbytes(bucket, torch.float32)])
    out = torch.zeros(bucket.shard_numel)

    def call() -> None:
        comm.reduce_scatter(bucket, [gradient], lambda: out, Sum(torch.float32)).wait()

    return call


@dataclass
class Measured:
    """Seconds per call of one operation: the slowest rank's, one entry per round."""

    seconds: list[float] = field(default_factory=list)


Results = dict[Operation, Measured]


class Setting(NamedTuple):
    num_ranks: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.num_ranks} ranks, {self.nbytes >> 20} MiB"


def measure(settings: Sequence[Setting], *, num_rounds: int = 7) -> dict[Setting, Results]:
    """Time every operation in every setting; operations take turns within a round."""
    results = {}
    with Progress("collectives", num_stages=len(settings)) as progress:
        for setting in settings:
            progress.advance(str(setting))
            with RankGroup("collectives", Collectives, num_ranks=setting.num_ranks) as group:
                group.wait_imported()
                results[setting] = _measure_setting(group, setting.nbytes, num_rounds)
    return results


def _measure_setting(group: RankGroup, nbytes: int, num_rounds: int) -> Results:
    group.call("build")
    operations: list[Operation] = group.call("allocate", nbytes).values[0]
    for operation in operations:
        group.call("warm_up", operation)
    results = {operation: Measured() for operation in operations}
    for index in range(num_rounds):
        start = index % len(operations)
        for operation in [*operations[start:], *operations[:start]]:
            results[operation].seconds.append(max(group.call("run", operation).values))
    return results


def over_copy(results: Results, operation: Operation) -> Spread:
    copy = results[Operation(MEMORY_COPY, "")]
    return ratio_spread(results[operation].seconds, copy.seconds)


def over_gloo(results: Results, operation: Operation) -> Spread:
    """How many times faster than Gloo's own collective with the same result."""
    gloo = results[Operation(operation.kind, "Gloo")]
    return ratio_spread(gloo.seconds, results[operation].seconds)


def build_table(setting: Setting, results: Results) -> Table:
    table = Table(f"collectives: {setting}", ["", "ms", "over memory copy", "faster than Gloo"])
    for operation, measured in results.items():
        milliseconds = spread([1e3 * seconds for seconds in measured.seconds])
        row = [str(operation), f"{milliseconds.median:.3f}", str(over_copy(results, operation))]
        faster = "" if operation.kind == MEMORY_COPY else str(over_gloo(results, operation))
        table.rows.append([*row, faster])
    return table


def results_json(results: dict[Setting, Results]) -> dict[str, Any]:
    return {
        "collectives": [
            {**setting._asdict(), **operation._asdict(), **asdict(measured)}
            for setting, operations in results.items()
            for operation, measured in operations.items()
        ]
    }


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.collectives", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--ranks", type=positive, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=positive, nargs="+", default=[1, 64])
    parser.add_argument("--rounds", type=positive, default=7)
    add_output_options(parser)
    options = parser.parse_args()
    for num_ranks in options.ranks:
        if _ROWS_OF_A_MIB % num_ranks:
            parser.error(f"--ranks {num_ranks} does not divide {_ROWS_OF_A_MIB} rows of a MiB")
    return options


def main() -> int:
    options = _parse_options()
    settings = [Setting(ranks, mib << 20) for ranks in options.ranks for mib in options.mib]
    results = measure(settings, num_rounds=options.rounds)
    tables = [build_table(setting, measured) for setting, measured in results.items()]
    emit(options, tables, results_json(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
