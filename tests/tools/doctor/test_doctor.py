"""`fullshard doctor` as a user runs it, on CPU ranks."""

from __future__ import annotations

import json
import re
import socket
import time
from typing import Any

import pytest
from typer.testing import CliRunner

from fullshard.tools import cli
from fullshard.tools.exits import Exit
from fullshard.tools.launch import Ending
from tests.fresh import Ended, command, fullshard_in_fork, in_warm_forks


def _doctor(*options: str, before: str = "", variables: dict[str, str] | None = None) -> Ended:
    """Run it; before: Python that comes before."""
    return fullshard_in_fork(
        "doctor", *options, before=f"{_STRICT}\n{before}", variables=_ALL_STRICT | (variables or {})
    )


_STRICT = "import warnings\nwarnings.simplefilter('error')"
_ALL_STRICT = {"PYTHONWARNINGS": "error"}  # what it starts, too


def _findings(result: Ended) -> dict[str, dict[str, Any]]:
    """Return findings by their id; the worst of those that have one."""
    found: dict[str, dict[str, Any]] = {}
    for each in json.loads(result.out)["findings"]:
        found.setdefault(each["id"], each)
    return found


def _place(rank: int, port: int, *, local_ranks: int = 2) -> dict[str, str]:
    """Return what a launcher tells one of two ranks."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank % local_ranks),
        "LOCAL_WORLD_SIZE": str(local_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def _two_ranks(port: int, *, before: str = "", local_ranks: int = 2) -> list[Ended]:
    """Run it as two ranks that a launcher has started."""
    return in_warm_forks(
        *[f"{_STRICT}\n{before}\n{command('doctor', '--json')}"] * 2,
        variables=[_ALL_STRICT | _place(rank, port, local_ranks=local_ranks) for rank in range(2)],
    )


@pytest.fixture
def port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("starts_them", [False, pytest.param(True, marks=pytest.mark.long)])
def test_two_ranks_of_this_machine_are_examined_together(port: int, *, starts_them: bool) -> None:
    if starts_them:
        result = _doctor("--json")
    else:
        result, second = _two_ranks(port)
        assert second == (0, "", "")
    assert result.code == 0, result.err
    examined = json.loads(result.out)
    assert examined["verdict"] != "problem"
    found = _findings(result)
    assert re.fullmatch(r"1 pair, median .* one way and .*B/s", found["gloo"]["measured"])
    assert "peer memory (one host)" in found["communication"]["measured"]
    (link,) = (link for each in examined["facts"]["results"] for link in each["links"])
    assert (link["first"], link["second"]) == (0, 1)
    assert 0 < link["latency_s"] < 1
    assert link["bytes_per_s"] > 1e6
    assert abs(link["clock_offset_s"]) < 0.5  # one clock
    first, second = examined["facts"]["ranks"]
    assert first["pid"] != second["pid"]
    assert first["packages"]["typer"]
    assert first["machine"]["memory_nbytes"] > 1e8


def test_it_starts_the_ranks_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []

    def launch(words: object, *, ranks: int, threads: int) -> Ending:
        started.extend([words, ranks, threads])
        return Ending(Exit.RANK_LOST, "rank 1 ended")

    monkeypatch.setattr("fullshard.tools.launch.launch", launch)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    words = ["doctor", "--ranks", "3"]
    monkeypatch.setattr("sys.argv", ["fullshard", *words])
    assert CliRunner().invoke(cli.app, words).exit_code == Exit.RANK_LOST
    assert started == [words, 3, 4]


def test_a_rank_that_does_not_come_is_named_in_time(port: int) -> None:
    began = time.monotonic()
    result = _doctor("--timeout", "1", variables=_place(0, port))
    assert time.monotonic() - began < 60
    assert result.code == 1, result.err
    said = " ".join(result.out.split())
    assert "1 of 2 ranks came within 1 s; missing: rank 1" in said
    assert f"127.0.0.1:{port}" in said
    assert re.search(r"\bok\s+torch\b", result.out), "what this host has is reported all the same"


def test_a_rank_that_finds_no_meeting_place_says_so(port: int) -> None:
    alone = _place(1, port, local_ranks=1)  # the only one of its host
    result = _doctor("--timeout", "1", "--json", variables=alone)
    assert result.code == 1
    found = _findings(result)["meeting"]
    assert (found["severity"], found["where"]) == ("problem", "rank 1")
    assert "Connection refused" in found["measured"]


_LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))"


@pytest.mark.parametrize("limit", [pytest.param(70, marks=pytest.mark.long), 10])
def test_too_few_open_files_are_found(limit: int) -> None:
    """With 70 a rank runs, but could not hold a model; with 10 none can be started."""
    result = _doctor("--ranks", "1", "--json", before=_LIMITED.format(limit))
    assert result.code == 1, result.err
    found = _findings(result)
    assert found["open-files"]["severity"] == "problem"
    assert f"limit {limit}," in found["open-files"]["measured"]
    assert ("start" in found) == (limit == 10)


_ELSEWHERE = """
import dataclasses, time, types
from fullshard.tools.doctor import rank as doctor, together
look = doctor.look_at_rank

