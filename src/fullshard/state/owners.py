"""Which ranks have a model together, told by the meshes that it is sharded over.

Mostly all ranks of the job. A model that is sharded over some of them is these ranks' alone: others
may have a model of the same names, or none, and do not join its collectives.

    ranks 0, 1: policy over [0, 1]     ranks 2, 3: reward over [2, 3]
"""

from collections.abc import Iterator

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.engine.unit_mesh import UnitMesh
from fullshard.faces.meshes import joined_mesh
from fullshard.peers.groups import group_over
from fullshard.state.structure import units_of


def owners_of(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the group of the ranks that have a model together; None for all ranks of the job.

    Collective among these ranks where none of their groups is known yet. All ranks of the job are taken
    too where no mesh of the model contains all others, or it has none.
    """
    if not dist.is_initialized():
        return None
    meshes = [unit.mesh for unit in units_of(model)]
    known = {ranks for mesh in meshes for ranks in _of_unit(mesh)}
    known |= {
        _of_mesh(spec.mesh)
        for unit in units_of(model)
        for param in unit.params
        for spec in (param.form.spec, param.form.unsharded)
        if spec is not None
    }
    known |= {
        _of_mesh(mesh)
        for unit in units_of(model)
        for param in unit.params
        if param.form.unsharded is not None
        and (mesh := joined_mesh(unit.mesh, param.form.unsharded.mesh)) is not None
    }
    known |= {_of_mesh(p.device_mesh) for p in model.parameters() if isinstance(p, DTensor)}
    largest = max(known, key=len, default=frozenset())
    if len(largest) in (0, dist.get_world_size()) or not all(largest >= own for own in known):
        return None
    groups = (group for mesh in meshes for group in (mesh.shard_group, mesh.replicate_group))
    for group in groups:
        if group is not None and _of_group(group) == largest:
            return group
    return group_over(sorted(largest))


def _of_unit(mesh: UnitMesh) -> Iterator[frozenset[int]]:
    """Yield the ranks of a unit's mesh; every rank of the job where groups do not tell them all."""
    if mesh.mesh is not None:
        yield _of_mesh(mesh.mesh)
        return
    groups = [g for g in (mesh.shard_group, mesh.replicate_group) if g is not None]
    if len(groups) > 1:
        yield frozenset(range(dist.get_world_size()))
    else:
        yield from map(_of_group, groups)


def _of_mesh(mesh: DeviceMesh) -> frozenset[int]:
    return frozenset(mesh.mesh.flatten().tolist())


def _of_group(group: dist.ProcessGroup) -> frozenset[int]:
    return frozenset(dist.get_process_group_ranks(group))
