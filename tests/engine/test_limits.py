"""Limits of the system that leave ranks of one host without shared memory, from some moment on."""

from __future__ import annotations

import contextlib
import copy
import errno
import mmap
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fullshard
import fullshard.fsdp2.units  # as a first use does, which some of these ranks have no files for
from fullshard import host
from fullshard.comm import select, shared_memory
from fullshard.errors import AllocationError, CommError
from fullshard.host import files_left
from fullshard.peers.status_board import StatusBoard
from tests.harness import Fate, on_ranks, rank, run_fresh
from tests.models import mlp
from tests.training import make_batch, mean_square, my_part
from tests.twins import assert_train_alike

Limit = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def _limited(kind: int, value: int) -> Iterator[None]:
    before, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (before, hard))


def _no_files() -> contextlib.AbstractContextManager[Any]:
    return _limited(resource.RLIMIT_FSIZE, 0)


def _small_files() -> contextlib.AbstractContextManager[Any]:
    """Enough for what ranks connect with, not for a layer."""
    return _limited(resource.RLIMIT_FSIZE, mmap.PAGESIZE // 2)


def _nothing_opens() -> contextlib.AbstractContextManager[Any]:
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    return _limited(resource.RLIMIT_NOFILE, lowest_free)


def _no_pidfd() -> contextlib.AbstractContextManager[Any]:
    refusal = OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    # Not of `os`: ranks that earlier tests connected are known, and not opened again.
    return mock.patch.object(StatusBoard, "note_processes", side_effect=refusal)


def _no_proc() -> contextlib.AbstractContextManager[Any]:
    refusal = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/proc")
    return mock.patch.object(host, "identity", side_effect=refusal)


def _no_memory() -> contextlib.AbstractContextManager[Any]:
    refusal = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    return mock.patch.object(shared_memory, "_open_peer_file", side_effect=refusal)


def _on(limited: str, limit: Limit) -> contextlib.AbstractContextManager[Any]:
    applies = limited == "all" or limited == f"rank {rank()}"
    return limit() if applies else contextlib.nullcontext()


def _mesh(*shape: int) -> DeviceMesh:
    """Return a mesh, of whose groups nothing is known yet."""
    dist.barrier()
    _forget()
    names = ("replicate", "shard")[-len(shape) :]
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()).view(shape), mesh_dim_names=names)
    for dim in range(mesh.ndim):  # let the groups open what they need
        group = mesh.get_group(dim)
        dist.all_reduce(torch.ones(1), group=group)
        # One made under a limit is not shared, and would ask the store's file, which is limited as well.
        shared_memory.record_of(group, "gloo")
    return mesh


def _forget() -> None:
    """Let the next model on any group connect again."""
    select._connected.clear()
    select._agreed.clear()


def _ways(model: nn.Module) -> list[str]:
    return [unit.communication for unit in fullshard.describe(model).units]


def _assert_all_say(reason: str, ways: list[str]) -> None:
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, ways)
    assert all(theirs == ways for theirs in everyones), everyones
    for way in ways:
        assert "no peer memory: " in way
        assert reason in way


CONNECTING = {
    "size": (_no_files, "rank 0: cannot share memory: [Errno 27] File too large", "rank 0"),
    "files": (_nothing_opens, "Too many open files", "rank 0"),
    "files of a peer": (_nothing_opens, "no peer memory: rank 1", "rank 1"),
    "pidfd": (_no_pidfd, "rank 1 cannot open a peer's memory: [Errno 38]", "rank 1"),
    "proc": (_no_proc, "rank 1: cannot share memory: [Errno 2]", "rank 1"),
    "memory": (_no_memory, "Cannot allocate memory", "rank 1"),
}


@pytest.mark.parametrize("case", CONNECTING)
@on_ranks(2)
def test_ranks_that_cannot_connect_go_on_over_the_process_group(case: str) -> None:
    limit, reason, limited = CONNECTING[case]
    model, mesh = mlp(), _mesh(2)
    alone = copy.deepcopy(model)
    with _on(limited, limit):
        for layer in model:
            fullshard.fully_shard(layer, mesh=mesh)
        fullshard.fully_shard(model, mesh=mesh)
    _assert_all_say(reason, _ways(model))
    assert_train_alike(alone, model)
    before = fullshard.set_default_comm("peer_memory")
    mesh = _mesh(2)
    with (
        _on(limited, limit),
        pytest.raises(CommError, match="asked for, but"),
    ):
        fullshard.fully_shard(mlp(), mesh=mesh)
    assert_train_alike(*_sharded_now(mesh))
    fullshard.set_default_comm(before)
    _forget()


