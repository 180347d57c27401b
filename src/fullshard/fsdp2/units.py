"""Make units of modules, for `fully_shard` and `replicate`."""

import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fullshard.comm.select import default_comm
from fullshard.engine.adoption import make_unit
from fullshard.engine.hooks import Hooks
from fullshard.engine.params.dtensor import DTensorParameter
from fullshard.engine.params.form import ParamForm, UnitMesh
from fullshard.engine.restoring import restoring
from fullshard.engine.unit import choose_comms
from fullshard.errors import ShardingError, UnsupportedError
from fullshard.faces.annotated import annotated_form
from fullshard.faces.coverage import (
    CoveredParameters,
    check_modules,
    check_parameters,
    covered_modules,
    ignored_names,
    name_below,
    qualified_names,
    root_modules,
)
from fullshard.faces.interop import is_composable, mark_managed, mark_sharded
from fullshard.faces.meshes import (
    DataParallelMeshInfo,
    ShardPlacementResult,
    param_form,
    smaller_mesh,
    unit_device,
    unit_mesh,
)
from fullshard.fsdp2.module import FSDPModule, is_from, sharded_class
from fullshard.plan.mesh import check_reshard_after_forward
from fullshard.policies import MixedPrecisionPolicy, OffloadPolicy, UnitConfig

ShardPlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


def unit_config(
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy | None,
    reshard_after_forward: bool | int | None = None,
) -> UnitConfig:
    """Return the options of `fully_shard` or `replicate` as the engine's.

    As in PyTorch, whatever is false for ``offload_policy`` asks for none: programs pass None for it.
    Raises ShardingError for a policy that is no `fullshard` policy, such as PyTorch's.
    """
    offload_policy = offload_policy or OffloadPolicy()
    for name, value, expected in (
        ("mp_policy", mp_policy, MixedPrecisionPolicy),
        ("offload_policy", offload_policy, OffloadPolicy),
    ):
        if not isinstance(value, expected):
            raise ShardingError(
                f"{name}={value!r}: expected a fullshard.{expected.__name__}, such as "
                f"{expected()!r}."
            )
    return UnitConfig(
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        reshard_after_forward=reshard_after_forward,
        comm=default_comm(),
        # Whether ``reduce_dtype=None`` means the parameter's own dtype: float32 for float32 parameters
        # computed in bfloat16. Before, and for `FullyShardedDataParallel`, it means the dtype that is
        # computed in. A parameter's own ``grad_dtype`` comes before either.
        gradients_follow_parameter=is_from((2, 15)),
    )


def make_units(
    module: Any,
    kind: type[FSDPModule],
    default: DataParallelMeshInfo,
    config: UnitConfig,
    *,
    ignored_params: set[nn.Parameter] | None,
    shard_placement_fn: ShardPlacementFn | None = None,
) -> Any:
    """Make units, one per mesh, of the parameters that no earlier call took; return ``module``.

    module: one or several, which then share their units. kind: the class that they become a
    subclass of. default: the mesh of parameters for which ``shard_placement_fn`` names none.

    Raises ShardingError, MeshError or StateError before anything is changed. If memory is lacking
    later, everything is restored and AllocationError is raised.
    """
    is_one = isinstance(module, nn.Module) or not isinstance(module, Collection)
    given = [module] if is_one else list(module)
    check_modules(given, kind.applied_by)
    roots = root_modules(given)
    device = unit_device(default.mesh)
    covered = covered_modules(roots, is_composable)
    parameters = CoveredParameters(covered, ignored_params or set())
    paths = qualified_names(roots, parameters.slots.values())
    names = dict(zip(parameters.slots, paths, strict=True))
    check_parameters(names, device)
    groups = _group_by_mesh(names, default, shard_placement_fn, config.mp_policy)
    prepared = [_prepare(info, forms, config) for info, forms in groups]
    comms = [choose_comms(place, device, own_config) for place, _, own_config in prepared]

    # Whatever may refuse the call comes before this line. After it, only memory may be lacking.
    with restoring(covered, f"{kind.applied_by} of {', '.join(type(r).__name__ for r in roots)}"):
        _move_to_device(covered, parameters, device, config)
        units = []
        for place, forms, own_config in prepared:
            managed = [
                DTensorParameter(
                    parameter,
                    parameters.slots[parameter],
                    form,
                    place.plan,
                    is_offloaded=config.offload_to_cpu,
                )
                for parameter, form in forms.items()
            ]
            name_below(roots, managed)
            units.append((managed, place, device, own_config))
        made = [
            make_unit(*arguments, comms=own) for arguments, own in zip(units, comms, strict=True)
        ]
    # Nothing below allocates memory of parameters, so nothing below has to be restored.
    parameters.connect_ties()
    state = Hooks(roots, made).state
    state.ignored.update(m for r in roots for m in r.modules() if not is_composable(m))
    state.ignored_names.update(ignored_names(covered, ignored_params or set()))
    for root in roots:
        root.__class__ = sharded_class(type(root), kind)
    mark_sharded(roots, kind.applied_by)
    mark_managed(covered)
    return module


