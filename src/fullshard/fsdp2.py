"""`fully_shard`: parameters sharded one by one, as DTensors on the module itself.

Names, signatures, defaults and state-dict keys are those of ``torch.distributed.fsdp``.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from fullshard.engine.hooks import ModuleState, state_of
from fullshard.engine.params import ManagedParameter
from fullshard.engine.unit import Unit, UnitMesh
from fullshard.errors import MeshError, ShardingError, StateError
from fullshard.plan.mesh import check_reshard_after_forward, plan_mesh
from fullshard.policies import CommChoice, MixedPrecisionPolicy, OffloadPolicy, UnitConfig
from fullshard.wrapping import (
    CoveredParameters,
    check_modules,
    check_parameters,
    covered_modules,
    qualified_names,
    root_modules,
)

ShardPlacementFn = Callable[[nn.Parameter], Shard | None]
_Module = TypeVar("_Module", bound=nn.Module)

_default_comm = CommChoice.AUTO


def set_default_comm(choice: str | CommChoice) -> CommChoice:
    """Choose how modules sharded from now on communicate; return the choice before.

    "auto" takes peer memory for CPU ranks of one host and the process group elsewhere;
    "process_group" always the latter; "peer_memory" raises where it cannot be had.
    """
    global _default_comm
    try:
        chosen = CommChoice(choice)
    except ValueError as error:
        names = ", ".join(repr(member.value) for member in CommChoice)
        raise ShardingError(f"set_default_comm({choice!r}): expected one of {names}.") from error
    before, _default_comm = _default_comm, chosen
    return before


@overload
def fully_shard(
    module: _Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
) -> _Module: ...


@overload
def fully_shard(
    module: list[_Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
) -> list[_Module]: ...


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
) -> Any:
    """Shard a module's parameters, gradients and hence optimizer state over data-parallel ranks.

    Everything in ``module`` that an earlier call did not take becomes one unit, whose parameters
    are gathered before its forward and backward and freed after. So call it bottom-up: on each
    block, then on the model. Build the optimizer afterwards.

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)

    module: a module, or several to be one unit. Changed in place and returned.
    mesh: 1-D (shard), or 2-D (replicate, shard) for hybrid sharding. Default: all ranks.
    reshard_after_forward: True frees the parameters after forward and gathers them again for
        backward; False keeps them; an int reshards over groups of that many ranks; None means True,
        but False for the root, whose backward comes first.
    shard_placement_fn: returns ``Shard(dim)`` for a parameter, or None for ``Shard(0)``. Any size
        along the dim works.
    mp_policy, offload_policy: dtypes, and whether shards live in host memory.
    ignored_params: left as they are, neither sharded nor reduced.

    Raises ShardingError or MeshError before anything is changed. Source: ZeRO-3, arXiv 1910.02054;
    PyTorch FSDP2.
    """
    _check_policies(mp_policy, offload_policy)
    given = [module] if isinstance(module, nn.Module) or not isinstance(module, list) else module
    check_modules(given)
    roots = root_modules(given)
    unit_mesh, device = _resolve_mesh(mesh)
    config = UnitConfig(
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        reshard_after_forward=check_reshard_after_forward(
            reshard_after_forward, unit_mesh.plan.shard_size
        ),
        comm=_default_comm,
    )
    covered = covered_modules(roots)
    parameters = CoveredParameters(covered, ignored_params or set())
    paths = qualified_names(roots, parameters.slots.values())
    names = dict(zip(parameters.slots, paths, strict=True))
    check_parameters(names, device)
    dims = [_shard_dim(parameter, shard_placement_fn, name) for parameter, name in names.items()]
    unit_mesh = _with_post_forward_group(unit_mesh, config)

    _move_to_device(covered, parameters, device, config)
    managed = [
        ManagedParameter(parameter, slots, unit_mesh.mesh, dim)
        for (parameter, slots), dim in zip(parameters.slots.items(), dims, strict=True)
    ]
    parameters.connect_ties()
    parameters.slots.clear()  # the last references to the whole parameters, but for the user's
    unit = Unit(managed, unit_mesh, device, config)
    ModuleState(roots, unit)
    for root in roots:
        root.__class__ = _sharded_class(type(root))
    return module


class FSDPModule:
    """What `fully_shard` adds to a module: its class becomes a subclass of this and its own."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct the original class: slicing a sharded container makes a plain one."""
        original = cls.__mro__[2]
        self = original.__new__(original, *args, **kwargs)
        self.__init__(*args, **kwargs)
        return self

    def unshard(self, async_op: bool = False) -> "UnshardHandle | None":
        """Gather this module's parameters (not those of sharded modules inside it).

        Every rank has to call it. What is written to the unsharded parameters does not reach the
        shards. async_op: return a handle to wait on instead of waiting.
        """
        unit = _state(self).unit
        unit.follow_changes()
        unit.read_privately()
        unit.comm.fence(f"{unit.label}: unshard")
        unit.unshard()
        unit.is_held = True
        unit.comm.fence(f"{unit.label}: unshard")
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's unsharded parameters."""
        _state(self).unit.reshard()

    def reset_iter_state(self) -> None:
        """Forget an iteration that an exception ended. The root's next forward does so itself."""
        state = _state(self)
        if state.iteration is not None and not state.is_root:
            raise StateError("reset_iter_state has to be called on the root module.")
        state.reset()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward is the last of this iteration (several per forward)."""
        _state(self).shared.is_last_backward = is_last_backward

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Reduce gradients in backward, or keep them unreduced for a later one."""
        self._configure(
            recurse, reduce_grads=requires_gradient_sync, all_reduce_grads=requires_gradient_sync
        )

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Sum over the replicate axis in backward, or keep sums over the shard axis (HSDP)."""
        self._configure(recurse, all_reduce_grads=requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change ``reshard_after_forward`` to True or False."""
        if not isinstance(reshard_after_forward, bool):
            raise ShardingError(
                f"set_reshard_after_forward({reshard_after_forward!r}): expected True or False."
            )
        self._configure(recurse, reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Free parameters after backward, or keep them for the next micro-batch."""
        self._configure(recurse, reshard_after_backward=reshard_after_backward)

    def set_modules_to_forward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """Start gathering these when this module's forward starts, instead of the next one."""
        _state(self).forward_prefetch = _sharded_states(modules)

    def set_modules_to_backward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """Start gathering these when this module's backward starts, instead of the next one."""
        _state(self).backward_prefetch = _sharded_states(modules)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by this instead of the number of data-parallel ranks."""
        if not factor > 0:
            raise ShardingError(
                f"set_gradient_divide_factor({factor!r}): expected a positive number."
            )
        self._configure(recurse=False, gradient_divide_factor=float(factor))

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Reduce units none of whose parameters were used here, as zeros.

        For models in which only some ranks run a module: all of them have to take part in its
        reduction. The gradients are then set, to zeros where no rank had any.
        """
        self._configure(recurse, reduce_scatter_unused_params=reduce_scatter_unused_params)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Skip gathering in backward where the parameters are not needed (an embedding)."""
        self._configure(recurse=False, unshard_in_backward=unshard_in_backward)

    def _configure(self, recurse: bool, **changes: Any) -> None:
        module = cast(nn.Module, self)
        for each in module.modules() if recurse else [module]:
            state = state_of(each)
            if state is not None:
                state.unit.configure(**changes)


class UnshardHandle:
    """An unshard under way."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Make the unsharded parameters usable."""
        if self._unit is not None:
            self._unit.wait_unshard()
            self._unit = None


def _state(module: Any) -> ModuleState:
    state = state_of(module) if isinstance(module, nn.Module) else None
    if state is None:
        raise StateError(f"{type(module).__name__} is not sharded: call fully_shard on it first.")
    return state


def _sharded_states(modules: Iterable[Any]) -> list[ModuleState]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ShardingError(
                f"{type(module).__name__} is no FSDPModule and cannot be prefetched. Pass modules "
                "that fully_shard was applied to."
            )
    return [_state(module) for module in modules]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make another method of a sharded module gather parameters as its forward does.

    For models that are called through ``generate`` or ``encode``. No effect on a module that is
    not sharded. Raises ShardingError if there is no such method.
    """
    state = state_of(module)
    if state is None:
        return
    method = getattr(type(module), method_name, None)
    if not callable(method):
        raise ShardingError(f"{type(module).__name__} has no method {method_name!r}.")
    reference = weakref.ref(module)  # the module keeps this function

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        this = reference()
        assert this is not None
        return state.run_as_forward(this, method, args, kwargs)

    setattr(module, method_name, run)


_sharded_classes: dict[type, type] = {}


def _sharded_class(original: type) -> type:
    """Return the subclass of FSDPModule and ``original``, the same one every time."""
    if original not in _sharded_classes:
        namespace = {"__deepcopy__": _refuse_deepcopy, "__module__": original.__module__}
        _sharded_classes[original] = type(
            f"FSDP{original.__name__}", (FSDPModule, original), namespace
        )
    return _sharded_classes[original]


def _refuse_deepcopy(module: nn.Module, memo: dict[int, Any]) -> Any:
    raise StateError(
        f"{type(module).__name__} is sharded and cannot be deep-copied. Copy the model before "
        "fully_shard, or load its state_dict into a second sharded model."
    )


def _check_policies(mp_policy: Any, offload_policy: Any) -> None:
    for name, value, expected in (
        ("mp_policy", mp_policy, MixedPrecisionPolicy),
        ("offload_policy", offload_policy, OffloadPolicy),
    ):
        if not isinstance(value, expected):
            raise ShardingError(
                f"{name}={value!r}: expected a fullshard.{expected.__name__}, such as "
                f"{expected()!r}."
            )


def _resolve_mesh(mesh: DeviceMesh | None) -> tuple[UnitMesh, torch.device]:
    if mesh is None:
        if not dist.is_initialized():
            dist.init_process_group()
        accelerator = torch.accelerator.current_accelerator()
        device_type = accelerator.type if accelerator is not None else "cpu"
        mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(f"mesh has to be a DeviceMesh, not {type(mesh).__name__}.")
    coordinate = mesh.get_coordinate()
    plan = plan_mesh(tuple(mesh.shape), tuple(coordinate) if coordinate is not None else None)
    accelerator = torch.accelerator.current_accelerator()
    if mesh.device_type == "cpu":
        device = torch.device("cpu")
    elif accelerator is None or accelerator.type != mesh.device_type:
        raise MeshError(
            f"The mesh is of type {mesh.device_type!r}, but this process has "
            f"{accelerator.type if accelerator else 'no accelerator'}. Build the mesh with "
            f"init_device_mesh({accelerator.type if accelerator else 'cpu'!r}, ...)."
        )
    else:
        device = torch.device(mesh.device_type, torch.accelerator.current_device_index())
    shard_axis = mesh.ndim - 1
    return (
        UnitMesh(
            mesh,
            plan,
            mesh.get_group(shard_axis),
            mesh.get_group(0) if mesh.ndim == 2 else None,
        ),
        device,
    )


def _with_post_forward_group(unit_mesh: UnitMesh, config: UnitConfig) -> UnitMesh:
    """Add the groups over which ``reshard_after_forward=N`` keeps parameters."""
    option = config.reshard_after_forward
    if option is None or isinstance(option, bool):
        return unit_mesh
    mesh = unit_mesh.mesh
    return unit_mesh._replace(post_forward=DeviceMesh(mesh.device_type, mesh.mesh.view(-1, option)))


def _shard_dim(parameter: nn.Parameter, placement_fn: ShardPlacementFn | None, name: str) -> int:
    placement = placement_fn(parameter) if placement_fn is not None else None
    if placement is None or parameter.dim() == 0:
        return 0
    if not isinstance(placement, Shard):
        raise ShardingError(
            f"{name}: shard_placement_fn returned {placement!r}; expected Shard(dim) or None."
        )
    dim = placement.dim + parameter.dim() if placement.dim < 0 else placement.dim
    if not 0 <= dim < parameter.dim():
        raise ShardingError(
            f"{name}: shard_placement_fn returned {placement!r} for a parameter of shape "
            f"{tuple(parameter.shape)}. Choose a dim from 0 to {parameter.dim() - 1}."
        )
    return dim


def _move_to_device(
    covered: Iterable[nn.Module],
    parameters: CoveredParameters,
    device: torch.device,
    config: UnitConfig,
) -> None:
    """Move what was built on the CPU to the mesh's device; offloaded parameters stay."""
    if device.type == "cpu":
        return
    moving: list[torch.Tensor] = [b for m in covered for b in m.buffers(recurse=False)]
    if not config.offload_to_cpu:
        moving.extend(parameters.slots)
    for tensor in moving:
        if not tensor.is_meta and tensor.device != device:
            tensor.data = tensor.to(device)
