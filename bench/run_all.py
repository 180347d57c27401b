"""Every benchmark in one table beside the goals.

    python -m bench.run_all            about 25 minutes on 2 cores
    python -m bench.run_all --quick    under 5 minutes: fewer rounds, settings and peers

A goal that is missed does not fail the run; losses that differ or a rank that fails do (exit code
1), after everything else has been measured.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from . import collectives, host, memory, step
from .implementations import IMPLEMENTATIONS, Work
from .model import BatchSize
from .ranks import RankError
from .tables import Table, add_output_options, emit

_COLUMNS = {"ddp": "DDP", "fsdp1": "FSDP1", "fsdp2": "FSDP2", "fullshard": "fullshard"}
_NBYTES_BEYOND_CACHE = 64 << 20
_SHORT_LIST = ("local", "fsdp2", "fullshard")


@dataclass(frozen=True)
class Row:
    """One line of the table: a number per implementation, and the limit fullshard should meet."""

    what: str
    values: Mapping[str, float]
    limit: float | None
    digits: int = 3

    @property
    def is_reached(self) -> bool | None:
        return None if self.limit is None else self.values["fullshard"] <= self.limit

    def cells(self) -> list[str]:
        texts = [
            f"{self.values[name]:,.{self.digits}f}" if name in self.values else ""
            for name in _COLUMNS
        ]
        goal = "" if self.limit is None else f"<= {self.limit:.2f}"
        reached = {None: "", True: "yes", False: "no"}[self.is_reached]
        return [self.what, *texts, goal, reached]


@dataclass
class Run:
    """What has been measured so far, and whether it may be trusted."""

    rows: list[Row] = field(default_factory=list)
    details: list[Table] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    losses_agree: bool = True
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class StepGoals:
    """A setting of `bench.step` and the limits on its ratios; None is shown without a goal."""

    plan: step.Plan
    over_local: float | None = None
    over_fsdp2: float | None = None
    pss_over_fsdp2: float | None = None


def step_settings(*, quick: bool) -> Iterator[StepGoals]:
    """Yield the settings of the step benchmark, the most telling first."""
    names = _SHORT_LIST if quick else tuple(IMPLEMENTATIONS)
    num_rounds = 3 if quick else 7

    def plan(work: Work, *, num_steps: int = 2) -> step.Plan:
        return step.Plan(work, names, num_rounds=num_rounds, num_steps=num_steps)

    yield StepGoals(plan(Work()), 1.08, 0.65, pss_over_fsdp2=0.60)
    yield StepGoals(plan(Work(batch=BatchSize(1, 128), mesh_shape=(4,))), 1.20, 0.55)
    if quick:
        return
    large = Work(batch=BatchSize(8, 256))
    yield StepGoals(step.Plan(large, _SHORT_LIST, num_rounds=3, num_steps=1), 1.03, 0.93)
    yield StepGoals(plan(Work(precision="bf16")), over_fsdp2=1.0)
    yield StepGoals(
        plan(Work(batch=BatchSize(1, 128), mesh_shape=(2, 2)), num_steps=1), over_fsdp2=1.0
    )
    yield StepGoals(plan(Work(num_microbatches=4), num_steps=1), over_fsdp2=1.0)
    alone = step.Plan(Work(mesh_shape=(1,)), _SHORT_LIST, num_rounds=num_rounds, num_steps=2)
    yield StepGoals(alone, over_local=1.01)


def run_steps(run: Run, *, quick: bool) -> None:
    for goals in step_settings(quick=quick):
        work = goals.plan.work
        title = step.title_of(work)
        results = step.measure(goals.plan, title=title)
        comparisons = step.compare(results)
        over_local = {n: c.over_local.median for n, c in comparisons.items() if c.over_local}
        over_fsdp2 = {n: c.over_fsdp2.median for n, c in comparisons.items() if c.over_fsdp2}
        pss = {n: c.pss_mb / comparisons["fsdp2"].pss_mb for n, c in comparisons.items()}
        run.rows += [
            Row(f"{title}: time over local", over_local, goals.over_local),
            Row(f"{title}: time over FSDP2", over_fsdp2, goals.over_fsdp2),
            Row(f"{title}: PSS over FSDP2", pss, goals.pss_over_fsdp2),
        ]
        run.details.append(step.build_table(goals.plan, results, title=title))
        run.results[title] = step.results_json(goals.plan, results)
        run.losses_agree &= step.losses_agree(results, precision=work.precision)


def run_host(run: Run, *, quick: bool) -> None:
    """Host time at 8 ranks, and at 1,024 over FSDP2's time at 8: it should not grow with ranks."""
    results = host.measure([8, 1024], num_rounds=3 if quick else 7)
    base = results[host.Subject("fsdp2", 8)]
    for world_size in (8, 1024):
        subjects = {
            name: results[host.Subject(name, world_size)] for name in ("fsdp2", "fullshard")
        }
        totals = {n: median(r.unit_us) / median(base.unit_us) for n, r in subjects.items()}
        engines = {n: r.engine_us / base.engine_us for n, r in subjects.items()}
        optimizers = {name: median(r.optimizer_ratio) for name, r in subjects.items()}
        ranks = f"{world_size:,} ranks"
        run.rows += [
            Row(
                f"host time per unit, {ranks}, over FSDP2 at 8", totals, _goal_of_total(world_size)
            ),
            Row(f"host time per unit, {ranks}, less the fake backend's", engines, 0.25),
            Row(f"AdamW step over plain tensors, {ranks}", optimizers, 1.05),
        ]
    run.details.append(host.build_table(results))
    run.results |= host.results_json(results)


