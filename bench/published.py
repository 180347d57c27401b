"""Fit the planner's constants on published runs, and score it on runs that it was not fitted to.

    python -m bench.published RUNS.csv                 # scores with the constants as they are
    python -m bench.published RUNS.csv --fit           # fits, leaves out one source at a time, prints constants
    python -m bench.published RUNS.csv --pictures docs/images

The step of a run is planned once, and simulated for every constant that is tried: each step of the fit is along slopes.
Constants of the allocator are means. Needs scipy
(`pip install "fullshard[bench]"`).
"""

import argparse
import collections
import dataclasses
import importlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fullshard.plan.step import plan_step
from fullshard.planning.costs import CONTEXT_NBYTES, FITTED, SPREAD, Constants, Costs
from fullshard.planning.estimate import Estimate, time_step
from fullshard.planning.published import (
    PublishedRun,
    UnsupportedRowError,
    estimate_run,
    predict_row,
    published_run,
    read_rows,
)

GIB = 1 << 30
# Where a constant is looked for, and how far it may go: the deviation of its logarithm. A constant that no run
# determines stays where it is.
EXPECTED = Constants(attention=0.8, traffic=0.85, rows=0.85, network=0.9, contention=0.4)
SPREADS = {
    "matmul": 0.06,
    "attention": 0.15,
    "attention_triton": 0.4,
    "traffic": 0.3,
    "rows": 0.3,
    "fp8": 0.3,
    "power": 0.1,
    "network": 0.15,
    "contention": 0.3,
}
OF_MEMORY = ("reserved", "reserved_growing", "device")
# An error from which on it counts less: sources of one configuration differ by as much.
LOUD = 0.07
PARTS = ("traffic", "rows", "network")  # of a nominal rate, which nothing exceeds
STEP = 0.05  # by which a constant is made larger for its slope
MOST_STEPS = 6


class Row(NamedTuple):
    """A row with its measured seconds and GiB, None where nobody says them."""

    values: Mapping[str, str]
    step_s: float | None
    peak_gib: float | None

    @property
    def source(self) -> str:
        return self.values["id"][:2]


class Prepared(NamedTuple):
    """A row and its estimated step, of which other constants change the times alone."""

    row: Row
    run: PublishedRun
    estimate: Estimate


def rows_of(path: Path) -> list[Row]:
    """Read a table, and of it what can be predicted."""

    def number(values: Mapping[str, str], column: str) -> float | None:
        return float(values[column]) if values.get(column) else None

    return [
        Row(values, number(values, "iter_time_s"), number(values, "peak_mem_gib"))
        for values in read_rows(path)
    ]


def prepare(row: Row) -> Prepared:
    """Plan a row's step. Raises UnsupportedRowError."""
    run = published_run(row.values)
    if run.batch.checkpointing == "unknown":
        run = run._replace(batch=dataclasses.replace(run.batch, checkpointing="none"))
    return Prepared(row, run, estimate_run(run)[1])


def error(prepared: Prepared, constants: Constants) -> float:
    """Return the logarithm of a step's seconds with other constants over those measured."""
    planned, run = prepared.estimate, prepared.run
    costs = Costs(run.machine, run.manner, constants)
    step = (
        plan_step(planned.workload, planned.settings) if planned.offload != "none" else planned.step
    )
    found = time_step(step, planned.workload, planned.settings, costs, planned.offload)
    return math.log(run.step_seconds(found) / (prepared.row.step_s or 1))


class Slopes(NamedTuple):
    """Errors of rows with some constants, and their derivatives by logarithms of these (rows, constants)."""

    constants: Constants
    errors: Any
    slopes: Any

    def of(self, chosen: Sequence[int]) -> "Slopes":
        """Return those of some rows."""
        return Slopes(self.constants, self.errors[chosen], self.slopes[chosen])


def _logs(constants: Constants) -> Any:
    numpy = importlib.import_module("numpy")
    return numpy.log([getattr(constants, name) for name in SPREADS])


