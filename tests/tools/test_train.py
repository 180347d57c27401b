"""`fullshard train` from start to end, stopped, and continued."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import termios
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullshard.tools import cli
from tests.fresh import fullshard_on_ranks, in_warm_forks
from tests.tools.processes import (
    FOREVER,
    TINY,
    Result,
    command,
    descendants,
    environment,
    kill,
    losses,
    running,
    train,
    wait_until,
)

_SAID = r"starting|joining|corpus:|model:|step \d+/60  loss|stopped after step"
SIXTY = (*TINY, "--steps", "60", "--save-every", "30")


class Straight:
    """Sixty steps without interruption."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.result: Result = train(*SIXTY, "--out", str(folder), "--json")
        self.losses = losses(folder)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    run = Straight(tmp_path_factory.mktemp("straight") / "run")
    assert run.result.code == 0, run.result.err
    return run


def test_a_run_learns_and_fills_its_folder(straight: Straight) -> None:
    summary = json.loads(straight.result.out)
    assert summary["status"] == "finished"
    assert summary["step"] == len(straight.losses) == 60
    assert straight.losses[-1] < straight.losses[0] - 1
    names = {path.name for path in straight.folder.iterdir()}
    assert names == {
        *("config.json", "metrics.jsonl", "checkpoints", "summary.json"),
        *("trace", "report.html", "trace.json"),
    }
    assert {path.name for path in (straight.folder / "trace").iterdir()} == {
        "rank00000.json",
        "rank00001.json",
    }
    assert summary["report"] == str(straight.folder / "report.html")
    assert _checkpoints(straight.folder) == ["step-00000030", "step-00000060"]
    line = json.loads((straight.folder / "metrics.jsonl").read_text().splitlines()[0])
    assert line.keys() >= {"step", "loss", "lr", "grad_norm", "tokens_per_second", "peak_memory"}


def test_progress_goes_to_standard_error_alone(straight: Straight) -> None:
    assert len(straight.result.out.splitlines()) == 1
    assert "step 60/60" in straight.result.err
    assert "unigram entropy" in straight.result.err
    assert straight.result.err.count("step 60/60") == 1, "only rank 0 reports"


def _checkpoints(folder: Path) -> list[str]:
    """List the checkpoints of a run; the newest is the one that `latest` names."""
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names.pop(0) == "latest"
    assert (folder / "checkpoints" / "latest").read_text() == f"{names[-1]}\n"
    return names


def _stop(folder: Path, number: signal.Signals, straight: Straight) -> int:
    """Ask a run to stop, and return its last step."""
    with running(folder, *SIXTY, "--save-every", "0") as run:
        run.wait_for_step(5)
        # Ctrl-C reaches the whole foreground group, a supervisor signals the launcher alone.
        if number == signal.SIGINT:
            os.killpg(run.process.pid, number)
        else:
            run.process.send_signal(number)
        stopped = run.finish()
    assert stopped.code == 75, stopped.err
    done = len(run.losses())
    assert 5 <= done < 30
    assert f"stopped after step {done} of 60, checkpoint saved" in stopped.err
    assert "Traceback" not in stopped.err
    assert "death signal" not in stopped.err
    lines = stopped.err.splitlines()
    assert all(re.match(_SAID, line) for line in lines), "torch writes into the progress"
    assert run.losses() == straight.losses[:done]
    assert _checkpoints(folder) == [f"step-{done:08d}"]
    return done


@pytest.mark.long  # the run of the next test is stopped too, and leaves the same
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_each_request_to_stop_stops_a_run(
    straight: Straight, tmp_path: Path, number: signal.Signals
) -> None:
    _stop(tmp_path / "run", number, straight)