def _goal_of_total(world_size: int) -> float | None:
    """At 1,024 ranks the fake backend's own calls take longer than the goal allows in all."""
    return 0.25 if world_size == 8 else None


def run_memory(run: Run, *, quick: bool) -> None:
    implementations = ("fsdp2", "fullshard") if quick else memory.SHARDED
    results = memory.measure([4] if quick else [4, 40], implementations=implementations)
    for result in results:
        layers = f"{result.num_layers} layers"
        over_floor = {name: result.over_floor(name) for name in result.peaks}
        over_tight = {name: result.over_tight_floor(name) for name in result.peaks}
        run.rows += [
            Row(f"peak tensor bytes over floor, {layers}", over_floor, 1.05),
            Row(f"peak tensor bytes over tight floor, {layers}", over_tight, None),
        ]
        run.details.append(memory.build_table(result))
    run.results |= memory.results_json(results)


def run_collectives(run: Run, *, quick: bool) -> None:
    """Collectives over a memory copy; FSDP2's column is the Gloo call that it makes."""
    sizes = [64] if quick else [1, 64]
    settings = [
        collectives.Setting(num_ranks, mib << 20)
        for num_ranks in ([2] if quick else [2, 4])
        for mib in sizes
    ]
    measured = collectives.measure(settings, num_rounds=3 if quick else 7)
    forms = {"fsdp2": "Gloo", "fullshard": "fullshard peer memory"}
    for setting, results in measured.items():
        for kind in ("all-gather", "reduce-scatter"):
            ratios = {
                name: collectives.over_copy(results, collectives.Operation(kind, form)).median
                for name, form in forms.items()
            }
            # 1 MiB is copied within the cache, which nothing that crosses processes can match.
            limit = 3.0 if setting.nbytes >= _NBYTES_BEYOND_CACHE else None
            run.rows.append(Row(f"{kind} over memory copy, {setting}", ratios, limit))
        run.details.append(collectives.build_table(setting, results))
    run.results |= collectives.results_json(measured)


def build_table(run: Run, *, seconds: float) -> Table:
    table = Table("all benchmarks", ["", *_COLUMNS.values(), "goal", "reached"])
    table.rows = [row.cells() for row in run.rows]
    goals = [row.is_reached for row in run.rows if row.is_reached is not None]
    table.notes = [f"{sum(goals)} of {len(goals)} goals reached; {seconds / 60:.0f} minutes"]
    return table


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="under 5 minutes")
    parser.add_argument("--details", action="store_true", help="also print every script's table")
    add_output_options(parser)
    return parser.parse_args()


def main() -> int:
    options = _parse_options()
    run, start = Run(), time.perf_counter()
    parts: list[Callable[..., None]] = [run_steps, run_host, run_memory, run_collectives]
    for part in parts:
        try:
            part(run, quick=options.quick)
        except RankError as error:
            # The other parts' minutes are not lost.
            run.failures.append(str(error))
    tables = run.details if options.details else []
    summary = build_table(run, seconds=time.perf_counter() - start)
    run.results["rows"] = [asdict(row) for row in run.rows]
    emit(options, [*tables, summary], run.results)
    if not run.losses_agree:
        run.failures.append("the implementations' losses differ; see --details")
    for failure in run.failures:
        print(f"bench: {failure}", file=sys.stderr)
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
