"""What a run writes: metrics that survive a crash, a schedule, a curve, progress lines."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from fullshard import latest_checkpoint
from fullshard.checkpoint.manifest import MANIFEST, Manifest, dumps
from fullshard.tools.commands import _finish
from fullshard.tools.config import TrainConfig
from fullshard.tools.exits import Exit
from fullshard.tools.job import Job
from fullshard.tools.launch import Ending
from fullshard.tools.progress import Live, Plain
from fullshard.tools.report_data import resumes, running_mean
from fullshard.tools.run_folder import RunFolder
from fullshard.tools.run_record import read_run
from fullshard.tools.train import learning_rate
from fullshard.tools.worker import _what_is_saved

_NUMBERS = {"loss": 2.0, "seconds": 0.5, "tokens_per_second": 9.0, "peak_memory": 100}


def test_metrics_beyond_the_checkpoint_are_dropped_on_resume(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.start(TrainConfig(), fingerprint="x", done=0)
    for step in (1, 2, 3):
        folder.add_metrics({"step": step, **_NUMBERS})
    with folder.metrics_file.open("a") as file:
        file.write('{"step": 4, "lo')  # cut short by a crash
    folder.start(TrainConfig(), fingerprint="x", done=2)
    assert folder.metrics() == [{"step": 1, **_NUMBERS}, {"step": 2, **_NUMBERS}]


def test_options_of_before_each_resume_are_kept_and_their_changes_said(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    first, longer = TrainConfig(steps=400), TrainConfig(steps=150, val_every=5)
    attempts = [(first, 0), (longer, 50), (TrainConfig(steps=90), 80), (TrainConfig(steps=91), 80)]
    for config, done in attempts:
        folder.start(config, fingerprint="x", done=done)
        folder.add_metrics({"step": done + 1, **_NUMBERS})

    def said() -> list[tuple[int, str]]:
        return [(each["step"], each["changed"]) for each in resumes(read_run(folder.path))]

    # Nothing came of the third attempt, which ended before its first checkpoint.
    assert said() == [
        (50, "val_every 50 -> 5, steps 400 -> 150"),
        (80, "val_every 5 -> 50, steps 150 -> 91"),
    ]
    folder.start(first, fingerprint="x", done=60)  # an older checkpoint, of the second attempt
    folder.add_metrics({"step": 61, **_NUMBERS})
    assert said()[1] == (60, "val_every 5 -> 50, steps 150 -> 400")
    folder.start(first, fingerprint="x", done=0)
    folder.add_metrics({"step": 1, **_NUMBERS})
    assert said() == []
    fields = json.loads(folder.config_file.read_text())
    del fields["earlier"]  # as versions wrote it that kept the last options alone
    folder.config_file.write_text(json.dumps(fields))
    assert said() == []


def test_configuration_is_read_back_as_written(tmp_path: Path) -> None:
    config = TrainConfig(data=("a", "b"), lr=0.1, tie_embeddings=True)
    folder = RunFolder(tmp_path / "run")
    folder.start(config, fingerprint="x", done=0)
    assert folder.read_config() == config
    assert folder.read_fingerprint() == "x"
    assert folder.read_summary() is None


@pytest.mark.parametrize(("done", "lost"), [(2, True), (3, False)])
def test_ranks_that_end_without_saving_say_which_step_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, done: int, lost: bool
) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3):
        folder.add_metrics({"step": step, **_NUMBERS})
    job = cast(Job, SimpleNamespace(folder=folder, done=done))
    assert _finish(Ending(Exit.STOPPED), job) == Exit.FAILED
    said = capsys.readouterr().err
    assert ("nothing to save" not in said) == ("step 3" in said) == lost


def test_what_continues_a_run_can_be_typed_whatever_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / 'it\'s a [run]* "1" $HOME')
    folder.start(TrainConfig(), fingerprint="x", done=0)
    folder.add_metrics({"step": 1, **_NUMBERS})
    _finish(Ending(Exit.STOPPED), cast(Job, SimpleNamespace(folder=folder, done=0)))
    (folder.checkpoints / "step-00000001").mkdir(parents=True)
    (folder.checkpoints / "step-00000001" / MANIFEST).write_bytes(dumps(Manifest((), {}, {})))
    for said in (capsys.readouterr().err, _what_is_saved(folder)):
        typed = said[said.index("fullshard train --resume") :]
        assert shlex.split(typed) == ["fullshard", "train", "--resume", str(folder.path)]


def test_folders_that_are_named_otherwise_are_no_checkpoints(tmp_path: Path) -> None:
    for name in ("step-00000020", "step-12abc", "step-00000030-copy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_bytes(dumps(Manifest((), {}, {})))
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 20


def test_the_latest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    for name in ("step-00000100", "step-00000020", "step-00000300", "step-00000400.partial-1a"):
        (tmp_path / name).mkdir()
        if "300" not in name:
            (tmp_path / name / MANIFEST).write_bytes(dumps(Manifest((), {}, {})))
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 100


def test_who_loses_a_rank_before_the_first_checkpoint_hears_that_there_is_none(
    tmp_path: Path,
) -> None:
    said = _what_is_saved(RunFolder(tmp_path))
    assert said == "There was no complete checkpoint yet; start the run again with another --out."


def test_learning_rate_rises_and_falls() -> None:
    config = TrainConfig(lr=1.0, min_lr=0.0, warmup=2, steps=6)
    rates = [learning_rate(config, step) for step in range(6)]
    assert rates == pytest.approx([0.5, 1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)
    assert learning_rate(TrainConfig(lr=1.0, warmup=0, steps=1), 0) == pytest.approx(1e-4)


def test_running_mean_is_not_pulled_to_zero() -> None:
    assert running_mean([4, 2], weight=0.5) == pytest.approx([4, 8 / 3])
    assert running_mean([]) == []


def test_plain_progress_says_the_last_step_and_the_time_left() -> None:
    out = io.StringIO()
    reporter = Plain(Console(file=out, width=200))
    reporter.begin(total=100, done=40)
    for step in range(41, 101):
        reporter.step(step, {"loss": "1.5"})
    lines = out.getvalue().splitlines()
    assert len(lines) == 2, "the first and the last; those between came within two seconds"
    assert lines[-1] == "step 100/100  loss 1.5  0:00 left"


def test_a_terminal_gets_a_bar_with_the_figures() -> None:
    out = io.StringIO()
    reporter = Live(Console(file=out, width=120, force_terminal=True))
    reporter.note("reading [brackets]")
    reporter.begin(total=2, done=0)
    reporter.step(1, {"loss": "1.5"})
    reporter.step(2, {"loss": "1.25"})
    reporter.end()
    reporter.end()
    assert "reading [brackets]" in out.getvalue()
    assert "2/2" in out.getvalue()
    assert "1.25" in out.getvalue()
