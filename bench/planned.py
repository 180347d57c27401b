"""Planned beside measured, on ranks of this machine: peak bytes of tensors, and seconds of a step.

    python -m bench.planned                       every setting of bench.home, results under bench/results/
    python -m bench.planned --only 0 3 --rounds 5

In each round the ranks are measured as `fullshard plan --calibrate` does it (`fullshard.tools.calibrate`), a step is
planned with that, and some steps are trained. Ratios are taken within a round; the table has their median.

A step counts if its ranks had a processor whenever they wanted one: the kernel tells how long they waited for one
(/proc/thread-self/schedstat). Where fewer than five of a round do, the five that waited least count, and the table says
how much of their time that was.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fullshard.local_ranks import num_cores
from fullshard.plan.simulator import follow_memory
from fullshard.plan.step import plan_step
from fullshard.plan.workload import Workload
from fullshard.planning.calibration import CalibratedCosts, MachineFigures, machine_of
from fullshard.planning.estimate import Estimate, estimate_step
from fullshard.planning.setup import trained_dtype
from fullshard.tools.calibrate import Model, measure

from .home import (
    HOMES,
    Home,
    HomeTraining,
    build_model,
    example_of,
    options_of,
    settings_of,
    units_of,
    workload_of,
)
from .ranks import Rank, RankGroup
from .tables import Progress, Table, add_output_options, emit, positive

_UNDISTURBED = 0.02  # of a step's time
_FEWEST = 5


class Timed(NamedTuple):
    """A step: its wall time, for how much of it the rank waited for a processor, and how much it had of one. In seconds."""

    wall_s: float
    delay_s: float
    processor_s: float


class PlannedHome:
    """One rank that is measured for plans, and trains."""

    def __init__(self, rank: Rank, home: Home) -> None:
        rank.init_gloo()
        self._home, self._rank = home, rank
        self._model = Model(
            partial(build_model, home),
            example_of(home),
            tuple(units_of(home)),
            options_of(home),
            workload_of(home),
        )
        self._training: HomeTraining | None = None

    def measure(self, seconds: float) -> MachineFigures:
        return measure(
            self._model,
            comm=self._home.comm,
            optimizers=(_optimizer(self._home),),
            seconds=seconds,
        )

    def peak_nbytes(self) -> int:
        """Begin to train, and return the most bytes of a step."""
        self._training = HomeTraining(self._rank, self._home)
        return self._training.peak_nbytes()

    def train(self, num_steps: int) -> list[Timed]:
        assert self._training is not None
        self._training.run(1)
        timed = []
        for _ in range(num_steps):
            delay_s, used, start = _delay_s(), time.process_time(), time.perf_counter()
            self._training.run(1)
            wall_s = time.perf_counter() - start
            timed.append(Timed(wall_s, _delay_s() - delay_s, time.process_time() - used))
        return timed


def _delay_s() -> float:
    """Return how long this thread has waited for a processor by now."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9


def build_planned(rank: Rank, *, home: Home) -> PlannedHome:
    return PlannedHome(rank, home)


def _optimizer(home: Home) -> str:
    return "adamw" if home.optimizer == "adamw" else f"adamw {home.optimizer}"


@dataclass
class Result:
    """A setting: bytes of rank 0, and for each round planned and measured seconds of a step.

    processor_s: time that a rank's threads had of a processor in these steps, times the ranks for each processor.
    delays: share of the steps that count in which their ranks waited for a processor. parts: of the last plan.
    """

    name: str
    planned_nbytes: int
    measured_nbytes: int
    planned_s: list[float] = field(default_factory=list)
    measured_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def memory_ratio(self) -> float:
        return self.planned_nbytes / self.measured_nbytes

    @property
    def ratio(self) -> float:
        return _median_ratio(self.planned_s, self.measured_s)

    @property
    def processor_ratio(self) -> float:
        return _median_ratio(self.planned_s, self.processor_s)


