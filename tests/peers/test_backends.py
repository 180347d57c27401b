"""Which backend a process group has, however it was asked for."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fullshard
from fullshard.comm import select
from fullshard.comm.process_group import ProcessGroupComm
from fullshard.comm.select import select_comm
from fullshard.errors import CommError
from fullshard.peers.groups import (
    any_device,
    backend_name,
    backend_names,
    backend_of,
    let_go_at_exit,
)
from fullshard.policies import CommChoice
from tests.fresh import in_fresh_ranks
from tests.harness import on_ranks, rank, world_size
from tests.tools.processes import environment

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class _Backend:
    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        return self._name


class _Wrapper(_Backend):
    """As torch's debug wrapper: it has the name and the backend of what it wraps."""

    def __init__(self, wrapped: _Backend) -> None:
        super().__init__(wrapped.name())
        self.wrapped_pg = wrapped


@contextlib.contextmanager
def _group(backend: str | None, size: int = 1, **options: Any) -> Iterator[dist.ProcessGroup]:
    """Make the default group, of this process alone or of a fake world."""
    store = FakeStore() if backend and "fake" in backend else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=size, **options)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("spelling", [None, "gloo", "cpu:gloo", "cpu:gloo,cuda:gloo"])
def test_gloo_is_found_under_every_spelling(spelling: str | None) -> None:
    with _group(spelling) as group:
        assert backend_name(group, CPU) == "gloo"
        assert "gloo" in backend_names(group)
        assert any_device(group) == any_device(None) == CPU


@pytest.mark.parametrize("name", ["nccl", "gloo"])
def test_each_device_has_its_own_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As "cpu:gloo,cuda:nccl" makes it, where torch was built with NCCL."""
    backends = {"cpu": _Wrapper(_Backend("gloo")), "cuda": _Backend(name)}
    with _group("gloo") as group:
        known = property(lambda _: [torch.device("cuda"), torch.device("cpu")])
        monkeypatch.setattr(dist.ProcessGroup, "_device_types", known)
        monkeypatch.setattr(
            dist.ProcessGroup, "_get_backend", lambda _, device: backends[device.type]
        )
        assert backend_name(group, CPU) == "gloo"
        assert backend_of(group, CPU) is backends["cpu"].wrapped_pg
        assert backend_name(group, CUDA) == name
        assert backend_names(group) == {"gloo", name}
        assert any_device(group) == CPU
        comm = ProcessGroupComm(group, CUDA)
        assert (comm.is_nccl, comm.sums_natively) == (name == "nccl", name == "nccl")
        assert not ProcessGroupComm(group, CPU).sums_natively


@pytest.mark.parametrize("spelling", ["fake", "cpu:fake,cuda:fake"])
def test_the_fake_backend_stands_for_nccl(spelling: str) -> None:
    with _group(spelling, size=8) as group:
        for choice in (CommChoice.AUTO, CommChoice.PROCESS_GROUP):
            comm = select_comm(group, CPU, choice)
            assert isinstance(comm, ProcessGroupComm)
            assert comm.sums_natively
            assert comm._averages
        comm = select_comm(group, CPU, CommChoice.AUTO)
        assert comm.name.startswith("process group (fake); no peer memory: ")


class _Own(dist.ProcessGroup):
    """A backend in Python: the group is its own backend."""


class _Named(_Own):
    def getBackendName(self) -> str:  # noqa: N802
        return "mine"


def test_a_backend_in_python_has_its_own_name_or_that_of_its_class() -> None:
    for kind, name in ((_Own, "_Own"), (_Named, "mine")):
        comm = ProcessGroupComm(kind(0, 2), CPU)
        assert comm.backend == name
        assert comm.sums_natively
    assert backend_name(object(), CPU) == "object"  # type: ignore[arg-type]


def test_a_registered_backend_that_is_gloo_is_taken_for_gloo() -> None:
    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("renamed", make, devices=["cpu"])
    with _group("renamed") as group:
        assert dist.get_backend(group) == "renamed"
        assert backend_name(group, CPU) == "gloo"


def test_a_device_without_a_backend_is_an_error_that_says_what_there_is() -> None:
    with _group("cpu:gloo") as group:
        with pytest.raises(CommError, match=r"\[0\] .* cuda \(it has cpu: gloo\)"):
            backend_name(group, CUDA)
        with pytest.raises(CommError, match="init_process_group"):
            ProcessGroupComm(group, CUDA)


@on_ranks(2)
def test_describe_says_why_it_is_the_process_group() -> None:
    before = fullshard.set_default_comm("process_group")
    text = str(fullshard.describe(fullshard.fully_shard(nn.Linear(4, 4))))
    fullshard.set_default_comm(before)
    assert "process group (gloo); asked for" in text


def _communication(kind: str) -> str:
    """Shard a model over a group made in another way than the pool's, and train it."""
    mesh = None
    if kind == "mesh":
        mesh = dist.init_device_mesh("cpu", (2,))
    elif kind == "backend":
        mesh = dist.DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    elif kind == "default":
        mesh = dist.DeviceMesh.from_group(dist.new_group(), "cpu")
    elif kind == "device":
        mesh = dist.DeviceMesh.from_group(dist.new_group(backend="cpu:gloo"), "cpu")
    elif kind == "subset":
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2])]
        if rank() == 2:
            return "local"
        mesh = dist.DeviceMesh.from_group(groups[0], "cpu")
    model = fullshard.fully_shard(nn.Linear(8, 8), mesh=mesh)
    model(torch.ones(2, 8)).sum().backward()
    return fullshard.describe(model).units[0].communication


