"""Ranks of several hosts train as one process does, and say what is so where hosts, ranks and links fail."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.faults.job import ENDS, LEAVES, RAISES, ROUTES, Plan
from tests.faults.test_faults import check
from tests.hosts.job import MESHES, Recipe, alone
from tests.hosts.lab import PORT, Lab, LabError

NewLab = Callable[..., Lab]
JOB = "tests.hosts.job"
LIMIT_S = 200.0  # on a busy machine
PROBES_S = 7.0  # of silence, after which the system gives up an idle connection
long = pytest.mark.long

# What the link does to what a host sends.
SLOW = ("tbf", "rate", "10mbit", "burst", "32kb", "latency", "400ms")
LOSSY = ("netem", "loss", "3%", "delay", "5ms")


@pytest.fixture
def new_lab(tmp_path: Path) -> Iterator[NewLab]:
    """Return a function that makes a lab; the test is skipped, with the reason, where there can be none."""
    made: list[Lab] = []

    def new(num_hosts: int = 2, per_host: int = 1) -> Lab:
        made.append(Lab(tmp_path, num_hosts, per_host))
        try:
            return made[-1].__enter__()
        except LabError as reason:
            pytest.skip(f"no lab of hosts here: {reason}")

    yield new
    for each in made:
        each.__exit__()


def start(lab: Lab, settings: Recipe | Plan) -> None:
    """Start a job on a lab's ranks."""
    option = "--recipe" if isinstance(settings, Recipe) else "--plan"
    words = json.dumps(dataclasses.asdict(settings))
    lab.start(JOB, option, words, "--folder", lab.folder)


def check_trained(lab: Lab, recipe: Recipe, limit_s: float = LIMIT_S) -> None:
    """Assert that all ranks end well, with what one process computes."""
    endings = lab.endings(limit_s)
    assert [each.exit_code for each in endings] == [0] * len(endings), lab.report()
    torch.testing.assert_close(torch.load(lab.folder / "parameters"), alone(recipe))


def _recipes() -> Iterator[object]:
    """Return which way to train on how many hosts and ranks of each."""
    quick = Recipe(mesh="hosts_replicate", num_microbatches=3)
    for face in ("fully_shard", "wrapper"):
        for offload in (False, True):
            for num in (1, 3):
                for hosts, per_host in ((2, 1), (2, 2), (3, 1)):
                    for mesh in ("flat", *(MESHES if per_host == 2 else ())):
                        recipe = Recipe(face, mesh, offload, num)
                        name = f"{recipe}-{hosts}x{per_host}"
                        marks = [] if recipe == quick else [long]
                        yield pytest.param(recipe, hosts, per_host, id=name, marks=marks)


@pytest.mark.parametrize(("recipe", "hosts", "per_host"), list(_recipes()))
def test_hosts_train_as_one_process(
    new_lab: NewLab, recipe: Recipe, hosts: int, per_host: int
) -> None:
    lab = new_lab(hosts, per_host)
    start(lab, recipe)
    check_trained(lab, recipe)


@long
@pytest.mark.parametrize("face", ["fully_shard", "wrapper"])
def test_a_checkpoint_on_a_folder_of_all_hosts_goes_on(new_lab: NewLab, face: str) -> None:
    lab = new_lab(2, 2)
    recipe = Recipe(face, folder=str(lab.folder / "checkpoint"))
    start(lab, recipe)
    assert [each.exit_code for each in lab.endings(LIMIT_S)] == [0] * 4, lab.report()
    lab.ranks.clear()
    start(lab, recipe)
    check_trained(lab, recipe)


@long
def test_a_checkpoint_on_a_folder_of_each_host_is_refused(new_lab: NewLab) -> None:
    """Each host would have a part of it, under one name."""
    lab = new_lab()
    start(lab, Recipe(folder=str(lab.own_folder / "checkpoint")))
    for each in lab.endings(LIMIT_S):
        assert "CheckpointError" in each.kinds, lab.report()
        assert str(lab.own_folder) in each.text


