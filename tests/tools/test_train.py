"""`fullshard train` from start to end, stopped, and continued."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fullshard
from fullshard.tools import cli
from tests.fresh import Ended, fullshard_on_ranks, in_warm_forks
from tests.tools.processes import (
    DAWDLE_AFTER,
    FOREVER,
    PAGES,
    TINY,
    Dawdling,
    Result,
    losses,
    running,
)

_SAID = r"starting|joining|corpus:|model:|step \d+/90  loss|(SIG\w+: )?stopping after|stopped after step"
_SAID += r"|saving step|writing|loss  |speed  |results  |go on  "
NINETY = (*TINY, *PAGES, "--steps", "90", "--save-every", "60")
DAWDLING = ("--logger", f"{Dawdling.__module__}:{Dawdling.__name__}")


class Straight:
    """Ninety steps without interruption."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.result, self.second = fullshard_on_ranks(
            2, "train", *NINETY, "--out", folder, "--json"
        )
        self.losses = losses(folder)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    run = Straight(tmp_path_factory.mktemp("straight") / "run")
    assert (run.result.code, run.second.code) == (0, 0), run.result.err + run.second.err
    return run


def test_a_run_learns_and_fills_its_folder(straight: Straight) -> None:
    summary = json.loads(straight.result.out)
    assert summary["status"] == "finished"
    assert summary["step"] == len(straight.losses) == 90
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
    assert _checkpoints(straight.folder) == ["step-00000060", "step-00000090"]
    line = json.loads((straight.folder / "metrics.jsonl").read_text().splitlines()[0])
    assert line.keys() >= {"step", "loss", "lr", "grad_norm", "tokens_per_second", "peak_memory"}


def test_progress_goes_to_standard_error_alone(straight: Straight) -> None:
    assert len(straight.result.out.splitlines()) == 1
    assert len(re.findall(r"step 90/90  loss \S+  bytes/s ", straight.result.err)) == 1
    assert "unigram entropy" in straight.result.err
    assert "writing the report" in straight.result.err
    assert straight.second.out + straight.second.err == "", "only rank 0 reports"


def test_what_a_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    ascii_only = "import sys\nsys.stdout.reconfigure(encoding='ascii', errors='strict')"
    more = ("--steps", "1", "--prompt", "caf\u00e9", "--sample-length", "1", "--out", tmp_path)
    (run,) = fullshard_on_ranks(1, "train", *TINY, *PAGES, *more, before=ascii_only)
    assert run.code == 0, run.err
    assert "caf\\xe9" in run.out


def test_runs_of_one_seed_save_the_same(tmp_path: Path) -> None:
    for number in (1, 2):
        before = f"import random, numpy\nrandom.seed({number})\nnumpy.random.seed({number})"
        more = ("--steps", "1", "--out", tmp_path / str(number))
        (run,) = fullshard_on_ranks(1, "train", *TINY, *PAGES, *more, before=before)
        assert run.code == 0, run.err
    assert not fullshard.diff_checkpoints(*(tmp_path / name / "checkpoints" for name in "12"))


def _checkpoints(folder: Path) -> list[str]:
    """List the checkpoints of a run; the newest is the one that `latest` names."""
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names.pop(0) == "latest"
    assert (folder / "checkpoints" / "latest").read_text() == f"{names[-1]}\n"
    return names


def _check_stopped(folder: Path, stopped: Result | Ended, straight: Straight) -> None:
    assert stopped.code == 75, stopped.err
    done = len(losses(folder))
    assert 5 <= done < 60
    assert f"stopped after step {done} of 90, checkpoint saved" in stopped.err
    assert "Traceback" not in stopped.err
    assert "death signal" not in stopped.err
    assert len(re.findall(r"stopping after", stopped.err)) == 1
    lines = stopped.err.splitlines()
    assert all(re.match(_SAID, line) for line in lines), "torch writes into the progress"
    assert losses(folder) == straight.losses[:done]
    assert _checkpoints(folder) == [f"step-{done:08d}"]


