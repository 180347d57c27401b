"""Make units of modules, for `fully_shard` and `replicate`."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.tensor import Shard

from fullshard.comm.select import default_comm
from fullshard.engine.adoption import make_unit
from fullshard.engine.hooks import Hooks
from fullshard.engine.module_state import covered_modules
from fullshard.engine.params.dtensor import DTensorParameter
from fullshard.engine.params.form import ParamForm, UnitMesh
from fullshard.engine.params.unit_params import UnitParams
from fullshard.engine.restoring import restoring
from fullshard.engine.unit import choose_comms
from fullshard.errors import ShardingError, UnsupportedError
from fullshard.faces.coverage import (
    Covered,
    check_modules,
    check_parameters,
    check_shapes,
    move_tensors,
)
from fullshard.faces.forms import param_form
from fullshard.faces.interop import is_composable, mark_managed, mark_sharded
from fullshard.faces.meshes import (
    DataParallelMeshInfo,
    ShardPlacementResult,
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
    inside = {id(child) for each in given for child in each.modules() if child is not each}
    roots = [m for m in dict.fromkeys(given) if id(m) not in inside]  # in order, once each
    device = unit_device(default.mesh)
    covered = Covered(roots, covered_modules(roots, is_composable), ignored_params or set())
    check_shapes(covered.names, kind.applied_by)
    check_parameters(covered.names, device)
    groups = _group_by_mesh(covered.names, default, shard_placement_fn, config.mp_policy)
    placed = [_options(group, config) for group in groups]
    comms = [choose_comms(place, device, own_config) for place, own_config in placed]

    # Whatever may refuse the call comes before this line. After it, only memory may be lacking.
    what = f"{kind.applied_by} of {', '.join(type(r).__name__ for r in roots)}"
    with restoring(covered.modules, what):
        move_tensors(covered.buffers, device)
        if not config.offload_to_cpu:  # else the shards are moved, once they are cut
            move_tensors(covered.slots, device)
        made = []
        for group, (place, own_config), own_comms in zip(groups, placed, comms, strict=True):
            managed = [
                DTensorParameter(
                    parameter,
                    covered.slots[parameter],
                    form,
                    place.plan,
                    is_offloaded=config.offload_to_cpu,
                )
                for parameter, form in group.forms.items()
            ]
            covered.name_below(managed)
            made.append(make_unit(UnitParams(managed, place, device), own_config, own_comms))
    # Nothing below allocates memory of parameters, so nothing below has to be restored.
    covered.connect_ties()
    state = Hooks(roots, made).state
    state.borrowed = [*dict.fromkeys(owner for owner, _ in covered.ties)]
    state.lenders()  # live as long as this
    state.ignored.update(m for r in roots for m in r.modules() if not is_composable(m))
    state.ignored_names.update(covered.ignored)
    for root in roots:
        root.__class__ = sharded_class(type(root), kind)
    mark_sharded(roots, kind.applied_by)
    mark_managed(covered.modules)
    return module


class _Group(NamedTuple):
    """The parameters that are sharded over one mesh, with what each becomes."""

    info: DataParallelMeshInfo
    place: UnitMesh
    forms: dict[nn.Parameter, ParamForm]


def _group_by_mesh(
    names: dict[nn.Parameter, str],
    default: DataParallelMeshInfo,
    placement_fn: ShardPlacementFn | None,
    policy: MixedPrecisionPolicy,
) -> list[_Group]:
    """Return one group for each mesh, meshes and parameters in order of appearance.

    names: by parameter, for messages. Raises ShardingError for placements and dtypes that do not fit.
    """
    groups: dict[int, _Group] = {}
    if not (placement_fn is None or callable(placement_fn)):
        raise ShardingError(
            f"shard_placement_fn should be a function or None, got {placement_fn!r}."
        )
    if placement_fn is not None and default.shard_mesh_dim is None:
        raise ShardingError(
            f"Per-param mesh via shard_placement_fn is not supported with {type(default).__name__}: "
            "nothing is sharded over it."
        )
    for parameter, name in names.items():
        info, placement = default, placement_fn(parameter) if placement_fn is not None else None
        if isinstance(placement, ShardPlacementResult):
            info, placement = placement.mesh_info, placement.placement
        if id(info) not in groups:
            place = unit_mesh(info)
            if any(group.place.groups == place.groups for group in groups.values()):
                raise ShardingError(
                    f"{name}: Params sharing the same process group must use the same FSDPMeshInfo "
                    "object, so that they are gathered together. Build it once, outside of "
                    "shard_placement_fn."
                )
            groups[id(info)] = _Group(info, place, {})
        groups[id(info)].forms[parameter] = param_form(parameter, placement, info, policy, name)
    return list(groups.values()) or [_Group(default, unit_mesh(default), {})]


def _options(group: _Group, config: UnitConfig) -> tuple[UnitMesh, UnitConfig]:
    """Return a group's mesh and options, with ``reshard_after_forward`` as this mesh takes it.

    Collective where that is a number of ranks, for whom it makes groups.
    """
    info, place = group.info, group.place
    option = check_reshard_after_forward(config.reshard_after_forward, place.plan.shard_size)
    if option is not None and not isinstance(option, bool):
        if info.is_spmd_mesh:
            raise UnsupportedError(
                f"reshard_after_forward={option} as int is not yet supported with SPMD mesh "
                "(dp_mesh_dims). Pass True or False."
            )
        place = place._replace(post_forward=smaller_mesh(info.mesh, option))
    return place, dataclasses.replace(config, reshard_after_forward=option)