@pytest.mark.parametrize("nohup", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_terminal_that_is_closed_costs_no_step(tmp_path: Path, *, nohup: bool) -> None:
    """Nobody can be told any more, by then; `nohup` lets the run go on."""

    def in_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        if nohup:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    folder = tmp_path / "run"
    terminal, inside = os.openpty()
    line = command(*FOREVER, "--out", str(folder), "--ranks", "1")
    process = subprocess.Popen(
        line,
        env=environment(),
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
        preexec_fn=in_terminal,  # noqa: PLW1509  (it only asks the system)
    )
    os.close(inside)
    try:
        wait_until(lambda: len(losses(folder)) >= 5, 60)
        os.close(terminal)
        if nohup:
            done = len(losses(folder))
            wait_until(lambda: len(losses(folder)) >= done + 100, 60)
            return
        assert process.wait(60) == 75
    finally:
        for pid in [*descendants(process.pid), process.pid]:
            kill(pid)
        process.wait(10)
    assert _checkpoints(folder) == [f"step-{len(losses(folder)):08d}"]


def test_a_run_goes_on_exactly_however_it_ended(straight: Straight, tmp_path: Path) -> None:
    # Each time other steps are traced, which must not show in the losses.
    folder = tmp_path / "run"
    done = _stop(folder, signal.SIGTERM, straight)

    with running(folder, "--save-every", "30", resumes=True) as run:
        run.wait_for_step(34)  # four steps past the checkpoint, which are lost
        run.wait_for_checkpoint(30)
        run.kill_launcher()
        assert f"resuming after step {done}" in run.finish().err
    assert len(run.losses()) < 60
    assert run.losses()[:30] == straight.losses[:30]

    with running(folder, "--save-every", "0", resumes=True, torchrun=2) as run:
        run.wait_for_step(34)
        lost = run.kill_rank(1)
    assert lost.code != 0
    assert "resuming after step 30" in lost.err
    assert "rank 1 died" in lost.err
    assert "complete checkpoint is of step 30 (" in lost.err
    assert len(run.losses()) < 60
    assert run.losses() == straight.losses[: len(run.losses())]

    (resumed,) = fullshard_on_ranks(1, "train", "--resume", folder, "--ranks", "1", "--batch", "4")
    assert resumed.code == 0, resumed.err
    assert "resuming after step 30" in resumed.err
    assert run.losses()[:30] == straight.losses[:30]
    # The same sequences summed in another order: float32 rounding, grown over thirty steps.
    assert run.losses() == pytest.approx(straight.losses, rel=1e-3)


@pytest.mark.long  # the killed run changes its ranks too; here what changes are the steps
def test_a_finished_run_is_prolonged_on_another_number_of_ranks(
    straight: Straight, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(straight.folder, folder)
    resumed = train("--resume", str(folder), "--steps", "66", "--ranks", "1", "--batch", "4")
    assert resumed.code == 0, resumed.err
    assert losses(folder)[:60] == straight.losses
    assert len(losses(folder)) == 66
    assert max(losses(folder)[60:]) < straight.losses[0] - 1


@pytest.mark.long  # the killed run goes on with one rank
def test_one_rank_learns_the_same(straight: Straight, tmp_path: Path) -> None:
    result = train(*SIXTY, "--batch", "4", "--ranks", "1", "--out", str(tmp_path / "run"))
    assert result.code == 0, result.err
    # The same sequences summed in another order: float32 rounding, grown over sixty steps.
    assert losses(tmp_path / "run") == pytest.approx(straight.losses, rel=1e-3)


def test_the_sample_comes_from_all_ranks_together(tmp_path: Path) -> None:
    first, second = fullshard_on_ranks(
        2, "train", *TINY, "--steps", "3", "--sample-length", "20", "--prompt", "import ",
        "--dtype", "bf16", "--activation-checkpointing", "--grad-accum", "2", "--tie-embeddings",
        "--clip", "0", "--trace-steps", "0", "--out", tmp_path / "run",
    )  # fmt: skip
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "--- sample ---\nimport " in first.out
    assert "unigram entropy" in first.out
    assert not second.out
    assert not (tmp_path / "run" / "trace").exists()
    assert "No trace was recorded" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.long  # above, a run goes on under torchrun
def test_what_a_rank_forks_ends_on_a_signal() -> None:
    """As do DataLoader's workers: they would ask a flag that nobody reads there to stop."""
    code = (
        "import os, signal, time\nfrom fullshard.tools.launch import StopRequest\n"
        "stop = StopRequest()\nread, write = os.pipe()\n"
        "if (child := os.fork()) == 0:\n"
        "    os.write(write, b'x')\n    time.sleep(20)\n    os._exit(0)\n"
        "os.read(read, 1)\nos.kill(child, signal.SIGTERM)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), stop.asked)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nprint(stop.asked)"
    )
    (done,) = in_warm_forks(code)
    assert done.out.split() == [str(-signal.SIGTERM), "0", str(int(signal.SIGTERM))], done.err


def test_folders_may_have_any_name(tmp_path: Path) -> None:
    data, run, hub = (
        tmp_path / f'{name} [1]* it\'s "so" $HOME\n!' for name in ("data", "run", "hub")
    )
    data.mkdir()
    (data / "text [a].txt").write_text("All happy families are alike. " * 200)
    options = (*TINY, "--steps", 2, "--data", data, "--out", run, "--save-every", 1)
    for words in (options, ("--resume", run, "--steps", 3)):
        (ended,) = fullshard_on_ranks(1, "train", *words)
        assert ended.code == 0, ended.err
    assert len(losses(run)) == 3
    assert (run / "checkpoints" / "step-00000003").is_dir()
    for words in (("export", run, "--hf", hub), ("report", run), ("ckpt", "verify", run)):
        result = CliRunner().invoke(cli.app, [*map(str, words)])
        assert result.exit_code == 0, result.output
    assert (hub / "model.safetensors").is_file()
    assert (run / "report.html").is_file()


def test_it_runs_unchanged_under_torchrun(straight: Straight, tmp_path: Path) -> None:
    result = train(*SIXTY, "--out", str(tmp_path / "run"), torchrun=2)
    assert result.code == 0, result.err
    assert losses(tmp_path / "run") == straight.losses


def test_a_loss_that_is_not_finite_stops_every_rank(tmp_path: Path) -> None:
    options = ("--lr", "1e30", "--warmup", "0", "--clip", "0", "--out", tmp_path / "run")
    ranks = fullshard_on_ranks(2, "train", *FOREVER, *options)
    codes = sorted(ended.code for ended in ranks)
    assert codes in ([1, 1], [1, 3]), ranks  # a rank that sees the other end says that it is lost
    for ended in ranks:
        # It has nothing to add to what the other has printed, least of all that one should go on.
        assert "Lower --lr" in ended.err or (ended.code == 3 and "checkpoint" not in ended.err)
        assert "Traceback" not in ended.err
