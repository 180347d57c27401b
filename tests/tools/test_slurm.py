"""Ranks that Slurm starts: what its variables mean, and two tasks that train without a scheduler."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullshard.tools import cli
from fullshard.tools.config import OptionError
from fullshard.tools.exits import Exit
from fullshard.tools.slurm import first_host, variables_of_rank
from tests.fresh import Ended, command, in_warm_forks
from tests.tools.processes import PAGES, TINY, losses

# What srun gives the last of four tasks on two hosts, as in the module's drawing.
TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[01-02]",
}
# And a batch script of the same job, which is no task of a step.
BATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NODELIST": "node[01-02]",
}


def test_a_task_is_a_rank() -> None:
    assert variables_of_rank(TASK) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node01",
        "MASTER_PORT": "19977",
    }


def test_what_the_user_has_set_stays() -> None:
    chosen = {"MASTER_ADDR": "ib0.node01", "MASTER_PORT": "1234"}
    found = variables_of_rank(TASK | chosen | {"SLURM_CPUS_PER_TASK": "12"})
    assert found is not None
    assert found.items() >= {**chosen, "OMP_NUM_THREADS": "12"}.items()
    again = variables_of_rank(TASK | {"SLURM_CPUS_PER_TASK": "12", "OMP_NUM_THREADS": "1"})
    assert again is not None
    assert "OMP_NUM_THREADS" not in again


@pytest.mark.parametrize(
    "environment",
    [{}, BATCH, BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}],
    ids=["no Slurm", "a batch script", "the only task of its step"],
)
def test_another_process_starts_its_own_ranks(environment: dict[str, str]) -> None:
    assert variables_of_rank(environment) is None


def test_tasks_may_be_spread_unevenly() -> None:
    uneven = {"SLURM_STEP_TASKS_PER_NODE": "1,3", "SLURM_LOCALID": "2"}
    found = variables_of_rank(TASK | uneven)
    assert found is not None
    assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("2", "3")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node01", "node01"),
        ("node[01-04,07]", "node01"),
        ("gpu-[3,9-12]-ib,login", "gpu-3-ib"),
        ("r[1-2]n[05-06]", "r1n05"),
        ("a,b[1-2]", "a"),
        ("10.0.0.7,10.0.0.8", "10.0.0.7"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_steps_and_jobs_have_ports_of_their_own() -> None:
    def port(job: int, step: int) -> int:
        found = variables_of_rank(TASK | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
        assert found is not None
        return int(found["MASTER_PORT"])

    ports = {port(job, step) for job in range(100, 140) for step in range(4)}
    assert len(ports) == 160
    assert all(15000 <= each < 29000 for each in ports | {port(2**31, 7)})


def _without(name: str) -> dict[str, str]:
    return {key: value for key, value in TASK.items() if key != name}


@pytest.mark.parametrize(
    "name",
    [
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID"),
        *("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"),
    ],
)
def test_what_is_missing_is_named(name: str) -> None:
    with pytest.raises(
        OptionError, match=f"^{name} is not set, but SLURM_STEP_NUM_TASKS=4: .*srun"
    ):
        variables_of_rank(_without(name))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID=4, SLURM_STEP_NUM_TASKS=4: contradict"),
        ({"SLURM_LOCALID": "2"}, "SLURM_LOCALID=2, SLURM_STEP_TASKS_PER_NODE=.*: contradict"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2: contradict"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "SLURM_STEP_NUM_TASKS=8, .*: contradict"),
        ({"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS=many: .* a number"),
        ({"SLURM_PROCID": "-1"}, "SLURM_PROCID=-1: .* a number"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE=two: .*8\\(x2\\)"),
        ({"SLURM_STEP_NODELIST": "[1-"}, "SLURM_STEP_NODELIST=.*: is no list of hosts"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value.values()),
)
def test_what_cannot_be_is_refused(change: dict[str, str], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        variables_of_rank(TASK | change)


# As processes


def _tasks(*words: object) -> list[Ended]:
    """Run a command as two tasks of a step on this host, whose name is its address."""
    common = TASK | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    common |= {"SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_JOB_ID": _free_job()}
    tasks = [common | {"SLURM_PROCID": n, "SLURM_LOCALID": n} for n in ("0", "1")]
    return in_warm_forks(*[command(*words)] * 2, variables=tasks)


def _free_job() -> str:
    """Return the id of a job whose port nobody has."""
    for job in range(100_000, 110_000):
        found = variables_of_rank(TASK | {"SLURM_JOB_ID": str(job)})
        assert found is not None
        try:
            with socket.create_server(("", int(found["MASTER_PORT"]))):
                return str(job)
        except OSError:
            continue
    pytest.fail("no port is free")


def test_two_tasks_train_together(tmp_path: Path) -> None:
    run = tmp_path / "run"
    short = (*TINY, "--steps", "3", "--trace-steps", "0", "--out", run)
    first, second = _tasks("train", *short, "--json")
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert json.loads(first.out)["status"] == "finished"
    assert second.out == ""
    assert json.loads((run / "config.json").read_text())["options"]["ranks"] == 2
    assert len(losses(run)) == 3


def test_tasks_refuse_another_number_of_ranks_once(tmp_path: Path) -> None:
    ended = _tasks("train", *TINY, *PAGES, "--out", tmp_path / "run", "--ranks", "3")
    assert [each.code for each in ended] == [2, 2]
    assert "--ranks 3: srun has started 2 ranks. Leave --ranks out under srun." in ended[0].err
    assert ended[1].err == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", [["train"], ["doctor"], ["verify", "a.py"]], ids=" ".join)
def test_every_command_refuses_variables_in_disorder(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    for name, value in (TASK | {"SLURM_STEP_NODELIST": ""}).items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == Exit.USAGE
    assert f"fullshard {words[0]}: SLURM_STEP_NODELIST is not set" in result.output
    assert "RANK" not in os.environ
