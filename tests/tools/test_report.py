"""`fullshard report`: the page, the numbers, and folders that do not have everything."""

from __future__ import annotations

import dataclasses
import html
import html.parser
import json
import math
import os
import re
import shlex
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from typer.testing import CliRunner

from fullshard.models.llama import Llama
from fullshard.models.sizes import SIZES
from fullshard.plan.trace import Pause
from fullshard.tools import cli
from fullshard.tools.config import TrainConfig
from fullshard.tools.exits import Exit
from fullshard.tools.report import (
    FOLLOW_S,
    _missing_trace,
    compare,
    comparison_lines,
    markdown,
    metrics_of,
    write_comparison,
    write_report,
)
from fullshard.tools.run_facts import gather_facts, peak_flops
from fullshard.tools.run_folder import RunFolder
from fullshard.tools.run_record import read_run
from fullshard.tools.train import steps_to_trace
from tests.tools.test_trace_metrics import hand_made

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(html.parser.HTMLParser):
    """Checks that elements nest, and collects what a browser would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.open: list[str] = []
        self.loads: list[str] = []
        self.headings: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element and what it loads."""
        if tag != "a":  # a link loads nothing until somebody follows it
            self.loads += [value or "" for name, value in attrs if name in ("src", "href", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close the innermost element."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Note a heading's text."""
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)

    @property
    def data(self) -> dict[str, object]:
        """What the scripts draw."""
        found = re.search(r'<script type="application/json" id="data">(.*?)</script>', self.text)
        assert found
        return json.loads(found[1])


def make_run(path: Path, *, steps: int = 30) -> Path:
    """Write what `fullshard train` leaves, with 100 tokens a second and a loss that falls to 2."""
    folder = RunFolder(path)
    folder.start(TrainConfig(steps=steps), fingerprint="text", done=0)
    for step in range(1, steps + 1):
        folder.add_metrics(
            {
                "step": step, "loss": 2 + 3 / step, "seconds": 10.24 if step > 1 else 60.0,
                "tokens_per_second": 100.0 if step > 1 else 17.0, "peak_memory": 2**30,
            }
        )  # fmt: skip
    folder.write_summary(
        {"status": "finished", "unigram_entropy": 3.25, "peak_memory_per_rank": 3 * 2**30}
    )
    return path


def make_traced_run(path: Path) -> Path:
    """Add a trace of two ranks."""
    folder = RunFolder(make_run(path)).trace_folder
    folder.mkdir()
    for rank in range(2):
        hand_made(rank).write(folder)
    return path


def figures(path: Path) -> dict[str, float]:
    return {name: figure["value"] for name, figure in metrics_of(path)["figures"].items()}


def test_the_page_has_every_part_and_loads_nothing(tmp_path: Path) -> None:
    written = write_report(make_traced_run(tmp_path / "books"))
    page = Page(written.page.read_text())
    wanted = {
        "books", "Speed", "Exposed communication", "Where a step goes", "Timeline",
        "Exposed communication per unit", "What holds a rank up", "Memory over a step", "Loss",
    }  # fmt: skip
    assert wanted <= set(page.headings)
    assert page.loads == ["data:,"]
    assert not re.findall(r"url\(|@import|fetch\(|XMLHttpRequest|import\(", page.text)
    # The only addresses are a link, and where uPlot is from.
    addresses = {"https://github.com/leeoniya/uPlot", "https://ui.perfetto.dev"}
    assert set(re.findall(r"https?://[^\"' >]+", page.text)) <= addresses
    assert page.text.count('<details class="how') == len(page.data["figures"]) + 7
    assert written.trace is not None
    assert json.loads(written.trace.read_text())["traceEvents"]


def test_numbers_of_a_run_are_those_that_were_put_in(tmp_path: Path) -> None:
    found = figures(make_traced_run(tmp_path / "run"))
    assert found["tokens_per_second"] == 100
    assert found["step_seconds"] == 10.24  # of the same steps as the speed, not of the recorded one
    assert found["exposed_share"] == pytest.approx(300 / 1100)
    assert found["peak_tensor_bytes"] == 40
    assert found["peak_memory"] == 3 * 2**30
    assert found["loss"] == pytest.approx(sum(2 + 3 / step for step in range(11, 31)) / 20)


@pytest.mark.parametrize("losses", [(3.0, math.nan, 2.0), (math.inf, math.nan)])
def test_numbers_that_are_not_finite_are_marked_and_the_others_shown(
    tmp_path: Path, losses: tuple[float, ...]
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.start(TrainConfig(steps=len(losses)), fingerprint="text", done=0)
    for step, loss in enumerate(losses, start=1):
        folder.add_metrics(
            {
                "step": step, "loss": loss, "val_loss": loss, "grad_norm": 1 / loss, "lr": 1e-3, "seconds": 1.0,
                "tokens_per_second": 1.0, "peak_memory": 1,
            }
        )  # fmt: skip
    folder.write_summary({"status": "finished", "loss": math.nan})
    page = Page(write_report(folder.path).page.read_text())
    comparison = write_comparison([folder.path, folder.path], tmp_path / "both.html").read_text()
    printed = [
        CliRunner().invoke(cli.app, ["report", *[str(folder.path)] * times, "--json"]).output
        for times in (1, 2)
    ]
    embedded = re.findall(r'id="data">(.*?)</script>', page.text + comparison)
    for text in (*embedded, *printed, folder.summary_file.read_text()):
        json.loads(text, parse_constant=pytest.fail)  # NaN is no JSON: browsers draw nothing
    series = cast(dict[str, Any], page.data["series"])
    assert series["loss"] == [each if math.isfinite(each) else str(each) for each in losses]
    assert [step for step, _ in series["not_finite"]] == [
        step for step, loss in enumerate(losses, start=1) if not math.isfinite(loss)
    ]
    assert "not finite: loss " in page.text
    finite = [each for each in losses if math.isfinite(each)]
    said = metrics_of(folder.path)["figures"]["loss"]["value"]
    assert said == 2.5 if finite else math.isnan(said)


def test_every_number_says_how_it_is_computed(tmp_path: Path) -> None:
    metrics = metrics_of(make_traced_run(tmp_path / "run"))
    parts = [*metrics["figures"].values()]
    parts += [metrics[name] for name in ("time", "waits", "units", "stalls", "memory")]
    assert all(len(part["how"]) > 40 for part in parts)


def test_what_holds_ranks_up_is_named_where_it_matters(tmp_path: Path) -> None:
    quiet = hand_made(0)
    slow = dataclasses.replace(hand_made(1), pauses=(Pause(100, 155),), num_alloc_retries=4)
    quiet.write(tmp_path)
    hand_made(1).write(tmp_path)
    said = Page(write_report(tmp_path).page.read_text()).text
    assert "Neither the garbage collector nor a device" in said
    slow.write(tmp_path)
    said = Page(write_report(tmp_path).page.read_text()).text
    assert "The garbage collector takes 5.0 % of a step on rank 1" in said
    assert "gc.freeze()" in said
    assert "The allocator of rank 1 ran out of memory 4 times" in said
    found = metrics_of(tmp_path)["stalls"]["ranks"]
    assert [each["matters"] for each in found] == [False, True]


def test_a_run_without_a_trace_says_how_to_record_one(tmp_path: Path) -> None:
    written = write_report(make_run(tmp_path / "run"))
    page = Page(written.page.read_text())
    assert written.trace is None
    assert "No trace was recorded" in page.headings
    assert "--trace-steps" in page.text
    assert {"Loss", "Bytes per second"} <= set(page.headings)
    assert "Timeline" not in page.headings
    assert figures(tmp_path / "run")["step_seconds"] == 10.24


def test_traces_alone_make_a_page(tmp_path: Path) -> None:
    hand_made(0).write(tmp_path)
    page = Page(write_report(tmp_path).page.read_text())
    assert "Timeline" in page.headings
    assert "Bytes per second" not in page.headings
    assert "1 of 2 ranks left no trace" in page.text


def test_a_page_follows_a_run_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(make_run(tmp_path / "run"))
    ending = folder.summary_file.read_text()
    folder.summary_file.unlink()
    refreshes = []

    def sleep(_: float) -> None:
        refreshes.append(Page(folder.report_file.read_text()).data["refresh_s"])
        if len(refreshes) == 2:
            folder.summary_file.write_text(ending)

    monkeypatch.setattr("fullshard.tools.report.time.sleep", sleep)
    done = CliRunner().invoke(cli.app, ["report", str(folder.path), "--follow"])
    assert done.exit_code == Exit.OK
    assert refreshes == [FOLLOW_S, FOLLOW_S]
    assert Page(folder.report_file.read_text()).data["refresh_s"] is None
    done = CliRunner().invoke(cli.app, ["report", str(folder.path), "--follow"])
    assert len(refreshes) == 2
    assert "is not going on" in done.output


def test_following_ends_with_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.start(TrainConfig(), fingerprint="text", done=0)  # before its first step

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fullshard.tools.report.time.sleep", interrupt)
    for path, code in ((folder.path, Exit.OK), (tmp_path / "none", Exit.USAGE)):
        done = CliRunner().invoke(cli.app, ["report", str(path), "--follow"])
        assert done.exit_code == code


@pytest.mark.parametrize(
    ("trace_steps", "said"), [(3, "got to step 10 of 30"), (0, "--trace-steps 0")]
)
def test_a_missing_trace_has_the_cause_that_it_has(
    tmp_path: Path, trace_steps: int, said: str
) -> None:
    folder = RunFolder(make_run(tmp_path / "run", steps=10))
    folder.summary_file.unlink()
    config = TrainConfig(steps=30, trace_steps=trace_steps)
    folder.start(config, fingerprint="text", done=10)
    run = read_run(folder.path)
    assert said in _missing_trace(run)


def test_a_run_that_was_stopped_early_says_so(tmp_path: Path) -> None:
    folder = RunFolder(make_run(tmp_path / "run"))
    folder.summary_file.unlink()
    assert "not finished" in write_report(folder.path).page.read_text()


def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    trace = hand_made(0)
    evil = trace.units[1]._replace(name="</script><b>&")
    dataclasses.replace(trace, units=(trace.units[0], evil)).write(tmp_path)
    page = Page(write_report(tmp_path).page.read_text())
    assert "</script><b>&" in page.data["trace"]["names"]


def test_the_command_writes_prints_and_refuses(tmp_path: Path) -> None:
    run = make_traced_run(tmp_path / "run")
    call = lambda *words: CliRunner().invoke(cli.app, ["report", *map(str, words)])  # noqa: E731
    done = call(run)
    assert done.exit_code == Exit.OK
    result, advice, link = done.output.splitlines()
    assert {"100 bytes/s", "10.2 s a step", "27.3 %"} <= set(re.split(r", | of it", result))
    assert advice.startswith("27 % of a step is exposed communication")
    assert link == (run / "report.html").as_uri()
    assert (run / "trace.json").is_file()
    assert all(
        fact in call(run, "--md").output
        for fact in (advice, "| layer | 0.05 µs | 0.09 µs | 0.14 µs", "## run")
    )
    for other in ("--follow", "--json"):
        assert call(run, "--md", other).exit_code == Exit.USAGE
    typo = call(run, "--out", tmp_path / "elsewhere" / "page.html")
    assert typo.exit_code == Exit.USAGE
    assert f"there is no folder {tmp_path / 'elsewhere'}" in typo.output
    (tmp_path / "elsewhere").mkdir()
    other = call(run, "--out", tmp_path / "elsewhere" / "page.html")
    assert other.exit_code == Exit.OK
    assert (tmp_path / "elsewhere" / "page.html").is_file()
    assert (tmp_path / "elsewhere" / "trace.json").is_file()
    refused = call(run, "--out", "/proc/page.html")
    assert refused.exit_code == Exit.USAGE
    assert "/proc/page.html: cannot be written" in refused.output
    printed = json.loads(call(run, "--json").output)
    assert printed["figures"]["tokens_per_second"]["value"] == 100
    for folder, said in (
        (tmp_path / "nothing", "there is no such folder"),
        (run / "report.html", "is a file"),
        (tmp_path / "elsewhere", "there is no"),
    ):
        for more in ((), ("--follow",)):
            refused = call(folder, *more)
            assert refused.exit_code == Exit.USAGE
            assert said in refused.output
    (run / "trace" / "rank00001.json").write_text("{")
    broken = call(run)
    assert broken.exit_code == Exit.USAGE
    assert "rank00001.json: cannot be read as a trace" in broken.output


@pytest.mark.parametrize(
    ("steps", "done", "asked", "expected"),
    [
        (30, 0, 3, range(14, 17)),
        (350, 0, 3, range(174, 177)),
        (350, 300, 3, range(324, 327)),
        (5, 0, 3, range(1, 4)),
        (3, 0, 3, range(1, 2)),
        (1, 0, 3, range(1)),
        (30, 0, 0, range(15, 15)),
    ],
)
def test_steps_in_the_middle_are_traced(steps: int, done: int, asked: int, expected: range) -> None:
    config = TrainConfig(steps=steps, trace_steps=asked)
    assert steps_to_trace(config, done=done) == expected


def test_the_page_says_what_the_run_was_made_of(tmp_path: Path) -> None:
    folder = RunFolder(make_traced_run(tmp_path / "run"))
    config = TrainConfig(steps=30, val_fraction=0.1, log=("wandb",))
    facts = gather_facts(
        num_parameters=9_600_000,
        flops_per_token=SIZES["10m"].flops_per_token(seq=256),
        device=torch.device("cpu"),
    )
    metrics = [{**entry, "lr": 1e-3, "grad_norm": 2.0} for entry in folder.metrics()]
    metrics[9]["val_loss"] = 2.5
    folder.start(config, fingerprint="text", done=0, facts=facts)
    for entry in metrics:
        folder.add_metrics(entry)
    page = Page(write_report(folder.path).page.read_text())
    assert {"Gradient norm", "Learning rate", "The run"} <= set(page.headings)
    assert page.data["series"]["val"] == [[10, 2.5]]
    assert page.data["series"]["norm"] == [2.0] * 30
    about = dict(page.data["about"])
    assert about["Model"] == f"9,600,000 parameters, {facts['flops_per_token']:,} FLOPs a token"
    assert f"torch {torch.__version__}" in about["Versions"]
    assert "processors" in about["Host"]
    options = dict(page.data["options"])
    assert options["val_fraction"] == "0.1"
    assert options["log"] == "wandb"
    assert set(options) == {field.name for field in dataclasses.fields(TrainConfig)}
    found = figures(folder.path)
    assert found["val_loss"] == 2.5
    assert found["flops"] == pytest.approx(facts["flops_per_token"] * 100 / 2)  # of each of 2 ranks
    # Resumed on another number of ranks: a step counts with those that took it.
    folder.start(dataclasses.replace(config, ranks=1), fingerprint="text", done=25, facts=facts)
    assert figures(folder.path)["flops"] == found["flops"]
    assert "mfu" not in found  # nobody says what this processor reaches
    assert 'href="trace.json"' in page.text


def test_utilization_is_of_what_the_maker_says(tmp_path: Path) -> None:
    folder = RunFolder(make_run(tmp_path / "run"))
    facts = {
        "hardware": {"device": "NVIDIA H100 80GB HBM3", "processor": "a", "processors": 2}
        | {"memory_nbytes": 2**34, "system": "Linux"},
        "versions": {"torch": "2.13.0"},
        "num_parameters": 10,
        "flops_per_token": int(989.4e12 / 100),
    }
    metrics = folder.metrics()
    folder.start(TrainConfig(steps=30, dtype="bf16"), fingerprint="text", done=0, facts=facts)
    for entry in metrics:
        folder.add_metrics(entry)
    assert figures(folder.path)["mfu"] == pytest.approx(0.5)  # 100 tokens/s of two ranks
    assert peak_flops("NVIDIA H200", "bf16") == 989.4e12
    assert peak_flops("NVIDIA H200", "fp32") is None
    assert peak_flops("Somebody's X1", "bf16") is None


def test_operations_are_counted_as_papers_do() -> None:
    config = SIZES["10m"]
    with torch.device("meta"):
        model = Llama(config)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2)
    matrices -= config.vocab_size * config.hidden_size  # rows of the embedding are looked up
    attention = 12 * config.num_layers * config.hidden_size * 256
    assert config.flops_per_token(seq=256) == 6 * matrices + attention


def test_runs_are_compared_with_the_first(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "a"), make_traced_run(tmp_path / "b")
    folder = RunFolder(second)
    metrics = folder.metrics()
    folder.start(TrainConfig(steps=30, lr=1e-4), fingerprint="text", done=0)
    for entry in metrics:
        folder.add_metrics({**entry, "tokens_per_second": 2 * entry["tokens_per_second"]})
    found = compare([first, second])
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["tokens_per_second"]["values"] == [100, 200]
    assert rows["tokens_per_second"]["ratios"] == [1, 2]
    assert rows["tokens_per_second"]["changes"] == ["same", "2.0 x as much"]
    rows = {row["name"]: row for row in compare([second, first])["rows"]}
    assert rows["tokens_per_second"]["changes"] == ["same", "50 % less"]
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["exposed_share"]["values"][0] is None  # was not traced
    assert (rows["tokens_per_second"]["better"], rows["loss"]["better"]) == ("higher", "lower")
    parts = {row["name"]: row["values"] for row in compare([second, second])["parts"]}
    assert parts["time of barrier"] == [100, 100]
    assert parts["memory of saved"] == [30, 30]
    assert found["options"] == [("lr", ["0.002", "0.0001"])]
    out = tmp_path / "both.html"
    assert write_comparison([first, second], out) == out
    page = Page(out.read_text())
    assert {"What came out", "Loss, running mean", "Loss held out"} <= set(page.headings)
    assert page.loads == ["data:,"]
    assert [run["name"] for run in page.data["runs"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ({}, {"tokenizer": "t.json"}, "in nats per token, and those per byte"),
        ({"tokenizer": "t.json"}, {"tokenizer": "other.json"}, "another tokenizer"),
        ({}, {"fingerprint": "other"}, "other text"),
        ({"val_fraction": 0.1}, {"val_fraction": 0.2}, "another part"),
        ({"tokenizer": "t.json"}, {"tokenizer": "t.json", "lr": 1e-3, "model": "tiny"}, ""),
    ],
    ids=["bytes", "tokenizers", "text", "held out", "alike"],
)
def test_losses_of_other_tokens_or_text_are_not_compared(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], why: str
) -> None:
    paths = [make_run(tmp_path / name) for name in ("a", "b")]
    for number, (path, options) in enumerate(zip(paths, (first, second), strict=True)):
        given = {"fingerprint": "text", **options}
        fingerprint = given.pop("fingerprint")
        folder = RunFolder(path)
        metrics = folder.metrics()
        facts = gather_facts(
            num_parameters=1000 * (1 + number), flops_per_token=None, device=torch.device("cpu")
        )
        files = {"tokenizer.json": options.get("tokenizer", "").encode()}
        folder.start(
            TrainConfig(**given), fingerprint=fingerprint, done=0, facts=facts, tokenizer=files
        )
        for entry in metrics:
            folder.add_metrics({**entry, "val_loss": 2 * entry["loss"] + number})
    found = compare(paths)
    assert why in found["note"]
    assert ("Losses" in found["note"]) == bool(why)
    assert "differ in size: a 1,000, b 2,000 parameters" in found["note"]
    page = write_comparison(paths, tmp_path / "both.html").read_text()
    assert found["note"] in page
    assert ("Bytes or tokens per second" in Page(page).headings) == why.startswith("in nats")
    assert found["note"] in markdown(paths)
    assert found["note"] in " ".join(comparison_lines(paths))
    assert compare([paths[0]] * 2)["note"] == ""
    rows = {row["name"]: row for row in found["rows"]}
    for name in ("loss", "val_loss"):
        assert (rows[name]["ratios"][1] is None) == (rows[name]["changes"][1] == "") == bool(why)
    assert rows["step_seconds"]["changes"] == ["same", "same"]
    if why.startswith("in nats"):
        loss = f"{rows['loss']['values'][0]:.3f}"
        assert rows["loss"]["texts"] == [f"{loss} nats/byte", f"{loss} nats/token"]
        assert rows["tokens_per_second"]["ratios"] == [1, None]


