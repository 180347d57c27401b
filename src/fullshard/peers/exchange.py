"""Exchange of small Python values among the ranks of a group, while communication is set up.

Two ways: through the group's collectives, and through the store that the ranks met in. The store
works with every backend, also where collectives fail: NCCL refuses ranks that share a GPU.
"""

import collections
import pickle
from typing import Any

import torch.distributed as dist

from fullshard.peers.backends import timeout_s
from fullshard.peers.store import store_in_time

# Exchanges so far, by name of the group: each has keys of its own. Ranks count alike, since every
# exchange is a call of all of them.
_rounds: "collections.Counter[str]" = collections.Counter()


def exchange_through_store(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return every rank's value, in rank order. Every rank of the group must call it."""
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


def exchange_through_group(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return every rank's value, in rank order. Every rank of the group must call it."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values
