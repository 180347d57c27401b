"""The trace report of a run: one page that opens offline, and the same timelines for viewers.

RUN/metrics.jsonl, config.json, summary.json    what `fullshard train` wrote, as far as it is there
RUN/trace/rank*.json or RUN/rank*.json          what `fullshard.trace` wrote, if anything
    |
    v
RUN/report.html, RUN/trace.json
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

from fullshard.plan.trace import RankTrace, TraceError, read_traces
from fullshard.tools.config import OptionError, TrainConfig
from fullshard.tools.perfetto import chrome_trace
from fullshard.tools.report_data import page_data, summary_data
from fullshard.tools.report_page import render_report
from fullshard.tools.run_folder import RunFolder
from fullshard.tools.trace_metrics import common_steps, peaks, step_ns


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """What is known of a run. traces: in order of ranks, perhaps not of all. facts: see `run_facts`."""

    name: str
    config: TrainConfig | None
    metrics: list[dict[str, Any]]
    summary: dict[str, Any] | None
    traces: list[RankTrace]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


class Written(NamedTuple):
    """The files of a report; ``trace`` is None where nothing was recorded."""

    page: Path
    trace: Path | None


def read_run(path: Path) -> RunRecord:
    """Read a run folder or a folder of traces.

    Raises OptionError if it holds neither, TraceError for a trace that cannot be read.
    """
    folder = RunFolder(path)
    traces = read_traces(folder.trace_folder) or read_traces(path)
    if traces and not common_steps(traces):
        raise TraceError(
            f"{path}: its ranks have no step in common, so they cannot be compared. Record again."
        )
    if traces and (step_ns(traces) <= 0 or not peaks(traces)):
        raise TraceError(
            f"{path}: its steps have no time, or no memory was looked at. Record again."
        )
    is_run = folder.config_file.exists()
    config = folder.read_config() if is_run else None
    facts = folder.read_facts() if is_run else {}
    metrics = folder.metrics()
    if not (traces or metrics):
        raise OptionError(
            f"{path}: holds neither metrics.jsonl nor rank*.json, so there is nothing to report. "
            "Name a folder that `fullshard train` or `fullshard.trace` wrote."
        )
    return RunRecord(path.resolve().name, config, metrics, folder.read_summary(), traces, facts)


def write_report(path: Path, out: Path | None = None) -> Written:
    """Write the page, to `report.html` in the folder unless told, and `trace.json` beside it."""
    run = read_run(path)
    page = out or RunFolder(path).report_file
    page.parent.mkdir(parents=True, exist_ok=True)
    trace = page.with_name("trace.json") if run.traces else None
    page.write_text(render_report(page_data(run)), encoding="utf-8")
    if trace is not None:
        events = json.dumps(chrome_trace(run.traces), separators=(",", ":"))
        trace.write_text(events, encoding="utf-8")
    return Written(page, trace)


def metrics_of(path: Path) -> dict[str, Any]:
    """Return the numbers of the report, each with how it is computed."""
    return summary_data(read_run(path))