def look_elsewhere(place, environment):
    facts = look(place, environment)
    names = {"name": f"node{place.rank}", "boot_id": f"boot {place.rank}", "addresses": ("localhost",)}
    facts = dataclasses.replace(facts, machine=dataclasses.replace(facts.machine, **names))
    if place.rank:
        ahead = {"time": lambda: time.time() + 5}
        together.time = types.SimpleNamespace(**(vars(time) | ahead))
        facts = dataclasses.replace(facts, versions={**facts.versions, "NumPy": "1.0"})
    return facts

doctor.look_at_rank = look_elsewhere
"""


def test_hosts_are_connected_and_compared(port: int) -> None:
    """Two processes of this host that take themselves for two hosts, one of them 5 s ahead."""
    first, second = _two_ranks(port, before=_ELSEWHERE, local_ranks=1)
    assert (first.code, second.code) == (0, 0), (first.err, second.err)
    assert second.out == ""
    found = _findings(first)
    assert found["hosts"]["measured"] == "2 connections, each host to each other one"
    assert (found["gloo"]["severity"], found["gloo"]["where"]) == ("ok", "between hosts")
    assert (found["clocks"]["severity"], found["clocks"]["where"]) == ("warning", "node1")
    assert found["clocks"]["measured"].startswith("5.0 s ahead of node0, give or take ")
    assert "1.0 on node1" in found["versions"]["measured"]


_HANGING = """
import time
from fullshard.tools.doctor import rank as doctor
doctor._SLACK_S = 0.0
doctor.measure_links = lambda rank, pairs: time.sleep(60)
"""


def test_a_step_that_hangs_is_named_with_what_is_known(port: int) -> None:
    alone = _place(0, port, local_ranks=1) | {"WORLD_SIZE": "1"}
    result = _doctor("--timeout", "1", "--json", before=_HANGING, variables=alone)
    assert result.code == 1, result.err
    found = _findings(result)
    assert found["stuck"]["severity"] == "problem"
    assert "exchanging messages between ranks" in found["stuck"]["measured"]
    assert found["torch"]["severity"] == "ok"


def test_options_that_contradict_torchrun_are_refused(port: int) -> None:
    result = _doctor("--ranks", "3", variables=_place(0, port))
    assert result.code == 2
    assert "torchrun has started 2 ranks" in result.err


def test_help_has_examples_and_exit_codes() -> None:
    result = _doctor("--help", variables={"COLUMNS": "200"})
    assert result.code == 0
    for words in ("--ranks", "--timeout", "--json", "torchrun --nnodes 2", "Exit codes: 0"):
        assert words in result.out
