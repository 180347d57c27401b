"""Which boxes of a unit's parameters this rank holds: one of rows, or those that its flat pieces make up.

    rank 1 of 2, w (5, 4) sharded by rows       box (3, 0) (2, 4)
    the same, flat                              boxes (2, 2) (1, 2) and (3, 0) (2, 4)

The same boxes are those of optimizer state of the parameters' size. This rank's memory of them is a *local*:
a tensor of the shape of the parameter's shard, which is a piece of a flat buffer or rows.
"""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from fullshard.engine.params.managed import ManagedParameter
from fullshard.engine.unit import Unit
from fullshard.engine.unit_mesh import UnitMesh
from fullshard.errors import StateError, UnsupportedError
from fullshard.plan.boxes import (
    Box,
    Cut,
    Division,
    box_after,
    boxes_of_run,
    chunks,
    whole_box,
)
from fullshard.plan.layout import BucketLayout, ParamLayout, Piece, Shape
from fullshard.torch_private import DTensorSpec, StridedShard


class HeldBox(NamedTuple):
    """A box of a tensor, and this rank's memory of it: a view of the box's shape."""

    box: Box
    view: torch.Tensor


class Part(NamedTuple):
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


class Place(NamedTuple):
    """This rank's box of a tensor on a mesh.

    copy, copies: its number among the ranks of the mesh that hold the same box. num_ranks: of the mesh.
    """

    box: Box
    copy: int
    copies: int
    num_ranks: int


class UnitParts:
    """Which parts of a unit's parameters this rank holds, and of the optimizer state of their size.

    Made by `parts_of`.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.proxy(unit)
        self._is_flat = unit.params.is_flat
        # What was planned from; a parameter gets another form if its unit changes.
        self.forms = tuple(param.form for param in unit.params)
        self.world_size = _world_size()
        self._parts: dict[int, Part] = {}
        self._places: dict[int, Place] = {}
        self._divisions: dict[int, Division] = {}
        self._layouts: dict[int, tuple[BucketLayout, ParamLayout]] = {}
        if self._is_flat:
            buckets = unit.plan_layout().buckets
            self._layouts = {place.index: (b, place) for b in buckets for place in b.params}

    def is_current(self, params: Sequence[ManagedParameter]) -> bool:
        """Whether what it was planned from has stayed."""
        forms = tuple([param.form for param in params])
        return forms == self.forms and self.world_size == _world_size()

    def boxes(self, index: int, local: torch.Tensor) -> tuple[HeldBox, ...]:
        """Return the boxes of a tensor of a parameter's size of which ``local`` is this rank's part.

        local: contiguous; of the parameter's `shard_shape`, or flattened. For the parameter itself, and
        for its optimizer state.
        """
        if not self._is_flat:
            box, numel = self._place(index).box, local.numel()
            if box.numel != numel:
                raise StateError(
                    f"{self._unit.params[index].name}: this rank's part has shape {tuple(local.shape)}, but "
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
        if index not in self._divisions:
            group = division_group(self._unit)
            ranks = range(1 if group is None else group.size())
            if self._unit.mesh.shard_group is None:
                self._divisions[index] = [(self.region(index),) for _ in ranks]
            elif self._is_flat:
                self._divisions[index] = [self._flat_boxes(index, rank) for rank in ranks]
            else:
                region, dim = self.region(index), self.forms[index].shard_dim
                boxes = [box.moved(region.offset) for box in chunks(region.shape, dim, len(ranks))]
                self._divisions[index] = [(box,) if box.numel else () for box in boxes]
        return self._divisions[index]

    def region(self, index: int) -> Box:
        """Return what of a parameter the unit's ranks divide: all, or this rank's tensor-parallel part."""
        spec = self.forms[index].unsharded
        return whole_box(self._unit.params[index].shape) if spec is None else place_on(spec).box

    def cut(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's local of what the unit's ranks divide; shares memory with it where it can."""
        shape = self._unit.params[index].shard_shape
        if self._is_flat:
            (run,) = self._pieces(index, self._unit.mesh.plan.shard_rank) or (Piece(0, 0, 0),)
            return whole.reshape(-1)[run.param_start : run.param_start + run.numel].view(shape)
        own = self._place(index).box
        return whole[own.within(self.region(index))].view(shape)

    def _pieces(self, index: int, rank: int) -> Sequence[Piece]:
        bucket, place = self._layouts[index]
        return bucket.pieces(place, rank)

    def _flat_boxes(self, index: int, rank: int) -> tuple[Box, ...]:
        """Return the boxes of a flat parameter that a rank's pieces of it make up, in their order."""
        shape, base = tuple(self._unit.params[index].shape), self.region(index).offset
        return tuple(
            box.moved(base)
            for piece in self._pieces(index, rank)
            for box in boxes_of_run(shape, piece.param_start, piece.numel)
        )

    def part(self, index: int) -> Part:
        """Return what follows of a parameter from the mesh alone."""
        if index not in self._parts:
            param, mesh = self._unit.params[index], self._unit.mesh
            shape, placement = _whole_shape(param), _placement(mesh, param)
            self._parts[index] = Part(shape, placement, *self._copies(index))
        return self._parts[index]

    def _copies(self, index: int) -> tuple[int, int]:
        plan, place = self._unit.mesh.plan, self._place(index)
        if not self._is_flat:
            copy, copies, num_ranks = place.copy, place.copies, place.num_ranks
        elif place.copies > 1:
            return 0, 0
        else:
            copy, copies = plan.replicate_rank, plan.replicate_size
            num_ranks = plan.replicate_size * plan.shard_size * place.num_ranks
        return (copy, copies) if num_ranks == self.world_size else (0, 0)

    def _place(self, index: int) -> Place:
        """Return this rank's box of a parameter; of a flat unit, of what its pieces are cut from."""
        if index not in self._places:
            form = self.forms[index]
            spec = form.unsharded if self._is_flat else form.spec
            self._places[index] = Place(whole_box(()), 0, 1, 1) if spec is None else place_on(spec)
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
    if unit.params.is_flat:
        return UnitParts(unit)
    known = _parts.get(unit)
    if known is None or not known.is_current(unit.params.all):
        known = _parts[unit] = UnitParts(unit)
    return known


