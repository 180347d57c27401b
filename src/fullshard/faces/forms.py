"""What each parameter of a unit becomes: its DTensor while sharded, and its form while unsharded.

Plain parameters and DTensors, and plain ones that the package `spmd_types` annotates. An annotation gives a
parameter a type on each axis of a mesh:

    type    on the ranks of the axis                  autograd leaves there
    R       the same values                           partial sums
    I       the same values                           the same gradients
    S(dim)  parts of a larger tensor, cut along dim   the gradient of each part
    P       terms of a sum (frozen parameters alone)  the same gradients

With ``dp_mesh_dims``, such a parameter is stored as a DTensor on the whole mesh, and is the plain
tensor that it was while it is unsharded, with its annotation. It has to be R on data-parallel axes, or
not annotated there: the unit's reduction completes the sums over them. Those over other axes, such as
tensor parallel ones, are completed before (`engine.params.form.Unfinished`).

Nothing here imports the package. Who has not imported it has annotated nothing.
"""

import dataclasses
import functools
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fullshard.engine.params.form import ParamForm, Unfinished
from fullshard.errors import MeshError, MisuseError, ShardingError, UnsupportedError
from fullshard.faces.meshes import DataParallelMeshInfo, check_groups
from fullshard.policies import MixedPrecisionPolicy
from fullshard.torch_private import DTensorSpec, StridedShard, TensorMeta, local_part


def param_form(
    parameter: nn.Parameter,
    placement: Shard | None,
    info: DataParallelMeshInfo,
    policy: MixedPrecisionPolicy,
    name: str,
) -> ParamForm:
    """Return what a parameter becomes: its spec as a sharded DTensor, and its form while unsharded.

    placement: the dim to shard; None for dim 0. name: for messages. Raises ShardingError for a
    placement, a dtype or a parameter that does not fit mesh and policy.
    """
    dim = _shard_dim(parameter, placement, info, name)
    if (annotated := _annotated_form(parameter, dim, info, name)) is not None:
        form = annotated
    elif isinstance(parameter, DTensor):
        form_on = _spmd_form if info.is_spmd_mesh else _tensor_parallel_form
        form = form_on(parameter._spec, dim, info, name)
    elif info.is_spmd_mesh:
        raise ShardingError(
            f"{name} is a plain tensor. When dp_mesh_dims is provided, all parameters must be "
            "DTensors on the full SPMD mesh: apply distribute_module to the model first."
        )
    else:
        meta = TensorMeta(parameter.size(), parameter.stride(), parameter.dtype)
        placements = _data_parallel(info, Shard(dim))
        form = ParamForm(DTensorSpec(info.mesh, placements, tensor_meta=meta), dim)
    return dataclasses.replace(form, compute_dtype=_chosen_dtype(parameter, policy, name))


def _chosen_dtype(
    parameter: nn.Parameter, policy: MixedPrecisionPolicy, name: str
) -> torch.dtype | None:
    """Return the compute dtype that ``param_dtype_override_fn`` chooses; None if it does not."""
    if policy.param_dtype_override_fn is None:
        return None
    chosen = policy.param_dtype_override_fn(parameter)
    if chosen is None:
        return None
    if not isinstance(chosen, torch.dtype):
        raise ShardingError(
            "param_dtype_override_fn must return a torch.dtype or None but got "
            f"{type(chosen)} for {name}."
        )
    if chosen not in (policy.param_dtype, parameter.dtype):
        raise ShardingError(
            "param_dtype_override_fn must return None, param_dtype, or the parameter's original "
            f"dtype but got {chosen} for {name}, a parameter with dtype {parameter.dtype} and "
            f"param_dtype {policy.param_dtype}."
        )
    return chosen


def _shard_dim(
    parameter: nn.Parameter, placement: Shard | None, info: DataParallelMeshInfo, name: str
) -> int:
    """Return the dim that a parameter is cut along. Raises as `param_form` does."""
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise ShardingError(
            f"{name}: Invalid shard_placement_fn result: {placement!r}. Return Shard(dim), a "
            "ShardPlacementResult or None."
        )
    ndim = parameter.dim()
    dim = placement.dim + ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < ndim:
        raise MisuseError(
            f"Shard dim {placement.dim} is invalid for {ndim}D tensor: {name}, "
            f"{tuple(parameter.shape)}. Choose a dim from 0 to {ndim - 1}."
        )
    local = local_part(parameter)
    size = 1 if info.shard_mesh_dim is None else info.mesh.size(info.shard_mesh_dim)
    if dim > 0 and local.size(dim) % size != 0:
        raise UnsupportedError(
            f"FSDP does not support uneven sharding on dim {dim}: {name}, {tuple(local.shape)} "
            f"over {size} ranks. Shard dim 0, where any size works."
        )
    return dim


