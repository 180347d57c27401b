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
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fullshard.engine.iteration import is_in_backward
from fullshard.engine.module_state import ModuleState, state_of
from fullshard.engine.nodes import mark_after_backward, mark_before_backward, watch_view
from fullshard.engine.precision import (
    cast_inputs,
    cast_outputs,
    differentiable_tensors,
    map_tensors,
    replace_differentiable,
)
from fullshard.engine.runtime import eager, passing_through
from fullshard.engine.unit import Unit
from fullshard.policies import TrainingState


class Hooks(ModuleState):
    """The hooks of a sharded module, or of several that were sharded together.

    forward_prefetch, backward_prefetch: what to gather early, if users chose it.
    """

    def __init__(
        self, modules: Sequence[nn.Module], units: Sequence[Unit], *, is_wrapper: bool = False
    ) -> None:
        """is_wrapper: the module calls `run_as_forward` itself, and has no hooks registered."""
        super().__init__(modules, units, is_wrapper=is_wrapper)
        self.forward_prefetch: list[Hooks] = []
        self.backward_prefetch: list[Hooks] = []
        self._calls_itself = False  # in this forward
        self._methods: list[tuple[weakref.ref[nn.Module], str, Callable[..., Any]]] = []
        self._handles: list[RemovableHandle] = []
        self.attach()

    def attach(self) -> None:
        """Put the state and its hooks on the modules."""
        super().attach()
        for module in () if self.is_wrapper else self.modules:
            self._handles += [
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
        super().detach()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # 1

    @eager
    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        iteration = self.iteration_or_initialise()
        self.forget_stale_backward(iteration)
        if self.training_state is TrainingState.PRE_BACKWARD and is_in_backward():
            # A backward that ran in between may have resharded them.
            iteration.begin_units(self.units, prefetches=False)
            return cast_inputs(self.policy, args, kwargs)
        units = self.units
        has_begun = self.training_state is TrainingState.FORWARD and id(module) not in self.to_run
        # Either an exception ended that forward, or it is still running and this is part of it.
        if has_begun and self._num_calls(module) > 1:
            return self._begin_inner_call(args, kwargs)
        self._calls_itself = False
        if iteration.is_left_over(is_root=self._own_iteration is not None):
            self.forget(keeps_gradients=True)
        is_first = self.training_state is not TrainingState.FORWARD
        if len(self._modules) > 1 and not self.to_run:
            self.to_run = {id(module) for module in self.modules}
        self.training_state = TrainingState.FORWARD
        if is_first and not iteration.is_in_forward and not is_in_backward():
            args, kwargs = _to_device(self.all_units[0].device, args, kwargs)
            caller = _caller() if len(self._modules) == 1 else None
            iteration.begin_forward(self, is_training=module.training, caller=caller)
            self.look_for_strays()
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

    def copy_methods(self, other: "Hooks", memo: dict[int, Any]) -> None:
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
        if self.to_run:
            self.to_run.discard(id(module))
            if self.to_run and not is_root:
                return cast_outputs(policy, output)  # others of the group are still to come
            self.to_run.clear()  # part of a group may be called alone, for the loss
        output = self._complete_forward(output)
        if is_root:
            for state in self.everyone:
                # Part of its group did not run, or an exception that somebody caught ended it.
                began = state is not self and state.training_state is TrainingState.FORWARD
                if state.to_run or began:
                    state.to_run.clear()
                    assert isinstance(state, Hooks)
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
            elif code is _CALLS_FORWARD and not self.is_wrapper:
                count += frame.f_locals["self"] is module
            frame = frame.f_back
        return count

    # 4

    @eager
    def before_backward(self, grad: torch.Tensor) -> torch.Tensor:
        iteration = self.iteration_or_initialise()
        self.forget_stale_backward(iteration)
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

    # 8

    def _before_state_dict(self, *_: Any) -> None:
        for unit in self.units:
            unit.settle()
            unit.finish_reading()

    def _after_load(self, *_: Any) -> None:
        self.follow_changes()


# The functions in which a module's forward runs, and a method that counts as one.
_CALLS_FORWARD = nn.Module._call_impl.__code__
_CALLS_METHOD = Hooks.run_as_forward.__code__
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


def hooks_of(module: nn.Module) -> Hooks | None:
    """Return the hooks of a sharded module, None for any other."""
    state = state_of(module)
    assert state is None or isinstance(state, Hooks)
    return state


def _to_device(
    device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if device.type == "cpu":
        return args, kwargs
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs))
