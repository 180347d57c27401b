"""Process groups: a rank's place in one, its backends, values exchanged while ranks connect, and groups of fullshard's own.

``get_backend`` returns what somebody typed, for all devices together. For Gloo on the CPU that may
be "gloo", "cpu:gloo", a part of "cpu:gloo,cuda:nccl", or "undefined" after a bare
``init_process_group()``. So the group itself is asked, which has one backend object per device.

[Note: Own groups] Gloo pairs collectives of a group by their order alone. If the program called one of its own on some
ranks only (a checkpoint on rank 0, a metric), it would be paired with one of fullshard's: other bytes
would arrive, or, with other sizes, Gloo would abort the process. In a group of its own fullshard's
collectives can only meet each other, and the flight record sees to it that they are the same.

[Note: Leaving Gloo] PyTorch's Gloo runs collectives on threads of its own. When a collective is
done, its thread releases the tensors, for which it takes the GIL. Once the interpreter has begun to
end, a thread that asks for the GIL is ended instead (before Python 3.14). Here that happens inside
C++ code that cannot be left this way: "terminate called without an active exception", and exit code
134. So a program that ends within milliseconds of a collective may abort, also without fullshard.
Destroying the group joins the threads, but only if nothing refers to the group any more, and meshes
and models do. A short sleep before the end always helps: the threads get the GIL meanwhile.
"""

import collections
import datetime
import functools
import pickle
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fullshard.errors import CommError
from fullshard.host import files_left
from fullshard.peers.flight_record import group_key
from fullshard.peers.store import store_in_time
from fullshard.process_hooks import at_exit, naming_groups
from fullshard.torch_private import default_group

_LET_GO_S = 0.02
_NAMELESS = ("custom", "undefined")  # names that C++ gives to classes that it does not know
_SPARE_FILES = 16
_ANSWER_S = 60.0  # of the store


# Places


class GroupPlace(NamedTuple):
    """This rank's number in a group, and how many ranks the group has."""

    rank: int
    size: int


def place_in(group: dist.ProcessGroup | None) -> GroupPlace:
    """Return this rank's place in a group. None is this rank alone."""
    return GroupPlace(0, 1) if group is None else GroupPlace(group.rank(), group.size())


def place_in_job(group: dist.ProcessGroup | None = None) -> GroupPlace:
    """Return this rank's place in a group. None is all ranks of the job, or this one without a process group."""
    return place_in(None if not dist.is_initialized() else group or default_group())


# Backends


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend object that moves a device's bytes, without any debugging wrapper.

    Raises CommError if the group has none for the device.
    """
    try:
        backend: Any = group._get_backend(torch.device(device.type))
    except RuntimeError as error:
        known = ", ".join(
            f"{each.type}: {backend_name(group, each)}" for each in group._device_types
        )
        raise CommError(
            f"rank {dist.get_rank()}: the process group of ranks "
            f"{dist.get_process_group_ranks(group)} has no backend for {device.type} (it has "
            f"{known or 'none'}). Name one for each device, such as "
            "init_process_group('cpu:gloo,cuda:nccl'), or take a mesh of the devices it has."
        ) from error
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps the backend in one that compares collectives.
    return getattr(backend, "wrapped_pg", backend)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend's own name: gloo, nccl, fake, ...

    A group of a Python class is its own backend; for it, return its name or else that of its class.
    Raises CommError if a group of torch's own class has no backend for the device.
    """
    kind: type = type(group)
    if kind is dist.ProcessGroup:
        return str(backend_of(group, device).name())
    name = group.name() if issubclass(kind, dist.ProcessGroup) else _NAMELESS[0]
    return kind.__name__ if name in _NAMELESS else name


def backend_names(group: dist.ProcessGroup) -> set[str]:
    """Return the names of all the group's backends."""
    devices = group._device_types or [torch.device("cpu")]
    return {backend_name(group, device) for device in devices}


