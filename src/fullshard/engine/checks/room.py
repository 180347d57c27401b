"""Whether what is on the meta device fits into the memory of its host, before ``to_empty()`` or ``materialize()`` makes it.

Linux gives out memory that it does not have, and kills a process when it is written to. Only what is certain
is refused: what this rank makes; where ranks share memory, what all of them make, as they are on one host.
"""

import math
from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import Tensor

from fullshard.engine.unit import Unit
from fullshard.errors import AllocationError
from fullshard.host import memory_pools


def refuse_lack_of_memory(call: str, units: Sequence[Unit], others: Iterable[Tensor]) -> None:
    """Raise AllocationError if the host, or a container's limit, cannot hold what is on the meta device.

    others: what is not sharded, such as buffers. call: what makes it, for the message.
    """
    nbytes = sum(
        param.local.nbytes * (unit.comm.size if unit.comm.reads_in_place else 1)
        for unit in units
        if unit.device.type == "cpu"
        for param in unit.params
        if param.local.is_meta
    )
    nbytes += sum({id(each): each.nbytes for each in others if each.is_meta}.values())
    for pool in memory_pools().values() if nbytes else ():
        can_get = pool.free_nbytes + pool.swap_nbytes
        if nbytes > can_get:
            rank = dist.get_rank() if dist.is_initialized() else 0
            raise AllocationError(
                f"{call} (rank {rank}): parameters and buffers need {_size(nbytes)} of memory, and on "
                f"{pool.name} {_size(can_get)} can be had, caches and swap included: the system would kill a process. "
                "Nothing was changed. Use more hosts, or let devices hold the model."
            )


def _size(nbytes: int) -> str:
    return f"{math.ceil(nbytes / 2**20):,} MiB"