@pytest.mark.parametrize("kind", ["mesh", "backend", "default", "device"])
@on_ranks(2)
def test_groups_of_gloo_share_memory_however_they_were_made(kind: str) -> None:
    assert _communication(kind) == "peer memory (one host)"


@on_ranks(3)
def test_a_subset_of_the_ranks_shares_memory() -> None:
    assert _communication("subset").startswith(("peer memory", "local"))


@pytest.mark.parametrize("is_checked", [False, True], ids=["", "checked"])
@pytest.mark.parametrize("spelling", [None, "cpu:gloo"], ids=["bare", "cpu:gloo"])
@in_fresh_ranks(2)
def test_peer_memory_is_used_however_the_default_group_was_made(
    spelling: str | None, is_checked: bool, tmp_path: Path
) -> None:
    ends = {"rank": rank(), "world_size": world_size()}
    dist.destroy_process_group()
    if is_checked:
        dist.set_debug_level(dist.DebugLevel.DETAIL)  # TORCH_DISTRIBUTED_DEBUG
    dist.init_process_group(spelling, init_method=f"file://{tmp_path}/store", **ends)
    assert hasattr(dist.group.WORLD._get_backend(CPU), "wrapped_pg") == is_checked
    model = fullshard.fully_shard(nn.Linear(8, 8))
    model(torch.ones(2, 8)).sum().backward()
    (unit,) = fullshard.describe(model).units
    assert unit.communication == "peer memory (one host)"
    assert "summed in float32" in str(unit.dtypes)


SPELLED = """
import sys, torch
import torch.distributed as dist
from torch import nn
import fullshard

spelling = sys.argv[1]
if spelling == "bare":
    dist.init_process_group()
elif spelling != "mesh":
    dist.init_process_group(spelling)
mesh = dist.init_device_mesh("cpu", (2,)) if spelling == "mesh" else None
model = fullshard.fully_shard(nn.Linear(8, 8), mesh=mesh)
model(torch.ones(2, 8)).sum().backward()
unit, = fullshard.describe(model).units
sys.stdout.write(f"{unit.communication}; {unit.dtypes}\\n")
sys.stdout.flush()
dist.destroy_process_group()
"""


@pytest.mark.long  # above without torchrun; test_readme.py has `bare`, and `mesh` makes its group
@pytest.mark.parametrize("spelling", ["bare, checked", "bare", "mesh", "cpu:gloo"])
def test_a_program_gets_peer_memory_under_every_spelling(spelling: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPELLED)
    spelling, _, checked = spelling.partition(", ")
    launcher = ["torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, str(script), spelling],
        env={**environment(), **({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"} if checked else {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert len(printed) == 2
    for line in printed:
        assert line.startswith("peer memory (one host); "), line
        assert "summed in float32" in line


# Two ranks in one process. Their threads are done, but wait for the GIL, when the program ends.
LEAVING = """
import datetime, sys, time
from concurrent.futures import ThreadPoolExecutor
import torch
import torch.distributed as dist
from fullshard.peers.groups import let_go_at_exit

store, limit = dist.HashStore(), datetime.timedelta(seconds=20)
with ThreadPoolExecutor(2) as pool:
    ranks = list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, limit), range(2)))
let_go_at_exit()
tensors = [torch.ones(4), torch.ones(4)]
sys.setswitchinterval(100)
for rank, tensor in zip(ranks, tensors):
    rank.allreduce([tensor])
until = time.perf_counter() + 0.2
while time.perf_counter() < until:
    pass
"""


def test_a_program_that_ends_after_a_collective_does_not_abort() -> None:
    # Without the call, PyTorch ends about two of three of these by SIGABRT ("terminate called
    # without an active exception"): a thread of Gloo asks for the GIL of a Python that is gone.
    done = subprocess.run(
        [sys.executable, "-c", LEAVING],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@on_ranks(2)
def test_every_way_over_gloo_lets_go_at_exit() -> None:
    group = dist.group.WORLD
    for choice in (CommChoice.PROCESS_GROUP, CommChoice.COLLECTIVES, CommChoice.PEER_MEMORY):
        select._connected.clear()
        let_go_at_exit.cache_clear()
        select_comm(group, CPU, choice)
        assert let_go_at_exit.cache_info().currsize == 1
    select._connected.clear()
