"""Collectives outside of a model's passes: state dicts, norms, agreements.

Each is entered in the group's flight record, so that a rank which makes a call alone meets an error instead of
another rank's collective. Over Gloo it runs in fullshard's own group, and the wait for it notices
what other ranks do.
"""

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm.calls import all_gather
from fullshard.peers.flight_record import known_record
from fullshard.peers.groups import any_device, is_gloo, own_group, timeout_s
from fullshard.peers.waits import naming_lost_ranks, wait_comparing
from fullshard.torch_private import default_group


def run_collective(
    call: Callable[..., Any],
    *args: Any,
    group: dist.ProcessGroup | None,
    label: str,
    **options: Any,
) -> None:
    """Call a function of torch.distributed, and return once it is complete. Every rank must call it.

    call: takes ``group`` and ``async_op``. group: None for all ranks. label: what it is for, the same
    on all ranks. Raises DivergenceError and PeerTimeoutError as `wait_comparing`, PeerLostError or
    CommError if a rank is gone or out of reach.
    """
    group = group or default_group()
    record = known_record(group)
    if record is not None:
        record.enter(label)
    if not is_gloo(group):
        call(*args, group=group, **options)
        return
    with naming_lost_ranks(group, label):
        moving = own_group(group)
        work = call(*args, group=moving, async_op=True, **options)
        own = None if moving is group and record is not None else moving
        wait_comparing(work, record, label, timeout_s(group), moving=own)


def gather_objects(value: Any, group: dist.ProcessGroup | None, label: str) -> list[Any]:
    """Return every rank's value, in rank order. Every rank of the group must call it.

    value: what can be pickled. group, label and errors as for `run_collective`.
    """
    group = group or default_group()
    data = _pickled(value, group)
    sizes = torch.empty(group.size(), dtype=torch.int64, device=data.device)
    run_collective(all_gather, sizes, sizes.new_tensor([len(data)]), group=group, label=label)
    longest = int(sizes.max())
    padded = data.new_zeros(longest)
    padded[: len(data)] = data
    gathered = data.new_empty(group.size() * longest)
    run_collective(all_gather, gathered, padded, group=group, label=label)
    return [
        _unpickled(part[:size])
        for part, size in zip(gathered.cpu().split(longest), sizes.tolist(), strict=True)
    ]


def broadcast_object(value: Any, source: int, group: dist.ProcessGroup | None, label: str) -> Any:
    """Return the value of the group's rank ``source``. Every rank of the group must call it.

    value: what can be pickled; ignored on other ranks. group, label and errors as for
    `run_collective`.
    """
    group = group or default_group()
    is_source = group.rank() == source
    data = _pickled(value if is_source else None, group)
    size = torch.tensor([len(data)], dtype=torch.int64, device=data.device)
    run_collective(dist.broadcast, size, group=group, label=label, group_src=source)
    if not is_source:
        data = data.new_empty(int(size))
    run_collective(dist.broadcast, data, group=group, label=label, group_src=source)
    return value if is_source else _unpickled(data.cpu())


def _pickled(value: Any, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a value as bytes, on a device that the group serves."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    return data.to(any_device(group))


def _unpickled(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())
