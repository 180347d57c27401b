"""Show a sharded module under the private names by which PyTorch and libraries read it.

Pipeline schedules reduce gradients through ``fully_shard.state(module)``. Composable APIs look for
a mark in a module's registry, and ``torch.compile`` for marks on the module. The classes here are
views with PyTorch's names: they own nothing, and two views of the same object are equal. A library that
checks what programs compute is told to leave the engine out (`leave_unchecked`).
"""

import collections
import functools
import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fullshard.engine.adoption import adopt
from fullshard.engine.hooks import Hooks, hooks_of
from fullshard.engine.iteration import Iteration
from fullshard.engine.module_state import ModuleState, state_of
from fullshard.engine.nodes import AfterBackwardInTransforms, BeforeBackward, watch_output
from fullshard.engine.params.managed import ManagedParameter
from fullshard.engine.unit import Unit
from fullshard.errors import MisuseError
from fullshard.faces.meshes import DataParallelMeshInfo, HSDPMeshInfo
from fullshard.plan.units import WRAPPED_MODULE
from fullshard.policies import MixedPrecisionPolicy, TrainingState
from fullshard.process_hooks import register
from fullshard.torch_private import REGISTRY_KEY, RegistryItem, module_states, registry_of


class _PytorchsNames:
    """An object of the engine under the names that PyTorch has for its parts."""

    def __init__(self, shown: object) -> None:
        self._shown = shown

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._shown is self._shown

    def __hash__(self) -> int:
        return id(self._shown)


class FSDPParam(_PytorchsNames):
    """A managed parameter as PyTorch's ``FSDPParam``."""

    _shown: ManagedParameter

    @property
    def _param_fqn(self) -> str:
        return self._shown.name

    @property
    def sharded_param(self) -> nn.Parameter:
        return self._shown.sharded

    @property
    def unsharded_param(self) -> nn.Parameter | None:
        return self._shown.unsharded

    _unsharded_param = unsharded_param

    @property
    def unsharded_accumulated_grad(self) -> torch.Tensor | None:
        return self._shown.accumulated_grad


class FSDPParamGroup(_PytorchsNames):
    """A unit, and the state it belongs to, as PyTorch's ``FSDPParamGroup``."""

    _shown: Unit

    def __init__(self, unit: Unit, state: ModuleState) -> None:
        super().__init__(unit)
        self._state = state

    @property
    def fsdp_params(self) -> list[FSDPParam]:
        return [FSDPParam(param) for param in self._shown.managed]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return tuple(self._state.modules)

    @property
    def _module_fqn(self) -> str:
        return self._shown.name

    @property
    def is_sharded(self) -> bool:
        return not self.is_unsharded

    @property
    def is_unsharded(self) -> bool:
        return self._shown.is_unsharded

    @property
    def reduce_grads(self) -> bool:
        return self._shown.config.reduce_grads

    @property
    def reshard_after_backward(self) -> bool:
        return self._shown.config.reshard_after_backward

    @property
    def mesh_info(self) -> DataParallelMeshInfo:
        info: DataParallelMeshInfo = self._shown.mesh.info  # type: ignore[assignment]
        return info

    @property
    def post_forward_mesh_info(self) -> DataParallelMeshInfo | None:
        """The mesh that parameters are resharded over after forward; None if they stay unsharded until backward."""
        mesh, config = self._shown.mesh, self._shown.config
        if self._shown.keeps_after_forward or mesh.shard_group is None:
            return None
        if mesh.post_forward is None or config.reshard_after_forward is True:
            return self.mesh_info
        return HSDPMeshInfo(mesh.post_forward, shard_mesh_dim=1, replicate_mesh_dim=0)

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, info: Any) -> None:
        """Set ``reshard_after_forward`` as libraries did before there was `set_reshard_after_forward`."""
        unit = self._shown
        option: bool | int = info is not None
        if info is not None and info.mesh != self.mesh_info.mesh:
            if info.mesh != unit.mesh.post_forward:
                raise MisuseError(
                    f"{unit.label}: its parameters cannot be resharded over {info.mesh}. Pass "
                    f"reshard_after_forward={info.shard_mesh_size} to fully_shard."
                )
            option = info.shard_mesh_size
        unit.configure(reshard_after_forward=option, is_kept=False)

    @property
    def _reshard_after_forward(self) -> bool:
        return self.post_forward_mesh_info is not None

    @property
    def _training_state(self) -> TrainingState:
        """The modules' phase, or the one for which the parameters are gathered ahead of it."""
        state, iteration = self._state.training_state, self._state.known_iteration
        if state is TrainingState.IDLE and not self.is_unsharded and iteration is not None:
            if iteration.is_in_backward:
                return TrainingState.PRE_BACKWARD
            if iteration.is_forward_running:
                return TrainingState.FORWARD
        return state

    @_training_state.setter
    def _training_state(self, state: TrainingState) -> None:
        self._state.training_state = state

    def unshard(self, async_op: bool = False) -> None:
        self._shown.unshard()

    def wait_for_unshard(self) -> None:
        self._shown.wait_unshard()

    def reshard(self) -> None:
        self._shown.reshard()

    def post_backward(self, *_: Any) -> None:
        """Reduce accumulated gradients: pipeline schedules call this after their backwards."""
        self._state.training_state = TrainingState.POST_BACKWARD
        self._state.iteration_or_initialise().after_backward(self._shown)