def _sharded_now(mesh: DeviceMesh) -> tuple[nn.Module, nn.Module]:
    """Shard a model once the limit is gone, over peer memory; return it last, after its like."""
    model = mlp()
    alone = copy.deepcopy(model)
    fullshard.fully_shard(model, mesh=mesh)
    assert all("peer" in way for way in _ways(model))
    return alone, model


ALLOCATING = {
    "size": (
        _small_files,
        "allocating shards: rank 0 cannot share 4096 bytes: File too large",
        "all",
    ),
    "size of rank 0": (_small_files, "rank 0 cannot share", "rank 0"),
    "files": (_nothing_opens, "cannot share", "all"),
    "files of a peer": (_nothing_opens, "rank 1 cannot share", "rank 1"),
    "memory": (_no_memory, "rank 1 cannot share", "rank 1"),
}


@pytest.mark.parametrize("face", ["fully_shard", "wrapper"])
@pytest.mark.parametrize("case", ALLOCATING)
@on_ranks(2)
def test_units_that_find_no_shared_memory_take_the_process_group(case: str, face: str) -> None:
    limit, reason, limited = ALLOCATING[case]
    model, mesh = mlp(), _mesh(2)
    alone = copy.deepcopy(model)

    def shard(layer: nn.Module) -> nn.Module:
        if face == "fully_shard":
            return fullshard.fully_shard(layer, mesh=mesh)
        return fullshard.FullyShardedDataParallel(layer, device_mesh=mesh, use_orig_params=True)

    model[0] = shard(model[0])
    assert _ways(model[0]) == ["peer memory (one host)"]
    with _on(limited, limit):
        model[1] = shard(model[1])
    model[2] = shard(model[2])  # the limit is gone, but the group is not tried again
    _assert_all_say(reason, _ways(model[1]))
    _assert_all_say(reason, _ways(model[2]))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
    for step in range(3):
        losses = []
        for each, optimizer in zip((alone, model), optimizers, strict=True):
            batch = make_batch(16, seed=step)
            loss = mean_square(each(batch if each is alone else my_part(batch)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(loss := loss.detach().clone())
            losses.append(loss / 2)
        torch.testing.assert_close(*losses)
    _forget()


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=["shard", "replicate"])
@pytest.mark.parametrize("is_strict", [False, True])
@on_ranks(2)
def test_a_ring_that_cannot_be_made_moves_the_units(shape: Any, is_strict: bool) -> None:
    model, mesh = mlp(), _mesh(*shape)
    alone = copy.deepcopy(model)
    before = fullshard.set_default_comm("peer_memory" if is_strict else "auto")
    for layer in model:
        fullshard.fully_shard(layer, mesh=mesh)
    fullshard.fully_shard(model, mesh=mesh)
    units = [unit for each in model for unit in each._fullshard_hooks.state.units]
    assert all("peer" in unit.comm.name or "local" in unit.comm.name for unit in units)
    with _on("rank 1", _nothing_opens):
        if is_strict:
            with pytest.raises(CommError, match="asked for, but"):
                model(my_part(make_batch(16)))
        else:
            model(my_part(make_batch(16)))
    if not is_strict:
        _assert_all_say_ring(units)
    assert_train_alike(alone, model)
    fullshard.set_default_comm(before)
    _forget()


def _assert_all_say_ring(units: list[Any]) -> None:
    for unit in units:
        for comm in (unit.comm, unit.replicate_comm):
            assert "allocating the gradient ring" in comm.name or "local" in comm.name, comm.name


@on_ranks(4)
def test_all_replicas_lay_shards_out_alike() -> None:
    model, mesh = mlp(), _mesh(2, 2)
    alone = copy.deepcopy(model)
    with _on("rank 1", _nothing_opens):  # ranks 2 and 3 could share memory
        for layer in model:
            fullshard.fully_shard(layer, mesh=mesh)
        fullshard.fully_shard(model, mesh=mesh)
    _assert_all_say("no peer memory: rank 1", _ways(model))
    assert_train_alike(alone, model)
    _forget()


@on_ranks(4)
def test_replicas_are_not_left_with_another_layout() -> None:
    model, mesh = mlp(), _mesh(2, 2)
    fullshard.fully_shard(model[0], mesh=mesh)
    limited = _on("rank 1", _nothing_opens)
    if rank() in (0, 1):
        with limited, pytest.raises(CommError, match=r"rank 1 .*Raise the limit"):
            fullshard.fully_shard(model[1], mesh=mesh)
    else:
        fullshard.fully_shard(model[1], mesh=mesh)
    _forget()


def _shard_with_room(face: str, limited: int, room: int, size: int) -> tuple[str, float]:
    """Shard and train where a rank may open so few files; return the error and for how long that took."""
    number, address = rank(), "127.0.0.1"
    # In the first rank's process, as torch makes it without a launcher's.
    own = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False) if number == 0 else None
    told = [own.port if own is not None else 0]
    dist.broadcast_object_list(told, 0)
    dist.destroy_process_group()
    store = own or dist.TCPStore(address, told[0])
    dist.init_process_group("gloo", store=store, rank=number, world_size=size)
    shape = (2,) if size == 2 else (2, 2)
    mesh = DeviceMesh(
        "cpu", torch.arange(size).view(shape), mesh_dim_names=("replicate", "shard")[-len(shape) :]
    )
    torch.manual_seed(0)
    model: nn.Module = mlp()
    began, error = time.monotonic(), ""
    left = files_left()
    assert left is not None
    before, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = before - left + room if number == limited else before
    with _limited(resource.RLIMIT_NOFILE, most):
        try:
            model = _shard(model, face, mesh)
        except AllocationError as refusal:
            error = str(refusal)
    waited = time.monotonic() - began
    if error:
        model = _shard(model, face, mesh)  # as it was before
    mean_square(model(my_part(make_batch(16)))).backward()
    return error, waited