def _group_by_mesh(
    names: dict[nn.Parameter, str],
    default: DataParallelMeshInfo,
    placement_fn: ShardPlacementFn | None,
    policy: MixedPrecisionPolicy,
) -> list[tuple[DataParallelMeshInfo, dict[nn.Parameter, ParamForm]]]:
    """Return each mesh with the forms of its parameters, both in order of appearance.

    names: by parameter, for messages. Raises ShardingError for placements and dtypes that do not fit.
    """
    groups: dict[int, tuple[DataParallelMeshInfo, dict[nn.Parameter, ParamForm]]] = {}
    if placement_fn is not None and default.shard_mesh_dim is None:
        raise ShardingError(
            f"Per-param mesh via shard_placement_fn is not supported with {type(default).__name__}: "
            "nothing is sharded over it."
        )
    for parameter, name in names.items():
        info, placement = default, None
        result = placement_fn(parameter) if placement_fn is not None else None
        if isinstance(result, ShardPlacementResult):
            info, placement = result.mesh_info, result.placement
        else:
            placement = result
        if id(info) not in groups:
            own = unit_mesh(info)[2:4]
            if any(unit_mesh(other)[2:4] == own for other, _ in groups.values()):
                raise ShardingError(
                    f"{name}: Params sharing the same process group must use the same FSDPMeshInfo "
                    "object, so that they are gathered together. Build it once, outside of "
                    "shard_placement_fn."
                )
            groups[id(info)] = info, {}
        form = annotated_form(parameter, placement, info, name)
        if form is None:
            form = param_form(parameter, placement, info, name)
        if (chosen := policy.for_parameter(parameter, name)) is not None:
            form = dataclasses.replace(form, compute_dtype=chosen)
        groups[id(info)][1][parameter] = form
    return list(groups.values()) or [(default, {})]


def _prepare(
    info: DataParallelMeshInfo,
    forms: dict[nn.Parameter, ParamForm],
    config: UnitConfig,
) -> tuple[UnitMesh, dict[nn.Parameter, ParamForm], UnitConfig]:
    place = unit_mesh(info)
    option = check_reshard_after_forward(config.reshard_after_forward, place.plan.shard_size)
    if option is None or isinstance(option, bool):
        return place, forms, dataclasses.replace(config, reshard_after_forward=option)
    if info.is_spmd_mesh:
        raise UnsupportedError(
            f"reshard_after_forward={option} as int is not yet supported with SPMD mesh "
            "(dp_mesh_dims). Pass True or False."
        )
    return (
        place._replace(post_forward=smaller_mesh(info.mesh, option)),
        forms,
        dataclasses.replace(config, reshard_after_forward=option),
    )


def _move_to_device(
    covered: Iterable[nn.Module],
    parameters: CoveredParameters,
    device: torch.device,
    config: UnitConfig,
) -> None:
    """Move parameters and buffers that are on the CPU to ``device``; offloaded parameters stay."""
    if device.type == "cpu":
        return
    moving: list[torch.Tensor] = [b for m in covered for b in m.buffers(recurse=False)]
    if not config.offload_to_cpu:
        moving.extend(parameters.slots)
    for tensor in moving:
        if tensor.is_meta or tensor.device == device or isinstance(tensor, DTensor):
            continue
        # A subclass (float8, int8) is swapped as a whole: setting `.data` would not move its inner
        # tensors.
        if type(tensor.data) is torch.Tensor:
            tensor.data = tensor.to(device)
            continue
        with torch.no_grad():
            moved = nn.Parameter(tensor.to(device), requires_grad=tensor.requires_grad)
        torch.utils.swap_tensors(tensor, moved)