class FSDPStateContext(_PytorchsNames):
    """The part of a state that all modules of a model share, as PyTorch's ``FSDPStateContext``."""

    _shown: ModuleState

    @property
    def all_states(self) -> list["FSDPState"]:
        return [FSDPState(state) for state in self._shown.everyone]

    @property
    def is_last_backward(self) -> bool:
        return bool(self._shown.said.get("is_last_backward", True))

    @is_last_backward.setter
    def is_last_backward(self, value: bool) -> None:
        self._shown.said["is_last_backward"] = value

    @property
    def post_optim_event(self) -> torch.Event | None:
        event: torch.Event | None = self._shown.said.get("post_optim_event")
        return event

    @post_optim_event.setter
    def post_optim_event(self, event: torch.Event | None) -> None:
        self._shown.said["post_optim_event"] = event


class FSDPState(_PytorchsNames):
    """A sharded module's state as PyTorch's ``FSDPState``."""

    _shown: ModuleState

    @property
    def _is_root(self) -> bool | None:
        return None if self._shown.known_iteration is None else self._shown.is_root

    @property
    def _modules(self) -> tuple[nn.Module, ...]:
        return tuple(self._shown.modules)

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        return self._shown.policy

    @property
    def _device(self) -> torch.device:
        return self._shown.all_units[0].device

    @property
    def _auto_reshard_after_forward(self) -> bool:
        """Whether the root alone keeps its parameters after forward, as nobody has said otherwise."""
        return self._shown.all_units[0].config.reshard_after_forward is None

    @_auto_reshard_after_forward.setter
    def _auto_reshard_after_forward(self, is_auto: bool) -> None:
        for unit in self._shown.all_units:
            if is_auto != (unit.config.reshard_after_forward is None):
                unit.configure(reshard_after_forward=None if is_auto else not unit.is_root)

    @property
    def _training_state(self) -> TrainingState:
        return self._shown.training_state

    @property
    def _state_ctx(self) -> FSDPStateContext:
        return FSDPStateContext(self._shown)

    @property
    def _comm_ctx(self) -> object:
        """What tells apart models whose reductions do not depend on each other, by ``id``."""
        return self._shown.known_iteration or self._shown

    @property
    def _fsdp_param_groups(self) -> list[FSDPParamGroup]:
        return [FSDPParamGroup(unit, self._shown) for unit in self._shown.units]

    @property
    def _fsdp_param_group(self) -> FSDPParamGroup | None:
        groups = self._fsdp_param_groups
        if len(groups) > 1:
            raise MisuseError(
                f"Expected at most 1 param group, but this module's parameters are sharded over "
                f"{len(groups)} meshes. Read _fsdp_param_groups."
            )
        return groups[0] if groups else None

    def _lazy_init(self) -> None:
        self._shown.iteration_or_initialise()

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self._shown.hooks().before_forward(module, args, kwargs)

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._shown.hooks().after_forward(module, args, {}, output)

    def _root_post_backward_final_callback(self) -> None:
        self._shown.hooks().end_backward()

    def _reset_iter_state(self) -> None:
        self._shown.reset()