def _tensor_parallel_form(
    own: DTensorSpec, dim: int, info: DataParallelMeshInfo, name: str
) -> ParamForm:
    """Return the form of a DTensor on another mesh: the data-parallel mesh comes in front of it."""
    if len(own.placements) > 2:
        raise UnsupportedError(
            f"{name} is a DTensor on {len(own.placements)} mesh dims; tensor and expert parallel "
            "make at most two. Pass the whole mesh with dp_mesh_dims= instead."
        )
    check_mesh_of(own, info.mesh.get_all_groups(), name)
    mesh = DeviceMesh._concatenate([info.mesh, own.mesh])
    spec = tensor_parallel_spec(mesh, _data_parallel(info, Shard(dim)), own)
    return ParamForm(spec, dim, unsharded=own)


def tensor_parallel_spec(
    mesh: DeviceMesh, data_parallel: tuple[Placement, ...], own: DTensorSpec
) -> DTensorSpec:
    """Return the spec of a DTensor whose parts are cut again over data-parallel axes in front.

    mesh: the data-parallel axes, then the DTensor's own ones. On a tensor dim that both cut, the
    axes in front have `StridedShard`: rank (1, 0) of (2, 2) has the second quarter of the rows,
    while with `Shard` it would have the third.
    """
    front = tuple(
        _shard_before(placement.dim, own.num_shards_map[placement.dim])
        if isinstance(placement, Shard)
        else placement
        for placement in data_parallel
    )
    return DTensorSpec(mesh, (*front, *own.placements), tensor_meta=own.tensor_meta)


def _spmd_form(own: DTensorSpec, dim: int, info: DataParallelMeshInfo, name: str) -> ParamForm:
    """Return the form of a DTensor on the whole mesh: its data-parallel dims become sharded.

    own: its mesh, placements and shape. dim: along which it is cut. Raises ShardingError for another
    mesh, and for a DTensor that is not whole on the data-parallel dims.
    """
    dims = info.dp_mesh_dims
    assert dims is not None
    if info.spmd_mesh is not None and own.mesh != info.spmd_mesh:
        raise ShardingError(
            f"{name}: expected a DTensor on the mesh passed to fully_shard, {info.spmd_mesh}, but "
            f"it is on {own.mesh}."
        )
    check_mesh_of(own, [], name)  # data-parallel dims are among its own
    known = own.mesh.mesh_dim_names or ()
    shard_axes = [known.index(n) for n in dims.shard_names]
    replicate_axes = [known.index(n) for n in dims.replicate_names]
    for axis in (*shard_axes, *replicate_axes):
        if not isinstance(own.placements[axis], Replicate):
            raise ShardingError(
                f"{name}: expected Replicate() on the data-parallel dim {known[axis]!r} but got "
                f"{own.placements[axis]}. Distribute it over the other dims alone."
            )
    placements = list(own.placements)
    # Later axes that cut the same dim have done so already, and a data-parallel axis cuts their
    # parts again: hence `StridedShard`, as in `tensor_parallel_spec`.
    for axis in shard_axes:
        inner = range(axis + 1, own.mesh.ndim)
        factor = 1
        for other in inner:
            placement = own.placements[other]
            if isinstance(placement, (Shard, StridedShard)) and placement.dim == dim:
                factor *= own.mesh.size(other)
        placements[axis] = _shard_before(dim, factor)
    mesh = own.mesh
    if len(shard_axes) > 1:
        mesh, placements = _flattened(mesh, placements, shard_axes, replicate_axes, info)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=own.tensor_meta)
    return ParamForm(
        spec, dim, unsharded=own, reduced_axes=frozenset((*shard_axes, *replicate_axes))
    )


def _flattened(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shard_axes: Sequence[int],
    replicate_axes: Sequence[int],
    info: DataParallelMeshInfo,
) -> tuple[DeviceMesh, list[Placement]]:
    """Return mesh and placements with the flattened data-parallel mesh in place of its dims."""
    names = mesh.mesh_dim_names
    assert names is not None
    parts: list[DeviceMesh] = []
    result: list[Placement] = []
    for axis, placement in enumerate(placements):
        if axis == shard_axes[0]:
            parts.append(info.mesh)
            result.extend(_data_parallel(info, placement))
        elif axis not in (*shard_axes, *replicate_axes):
            parts.append(mesh[names[axis]])
            result.append(placement)
    return DeviceMesh._concatenate(parts), result


def _data_parallel(info: DataParallelMeshInfo, innermost: Placement) -> tuple[Placement, ...]:
    """Return one placement per dim of the data-parallel mesh: ``innermost`` on the shard dim."""
    return tuple(
        innermost if axis == info.shard_mesh_dim else Replicate() for axis in range(info.mesh.ndim)
    )


