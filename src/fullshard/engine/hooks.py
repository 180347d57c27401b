"""Every hook the engine registers, in firing order.

    1  forward pre-hook      of each sharded module: unshard, cast inputs; the first module to run
                             is the forward root and begins the iteration
    2  identity on inputs    an autograd node whose backward is 6
    3  forward hook          reshard, cast outputs; the forward root ends the forward
    4  tensor hook           on each differentiable output, fires when its gradient is ready:
                             unshard for backward, prefetch the next unit
    5  autograd              computes the module's gradients; they land on unsharded parameters
    6  backward of 2         gradients are complete: reshard and reduce
    7  engine callback       once a backward pass: units that had no 6 (inputs without gradient,
                             unused in part), then everything under way is finished
    8  state-dict hooks      before saving or loading: parameters are shown sharded; after loading:
                             shards that were replaced are brought back to the unit's memory
    -  process-wide          registration of parameters and modules, optimizer steps: see `strays`

Special cases. Activation recomputation runs 1 and 3 again inside backward, between 4 and 6: the
parameters stay unsharded until 6. A module that runs several times has one 6 for each, and reduces
each time. If it calls itself, or a method that counts as forward calls it, 2 and the resharding are
those of the outermost call. Modules sharded together share a state: 3 completes with the last of
them, or, if one never ran, with the forward root, which may be the group itself. Inside a transform
a node stands for 4. An output that is a view has a second 4, on what it is a view of. After an
exception, whatever was left is reset by the next forward or backward; gradients that earlier
micro-batches accumulated are kept if it came in forward.
"""

import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fullshard.engine.checks.root_share import warn_of_large_root
from fullshard.engine.checks.strays import is_stray, registrations, warn_of_strays, watch
from fullshard.engine.iteration import Iteration, is_in_backward
from fullshard.engine.nodes import mark_after_backward, mark_before_backward, watch_view
from fullshard.engine.params.managed import ManagedParameter
from fullshard.engine.precision import (
    cast_inputs,
    cast_outputs,
    differentiable_tensors,
    map_tensors,
    replace_differentiable,
)
from fullshard.engine.restoring import naming_lack
from fullshard.engine.runtime import eager, passing_through
from fullshard.engine.unit import Unit
from fullshard.engine.unit_setup import move_parameters
from fullshard.errors import StateError
from fullshard.plan.units import clean_name, lowest_common_unit
from fullshard.policies import MixedPrecisionPolicy, TrainingState, UnitConfig

_STATE = "_fullshard_state"


