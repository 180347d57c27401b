"""How and over which ranks parameters are sharded: values that the faces decide, and the engine reads."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from fullshard.plan.mesh import MeshPlan
from fullshard.torch_private import AsyncCollectiveTensor, DTensorSpec, TensorMeta


class UnitMesh(NamedTuple):
    """The mesh of a unit, this rank's place in it, and its process groups.

    plan: sizes of the axes and this rank's coordinates, as integers.
    shard_group, replicate_group: the groups of the axes; None for an axis of one rank.
    """

    mesh: DeviceMesh | None  # None where the user gave process groups
    plan: MeshPlan
    shard_group: dist.ProcessGroup | None
    replicate_group: dist.ProcessGroup | None
    post_forward: DeviceMesh | None = None  # (replicate, shard) of reshard_after_forward=N
    info: object = None  # what the face calls it

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
        mesh = self.mesh
        if mesh is None or mesh.ndim == 1 or mesh.mesh_dim_names is None:
            return mesh
        return mesh[mesh.mesh_dim_names[self.shard_axis]]


@dataclasses.dataclass(frozen=True, slots=True)
class Unfinished:
    """What autograd leaves on a plain parameter, where not only the unit's reduction has to follow.

    left: what it is, as a DTensor: mesh, placements and shape.
    finished: the placements to which it is brought. On data-parallel axes they are those of ``left``,
        as the unit reduces over these.
    """

    left: DTensorSpec
    finished: tuple[Placement, ...]

    def finish(self, grad: torch.Tensor) -> torch.Tensor:
        """Return this rank's full gradient, which the unit is to reduce. Collective."""
        whole = DTensor(grad, with_dtype(self.left, grad.dtype), requires_grad=False)
        return redistributed(whole, self.finished)


@dataclasses.dataclass(frozen=True, slots=True)
class ParamForm:
    """How one parameter is sharded: decided by `faces.forms.param_form`, then only read.

    spec: mesh, placements and shape of the sharded DTensor; None for a piece of a flat buffer.
    shard_dim: the dim of this rank's local tensor that is cut over the shard axis.
    unsharded: the same for the unsharded form, if that is a DTensor (tensor or expert parallel);
        None if it is a plain tensor.
    reduced_axes: the data-parallel axes of ``unsharded``'s mesh. A gradient may be a partial sum over
        them; the unit's own reduction completes it, so nothing else may.
    compute_dtype: of the unsharded form, if that was chosen for this parameter alone; None for the
        policy's ``param_dtype``.
    unfinished: what autograd leaves on the unsharded form, if that is a plain tensor and this is not
        yet what the unit reduces; None if it is.
    annotate: is called with each unsharded form when it is made; None if nothing is.
    """

    spec: DTensorSpec | None = None
    shard_dim: int = 0
    unsharded: DTensorSpec | None = None
    reduced_axes: frozenset[int] = frozenset()
    compute_dtype: torch.dtype | None = None
    unfinished: Unfinished | None = None
    annotate: Callable[[nn.Parameter], object] | None = None

    @property
    def leaves_plain_gradients(self) -> bool:
        """True if what autograd leaves is what the unit reduces, as it is."""
        return self.unsharded is None and self.unfinished is None

    @property
    def reduces_elsewhere(self) -> bool:
        """True if a full gradient may be a partial sum over other ranks than the unit's."""
        if self.unfinished is not None:
            pairs = zip(self.unfinished.left.placements, self.unfinished.finished, strict=True)
            return any(has.is_partial() and has != wanted for has, wanted in pairs)
        return self.unsharded is not None and any(
            placement.is_replicate() and axis not in self.reduced_axes
            for axis, placement in enumerate(self.unsharded.placements)
        )

    def finished(self, placements: Sequence[Placement]) -> tuple[Placement, ...]:
        """Return the placements of a DTensor's gradient that only the unit's reduction is to follow.

        placements: those in which autograd left it. A redistribution over a data-parallel axis would
        sum over ranks, and the unit's reduction would sum again.
        """
        assert self.unsharded is not None
        return tuple(
            has if axis in self.reduced_axes else wanted
            for axis, (has, wanted) in enumerate(
                zip(placements, self.unsharded.placements, strict=True)
            )
        )


def redistributed(tensor: DTensor, placements: tuple[Placement, ...]) -> torch.Tensor:
    """Return this rank's part of a DTensor in other placements. Collective if they are others."""
    if placements != tensor.placements:
        tensor = tensor.redistribute(placements=placements)
    local = tensor._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """Return a spec that differs in dtype alone; the same object if it has that dtype."""
    if spec.tensor_meta is not None and spec.tensor_meta.dtype == dtype:
        return spec
    meta = TensorMeta(spec.shape, spec.stride, dtype)
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
