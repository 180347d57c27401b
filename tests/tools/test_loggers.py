"""`--log`: a run's numbers, sent where people look at them; and the loss on text that is held out."""

from __future__ import annotations

import json
import re
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.tools.config import OptionError, TrainConfig
from fullshard.tools.loggers import (
    Loggers,
    RunInfo,
    check_loggers,
    make_loggers,
)
from fullshard.tools.text.cache import CorpusError
from tests.examples.test_examples import PYTHON
from tests.fresh import Ended, fullshard_on_ranks
from tests.tools.processes import PAGES, TINY, environment
from tests.tools.text.conftest import byte_text

LOGGER = '''
import json
from fullshard.tools.loggers import RunLogger

class Notes(RunLogger):
    """Writes what it is told beside the run."""

    def start(self, run):
        self.path = run.folder / "notes.jsonl"
        self.note("start", run.name, run.done, run.config["steps"])

    def log(self, step, values):
        self.note("log", step, values)

    def finish(self, summary):
        self.note("finish", summary["status"])

    def note(self, *what):
        with self.path.open("a") as file:
            file.write(json.dumps(what) + "\\n")

class Broken(RunLogger):
    def log(self, step, values):
        raise OSError("no network")

def not_one():
    return 1
'''


def _train(folder: Path, *words: object, ranks: int = 2) -> list[Ended]:
    """Train as the ranks that torchrun starts, in a folder that has the loggers above in logs.py."""
    (folder / "logs.py").write_text(LOGGER)
    line = ("train", *TINY, *PAGES, "--trace-steps", "0", *words)
    own_path = "import sys\nsys.path.insert(0, '')"
    return fullshard_on_ranks(ranks, *line, folder=folder, before=own_path)


def _notes(folder: Path) -> list[list]:
    return [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]


def test_a_logger_of_one_s_own_is_told_of_the_whole_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ("--logger", "logs:Notes", "--logger", "logs:Broken", "--val-fraction", "0.01")
    options += ("--val-every", "2", "--val-sequences", "5")
    ended = _train(tmp_path, "--steps", 3, "--out", out, *options)
    assert [each.code for each in ended] == [0, 0], ended
    assert (
        "--log logs:Broken: failed, and is left out from here: OSError: no network" in ended[0].err
    )
    assert ended[0].err.count("no network") == 1
    start, *steps, finish = _notes(out)
    assert start == ["start", "run", 0, 3]
    assert finish == ["finish", "finished"]
    assert [step for _, step, _ in steps] == [1, 2, 3]
    usual = {"loss", "lr", "grad_norm", "seconds", "tokens_per_second", "peak_memory"}
    assert set(steps[0][2]) == usual
    assert set(steps[1][2]) == set(steps[2][2]) == {*usual, "val_loss"}  # due, and the end
    assert json.loads((out / "summary.json").read_text())["val_loss"] == steps[2][2]["val_loss"]

    ended = _train(tmp_path, "--resume", out, "--steps", 4)
    assert [each.code for each in ended] == [0, 0], ended
    start, step, _ = _notes(out)[5:]
    assert start == ["start", "run", 3, 4]
    assert step[1] == 4