class ModuleState:
    """What a sharded module, or several sharded together, carries: its units and where it is.

    units: one for each mesh that the module's parameters are sharded over, at least one. It may own
        no parameters: nested units may have taken them all.
    """

    def __init__(
        self, modules: Sequence[nn.Module], units: Sequence[Unit], *, hooks: bool = True
    ) -> None:
        """hooks: False where the module's own methods do what 1, 3 and 8 stand for."""
        self.all_units = list(units)
        self._units: list[Unit] | None = None  # those with parameters, once ties are resolved
        self._has_hooks = hooks
        self.training_state = TrainingState.IDLE
        self._reduced: UnitConfig | None = None  # what applies again after full precision
        self.ignored: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # below the modules, not ours
        # Names of parameters that are left as they are, of modules that are ours.
        self.ignored_names: weakref.WeakKeyDictionary[nn.Module, set[str]]
        self.ignored_names = weakref.WeakKeyDictionary()
        self.buffer_dtypes: weakref.WeakKeyDictionary[nn.Module, dict[str, torch.dtype]]
        self.buffer_dtypes = weakref.WeakKeyDictionary()  # of buffers that were cast
        self.forward_prefetch: list[ModuleState] = []
        self.backward_prefetch: list[ModuleState] = []
        # Returns the iteration of the model this belongs to, None before its first use.
        self.iteration: Callable[[], Iteration | None] = _no_iteration
        self._own_iteration: Iteration | None = None  # of a root
        self._said: dict[str, Any] = {}  # about iterations, before the root was known
        self._root: weakref.ref[ModuleState] | None = None
        self._states: list[ModuleState] = [self]  # of a root: all below it
        self._modules = [weakref.ref(module) for module in modules]
        self._to_run: set[int] = set()  # of a group: those that have yet to run
        self._calls_itself = False  # in this forward
        self._methods: list[tuple[weakref.ref[nn.Module], str, Callable[..., Any]]] = []
        self._hooks: list[RemovableHandle] = []
        self._num_registrations = -1  # in the process, when strays were looked for
        self._strays: set[str] = set()  # those found then
        watch()
        self.attach()

    def attach(self) -> None:
        """Put the state and its hooks on the modules."""
        for module in self.modules:
            module.__dict__[_STATE] = self
            if not self._has_hooks:
                continue
            self._hooks += [
                module.register_forward_pre_hook(
                    self.before_forward, prepend=True, with_kwargs=True
                ),
                module.register_forward_hook(self.after_forward),
                module.register_state_dict_pre_hook(self._before_state_dict),
                module.register_load_state_dict_pre_hook(self._before_state_dict),
                module.register_load_state_dict_post_hook(self._after_load),
            ]

    def detach(self) -> None:
        """Take the state and its hooks off the modules."""
        for module in self.modules:
            del module.__dict__[_STATE]
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def units(self) -> list[Unit]:
        """The units that own parameters."""
        if self._units is not None:
            return self._units
        return [unit for unit in self.all_units if unit.params]

    @property
    def policy(self) -> MixedPrecisionPolicy:
        return self.all_units[0].config.mp_policy

    @property
    def modules(self) -> list[nn.Module]:
        return [module for reference in self._modules if (module := reference()) is not None]

    @property
    def is_root(self) -> bool:
        return self._own_iteration is not None

    @property
    @passing_through
    def known_iteration(self) -> Iteration | None:
        """The iteration of the model this belongs to; None before the model's first use."""
        return self.iteration()

    def iteration_or_initialise(self) -> Iteration:
        """Return the same; before the model's first use, make this its root.

        For what runs the model. Whoever only asks, or changes a setting, uses `known_iteration`: a
        module that became a root because of a question would be in the way of the real one.
        """
        return self.iteration() or self.initialise()

    @property
    def is_last_backward(self) -> bool:
        """Whether the next backward is the last of its iteration."""
        iteration = self.iteration()
        value: bool = (
            self._said.get("is_last_backward", True)
            if iteration is None
            else iteration.is_last_backward
        )
        return value

    @property
    def post_optim_event(self) -> torch.Event | None:
        """What the next forward of the root waits for."""
        iteration = self.iteration()
        return (
            self._said.get("post_optim_event") if iteration is None else iteration.post_optim_event
        )

    def say(self, **facts: Any) -> None:
        """Set ``is_last_backward`` or ``post_optim_event``, once the root is known or at once."""
        iteration = self.iteration()
        if iteration is None:
            self._said.update(facts)
            return
        for name, value in facts.items():
            setattr(iteration, name, value)

    def initialise(self) -> Iteration:
        """Make this the root: resolve names and ties, materialise the units, connect them."""
        if len(self._modules) > 1:
            names = ", ".join(type(module).__name__ for module in self.modules)
            raise StateError(
                f"FSDP requires a single root module but got {names}, which were sharded together "
                "and run first. Apply fully_shard to the module that contains them."
            )
        (root,) = self.modules
        named = named_states(root)
        for name, state in named.items():
            # What was below another wrapper before may move; a sharded module's place is for good.
            is_taken = state.is_root or (state._has_hooks and state.known_iteration is not None)
            if state is not self and is_taken:
                raise StateError(
                    f"FSDP state has already been lazily initialized for {name}\nFSDP requires "
                    "running forward through the root module first: it ran before the module that "
                    "contains it, and so became a root of its own."
                )
        self._states = list(dict.fromkeys(named.values()))
        for state in self._states:
            state._units = None
        for unit, name in names_of_units(named).items():
            unit.set_name(name)
        for param, paths in names_of_parameters(root, self._states).items():
            param.names = paths
        move_parameters(moves_of_ties(root, named))
        units = [unit for state in self._states for unit in state.units]
        for unit in units:
            with naming_lack(f"{unit.path}: first use", "Values are as they were."):
                unit.adopt()
        for unit in self.all_units:
            unit.become_root()
        for state in self._states:
            state._units = state.units
            state._cast_buffers()
        warn_of_large_root(root, units, self.units)
        self._own_iteration = Iteration(units)
        for state in self._states:
            state.iteration = weakref.ref(self._own_iteration)
            state._root = weakref.ref(self)
        for state in reversed(self._states):  # the root's own words come last, and count
            state.say(**state._said)
            state._said.clear()
        return self._own_iteration

    def _cast_buffers(self) -> None:
        """Cast the modules' floating-point buffers, if the policy asks for it."""
        dtype = self.all_units[0].config.buffer_dtype
        if dtype is None:
            return
        for module in self.own_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                    self.buffer_dtypes.setdefault(module, {})[name] = buffer.dtype
                    module._buffers[name] = buffer.to(dtype)

    def use_precision(self, *, full: bool) -> None:
        """Compute in the dtypes of the shards for now, or as the policy says. Between iterations."""
        (unit,) = self.all_units
        if full == (self._reduced is not None):
            return
        self.iteration_or_initialise()
        if self._reduced is not None:
            config, self._reduced = self._reduced, None
            unit.configure(mp_policy=config.mp_policy, buffer_dtype=config.buffer_dtype)
        else:
            self._reduced = unit.config
            unit.configure(mp_policy=MixedPrecisionPolicy(), buffer_dtype=None)
            for module, dtypes in self.buffer_dtypes.items():
                for name, dtype in dtypes.items():
                    module._buffers[name] = module._buffers[name].to(dtype)  # type: ignore[union-attr]
        self._cast_buffers()
        if unit.params:
            unit.adopt()

    def own_modules(self) -> list[nn.Module]:
        """Return the modules, and those below them that have no state of their own."""
        found: dict[nn.Module, None] = {}

        def visit(module: nn.Module) -> None:
            if module not in found and module not in self.ignored:
                found[module] = None
                for child in module.children():
                    if state_of(child) is None:
                        visit(child)

        for module in self.modules:
            visit(module)
        return list(found)

    def _look_for_strays(self) -> None:
        """Warn of parameters that were added since the modules were sharded."""
        self._num_registrations = registrations.value
        paths = {module: path for path, module in self.modules[0].named_modules()}
        strays = {
            f"{clean_name(paths[module])}.{name}".lstrip(".")
            for state in self._states
            for module in state.own_modules()
            for name, parameter in module._parameters.items()
            if is_stray(parameter) and name not in state.ignored_names.get(module, ())
        }
        warn_of_strays(sorted(strays - self._strays))
        self._strays = strays

    def _forget_stale_backward(self, iteration: Iteration) -> None:
        if iteration.has_stale_backward:
            self._forget(keeps_gradients=False)

    def _forget(self, *, keeps_gradients: bool) -> None:
        """Forget what an exception left behind, in the whole model."""
        root = self._root() if self._root is not None else None
        assert root is not None
        root.reset(keeps_gradients=keeps_gradients)

    def reset(self, *, keeps_gradients: bool = False) -> None:
        """Forget an iteration that did not end, and the gradients of earlier ones unless told."""
        if self._own_iteration is None:
            return
        self._own_iteration.reset(keeps_gradients=keeps_gradients)
        for state in self._states:
            state.training_state = TrainingState.IDLE
            state._to_run.clear()

    # 1

    @eager
    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        iteration = self.iteration_or_initialise()
        self._forget_stale_backward(iteration)
        if self.training_state is TrainingState.PRE_BACKWARD and is_in_backward():
            # A backward that ran in between may have resharded them.
            iteration.begin_units(self.units, prefetches=False)
            return cast_inputs(self.policy, args, kwargs)
        units = self.units
        has_begun = self.training_state is TrainingState.FORWARD and id(module) not in self._to_run
        # Either an exception ended that forward, or it is still running and this is part of it.
        if has_begun and self._num_calls(module) > 1:
            return self._begin_inner_call(args, kwargs)
        self._calls_itself = False
        if iteration.is_left_over(is_root=self._own_iteration is not None):
            self._forget(keeps_gradients=True)
        is_first = self.training_state is not TrainingState.FORWARD
        if len(self._modules) > 1 and not self._to_run:
            self._to_run = {id(module) for module in self.modules}
        self.training_state = TrainingState.FORWARD
        if is_first and not iteration.is_in_forward and not is_in_backward():
            args, kwargs = _to_device(self.all_units[0].device, args, kwargs)
            caller = _caller() if len(self._modules) == 1 else None
            iteration.begin_forward(self, is_training=module.training, caller=caller)
            if self._num_registrations != registrations.value:
                self._look_for_strays()
        args, kwargs = cast_inputs(self.policy, args, kwargs)
        prefetches = not self.forward_prefetch
        iteration.begin_units(units, prefetches=prefetches, is_training=module.training)
        if is_first:
            for state in self.forward_prefetch:
                for unit in state.units:
                    iteration.start_forward_unshard(unit)
            if units and torch.is_grad_enabled():
                args, kwargs = self._mark_inputs(args, kwargs)
        return args, kwargs

    @passing_through
    def run_as_forward(
        self, module: nn.Module, method: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call a method of the module as its forward is called: with what goes before and after."""
        args, kwargs = self.before_forward(module, args, kwargs)
        return self.after_forward(module, args, method(module, *args, **kwargs))

    def wrap_method(self, module: nn.Module, name: str, method: Callable[..., Any]) -> None:
        """Run ``method(module, ...)`` as a forward whenever ``module.name`` is called."""
        reference = weakref.ref(module)  # what the module keeps must not keep the module
        self._methods.append((reference, name, method))

        @passing_through
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            this = reference()
            assert this is not None
            return self.run_as_forward(this, method, args, kwargs)

        setattr(module, name, run)

    def copy_methods(self, other: "ModuleState", memo: dict[int, Any]) -> None:
        """Wrap the same methods of a copy."""
        for reference, name, method in self._methods:
            if (module := reference()) is not None:
                other.wrap_method(memo[id(module)], name, method)

    # 2

    def _mark_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        inputs = differentiable_tensors(args)
        if kwargs:
            inputs += differentiable_tensors(kwargs)
        if not inputs:
            return args, kwargs
        marked = mark_after_backward(self, inputs)
        if not kwargs and len(inputs) == len(args) and all(map(operator.is_, inputs, args)):
            return marked, kwargs
        rest = iter(marked)
        args = replace_differentiable(args, rest)
        return args, replace_differentiable(kwargs, rest) if kwargs else kwargs

    # 3

    @eager
    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        policy = self.policy
        if self.training_state is TrainingState.PRE_BACKWARD:
            return cast_outputs(policy, output)
        iteration = self.iteration_or_initialise()
        if self._calls_itself and self._num_calls(module) > 1:
            return cast_outputs(policy, self._mark_outputs(output))
        is_root = iteration.is_forward_root(self)
        if self._to_run:
            self._to_run.discard(id(module))
            if self._to_run and not is_root:
                return cast_outputs(policy, output)  # others of the group are still to come
            self._to_run.clear()  # part of a group may be called alone, for the loss
        output = self._complete_forward(output)
        if is_root:
            for state in self.everyone:
                # Part of its group did not run, or an exception that somebody caught ended it.
                began = state is not self and state.training_state is TrainingState.FORWARD
                if state._to_run or began:
                    state._to_run.clear()
                    output = state._complete_forward(output)
            iteration.end_forward()
        return cast_outputs(policy, output)

    def _complete_forward(self, output: Any) -> Any:
        outputs = differentiable_tensors(output) if torch.is_grad_enabled() else []
        self.iteration_or_initialise().end_units(self.units, is_differentiable=bool(outputs))
        self.training_state = TrainingState.IDLE
        return self._mark_outputs(output, outputs)

    def _mark_outputs(self, output: Any, outputs: Sequence[torch.Tensor] | None = None) -> Any:
        if not torch.is_grad_enabled():
            return output
        if torch._C._are_functorch_transforms_active():
            return map_tensors(lambda tensor: mark_before_backward(self, tensor), output)
        for tensor in differentiable_tensors(output) if outputs is None else outputs:
            if tensor._is_view():
                watch_view(self, tensor)
            else:
                tensor.register_hook(self.before_backward)
        return output

    # 1 and 3 of a call within a call of the same module

    def _begin_inner_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Let the outer call's parameters serve. They are needed until it is over.

        No 2 either: in backward they are needed until the outer call's 6.
        """
        self._calls_itself = True
        for unit in self.units:
            unit.unshard()
            unit.wait_unshard()
        return cast_inputs(self.policy, args, kwargs)

    def _num_calls(self, module: nn.Module) -> int:
        """Count the calls of a module that are running on this thread, by looking at its stack.

        Slow, but right after an exception of any kind too, where a counter would have to be told.
        """
        count = 0
        frame = sys._getframe().f_back
        while frame is not None:
            code = frame.f_code
            if code is _CALLS_METHOD:
                count += frame.f_locals["self"] is self and frame.f_locals["module"] is module
            elif code is _CALLS_FORWARD and self._has_hooks:
                count += frame.f_locals["self"] is module
            frame = frame.f_back
        return count

    # 4

    @eager
    def before_backward(self, grad: torch.Tensor) -> torch.Tensor:
        iteration = self.iteration_or_initialise()
        self._forget_stale_backward(iteration)
        iteration.begin_backward(self.end_backward)
        if self.training_state is TrainingState.PRE_BACKWARD:
            return grad
        self.training_state = TrainingState.PRE_BACKWARD
        units = self.units
        for unit in units:
            if unit.is_unsharded:
                unit.params.check_unchanged()
            iteration.start_backward_unshard(unit)
        for unit in units:
            unit.wait_unshard()
            unit.gradients.lend_unreduced()
        iteration.begin_backward_units(units)
        if not self.backward_prefetch:
            for unit in reversed(units):
                iteration.prefetch_backward(unit)
        for state in self.backward_prefetch:
            for unit in reversed(state.units):
                iteration.start_backward_unshard(unit)
        return grad

    # 6

    @eager
    def after_backward(self) -> None:
        self.training_state = TrainingState.POST_BACKWARD
        iteration = self.iteration_or_initialise()
        for unit in reversed(self.units):
            iteration.after_backward(unit)

    # 7

    @eager
    def end_backward(self) -> None:
        states = self.everyone
        finished = [
            unit
            for state in states
            if state.training_state is TrainingState.POST_BACKWARD
            for unit in state.units
        ]
        for state in states:
            state.training_state = TrainingState.IDLE
        self.iteration_or_initialise().end_backward(finished)

    @property
    def everyone(self) -> list["ModuleState"]:
        """Return the states of the whole model."""
        root = self._root() if self._root is not None else None
        return root._states if root is not None else [self]

    # 8

    def _before_state_dict(self, *_: Any) -> None:
        for unit in self.units:
            unit.settle()
            unit.finish_reading()

    def _after_load(self, *_: Any) -> None:
        self.follow_changes()

    def follow_changes(self) -> None:
        """Adopt shards that were replaced at once, so that optimizers may keep their addresses."""
        for unit in self.units:
            if not any(param.local.is_meta for param in unit.params):
                unit.follow_changes()


# The functions in which a module's forward runs, and a method that counts as one.
_CALLS_FORWARD = nn.Module._call_impl.__code__
_CALLS_METHOD = ModuleState.run_as_forward.__code__
_RUN_FORWARDS = frozenset(  # and the functions that it defines, one of which calls the hooks
    {_CALLS_FORWARD, *(c for c in _CALLS_FORWARD.co_consts if isinstance(c, types.CodeType))}
)


@passing_through
def _caller() -> types.FrameType | None:
    """Return the frame that runs a module's forward; None where that was compiled.

    Compiled code runs in frames of its own, of which Python does not know whether they run.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _ENGINE_FILES:
        if frame.f_code is _CALLS_METHOD:
            return frame
        frame = frame.f_back
    return frame if frame is not None and frame.f_code in _RUN_FORWARDS else None


_ENGINE_FILES = frozenset({__file__, eager.__code__.co_filename})


@passing_through
def _no_iteration() -> None:
    return None


def state_of(module: nn.Module) -> ModuleState | None:
    """Return the state of a sharded module, None for any other."""
    state = module.__dict__.get(_STATE)
    return state if isinstance(state, ModuleState) else None


def named_states(root: nn.Module) -> dict[str, ModuleState]:
    """Return the states in a model by the paths of their modules."""
    return {
        name: state
        for name, module in root.named_modules()
        if (state := state_of(module)) is not None
    }


def names_of_units(named: Mapping[str, ModuleState]) -> dict[Unit, str]:
    """Return what the units of these states are called: by the paths of their modules."""
    paths: dict[ModuleState, list[str]] = {}
    for path, state in named.items():
        paths.setdefault(state, []).append(clean_name(path))
    return {unit: ", ".join(names) for state, names in paths.items() for unit in state.all_units}


def names_of_parameters(
    root: nn.Module, states: Iterable[ModuleState]
) -> dict[ManagedParameter, list[str]]:
    """Return the paths of the states' parameters below a module."""
    paths: dict[int, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(clean_name(path))
    return {
        param: [
            f"{path}.{slot.name}" if path else slot.name
            for slot in param.slots
            for path in paths.get(id(slot.module()), ())
        ]
        for state in states
        for unit in state.all_units
        for param in unit.params
    }


def moves_of_ties(
    root: nn.Module, named: Mapping[str, ModuleState]
) -> list[tuple[ManagedParameter, Unit, Unit]]:
    """Find what has to move: each parameter that several units use, from its unit to another.

    That is the innermost unit that contains them all.
    """
    name_of = {id(module): name for name, module in root.named_modules()}
    single = {name: state for name, state in named.items() if len(state._modules) == 1}
    moves: list[tuple[ManagedParameter, Unit, Unit]] = []
    for state in dict.fromkeys(named.values()):
        for unit, param in [(own, param) for own in state.units for param in own.params]:
            if len(param.slots) == 1:
                continue
            users = [name_of.get(id(slot.module()), "") for slot in param.slots]
            nearest = [lowest_common_unit([user], named) for user in users]
            if all(name is not None and named[name] is state for name in nearest):
                continue
            common = lowest_common_unit(users, single)
            if common is not None:  # else they are below several roots, none of them this model
                moves.append((param, unit, _on_mesh_of(unit, single[common], param)))
    return moves


def _on_mesh_of(unit: Unit, state: ModuleState, param: ManagedParameter) -> Unit:
    """Return the state's unit that is sharded as ``unit`` is."""
    for other in state.all_units:
        if other.mesh.mesh == unit.mesh.mesh:
            return other
    raise StateError(
        f"{' and '.join(param.names)} are one tied parameter, but the modules that use it are "
        "sharded over different meshes. Untie it, or shard them over one mesh."
    )


def _to_device(
    device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if device.type == "cpu":
        return args, kwargs
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs))
