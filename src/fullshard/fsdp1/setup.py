"""Prepare a module before its parameters are flattened.

In the order of use: ignored parameters and modules, ranks to shard over, the device, first values.
"""

import contextlib
import socket
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fullshard.host as host  # noqa: PLR0402  (`from fullshard` would ask for a public name)
from fullshard.comm.outside_steps import gather_objects, run_collective
from fullshard.engine.checks.meta import keeping_ties, marking_to_empty
from fullshard.engine.module_state import state_of
from fullshard.engine.params.form import UnitMesh
from fullshard.engine.params.managed import owner_of, said_grad_dtype
from fullshard.errors import MeshError, ShardingError, StateError, UnsupportedError
from fullshard.faces.meshes import (
    HOW_TO_START,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    check_groups,
    unit_device,
    unit_mesh,
)
from fullshard.fsdp1.options import HYBRID_SHARDING_STRATEGIES, ShardingStrategy
from fullshard.plan.mesh import MeshPlan
from fullshard.plan.units import clean_name
from fullshard.torch_private import default_group, local_part

ProcessGroups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None


class Ignored(NamedTuple):
    """Modules and parameters that are left as they are: neither sharded nor moved nor cast."""

    modules: set[nn.Module]
    params: set[nn.Parameter]


# Ignored


def find_ignored(
    root: nn.Module,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
) -> Ignored:
    """Return what this instance ignores, including what nested instances ignore.

    Raises ShardingError for a mixture of parameters and modules, TypeError for what is no iterable.
    """
    given_modules, given_params = _given_to_ignore(ignored_modules, ignored_states)
    if root in given_modules:
        warnings.warn(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will "
            f"result in all parameters being ignored: {root}",
            stacklevel=3,
        )
    modules = {child for module in given_modules for child in module.modules()}
    params = {p for m in modules for p in m.parameters(recurse=False)} | set(given_params)
    for nested in root.modules():
        inner = getattr(nested, "_ignored", None)
        if state_of(nested) is not None and isinstance(inner, Ignored):
            modules |= inner.modules
            params |= inner.params
    return Ignored(modules, {p for p in params if owner_of(p) is None})


def _given_to_ignore(
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """Return the modules and the parameters that the arguments name, of which one list is empty."""
    if ignored_modules is not None and ignored_states is not None:
        raise ShardingError(
            "Cannot pass both ignored_modules and ignored_states at the same time: "
            "ignored_states takes modules as well."
        )
    given_params: list[nn.Parameter] = []
    given_modules: list[Any] = _listed(ignored_modules, "ignored_modules")
    for each in _listed(ignored_states, "ignored_states"):
        (given_params if isinstance(each, nn.Parameter) else given_modules).append(each)
    strangers = {type(each) for each in given_modules if not isinstance(each, nn.Module)}
    if ignored_states is None and strangers:
        raise ShardingError(
            "ignored_modules expects nn.Module list elements but got types "
            f"{sorted(strangers, key=str)}"
        )
    if strangers or (given_params and given_modules):
        raise ShardingError(
            "ignored_states expects all nn.Parameter or all nn.Module list elements but got types "
            f"{sorted({type(e) for e in (*given_params, *given_modules)}, key=str)}"
        )
    for module in given_modules:
        if state_of(module) is not None:
            raise ShardingError(
                f"`ignored_modules` should not include FSDP modules, but {type(module).__name__} "
                "is one. Ignore the module before it is wrapped."
            )
    return given_modules, given_params


def _listed(values: Iterable[Any] | None, name: str) -> list[Any]:
    if values is None:
        return []
    try:
        return list(values)
    except TypeError as error:
        raise TypeError(f"`{name}` should be an iterable, but got {type(values)}.") from error


# Ranks


def choose_ranks(
    process_group: ProcessGroups,
    strategy: ShardingStrategy | None,
    mesh: DeviceMesh | None,
    *,
    wraps_children: bool,
) -> tuple[UnitMesh, ShardingStrategy]:
    """Return the ranks to shard over, from process groups or from a mesh, and the strategy that results.

    wraps_children: whether a policy passes the groups on; without one, a hybrid strategy needs
    groups that nested instances can share. Collective where groups are made. Raises ShardingError
    for groups that do not fit the strategy, and MeshError as `check_groups`.
    """
    strategy = strategy or ShardingStrategy.FULL_SHARD
    if process_group is not None and mesh is not None:
        raise ShardingError(
            "Cannot pass both process_group and device_mesh at the same time. Please just pass only "
            "one of them."
        )
    if strategy not in HYBRID_SHARDING_STRATEGIES:
        group = mesh.get_group(mesh_dim=0) if mesh is not None else process_group
        if isinstance(group, tuple):
            raise ShardingError(
                f"process_group is a pair, which takes a hybrid strategy, not {strategy}."
            )
        return _over_one_group(group or _default_group(), strategy, mesh)
    if process_group is None and mesh is None and not wraps_children:
        raise ShardingError(
            f"Manual wrapping with {strategy} requires explicit specification of process group or "
            "device_mesh, which nested instances have to share."
        )
    if mesh is not None:
        if mesh.ndim != 2:
            raise ShardingError(
                f"Expected device_mesh to have ndim=2 but got {mesh.ndim}: a hybrid strategy takes "
                "(replicate, shard)."
            )
        return unit_mesh(HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)), strategy
    within, across = _hybrid_groups(process_group)
    plan = MeshPlan(within.size(), within.rank(), across.size(), across.rank())
    return UnitMesh(None, plan, within, across), strategy