def _median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def run(home: Home, *, num_rounds: int, num_steps: int, seconds: float) -> Result:
    """Plan and measure one setting."""
    workload, settings = workload_of(home), settings_of(home)
    with ExitStack() as stack:
        build = partial(build_planned, home=home)
        group = stack.enter_context(RankGroup("planned", build, num_ranks=home.num_ranks))
        group.wait_imported()
        group.call("build")
        peak = group.call("peak_nbytes", timeout_seconds=900).values[0]
        planned = follow_memory(plan_step(workload, settings)).peak_nbytes
        result = Result(home.name, planned, peak)
        for _ in range(num_rounds):
            figures = group.call("measure", seconds, timeout_seconds=900).values[0]
            estimate = estimate_step(workload, settings, _costs(figures, home, workload))
            ranks = group.call("train", num_steps, timeout_seconds=900).values
            typical = _typical(ranks)
            turns = max(1.0, home.num_ranks / num_cores())
            result.planned_s.append(estimate.step_s)
            result.measured_s.append(typical.wall_s)
            result.processor_s.append(typical.processor_s * turns)
            result.delays.append(typical.delay_s)
            result.parts = _parts(estimate)
    return result


def _costs(figures: MachineFigures, home: Home, workload: Workload) -> CalibratedCosts:
    stored = trained_dtype(workload)
    return CalibratedCosts(
        machine_of(figures, 0.0),
        way=settings_of(home).sharding.way.name,
        dtypes=(home.policy.param_dtype or stored, stored),
        optimizer=_optimizer(home),
        shard_size=home.num_ranks,
    )


def _parts(estimate: Estimate) -> dict[str, float]:
    simulated = estimate.simulated
    return {
        "compute": simulated.computing_s - estimate.optimizer_s,
        "optimizer": estimate.optimizer_s,
        "host": simulated.host_bound_s,
        "communication": sum(simulated.exposed_s.values()) + estimate.contention_s,
    }


def _typical(ranks: Sequence[Sequence[Timed]]) -> Timed:
    """Return medians of the steps that count; delay_s as a share."""
    steps = [
        Timed(
            max(each.wall_s for each in step),
            max(each.delay_s / each.wall_s for each in step),
            max(each.processor_s for each in step),
        )
        for step in zip(*ranks, strict=True)
    ]
    steps.sort(key=lambda step: step.delay_s)
    num = max(_FEWEST, sum(step.delay_s <= _UNDISTURBED for step in steps))
    return Timed(*map(statistics.median, zip(*steps[:num], strict=True)))


def build_table(results: Sequence[Result]) -> Table:
    headings = ["", "MB planned", "measured", "ratio", "ms planned"]
    headings += ["measured", "ratio", "waited", "processor", "ratio"]
    table = Table("planned beside measured", headings)
    for each in results:
        table.rows.append(
            [
                each.name,
                f"{each.planned_nbytes / 1e6:.2f}",
                f"{each.measured_nbytes / 1e6:.2f}",
                f"{each.memory_ratio:.4f}",
                f"{1e3 * statistics.median(each.planned_s):.0f}",
                f"{1e3 * statistics.median(each.measured_s):.0f}",
                f"{each.ratio:.3f}",
                f"{statistics.median(each.delays):.0%}",
                f"{1e3 * statistics.median(each.processor_s):.0f}",
                f"{each.processor_ratio:.3f}",
            ]
        )
    errors = [abs(each.ratio - 1) for each in results]
    others = [abs(each.processor_ratio - 1) for each in results]
    memory = max(abs(each.memory_ratio - 1) for each in results)
    table.notes = [
        f"step time off by {statistics.median(errors):.1%} in the median, {max(errors):.1%} at worst; "
        f"memory by {memory:.3%} at worst",
        f"from the time that ranks had of a processor, by {statistics.median(others):.1%} in the median, "
        f"{max(others):.1%} at worst",
        "ratios are planned over measured, medians of rounds; waited: share of a step in which its ranks waited for a "
        "processor, since other programs ran",
        f"load average at the end: {os.getloadavg()[0]:.1f}, on {os.cpu_count()} processors",
    ]
    return table


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.planned", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--steps", type=positive, default=12)
    parser.add_argument("--seconds", type=float, default=2.0, help="for passes of the model")
    parser.add_argument("--only", type=int, nargs="+", default=list(range(len(HOMES))))
    add_output_options(parser)
    return parser.parse_args()


def main() -> int:
    options = _parse_options()
    results = []
    with Progress("planned", num_stages=len(options.only)) as progress:
        for number in options.only:
            progress.advance(HOMES[number].name)
            results.append(
                run(
                    HOMES[number],
                    num_rounds=options.rounds,
                    num_steps=options.steps,
                    seconds=options.seconds,
                )
            )
            print(build_table(results[-1:]).plain(), file=sys.stderr)
    values: dict[str, Any] = {"planned": [asdict(result) for result in results]}
    emit(options, [build_table(results)], values)
    return 0


if __name__ == "__main__":
    sys.exit(main())