@pytest.mark.long  # below, ranks stop on a signal
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP])
def test_each_request_to_stop_stops_a_run(
    straight: Straight, tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    monkeypatch.setenv(DAWDLE_AFTER, "4")
    with running(folder, *NINETY, *DAWDLING, "--save-every", "0") as run:
        run.wait_for_step(5)
        # Ctrl-C reaches the whole foreground group, a supervisor signals the launcher alone.
        if number == signal.SIGINT:
            os.killpg(run.process.pid, number)
        else:
            run.process.send_signal(number)
        _check_stopped(folder, run.finish(), straight)


_ASKS_ITSELF = """
import os, signal, threading, time
from pathlib import Path

def ask():
    while not path.exists() or path.read_text().count("\\n") < 5:
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGTERM)

os.environ["DAWDLE_AFTER"] = "4"
path = Path({!r})
threading.Thread(target=ask, daemon=True).start()
"""


def test_ranks_that_are_asked_to_stop_save_and_say_so(straight: Straight, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    before = _ASKS_ITSELF.format(str(folder / "metrics.jsonl"))
    words = ("train", *NINETY, *DAWDLING, "--save-every", "0", "--out", folder)
    first, second = fullshard_on_ranks(2, *words, before=before)
    _check_stopped(folder, first, straight)
    assert second == (75, "", "")


_CLOSED = """
import os
reading, writing = os.pipe()
os.close(reading)
os.dup2(writing, 1)
os.dup2(writing, 2)
"""


_ONE_ENDS_BY_THE_REQUEST = """
import os, signal
from fullshard.tools.train import Trainer

def asked(trainer, job):
    if trainer.rank == 0:
        os._exit(130)  # it was not ready to save yet
    os.kill(os.getpid(), signal.SIGINT)
    check_alike(trainer, job)

check_alike, Trainer._check_alike = Trainer._check_alike, asked
"""


def test_a_rank_that_loses_another_as_both_are_asked_to_stop_says_nothing(tmp_path: Path) -> None:
    words = ("train", *FOREVER, "--out", tmp_path / "run")
    first, second = fullshard_on_ranks(2, *words, before=_ONE_ENDS_BY_THE_REQUEST)
    assert (first.code, second.code, second.out) == (130, 130, "")
    assert (
        "fullshard" not in second.err
    )  # torch tells of the store, which in this test goes with rank 0


def test_a_run_that_nobody_can_be_told_of_ends_well(tmp_path: Path) -> None:
    words = (*TINY, *PAGES, "--steps", "2", "--trace-steps", "0", "--out", tmp_path / "run")
    assert fullshard_on_ranks(1, "train", *words, before=_CLOSED) == [(0, "", "")]
    assert len(losses(tmp_path / "run")) == 2


def test_a_run_goes_on_exactly_after_its_launcher_and_a_rank_were_killed(
    straight: Straight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each time other steps are traced, which must not show in the losses.
    folder = tmp_path / "run"
    monkeypatch.setenv(DAWDLE_AFTER, "63")
    with running(folder, *NINETY, *DAWDLING) as run:
        run.wait_for_step(64)  # four steps past the checkpoint, which are lost
        run.wait_for_checkpoint(60)
        run.kill_launcher()
        run.finish()
    assert len(run.losses()) < 90
    assert run.losses()[:60] == straight.losses[:60]

    with running(folder, "--save-every", "0", resumes=True, torchrun=2) as run:
        run.wait_for_step(64)
        lost = run.kill_rank(1)
    assert lost.code != 0
    assert "resuming after step 60" in lost.err
    assert "rank 1 died" in lost.err
    assert "complete checkpoint is of step 60 (" in lost.err
    assert "restart from" not in lost.err, "that is for programs which save by themselves"
    assert len(run.losses()) < 90
    assert run.losses() == straight.losses[: len(run.losses())]

    monkeypatch.delenv(DAWDLE_AFTER)
    (resumed,) = fullshard_on_ranks(1, "train", "--resume", folder, "--ranks", "1", "--batch", "4")
    assert resumed.code == 0, resumed.err
    assert "resuming after step 60" in resumed.err
    assert run.losses()[:60] == straight.losses[:60]
    # The same sequences summed in another order: float32 rounding, grown over thirty steps.
    assert run.losses() == pytest.approx(straight.losses, rel=1e-3)


def test_the_sample_comes_from_all_ranks_together(tmp_path: Path) -> None:
    first, second = fullshard_on_ranks(
        2, "train", *TINY, *PAGES, "--steps", "3", "--sample-length", "20", "--prompt", "import ",
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
    """As do DataLoader's workers: they would ask a flag that nobody reads there to stop.

    What was ignored before, as a terminal's end is under `nohup`, asks nobody.
    """
    code = (
        "import os, signal, time\nfrom fullshard.tools.launch import StopRequest\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "stop = StopRequest()\nos.kill(os.getpid(), signal.SIGHUP)\nread, write = os.pipe()\n"
        "if (child := os.fork()) == 0:\n"
        "    os.write(write, b'x')\n    time.sleep(20)\n    os._exit(0)\n"
        "os.read(read, 1)\nos.kill(child, signal.SIGTERM)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), stop.asked)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nprint(stop.asked)"
    )
    (done,) = in_warm_forks(code)
    assert done.out.split() == [str(-signal.SIGTERM), "0", str(int(signal.SIGTERM))], done.err


def test_a_request_to_stop_is_heard_while_the_main_thread_computes() -> None:
    code = """
import hashlib, os, signal, threading
from fullshard.tools import launch

launch._AGAIN_S = 0.0
signal.signal(signal.SIGINT, signal.SIG_DFL)  # jobs in the background ignore it
heard = threading.Event()

def hear(request):
    print(request.asked, request.again, flush=True)
    heard.set()

def ask():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
        heard.wait(0.2)
        heard.clear()

stop = launch.StopRequest(hear)
asking = threading.Timer(0.05, ask)
asking.start()
hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)  # a second in which Python calls no handler
assert not asking.is_alive()
print("computed")
"""
    (done,) = in_warm_forks(code)
    assert done.out.splitlines() == ["2 False", "2 True", "computed"], done.err


@pytest.mark.parametrize(
    ("fails", "said"),
    [("", "for ranks 0-1 to end.*; another Ctrl-C"), ("1", "for rank 0 to end.*; Ctrl-C")],
    ids=["stopped", "failed"],
)
def test_a_ctrl_c_ends_ranks_that_are_waited_for_and_it_is_said_for_which(
    fails: str, said: str
) -> None:
    code = f"""
import os, signal, time
from fullshard.tools import launch

launch.GRACE_S, launch._AGAIN_S, launch._SILENT_S = 0.0, 0.0, 0.3
signal.signal(signal.SIGINT, signal.SIG_DFL)  # jobs in the background ignore it
ended = launch.launch_forks(ranks=2, threads=1)
if ended is None:
    if os.environ["RANK"] == {fails!r}:
        os._exit(1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if os.environ["RANK"] == "0":
        for _ in range({1 if fails else 2}):
            time.sleep(1)
            os.kill(os.getppid(), signal.SIGINT)
    else:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)  # a step that does not end
print("all that is left:", int(ended.code))
"""
    (done,) = in_warm_forks(code)
    assert done.out == f"all that is left: {1 if fails else 75}\n", done.err
    (line,) = [line for line in done.err.splitlines() if "waiting" in line]
    assert re.search(said, line)


def test_ranks_are_forks_only_of_a_launcher_without_other_threads_and_gpus() -> None:
    code = """
import threading
from fullshard.tools import launch

launch._THREADS_OF_IMPORTS = launch._num_threads()
launch.num_gpus = lambda: 0
said = [launch.may_fork()]
launch.num_gpus = lambda: 1
said.append(launch.may_fork())
launch.num_gpus = lambda: 0
over = threading.Event()
threading.Thread(target=over.wait, daemon=True).start()  # it may hold a lock
print(*said, launch.may_fork())
over.set()
"""
    (done,) = in_warm_forks(code)
    assert done.out == "True False False\n", done.err


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


_FULL_DISK = """
import errno, os
from fullshard.checkpoint import save

def fail(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

save.write_files = fail
"""


def test_a_save_that_fails_in_the_background_ends_the_run_before_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ("train", *FOREVER, "--save-every", "50", "--trace-steps", "0", "--out", folder)
    ranks = fullshard_on_ranks(2, *words, before=_FULL_DISK)
    assert [ended.code for ended in ranks] == [1, 1], ranks
    assert 50 < len(losses(folder)) < 100
    said = "".join(ended.err for ended in ranks)
    assert "No space left" in said
    assert said.count("--auto-resume") == 1
    assert "rank 0: rank" not in said


@pytest.mark.parametrize(
    ("wrong", "kept", "options"),
    [
        ("loss is nan", 0, "--lr 1e38 --warmup 0 --clip 0"),
        ("norm is nan", 1, "--lr 1e6 --warmup 4 --save-every 1"),
        (
            "loss of held-out text is nan",
            0,
            "--lr 1e38 --warmup 0 --val-data val.txt --val-every 1",
        ),
        ("weights are not finite", 0, "--lr 1e39 --warmup 0 --clip 0 --save-every 1"),
    ],
)
def test_what_is_not_finite_stops_every_rank_and_is_not_saved(
    tmp_path: Path, wrong: str, kept: int, options: str
) -> None:
    (tmp_path / "val.txt").write_text("what is held out\n" * 400)
    words = options.replace("val.txt", str(tmp_path / "val.txt")).split()
    ranks = fullshard_on_ranks(2, "train", *FOREVER, *words, "--out", tmp_path / "run")
    codes = sorted(ended.code for ended in ranks)
    assert codes in ([1, 1], [1, 3]), ranks  # a rank that sees the other end says that it is lost
    said = "".join(ended.err for ended in ranks)
    # Whoever comes second has nothing to add to it, least of all that one should go on.
    assert said.count(wrong) == said.count("Lower --lr") == 1
    named = {f"step-{step:08d}" for step in range(1, kept + 1)}
    assert {path.name for path in (tmp_path / "run").glob("checkpoints/step-*")} == named
    assert said.count("No checkpoint had been saved") == (not kept)
    assert said.count("--init-from") == 2 * bool(kept)
    assert "Traceback" not in said