def _over_one_group(
    group: dist.ProcessGroup, strategy: ShardingStrategy, mesh: DeviceMesh | None
) -> tuple[UnitMesh, ShardingStrategy]:
    if group.size() == 1 and strategy is not ShardingStrategy.NO_SHARD:
        warnings.warn(
            f"FSDP is switching to use `NO_SHARD` instead of {strategy} since the world size is 1.",
            stacklevel=4,
        )
        strategy = ShardingStrategy.NO_SHARD
    elif strategy is ShardingStrategy.NO_SHARD:
        warnings.warn(
            "The `NO_SHARD` sharding strategy is deprecated. If having issues, please use "
            "`DistributedDataParallel` or `replicate` instead.",
            FutureWarning,
            stacklevel=4,
        )
    is_sharded = strategy is not ShardingStrategy.NO_SHARD
    if mesh is None:
        size, rank = group.size(), group.rank()
        if is_sharded:
            return UnitMesh(None, MeshPlan(size, rank), group, None), strategy
        return UnitMesh(None, MeshPlan(1, 0, size, rank), None, group), strategy
    if not is_sharded:
        return unit_mesh(DDPMeshInfo(mesh, replicate_mesh_dim=0)), strategy
    if mesh.ndim > 1:  # over which sharded state dicts divide values, as PyTorch does
        check_groups(mesh, sharded=mesh.ndim - 1, replicated=None, what="Values")
    return unit_mesh(FSDPMeshInfo(mesh, shard_mesh_dim=0)), strategy


def _hybrid_groups(process_group: ProcessGroups) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return (the group to shard over, the group to replicate over)."""
    if process_group is None:
        return _groups_by_host(_default_group())
    if isinstance(process_group, tuple) and len(process_group) == 2:
        return process_group
    raise ShardingError(
        "Expected process_group to be passed in as either None or Tuple[dist.ProcessGroup, "
        f"dist.ProcessGroup] (to shard over, to replicate over) but got {type(process_group)}"
    )


def _default_group() -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise ShardingError(
            "Default process group has not been initialized: call "
            f"torch.distributed.init_process_group before wrapping modules, or pass a group. {HOW_TO_START}"
        )
    group: dist.ProcessGroup = default_group()
    return group


_by_host: (
    "weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[dist.ProcessGroup, dist.ProcessGroup]]"
)
_by_host = weakref.WeakKeyDictionary()


def _groups_by_host(
    world: dist.ProcessGroup,
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return this host's ranks, and the ranks with this one's place on each host, as groups.

    Collective, once per ``world``. Raises MeshError if hosts have different numbers of ranks.
    """
    if world not in _by_host:
        name = socket.gethostname()
        with contextlib.suppress(OSError):  # of systems without /proc
            name = f"{name} ({host.identity()})"
        hosts = gather_objects(name, world, "the ranks of each host")
        ranks = [
            [rank for rank, each in enumerate(hosts) if each == name]
            for name in dict.fromkeys(hosts)
        ]
        sizes = {len(members) for members in ranks}
        if len(sizes) > 1:
            counts = {name: hosts.count(name) for name in dict.fromkeys(hosts)}
            raise MeshError(
                f"A hybrid strategy needs equally many ranks on every host, but there are {counts}. "
                "Pass a device_mesh (replicate, shard), or a pair of process groups."
            )
        within, _ = dist.new_subgroups_by_enumeration(ranks)
        across, _ = dist.new_subgroups_by_enumeration(
            [list(members) for members in zip(*ranks, strict=True)]
        )
        _by_host[world] = within, across
    return _by_host[world]


# Devices and values


def compute_device(
    device_id: int | str | torch.device | None, mesh: DeviceMesh | None
) -> torch.device:
    """Return the device to compute on: the given one, the mesh's type, or this process's own.

    Raises ShardingError for a device that this process does not have, and MeshError for a mesh of
    such devices.
    """
    of_mesh = None if mesh is None else unit_device(mesh)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device_id is None:
        if of_mesh is not None:
            return of_mesh
        if accelerator is None:
            return torch.device("cpu")
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    if isinstance(device_id, (torch.device, str)):
        device = torch.device(device_id)
    elif accelerator is not None:
        device = torch.device(accelerator.type, device_id)
    else:
        raise ShardingError(
            f"device_id={device_id}: this process has no accelerator. Pass torch.device('cpu'), or "
            "leave it out."
        )
    if device.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or accelerator.type != device.type:
        here = f"an accelerator of type {accelerator.type!r}" if accelerator else "no accelerator"
        raise ShardingError(
            f"device_id={device_id}: this process has {here}. Pass a device that it has, or leave it "
            "out."
        )
    if str(device) == device.type:
        device = torch.device(device.type, torch.accelerator.current_device_index())
        warnings.warn(
            f"FSDP got the argument `device_id` {device_id}, which does not have an explicit index. "
            f"FSDP will use the current device {device}.",
            stacklevel=3,
        )
    return device


