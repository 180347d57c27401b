"""Ranks that see nothing of each other agree on what they do before they do it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fullshard
from fullshard import host
from fullshard.comm import shared_memory
from fullshard.errors import DivergenceError, FullshardError
from fullshard.peers.flight_record import known_record
from fullshard.peers.watchdog import watchdog
from tests.fresh import in_fresh_ranks
from tests.harness import Fate, on_ranks, rank, run_fresh

WIDTH = 8
NUM_BLOCKS = 3


class Net(nn.Module):
    """Blocks in an order that a forward may change; one of them may be larger."""

    def __init__(self, large: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        hidden = [WIDTH, large, WIDTH]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, size), nn.Linear(size, WIDTH)) for size in hidden
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        for number in order:
            x = x + torch.tanh(self.blocks[number](x))
        y: torch.Tensor = self.head(x)
        return y


def _host() -> str:
    return f"host {rank()}"


@contextlib.contextmanager
def on_hosts_of_their_own() -> Iterator[None]:
    """Take each rank for one on a host of its own, for groups that are made within."""
    with mock.patch.object(host, "identity", _host):
        yield


def sharded(backend: str = "gloo", large: int = WIDTH) -> tuple[Net, Any, Any]:
    """Return a model over a new group of all ranks, its order, and the group."""
    group = dist.new_group(backend=backend)
    assert isinstance(group, dist.ProcessGroup)
    mesh = DeviceMesh.from_group(group, "cpu")
    model = Net(large)
    for block in model.blocks:
        fullshard.fully_shard(block, mesh=mesh)
    fullshard.fully_shard(model, mesh=mesh)
    record = known_record(group)
    assert record is not None
    assert not record.is_shared
    return model, record.order, group


def step(model: Net, order: tuple[int, ...] = (0, 1, 2)) -> float:
    loss = model(torch.ones(2, WIDTH) * (1 + rank()), order).square().mean()
    loss.backward()
    model.zero_grad()
    return loss.item()


@on_ranks(3)
def test_ranks_ask_in_the_first_steps_alone() -> None:
    with on_hosts_of_their_own():
        model, order, _ = sharded()
        asked = []
        for _ in range(5):
            step(model)
            asked.append(order.num_asked)
        assert asked[0] > 3 * NUM_BLOCKS
        # The first begins otherwise, so the second asks as well, and those after watched passes.
        assert asked[3] == asked[-1], asked
        with torch.no_grad():
            model(torch.ones(2, WIDTH))
        step(model)
        assert order.num_asked > asked[-1]
        asked.append(order.num_asked)
        with torch.no_grad():
            model(torch.ones(2, WIDTH))
        step(model)
        assert (
            order.num_asked - asked[-1] <= 2
        )  # what an evaluation is known, where it comes is not


@on_ranks(2)
def test_another_path_on_all_ranks_is_right() -> None:
    with on_hosts_of_their_own():
        model, order, _ = sharded(large=24)
        alone = Net(24)
        paths = [(0, 1, 2), (2, 1, 0), (0, 0, 1, 2), (1, 2), (0, 1, 2), (2, 1, 0)]
        for path in paths:
            loss = model(torch.ones(2, WIDTH), path).square().mean()
            loss.backward()
            expected = alone(torch.ones(2, WIDTH), path).square().mean()
            expected.backward()
            torch.testing.assert_close(loss, expected)
            for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
                if other.grad is not None:
                    torch.testing.assert_close(mine.grad.full_tensor(), other.grad)
            model.zero_grad()
            alone.zero_grad()
        assert order.num_asked > 0


def texts_of(error: BaseException) -> list[str]:
    """Return every rank's words, without waiting for a rank that has raised nothing."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, f"{type(error).__name__}: {error}")
    return told


@pytest.mark.parametrize("at", [1, *(pytest.param(at, marks=pytest.mark.long) for at in (0, 4))])
@in_fresh_ranks(3)
def test_another_unit_of_another_size_is_named_on_every_rank(at: int) -> None:
    """Gloo would abort the rank that gets more bytes than it expects."""
    with on_hosts_of_their_own():
        model, _, _ = sharded(large=40)
        began = time.monotonic()
        with pytest.raises(DivergenceError) as raised:  # noqa: PT012
            for number in range(6):
                step(model, (1, 0, 2) if number == at and rank() == 1 else (0, 1, 2))
        assert time.monotonic() - began < 10
        told = texts_of(raised.value)
    assert len(set(told)) == 1, told
    parted = f"parted in step {at + 1}: rank 0 ran blocks.0 (forward); rank 1 ran blocks.1"
    for part in ("ranks 0, 2: step", "rank 1: step", "all-gather (576 bytes)", parted):
        assert part in told[0], told[0]


@in_fresh_ranks(2)
def test_models_that_differ_are_named_by_what_differs() -> None:
    with on_hosts_of_their_own(), pytest.raises(DivergenceError) as raised:
        step(sharded(large=16 if rank() else 24)[0])
    told = texts_of(raised.value)
    assert len(set(told)) == 1, told
    assert "blocks.1.0.weight" in told[0], told[0]


