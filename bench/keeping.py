r"""What units that stay unsharded within a budget buy over Gloo: step time at several budgets, beside what was planned.

    python -m bench.keeping --ranks 2
    unshare --net sh -c "ip link set lo up && tc qdisc add dev lo root tbf rate 1gbit burst 2mb latency 100ms \
        && python -m bench.keeping --ranks 2 --seq 64 --layers 4 --steps 1"

The second one is on a network of its own, whose rate is limited: there a rank waits for bytes, where else it waits for
processors that copy them.

Ranks of one model, which communicate by a process group. They record a trace, in which every unit is gathered again in
backward, and `keep_unsharded` chooses by it. In each round they train a few steps with every budget, in an order that
rotates; a ratio is to no budget in the same round. "planned" is what the trace says that the choice saves, of a step of
the same run. "by size" chooses without the trace.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import fullshard
from fullshard import KeptUnits

from .implementations import Training, Work
from .model import BatchSize, Shape
from .ranks import Rank, RankGroup
from .step import rotated
from .tables import Progress, Table, add_output_options, emit, median_interval, positive

_ALL = 1 << 40  # bytes
_NUM_TRACED = 5


class Setting(NamedTuple):
    """A share of the bytes of all units that gather again in backward, and whether a trace chooses among them."""

    name: str
    share: float
    has_trace: bool = True


SETTINGS = (
    Setting("none", 0.0),
    Setting("1/4", 0.25),
    Setting("1/2", 0.5),
    Setting("1/2 by size", 0.5, has_trace=False),
    Setting("all", 1.0),
)


class Keeping(Training):
    """One rank, whose units stay or do not."""

    def __init__(self, rank: Rank, folder: Path, work: Work) -> None:
        super().__init__(rank, "fullshard-pg", work)
        self._folder = folder

    def record(self, num_steps: int) -> int:
        """Record a trace; return the bytes of all units that gather again."""
        self.run(3)
        with fullshard.trace(self.model, self._folder, optimizer=self.optimizer):
            self.run(num_steps)
        return fullshard.keep_unsharded(self.model, _ALL).nbytes

    def keep(self, nbytes: int, has_trace: bool) -> KeptUnits:
        """Choose units, and train a step with them."""
        kept = fullshard.keep_unsharded(
            self.model, nbytes, trace=self._folder if has_trace else None
        )
        self.run(1)
        return kept

    def timed(self, num_steps: int) -> tuple[float, float]:
        """Return the seconds of a step, and those of this rank's processors, Gloo's threads among them."""
        begin = time.perf_counter(), time.process_time()
        self.run(num_steps)
        return (
            (time.perf_counter() - begin[0]) / num_steps,
            (time.process_time() - begin[1]) / num_steps,
        )


def build_keeping(rank: Rank, *, folder: Path, work: Work) -> Keeping:
    return Keeping(rank, folder, work)


class Measured(NamedTuple):
    """What was chosen, and of each round the seconds of a step on the slowest rank, and of all processors."""

    kept: KeptUnits
    step_seconds: list[float]
    cpu_seconds: list[float]


def measure(work: Work, *, num_rounds: int, num_steps: int) -> dict[str, Measured]:
    num_ranks = work.mesh_shape[0]
    found: dict[str, Measured] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress("keeping", num_stages=num_rounds * len(SETTINGS)) as progress,
        RankGroup(
            "keeping",
            partial(build_keeping, folder=Path(folder), work=work),
            num_ranks=num_ranks,
        ) as group,
    ):
        group.wait_imported()
        group.call("build")
        total = group.call("record", _NUM_TRACED).values[0]
        by_name = {setting.name: setting for setting in SETTINGS}
        for index in range(num_rounds):
            for name in rotated([*by_name], index):
                progress.advance(name)
                setting = by_name[name]
                every = group.call("keep", int(total * setting.share), setting.has_trace).values
                assert every.count(every[0]) == len(every), "ranks have chosen otherwise"
                own = found.setdefault(name, Measured(every[0], [], []))
                walls, cpus = zip(*group.call("timed", num_steps).values, strict=True)
                own.step_seconds.append(max(walls))
                own.cpu_seconds.append(sum(cpus))
    return found


def table_of(found: dict[str, Measured], *, title: str) -> Table:
    base = found["none"]
    table = Table(
        title,
        [
            *("budget", "units", "MiB", "step (ms)", "over none"),
            *("quickest", "planned", "CPU over none"),
        ],
    )
    for name, own in found.items():
        saved = own.kept.saved_s
        table.rows.append(
            [
                name,
                str(len(own.kept.units)),
                f"{own.kept.nbytes / 2**20:.1f}",
                f"{1e3 * median(own.step_seconds):.1f}",
                _over(own.step_seconds, base.step_seconds),
                f"{min(own.step_seconds) / min(base.step_seconds):.2f}",
                "" if not saved else f"{1 - saved / median(base.step_seconds):.2f}",
                _over(own.cpu_seconds, base.cpu_seconds),
            ]
        )
    table.notes += [
        "medians of ratios within a round, and where the median of all such rounds lies with 95 %",
        "quickest: the quickest round of each, which other programs disturbed the least",
    ]
    return table


def _over(values: Sequence[float], base: Sequence[float]) -> str:
    """Return the ratios of rounds, as text."""
    ratios = [value / other for value, other in zip(values, base, strict=True)]
    return "{:.2f} ({:.2f}-{:.2f})".format(*median_interval(ratios))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--batch", type=positive, default=1)
    parser.add_argument("--seq", type=positive, default=128)
    parser.add_argument("--layers", type=positive, default=8)
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--steps", type=positive, default=3)
    add_output_options(parser)
    options = parser.parse_args()
    work = Work(
        shape=Shape(num_layers=options.layers),
        batch=BatchSize(options.batch, options.seq),
        optimizer="fused",
        mesh_shape=(options.ranks,),
    )
    found = measure(work, num_rounds=options.rounds, num_steps=options.steps)
    title = f"{options.ranks} ranks, {work.batch}, Gloo"
    results = {
        name: {"kept": asdict(kept), "step_seconds": seconds, "cpu_seconds": cpu_seconds}
        for name, (kept, seconds, cpu_seconds) in found.items()
    }
    emit(options, [table_of(found, title=title)], {"setting": title, "budgets": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
