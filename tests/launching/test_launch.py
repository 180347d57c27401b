"""`fullshard.launch`: what goes to ranks and comes back, what is shown of them, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import fullshard
from fullshard.host import is_running
from fullshard.launching import travel
from fullshard.launching.processes import Output, Process, kill_all
from fullshard.local_ranks import threads_for
from tests.fresh import in_warm_forks
from tests.harness import on_ranks
from tests.launching import jobs

LIMIT_S = 60.0


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# Two launches: starting ranks takes seconds


def test_each_rank_computes_and_what_it_returns_and_writes_arrives(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = fullshard.launch(jobs.facts, 3)
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["backend"] == second["backend"] == "gloo"
    assert second["environment"] == {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    assert second["threads"] == threads_for(2, os.environ)
    assert {first["pids"][0], second["pids"][0]} == {os.getpid()}
    assert not any(is_running(each["pids"][1]) for each in (first, second))
    # Tensors are values of their own: no graph, and not the million numbers that a row was cut from.
    assert first["loss"].item() == second["loss"].item()
    assert not first["loss"].requires_grad
    assert torch.equal(first["weight"], second["weight"])
    assert second["row"].tolist() == [0, 1]
    assert second["row"].untyped_storage().nbytes() == 16
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[rank 1] rank 1 to stdout", "rank 0 to stdout"]
    assert {"[rank 1] rank 1 to stderr", "rank 0 to stderr"} <= {*err.splitlines()}


def test_what_a_rank_raises_is_raised_here_and_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(fullshard.LaunchError) as caught:
        fullshard.launch(jobs.one_raises, tmp_path)
    assert caught.value.rank == 1
    message = str(caught.value)
    assert message.startswith("rank 1 raised ValueError: a bad batch\n")
    assert 'raise ValueError("a bad batch")' in message  # the line, from the traceback
    assert "launching/rank.py" not in message
    assert repr(caught.value.__cause__) == "ValueError('a bad batch')"
    # Ranks, and what they started.
    pids = [int(pid) for rank in "01" for pid in (tmp_path / rank).read_text().split()]
    assert len(pids) == 4
    assert not [pid for pid in pids if is_running(pid)]


# Without ranks


@pytest.mark.parametrize(
    ("arguments", "ranks", "message"),
    [
        ((3,), 2, r"given a int, which cannot be called. Pass the function itself"),
        ((jobs.facts, 1), 0, r"ranks=0\): there is no job without ranks"),
        (
            (jobs.facts, threading.Lock()),
            2,
            r"launch\(facts\) cannot send what it was given: .* cannot pickle '_thread.lock' object",
        ),
    ],
    ids=["no function", "no ranks", "lock"],
)
def test_calls_that_cannot_work_start_nothing(
    arguments: tuple[Any, ...], ranks: int, message: str
) -> None:
    with pytest.raises(fullshard.LaunchError, match=message) as caught:
        fullshard.launch(*arguments, ranks=ranks)
    assert caught.value.rank is None


@on_ranks(2)
def test_a_rank_launches_no_ranks() -> None:
    with pytest.raises(fullshard.LaunchError, match=r"this process is rank \d of 2 already"):
        fullshard.launch(jobs.facts, 1)


@on_ranks(2)
def test_what_is_sharded_does_not_travel() -> None:
    sharded = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (2,)))
    model = fullshard.FullyShardedDataParallel(torch.nn.Linear(4, 4))
    for value, kind in ((sharded, "DTensor of shape"), (model, "FlatParameter of shape")):
        with pytest.raises(fullshard.LaunchError, match=f"a {kind} .* is sharded.*full_tensor"):
            travel.pack({"result": [value]})
    assert torch.equal(travel.unpack(travel.pack(sharded.full_tensor())), torch.ones(4, 2))


def test_tensors_travel_as_values() -> None:
    base = torch.ones(1000, requires_grad=True)
    half = (base * 2)[10:12].bfloat16()
    layer = torch.nn.Linear(2, 2)
    sent = travel.pack([half, half, layer])
    assert len(sent) < 4000
    first, second, arrived = travel.unpack(sent)
    assert first is second
    assert (first.dtype, first.tolist(), first.requires_grad) == (torch.bfloat16, [2, 2], False)
    assert isinstance(arrived.weight, torch.nn.Parameter)
    assert arrived.weight.requires_grad
    assert torch.equal(arrived.weight, layer.weight)


PROGRAM = """
import sys
import fullshard
from fullshard.launching import travel

class Batch:
    pass

def work(batch):
    return batch

assert travel.unpack(travel.pack(work)) is not work       # by value
assert type(travel.unpack(travel.pack(Batch()))) is Batch  # comes back as what it was
travel._has_cloudpickle = lambda: False
assert travel.unpack(travel.pack(fullshard.fully_shard)) is fullshard.fully_shard
for value in (work, Batch()):
    try:
        travel.pack(value)
    except fullshard.LaunchError as error:
        print(error)
