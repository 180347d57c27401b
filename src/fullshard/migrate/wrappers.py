"""The wrapped modules of a model: where they were in the model before it was wrapped, and their meshes."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fullshard.errors import StateError
from fullshard.fsdp1.module import FullyShardedDataParallel
from fullshard.fsdp1.options import HYBRID_SHARDING_STRATEGIES, ShardingStrategy
from fullshard.plan.units import clean_name
from fullshard.torch_private import COMPILED_MODULE

_WRAPPED_AGAIN = "an instance inside wraps the same module and makes the call"
_CONTAINER = "a container without forward, which fully_shard refuses: what is inside is enough"


@dataclasses.dataclass(frozen=True, slots=True)
class Instance:
    """One wrapper, as the migration report sees it.

    path: of the wrapped module, in the model before it was wrapped.
    parent: the instance around this one, None for an outermost one.
    height: 0 if no other instance is inside, else one more than the largest height inside.
    note: why it needs no call of its own; "" if it does.
    """

    path: str
    wrapper: FullyShardedDataParallel
    parent: "Instance | None"
    height: int
    is_root: bool
    note: str

    @property
    def kind(self) -> type[nn.Module]:
        return type(self.wrapper.module)

    @property
    def strategy(self) -> ShardingStrategy:
        """The strategy in effect; the one asked for is not kept: see `is_alone`."""
        return self.wrapper.sharding_strategy

    @property
    def is_alone(self) -> bool:
        # A group of one rank turns strategies, except hybrid ones, into NO_SHARD.
        return self.wrapper.world_size == 1 and self.strategy is ShardingStrategy.NO_SHARD

    @property
    def is_replicated(self) -> bool:
        return self.strategy is ShardingStrategy.NO_SHARD and not self.is_alone

    @property
    def is_hybrid(self) -> bool:
        return self.strategy in HYBRID_SHARDING_STRATEGIES

    @property
    def computes_in_float32(self) -> bool:
        # Mixed precision leaves such modules in float32, by default batch norms.
        overrides: object = getattr(self.wrapper.module, "_wrap_overrides", None)
        return overrides == {"mixed_precision": None}


def find_instances(model: nn.Module) -> list[Instance]:
    """Return the instances in a model, outermost first. Raises StateError if there is none."""
    wrappers = wrappers_in(model)
    if not wrappers:
        raise StateError(_nothing_wrapped(model))
    parents = {name: owner_among(wrappers, name.rpartition(".")[0]) for name in wrappers}
    parents[""] = None
    heights = dict.fromkeys(wrappers, 0)
    for name in reversed(wrappers):  # those inside first
        if (above := parents[name]) is not None:
            heights[above] = max(heights[above], heights[name] + 1)
    innermost = {original_path(name): name for name in wrappers}
    found: dict[str, Instance] = {}
    for name, wrapper in wrappers.items():
        path, above = original_path(name), parents[name]
        parent = None if above is None else found[above]
        is_root = parent is None and wrapper._is_root is not False
        if parent is not None and parent.path == path:
            is_root = parent.is_root
        is_list = isinstance(wrapper.module, (nn.ModuleList, nn.ModuleDict))
        has_forward = type(wrapper.module).forward is not nn.Module.forward
        note = _CONTAINER if is_list and not has_forward else ""
        if innermost[path] != name:
            note = _WRAPPED_AGAIN
        found[name] = Instance(path, wrapper, parent, heights[name], is_root, note)
    return list(found.values())


def wrappers_in(model: nn.Module) -> dict[str, FullyShardedDataParallel]:
    """Return the wrappers in a model by their names in it, outermost first."""
    modules = model.named_modules()
    return {name: m for name, m in modules if isinstance(m, FullyShardedDataParallel)}


def owner_among(wrappers: Mapping[str, FullyShardedDataParallel], name: str) -> str | None:
    """Return the name of the innermost wrapper that is, or contains, the module ``name``."""
    while name and name not in wrappers:
        name = name.rpartition(".")[0]
    return name if name in wrappers else None


def original_path(name: str) -> str:
    """Return a module's path without prefixes of FSDP, activation checkpointing and compilation."""
    return ".".join(part for part in clean_name(name).split(".") if part != COMPILED_MODULE)


def _nothing_wrapped(model: nn.Module) -> str:
    name = type(model).__name__
    if any(type(m).__name__ == FullyShardedDataParallel.__name__ for m in model.modules()):
        return (
            f"{name} is wrapped with PyTorch's FullyShardedDataParallel. Call fullshard.install() "
            "before it is wrapped."
        )
    return (
        f"Nothing in {name} is wrapped with FullyShardedDataParallel. Pass the wrapped model, not "
        "the one inside."
    )


# Meshes


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
    if instance.is_replicated:
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
