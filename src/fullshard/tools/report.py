"""The trace report of a run, and of several side by side: pages that open offline, and timelines for other viewers.

RUN/metrics.jsonl, config.json, summary.json    what `fullshard train` wrote, as far as it is there
RUN/trace/rank*.json or RUN/rank*.json          what `fullshard.trace` wrote, if anything
    |
    v
RUN/report.html, RUN/trace.json
"""

import json
import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FunctionLoader, StrictUndefined

from fullshard.json_files import json_text
from fullshard.plan.trace import TraceError, read_traces
from fullshard.tools.config import OptionError
from fullshard.tools.perfetto import chrome_trace
from fullshard.tools.report_data import (
    Figure,
    RunRecord,
    about,
    figures,
    nanoseconds,
    nbytes,
    options,
    page_data,
    series,
    summary_data,
)
from fullshard.tools.run_folder import RunFolder
from fullshard.tools.trace_metrics import HOW, common_steps, peaks, step_ns

_MOST = 8  # runs on one page: as many colours tell apart
_PAGE = files("fullshard.tools") / "page"
_SCRIPTS = {
    "report.html": ("uPlot.iife.min.js", "drawing.js", "timeline.js", "report.js"),
    "compare.html": ("uPlot.iife.min.js", "drawing.js", "compare.js"),
}


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
    data = page_data(run)
    text = render("report.html", data, how_texts=HOW, **_sentences(data))
    page.write_text(text, encoding="utf-8")
    if trace is not None:
        events = json.dumps(chrome_trace(run.traces), separators=(",", ":"))
        trace.write_text(events, encoding="utf-8")
    return Written(page, trace)


def metrics_of(path: Path) -> dict[str, Any]:
    """Return the numbers of the report, each with how it is computed."""
    return summary_data(read_run(path))


def write_comparison(paths: Sequence[Path], out: Path) -> Path:
    """Write the page; return its path. Raises OptionError as `read_run` does, and for too many runs."""
    page = render("compare.html", compare(paths))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    return out


def compare(paths: Sequence[Path]) -> dict[str, Any]:
    """Return what the page shows, and `fullshard report A B --json` prints."""
    if len(paths) > _MOST:
        raise OptionError(f"{len(paths)} runs are too many for one page; give at most {_MOST}.")
    runs = [read_run(path) for path in paths]
    names = _names(runs, paths)
    found = [{figure.name: figure for figure in figures(run)} for run in runs]
    rows = []
    for name in dict.fromkeys(name for each in found for name in each):
        (known,) = {each[name].label for each in found if name in each}
        how = next(each[name].how for each in found if name in each)
        first = found[0].get(name)
        values = [each.get(name) for each in found]
        units = {value.unit for value in values if value}
        rows.append(
            {
                "name": name,
                "label": known,
                "how": how,
                "texts": [_text(value, with_unit=len(units) > 1) for value in values],
                "values": [value.value if value else None for value in values],
                # Of the first run, which the others are compared with, where both count the same.
                "ratios": [
                    value.value / first.value
                    if value and first and first.value and value.unit == first.unit
                    else None
                    for value in values
                ],
            }
        )
    units = {figure.unit for each in found if (figure := each.get("loss"))}
    return {
        "name": " and ".join(names),
        "note": f"Losses are in {' and '.join(sorted(units))}, which do not compare."
        if len(units) > 1
        else "",
        "runs": [
            {"name": name, "path": str(path), "series": series(run)}
            for name, path, run in zip(names, paths, runs, strict=True)
        ],
        "rows": rows,
        "options": _differing([dict(options(run)) for run in runs]),
        "about": _differing([dict(about(run)) for run in runs]),
    }


def _text(figure: Figure | None, *, with_unit: bool) -> str:
    if figure is None:
        return ""
    return f"{figure.text} {figure.unit}" if with_unit else figure.text