def test_the_folder_above_runs_names_the_newest(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "a b", "old", "oldest")):
        run = RunFolder(make_run(tmp_path / name))
        os.utime(run.metrics_file, (1e9 - age, 1e9 - age))
    (tmp_path / "no-run").mkdir()
    for more in ((), ("--follow",)):
        done = CliRunner().invoke(cli.app, ["report", str(tmp_path), *more])
        assert done.exit_code == Exit.USAGE
        typed = re.findall(r"fullshard report (\S*/.*|'.*')$", done.output, re.M)
        assert typed == [shlex.quote(str(tmp_path / name)) for name in ("new", "a b", "old")]


def test_the_command_compares_several_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [str(make_run(tmp_path / name / "run")) for name in ("x", "y")]
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.app, ["report", *runs])
    assert done.output.splitlines()[-1] == (tmp_path / "comparison.html").as_uri()
    assert (tmp_path / "comparison.html").is_file()
    done = CliRunner().invoke(cli.app, ["report", *runs, "--json"])
    assert json.loads(done.output)["name"] == " and ".join(runs)  # both are called run
    done = CliRunner().invoke(cli.app, ["report", *runs, "--md"])
    assert "| Speed | 100 bytes/s | 100 bytes/s (same) |" in done.output
    done = CliRunner().invoke(cli.app, ["report", *runs * 5])
    assert done.exit_code == Exit.USAGE
    assert "10 runs are too many" in done.output
    done = CliRunner().invoke(cli.app, ["report", runs[0], str(tmp_path / "nothing")])
    assert done.exit_code == Exit.USAGE


def test_runs_of_before_there_were_facts_are_reported(tmp_path: Path) -> None:
    folder = RunFolder(make_run(tmp_path / "run"))
    fields = json.loads(folder.config_file.read_text())
    del fields["facts"]
    folder.config_file.write_text(json.dumps(fields))
    page = Page(write_report(folder.path).page.read_text())
    assert page.data["about"] == []
    assert page.data["series"]["norm"] is None