def _shard_before(dim: int, split_factor: int) -> Placement:
    # Mesh dims behind this one cut the same tensor dim in ``split_factor`` parts.
    return StridedShard(dim, split_factor=split_factor) if split_factor > 1 else Shard(dim)


def check_mesh_of(own: DTensorSpec, groups: Iterable[dist.ProcessGroup], name: str) -> None:
    """Raise MeshError for a DTensor whose mesh does not go with the groups to shard or replicate over.

    Its ranks have their places in the groups of its mesh (`check_groups`), and share no such group: what is
    added up over a group has to be the same part on all of its ranks. own: its mesh. name: of the parameter.
    """
    for axis, placement in enumerate(own.placements):
        if not placement.is_replicate():
            check_groups(own.mesh, sharded=axis, replicated=None, what=f"Parts of {name}")
    below = {
        rank for group in own.mesh.get_all_groups() for rank in dist.get_process_group_ranks(group)
    }
    for group in groups:
        both = below.intersection(dist.get_process_group_ranks(group))
        if len(both) > 1:
            raise MeshError(
                f"{name} is a DTensor on {own.mesh}, and its ranks {sorted(both)} are data-parallel ranks "
                "too. Shard over the other dims of the mesh alone, such as mesh['dp']."
            )


# Annotations


class _Axis(NamedTuple):
    """A dim of the whole mesh: its name, its `spmd_types.MeshAxis`, whether it is data parallel."""

    name: str
    ranks: Any
    is_data_parallel: bool


class _Annotation(NamedTuple):
    """What a parameter says: by axis R, I, S(dim) or P, and the two values it says that by."""

    types: dict[Any, Any]
    local_type: dict[Any, Any]
    partition_spec: Any


def _annotated_form(
    parameter: nn.Parameter, dim: int, info: DataParallelMeshInfo, name: str
) -> ParamForm | None:
    """Return the form of a plain parameter with an annotation; None for any other parameter.

    dim: along which it is cut. Raises ShardingError for an annotation that does not fit the mesh.
    """
    spmd = sys.modules.get("spmd_types")
    annotation = None if spmd is None else _annotation(spmd, parameter, info)
    if spmd is None or annotation is None:
        return None
    axes = _axes(spmd, info, annotation, name)
    checked = _checked_axes(spmd, annotation, axes, name)
    _check_types(spmd, annotation, axes, name)
    mesh = info.spmd_mesh
    assert mesh is not None
    # Axes of one rank are never annotated: nothing is divided there, and nothing summed.
    types = [
        spmd.R if axis.is_data_parallel else annotation.types.get(axis.ranks, spmd.I)
        for axis in axes
    ]
    try:
        placements = [spmd.spmd_type_to_dtensor_placement(each) for each in types]
        left = [spmd.spmd_type_to_dtensor_placement(each.backward_type()) for each in types]
    except ValueError as error:
        raise ShardingError(
            f"{name}: {annotation.types} cannot be stored as a DTensor: {error}"
        ) from error
    own = DTensor.from_local(parameter.data, mesh, placements, run_check=False)._spec
    form = _spmd_form(own, dim, info, name)
    finished = form.finished(left)
    unfinished = None
    if finished != tuple(left):
        _check_trained(parameter, finished, axes, name)
        spec = DTensorSpec(mesh, tuple(left), tensor_meta=own.tensor_meta)
        unfinished = Unfinished(spec, finished)
    shown = {axis: annotation.local_type.get(axis, spmd.R) for axis in checked}

    # Once for each tensor, and not in each forward: the annotation stays on it. Where nothing is
    # checked, nobody reads it.
    def annotate(tensor: nn.Parameter) -> None:
        spmd.assert_type(tensor, shown, partition_spec=annotation.partition_spec)

    return dataclasses.replace(form, unsharded=None, unfinished=unfinished, annotate=annotate)


def _annotation(
    spmd: ModuleType, parameter: nn.Parameter, info: DataParallelMeshInfo
) -> _Annotation | None:
    """Return what a parameter says; None for DTensors and what is not annotated."""
    if isinstance(parameter, DTensor):
        return None
    local_type = dict(spmd.get_local_type(parameter))
    # The package drops axes of one rank, so that an annotation may be left with none.
    if not local_type and not (info.is_spmd_mesh and spmd.has_local_type(parameter)):
        return None
    partition_spec = spmd.get_partition_spec(parameter)
    types = dict(local_type)
    if partition_spec is not None:
        types.update(spmd.types.partition_spec_to_shard_types(partition_spec))
    return _Annotation(types, local_type, partition_spec)


