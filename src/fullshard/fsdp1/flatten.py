"""Make one flat unit of the parameters of modules."""

import warnings

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.engine.adoption import make_unit
from fullshard.engine.params.dtensor import has_extension
from fullshard.engine.params.flat import FlatHolder, HiddenParameter, OwnedPiece, PieceParameter
from fullshard.engine.params.form import ParamForm, UnitMesh
from fullshard.engine.params.unit_params import UnitParams
from fullshard.engine.unit import Unit, UnitComms
from fullshard.errors import ShardingError, UnsupportedError
from fullshard.faces.coverage import Covered, check_shapes
from fullshard.faces.forms import check_mesh_of
from fullshard.faces.interop import leave_unchecked
from fullshard.plan.builders import flat_layout
from fullshard.plan.layout import ParamSpec
from fullshard.policies import ParamStyle, UnitConfig
from fullshard.torch_private import local_part


def flat_unit(
    module: nn.Module,
    covered: Covered,
    mesh: UnitMesh,
    device: torch.device,
    config: UnitConfig,
    comms: UnitComms,
) -> Unit:
    """Return a unit with the parameters of a call in flat buffers.

    module: the one on which a flat parameter is registered. Raises ShardingError or UnsupportedError
    before anything is changed: for parameters that cannot be flattened, or that a nested instance has.
    """
    leave_unchecked()
    names = covered.names
    _check_flattenable(covered, mesh, config)
    specs = [_param_spec(parameter, name, config) for parameter, name in names.items()]
    is_aligned = config.style is not ParamStyle.FLAT  # programs rely on a FlatParameter's size
    layout = flat_layout(specs, shard_size=mesh.plan.shard_size, is_aligned=is_aligned)
    rank = mesh.plan.shard_rank
    owned = {
        param.index: OwnedPiece(
            next(iter(bucket.pieces(param, rank)), None), bucket.shard_range(param, rank)[1]
        )
        for bucket in layout.buckets
        for param in bucket.params
    }
    holder = None
    if config.style is ParamStyle.FLAT and names:
        first = next(iter(names))
        holder = FlatHolder(
            module,
            local_part(first).detach(),
            requires_grad=first.requires_grad,
            is_part=mesh.plan.shard_size > 1,
        )
    hooked = [name for parameter, name in names.items() if parameter._post_accumulate_grad_hooks]
    if holder is not None and hooked:
        warnings.warn(
            f"{', '.join(hooked)}: hooks after accumulation (register_post_accumulate_grad_hook) "
            "are not called with use_orig_params=False, which keeps the gradient of no single "
            "parameter. Pass use_orig_params=True, or register them on the flat parameter.",
            UserWarning,
            stacklevel=4,
        )
    managed = []
    for index, (parameter, slots) in enumerate(covered.slots.items()):
        form = ParamForm(unsharded=parameter._spec if isinstance(parameter, DTensor) else None)
        parameter._fsdp_flattened = True  # type: ignore[attr-defined] # PyTorch's mark, for libraries
        managed.append(
            PieceParameter(parameter, slots, form, owned[index])
            if holder is None
            else HiddenParameter(parameter, slots, form, owned[index], holder)
        )
    covered.name_below(managed)
    unit = make_unit(UnitParams(managed, mesh, device, layout), config, comms)
    if unit.flat_parameter is not None:
        unit.flat_parameter._fqns = names_below(unit)  # type: ignore[attr-defined]
    return unit


def names_below(unit: Unit) -> list[str]:
    """Return the paths of a flat unit's parameters below its own module, without prefixes of wrappers."""
    return [param.name.removeprefix(f"{unit.name}.") for param in unit.managed]


def _param_spec(parameter: nn.Parameter, name: str, config: UnitConfig) -> ParamSpec:
    dtype = parameter.dtype
    low = config.mp_policy.param_dtype if dtype.is_floating_point else None
    return ParamSpec(
        name,
        tuple(local_part(parameter).shape),
        dtype,
        low or dtype,
        trainable=parameter.requires_grad,
    )


def _check_flattenable(covered: Covered, mesh: UnitMesh, config: UnitConfig) -> None:
    check_shapes(covered.names, "FSDP")
    for parameter, name in covered.names.items():
        if isinstance(parameter, DTensor):
            check_mesh_of(parameter._spec, mesh.groups, name)
        if config.style is ParamStyle.PIECES and has_extension(local_part(parameter), name):
            raise UnsupportedError(
                f"{name} is a {type(local_part(parameter)).__name__}, which defines its own all-gather. A 1-D "
                "piece of it cannot take its place, as use_orig_params=True wants. Shard it with fully_shard, "
                "which gathers it so, or let it be an ordinary parameter when the model is wrapped "
                "(torchao: enable_fsdp_float8_all_gather=False), as use_orig_params=False takes it for one."
            )
    for owner, slot in covered.ties:
        others = " and ".join(covered.where(other) for other in owner.slots)
        raise ShardingError(
            f"{covered.where(slot)} is {others}, the parameter of a nested FSDP instance, which would "
            "be gathered for that instance alone. Wrap the modules that share it together, in one "
            "instance."
        )
    if config.style is ParamStyle.FLAT:
        _check_uniform(covered.names)


def _check_uniform(names: dict[nn.Parameter, str]) -> None:
    """Raise ShardingError for parameters that one flat parameter cannot hold."""
    if not names:
        return
    first, first_name = next(iter(names.items()))
    for parameter, name in names.items():
        if not parameter.is_floating_point() and not parameter.is_complex():
            raise ShardingError(
                f"Cannot flatten integer dtype tensors: {name} is {parameter.dtype}. Pass "
                "use_orig_params=True, or ignore it (ignored_states)."
            )
        both = f"{first_name} and {name} differ. Pass use_orig_params=True."
        if parameter.dtype != first.dtype:
            raise ShardingError(
                f"Must flatten tensors with uniform dtype but got {first.dtype} and "
                f"{parameter.dtype}: {both}"
            )
        if parameter.requires_grad != first.requires_grad:
            raise ShardingError(
                "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`: "
                f"got {first.requires_grad} and {parameter.requires_grad}. {both}"
            )
