"""What is known of a run, read from its folder.

RUN/metrics.jsonl, config.json, summary.json    what `fullshard train` wrote, as far as it is there
RUN/trace/rank*.json or RUN/rank*.json          what `fullshard.trace` wrote, if anything
RUN/compare.json                                what `fullshard compare --out` wrote, if it did
RUN/plan.json                                   what `fullshard plan --out` wrote, if it did
"""

import dataclasses
import hashlib
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from fullshard.json_files import read_json
from fullshard.plan import trace
from fullshard.tools.config import OptionError, TrainConfig
from fullshard.tools.run_folder import Earlier, RunFolder, program
from fullshard.tools.text.tokenizer import FILE as TOKENIZER
from fullshard.tools.trace_metrics import common_steps, peaks, step_ns

_MOST_RUNS = 3  # that a folder above them names


class Switch(TypedDict):
    """A script's numbers on PyTorch's engine and on fullshard: rows of (what, PyTorch's, fullshard's, relation)."""

    verdict: str
    rows: list[list[str]]
    notes: list[str]


class LearntText(NamedTuple):
    """What a run learns from, as far as two of them have to agree for their losses to compare."""

    unit: str
    tokenizer: str  # a digest
    corpus: str
    val_fraction: float


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """What is known of a run.

    traces: in order of ranks, perhaps not of all. facts: see `run_facts`. earlier: options before resumes.
    planned: traces of a plan, if there is one.
    """

    name: str
    config: TrainConfig | None
    metrics: list[dict[str, Any]]
    summary: dict[str, Any] | None
    traces: list[trace.RankTrace]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    earlier: list[Earlier] = dataclasses.field(default_factory=list)
    switch: Switch | None = None
    text: LearntText | None = None
    planned: list[trace.RankTrace] = dataclasses.field(default_factory=list)

    def config_at(self, step: int) -> TrainConfig | None:
        """Return the options that a step was taken with: a resume may have changed them."""
        parts = (part["options"] for part in self.earlier if step <= part["until"])
        return next(parts, self.config)

    @property
    def title(self) -> str:
        """What people call it: its folder, or where nobody chose that name what it trains, and when it began.

        runs/tuned is `tuned`; runs/20261127-015202 is `10m · books · 01:52`.
        """
        began = re.fullmatch(r"\d{8}-(\d\d)(\d\d)\d\d", self.name)
        if began is None or self.config is None:
            return self.name
        data = [Path(path).stem for path in self.config.data] or ["Python's library"]
        more = f" and {len(data) - 1} more" if len(data) > 1 else ""
        return f"{self.config.model.removeprefix('./')} · {data[0]}{more} · {began[1]}:{began[2]}"


def read_run(path: Path) -> RunRecord:
    """Read a run folder or a folder of traces.

    Raises OptionError if it holds neither, TraceError for a trace that cannot be read.
    """
    folder = RunFolder(path)
    folder.check_there()
    traces = trace.read_traces(folder.trace_folder) or trace.read_traces(path)
    if traces and not common_steps(traces):
        raise trace.TraceError(
            f"{path}: its ranks have no step in common, so they cannot be compared. Record again."
        )
    if traces and (step_ns(traces) <= 0 or not peaks(traces)):
        raise trace.TraceError(
            f"{path}: its steps have no time, or no memory was looked at. Record again."
        )
    config = folder.read_config() if folder.config_file.exists() else None
    metrics = folder.metrics()
    if not (traces or metrics):
        raise OptionError(
            f"{path}: holds neither metrics.jsonl nor rank*.json, so there is nothing to report. "
            f"Name a folder that `fullshard train` or `fullshard.trace` wrote.{runs_in(path)}"
        )
    return RunRecord(
        path.resolve().name,
        config,
        metrics,
        folder.read_summary(),
        traces,
        folder.read_facts() if config else {},
        folder.read_earlier() if config else [],
        _read_switch(path / "compare.json"),
        _text_of(folder, config) if config else None,
        _read_plan(path / "plan.json"),
    )


def runs_in(path: Path) -> str:
    """Name the newest runs in a folder, each as what to type, in lines below; "" if it has none."""

    def written(run: RunFolder) -> int:
        files = [
            run.metrics_file,
            *trace.trace_files(run.trace_folder),
            *trace.trace_files(run.path),
        ]
        return max((file.stat().st_mtime_ns for file in files if file.is_file()), default=0)

    runs = sorted(filter(written, map(RunFolder, path.iterdir())), key=written, reverse=True)
    commands = [f"{program()} report {shlex.quote(str(run.path))}" for run in runs[:_MOST_RUNS]]
    return "\n    ".join(["\nThe newest runs in it:", *commands]) if commands else ""


def _text_of(folder: RunFolder, config: TrainConfig) -> LearntText:
    file = folder.tokenizer_folder / TOKENIZER
    tokenizer = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
    return LearntText(config.unit, tokenizer, folder.read_fingerprint(), config.val_fraction)


def _read_switch(path: Path) -> Switch | None:
    def refuse(why: str) -> OptionError:
        return OptionError(f"{path}: {why}. Write it again with `fullshard compare --out`.")

    if not path.exists():
        return None
    switch: Switch = read_json(path, Switch, refuse)
    if any(len(row) != 4 for row in switch["rows"]):
        raise refuse("has rows of another length")
    return switch


def _read_plan(path: Path) -> list[trace.RankTrace]:
    """Return the traces of a plan, none without one. Raises OptionError for a file that is no plan."""

    def refuse(why: str) -> OptionError:
        return OptionError(
            f"{path}: is no plan: {why}. Write it again with `fullshard plan --out`."
        )

    if not path.exists():
        return []
    plan: _PlanFile = read_json(path, _PlanFile, refuse)
    traces = [trace.trace_of(fields, refuse) for fields in plan["traces"]]
    if not traces or any(trace.TEMPORARY not in each.categories for each in traces):
        raise refuse("has no planned step")
    return traces


class _PlanFile(TypedDict):
    traces: list[dict[str, Any]]


def not_finite(metrics: Sequence[dict[str, Any]]) -> list[tuple[int, str]]:
    """Return each step with a number that is not finite, and which it is: (3, "loss nan, gradient norm inf")."""
    names = {"loss": "loss", "grad_norm": "gradient norm", "val_loss": "loss held out"}
    found = []
    for entry in metrics:
        said = [
            f"{names[key]} {entry[key]}" for key in names if not math.isfinite(entry.get(key, 0))
        ]
        if said:
            found.append((entry["step"], ", ".join(said)))
    return found


def changed(ratio: float | None) -> str:
    """Say how much a number is of another: 89 % less, 27 % more, 3.2 x as much; "" if that is not known."""
    if ratio is None:
        return ""
    if ratio >= 2:
        return f"{ratio:,.1f} x as much"
    percent = f"{abs(100 * (ratio - 1)):.0f}"
    return "same" if percent == "0" else f"{percent} % {'more' if ratio > 1 else 'less'}"
