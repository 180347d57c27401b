"""The mesh of a unit, with the place of this rank and its process groups."""

from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.plan.mesh import MeshPlan


class UnitMesh(NamedTuple):
    """A device mesh, this rank's place in it, and its process groups.

    plan: sizes of the axes and this rank's coordinates, as integers.
    shard_group, replicate_group: the groups of the axes; None for an axis of one rank.
    """

    mesh: DeviceMesh | None  # None where the user gave process groups
    plan: MeshPlan
    shard_group: dist.ProcessGroup | None
    replicate_group: dist.ProcessGroup | None
    post_forward: DeviceMesh | None = None  # (replicate, shard) of reshard_after_forward=N

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups of the axes that have several ranks, that of the shards first."""
        return [group for group in (self.shard_group, self.replicate_group) if group is not None]

    @property
    def shard_axis(self) -> int:
        """The mesh's axis that is sharded over: behind that of the replicas, if there is one."""
        return int(self.replicate_group is not None)

    @property
    def shard_mesh(self) -> DeviceMesh | None:
        """The shard axis as a 1-D mesh; None where the user gave process groups."""
        if self.mesh is None:
            return None
        names = self.mesh.mesh_dim_names
        if self.mesh.ndim == 1 or names is None:
            return self.mesh
        return self.mesh[names[self.shard_axis]]
