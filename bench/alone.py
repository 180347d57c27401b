"""What one rank costs over the unwrapped model, to a percent.

    python -m bench.alone --rounds 40

At world size 1 nothing has to move, so wrapping should cost nothing. One percent is less than what
a busy machine adds to any single step; what finds it all the same:

- Every implementation has a process of its own, all bound to the same core; only one works at a
  time.
- A turn is one step, so the turns of a round are seconds apart, and their ratio is taken within
  the round. The order of turns is reversed in every second round.
- Beside wall time stands the CPU time of the process (user and system, all its threads), which
  does not run while somebody else has the core.
- The median of the ratios comes with its 95 % interval, by order statistics.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

from .implementations import IMPLEMENTATIONS, Training, Work, why_not
from .ranks import Rank, RankGroup
from .step import rotated
from .tables import (
    Interval,
    Progress,
    Table,
    add_output_options,
    emit,
    median_interval,
    positive,
)

WORK = Work(mesh_shape=(1,))
BASE = "local"
MEASURED = ("local", "ddp", "fsdp1", "fsdp2", "deepspeed", "fullshard", "fullshard-fsdp1")
_NUM_WARM_UP_STEPS = 5


class Turn(NamedTuple):
    """Seconds of one step."""

    wall: float
    cpu: float


class TimedTraining(Training):
    """The only rank of an implementation, on the core that all of them share."""

    def __init__(self, rank: Rank, implementation: str) -> None:
        # Before any thread starts: threads inherit it.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        super().__init__(rank, implementation, WORK)

    def turn(self) -> Turn:
        wall, cpu = time.perf_counter(), time.process_time()
        self.step()
        return Turn(time.perf_counter() - wall, time.process_time() - cpu)


def build_timed(rank: Rank, *, implementation: str) -> TimedTraining:
    return TimedTraining(rank, implementation)


@dataclass
class Measured:
    """One entry per round."""

    wall_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)


Results = dict[str, Measured]


def measure(implementations: Sequence[str] = MEASURED, *, num_rounds: int = 40) -> Results:
    names = [name for name in implementations if why_not(name, WORK) is None]
    results = {name: Measured() for name in names}
    with Progress("one rank", num_stages=num_rounds + 1) as progress, ExitStack() as stack:
        progress.advance("warms up")
        groups = {}
        for name in names:
            build = partial(build_timed, implementation=name)
            groups[name] = stack.enter_context(RankGroup(name, build, num_ranks=1))
        for group in groups.values():
            group.wait_imported()
            group.call("build")
            group.call("run", _NUM_WARM_UP_STEPS)
        for index in range(num_rounds):
            progress.advance(f"round {index + 1} of {num_rounds}")
            order = rotated(names, index // 2)
            for name in reversed(order) if index % 2 else order:
                turn: Turn = groups[name].call("turn").values[0]
                results[name].wall_seconds.append(turn.wall)
                results[name].cpu_seconds.append(turn.cpu)
    return results


def wall_ratio(results: Results, name: str) -> Interval:
    return _ratio(results[name].wall_seconds, results[BASE].wall_seconds)


def cpu_ratio(results: Results, name: str) -> Interval:
    return _ratio(results[name].cpu_seconds, results[BASE].cpu_seconds)


def _ratio(values: Sequence[float], base: Sequence[float]) -> Interval:
    return median_interval([value / other for value, other in zip(values, base, strict=True)])


def build_table(results: Results) -> Table:
    headings = ["", "step ms", "wall over unwrapped", "CPU time over unwrapped"]
    table = Table("one rank against the unwrapped model", headings)
    for name, measured in results.items():
        milliseconds = 1e3 * median_interval(measured.wall_seconds).median
        ratios = (wall_ratio(results, name), cpu_ratio(results, name))
        table.rows.append([name, f"{milliseconds:.0f}", *map(str, ratios)])
    num_rounds = len(results[BASE].wall_seconds)
    table.notes = [
        f"median of {num_rounds} rounds of one step, and where the true median lies with 95 %"
    ]
    return table


def results_json(results: Results) -> dict[str, Any]:
    return {"alone": {name: asdict(measured) for name, measured in results.items()}}


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.alone", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--rounds", type=positive, default=40)
    others = [name for name in IMPLEMENTATIONS if name != BASE]
    parser.add_argument("--impl", nargs="+", choices=others, default=list(MEASURED[1:]))
    add_output_options(parser)
    return parser.parse_args()


def main() -> int:
    options = _parse_options()
    results = measure([BASE, *options.impl], num_rounds=options.rounds)
    emit(options, [build_table(results)], results_json(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
