"""A rank that dies in the middle of a step: the others say so, soon, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fullshard
from fullshard.errors import FullshardError, PeerLostError
from tests.api import Api
from tests.fresh import on_forked_ranks
from tests.harness import Fate, Outcome, mesh_of, rank, run_fresh, world_size
from tests.models import mlp
from tests.shared_memory import inodes_of, mapped, still_mapped
from tests.training import make_batch, mean_square, my_part

pytestmark = pytest.mark.ours("hangs or names no rank")
WITHIN_S = 10.0
STAYS_S = 6.0


class Trap(nn.Module):
    """Kills its process when it is armed: in forward, or in backward."""

    armed = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.armed == "forward":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.armed == "backward":
            x.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        return x


def _train_until_killed(api: Api, moment: str, mesh_shape: tuple[int, ...]) -> None:
    model = mlp()
    trap = Trap()
    model[1].append(trap)
    for layer in model:
        api.fully_shard(layer, mesh=mesh_of(*mesh_shape))
    api.fully_shard(model, mesh=mesh_of(*mesh_shape))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        if step == 2 and rank() == 1:
            trap.armed = moment if moment != "between" else ""
            if moment == "between":
                os.kill(os.getpid(), signal.SIGKILL)
        mean_square(model(my_part(make_batch(16)))).backward()
        optimizer.step()
        optimizer.zero_grad()


def _assert_loss_is_reported(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.rank == 1:
            assert outcome.fate is Fate.DIED
            continue
        assert outcome.fate is Fate.RAISED, outcome.text
        assert "PeerLostError" in outcome.error, outcome.text
        assert "rank 1" in outcome.text
        assert outcome.seconds < WITHIN_S


@pytest.mark.parametrize("moment", ["forward", "backward", "between"])
def test_killed_rank_is_named_by_the_other(api: str, moment: str) -> None:
    _assert_loss_is_reported(
        run_fresh(2, _train_until_killed, api=api, moment=moment, mesh_shape=(2,))
    )


def _lose_a_rank_and_give_back(api: Api, moment: str) -> None:
    """Pass the error on only if as much is mapped as before: counters, and the ring."""
    _train(api)
    gc.collect()
    before = mapped()
    try:
        _train_until_killed(api, moment, (2,))
    except FullshardError as error:
        lost = type(error), str(error)  # without the traceback, which holds the model
    gc.collect()
    assert mapped() == before
    kind, message = lost
    raise kind(message)


@pytest.mark.parametrize("moment", ["forward", "backward", "between"])
def test_a_rank_that_outlives_another_gives_its_shared_memory_back(api: str, moment: str) -> None:
    _assert_loss_is_reported(run_fresh(2, _lose_a_rank_and_give_back, api=api, moment=moment))


def test_killed_rank_is_named_by_all_others(api: str) -> None:
    _assert_loss_is_reported(
        run_fresh(3, _train_until_killed, api=api, moment="backward", mesh_shape=(3,))
    )


@pytest.mark.apis("peer_memory")  # a Gloo collective cannot be interrupted, only a process ended
def test_killed_rank_ends_ranks_of_other_shard_groups_too(api: str) -> None:
    outcomes = run_fresh(4, _train_until_killed, api=api, moment="backward", mesh_shape=(2, 2))
    assert outcomes[1].fate is Fate.DIED
    for outcome in (outcomes[0], outcomes[2], outcomes[3]):
        assert outcome.fate is Fate.RAISED, outcome.text
        assert "FullshardError" in outcome.error, outcome.text
        assert outcome.seconds < WITHIN_S


def _lose_a_rank_and_stay(api: Api) -> None:
    """Train in two pairs, of which the last rank dies. The middle one lives on for a while."""
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    models = [
        api.fully_shard(mlp(), mesh=DeviceMesh.from_group(pair, "cpu"))
        for pair in pairs
        if isinstance(pair, dist.ProcessGroup)
    ]
    for model in models:
        mean_square(model(make_batch(16))).backward()
    if rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        mean_square(models[-1](make_batch(16))).backward()
    except PeerLostError:
        if rank() == 1:
            time.sleep(STAYS_S)
        raise


@pytest.mark.apis("peer_memory")
def test_ranks_that_wait_for_one_that_lost_another_are_told_while_it_lives(api: str) -> None:
    first, middle, dead = run_fresh(3, _lose_a_rank_and_stay, api=api)
    assert dead.fate is Fate.DIED
    assert middle.seconds > STAYS_S
    for outcome in (first, middle):
        assert outcome.fate is Fate.RAISED, outcome.text
        assert "PeerLostError" in outcome.error, outcome.text
        assert "rank 2 died" in outcome.text
    assert first.seconds < STAYS_S / 2


def _save_or_load_until_killed(api: Api, moment: str, folder: Path) -> None:
    model = api.fully_shard(mlp(), mesh=mesh_of(world_size()))
    if moment == "load":
        fullshard.save_checkpoint(folder / "checkpoint", model)
    if rank() == 1:  # where it writes or reads its part
        call = {"save": "fsync", "load": "preadv"}[moment]
        setattr(os, call, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    if moment == "load":
        fullshard.load_checkpoint(folder / "checkpoint", model)
    else:
        fullshard.save_checkpoint(folder / "checkpoint", model)


@pytest.mark.apis("peer_memory")  # checkpoints have a process group of their own
@pytest.mark.parametrize("moment", ["save", "load"])
def test_a_rank_that_is_killed_while_ranks_save_or_load_is_named(
    api: str, moment: str, tmp_path: Path
) -> None:
    _, lost, other = outcomes = run_fresh(
        3, _save_or_load_until_killed, api=api, moment=moment, folder=tmp_path
    )
    assert lost.fate is Fate.DIED
    for outcome in (outcomes[0], other):
        assert outcome.fate is Fate.RAISED, outcome.text
        assert "CheckpointError" in outcome.error, outcome.text
        assert "rank 1" in outcome.text


_ENDS = {
    "raises": "raise ValueError('no data')",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "late": "time.sleep(6)",
}
_CALLS = {
    "sharding": "pass",
    "barrier": "dist.barrier()",
    "full_tensor": "model.weight.full_tensor()",
    "save": "checkpoint.save({'model': model.state_dict()}, checkpoint_id=sys.argv[-1])",
}
_IN_TORCH = """
import datetime, os, signal, sys, time
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from fullshard import fully_shard

