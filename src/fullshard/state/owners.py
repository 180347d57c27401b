"""Find the ranks that have a model together, by the meshes that it is sharded over; do things on all or none.

Mostly all ranks of the job. A model that is sharded over some of them is these ranks' alone: others
may have a model of the same names, or none, and do not join its collectives.

    ranks 0, 1: policy over [0, 1]     ranks 2, 3: reward over [2, 3]
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.comm.outside_steps import gather_objects
from fullshard.errors import StateError
from fullshard.peers.groups import group_over, place_in_job
from fullshard.state.structure import units_of
from fullshard.state.unit_parts import rank_sets

T = TypeVar("T")


def owners_of(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the group of the ranks that have a model together; None for all ranks of the job.

    Collective among these ranks where none of their groups is known yet. All ranks of the job are taken
    too where no mesh of the model contains all others, or it has none.
    """
    if not dist.is_initialized():
        return None
    units = units_of(model)
    known = {ranks for unit in units for ranks in rank_sets(unit)}
    known |= {
        frozenset(p.device_mesh.mesh.flatten().tolist())
        for p in model.parameters()
        if isinstance(p, DTensor)
    }
    largest = max(known, key=len, default=frozenset())
    if len(largest) in (0, dist.get_world_size()) or not all(largest >= own for own in known):
        return None
    for unit in units:
        for group in unit.mesh.groups:
            if largest == {*dist.get_process_group_ranks(group)}:
                return group
    return group_over(sorted(largest))


def together(function: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Return what this rank's function returns, once those of all ranks have. Collective.

    group: these ranks; None for all of the job. Raises on every rank if one raises: its own error there, a
    StateError that names the ranks elsewhere.
    """
    if place_in_job(group).size == 1:
        return function()
    error: Exception | None = None
    value: Any = None
    try:
        value = function()
    except Exception as caught:
        error = caught
    text = None if error is None else f"{type(error).__name__}: {error}"
    texts = gather_objects(text, group, "a call of all ranks")
    if error is not None:
        raise error
    ranks = dist.get_process_group_ranks(group)
    problems = [f"rank {rank}: {text}" for rank, text in zip(ranks, texts, strict=True) if text]
    if problems:
        raise StateError("\n".join(problems))
    result: T = value
    return result