def _whole_shape(param: ManagedParameter) -> Shape:
    spec = param.form.spec or param.form.unsharded
    return tuple(param.shape if spec is None else spec.shape)


def _placement(mesh: UnitMesh, param: ManagedParameter) -> str:
    if param.form.spec is not None:
        return placement_of(param.form.spec)
    inner = param.form.unsharded
    outer = f"flat over {mesh.plan.shard_size}"
    if mesh.plan.replicate_size > 1:
        outer = f"replicated over {mesh.plan.replicate_size}, {outer}"
    return outer if inner is None else f"{outer}; {placement_of(inner)}"


def placement_of(spec: DTensorSpec) -> str:
    """Say how a DTensor is divided: "dim 0 over dp 4, replicated over tp 2"."""
    parts = []
    for axis, placement in enumerate(spec.placements):
        names = spec.mesh.mesh_dim_names
        axis_name = f" {names[axis]}" if names else ""
        kind = f"dim {placement.dim}" if hasattr(placement, "dim") else "replicated"
        parts.append(f"{kind} over{axis_name} {spec.mesh.size(axis)}")
    return ", ".join(parts)


def place_on(spec: DTensorSpec, coordinate: Sequence[int] | None = None) -> Place:
    """Return a rank's box of a DTensor: of this one, or of that at a coordinate of the mesh.

    Raises UnsupportedError for a partial sum, of which no rank has the values.
    """
    coordinate = spec.mesh.get_coordinate() if coordinate is None else coordinate
    assert coordinate is not None  # DTensors are made on the ranks of their mesh
    cuts: list[Cut] = []
    later: list[Cut] = []  # a strided axis cuts what the axes behind it have left
    copy, copies = 0, 1
    for axis, placement in enumerate(spec.placements):
        size, number = spec.mesh.size(axis), coordinate[axis]
        if placement.is_replicate():
            copy, copies = copy * size + number, copies * size
        elif isinstance(placement, StridedShard):
            later.append(Cut(placement.dim, number, size))
        elif isinstance(placement, Shard):
            cuts.append(Cut(placement.dim, number, size))
        else:
            raise UnsupportedError(
                f"A DTensor of shape {tuple(spec.shape)} is {placement} on {spec.mesh}: each rank has "
                "a term of a sum, which cannot be saved. Reduce it first."
            )
    return Place(box_after(tuple(spec.shape), [*cuts, *later]), copy, copies, spec.mesh.size())


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
