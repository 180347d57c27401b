"""The report's data as one HTML file: the template, style and scripts of `page/` put together."""

import shlex
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from fullshard.tools.json_text import json_text
from fullshard.tools.report_data import nanoseconds, nbytes

_PAGE = files("fullshard.tools") / "page"
_SCRIPTS = {
    "report.html": ("drawing.js", "timeline.js", "charts.js"),
    "compare.html": ("drawing.js", "compare.js"),
}


def render_report(data: dict[str, Any]) -> str:
    """Return the page on one run."""
    return render("report.html", {**data, "how_texts": data["how"]}, **_sentences(data))


def render(page: str, data: dict[str, Any], **more: str) -> str:
    """Return a page of `page/`. It loads nothing: style, scripts and data are inside."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(ns=nanoseconds, nbytes=nbytes, quoted=shlex.quote)
    scripts = "\n".join(_read(name) for name in _SCRIPTS[page])
    # `</script>` in a unit's name must not end the element that holds the data.
    embedded = json_text(data, separators=(",", ":")).replace("<", "\\u003c")
    shown = {**data, **more, "style": _read("report.css"), "scripts": scripts}
    return environment.from_string(_read(page)).render(**shown, embedded=embedded)


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