def slopes_at(prepared: Sequence[Prepared], constants: Constants) -> Slopes:
    """Time all steps with constants, and with each of them a little larger."""
    numpy = importlib.import_module("numpy")

    def errors(tried: Constants) -> Any:
        return numpy.array([error(each, tried) for each in prepared])

    at = errors(constants)
    larger = [
        dataclasses.replace(constants, **{name: getattr(constants, name) * (1 + STEP)})
        for name in SPREADS
    ]
    by_name = [(errors(each) - at) / math.log(1 + STEP) for each in larger]
    return Slopes(constants, at, numpy.stack(by_name, axis=1))


def solve(found: Slopes) -> Constants:
    """Return the constants that are best by slopes: least squares of logarithms, of loud ones less."""
    numpy = importlib.import_module("numpy")
    optimize = importlib.import_module("scipy.optimize")
    expected, num_rows = _logs(EXPECTED), len(found.errors)
    deviations = numpy.array(list(SPREADS.values()))
    start = _logs(found.constants)

    def residuals(x: Any) -> Any:
        errors = found.errors + found.slopes @ (x - start)
        return numpy.concatenate([errors, (x - expected) / deviations * LOUD])

    def loss(squares: Any) -> Any:
        soft = numpy.stack(
            [2 * ((1 + squares) ** 0.5 - 1), (1 + squares) ** -0.5, -0.5 * (1 + squares) ** -1.5]
        )
        plain = numpy.stack([squares, numpy.ones_like(squares), numpy.zeros_like(squares)])
        soft[:, num_rows:] = plain[:, num_rows:]
        return soft

    highest = numpy.array([1e-9 if name in PARTS else numpy.inf for name in SPREADS])
    solved = optimize.least_squares(
        residuals,
        numpy.minimum(start, highest - 1e-9),
        loss=loss,
        f_scale=LOUD,
        bounds=(-numpy.inf, highest),
    )
    values = (float(f"{value:.3g}") for value in numpy.exp(solved.x).tolist())
    return dataclasses.replace(found.constants, **dict(zip(SPREADS, values, strict=True)))


def fit(prepared: Sequence[Prepared]) -> Slopes:
    """Return the constants that predict rows best, with slopes there: steps along slopes, until they stay."""
    found = slopes_at(prepared, FITTED)
    for _ in range(MOST_STEPS):
        solved = solve(found)
        print(f"  {solved}", flush=True)
        moved = abs(_logs(solved) - _logs(found.constants)).max()
        found = slopes_at(prepared, solved)
        if moved < 0.02:
            break
    return found


class Held(NamedTuple):
    """A row's measured bytes and those of an allocator's pools, and the constant between them; "allocated" has none."""

    source: str
    constant: str
    measured: float
    pooled: float


def held_by(rows: Sequence[Row]) -> list[Held]:
    """Return what rows hold. The driver's context is in neither."""
    plain = dataclasses.replace(FITTED, **dict.fromkeys(OF_MEMORY, 1.0))
    found = []
    for row in rows:
        if row.peak_gib:
            constant = published_run(row.values).held_as
            context = CONTEXT_NBYTES if constant == "device" else 0
            pooled = predict_row(row.values, plain).peak_nbytes
            measured = row.peak_gib * GIB
            found.append(Held(row.source, constant, measured - context, pooled - context))
    return found


def fit_memory(held: Sequence[Held]) -> dict[str, float]:
    """Return what is measured over what pools hold, by constant: geometric means of the middle eight tenths.

    A constant that no row determines stays.
    """
    ratios: dict[str, list[float]] = collections.defaultdict(list)
    for each in held:
        ratios[each.constant].append(each.measured / each.pooled)
    found = {name: getattr(FITTED, name) for name in OF_MEMORY} | {"allocated": 1.0}
    for name in OF_MEMORY:
        outer = len(ratios[name]) // 10
        if middle := sorted(ratios[name])[outer : len(ratios[name]) - outer]:
            found[name] = statistics.geometric_mean(middle)
    return found


class Score(NamedTuple):
    """Errors of predictions: median, the part within a bound, and how many."""

    median: float
    within: float
    num_rows: int

    def __str__(self) -> str:
        return f"median {100 * self.median:.1f} %, within bound {100 * self.within:.0f} %, {self.num_rows} rows"