def end_before(*calls):
    if dist.get_rank() == {lost} and {call!r} in calls:
        {end}

sys.argv.append({folder!r})
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds={timeout_s}))
end_before("sharding")
model = fully_shard(nn.Linear(8, 8))
model(torch.ones(2, 8)).sum().backward()
end_before("barrier", "full_tensor", "save")
{run}
"""


@pytest.mark.parametrize(
    ("end", "call", "lost", "said"),
    [
        ("raises", "sharding", 1, "had not sharded a module yet"),
        ("late", "sharding", 1, "when the process group's timeout was over"),
        ("raises", "sharding", 0, "rank 0 is gone and had made it"),  # the store
        ("raises", "barrier", 1, "ValueError: no data"),
        ("killed", "full_tensor", 1, "rank 1 died"),
        ("killed", "save", 0, "rank 0 died"),
    ],
)
def test_a_lost_rank_is_named_by_those_in_calls_of_torch(
    end: str, call: str, lost: int, said: str, tmp_path: Path
) -> None:
    """Whose errors name none: Gloo's ends the program, with a note, before the watchdog has come to its verdict."""
    program = _IN_TORCH.format(
        lost=lost,
        call=call,
        end=_ENDS[end],
        run=_CALLS[call],
        folder=str(tmp_path),
        timeout_s=3 if end == "late" else 60,
    )
    error = on_forked_ranks(2, program)[1 - lost].err
    # The note below the exception, or the exception if it is fullshard's.
    _, *_, last = re.split(r"fullshard: |Peer\w+Error: ", error)
    assert said in last, error


def _train(api: Api) -> None:
    model = api.fully_shard(mlp())
    for _ in range(2):
        mean_square(model(my_part(make_batch(16)))).backward()


def _train_and_name(api: Api) -> set[str]:
    _train(api)
    model = api.fully_shard(mlp())  # this one is not given up before the end
    mean_square(model(my_part(make_batch(16)))).backward()
    _alive.append(model)
    return inodes_of([os.getpid()])


_alive: list[nn.Module] = []


def test_ordinary_end_leaves_nothing_behind(api: str) -> None:
    outcomes = run_fresh(2, _train_and_name, api=api)
    assert [outcome.fate for outcome in outcomes] == [Fate.RETURNED] * 2
    used = set().union(*(outcome.value for outcome in outcomes))
    assert used
    assert not still_mapped(used)