def _names(runs: Sequence[RunRecord], paths: Sequence[Path]) -> list[str]:
    """Return the runs' names, or their paths where two have one name."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _differing(each: Sequence[dict[str, str]]) -> list[tuple[str, list[str]]]:
    """Return what is not the same in all, with the text of each."""
    names = dict.fromkeys(name for one in each for name in one)
    rows = [(name, [one.get(name, "not known") for one in each]) for name in names]
    return [(name, texts) for name, texts in rows if len(set(texts)) > 1]


def render(page: str, data: dict[str, Any], **more: Any) -> str:
    """Return a page of `page/`. It loads nothing: style, scripts and data are inside."""
    environment = Environment(
        loader=FunctionLoader(_read),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(ns=nanoseconds, nbytes=nbytes, quoted=shlex.quote)
    scripts = "\n".join(_read(name) for name in _SCRIPTS[page])
    # `</script>` in a unit's name must not end the element that holds the data.
    embedded = json_text(data, separators=(",", ":")).replace("<", "\\u003c")
    shown = {
        **data,
        **more,
        "style": _read("uPlot.min.css") + _read("report.css"),
        "scripts": scripts,
    }
    return environment.get_template(page).render(**shown, embedded=embedded)


def _sentences(data: dict[str, Any]) -> dict[str, str]:
    """Say what the figures show, for the lines above and below them."""
    said = {"speed_note": "", "units_lead": "", "memory_lead": "", "stalls_lead": ""}
    cost = (data["series"] or {}).get("cost")
    if cost is not None:
        said["speed_note"] = (
            f" Recorded steps took {cost:.2f} times the median of the others, which includes the "
            "cost of recording."
        )
    trace = data["trace"]
    if trace is None:
        return said
    units = trace["units"]
    total = sum(unit["exposed_ns"] for unit in units)
    fence = f"Ranks wait {nanoseconds(trace['fence_ns'])} a step for each other at fences, which are no unit's."
    if total:
        first = units[0]
        said["units_lead"] = (
            f"{first['name']} is the most exposed of {len(units)} units: "
            f"{nanoseconds(first['exposed_ns'])} of {nanoseconds(total)} a step. {fence}"
        )
    else:
        said["units_lead"] = f"No unit exposes any communication. {fence}"
    said["stalls_lead"] = _stalls(trace["stalls"])
    most = max(trace["peaks"], key=lambda peak: peak["total"])
    largest = max(range(len(most["nbytes"])), key=lambda index: most["nbytes"][index])
    said["memory_lead"] = (
        f"Rank {most['rank']} holds the most, {nbytes(most['total'])}, at "
        f"{nanoseconds(most['offset_ns'])} of step {most['step']}; the largest part of it is "
        f"{trace['categories'][largest]} ({nbytes(most['nbytes'][largest])})."
    )
    return said


def _stalls(ranks: Sequence[dict[str, Any]]) -> str:
    """Say what held up ranks beside their work, and what to do about it."""
    if not any(each["matters"] for each in ranks):
        return "Neither the garbage collector nor a device's allocator holds up a rank."
    said = []
    worst = max(ranks, key=lambda each: each["share"])
    if worst["matters"] and worst["share"]:
        said.append(
            f"The garbage collector takes {100 * worst['share']:.1f} % of a step on rank {worst['rank']}, and the "
            "others wait for it. Call gc.freeze() after setting up, or gc.disable(), and gc.collect() on all ranks "
            "at one step in some hundreds."
        )
    retries = {
        each["rank"]: each["num_alloc_retries"] for each in ranks if each["num_alloc_retries"]
    }
    if retries:
        rank = max(retries, key=lambda each: retries[each])
        said.append(
            f"The allocator of rank {rank} ran out of memory {retries[rank]} times, gave its cache back and tried "
            "again: memory is nearly full, or in pieces. Take smaller micro-batches, or set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
        )
    return " ".join(said)


def _read(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")
