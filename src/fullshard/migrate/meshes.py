"""Write the expression that makes a wrapped module's device mesh, as source text."""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist

from fullshard.fsdp1.options import ShardingStrategy
from fullshard.migrate.instances import Instance


class _MeshAxis(NamedTuple):
    """This rank's group along one mesh axis."""

    name: str
    ranks: list[int]

    @property
    def stride(self) -> int | None:
        """The distance of neighbouring ranks: 0 for a single rank, None if it is not constant."""
        steps = {after - before for before, after in itertools.pairwise(self.ranks)} or {0}
        return steps.pop() if len(steps) == 1 else None

    @property
    def offsets(self) -> list[int]:
        """The group's ranks relative to this one."""
        return [rank - dist.get_rank() for rank in self.ranks]


def mesh_expression(instance: Instance) -> str | None:
    """Return the source text of an instance's mesh, or None if it is the default one.

    It is derived from this rank's groups alone; those of other ranks are assumed to continue the
    pattern, since asking them would make the report a collective. On four ranks, a shard group of
    ranks 0 and 2 and replicas 0 and 1 give

        DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard"))

    For hybrid groups without a pattern, "..." stands for the ranks, which the user has to fill in.
    """
    device, axes = instance.wrapper.compute_device.type, _axes(instance)
    everyone = list(range(dist.get_world_size()))
    grid = _grid(axes)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    own_device = "cpu" if accelerator is None else accelerator.type
    is_default = instance.wrapper._unit.mesh.mesh is None and device == own_device
    if len(axes) == 1 and grid == everyone and is_default:
        return None
    if grid == everyone:
        return _init(device, [(axis.name, len(axis.ranks)) for axis in axes])
    if len(axes) == 1 and (slices := _slice_of(axes[0], len(everyone))):
        return f'{_init(device, slices)}["{axes[0].name}"]'
    if grid is None:
        ranks = "..." if len(axes) == 2 else str(axes[0].ranks)
    else:
        width = len(axes[-1].ranks)
        rows = [grid[start : start + width] for start in range(0, len(grid), width)]
        ranks = str(rows if len(axes) == 2 else grid)
    return f'DeviceMesh("{device}", {ranks}, mesh_dim_names={_names(a.name for a in axes)})'


def _axes(instance: Instance) -> list[_MeshAxis]:
    """Return the axes of the mesh: (replicate, shard), or the only one."""
    placed = instance.wrapper._unit.mesh
    names: tuple[str, ...] = ("replicate", "shard") if instance.is_hybrid else ("shard",)
    if instance.strategy is ShardingStrategy.NO_SHARD and not instance.is_alone:
        names = ("replicate",)
    if placed.mesh is not None and placed.mesh.mesh_dim_names is not None:
        names = placed.mesh.mesh_dim_names[: len(names)]
    return [
        _MeshAxis(name, dist.get_process_group_ranks(group))
        for name, group in zip(names, reversed(placed.groups), strict=True)
    ]


def _grid(axes: list[_MeshAxis]) -> list[int] | None:
    """Return the ranks of the whole mesh, row by row, or None if they follow no pattern."""
    if any(axis.stride is None for axis in axes):
        return None
    steps = itertools.product(*(axis.offsets for axis in axes))
    return [dist.get_rank() + sum(offsets) for offsets in steps]


def _slice_of(axis: _MeshAxis, num_ranks: int) -> list[tuple[str, int]] | None:
    """Return (name, size) of the dims of a 2-D mesh of all ranks that has this axis as one dim.

    None if there is no such mesh.
    """
    size, first = len(axis.ranks), axis.ranks[0]
    others, rest = divmod(num_ranks, size)
    if rest:
        return None
    if axis.stride in (0, 1) and first % size == 0:
        return [("others", others), (axis.name, size)]
    if axis.stride == others and first < others:
        return [(axis.name, size), ("others", others)]
    return None


def _init(device: str, dims: list[tuple[str, int]]) -> str:
    sizes = ", ".join(str(size) for _, size in dims) + ("," if len(dims) == 1 else "")
    return f'init_device_mesh("{device}", ({sizes}), mesh_dim_names={_names(n for n, _ in dims)})'


def _names(names: Iterable[str]) -> str:
    """Return a tuple of names as source text: ("replicate", "shard")."""
    quoted = [f'"{name}"' for name in names]
    return f"({', '.join(quoted)}{',' if len(quoted) == 1 else ''})"
