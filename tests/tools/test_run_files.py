"""What a run writes: metrics that survive a crash, a schedule, a curve, progress lines."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from fullshard import latest_checkpoint
from fullshard.tools import progress, run_folder
from fullshard.tools.commands import _finish
from fullshard.tools.config import OptionError, TrainConfig
from fullshard.tools.exits import Exit
from fullshard.tools.job import Job, resumed_job
from fullshard.tools.launch import Ending
from fullshard.tools.progress import Plain
from fullshard.tools.report_data import resumes, running_mean
from fullshard.tools.run_folder import RunFolder
from fullshard.tools.run_record import read_run
from fullshard.tools.train import learning_rate
from tests.tools.conftest import save_nothing

_NUMBERS = {"loss": 2.0, "seconds": 0.5, "tokens_per_second": 9.0, "peak_memory": 100}


def test_metrics_beyond_the_checkpoint_are_dropped_on_resume(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.start(TrainConfig(), fingerprint="x", done=0)
    entries = [{"step": step, **_NUMBERS, "grad_norm": math.inf} for step in (1, 2, 3)]
    for entry in entries:
        folder.add_metrics(entry)
    with folder.metrics_file.open("a") as file:
        file.write('{"step": 4, "lo')  # cut short by a crash
    folder.start(TrainConfig(), fingerprint="x", done=2)
    assert folder.metrics() == entries[:2]
    for line in folder.metrics_file.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # as other readers do


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
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text(f"step-{done:08d}\n")
    assert _finish(Ending(Exit.STOPPED), job) == (Exit.FAILED if lost else Exit.INTERRUPTED)
    said = capsys.readouterr().err
    assert "step 3" in said
    assert ("stays" not in said) == ("saved" in said) == lost


def test_a_rank_that_is_lost_while_ranks_join_leaves_something_to_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, has_begun in (
        (RunFolder(tmp_path / "a"), False),
        (RunFolder(tmp_path / "b"), True),
    ):
        if has_begun:  # then the ranks that are left say what is saved
            folder.start(TrainConfig(), fingerprint="x", done=0)
        lost = Ending(Exit.RANK_LOST, "rank 1 was killed.", 1)
        assert _finish(lost, cast(Job, SimpleNamespace(folder=folder, done=0))) == Exit.RANK_LOST
        assert ("same command again" in capsys.readouterr().err) != has_begun


def test_what_continues_a_run_can_be_typed_whatever_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / 'it\'s a [run]* "1" $HOME')
    folder.start(TrainConfig(), fingerprint="x", done=0)
    folder.add_metrics({"step": 1, **_NUMBERS})
    save_nothing(folder.checkpoints / "step-00000001")
    _finish(Ending(Exit.STOPPED), cast(Job, SimpleNamespace(folder=folder, done=0)))
    for said in (capsys.readouterr().err, folder.what_is_saved()):
        typed = said[said.index("fullshard train --resume") :]
        assert shlex.split(typed) == ["fullshard", "train", "--resume", str(folder.path)]


def test_the_latest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    others = ("step-00000400.partial-1a", "step-12abc", "step-00000500-copy")
    for name in ("step-00000100", "step-00000020", "step-00000300", *others):
        save_nothing(tmp_path / name)
    (tmp_path / "step-00000300" / "manifest.json").unlink()
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 100


def test_who_loses_a_rank_before_the_first_checkpoint_hears_that_there_is_none(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path / "a run")
    # Without its options, what would begin it again from them cannot.
    assert "same command again" in folder.what_is_saved()
    folder.make()
    with pytest.raises(OptionError, match="before its first step"):
        resumed_job(folder.path, {})
    folder.start(TrainConfig(), fingerprint="x", done=0)
    said = folder.what_is_saved()
    assert "no complete checkpoint yet" in said
    typed = shlex.split(said[said.index("fullshard train") :])
    assert typed[2:] == ["--config", str(folder.path), "--out", str(folder.path), "--auto-resume"]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (Path("/proc/nope"), tmp_path / "file" / "run"):
        with pytest.raises(OptionError, match=f"--out {path}: cannot be written"):
            RunFolder(path).make()


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


def test_a_day_of_plain_progress_has_some_hundreds_of_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, now = io.StringIO(), itertools.count(1000.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    reporter = Plain(Console(file=out, width=200))
    reporter.begin(total=30_000, done=0)
    for step in range(1, 30_001):  # of three seconds, as the clock is read about so often
        reporter.step(step, {"loss": "1.5"}, measured=step == 12_345)
    lines = out.getvalue().splitlines()
    assert 200 < len(lines) < 600
    for step in (1, 12_345, 30_000):
        assert any(line.startswith(f"step {step}/") for line in lines)


_RESIZED = """
import fcntl, struct, sys, termios
from rich.console import Console
from fullshard.tools.progress import Live
reporter = Live(Console(stderr=True))
reporter.note("reading [brackets]")
reporter.note("joining ...")
reporter.begin(total=350, done=0)
for loss in ("10.125", "9.875"):
    for validation in ({}, {"val": "2.612"}):
        more = {**validation, "epoch": "1.25", "peak": "0.39 GiB"}
        figures = {"loss": loss, "bytes/s": "12,018", **more}
        reporter.step(7, figures)
        for columns in (60, 80, 120):
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            reporter._show()
reporter.end()
reporter.end()
print("over")
"""


def test_the_line_of_a_terminal_fits_while_it_is_resized() -> None:
    terminal, inside = os.openpty()
    variables = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    with subprocess.Popen(
        [sys.executable, "-c", _RESIZED],
        env=variables | {"TERM": "xterm"},
        stdin=inside,
        stdout=inside,
        stderr=inside,
    ) as process:
        os.close(inside)
        shown = b""
        with contextlib.suppress(OSError):  # the end of a pseudo-terminal
            while part := os.read(terminal, 1 << 16):
                shown += part
    os.close(terminal)
    assert process.returncode == 0, shown
    text = re.sub(r"\x1b\[[0-9;?]*m", "", shown.decode())
    assert text.startswith("reading [brackets]\r\n")
    assert text.endswith("\x1b[?25hover\r\n"), "the cursor is back"
    lines = {each for each in re.split(r"\r\x1b\[2K|\r\n", text) if "/350  0:0" in each}
    for columns, num_figures in ((60, {2}), (80, {3}), (120, {4, 5})):
        fitting = {each for each in lines if columns - 20 < len(each) <= columns - len("^C") - 1}
        assert len(fitting) >= 2, columns
        for line in fitting:
            assert re.search(
                r"step   7/350  0:0\d left  loss ( 9.875|10.125)  bytes/s 12,018", line
            )
            assert len(re.findall("loss|bytes/s|val|epoch|peak", line)) in num_figures, line
            assert ("━" in line) == (columns > 60), line
        lines -= fitting
    assert not lines


def test_what_to_type_is_there_to_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / ".venv" / "bin" / "fullshard"
    there.parent.mkdir(parents=True)
    there.touch()
    monkeypatch.setattr(sys, "executable", str(there.with_name("python")))
    monkeypatch.chdir(tmp_path)
    for path, typed in ((str(there.parent), "fullshard"), ("", ".venv/bin/fullshard")):
        if path:
            there.chmod(0o755)
        monkeypatch.setenv("PATH", path)
        assert run_folder.program.__wrapped__() == typed
