"""A group of fullshard's own: made by any ranks, however many groups each of them is in."""

from __future__ import annotations

import contextlib
import gc
import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard.peers.groups import is_gloo, own_group, place_in, place_in_job
from tests.harness import Fate, on_ranks, rank, run_fresh, world_size
from tests.peers.test_agreed_order import on_hosts_of_their_own


def test_without_a_process_group_a_rank_is_alone() -> None:
    assert place_in_job() == place_in(None) == (0, 1)


@on_ranks(3)
def test_no_group_is_the_job_or_this_rank_alone() -> None:
    last = dist.new_group([1, 2])
    assert place_in_job() == (rank(), 3)
    assert place_in(None) == (0, 1)
    dist.barrier()  # a rank that leaves the group while another still connects ends that with an error
    if isinstance(last, dist.ProcessGroup):
        assert place_in(last) == place_in_job(last) == (rank() - 1, 2)
        dist.destroy_process_group(last)


@on_ranks(4)
def test_ranks_in_different_numbers_of_groups_make_one() -> None:
    """torch names such groups by how many the rank is in: it would wait for another name for ever."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([1, 2])]
    mine = [pair for pair in pairs if isinstance(pair, dist.ProcessGroup)]
    assert len(mine) == (2 if rank() in (1, 2) else 1)
    world = dist.group.WORLD
    assert world is not None
    for group in (*mine[:1], world):
        own = own_group(group)
        assert own is not group
        assert own is own_group(group)  # made once
        assert own is own_group(own)
        assert dist.get_process_group_ranks(own) == dist.get_process_group_ranks(group)
        total = torch.ones(1)
        dist.all_reduce(total, group=own)
        assert total.item() == group.size()
    for pair in mine:
        dist.destroy_process_group(pair)


@on_ranks(4)
def test_ranks_in_different_numbers_of_groups_reduce_in_a_separate_one() -> None:
    """As of a pipeline whose stages share ranks."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([1, 2])]
    before = fullshard.set_default_comm("process_group")
    model = fullshard.fully_shard(nn.Linear(8, 8))
    model.set_separate_reduce_scatter_group()
    model(torch.ones(2, 8)).sum().backward()
    fullshard.set_default_comm(before)
    for pair in pairs:
        if isinstance(pair, dist.ProcessGroup):
            dist.destroy_process_group(pair)


@on_ranks(2)
def test_a_group_that_took_the_place_of_another_gets_one_of_its_own() -> None:
    """The store still has the addresses of the earlier one, under its name."""
    for _ in range(2):
        group = dist.new_group([0, 1])
        assert isinstance(group, dist.ProcessGroup)
        total = torch.ones(1)
        dist.all_reduce(total, group=own_group(group))
        assert total.item() == 2
        dist.destroy_process_group(own_group(group))
        dist.destroy_process_group(group)


@on_ranks(2)
def test_where_one_rank_may_open_no_more_files_all_share_the_programs_group() -> None:
    import resource

    group = dist.new_group([0, 1])
    assert isinstance(group, dist.ProcessGroup)
    assert is_gloo(group)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        if rank() == 0:
            stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
            resource.setrlimit(resource.RLIMIT_NOFILE, (40, limits[1]))
        assert own_group(group) is group
    dist.destroy_process_group(group)


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason="torch has groups of sorted ranks alone before 2.13",
)
@on_ranks(2)
def test_ranks_keep_their_places_in_a_group_that_is_not_sorted() -> None:
    group = dist.new_group([1, 0], sort_ranks=False)
    own = own_group(group)
    assert own is not group
    assert dist.get_process_group_ranks(own) == [1, 0]
    assert own.rank() == group.rank() == 1 - rank()
    dist.destroy_process_group(own)
    dist.destroy_process_group(group)


def _make_and_destroy(way: str, folder: Path) -> list[int]:
    """Return how many files and threads there are after each of some default groups."""
    found = []
    size, number = world_size(), rank()
    for cycle in range(6):
        dist.destroy_process_group()
        gc.collect()
        found.append(sum(len([*Path(f"/proc/self/{each}").iterdir()]) for each in ("fd", "task")))
        store = f"file://{folder}/{cycle}"
        dist.init_process_group("gloo", init_method=store, rank=number, world_size=size)
        with on_hosts_of_their_own() if way == "hosts" else contextlib.nullcontext():
            before = fullshard.set_default_comm("auto" if way == "hosts" else way)
            model = fullshard.fully_shard(nn.Linear(8, 8))
            model(torch.ones(2, 8)).sum().backward()
            fullshard.save_checkpoint(folder / f"checkpoint-{cycle}", model)
            fullshard.set_default_comm(before)
        del model
    return found


@pytest.mark.parametrize("way", ["peer_memory", "process_group", "hosts"])
def test_groups_that_are_destroyed_leave_nothing(way: str, tmp_path: Path) -> None:
    for outcome in run_fresh(2, _make_and_destroy, way=way, folder=tmp_path):
        assert outcome.fate is Fate.RETURNED, outcome.text
        _, second, *_, last = outcome.value
        assert last <= second + 1, outcome.value  # each of Gloo's groups has more than that
