"""What this rank holds of a unit's parameters, for state dicts, checkpoints and live access.

No other file of these rooms looks into a unit's parameters. What is held is one box of rows, or the boxes
that a flat piece makes up, of a parameter and of optimizer state of its size. This rank's memory of them is
a *local*: a tensor of the shape of the parameter's shard. Parameters go by their number in the unit.
"""

import functools
import math
import weakref
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.engine.params.flat import HiddenParameter
from fullshard.engine.params.form import UnitMesh
from fullshard.engine.params.managed import ManagedParameter
from fullshard.engine.unit import Unit
from fullshard.errors import StateError
from fullshard.faces.meshes import joined_mesh
from fullshard.peers.groups import place_in, place_in_job
from fullshard.plan.boxes import Box, Division, boxes_of_run, chunks, whole_box
from fullshard.plan.layout import BucketLayout, ParamLayout, Shape
from fullshard.state.sharded_tensors import MeshBox, place_on, placement_of
from fullshard.torch_private import local_part


class HeldBox(NamedTuple):
    """A box of a tensor, and this rank's memory of it: a view of the box's shape."""

    box: Box
    view: torch.Tensor


class Placed(NamedTuple):
    """What follows of one parameter from its unit's mesh alone.

    shape: of the whole parameter, before any sharding, tensor parallel included. placement: how ranks
    divide it, for readers. copy, copies: this rank's number among those that hold the same part, and how
    many there are. (0, 0) if only the ranks together know: if the unit's mesh is not all of the job, as
    other ranks may hold it too; and for pieces of what tensor parallel below has on several ranks. Their
    flat buffers may differ in length, and so be cut at other elements.
    """

    shape: Shape
    placement: str
    copy: int
    copies: int


