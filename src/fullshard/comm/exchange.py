"""Telling all ranks of a group something before they can communicate: through the store.

Works whatever the group's backend is, and where its collectives do not: NCCL refuses ranks that
share a GPU.
"""

import collections
import pickle
from typing import Any

import torch.distributed as dist

_rounds: "collections.Counter[str]" = collections.Counter()  # of each group, by name


def exchange_through_store(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return every rank's value, in rank order. Every rank of the group has to call it."""
    store = dist.distributed_c10d._get_default_store()
    name = group.group_name
    _rounds[name] += 1
    prefix = f"fullshard/exchange/{name}/{_rounds[name]}"
    store.set(f"{prefix}/{group.rank()}", pickle.dumps(value))  # type: ignore[arg-type]
    keys = [f"{prefix}/{rank}" for rank in range(group.size())]
    store.wait(keys)
    return [pickle.loads(data) for data in store.multi_get(keys)]


def exchange_through_group(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return every rank's value, in rank order. Every rank of the group has to call it."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values
