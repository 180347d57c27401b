"""The trace report of a run, and of several side by side: pages that open offline, and timelines for other viewers.

RUN (tools/run_record.py)
    |
    v
RUN/report.html, RUN/trace.json, or Markdown, or lines on a terminal
"""

import json
import math
import sys
import time
from collections.abc import Collection, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template

from fullshard.json_files import json_text, write_whole
from fullshard.plan.amounts import nanoseconds, nbytes
from fullshard.plan.trace import RankTrace
from fullshard.tools.advice import stalled, verdict
from fullshard.tools.config import OptionError, check_file
from fullshard.tools.doctor.findings import counted
from fullshard.tools.perfetto import chrome_trace
from fullshard.tools.report_data import (
    Figure,
    about,
    figures,
    options,
    page_data,
    parts,
    series,
    summary_data,
)
from fullshard.tools.run_folder import RunFolder
from fullshard.tools.run_record import RunRecord, changed, read_run, runs_in
from fullshard.tools.trace_metrics import HOW

FOLLOW_S = 5  # between two pages of a run that goes on
_MOST = 8  # runs on one page: as many colours tell apart
_SHARDED = ("sharded parameters", "gradient shards", "optimizer state")  # of the memory in a trace
_PAGE = files("fullshard.tools") / "page"
_SCRIPTS = {
    "report.html": ("uPlot.iife.min.js", "drawing.js", "timeline.js", "report.js", "plan.js"),
    "compare.html": ("uPlot.iife.min.js", "drawing.js", "compare.js"),
}


class Written(NamedTuple):
    """The files of a report; ``trace`` is None where nothing was recorded."""

    page: Path
    trace: Path | None


def write_report(path: Path, out: Path | None = None, *, refresh_s: int | None = None) -> Written:
    """Write the page, to `report.html` in the folder unless told, and `trace.json` beside it.

    refresh_s: after how many seconds a browser loads the page again, of a run that goes on.
    """
    run = read_run(path)
    data = page_data(run, refresh_s=refresh_s)
    text = render("report.html", data, how_texts=HOW, **_sentences(run, data))
    return write_page(out or RunFolder(path).report_file, text, run.traces)


def write_page(
    page: Path, text: str, traces: Sequence[RankTrace], *, option: str = "--out"
) -> Written:
    """Write a page, and `trace.json` beside it if there are traces and the page is a file: beside a pipe there is nothing."""
    write_file(page, text, option=option)
    if not traces or not page.is_file():
        return Written(page, None)
    trace = page.resolve().with_name("trace.json")
    write_file(trace, json.dumps(chrome_trace(traces), separators=(",", ":")), option=option)
    return Written(page, trace)


def write_file(path: Path, text: str, *, option: str = "--out") -> None:
    """Write a file that appears when it is complete: a browser may be loading the one before.

    option: that named it. Raises OptionError where it cannot be written.
    """
    check_file(path, option)
    try:
        if path.exists() and path.samefile("/dev/stdout"):  # which may be a file, and is written on
            print(text)
        else:
            write_whole(path, text)
    except OSError as error:
        raise OptionError(
            f"{path}: cannot be written ({error.strerror}). Name another file with {option}."
        ) from error


def follow(path: Path, out: Path | None) -> Written:
    """Write the page every few seconds until the run has ended, and return the last one.

    Says on standard error where it is. Raises OptionError if no run has begun in this folder.
    """
    folder = RunFolder(path)
    folder.check_there()
    if not folder.config_file.exists():
        raise OptionError(
            f"{path}: no run of `fullshard train` has begun here, so there is none to follow.{runs_in(path)}"
        )
    if (summary := folder.read_summary()) is not None:
        print(
            f"{path}: this run is not going on, it has {summary['status']}; the page is of then. "
            "Of a run that is resumed, ask again once it takes steps.",
            file=sys.stderr,
        )
        return write_report(path, out)
    page = (out or folder.report_file).resolve().as_uri()
    print(
        f"following {path} every {FOLLOW_S} s until it ends (Ctrl-C ends it here): {page}",
        file=sys.stderr,
    )
    while folder.read_summary() is None:
        if folder.metrics():
            write_report(path, out, refresh_s=FOLLOW_S)
        time.sleep(FOLLOW_S)
    return write_report(path, out)


def result_lines(path: Path) -> list[str]:
    """Say in one to four lines what came out of a run, and what to do about it."""
    run = read_run(path)
    return [_result(run), *(each.text for each in verdict(run))]


