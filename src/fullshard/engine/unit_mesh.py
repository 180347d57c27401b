"""The mesh of a unit, with the place of this rank and its process groups."""

from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.plan.mesh import MeshPlan


class UnitMesh(NamedTuple):
    """A mesh with its place in numbers and its process groups (None for an axis of one)."""

    mesh: DeviceMesh | None  # None where the user gave process groups
    plan: MeshPlan
    shard_group: dist.ProcessGroup | None
    replicate_group: dist.ProcessGroup | None
    post_forward: DeviceMesh | None = None  # (replicate, shard) of reshard_after_forward=N

    @property
    def shard_mesh(self) -> DeviceMesh | None:
        """The shard axis alone."""
        if self.mesh is None:
            return None
        names = self.mesh.mesh_dim_names
        return self.mesh if self.mesh.ndim == 1 or names is None else self.mesh[names[-1]]
