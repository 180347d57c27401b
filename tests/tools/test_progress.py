"""What the terminal shows: speeds that can be read, and text that cannot control it."""

from __future__ import annotations

import io
import json
import re
import unicodedata
from pathlib import Path

import pytest
from rich.console import Console

from fullshard.tools import progress
from fullshard.tools.progress import SPEED_STEPS, Plain, Speed, printable, say
from fullshard.tools.worker import _show, _show_end


def test_speed_is_that_of_the_last_steps_together() -> None:
    speed = Speed()
    assert speed.after(100, 1.0) == 100
    # One slow step of two: 200 tokens in 5 seconds, not the mean of 100 and 25.
    assert speed.after(100, 4.0) == 40
    for _ in range(SPEED_STEPS):
        last = speed.after(100, 0.5)
    assert last == 200, "the first two are forgotten"


def test_control_characters_are_shown_and_not_obeyed() -> None:
    assert printable("a\n\tb c é 你") == "a\n\tb c é 你"
    assert printable("\x1b[2J\r\x07\x00\x9b1m") == "\\x1b[2J\\r\\x07\\x00\\x9b1m"
    assert printable("\u202ereversed") == "\\u202ereversed"
    every = printable("".join(map(chr, range(0x300))))
    assert {c for c in every if unicodedata.category(c) == "Cc"} == {"\n", "\t"}


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [40, 60, 120])
def test_what_ranks_say_is_broken_at_spaces_and_commands_are_whole(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = "bin/fullshard train --resume 'runs/a  b'"
    text = f"fullshard: rank 0: before the reduce-scatter of layers.1 it\n\n{'word ' * 30}continue with: {typed}"
    monkeypatch.setenv("COLUMNS", str(width))
    for stream in (_Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stderr", stream)
        say(text)
        if not stream.isatty():
            assert stream.getvalue() == f"{text}\n"
            continue
        lines = stream.getvalue().removeprefix("\r\x1b[2K").splitlines()
        assert " ".join(lines).split() == text.split()
        assert all(len(line) <= width for line in lines)
        assert sum("reduce-scatter" in line for line in lines) == 1
        assert lines[-1].endswith(typed)


def _summary(folder: Path, **facts: object) -> dict[str, object]:
    names = ("loss", "val_loss", "unigram_entropy", "tokens_per_second", "seconds")
    numbers = dict.fromkeys((*names, "steps", "peak_memory_per_rank"), 1.0)
    words = {"unit": "byte", "status": "finished", "out": str(folder), "report": None}
    return {**numbers, **words, "step": 7, "epochs": None, **facts}


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_end_of_a_run_is_broken_at_spaces_and_commands_are_whole(width: int) -> None:
    folder = Path("/a/folder/with/a/name") / ("long" * 5)
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, color_system=None, width=width)
    _show_end(_summary(folder, report="report.html"), console)
    lines = shown.getvalue().splitlines()
    commands = [line for line in lines if re.search(r"fullshard (train|export) ", line)]
    assert len(commands) == 2
    assert all(str(folder) in line for line in commands)
    whole = {*commands, *(line for line in lines if len(line.split()) == 1)}  # paths
    assert all(len(line) <= width or line in whole for line in lines)
    assert all(not line.startswith(" ") for line in commands if len(line) > width)
    assert " ".join(shown.getvalue().split()).startswith(
        "loss 1.000 nats per byte (mean of the last 7 steps)"
    )
    hanging = [line for line in lines[1:] if line.startswith(" ")]
    assert bool(hanging) == (width < 120)
    assert all(line.startswith(" " * 12) for line in hanging)


def test_the_sample_is_printed_escaped_and_kept_as_it_is_in_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    summary = _summary(tmp_path, epochs=1.5, sample="def\x1b]0;x\x07\n\n  a\n  b\n  c\n")
    _show(summary, Plain(Console()), as_json=False)
    shown = capsys.readouterr().out
    assert "--- sample ---\ndef\\x1b]0;x\\x07\n  a\n  b\n----" in shown
    names = ["loss", "validation", "speed", "results", "go on", "export"]
    end = shown.splitlines()[-len(names) :]
    assert [re.split("  +", line)[0] for line in end] == names
    assert "--epochs 3" in end[4]
    assert {re.match(r"[\w ]*?  +", line).end() for line in end} == {12}  # type: ignore[union-attr]
    _show(summary, Plain(Console()), as_json=True)
    assert json.loads(capsys.readouterr().out)["sample"] == summary["sample"]


@pytest.mark.parametrize("unit", ["bytes", "rows"])
def test_what_takes_long_shows_a_bar_on_a_terminal(
    unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True)
    monkeypatch.setattr(progress, "Console", lambda **_: console)
    with progress.counting("exporting", unit) as update:
        update(10, 100)
        assert not shown.getvalue(), "it may be over soon"
        monkeypatch.setattr(progress, "_BAR_AFTER_S", 0.0)
        update(50, 100)
    assert "exporting" in shown.getvalue()
    assert f"50/100 {unit}" in shown.getvalue()