def test_a_run_that_fails_is_ended_as_such(tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended = _train(tmp_path, "--steps", 9, "--out", out, "--logger", "logs:Notes", "--lr", "1e30")
    assert all(each.code for each in ended)
    assert _notes(out)[-1] == ["finish", "failed"]


@given(
    seed=st.integers(0, 2**31 - 1),
    step=st.integers(0, 1000),
    fraction=st.floats(0.05, 0.9),
    count=st.integers(1, 20),
)
def test_what_is_held_out_is_never_trained_on(
    tmp_path_factory: pytest.TempPathFactory, seed: int, step: int, fraction: float, count: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "held_out"
    folder.mkdir(exist_ok=True)
    text = folder / "text.txt"
    if not text.exists():
        text.write_bytes(bytes(1 + n % 251 for n in range(1000)))
    corpus = byte_text([str(text)], seq=8, val_fraction=fraction, seed=seed, val_sequences=count)
    assert corpus.train_nbytes + corpus.val_nbytes == 1000
    for index in range(8):
        assert corpus.start(step, index) + 8 < corpus.train_nbytes
    rows = corpus.held_out(range(count)).inputs
    assert rows.shape == (count, 8)
    data = corpus.read(corpus.train_nbytes, corpus.val_nbytes)
    assert all(bytes(row.tolist()) in data for row in rows)
    assert bytes(rows[0].tolist()) == data[:8]
    assert corpus.held_out(range(count, count + 2)).inputs.equal(rows[-1].expand(2, -1))


def test_without_a_split_the_same_windows_are_drawn_as_ever(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(1 + n % 251 for n in range(1000)))
    text = byte_text([str(tmp_path)], seq=8, seed=3)
    assert text.val_nbytes == 0
    drawn = text.batch(5, range(4)).inputs
    assert drawn[:, 0].tolist() == [166, 49, 124, 220]  # as before there were splits


def test_text_too_short_to_be_split_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    for fraction, held in ((0.05, 5), (0.95, 95)):
        with pytest.raises(CorpusError, match=f"holds {held} out and leaves {100 - held}, but one"):
            byte_text([str(tmp_path)], seq=8, val_fraction=fraction)
    with pytest.raises(OptionError, match=r"--val-fraction 1\.0: must be from 0 to below 1"):
        TrainConfig(val_fraction=1.0)
    with pytest.raises(OptionError, match="--val-sequences 0"):
        TrainConfig(val_sequences=0)


def test_names_that_mean_nothing_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OptionError, match=r"--log tensorbord: choose from tensorboard, wandb"):
        check_loggers(["tensorbord"])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(OptionError, match=r"--log mlflow: is not installed: pip install mlflow"):
        check_loggers(["mlflow"])
    with pytest.raises(OptionError, match="expected MODULE:FUNCTION"):
        check_loggers(["my-logs:Notes"])
    check_loggers(["logs:Notes"])  # it is imported where it runs
    (tmp_path / "own_logs.py").write_text(LOGGER)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(OptionError, match=r"made a int, which is no fullshard\.tools\.loggers"):
        make_loggers(["own_logs:not_one"], print)
    with pytest.raises(OptionError, match="has no function 'Other'"):
        make_loggers(["own_logs:Other"], print)


def test_the_page_s_class_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    (program,) = re.findall(r"```python\n(# mylogs.*?)```", page, re.S)
    names: dict[str, Any] = {}
    exec(program, names)
    loggers = Loggers([("mylogs:Chat", names["Chat"]())], pytest.fail)
    loggers.start(RunInfo(tmp_path / "run", {"model": "tiny"}, 3))
    for step in (99, 100):
        loggers.log(step, {"loss": 2.0, "val_loss": 2.5})
    loggers.finish({"status": "finished"})
    assert capsys.readouterr().out.splitlines() == [
        "run begins after step 3, model tiny",
        "step 100: loss 2.000, held out 2.5",
        "finished",
    ]


READ_BACK = """
import glob, mlflow, sqlite3, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator("run/tensorboard")
events.Reload()
print("tensorboard", *[event.step for event in events.Scalars("loss")])
client = mlflow.MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("fullshard").experiment_id])
history = client.get_metric_history(run.info.run_id, "loss")
print("mlflow", *[metric.step for metric in history], run.info.status, run.data.params["steps"])
ids = {name.rsplit("-", 1)[1] for name in glob.glob("run/wandb/offline-run-*")}
print("wandb", len(ids))
database = sqlite3.connect("trackio/fullshard.db")
print("trackio", *[row[0] for row in database.execute("select step from metrics order by step")])
"""


@pytest.mark.long  # four libraries, which take seconds to import
def test_loggers_that_people_use_take_a_run_and_go_on_with_it(tmp_path: Path) -> None:
    if not PYTHON.is_file():
        pytest.skip(f"{PYTHON} is not there: `make parity` makes it, with the loggers' packages")
    variables = environment() | {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
    }
    variables = {k: v for k, v in variables.items() if k != "PYTEST_CURRENT_TEST"}
    loggers = [f"--log={name}" for name in ("tensorboard", "wandb", "mlflow", "trackio")]
    for words in (["--steps", "2", "--out", "run"], ["--steps", "3", "--resume", "run"]):
        line = ["-m", "fullshard", "train", *TINY, *PAGES, "--trace-steps", "0", *words, *loggers]
        done = subprocess.run(
            [str(PYTHON), *line],
            cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "left out" not in done.stderr, done.stderr
    read = subprocess.run(
        [str(PYTHON), "-c", textwrap.dedent(READ_BACK)],
        cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    found = dict(line.split(" ", 1) for line in read.stdout.splitlines() if re.match(r"\w+ ", line))
    assert found["tensorboard"] == "1 2 3"
    assert found["mlflow"] == "1 2 3 FINISHED 2"
    assert found["wandb"] == "1"  # one run of theirs, in two parts
    assert found["trackio"] == "1 2 3"