class UnitParts:
    """Which parts of a unit's parameters this rank holds, and of the optimizer state of their size.

    Made by `parts_of`.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.proxy(unit)
        # What was planned from; a parameter gets another form if its unit changes.
        self.forms = tuple(param.form for param in unit.managed)
        self.world_size = place_in_job().size
        self._placed: dict[int, Placed] = {}
        self._places: dict[int, MeshBox] = {}

    @functools.cached_property
    def _layouts(self) -> dict[int, tuple[BucketLayout, ParamLayout]]:
        buckets = self._unit.plan_layout().buckets
        return {place.index: (bucket, place) for bucket in buckets for place in bucket.params}

    # Memory

    def local(self, index: int) -> torch.Tensor:
        """Return this rank's part of a parameter."""
        local: torch.Tensor = self._unit.managed[index].local
        return local

    def new_local(
        self, index: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> torch.Tensor:
        """Return memory for a local, by default on the device of the unit."""
        shape = self._unit.managed[index].shard_shape
        return torch.empty(shape, dtype=dtype, device=device or self._unit.device)

    def as_local(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a local's elements in the local's shape."""
        return tensor.view(self._unit.managed[index].shard_shape)

    def as_shown(self, index: int, local: torch.Tensor) -> torch.Tensor:
        """Return a local in the type in which users see shards: a DTensor, or as it is."""
        shown: torch.Tensor = self._unit.managed[index].wrap_shard(local)
        return shown

    def cut(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's local of what the unit's ranks divide: a view where that can be."""
        local: torch.Tensor = self._unit.managed[index].own_part(whole)
        return local

    def local_in(self, index: int, key: str, value: torch.Tensor) -> torch.Tensor:
        """Return a parameter's local of optimizer state, which may be that of a whole flat shard.

        key: its name. Raises StateError for a tensor of another size.
        """
        param = self._unit.managed[index]
        local = local_part(value)
        if self._unit.flat_parameter is not None:
            bucket, place = self._layouts[index]
            # State that is cut already is left as it is.
            if local.numel() == bucket.shard_numel:
                start, shape = bucket.shard_range(place, self._unit.mesh.plan.shard_rank)
                local = local.reshape(-1)[start : start + math.prod(shape)]
        if local.numel() != math.prod(param.shard_shape):
            raise StateError(
                f"{param.name}: the optimizer's state {key!r} has shape {tuple(value.shape)}, "
                f"which is not that of what it trains, {tuple(param.holder.sharded.shape)}, so "
                "it cannot be put together from all ranks."
            )
        return local if local.is_contiguous() else local.reshape(-1)

    def joined(self, locals_: Mapping[int, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the locals of all parameters as one flat parameter has them, with padding of 0."""
        (bucket,) = self._unit.plan_layout().buckets
        flat = torch.zeros(bucket.shard_numel, dtype=dtype, device=self._unit.device)
        for place in bucket.params:
            start, shape = bucket.shard_range(place, self._unit.mesh.plan.shard_rank)
            flat[start : start + math.prod(shape)].copy_(locals_[place.index].reshape(-1))
        return flat

    def owned(self) -> set[int]:
        """Return the parameters of which this rank trains elements; of one flat parameter, all."""
        return {
            index
            for index, param in enumerate(self._unit.managed)
            if self._unit.flat_parameter is not None or param.sharded.numel()
        }

    # Boxes

    def boxes(self, index: int, local: torch.Tensor) -> tuple[HeldBox, ...]:
        """Return the boxes of a tensor of a parameter's size of which ``local`` is this rank's part.

        local: contiguous; of the parameter's `shard_shape`, or flattened. For the parameter itself, and
        for its optimizer state.
        """
        if not self._unit.is_flat:
            box, numel = self._place(index).box, local.numel()
            if box.numel != numel:
                raise StateError(
                    f"{self._unit.managed[index].name}: this rank's part has shape {tuple(local.shape)}, but "
                    f"its mesh and placements give it {box.shape}."
                )
            view = local if local.shape == box.shape else local.view(box.shape)
            return (HeldBox(box, view),) if numel else ()
        flat = local.reshape(-1)
        held: list[HeldBox] = []
        position = 0
        for box in self._flat_boxes(index, self._unit.mesh.plan.shard_rank):
            held.append(HeldBox(box, flat[position : position + box.numel].view(box.shape)))
            position += box.numel
        return tuple(held)

    def division(self, index: int) -> Division:
        """Return which boxes of a parameter each rank of the `division_group` holds."""
        group, region = division_group(self._unit), self.region(index)
        size = place_in(group).size
        if self._unit.mesh.shard_group is None:
            return [(region,)] * size
        if self._unit.is_flat:
            return [self._flat_boxes(index, rank) for rank in range(size)]
        boxes = chunks(region.shape, self.forms[index].shard_dim, size)
        return [(box.moved(region.offset),) if box.numel else () for box in boxes]

    def region(self, index: int) -> Box:
        """Return what of a parameter the unit's ranks divide: all, or this rank's tensor-parallel part."""
        spec = self.forms[index].unsharded
        return whole_box(self._unit.managed[index].shape) if spec is None else place_on(spec).box

    def _flat_boxes(self, index: int, rank: int) -> tuple[Box, ...]:
        """Return the boxes of a flat parameter that a rank's pieces of it make up, in their order."""
        shape, base = tuple(self._unit.managed[index].shape), self.region(index).offset
        bucket, place = self._layouts[index]
        return tuple(
            box.moved(base)
            for piece in bucket.pieces(place, rank)
            for box in boxes_of_run(shape, piece.param_start, piece.numel)
        )

    def placed(self, index: int) -> Placed:
        """Return what follows of a parameter from the mesh alone."""
        if index not in self._placed:
            param, mesh = self._unit.managed[index], self._unit.mesh
            spec = param.form.spec or param.form.unsharded
            shape = tuple(param.shape if spec is None else spec.shape)
            self._placed[index] = Placed(shape, _placement(mesh, param), *self._copies(index))
        return self._placed[index]

    def _copies(self, index: int) -> tuple[int, int]:
        plan, place = self._unit.mesh.plan, self._place(index)
        if not self._unit.is_flat:
            copy, copies, num_ranks = place.copy, place.copies, place.num_ranks
        elif place.copies > 1:
            return 0, 0
        else:
            copy, copies = plan.replicate_rank, plan.replicate_size
            num_ranks = plan.replicate_size * plan.shard_size * place.num_ranks
        return (copy, copies) if num_ranks == self.world_size else (0, 0)

    def _place(self, index: int) -> MeshBox:
        """Return this rank's box of a parameter; of a flat unit, of what its pieces are cut from."""
        if index not in self._places:
            form = self.forms[index]
            spec = form.unsharded if self._unit.is_flat else form.spec
            self._places[index] = (
                MeshBox(whole_box(()), 0, 1, 1) if spec is None else place_on(spec)
            )
        return self._places[index]


def division_group(unit: Unit) -> dist.ProcessGroup | None:
    """Return the group among whose ranks values are divided; replicas if nothing is sharded."""
    return unit.mesh.shard_group or unit.mesh.replicate_group


_parts: "weakref.WeakKeyDictionary[Unit, UnitParts]" = weakref.WeakKeyDictionary()


def parts_of(unit: Unit) -> UnitParts:
    """Return which parts of a unit's parameters this rank holds.

    Kept for rows, which follow from the mesh alone. A flat unit is planned anew: its pieces follow from
    dtypes too, which may change.
    """
    if unit.is_flat:
        return UnitParts(unit)
    known = _parts.get(unit)
    if (
        known is None
        or known.forms != tuple([param.form for param in unit.managed])
        or known.world_size != place_in_job().size
    ):
        known = _parts[unit] = UnitParts(unit)
    return known


def _placement(mesh: UnitMesh, param: ManagedParameter) -> str:
    if param.form.spec is not None:
        return placement_of(param.form.spec)
    inner = param.form.unsharded
    outer = f"flat over {mesh.plan.shard_size}"
    if mesh.plan.replicate_size > 1:
        outer = f"replicated over {mesh.plan.replicate_size}, {outer}"
    return outer if inner is None else f"{outer}; {placement_of(inner)}"


# What follows from a unit without a plan


def slots_of(unit: Unit) -> list[list[tuple[nn.Module | None, str]]]:
    """Return where each parameter is registered: modules, None for those that are gone, and names."""
    return [[(slot.module(), slot.name) for slot in param.slots] for param in unit.managed]


def trained_of(unit: Unit) -> list[tuple[nn.Parameter, tuple[int, ...]]]:
    """Return what an optimizer trains, with the parameters that each stands for."""
    if unit.flat_parameter is not None:
        return [(unit.flat_parameter, tuple(range(len(unit.managed))))]
    return [(param.sharded, (index,)) for index, param in enumerate(unit.managed)]


def memory_of(unit: Unit) -> object:
    """Return what is another object once shards are elsewhere; None while whole ones are shown, or after a move."""
    return None if unit.is_whole or unit.watch.have_moved else unit.params.buffers


def rank_sets(unit: Unit) -> set[frozenset[int]]:
    """Return the ranks of each mesh that a unit and its parameters are sharded over.

    All of the job where a unit's groups do not tell them.
    """
    place, forms = unit.mesh, [param.form for param in unit.managed]
    inner = [form.unsharded.mesh for form in forms if form.unsharded is not None]
    if place.mesh is None and len(place.groups) > 1:
        return {frozenset(range(dist.get_world_size()))}
    found = {frozenset(dist.get_process_group_ranks(group)) for group in place.groups}
    meshes: list[DeviceMesh | None] = [place.mesh, *inner]
    meshes += [joined_mesh(place, mesh) for mesh in inner]
    meshes += [form.spec.mesh for form in forms if form.spec is not None]
    return found | {frozenset(mesh.mesh.flatten().tolist()) for mesh in meshes if mesh is not None}


# Flat buffers


class FlatShard(NamedTuple):
    """One flat buffer of a unit: by rank, how many elements it has without padding, and this rank's."""

    sizes: list[int]
    local: torch.Tensor


def flat_shards(unit: Unit) -> list[FlatShard]:
    """Return the flat buffers of a unit, with this rank's shards in their own memory."""
    if not unit.managed:
        return []
    rank, found = unit.mesh.plan.shard_rank, []
    for bucket, shard in zip(unit.plan_layout().buckets, unit.flat_shards, strict=True):
        stop = max(param.unsharded_offset + param.spec.numel for param in bucket.params)
        size = bucket.shard_numel
        sizes = [min(max(stop - n * size, 0), size) for n in range(bucket.shard_size)]
        found.append(FlatShard(sizes, shard.detach()[: sizes[rank]]))
    return found


def show_pieces(unit: Unit) -> None:
    """Register the pieces inside of a flat parameter in its place, under their own names."""
    if unit.params.flat is None:
        return
    unit.params.flat.slot.remove()
    for param in unit.params:
        assert isinstance(param, HiddenParameter)
        param.show_piece()


def hide_pieces(unit: Unit) -> None:
    """Undo `show_pieces`, and take what was registered in their place meanwhile."""
    if unit.params.flat is None:
        return
    for param in unit.params:
        assert isinstance(param, HiddenParameter)
        param.take_assigned()
        param.show_sharded()
    unit.params.flat.slot.register(unit.params.flat.sharded)