class FlatHandle(_PytorchsNames):
    """A flat unit, and the wrapper it belongs to, as PyTorch's ``FlatParamHandle``."""

    _shown: Unit

    def __init__(self, unit: Unit, wrapper: nn.Module) -> None:
        super().__init__(unit)
        self._wrapper = wrapper

    @property
    def flat_param(self) -> nn.Parameter:
        parameter: nn.Parameter = self._wrapper._flat_param  # type: ignore[assignment]
        return parameter

    @property
    def uses_sharded_strategy(self) -> bool:
        return self._shown.mesh.shard_group is not None

    @property
    def _offload_params(self) -> bool:
        return self._shown.config.offload_to_cpu

    def reshard(self, free_unsharded_flat_param: bool) -> None:
        """Free the unsharded parameters; also if their memory alone was to stay."""
        hooks_of(self._wrapper).reshard()  # type: ignore[union-attr]

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Move or cast the shards, as ``tensor.to`` does. A forward wants them back where they were."""
        for holder in self._shown.holders:
            holder.sharded.data = holder.sharded.data.to(*args, **kwargs)

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        return self._shown.managed[0].holder.sharded.dtype

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        """Cast the shards. Accelerate sets this after it has cast the parameters it can see."""
        self.flat_param_to(dtype)
        adopt(self._shown)


def wrapped_state(module: nn.Module) -> nn.Module | None:
    """Return the FSDP1 state of a module: the module itself if it is a wrapper, else None."""
    wraps = state_of(module) is not None and WRAPPED_MODULE in module._modules
    return module if wraps else None


def initialise_wrapper(state: nn.Module, _: nn.Module) -> nn.Module:
    """Make a wrapper the root, unless its model has one: PyTorch's ``_lazy_init``. Returns the wrapper."""
    state_of(state).iteration_or_initialise()  # type: ignore[union-attr]
    return state


def end_wrapper(state: nn.Module, _: nn.Module) -> None:
    """Free what a pass that has raised left unsharded: PyTorch's ``_post_backward_final_callback``."""
    own = state_of(state)
    assert own is not None
    if (iteration := own.known_iteration) is not None:
        own.forget_stale_backward(iteration)
        own.reset(keeps_gradients=True)


def state_view(module: nn.Module) -> FSDPState | None:
    """Return the state of a sharded module, None for any other."""
    state = state_of(module)
    return None if state is None else FSDPState(state)


def is_composable(module: nn.Module) -> bool:
    # Not after ``replicate``, PyTorch's or ours.
    return "replicate" not in (registry_of(module) or {})


def mark_sharded(modules: Iterable[nn.Module], api: str) -> None:
    """Mark modules as sharded by ``api`` in PyTorch's registries of composable APIs and of their states."""
    for module in modules:
        registry = module.__dict__.setdefault(REGISTRY_KEY, collections.OrderedDict())
        registry[api] = RegistryItem()
        # Libraries look for the unit around a module among the keys. Values are called, and keep no module alive.
        module_states[module] = functools.partial(_state_at, weakref.ref(module))


def _state_at(reference: Callable[[], nn.Module | None]) -> FSDPState | None:
    module = reference()
    return None if module is None else state_view(module)


def mark_managed(modules: Iterable[nn.Module]) -> None:
    """Tell ``torch.compile`` not to guard on these modules' parameters, since they are replaced."""
    for module in modules:
        module._is_fsdp_managed_module = True  # type: ignore[assignment]
        # Also where a flat parameter stands in front of them: else dynamo compiles no frame that reaches the
        # module. What modules show of a flat parameter is an attribute that compiled code reads in each call.
        module._fsdp_use_orig_params = True  # type: ignore[assignment]


# The package `spmd_types` checks types of what a program computes, on request. Nothing here imports it: who has
# not imported it checks nothing.

# Classes that work with the engine's own tensors alone, and what else does. Not the hooks of a forward:
# their casts, and the nodes on a module's inputs, hand the types of the user's tensors on.
_OWN_CLASSES = (Iteration, ModuleState, Unit)
_OWN_FUNCTIONS = (Hooks.before_backward, Hooks.after_backward, Hooks.end_backward, watch_output)
_WHY = "types are checked of what programs compute, not of the engine's own work"


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