def _result(run: RunRecord) -> str:
    found = {figure.name: figure for figure in figures(run)}
    said = []
    for name, prefix, suffix in (
        ("loss", "loss ", " {unit}"),
        ("val_loss", "held out ", ""),
        ("tokens_per_second", "", ""),
        ("step_seconds", "", " a step"),
        ("exposed_share", "", " of it exposed communication"),
        ("peak_memory", "", " a rank at the peak"),
    ):
        if figure := found.get(name):
            said.append(f"{prefix}{figure.text}{suffix.format(unit=figure.unit)}")
    return f"{run.name}: {', '.join(said)}"


def comparison_lines(paths: Sequence[Path]) -> list[str]:
    """Say in a line for each run what came out of it, and what does not compare."""
    runs = [read_run(path) for path in paths]
    return [*map(_result, runs), *_notes(runs, _names(runs, paths))]


def markdown(paths: Sequence[Path]) -> str:
    """Return the report of a run, or of several side by side, as text for an issue or a pull request."""
    if len(paths) > 1:
        return _template("compare.md").render(compare(paths)).rstrip("\n")
    return _template("report.md").render(page_data(read_run(paths[0]))).rstrip("\n")


def metrics_of(path: Path) -> dict[str, Any]:
    """Return the numbers of the report, each with how it is computed."""
    return summary_data(read_run(path))


def write_comparison(paths: Sequence[Path], out: Path) -> Path:
    """Write the page; return its path. Raises OptionError as `read_run` does, and for too many runs."""
    write_file(out, render("compare.html", compare(paths)))
    return out


def compare(paths: Sequence[Path]) -> dict[str, Any]:
    """Return what the page shows, and `fullshard report A B --json` prints."""
    if len(paths) > _MOST:
        raise OptionError(f"{len(paths)} runs are too many for one page; give at most {_MOST}.")
    runs = [read_run(path) for path in paths]
    names = _names(runs, paths)
    found = [{figure.name: figure for figure in figures(run)} for run in runs]
    apart = {index for index, run in enumerate(runs) if _why_apart(runs[0], run)}
    drawn = [series(run) for run in runs]
    return {
        "name": " and ".join(names),
        "note": " ".join(_notes(runs, names)),
        "runs": [
            {"name": name, "path": str(path), "series": each}
            for name, path, each in zip(names, paths, drawn, strict=True)
        ],
        "units": sorted({f"{each['unit']}s" for each in drawn if each}),
        "rows": _side_by_side(found, apart),
        "parts": _side_by_side([{part.name: part for part in parts(run)} for run in runs]),
        "options": _differing([dict(options(run)) for run in runs]),
        "about": _differing([dict(about(run)) for run in runs]),
    }


def _notes(runs: Sequence[RunRecord], names: Sequence[str]) -> list[str]:
    """Say which losses do not compare with those of the first run, and why; and whether models differ in size."""
    first, said = names[0], []
    reasons = [_why_apart(runs[0], run) for run in runs]
    for reason in filter(None, dict.fromkeys(reasons)):
        others = [name for name, own in zip(names, reasons, strict=True) if own == reason]
        said.append(
            f"Losses of {' and '.join(others)} do not compare with those of {first}: {reason}."
        )
    sizes = [run.facts.get("num_parameters") for run in runs]
    if len({*sizes}) > 1 and None not in sizes:
        each = [f"{name} {size:,}" for name, size in zip(names, sizes, strict=True)]
        said.append(f"The models differ in size: {', '.join(each)} parameters.")
    return said


def _why_apart(first: RunRecord, run: RunRecord) -> str:
    """Say why losses of two runs do not compare; "" where they do."""
    if first.config is None or run.config is None or first.text == run.text:
        return ""
    if first.config.unit != run.config.unit:
        return f"they are in nats per {run.config.unit}, and those per {first.config.unit}"
    if first.text and run.text and first.text.tokenizer != run.text.tokenizer:
        return "tokens are of another tokenizer"
    return "they are of other text, or of another part of it"


_LOSSES = ("loss", "val_loss")


