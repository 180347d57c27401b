"""A process group of fullshard's own beside one of the program's, over Gloo.

Gloo pairs collectives of a group by their order alone. If the program called one of its own on some
ranks only (a checkpoint on rank 0, a metric), it would be paired with one of fullshard's: other bytes
would arrive, or, with other sizes, Gloo would abort the process. In a group of its own fullshard's
collectives can only meet each other, and the flight record sees to it that they are the same.
"""

import collections
import datetime
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from fullshard.host import files_left
from fullshard.peers.backends import backend_names, timeout_s
from fullshard.peers.exchange import exchange_through_group
from fullshard.peers.store import store_in_time
from fullshard.torch_private import default_group, naming_groups

_SPARE_FILES = 16
_ANSWER_S = 60.0  # of the store


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether a group is Gloo's alone, with processes behind its ranks."""
    return type(group) is dist.ProcessGroup and backend_names(group) == {"gloo"}


def mark_own(group: dist.ProcessGroup) -> None:
    """Note that a group is fullshard's already. Every rank must call it."""
    _marked.add(group)


def own_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return fullshard's group over the same ranks, made at the first call. Collective.

    The group itself if it is not Gloo's alone (NCCL's communicators cost memory on the device, and
    others are not known), or if a rank may open too few files for the connections of another one.
    """
    if not is_gloo(group) or group in _marked:
        return group
    if group in _own:
        return _own[group]
    # Asked first: if one rank failed to connect, the others would wait for it. With a number of its own
    # a name is never used again, also after groups were destroyed: the store keeps what it was told.
    told = exchange_through_group((_can_connect(group.size()), _numbers[-1]), group)
    number = max(number for _, number in told) + 1
    _numbers[:] = [number]
    with naming_groups(f"fullshard {number} of {group.group_name}") as can_name:
        if not (can_name and all(able for able, _ in told)):
            mark_own(group)
            return group
        made = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=datetime.timedelta(seconds=timeout_s(group)),
            backend="gloo",
            use_local_synchronization=True,  # ranks outside the group do not come here
            group_desc="fullshard",
            **keeping_order(group),
        )
    assert made is not None
    mark_own(made)
    _own[group] = made
    return made


def keeping_order(group: dist.ProcessGroup) -> dict[str, Any]:
    """Return the options with which ``new_group`` gives ranks the places that they have in a group.

    Groups are of sorted ranks, but for those that were asked for as they are; older torches know no
    others (``sort_ranks``, since 2.13), and no option.
    """
    ranks = dist.get_process_group_ranks(group)
    return {} if ranks == sorted(ranks) else {"sort_ranks": False}


def group_over(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Return a group of some of the job's ranks, made at the first call. Collective among these ranks.

    ranks: of the job, in order, this one among them. None if it cannot be made without the others.
    """
    world = default_group()
    groups = _over.setdefault(world, {})
    key = tuple(ranks)
    if key not in groups:
        _times_made[key] += 1
        with naming_groups(f"fullshard {_times_made[key]} over {key}") as can_name:
            if not can_name:
                return None
            made = dist.new_group(
                [*ranks],
                timeout=datetime.timedelta(seconds=timeout_s(world)),
                use_local_synchronization=True,
                group_desc="fullshard",
            )
        assert made is not None
        if is_gloo(made):
            mark_own(made)
        groups[key] = made
    return groups[key]


def _can_connect(size: int) -> bool:
    """Return whether this process may open connections to so many ranks, as far as it can tell."""
    try:
        store_in_time(_ANSWER_S).set(
            f"fullshard/connects/{dist.get_rank()}", ""
        )  # ranks meet in it
    except RuntimeError:
        return False
    left = files_left()
    return left is not None and left >= 2 * size + _SPARE_FILES


_numbers = [0]  # of the last group that was made
# Never by itself: a value keeps its key, and a group that is destroyed would keep its connections and threads.
_own: "weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]"
_own = weakref.WeakKeyDictionary()
_marked: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()  # with no other one beside them

# Those of some ranks, by the job's group and the ranks; and how often one of these ranks was made.
_over: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]"
_over = weakref.WeakKeyDictionary()
_times_made: "collections.Counter[tuple[int, ...]]" = collections.Counter()