def _shard(model: nn.Module, face: str, mesh: DeviceMesh) -> nn.Module:
    if face == "fully_shard":
        return fullshard.fully_shard(model, mesh=mesh)
    return fullshard.FullyShardedDataParallel(
        model, device_mesh=mesh, sharding_strategy=_STRATEGIES[mesh.ndim]
    )


_STRATEGIES = {1: fullshard.ShardingStrategy.FULL_SHARD, 2: fullshard.ShardingStrategy.HYBRID_SHARD}


@pytest.mark.parametrize("face", ["fully_shard", "wrapper"])
@pytest.mark.parametrize(
    ("size", "limited", "room", "needs"),
    [(2, 0, 1, 7), (2, 0, 6, 7), (2, 0, 7, 0), (2, 1, 4, 5), (2, 1, 5, 0), (4, 1, 4, 5)],
)
def test_ranks_that_may_open_too_few_files_to_connect_all_say_so_at_once(
    face: str, size: int, limited: int, room: int, needs: int
) -> None:
    """The first one also needs those of the store, which would not let others in, nor say so."""
    outcomes = run_fresh(size, _shard_with_room, face=face, limited=limited, room=room, size=size)
    for outcome in outcomes:
        assert outcome.fate is Fate.RETURNED, outcome.text
        error, waited = outcome.value
        assert waited < 20
        if needs:
            for fact in (f"Rank {limited} ", f"{room} more", f"needs {needs} ", "ulimit -n"):
                assert fact in error
        else:
            assert error == ""


@on_ranks(2)
def test_units_take_no_descriptors() -> None:
    """A process may open few files, and a program with many units has other uses for them."""
    mesh = _mesh(2)
    fullshard.fully_shard(mlp(), mesh=mesh)
    before = _open_files()
    model = mlp(num_layers=8)
    for layer in model:
        fullshard.fully_shard(layer, mesh=mesh)
    assert _ways(model[0]) == ["peer memory (one host)"]
    mean_square(model(my_part(make_batch(16)))).backward()
    deadline = time.monotonic() + 5.0
    # Threads open and close files as well: those of a store, for each key, and of Gloo, when others have gone.
    while (taken := _open_files() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not taken
    _forget()


def _open_files() -> set[tuple[str, str]]:
    """Return this process's descriptors, with the file of each."""
    files = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed by now, as the listing itself is
            files.add((link.name, str(link.readlink())))
    return files