def any_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return a device whose tensors the group can move, the CPU if possible. None is the default group."""
    types = _device_types(group)
    if not types or "cpu" in types:
        return torch.device("cpu")
    return torch.device(types[0], torch.accelerator.current_device_index())


def moves(group: dist.ProcessGroup | None, device_type: str) -> bool:
    """Return whether a group can move tensors of a type of device. None is the default group."""
    return device_type in _device_types(group)


def _device_types(group: dist.ProcessGroup | None) -> list[str]:
    group = dist.group.WORLD if group is None else group
    return [device.type for device in getattr(group, "_device_types", ())]


def timeout_s(group: dist.ProcessGroup) -> float:
    """Return how many seconds the group's collectives wait for a rank."""
    for device in group._device_types:
        options = getattr(backend_of(group, device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if timeout is not None:
            return float(timeout.total_seconds())
    return 1800.0  # what torch waits by default


def abort(group: dist.ProcessGroup) -> None:
    """End the collectives of a group that a device waits in, if it is NCCL's. They cannot go on.

    What the host calls next on that device raises, or returns what was never computed.
    """
    for device in group._device_types:
        if backend_name(group, device) == "nccl":
            backend: Any = backend_of(group, device)
            backend.abort()


@functools.cache
def let_go_at_exit() -> None:
    """Sleep a moment at the program's end, for Gloo's threads: see [Note: Leaving Gloo]."""
    at_exit(time.sleep, _LET_GO_S, why="Gloo's threads let go of what they have sent")


# Values exchanged while ranks connect


def exchange(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return every rank's value, in rank order. Every rank of the group must call it.

    Through Gloo if the group has it, whose collectives fail where a rank is gone; else through the store, which serves every
    backend, also where collectives fail (NCCL refuses ranks that share a GPU).
    """
    if "gloo" in backend_names(group):
        let_go_at_exit()
        values: list[Any] = [None] * group.size()
        dist.all_gather_object(values, value, group=group)
        return values
    store = store_in_time(timeout_s(group))
    name = group.group_name
    _rounds[name] += 1
    prefix, this = f"fullshard/exchange/{name}", _rounds[name]
    store.set(f"{prefix}/{this}/{group.rank()}", pickle.dumps(value))
    keys = [f"{prefix}/{this}/{rank}" for rank in range(group.size())]
    store.wait(keys)
    # All are here, so all have read what was told the last time.
    if this > 1:
        store.delete_key(f"{prefix}/{this - 1}/{group.rank()}")
    return [pickle.loads(data) for data in store.multi_get(keys)]


# Groups of our own


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether a group is Gloo's alone, with processes behind its ranks."""
    return type(group) is dist.ProcessGroup and backend_names(group) == {"gloo"}


def mark_own(group: dist.ProcessGroup) -> None:
    """Note that a group is fullshard's already. Every rank must call it."""
    _own[group] = None


def own_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return fullshard's group over the same ranks, made at the first call. Collective.

    The group itself if it is not Gloo's alone (NCCL's communicators cost memory on the device, and
    others are not known), or if a rank may open too few files for the connections of another one.
    """
    if not is_gloo(group):
        return group
    if group not in _own:
        made = None
        # Asked first: if one rank failed to connect, the others would wait for it.
        if all(exchange(_can_connect(group.size()), group)):
            made = make_group(dist.get_process_group_ranks(group), group, backend="gloo")
        _own[group] = made
    return _own[group] or group


def make_group(
    ranks: Sequence[int],
    like: dist.ProcessGroup,
    *,
    backend: str | None = None,
    description: str = "fullshard",
) -> dist.ProcessGroup | None:
    """Return a new group of fullshard's that waits as long as another. Collective among its ranks.

    ranks: of the job, in the order of their places. backend: that of the job if None. description: for torch's logs.
    None if it cannot be made without ranks outside of it.
    """
    key = group_key(f"{description} {like.group_name}", ranks)
    # With a number of its own a name is never used again, also after groups were destroyed: the store keeps what it
    # was told.
    _times_made[key] += 1
    # Groups are of sorted ranks, but for those that are asked for as they are; torch before 2.13 knows no others, and
    # no option.
    options: dict[str, Any] = {} if [*ranks] == sorted(ranks) else {"sort_ranks": False}
    with naming_groups(f"{key}, {_times_made[key]}") as can_name:
        if not can_name:
            return None
        made = dist.new_group(
            [*ranks],
            timeout=datetime.timedelta(seconds=timeout_s(like)),
            backend=backend,
            use_local_synchronization=True,  # ranks outside the group do not come here
            group_desc=description,
            **options,
        )
    assert isinstance(made, dist.ProcessGroup)
    mark_own(made)
    return made


def group_over(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Return a group of some of the job's ranks, made at the first call. Collective among these ranks.

    ranks: of the job, in order, this one among them. None if it cannot be made without the others.
    """
    world = default_group()
    groups = _over.setdefault(world, {})
    key = tuple(ranks)
    if key not in groups:
        made = make_group(ranks, world)
        if made is None:
            return None
        groups[key] = made
    return groups[key]


def _can_connect(size: int) -> bool:
    """Return whether this process may open connections to so many ranks, as far as it can tell."""
    try:
        # Ranks of a new group meet in the store.
        store_in_time(_ANSWER_S).set(f"fullshard/connects/{dist.get_rank()}", "")
    except RuntimeError:
        return False
    left = files_left()
    return left is not None and left >= 2 * size + _SPARE_FILES


# By the program's, fullshard's beside it. None for one that has none: not itself, since a value keeps its key, and a group
# that is destroyed would keep its connections and threads.
_own: "weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup | None]"
_own = weakref.WeakKeyDictionary()
# Those of some ranks, by the job's group and the ranks.
_over: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]"
_over = weakref.WeakKeyDictionary()
# Groups made and values exchanged so far, by name: each has keys of its own in the store. Ranks count alike, since both are
# calls of all of them.
_times_made: "collections.Counter[str]" = collections.Counter()
_rounds: "collections.Counter[str]" = collections.Counter()