@pytest.mark.parametrize(
    "how", [pytest.param(SLOW, id="slow", marks=long), pytest.param(LOSSY, id="lossy", marks=long)]
)
def test_a_bad_link_changes_no_result(new_lab: NewLab, how: tuple[str, ...]) -> None:
    lab = new_lab()
    for host in range(2):
        try:
            lab.shape(host, *how)
        except LabError as reason:
            pytest.skip(f"no such link here: {reason}")
    recipe = Recipe()
    start(lab, recipe)
    check_trained(lab, recipe)


# Between two steps; or in the first one, in which ranks ask the store about all that they do.
@long
@pytest.mark.parametrize("away_s", [5.0, 12.0])
@pytest.mark.parametrize(("hosts", "cut"), [(2, 0), (2, 1), (3, 2)])
def test_ranks_go_on_when_a_link_comes_back(
    new_lab: NewLab, away_s: float, hosts: int, cut: int
) -> None:
    """And what was said of a rank meanwhile is taken back: it may be late afterwards, where ranks have to ask it."""
    lab = new_lab(hosts)
    recipe = Recipe(steps=260, pause_s=0.02, late_at=240, late_s=6.0)
    start(lab, recipe)
    lab.wait_for_step(20)
    lab.cut(cut)
    time.sleep(away_s)
    lab.mend(cut)
    check_trained(lab, recipe)
    if away_s > PROBES_S + 2:
        assert f"rank {cut} is out of reach" in lab.report()


@pytest.mark.parametrize(
    ("hosts", "timeout_s"), [(2, 10.0), pytest.param(3, 20.0, marks=long)], ids=["2x1", "3x1"]
)
@pytest.mark.long  # its words are tested in tests/peers/test_flight_record.py; here is what a network does
def test_a_host_that_is_cut_off_is_out_of_reach_until_the_limit(
    new_lab: NewLab, hosts: int, timeout_s: float
) -> None:
    """On both sides, though one of them cannot ask the store that they met in."""
    lab = new_lab(hosts)
    start(lab, Recipe(steps=100_000, pause_s=0.02, timeout_s=timeout_s))
    lab.wait_for_step(10)
    assert [lab.open_to_all(host) for host in range(hosts)] == [{PORT}, *[set()] * (hosts - 1)]
    lab.cut(hosts - 1)
    for each in lab.endings(timeout_s + 15.0):
        assert "PeerLostError" in each.kinds, lab.report()
        other = 0 if each.rank == hosts - 1 else hosts - 1
        assert f"rank {other} is out of reach" in each.text, lab.report()


@pytest.mark.parametrize(
    ("hosts", "per_host"), [(2, 1), pytest.param(2, 2, marks=long), pytest.param(3, 1, marks=long)]
)
def test_a_host_that_ends_is_named(new_lab: NewLab, hosts: int, per_host: int) -> None:
    lab = new_lab(hosts, per_host)
    start(lab, Recipe(steps=100_000, pause_s=0.02))
    lab.wait_for_step(10)
    lab.hosts[hosts - 1].end()
    lost = range((hosts - 1) * per_host, hosts * per_host)
    for each in lab.endings(30.0):
        if each.rank not in lost:
            assert "PeerLostError" in each.kinds, lab.report()
            assert any(f"rank {rank} " in each.text for rank in lost), lab.report()


def _plans() -> Iterator[Plan]:
    faults = [*ENDS, *RAISES, *ROUTES, "barrier", "save", "freeze", "frozen"]
    faces = ("fully_shard", "wrapper")
    for number, fault in enumerate(faults):
        hosts, per_host = ((2, 1), (3, 1), (2, 2))[number % 3]
        size = hosts * per_host
        plan = Plan(fault, face=faces[number % 2], size=size, rank=size - 1, port=PORT)
        yield dataclasses.replace(plan, address=Lab.address(0))
    for number, after in enumerate(LEAVES):
        plan = Plan("out_of_data", size=2 + number % 2, after=after, port=PORT)
        yield dataclasses.replace(plan, address=Lab.address(0))


@long
@pytest.mark.parametrize("plan", list(_plans()), ids=lambda plan: plan.name)
def test_a_fault_on_one_of_several_hosts_is_named(new_lab: NewLab, plan: Plan) -> None:
    lab = new_lab(*((2, 2) if plan.size == 4 else (plan.size, 1)))
    start(lab, plan)
    check(plan, lab.endings(LIMIT_S))