class Device:
    """Stands for a device that a collective keeps busy until its communicator is aborted.

    The host waits for it in C, where no exception reaches it.
    """

    def __init__(self) -> None:
        self._is_free = threading.Lock()
        self._is_free.acquire()
        self.num_aborted = 0

    def synchronize(self) -> None:
        self._is_free.acquire()

    def abort(self, group: dist.ProcessGroup) -> None:
        self.num_aborted += 1
        self._is_free.release()


@pytest.mark.parametrize(
    "num_ahead", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (0, 40))]
)
@in_fresh_ranks(2)
def test_over_nccl_a_rank_that_is_steps_ahead_is_told(num_ahead: int) -> None:
    """The fake backend stands for NCCL: the host starts collectives, and never waits for them."""
    device = Device()
    with (
        mock.patch.object(shared_memory, "WITHOUT_PROCESSES", set()),
        mock.patch("fullshard.peers.watchdog.abort", device.abort),
        on_hosts_of_their_own(),
    ):
        model, order, _ = sharded("fake")
        for _ in range(3):
            step(model)
        asked = order.num_asked
        step(model)
        assert order.num_asked == asked
        began = time.monotonic()
        with pytest.raises(FullshardError) as raised:  # noqa: PT012  (it may come at any line)
            for _ in range(1 + num_ahead):
                step(model, (1, 0, 2) if rank() == 1 else (0, 1, 2))
            device.synchronize()
        assert time.monotonic() - began < 10
        told = texts_of(raised.value)
    assert len(set(told)) == 1, told
    assert told[0].startswith("DivergenceError"), told
    parted = "parted in step 5: rank 0 ran blocks.0 (forward); rank 1 ran blocks.1 (forward)"
    assert parted in told[0], told[0]
    assert device.num_aborted == (rank() == 0)


@in_fresh_ranks(2)
def test_over_nccl_ranks_of_which_none_moves_are_told_of_each_other() -> None:
    """One waits for its device, which looks as if it computed, so it is no error."""
    with (
        mock.patch.object(shared_memory, "WITHOUT_PROCESSES", set()),
        mock.patch("fullshard.peers.watchdog._REPORTED_AT", 4),
        mock.patch("fullshard.peers.watchdog.runs_program_beside", return_value=False),
        mock.patch("fullshard.peers.watchdog.logger.warning") as warned,
        on_hosts_of_their_own(),
    ):
        model, _, _ = sharded("fake")
        for _ in range(3):
            step(model)
        if rank() == 0:
            time.sleep(5)
        dist.barrier()
    assert warned.call_count == (rank() == 0)
    for call in warned.mock_calls:
        text = call.args[0] % call.args[1:]
        assert "for 3 s: " in text
        assert "rank 0: running (step 3, " in text
        assert "rank 1: in torch.distributed's barrier (step 3, " in text


def _rank_1_ends(how: str) -> None:
    """Train over what stands for NCCL until rank 1 ends."""
    device = Device()
    with (
        mock.patch.object(shared_memory, "WITHOUT_PROCESSES", set()),
        mock.patch("fullshard.peers.watchdog.abort", device.abort),
        on_hosts_of_their_own(),
    ):
        model, _, _ = sharded("fake")
        if how == "killed":  # as of ranks that share a host
            pids: list[Any] = [None, None]
            dist.all_gather_object(pids, os.getpid())
            watchdog().board.note_processes(dict(enumerate(pids)))
        for _ in range(4):
            step(model)
        if rank() == 1:
            if how == "raised":
                watchdog()._say_last("ValueError: planted")
            os._exit(1)
        step(model)
        device.synchronize()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raised", "with ValueError: planted"),
        pytest.param("killed", "with a signal, or by os._exit", marks=pytest.mark.long),
    ],
)
def test_over_nccl_a_rank_that_ends_is_named_to_one_that_waits_for_its_device(
    how: str, said: str
) -> None:
    waiting, ended = run_fresh(2, _rank_1_ends, how=how)
    assert ended.fate is Fate.DIED
    assert waiting.error[0] == "PeerLostError"
    assert waiting.seconds < 10
    for part in (
        ": rank 0: running (step 5, ",
        "; rank 1: ended",
        said,
    ):
        assert part in waiting.text


@pytest.mark.parametrize("apart", [True, False])
@in_fresh_ranks(2)
def test_of_several_models_the_error_names_each_ranks_own(apart: bool) -> None:
    """Their units have the same names and sizes."""
    with on_hosts_of_their_own() if apart else contextlib.nullcontext():
        mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
        policy, reference = Net(), Net()
        for model in (policy, reference):
            fullshard.fully_shard(model, mesh=mesh)
            step(model)
            step(model)
        with pytest.raises(DivergenceError) as raised:  # noqa: PT012
            step(policy if rank() == 0 else reference)
            step(reference if rank() == 0 else policy)
        told = texts_of(raised.value)
    assert len(set(told)) == 1, told
    assert "rank 0 in 1 (FSDPNet), rank 1 in 2 (FSDPNet)" in told[0], told[0]
