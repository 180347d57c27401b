"""The page of a plan, and a plan beside what was measured."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fullshard.plan.trace import CATEGORIES, TEMPORARY, Kind, RankTrace
from fullshard.planning.choices import SearchSpace
from fullshard.planning.machines import machine_named
from fullshard.planning.search import search_training
from fullshard.planning.setup import TrainingSetup
from fullshard.planning.shapes import TransformerShape
from fullshard.planning.subject import Subject
from fullshard.planning.traces import planned_trace
from fullshard.planning.training import Suggestion, TrainingPlan, planned
from fullshard.tools import cli
from fullshard.tools.beside import beside
from fullshard.tools.config import OptionError
from fullshard.tools.plan_page import (
    Alternative,
    alternatives_of,
    plan_data,
    write_plan,
    write_plan_page,
)
from fullshard.tools.report import markdown, metrics_of, write_report
from fullshard.tools.run_folder import RunFolder
from fullshard.tools.run_record import read_run
from tests.tools.test_report import Page, make_run

GPU = ("--gpu", "H100-80GB-SXM")

SHAPE = TransformerShape(4, 1024, 8, 8, 2816, 32000, 128)
CHROMIUM = shutil.which("chromium")


@functools.cache
def make_plan(network: float = 50e9, **changes: Any) -> TrainingPlan:
    machine = machine_named("H100-80GB-SXM", network_rate=network)
    setup = TrainingSetup(machine, ranks=16, batch=2, seq=2048, checkpointing="full")
    return planned(Subject(SHAPE), dataclasses.replace(setup, **changes))


def _alternatives() -> list[Alternative]:
    plans = [make_plan(checkpointing=how) for how in ("none", "selective", "full")]
    return [
        Alternative(
            f"checkpointing {plan.settings['checkpointing']}",
            "so it is <planned>",
            plan.time.step_s,
            plan.memory.total_nbytes,
            plan.memory.fits,
            is_front=True,
            rank=number,
            settings=plan.settings,
            memory=plan.memory.parts,
            time=plan.time.parts,
            code="fully_shard(model)",
        )
        for number, plan in enumerate(plans, start=1)
    ]


def make_recording(plan: TrainingPlan, device: str = "cuda:0") -> RankTrace:
    """Return what a recorder would have recorded of exactly this step."""
    trace = planned_trace(plan.estimate)
    other = CATEGORIES.index("other")
    samples = tuple(
        sample._replace(
            nbytes=(*sample.nbytes[:other], 0 if device == "cpu" else sum(sample.nbytes[other:]))
        )
        for sample in trace.samples
    )
    return dataclasses.replace(trace, categories=CATEGORIES, samples=samples, device=device)


def test_the_page_of_a_plan_has_every_part_and_loads_nothing(tmp_path: Path) -> None:
    plan = dataclasses.replace(
        make_plan(), suggestions=(Suggestion("use --batch 4", 0.01, -(2**30)),)
    )
    written = write_plan_page(plan, tmp_path / "plan.html", _alternatives())
    page = Page(written.page.read_text())
    assert page.loads == ["data:,"]
    assert not re.findall(r"url\(|@import|fetch\(|XMLHttpRequest|import\(", page.text)
    for heading in (
        *("Step", "Speed", "Utilization (MFU)", "Peak of a rank", "Bound by"),
        *("Memory of a rank at the peak", "Where a step goes", "Alternatives"),
        *("Memory over a step", "Timeline", "Exposed communication per unit", "The plan"),
    ):
        assert heading in page.headings
    assert not {"No trace was recorded", "What holds a rank up"} & {*page.headings}
    assert "left no trace" not in page.text  # of ranks that are like the first
    assert "use <code>--batch</code> 4" in page.text
    assert re.search(r">saves \d+\.\d % of a step, costs 1\.00 GiB<", page.text)
    assert "so it is &lt;planned&gt;" in page.text
    assert json.loads(written.trace.read_text())["traceEvents"]  # type: ignore[union-attr]


def test_parts_on_the_page_add_up_to_the_plan() -> None:
    plan = make_plan()
    data, _ = plan_data(plan)
    for parts in (data["plan"]["memory"]["parts"], data["plan"]["time"]["parts"]):
        assert sum(part["share"] for part in parts) == pytest.approx(1)
    assert data["trace"]["step_ns"] == pytest.approx(1e9 * plan.time.step_s, abs=10)
    assert max(peak["total"] for peak in data["trace"]["peaks"]) == plan.memory.total_nbytes
    assert data["trace"]["capacity"] == plan.memory.capacity_nbytes
    assert sum(share["ns"] for share in data["trace"]["shares"]) == data["trace"]["step_ns"]


def test_a_plan_that_does_not_fit_says_so_first() -> None:
    data, _ = plan_data(make_plan(batch=256, checkpointing="none"))
    assert data["advice"][0]["text"].startswith("It does not fit")
    data, _ = plan_data(make_plan())
    assert data["advice"][0]["text"].startswith("It fits")


def test_what_went_as_planned_differs_nowhere() -> None:
    plan = make_plan()
    for device in ("cuda:0", "cpu"):
        found = beside([planned_trace(plan.estimate)], [make_recording(plan, device)])
        assert {row["difference"] for row in found["time"] + found["memory"]} == {""}
        assert len(found["said"]) == 2  # step and peak
        assert found["notes"] == []


def test_the_sums_beside_are_those_of_the_plan() -> None:
    plan, slow = make_plan(), make_plan(1e9)
    found = beside([planned_trace(plan.estimate)], [make_recording(slow)])
    for rows in (found["time"], found["memory"]):
        *parts, total = (row["values"] for row in rows)
        assert [sum(column) for column in zip(*parts, strict=True)] == pytest.approx(total)
    assert found["time"][-1]["values"] == pytest.approx(
        [1e9 * plan.time.step_s, 1e9 * slow.time.step_s], abs=10
    )
    assert found["memory"][-1]["values"][0] == plan.memory.tensors_nbytes


def test_a_slower_network_is_found_in_units_that_were_planned_hidden() -> None:
    found = beside([planned_trace(make_plan().estimate)], [make_recording(make_plan(1e9))])
    (gather,) = [said for said in found["said"] if "all-gather" in said]
    (row,) = [row for row in found["time"] if row["name"] == "all-gather, exposed"]
    assert re.search(r"expected the all-gather of \S+ hidden; it was exposed for", gather)
    assert "from start to result" in gather
    assert row["values"][1] > 10 * row["values"][0]
    on_cpu = beside([planned_trace(make_plan().estimate)], [make_recording(make_plan(1e9), "cpu")])
    assert "from start to result" not in " ".join(on_cpu["said"])  # not known there


def test_one_unit_that_computes_longer_is_named() -> None:
    plan = make_plan()
    run, shift, slower = make_recording(plan), 0, []
    for segment in run.timeline:
        longer = 0
        if segment.kind is Kind.FORWARD and run.unit_name(segment.unit) == "layers.2":
            longer = run.steps[0].end // 4
        slower.append(
            segment._replace(start=segment.start + shift, end=segment.end + shift + longer)
        )
        shift += longer
    step = run.steps[0]._replace(end=run.steps[0].end + shift)
    run = dataclasses.replace(run, timeline=tuple(slower), steps=(step,))
    said = beside([planned_trace(plan.estimate)], [run])["said"]
    assert "most of all in layers.2" in said[1]


def test_more_activations_than_planned_and_another_number_of_ranks_are_told() -> None:
    plan = make_plan()
    run = make_recording(make_plan(checkpointing="none"))
    found = beside([planned_trace(plan.estimate)], [dataclasses.replace(run, num_ranks=8)])
    assert "Saved for backward: " in found["said"][-1]
    assert "more than planned" in found["said"][-1]
    assert "16 ranks, and 8 ran" in found["notes"][0]


def test_a_plan_in_the_folder_of_a_run_is_laid_beside_it(tmp_path: Path) -> None:
    make_recording(make_plan(1e9)).write(tmp_path)
    page = Page(write_report(tmp_path).page.read_text())
    assert "Planned and measured" not in page.headings
    write_plan(make_plan(), tmp_path / "plan.json")
    page = Page(write_report(tmp_path).page.read_text())
    assert "Planned and measured" in page.headings
    assert read_run(tmp_path).planned == [planned_trace(make_plan().estimate)]
    assert "| Planned and measured: time | Planned | Measured | Difference |" in markdown(
        [tmp_path]
    )
    rows = metrics_of(tmp_path)["planned"]["time"]
    assert rows[-1]["values"][0] == pytest.approx(1e9 * make_plan().time.step_s, abs=10)


@pytest.mark.parametrize("text", ["{", "{}", '{"traces": []}', '{"traces": [{"schema": "x"}]}'])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    make_recording(make_plan()).write(tmp_path)
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(OptionError, match=r"plan\.json: is no plan: .*fullshard plan --out"):
        read_run(tmp_path)


def test_a_recording_is_no_plan(tmp_path: Path) -> None:
    recording = make_recording(make_plan())
    recording.write(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps({"traces": [recording.as_json()]}))
    assert TEMPORARY not in recording.categories
    with pytest.raises(OptionError, match="no planned step"):
        read_run(tmp_path)


def test_what_a_search_found_becomes_points_with_its_reasons() -> None:
    plan = make_plan()
    setup = TrainingSetup(plan.machine, ranks=16, batch=2, seq=2048)
    space = SearchSpace((8, 16), (1, 2), layers_per_unit=(1,), checkpointing=("none", "full"))
    limit = round(plan.memory.total_nbytes)
    found = search_training(SHAPE, setup, space=space, limit_nbytes=limit)
    points = alternatives_of(found)
    assert len({(each.name, each.step_s, each.nbytes) for each in points}) == len(points)
    ranked = sorted((each for each in points if each.rank), key=lambda each: each.rank)
    assert [each.said for each in ranked] == list(found.reasons)
    assert [each.step_s for each in ranked] == [each.step_s for each in found.best]
    assert ranked[0].code.endswith(found.program)
    assert {each.nbytes for each in points if not each.fits} == {
        each.memory.needed_nbytes for each in found.excluded
    }
    data, more = plan_data(plan, points)
    assert len(data["plan"]["alternatives"]) == len(more["alternatives"]) == len(points)
    for point in more["alternatives"]:
        assert sum(part["share"] for part in point["memory"]) == pytest.approx(1)


def test_the_command_writes_the_page_and_what_a_report_reads(tmp_path: Path) -> None:
    run = make_run(tmp_path / "books")
    RunFolder(run).trace_folder.mkdir()
    make_recording(make_plan()).write(RunFolder(run).trace_folder)
    page, plan = tmp_path / "plan.html", run / "plan.json"
    words = ["plan", str(run), *GPU, "--page", str(page), "--out", str(plan), "--batch", "4"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    assert page.resolve().as_uri() in done.output
    settings = json.loads(plan.read_text())["settings"]
    config = RunFolder(run).read_config()
    assert (settings["model"], settings["seq"]) == ("books", config.seq)  # as the run had it
    assert settings["batch"] == 4  # as was typed
    assert "Timeline" in Page(page.read_text()).headings
    notes = metrics_of(run)["planned"]["notes"]
    assert any("16 ran" in note for note in notes)
    assert any("units" in note for note in notes)  # another model was recorded here


def test_what_a_search_finds_is_on_the_page_of_the_command(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    shape = "layers=2,hidden=256,heads=4,ffn=512,vocab=512"
    words = ["plan", "--shape", shape, *GPU, "--ranks", "4", "--seq", "128", "--search"]
    done = CliRunner().invoke(cli.app, [*words, "--page", str(page)])
    assert done.exit_code == 0, done.output
    written = Page(page.read_text())
    assert "Alternatives" in written.headings
    assert len(written.data["plan"]["alternatives"]) > 2  # type: ignore[index]


@pytest.mark.skipif(CHROMIUM is None, reason="a browser runs the page's scripts: needs chromium")
def test_a_browser_draws_alternatives_and_shows_the_first(tmp_path: Path) -> None:
    page = write_plan_page(make_plan(), tmp_path / "plan.html", _alternatives()).page
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", f"--user-data-dir={tmp_path / 'browser'}"]
    done = subprocess.run(
        [*command, "--dump-dom", page.as_uri()],
        capture_output=True,
        check=True,
        text=True,
        timeout=60,
    )
    body = done.stdout.partition("<body>")[2].partition("<script")[0]
    assert body.count("<circle") == 3
    assert 'aria-label="3 alternatives by memory and time. Chosen: checkpointing none' in body
    assert re.findall(r'data-alternative="(\d)"( hidden)?', body) == [
        ("0", ""),
        ("1", " hidden"),
        ("2", " hidden"),
    ]
    assert re.search(r'data-choose="0" aria-pressed="true"', body)
