"""Plain parameters that the package `spmd_types` annotates: each says how the ranks hold it.

An annotation gives a parameter a type on each axis of a mesh:

    type    on the ranks of the axis                  autograd leaves there
    R       the same values                           partial sums
    I       the same values                           the same gradients
    S(dim)  parts of a larger tensor, cut along dim   the gradient of each part
    P       terms of a sum (frozen parameters alone)  the same gradients

With ``dp_mesh_dims``, such a parameter is stored as a DTensor on the whole mesh, and is the plain
tensor that it was while it is unsharded, with its annotation. It has to be R on data-parallel axes, or
not annotated there: the unit's reduction completes the sums over them. Those over other axes, such as
tensor parallel ones, are completed before (`engine.params.form.Unfinished`).

The package checks types of what a program computes, on request. It leaves out what the engine does
itself (`leave_unchecked`).

Nothing here imports the package. Who has not imported it has annotated nothing, and checks nothing.
"""

import dataclasses
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor, Placement, Shard

from fullshard.engine.hooks import Hooks
from fullshard.engine.iteration import Iteration
from fullshard.engine.module_state import ModuleState
from fullshard.engine.nodes import AfterBackwardInTransforms, BeforeBackward, watch_output
from fullshard.engine.params.form import ParamForm, Unfinished
from fullshard.engine.unit import Unit
from fullshard.errors import ShardingError
from fullshard.faces.meshes import DataParallelMeshInfo, shard_dim, spmd_form
from fullshard.process_hooks import register
from fullshard.torch_private import DTensorSpec

# Classes that work with the engine's own tensors alone, and what else does. Not the hooks of a forward:
# their casts, and the nodes on a module's inputs, hand the types of the user's tensors on.
_OWN_CLASSES = (Iteration, ModuleState, Unit)
_OWN_FUNCTIONS = (Hooks.before_backward, Hooks.after_backward, Hooks.end_backward, watch_output)


_WHY = "types are checked of what programs compute, not of the engine's own work"


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


def annotated_form(
    parameter: nn.Parameter, placement: Shard | None, info: DataParallelMeshInfo, name: str
) -> ParamForm | None:
    """Return the form of a plain parameter with an annotation; None for any other parameter.

    For the arguments see `meshes.param_form`. Raises ShardingError for an annotation that does not
    fit the mesh.
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
    dim = shard_dim(parameter, placement, info, name)
    own = DTensor.from_local(parameter.data, mesh, placements, run_check=False)._spec
    form = spmd_form(own, dim, info, name)
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


def leave_unchecked(*functions: Callable[..., Any]) -> None:
    """Keep the engine's own work, and these functions, out of type checking.

    Does nothing before the program has imported the package; each call to shard comes here again. Versions
    before 0.3, which torchtitan 0.3 pins, cannot leave out functions: where types are checked, they stop
    in the engine.
    """
    spmd = sys.modules.get("spmd_types")
    if spmd is None or not hasattr(spmd, "register_no_typecheck"):
        return
    _register_engine(spmd)
    for function in functions:
        register(spmd.register_no_typecheck, function, why=_WHY)


@functools.cache
def _register_engine(spmd: ModuleType) -> None:
    # By their code, which the checker looks for on the stack when it meets an operation. A context
    # around them would cost time in each step of programs that check nothing, and would not reach the
    # threads in which autograd runs hooks on a device.
    of_classes = itertools.chain(*(vars(owner).values() for owner in _OWN_CLASSES))
    for each in (*_OWN_FUNCTIONS, *of_classes):
        function = each.fget if isinstance(each, property) else each
        if inspect.isfunction(function):
            register(spmd.register_no_typecheck, function, why=_WHY)
    # Types pass these, which the checker cannot look into. Outside of transforms, inputs are copied by
    # ``view_as``, whose types it knows.
    for node in (AfterBackwardInTransforms, BeforeBackward):
        register(spmd.register_local_autograd_function, node, why=_WHY)


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
    stored = _ranks(frozenset(axis.ranks for axis in axes))
    annotated = tuple(annotation.types)
    if _ranks(frozenset(annotated)) == stored:
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
    if _ranks(current) != stored:
        raise ShardingError(
            f"{name}: the current mesh of spmd_types, {tuple(current)}, does not span the same ranks "
            f"as the mesh passed to fully_shard, {_named(axes)}. Set one that does, or annotate the "
            "parameter on all axes of the latter."
        )
    return tuple(current)


def _check_types(spmd: ModuleType, annotation: _Annotation, axes: list[_Axis], name: str) -> None:
    """Raise ShardingError for types on data-parallel axes, unknown axes, and axes without a type."""
    reduced = _ranks(frozenset(axis.ranks for axis in axes if axis.is_data_parallel))
    others = {axis.ranks: axis.name for axis in axes if not axis.is_data_parallel}
    for axis, kind in annotation.types.items():
        # The data-parallel ranks may be divided into other axes where types are checked.
        if _ranks(frozenset({axis})) <= reduced:
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
def _ranks(axes: frozenset[Any]) -> frozenset[int]:
    """Return the ranks that mesh axes span together, counted from the first one.

    Axes of sizes 2 and 3 with strides 1 and 4: 0, 1, 4, 5, 8, 9.
    """
    ranks = {0}
    for axis in axes:
        for size, stride in axis.layout.sizes_and_strides:
            ranks = {rank + stride * place for rank in ranks for place in range(size)}
    return frozenset(ranks)
