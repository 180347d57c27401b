"""Every benchmark in one table beside the goals.

    python -m bench                             about 40 minutes on 2 cores
    python -m bench --quick                     about 6: fewer rounds, settings and peers
    python -m bench --only 4-ranks alone        some parts; with --quick, fewer rounds of them
    python -m bench --out                       also bench/results/DATE-CPU.md and .json

A goal that is missed does not fail the run; losses that differ or a rank that fails do (exit code
1), after everything else has been measured. DeepSpeed is compared where it is installed, as
`make bench` does.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from . import alone, collectives, hiding, host, launches, memory, step
from .goals import (
    AHEAD,
    COLUMNS,
    FACES,
    HEADINGS,
    Goal,
    Row,
    Section,
    at_least,
    at_most,
    count_reached,
)
from .implementations import Work
from .model import BatchSize
from .ranks import RankError
from .tables import Table, as_json, machine

RESULTS = Path(__file__).parent / "results"
_NBYTES_BEYOND_CACHE = 64 << 20
_EVERYBODY = ("local", *COLUMNS)
_SHORT_LIST = ("local", "fsdp2", "fullshard", "fullshard-unmodified", "fullshard-fsdp1")
_PG = "fullshard-pg"


@dataclass
class Run:
    """What has been measured so far, and whether it may be trusted."""

    quick: bool = False
    all_peers: bool = True
    sections: list[Section] = field(default_factory=list)
    details: list[Table] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def num_rounds(self) -> int:
        return 3 if self.quick else 7


@dataclass(frozen=True)
class StepSetting:
    """A setting of `bench.step` and the limits on its ratios; everywhere we should be ahead."""

    work: Work
    over_local: float | None = None
    over_fsdp2: float | None = None
    pss_over_fsdp2: float | None = None
    num_rounds: int = 7
    num_steps: int = 2
    num_other_steps: int = 4  # to warm up, and to look at memory

    def plan(self, run: Run) -> step.Plan:
        return step.Plan(
            self.work,
            _EVERYBODY if run.all_peers else _SHORT_LIST,
            num_rounds=min(self.num_rounds, run.num_rounds),
            num_steps=self.num_steps,
            num_warm_up_steps=self.num_other_steps,
            num_memory_steps=self.num_other_steps,
        )


# Steps of four micro-batches, or of 16 times the tokens, take longer: fewer of them.
STEP_SETTINGS = {
    "2-ranks": StepSetting(Work(), 1.08, 0.65, 0.60),
    "4-ranks": StepSetting(Work(batch=BatchSize(1, 128), mesh_shape=(4,)), 1.20, 0.55, 0.60),
    "compute-bound": StepSetting(
        Work(batch=BatchSize(8, 256)), 1.03, 0.93, num_rounds=5, num_steps=1, num_other_steps=2
    ),
    "bf16": StepSetting(Work(precision="bf16")),
    "hsdp": StepSetting(Work(batch=BatchSize(1, 128), mesh_shape=(2, 2)), num_steps=1),
    "accumulate": StepSetting(
        Work(num_microbatches=4, sync="last"), num_rounds=5, num_steps=1, num_other_steps=2
    ),
    "accumulate-each": StepSetting(
        Work(num_microbatches=4, sync="each"), num_rounds=5, num_steps=1, num_other_steps=2
    ),
}


def run_step(run: Run, setting: StepSetting) -> None:
    plan, title = setting.plan(run), step.title_of(setting.work)
    batches = step.measure(plan, title=title)
    run.sections.append(step_section(plan, setting, batches))
    run.details.append(step.build_table(plan, batches, title=title))
    run.results[title] = step.results_json(plan, batches)
    if not step.losses_agree(batches, precision=setting.work.precision):
        run.failures.append(f"{title}: the implementations' losses differ; see --details")


def step_section(plan: step.Plan, setting: StepSetting, batches: Sequence[step.Batch]) -> Section:
    comparisons = step.compare(batches)
    fsdp2 = comparisons["fsdp2"]

    def row(what: str, values: dict[str, float], goal: Goal | None) -> Row:
        return Row(what, values, goal, plan.blanks)

    def ratios(of: str) -> dict[str, float]:
        spreads = {name: getattr(c, of) for name, c in comparisons.items()}
        return {name: value.median for name, value in spreads.items() if value is not None}

    pss = {name: c.pss_mb / fsdp2.pss_mb for name, c in comparisons.items()}
    rows = [
        row("time over local compute", ratios("over_local"), _limit(setting.over_local)),
        row("time over FSDP2", ratios("over_fsdp2"), _limit(setting.over_fsdp2)),
        row("time over the fastest of the others", ratios("over_fastest"), AHEAD),
        row("host memory (PSS) over FSDP2", pss, _limit(setting.pss_over_fsdp2)),
    ]
    return Section(step.title_of(setting.work), rows)


def _limit(limit: float | None) -> Goal | None:
    return None if limit is None else at_most(limit)


def run_alone(run: Run) -> None:
    """One rank over the unwrapped model."""
    names = alone.MEASURED if run.all_peers else _SHORT_LIST
    results = alone.measure(names, num_rounds=10 if run.quick else 40)
    wall = {name: alone.wall_ratio(results, name).median for name in results}
    cpu = {name: alone.cpu_ratio(results, name).median for name in results}
    rows = [
        Row("time over the unwrapped model", wall, at_most(1.01)),
        Row("CPU time over the unwrapped model", cpu, at_most(1.01)),
    ]
    run.sections.append(Section("one rank", rows))
    run.details.append(alone.build_table(results))
    run.results |= alone.results_json(results)


def run_host(run: Run) -> None:
    """Host time over FSDP2's, and at 1,024 ranks over the same implementation's at 8.

    At 1,024 ranks the fake backend's own calls, which copy the shard once for every rank, grow with
    the ranks whoever makes them; so the goal there is on the time without them.
    """
    results = host.measure([8, 1024], num_rounds=run.num_rounds)
    at_8, at_1024 = (
        {subject.implementation: r for subject, r in results.items() if subject.world_size == size}
        for size in (8, 1024)
    )
    over_fsdp2 = {name: host.over_fsdp2(results, host.Subject(name, 8)).median for name in at_8}
    growth = {name: median(at_1024[name].unit_us) / median(at_8[name].unit_us) for name in at_8}
    engines = {
        name: median(at_1024[name].engine_us) / median(at_8[name].engine_us) for name in at_8
    }
    rows = [
        Row("8 ranks: over FSDP2", over_fsdp2, at_most(0.25)),
        Row("1,024 ranks over 8", growth),
        Row("1,024 ranks over 8, less the backend's own", engines, at_most(1.0)),
    ]
    for size, measured in ((8, at_8), (1024, at_1024)):
        optimizers = {name: median(r.optimizer_ratio) for name, r in measured.items()}
        on_shards = {name: median(measured[name].shard_optimizer_ratio) for name in FACES}
        rows += [
            Row(f"{size:,} ranks: AdamW step over plain tensors", optimizers),
            Row(f"{size:,} ranks: the same with step_on_shards", on_shards, at_most(1.05)),
        ]
    run.sections.append(Section("host time per unit and step, fake backend", rows))
    run.details.append(host.build_table(results))
    run.results |= host.results_json(results)


def run_launches(run: Run) -> None:
    """Operations that a device is given beside the model's own, over FSDP2's."""
    results = launches.measure()
    rows = [
        Row(name, {"fullshard": launches.over_fsdp2(results, name)}, at_most(1.0, "fullshard"))
        for name in dict.fromkeys(result.model for result in results)
    ]
    run.sections.append(Section("operations a step over FSDP2, fake backend, 8 ranks", rows))
    run.details.append(launches.build_table(results))
    run.results |= launches.results_json(results)


def run_memory(run: Run) -> None:
    names = memory.SHARDED if run.all_peers else _SHORT_LIST[1:]
    results = memory.measure([4] if run.quick else [4, 40], implementations=names)
    rows = []
    for result in results:
        layers = f"{result.num_layers} layers"
        over_floor = {name: result.over_floor(name) for name in result.peaks}
        over_tight = {name: result.over_tight_floor(name) for name in result.peaks}
        pss = {name: p.pss / result.peaks["fsdp2"].pss for name, p in result.peaks.items()}
        rows += [
            Row(f"{layers}: peak over the floor", over_floor, at_most(1.05)),
            Row(f"{layers}: peak over the tight floor", over_tight),
            Row(f"{layers}: PSS over FSDP2", pss),
        ]
        run.details.append(memory.build_table(result))
    run.sections.append(Section("bytes of tensors per rank, 2 ranks", rows))
    run.results |= memory.results_json(results)


def run_collectives(run: Run) -> None:
    """Our collectives over a memory copy and over Gloo's own, which FSDP2's column shows."""
    settings = [
        collectives.Setting(num_ranks, mib << 20)
        for num_ranks in ([2] if run.quick else [2, 4])
        for mib in ([64] if run.quick else [1, 64])
    ]
    measured = collectives.measure(settings, num_rounds=run.num_rounds)
    rows = []
    for setting, results in measured.items():
        rows += collective_rows(setting, results)
        run.details.append(collectives.build_table(setting, results))
    run.sections.append(Section("collectives on one host", rows))
    run.results |= collectives.results_json(measured)


def collective_rows(setting: collectives.Setting, results: collectives.Results) -> Iterator[Row]:
    """Yield rows with goals where the bytes do not fit the cache.

    1 MiB is copied within it, which nothing that crosses processes can match.
    """
    forms = {
        "fsdp2": "Gloo",
        "fullshard": "fullshard peer memory",
        _PG: "fullshard process group",
    }
    is_large = setting.nbytes >= _NBYTES_BEYOND_CACHE
    for kind in ("all-gather", "reduce-scatter"):
        operations = {name: collectives.Operation(kind, form) for name, form in forms.items()}
        over_copy = {
            name: collectives.over_copy(results, operation).median
            for name, operation in operations.items()
        }
        goal = at_most(3.0, "fullshard") if is_large else None
        yield Row(f"{setting}: {kind} over a memory copy", over_copy, goal)
        faster = {_PG: collectives.over_gloo(results, operations[_PG]).median}
        goal = at_least(1.8, _PG) if is_large and kind == "reduce-scatter" else None
        yield Row(f"{setting}: {kind}, times as fast as Gloo's", faster, goal)


def run_hiding(run: Run) -> None:
    nbytes, seconds = 8 << 20, 0.04
    results = hiding.measure(nbytes=nbytes, seconds=seconds, num_rounds=run.num_rounds)
    shares = {name: hiding.hidden(results, name).median for name in ("fsdp2", _PG)}
    rows = [Row("share of communication hidden behind compute", shares)]
    run.sections.append(Section("over Gloo, where cores are free for it", rows))
    run.details.append(hiding.build_table(results, nbytes=nbytes, seconds=seconds))
    run.results |= hiding.results_json(results)


def _step_part(name: str) -> Callable[[Run], None]:
    return lambda run: run_step(run, STEP_SETTINGS[name])


PARTS: dict[str, Callable[[Run], None]] = {
    **{name: _step_part(name) for name in STEP_SETTINGS},
    "alone": run_alone,
    "host": run_host,
    "launches": run_launches,
    "memory": run_memory,
    "collectives": run_collectives,
    "hiding": run_hiding,
}
_QUICK_PARTS = ("2-ranks", "4-ranks", "alone", "host", "launches", "memory", "collectives")


def build_table(sections: Sequence[Section], *, seconds: float) -> Table:
    table = Table("all benchmarks", HEADINGS)
    for section in sections:
        table.rows.append([section.title])
        table.rows += [row.cells() for row in section.rows]
    num_reached, num_goals = count_reached(sections)
    notes = dict.fromkeys(note for section in sections for note in section.notes())
    table.notes = [
        f"{num_reached} of {num_goals} goals reached; {seconds / 60:.0f} minutes",
        "fullshard: fully_shard with step_on_shards; unmodified: without, FSDP2's program as it is; "
        "over Gloo: with step_on_shards, without peer memory; "
        "as FSDP1: FullyShardedDataParallel",
        *notes,
    ]
    return table


def write_files(folder: Path, summary: Table, run: Run) -> Path:
    """Write the tables as Markdown and everything measured as JSON, and return the former."""
    where = machine()
    cpu = re.sub(r"[^a-z0-9]+", "-", str(where["cpu"]).lower()).strip("-")
    path = folder / f"{where['date']}-{cpu}.md"
    folder.mkdir(parents=True, exist_ok=True)
    facts = [f"- {name}: {value}" for name, value in where.items() if value is not None]
    parts = ["# Benchmarks\n", "\n".join(facts) + "\n"]
    parts += [table.markdown() for table in [summary, *run.details]]
    path.write_text("\n".join(parts))
    path.with_suffix(".json").write_text(as_json(run.results) + "\n")
    return path


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="few rounds, settings and peers")
    parser.add_argument(
        "--only", nargs="+", choices=list(PARTS), metavar="PART", help="|".join(PARTS)
    )
    parser.add_argument("--details", action="store_true", help="also print every script's table")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--out",
        type=Path,
        nargs="?",
        const=RESULTS,
        metavar="DIR",
        help="also write Markdown and JSON there, by default in bench/results",
    )
    return parser.parse_args()


def main() -> int:
    options = _parse_options()
    start = time.perf_counter()
    run = Run(options.quick, all_peers=not options.quick or options.only is not None)
    names = options.only or (_QUICK_PARTS if options.quick else PARTS)
    for index, name in enumerate(names):
        print(f"bench: {name} ({index + 1} of {len(names)})", file=sys.stderr, flush=True)
        try:
            PARTS[name](run)
        except RankError as error:
            # The other parts' minutes are not lost.
            run.failures.append(f"{name}: {error}")
    summary = build_table(run.sections, seconds=time.perf_counter() - start)
    run.results["sections"] = [asdict(section) for section in run.sections]
    if options.out is not None:
        print(f"bench: wrote {write_files(options.out, summary, run)}", file=sys.stderr)
    if options.json:
        print(as_json(run.results))
    else:
        for table in [*(run.details if options.details else []), summary]:
            table.print()
    for failure in run.failures:
        print(f"bench: {failure}", file=sys.stderr)
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
