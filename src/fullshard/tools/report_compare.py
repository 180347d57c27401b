"""Several runs on one page: what differs in how they were started, and in what came out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fullshard.tools.config import OptionError
from fullshard.tools.json_text import json_text
from fullshard.tools.report import RunRecord, read_run
from fullshard.tools.report_data import Figure, about, figures, options, series
from fullshard.tools.report_page import render

_MOST = 8  # as many colours tell apart


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


def as_json(paths: Sequence[Path]) -> str:
    """Return the comparison as one JSON object."""
    return json_text(compare(paths), indent=2)
