"""Doing something on all ranks or on none: an error of one is an error of all."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from fullshard.comm.outside_steps import gather_objects
from fullshard.errors import StateError

T = TypeVar("T")


def num_ranks(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks of a group, or of the job for None; 1 without a process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def together(function: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Return what this rank's function returns, once those of all ranks have. Collective.

    group: these ranks; None for all of the job. Raises on every rank if one raises: its own error there, a StateError that names the ranks elsewhere.
    """
    if num_ranks(group) == 1:
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
