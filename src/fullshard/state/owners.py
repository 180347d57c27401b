"""Find the ranks that have a model together, by the meshes that it is sharded over.

Mostly all ranks of the job. A model that is sharded over some of them is these ranks' alone: others
may have a model of the same names, or none, and do not join its collectives.

    ranks 0, 1: policy over [0, 1]     ranks 2, 3: reward over [2, 3]
"""

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.comm.own_group import group_over
from fullshard.state.structure import units_of
from fullshard.state.unit_parts import rank_sets


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
        for group in (unit.mesh.shard_group, unit.mesh.replicate_group):
            if group is not None and largest == {*dist.get_process_group_ranks(group)}:
                return group
    return group_over(sorted(largest))