def score(pairs: Sequence[tuple[float, float]], bound: float) -> Score:
    """Return how far predictions (first) are from measurements (second)."""
    errors = [abs(predicted / measured - 1) for predicted, measured in pairs]
    return Score(
        statistics.median(errors),
        sum(error <= bound for error in errors) / len(errors),
        len(errors),
    )


def baselines(rows: Sequence[Row]) -> dict[str, Score]:
    """Score what people calculate with: a constant MFU, each source's mean MFU."""
    timed = []
    for row in rows:
        try:
            run = published_run(row.values)
        except UnsupportedRowError:
            continue
        if row.step_s:
            flops = run.shape.model_flops(run.batch.sequences * run.batch.seq, run.batch.seq)
            parts = run.batch.parts
            flops *= run.micro_batches / (parts.tensor * parts.pipeline * parts.context)
            plain = 6.0 * run.shape.num_active_params / run.shape.model_flops(1, run.batch.seq)
            timed.append(
                (row, flops / run.machine.gpu.flops, flops * plain / run.machine.gpu.flops)
            )
    overall = statistics.median(ideal / (row.step_s or 1) for row, ideal, _ in timed)
    by_source: dict[str, list[float]] = collections.defaultdict(list)
    for row, _, plain in timed:
        by_source[row.source].append(plain / (row.step_s or 1))
    return {
        "constant MFU": score([(ideal / overall, row.step_s or 1) for row, ideal, _ in timed], 0.3),
        "6ND with each source's own mean MFU": score(
            [
                (plain / statistics.mean(by_source[row.source]), row.step_s or 1)
                for row, _, plain in timed
            ],
            0.3,
        ),
        **_memory_baselines(rows),
    }


def _memory_baselines(rows: Sequence[Row]) -> dict[str, Score]:
    """Score 16 bytes a parameter, and DeepSpeed's estimator of ZeRO-3: 18 bytes, and the largest layer."""
    sixteen, deepspeed = [], []
    for row in rows:
        try:
            run = published_run(row.values)
        except UnsupportedRowError:
            continue
        if row.peak_gib:
            parts = run.batch.parts
            size = run.settings.sharding.shard_size * parts.tensor * parts.pipeline
            sixteen.append((16 * run.shape.num_params / size / GIB, row.peak_gib))
            largest = 4 * run.shape.hidden * run.shape.vocab
            deepspeed.append(((18 * run.shape.num_params / size + largest) / GIB, row.peak_gib))
    return {
        "16 bytes a parameter": score(sixteen, 0.15),
        "DeepSpeed's estimator": score(deepspeed, 0.15),
    }


def print_scores(rows: Sequence[Row]) -> None:
    """Print errors of full predictions: in all, by system, by hardware, and the worst ten."""
    timed, held, lost, alarms, inside = [], [], [], [], 0
    num_ran = num_failed = 0
    for row in rows:
        try:
            found = predict_row(row.values)
        except UnsupportedRowError as error:
            print(f"{row.values['id']}: not predicted: {error}")
            continue
        has_failed = "outcome=" in row.values.get("notes", "")
        num_failed += has_failed
        num_ran += not has_failed
        if has_failed and found.fits:
            lost.append(row.values["id"])
        if not has_failed and not found.fits:
            alarms.append(row.values["id"])
        if row.step_s:
            timed.append((found.step_s, row.step_s, row))
            inside += found.step_s * SPREAD[0] <= row.step_s <= found.step_s * SPREAD[1]
        if row.peak_gib:
            held.append((found.peak_nbytes / GIB, row.peak_gib, row))
    print(
        f"step time: {score([pair[:2] for pair in timed], 0.3)}; the interval holds {inside / len(timed):.0%}"
    )
    print(f"peak memory: {score([pair[:2] for pair in held], 0.15)}")
    print(f"failed, and predicted to fit: {len(lost)} of {num_failed} {lost}")
    print(f"ran, and predicted not to fit: {len(alarms)} of {num_ran} {alarms}")
    for name, found_score in baselines(rows).items():
        print(f"baseline, {name}: {found_score}")
    for title, key in (("system", "system"), ("hardware", "gpu")):
        groups: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
        for predicted, measured, row in timed:
            groups[row.values[key]].append((predicted, measured))
        for name, pairs in sorted(groups.items(), key=lambda item: -len(item[1])):
            print(f"  step time by {title}, {name}: {score(pairs, 0.3)}")
    for what, pairs_of in (("step time, s", timed), ("peak memory, GiB", held)):
        worst = sorted(pairs_of, key=lambda pair: -abs(math.log(pair[0] / pair[1])))[:10]
        for predicted, measured, row in worst:
            print(f"  worst, {what}: {row.values['id']} {predicted:.4g} for {measured:.4g}")