def _side_by_side(
    found: Sequence[dict[str, Figure]], apart: Collection[int] = ()
) -> list[dict[str, Any]]:
    """Return a row for each figure, with what it is in each run, and relative to the first.

    apart: numbers of runs whose losses do not compare with it.
    """
    rows = []
    for name in dict.fromkeys(name for each in found for name in each):
        values = [each.get(name) for each in found]
        known = [value for value in values if value]
        has_units = len({value.unit for value in known}) > 1
        ratios: list[float | None] = []
        for index, value in enumerate(values):
            first, ratio = values[0], None
            if value and first and first.value and value.unit == first.unit:
                ratio = value.value / first.value
            is_apart = name in _LOSSES and index in apart
            ratios.append(
                ratio if ratio is not None and math.isfinite(ratio) and not is_apart else None
            )
        row = {
            field: getattr(known[0], field) for field in ("name", "label", "how", "unit", "better")
        }
        texts = [
            f"{each.text} {each.unit}" if has_units and each.unit not in each.text else each.text
            for each in known
        ]
        row["texts"] = [texts[known.index(value)] if value else "" for value in values]
        row["values"] = [value.value if value else None for value in values]
        rows.append({**row, "ratios": ratios, "changes": [changed(ratio) for ratio in ratios]})
    return rows


def _names(runs: Sequence[RunRecord], paths: Sequence[Path]) -> list[str]:
    """Return the runs' names, or their paths where two have one name."""
    names = [run.title for run in runs]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _differing(each: Sequence[dict[str, str]]) -> list[tuple[str, list[str]]]:
    """Return what is not the same in all, with the text of each."""
    names = dict.fromkeys(name for one in each for name in one)
    rows = [(name, [one.get(name, "not known") for one in each]) for name in names]
    return [(name, texts) for name, texts in rows if len(set(texts)) > 1]


def render(page: str, data: dict[str, Any], **more: Any) -> str:
    """Return a page of `page/`. It loads nothing: style, scripts and data are inside."""
    scripts = "\n".join(_read(name) for name in _SCRIPTS[page])
    # `</script>` in a unit's name must not end the element that holds the data.
    embedded = json_text(data, separators=(",", ":")).replace("<", "\\u003c")
    style = _read("uPlot.min.css") + _read("report.css")
    shown = {**data, **more, "style": style, "scripts": scripts, "embedded": embedded}
    return _template(page).render(**shown)


def _template(name: str) -> Template:
    environment = Environment(
        loader=FunctionLoader(_read),
        autoescape=name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(ns=nanoseconds, nbytes=nbytes)
    return environment.get_template(name)


def _sentences(run: RunRecord, data: dict[str, Any]) -> dict[str, str]:
    """Say what the figures show, for the lines above and below them."""
    trace = data["trace"]
    if trace is None:
        return {"missing_trace": _missing_trace(run)}
    said = {**trace_leads(trace), "stalls_lead": stalled(run)}
    most = max(trace["peaks"], key=lambda peak: peak["total"])
    held = dict(zip(trace["categories"], most["nbytes"], strict=True))
    sharded = sum(held.get(name, 0) for name in _SHARDED)
    if run.config is not None and run.config.ranks > 1 and sharded:
        said["memory_lead"] += (
            f" Parameters, gradients and optimizer state are {nbytes(sharded)} of it; unsharded, they would be "
            f"{nbytes(sharded * run.config.ranks)} on each of the {run.config.ranks} ranks."
        )
    return said


def trace_leads(trace: dict[str, Any]) -> dict[str, str]:
    """Say what traces show of units and of memory."""
    units = trace["units"]
    total = sum(unit["exposed_ns"] for unit in units)
    said = "No unit exposes any communication."
    if total:
        first = units[0]
        said = (
            f"{first['name']} is the most exposed of {counted(len(units), 'unit')}: "
            f"{nanoseconds(first['exposed_ns'])} of {nanoseconds(total)} a step."
        )
    if trace["fence_ns"]:
        fence = nanoseconds(trace["fence_ns"])
        said += f" Another {fence} a step go to waiting for other ranks at barriers, which belong to no unit."
    most = max(trace["peaks"], key=lambda peak: peak["total"])
    largest = max(range(len(most["nbytes"])), key=lambda index: most["nbytes"][index])
    return {
        "units_lead": said,
        "memory_lead": f"Rank {most['rank']} holds the most, {nbytes(most['total'])}, at "
        f"{nanoseconds(most['offset_ns'])} of step {most['step']}; the largest part of it is "
        f"{trace['categories'][largest]} ({nbytes(most['nbytes'][largest])}).",
    }


def _missing_trace(run: RunRecord) -> str:
    """Say why a run has no trace."""
    if run.traces or run.config is None:
        return ""
    if not run.config.trace_steps:
        return "This run was started with --trace-steps 0."
    last = run.metrics[-1]["step"]
    if run.summary is None and last < run.config.steps:
        return (
            f"This run got to step {last} of {run.config.steps}, and had not recorded its trace by then, which it takes "
            "in the middle of its steps."
        )
    return "The folder of this run has no trace."


def _read(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")