try:
    travel.pack(lambda: None)
except fullshard.LaunchError as error:
    print(error)
"""


def test_functions_of_the_program_itself_need_cloudpickle() -> None:
    (done,) = in_warm_forks(PROGRAM)
    assert done.code == 0, done.err
    first, second, third = done.out.splitlines()
    assert first.startswith("work is defined in a notebook, at a prompt or in the script itself")
    assert second.startswith("Batch is defined in a notebook")
    assert "<lambda> is defined in" in third
    for line in (first, second, third):
        assert "pip install cloudpickle" in line


def test_output_is_shown_in_whole_lines_with_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    output = Output(open(reading, "rb", buffering=0), "stdout", "[rank 1] ")  # noqa: SIM115, PTH123
    with output.pipe:
        os.write(writing, "one\ntw\N{BULLET}".encode()[:-1])  # in the middle of a letter
        assert output.forward()
        output.flush()
        assert capsys.readouterr().out == "[rank 1] one\n"
        os.write(writing, "\N{BULLET}".encode()[-1:] + b"o\n\xff")
        output.forward()
        assert capsys.readouterr().out == "[rank 1] tw\N{BULLET}o\n"
        os.close(writing)
        assert not output.forward()
        assert output.has_ended
        output.flush(at_end=True)
        assert capsys.readouterr().out == "[rank 1] \N{REPLACEMENT CHARACTER}\n"


def test_a_progress_bar_of_the_first_rank_is_shown_as_it_grows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reading, writing = os.pipe()
    output = Output(open(reading, "rb", buffering=0), "stderr", "")  # noqa: SIM115, PTH123
    with output.pipe:
        os.write(writing, b"\r10 %\r20 %")
        output.forward()
        assert capsys.readouterr().err == "\r10 %\r"
        output.flush()
        assert capsys.readouterr().err == "20 %"
        assert not output.forward()  # nothing is there, and that is no end
        assert not output.has_ended
    os.close(writing)


# How ranks end


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "rank", "message"),
    [
        ("killed", 1, r"^rank 1 \(pid \d+\) was killed by SIGKILL, often by the system"),
        ("leaves", 1, r"^rank 1 \(pid \d+\) ended with exit code 7 before fails returned\."),
        ("exits", 1, r"^rank 1 raised SystemExit: 3\n"),
        ("odd", 1, r"^rank 1 raised OddError: this and that\n"),
        ("lock", 1, r"^rank 1: fails returned what cannot travel: .*'_thread.lock'"),
        ("returns", 0, r"(?s)^rank 0 raised .*Before that, fails had returned on rank 1\.$"),
    ],
)
def test_it_is_said_which_rank_failed_and_how(how: str, rank: int, message: str) -> None:
    with pytest.raises(fullshard.LaunchError, match=message) as caught:
        fullshard.launch(jobs.fails, how)
    assert caught.value.rank == rank


SCRIPT = """
import sys
from pathlib import Path
import fullshard
from tests.launching import jobs

fullshard.launch(jobs.waits, Path(sys.argv[1]))
"""


@pytest.mark.long
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_survives_its_launcher(by: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "ranks").mkdir()
    ranks = [tmp_path / "ranks" / str(rank) for rank in range(2)]
    launcher = subprocess.Popen(
        [sys.executable, tmp_path / "script.py", tmp_path / "ranks"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _wait_until(lambda: all(rank.exists() for rank in ranks))
        launcher.send_signal(by)
        _, err = launcher.communicate(timeout=LIMIT_S)
    finally:
        launcher.kill()
        launcher.wait()
    assert launcher.returncode == -by
    assert ("KeyboardInterrupt" in err) is (by is signal.SIGINT)
    _wait_until(lambda: not any(is_running(int(rank.read_text())) for rank in ranks))


MAIN = """
import torch.distributed as dist
import fullshard

def square(x):
    return factor * x * x + dist.get_rank()

factor = 10
print(fullshard.launch(square, 3), fullshard.launch(lambda: factor, ranks=1))
"""


@pytest.mark.long
def test_a_script_launches_its_own_functions_without_a_guard() -> None:
    (done,) = in_warm_forks(MAIN)
    assert done.code == 0, done.err
    assert done.out == "[90, 91] [10]\n"


def test_ranks_are_killed_before_any_is_waited_for() -> None:
    calls: list[str] = []

    class Rank(Process):
        def __init__(self) -> None: ...

        def signal(self, number: int) -> None:
            calls.append(signal.Signals(number).name)

        def kill(self) -> None:
            calls.append("waits")

    kill_all([Rank(), Rank()])
    assert calls == ["SIGKILL", "SIGKILL", "waits", "waits"]