def leave_one_out(prepared: Sequence[Prepared], fitted: Slopes) -> list[tuple[float, float]]:
    """Predict the rows of each source with constants that were fitted on the others, by slopes at those of all."""
    pairs = []
    sources = [each.row.source for each in prepared]
    for source in sorted(set(sources)):
        constants = solve(fitted.of([n for n, each in enumerate(sources) if each != source]))
        own = [each for each in prepared if each.row.source == source]
        found = [
            (math.exp(error(each, constants)) * (each.row.step_s or 1), each.row.step_s or 1)
            for each in own
        ]
        print(f"  without {source}: {score(found, 0.3)}")
        pairs += found
    return pairs


def leave_one_out_of_memory(held: Sequence[Held]) -> list[tuple[float, float]]:
    """Predict the memory of each source's rows with constants of the others."""
    pairs = []
    for source in sorted({each.source for each in held}):
        constants = fit_memory([each for each in held if each.source != source])
        own = [each for each in held if each.source == source]
        found = [(each.pooled * constants[each.constant], each.measured) for each in own]
        print(f"  without {source}: peak memory {score(found, 0.15)}")
        pairs += found
    return pairs


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Draw predicted against measured, by system and by hardware."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    columns: Sequence[
        tuple[str, str, Callable[[Any], float], Callable[[Row], float | None], str]
    ] = (
        ("time", "step time, s", lambda p: p.step_s, lambda r: r.step_s, "system"),
        ("time-hardware", "step time, s", lambda p: p.step_s, lambda r: r.step_s, "gpu"),
        (
            "memory",
            "peak memory, GiB",
            lambda p: p.peak_nbytes / GIB,
            lambda r: r.peak_gib,
            "system",
        ),
    )
    for name, label, predicted_of, measured_of, key in columns:
        figure, axes = pyplot.subplots(figsize=(7, 6))
        groups: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
        for row in rows:
            measured = measured_of(row)
            if measured:
                try:
                    groups[row.values[key]].append(
                        (measured, predicted_of(predict_row(row.values)))
                    )
                except UnsupportedRowError:
                    continue
        for number, (group, pairs) in enumerate(sorted(groups.items(), key=lambda i: -len(i[1]))):
            marker = "osD^vP*X"[number % 8]
            axes.scatter(*zip(*pairs, strict=True), s=16, alpha=0.7, label=group, marker=marker)
        ends = axes.get_xlim()
        axes.plot(ends, ends, color="grey", linewidth=1)
        axes.set(
            xscale="log", yscale="log", xlabel=f"measured {label}", ylabel=f"predicted {label}"
        )
        axes.legend(fontsize=7)
        figure.tight_layout()
        figure.savefig(folder / f"planned-{name}.png", dpi=110)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--pictures", type=Path)
    arguments = parser.parse_args()
    rows = rows_of(arguments.runs)
    if arguments.fit:
        prepared = []
        for row in rows:
            if row.step_s:
                try:
                    prepared.append(prepare(row))
                except UnsupportedRowError:
                    continue
        fitted = fit(prepared)
        print(f"fitted on all: {fitted.constants}")
        pairs = leave_one_out(prepared, fitted)
        ratios = sorted(measured / predicted for predicted, measured in pairs)
        low, high = (ratios[int(part * len(ratios))] for part in (0.05, 0.95))
        print(
            f"each source with constants of the others: {score(pairs, 0.3)}; spread {low:.3f} to {high:.3f}"
        )
        held = held_by(rows)
        print(f"fitted on all: {fit_memory(held)}")
        pairs = leave_one_out_of_memory(held)
        print(f"each source with constants of the others: peak memory {score(pairs, 0.15)}")
    print_scores(rows)
    if arguments.pictures:
        draw(rows, arguments.pictures)


if __name__ == "__main__":
    main()
