"""How the pages of `fullshard report` look: colours, order, and what a browser draws from them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fullshard.plan.trace import Kind
from fullshard.tools import report
from fullshard.tools.config import TrainConfig
from fullshard.tools.report import read_run, render, write_comparison, write_report
from fullshard.tools.report_data import page_data
from fullshard.tools.run_folder import RunFolder
from fullshard.tools.trace_metrics import HOW
from tests.tools.test_report import Page, make_run, make_traced_run

STYLE = (Path(report.__file__).parent / "page" / "report.css").read_text()
CHROMIUM = shutil.which("chromium")
SENTENCES = dict.fromkeys(
    ("speed_note", "missing_trace", "units_lead", "memory_lead", "stalls_lead"), ""
) | {"how_texts": HOW}


def _colours(scheme: str) -> dict[str, str]:
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#\w{6})", block))
        for block in re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    )
    return light if scheme == "light" else light | dark


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(first: str, second: str) -> float:
    """Return what WCAG 2.2 calls the contrast ratio, 1 to 21."""
    low, high = sorted((_luminance(first), _luminance(second)))
    return (high + 0.05) / (low + 0.05)


def _mixed(first: str, second: str, part: float) -> str:
    """Mix as `color-mix(in srgb, first part, second)` does."""
    pairs = [(int(first[at : at + 2], 16), int(second[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(part * one + (1 - part) * two):02x}" for one, two in pairs)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_told_from_what_is_behind_it(scheme: str) -> None:
    colours = _colours(scheme)
    for text, behind in itertools.product(
        ("ink", "soft", "faint", "accent", "good", "bad"), ("paper", "wash")
    ):
        assert _contrast(colours[text], colours[behind]) >= 4.5, (text, behind)
    darkest = _mixed(colours["wait-reduce-scatter"], colours["wash"], 0.5)  # of who waits for whom
    assert _contrast(colours["ink"], darkest) >= 4.5
    for kind in (kind.value.replace(" for ", "-") for kind in Kind):
        assert _contrast(colours[kind], colours["paper"]) >= 3, kind
        label = "#ffffff" if _luminance(colours[kind]) < 0.19 else "#14171b"  # as `onColour` does
        assert _contrast(colours[kind], label) >= 4.5, kind


def test_advice_comes_first_and_a_page_of_a_run_that_goes_on_loads_itself_again(
    tmp_path: Path,
) -> None:
    run = make_traced_run(tmp_path / "run")
    page = write_report(run).page.read_text()
    ids = re.findall(r'<section (?:id|class)="(\w+)"', page)
    assert ids[:7] == ["advice", "tiles", "loss", "speed", "where", "memory", "timeline"]
    assert 'http-equiv="refresh"' not in page
    page = write_report(run, refresh_s=7).page.read_text()
    assert '<meta http-equiv="refresh" content="7">' in page
    assert Page(page).data["refresh_s"] == 7


def test_the_rank_that_comes_last_is_marked_among_those_that_wait(tmp_path: Path) -> None:
    data = page_data(read_run(make_traced_run(tmp_path / "run")))
    units = [{"name": "layer", "last": 1, "late_ns": 150.0, "waits_ns": [100.0, 0.0, 200.0]}]
    data["trace"]["waits"] = {"lead": "Rank 1 is late.", "ranks": [0, 1, 2], "units": units}
    row = render("report.html", data, **SENTENCES).partition('<th title="layer"')[2]
    # A narrow window has no heads of columns: there each cell says of which rank it is.
    cells = re.findall(r'<td (.*?)><span class="of">(.*?)</span>(.*?)</td>', row)[:3]
    assert [rank for _, rank, _ in cells] == ["rank 0", "rank 1", "rank 2"]
    assert [text for _, _, text in cells] == ["0.10 µs", "late by 0.15 µs", "0.20 µs"]
    narrow = STYLE.partition("@media (max-width: 640px) {")[2]
    assert ".heat thead { display: none; }" in narrow
    assert [look for look, _, _ in cells] == [
        'style="--heat: 25%"',
        'class="late"',
        'style="--heat: 50%"',
    ]


def test_no_tile_stands_alone_in_a_row(tmp_path: Path) -> None:
    data = page_data(read_run(make_run(tmp_path / "run")))
    for count in range(2, 10):
        figures = (data["figures"] * 3)[:count]
        text = render("report.html", data | {"figures": figures}, **SENTENCES)
        wide, narrow = map(int, re.findall(r"--(?:wide|narrow): (\d+)", text)[:2])
        assert wide <= 7
        assert narrow <= 4
        assert all(count % columns != 1 for columns in (wide, narrow))


@pytest.mark.parametrize(
    ("folder", "model", "data", "title"),
    [
        ("tuned", "10m", (), "tuned"),
        ("20261127-015202", "10m", (), "10m · Python's library · 01:52"),
        ("20261127-015202", "./mine", ("texts/books.jsonl",), "mine · books · 01:52"),
        ("20261127-015202", "tiny", ("books/", "b.txt", "c"), "tiny · books and 2 more · 01:52"),
    ],
)
def test_a_title_is_what_a_person_called_the_run_or_what_it_trains(
    tmp_path: Path, folder: str, model: str, data: tuple[str, ...], title: str
) -> None:
    run = read_run(make_run(tmp_path / folder))
    config = TrainConfig(model=model, data=data)
    assert dataclasses.replace(run, config=config).title == title


def test_a_comparison_says_which_is_better_and_at_each_value_of_which_run(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / "a"), make_traced_run(tmp_path / "b")]
    folder = RunFolder(paths[1])
    metrics = folder.metrics()
    folder.metrics_file.unlink()
    for entry in metrics:
        changed = {"tokens_per_second": 2 * entry["tokens_per_second"], "loss": 2 * entry["loss"]}
        folder.add_metrics(entry | changed)
    page = write_comparison(paths, tmp_path / "both.html").read_text()
    rows = {row.partition("<h2>")[2].partition("<")[0]: row for row in page.split("<tr>")}
    assert re.search('class="good">2.0 x as much, better<', rows["Speed"])
    assert re.search('class="bad">2.0 x as much, worse<', rows["Loss"])
    assert "<em>same</em>" in rows["Step"]
    assert re.findall(r"</i>(\w+)</span>", rows["Speed"]) == ["a", "b"]
    assert {"Where a recorded step goes", "Memory of tensors at the peak"} <= set(
        Page(page).headings
    )


@pytest.mark.skipif(CHROMIUM is None, reason="a browser runs the page's scripts: needs chromium")
def test_a_browser_draws_every_chart_of_a_run_that_was_killed_and_resumed(tmp_path: Path) -> None:
    folder = RunFolder(make_traced_run(tmp_path / "run"))
    metrics = folder.metrics()[:2]
    folder.start(TrainConfig(steps=9), fingerprint="text", done=0)
    for entry in metrics:
        folder.add_metrics({**entry, "grad_norm": math.nan, "lr": 1e29, "val_loss": 2.0})
    folder.start(TrainConfig(steps=5), fingerprint="text", done=1)
    folder.add_metrics({**metrics[1], "grad_norm": 1.0, "lr": 0.0, "val_loss": math.inf})
    pages = [write_report(folder.path, refresh_s=60).page]
    pages.append(write_comparison([folder.path, folder.path], tmp_path / "both.html"))
    drawn = [_drawn(page, tmp_path / "browser") for page in pages]
    assert drawn[0].keys() == {"loss", "speed", "norm", "lr", "memory"}
    assert drawn[1].keys() == {"loss", "val", "speed", "norm"}
    assert all(has_canvas for charts in drawn for has_canvas in charts.values())


def _drawn(page: Path, profile: Path) -> dict[str, bool]:
    """Return by the name of each chart of a page whether a browser has drawn it."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", f"--user-data-dir={profile}", "--dump-dom"]
    done = subprocess.run(
        [*command, page.as_uri()], capture_output=True, check=True, text=True, timeout=60
    )
    parts = re.split(r'data-chart="(\w+)"', done.stdout.partition("<footer>")[0])
    return {name: "<canvas" in text for name, text in zip(parts[1::2], parts[2::2], strict=True)}