def _axes(
    spmd: ModuleType, info: DataParallelMeshInfo, annotation: _Annotation, name: str
) -> list[_Axis]:
    """Return the dims of the whole mesh, in order. Raises ShardingError if none was passed."""
    mesh, dims = info.spmd_mesh, info.dp_mesh_dims
    if mesh is None or mesh.mesh_dim_names is None or dims is None:
        raise ShardingError(
            f"{name} is annotated by spmd_types ({annotation.types}), so it is stored on the mesh of "
            "all these axes. Pass that mesh, with mesh_dim_names, and name its data-parallel dims: "
            "dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...)."
        )
    data_parallel = {*dims.shard_names, *dims.replicate_names}
    return [
        _Axis(each, spmd.MeshAxis.of(mesh.get_group(each)), each in data_parallel)
        for each in mesh.mesh_dim_names
    ]


def _checked_axes(
    spmd: ModuleType, annotation: _Annotation, axes: list[_Axis], name: str
) -> tuple[Any, ...]:
    """Return the axes of the mesh on which types are checked: the annotated ones, or `current_mesh`.

    Raises ShardingError if these are not the ranks of the whole mesh, or lack an annotated axis.
    """
    stored = _ranks_spanned(frozenset(axis.ranks for axis in axes))
    annotated = tuple(annotation.types)
    if _ranks_spanned(frozenset(annotated)) == stored:
        return annotated
    current = spmd.current_mesh()
    if current is None:
        raise ShardingError(
            f"{name} is annotated on {annotated} alone, which does not say on which mesh types are "
            f"checked. Annotate it on all of {_named(axes)} (data-parallel axes: R), or call "
            "fully_shard inside spmd_types.set_current_mesh(...)."
        )
    if unknown := [axis for axis in annotated if axis not in current]:
        raise ShardingError(
            f"{name} is annotated on {unknown}, which the current mesh of spmd_types, "
            f"{tuple(current)}, does not have. Annotate axes of that mesh alone."
        )
    if _ranks_spanned(current) != stored:
        raise ShardingError(
            f"{name}: the current mesh of spmd_types, {tuple(current)}, does not span the same ranks "
            f"as the mesh passed to fully_shard, {_named(axes)}. Set one that does, or annotate the "
            "parameter on all axes of the latter."
        )
    return tuple(current)


def _check_types(spmd: ModuleType, annotation: _Annotation, axes: list[_Axis], name: str) -> None:
    """Raise ShardingError for types on data-parallel axes, unknown axes, and axes without a type."""
    reduced = _ranks_spanned(frozenset(axis.ranks for axis in axes if axis.is_data_parallel))
    others = {axis.ranks: axis.name for axis in axes if not axis.is_data_parallel}
    for axis, kind in annotation.types.items():
        # The data-parallel ranks may be divided into other axes where types are checked.
        if _ranks_spanned(frozenset({axis})) <= reduced:
            if kind is not spmd.R:
                raise ShardingError(
                    f"{name}: expected R on the data-parallel axis {axis} but got {kind}: sharding "
                    "over it, and reducing gradients, is left to fully_shard. Annotate R, or nothing."
                )
        elif axis not in others:
            raise ShardingError(
                f"{name} is annotated on {axis}, which is neither an axis of the mesh passed to "
                f"fully_shard, {_named(axes)}, nor a part of its data-parallel ones. Annotate axes "
                "of that mesh."
            )
    missing = [
        each for ranks, each in others.items() if ranks.size() > 1 and ranks not in annotation.types
    ]
    if missing:
        raise ShardingError(
            f"{name} has an incomplete annotation: nothing is said of {', '.join(missing)}, which "
            "are not data parallel. Annotate it there with spmd_types.assert_type."
        )


def _check_trained(
    parameter: nn.Parameter, finished: Sequence[Placement], axes: list[_Axis], name: str
) -> None:
    """Raise ShardingError for a parameter of which ranks hold terms of a sum, if it is trained.

    Their gradients are the same on all ranks, which DTensor does not turn into terms of a sum. It
    raises in backward; so does PyTorch's engine.
    """
    summed = [
        axis.name
        for axis, placement in zip(axes, finished, strict=True)
        if placement.is_partial() and not axis.is_data_parallel
    ]
    if summed and parameter.requires_grad:
        raise ShardingError(
            f"{name} is P on {', '.join(summed)}, terms of a sum over the ranks, and trained: its "
            "gradient has no such form. Add the terms up and annotate it R or I, or freeze it "
            "(requires_grad=False)."
        )


def _named(axes: list[_Axis]) -> str:
    return "(" + ", ".join(f"{axis.name}: {axis.ranks.size()}" for axis in axes) + ")"


@functools.cache
def _ranks_spanned(axes: frozenset[Any]) -> frozenset[int]:
    """Return the ranks that mesh axes span together, counted from the first one.

    Axes of sizes 2 and 3 with strides 1 and 4: 0, 1, 4, 5, 8, 9.
    """
    ranks = {0}
    for axis in axes:
        for size, stride in axis.layout.sizes_and_strides:
            ranks = {rank + stride * place for rank in ranks for place in range(size)}
    return frozenset(ranks)
