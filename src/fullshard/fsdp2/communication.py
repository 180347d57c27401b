"""Change how a unit communicates, for `FSDPModule`'s methods.

None of these functions connects the units to each other again: call ``Iteration.connect`` after
them, as `FSDPModule` does.
"""

from collections.abc import Iterable
from typing import Literal

import torch.distributed as dist

from fullshard.comm.collectives import (
    AllGather,
    CollectivesComm,
    ProcessGroupAllocAllGather,
    ProcessGroupAllocReduceScatter,
    ReduceScatter,
    SymmMemAllGather,
    SymmMemReduceScatter,
)
from fullshard.comm.process_group import ProcessGroupComm
from fullshard.engine.adoption import use_comm
from fullshard.engine.unit import Unit
from fullshard.errors import MisuseError, ShardingError, StateError
from fullshard.peers.groups import backend_name, backend_of, make_group


def use_collectives(
    unit: Unit, *, gather: AllGather | None = None, reduce: ReduceScatter | None = None
) -> None:
    """Let a unit communicate through these objects; where one is None, what was set before stays.

    Does nothing for a unit that communicates with nobody.
    """
    group = unit.mesh.shard_group
    if group is None or group.size() == 1:
        return
    if isinstance(unit.comm, CollectivesComm):
        gather = unit.comm.gather if gather is None else gather
        reduce = unit.comm.reduce if reduce is None else reduce
    use_comm(unit, CollectivesComm(group, unit.device, gather=gather, reduce=reduce))


def use_separate_reduce_groups(units: Iterable[Unit], *, enable: bool) -> None:
    """Give reduce-scatters groups of their own, one per set of ranks, or take them away.

    Every rank has to call it, since making a group is collective.
    """
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for unit in units:
        group = unit.mesh.shard_group
        if not enable:
            unit.reduce_over(None)
        elif isinstance(unit.comm, ProcessGroupComm) and group is not None:
            ranks = tuple(dist.get_process_group_ranks(group))
            own = unit.reduce_group or groups.get(ranks)
            groups[ranks] = own or make_group(ranks, group, description="fsdp_reduce_scatter")
            unit.reduce_over(groups[ranks])


def use_process_group_memory(unit: Unit, *, enable: bool) -> None:
    """Stage a unit's communication in memory of the process group's own allocator, or no longer.

    Raises StateError where the group has no allocator, and MisuseError where the user has set collectives.
    """
    group = unit.mesh.shard_group
    if group is None:
        return
    _refuse_custom(unit, "set_allocate_memory_from_process_group_for_comm")
    backend = backend_of(group, unit.device)
    if enable and not backend.supports_tensor_alloc(unit.device):
        raise StateError(
            f"{unit.label}: backend {backend.name()!r} on {unit.device} has no allocator "
            "of its own. It takes NCCL on CUDA devices that support registered memory."
        )
    if enable:
        use_collectives(
            unit,
            gather=ProcessGroupAllocAllGather(group),
            reduce=ProcessGroupAllocReduceScatter(group),
        )
    elif isinstance(unit.comm, CollectivesComm):
        use_comm(unit, ProcessGroupComm(group, unit.device))


def use_symmetric_memory(unit: Unit, backend: Literal["NCCL"]) -> None:
    """Stage a unit's communication in symmetric memory.

    Raises StateError where the group is not NCCL's, and MisuseError where the user has set collectives.
    """
    group = unit.mesh.shard_group
    if group is None:
        return
    _refuse_custom(unit, "set_symm_mem_for_comm")
    found = backend_name(group, unit.device)
    if unit.device.type != "cuda" or found != "nccl":
        raise StateError(
            f"{unit.label}: symmetric memory takes CUDA devices and NCCL, this is "
            f"{unit.device} and {found}."
        )
    use_collectives(
        unit, gather=SymmMemAllGather(group, backend), reduce=SymmMemReduceScatter(group, backend)
    )


def refuse_symmetric_memory(unit: Unit, max_input_buffers: int) -> None:
    """Raise ShardingError if a unit's reduce-scatter has its input in symmetric memory."""
    if isinstance(unit.comm, CollectivesComm) and isinstance(
        unit.comm.reduce, SymmMemReduceScatter
    ):
        raise ShardingError(
            f"{unit.label}: max_input_buffers={max_input_buffers} is not supported "
            "with symmetric memory, of which each buffer would take its own segment."
        )


def _refuse_custom(unit: Unit, method: str) -> None:
    if isinstance(unit.comm, CollectivesComm) and not unit.comm.is_stock:
        raise MisuseError(
            f"cannot call {method} when the communication is custom: "
            f"{type(unit.comm.gather).__name__} and {type(unit.comm.reduce).__name__}."
        )