def materialise(
    covered: Iterable[nn.Module],
    ignored: Ignored,
    device: torch.device,
    param_init_fn: Callable[[nn.Module], None] | None,
) -> None:
    """Give parameters and buffers on the meta device memory and first values.

    By ``param_init_fn(module)``, called on every covered module, or else by ``to_empty`` and the
    module's ``reset_parameters()``. Raises ShardingError if ``param_init_fn`` cannot be called, and
    StateError for a module without ``reset_parameters``, or for what ``param_init_fn`` leaves out.
    """
    modules = list(covered)
    on_meta = _names_on_meta(modules, set())
    if not on_meta:
        return
    if param_init_fn is not None and not callable(param_init_fn):
        raise ShardingError(
            f"Expected {param_init_fn} to be callable but got {type(param_init_fn)}"
        )
    with keeping_ties(modules):
        if param_init_fn is not None:
            for module in modules:
                with marking_to_empty(module):
                    param_init_fn(module)
        else:
            _reset(on_meta, device)
    left = _names_on_meta(modules, ignored.params) if param_init_fn is not None else {}
    if left:
        names = ", ".join(name for own in left.values() for name in own)
        raise StateError(
            f"param_init_fn was called on every module, and left on the meta device: {names}. Let it "
            "call module.to_empty(device=..., recurse=False), and give values to parameters and "
            "buffers."
        )


def _reset(on_meta: dict[nn.Module, list[str]], device: torch.device) -> None:
    """Give modules memory, and values by their ``reset_parameters()``."""
    for module, names in on_meta.items():
        with marking_to_empty(module):
            module.to_empty(device=device, recurse=False)
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            warnings.warn(
                "Unable to call `reset_parameters()` for module on meta device: "
                f"{type(module).__name__} has no such method.",
                stacklevel=5,
            )
            raise StateError(
                f"{type(module).__name__} has parameters or buffers on the meta device "
                f"({', '.join(names)}), but no reset_parameters() to give them values. "
                "Define one, or pass param_init_fn=."
            )
        with torch.no_grad():
            reset()


def _names_on_meta(
    modules: Sequence[nn.Module], ignored: set[nn.Parameter]
) -> dict[nn.Module, list[str]]:
    """Return the paths of what is on the meta device, by the modules that have any.

    modules: the root comes first.
    """
    found: dict[nn.Module, list[str]] = {}
    among = set(modules)
    for path, module in modules[0].named_modules() if modules else ():
        states = (*module._parameters.items(), *module._buffers.items()) if module in among else ()
        for name, tensor in states:
            if tensor is not None and tensor.is_meta and tensor not in ignored:
                found.setdefault(module, []).append(clean_name(f"{path}.{name}"))
    return found


def check_flattenable(covered: Iterable[nn.Module], ignored: Ignored, device_id: object) -> None:
    """Refuse parameters that no flat buffer can hold, or no gradient of one.

    Raises UnsupportedError for those that are not strided, and those that ask for gradients of
    another dtype; StateError for some on several devices, unless ``device_id`` tells the target.
    """
    devices: set[torch.device] = set()
    for module in covered:
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in ignored.params:
                continue
            if parameter.layout is not torch.strided:
                raise UnsupportedError(
                    f"{type(module).__name__}: {name} has the layout {parameter.layout}, and only "
                    "dense parameters are sharded. Make it dense (to_dense()), or leave it out "
                    "(ignored_states)."
                )
            wanted = said_grad_dtype(parameter).dtype
            if wanted not in (None, parameter.dtype):
                raise UnsupportedError(
                    f"{type(module).__name__}: {name} asks for gradients in {wanted} (grad_dtype), "
                    f"but is {parameter.dtype}, and gradients in one buffer have its dtype. Use "
                    "fully_shard, which follows grad_dtype, or leave it unset."
                )
            if not parameter.is_meta:
                devices.add(parameter.device)
    if len(devices) > 1 and device_id is None:
        raise StateError(
            "FSDP only supports single device modules but got params on "
            f"{sorted(map(str, devices))}. Pass device_id=."
        )


@torch.no_grad()
def broadcast_states(tensors: Sequence[torch.Tensor], place: UnitMesh) -> None:
    """Give every rank the values of the first one.

    First over the shard group, and then over the replicas', whose first is that of the mesh: each
    such group may have another order.
    """
    for group in place.groups:
        source = 0
        # Not with NO_SHARD, whose mesh has the replicas alone.
        if group is place.replicate_group and len(place.groups) > 1 and place.mesh is not None:
            column = place.mesh.mesh[:, place.plan.shard_rank].tolist()
            source = dist.get_group_rank(group, column[0])
        for tensor in tensors:
            run_collective(
                dist.broadcast,
                local_part(tensor.detach()),
                group=group,
                group_src=source,
                label="sync_module_states",
            )
