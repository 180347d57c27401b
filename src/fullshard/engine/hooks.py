"""Every hook the engine registers, in firing order.

    1  forward pre-hook      of each sharded module: unshard, cast inputs; the first module to run
                             is the forward root and begins the iteration
    2  identity on inputs    an autograd node whose backward is 6
    3  forward hook          reshard, cast outputs; the forward root ends the forward
    4  tensor hook           on each differentiable output, fires when its gradient is ready:
                             unshard for backward, prefetch the next unit
    5  pre-hook on the node  that accumulates an unsharded parameter's gradient: begins the backward
                             pass if no 4 has, and brings `requires_grad` in line with the sharded form
    6  backward of 2         gradients are complete: reshard and reduce
    7  engine callback       once per backward pass: do 6 for units that had none (inputs without
                             gradient, unused in part), then finish everything under way
    8  state-dict hooks      before saving or loading: show sharded parameters; after saving in the
                             middle of 1 to 7: show again what was in use; after loading: bring
                             shards that were replaced back to the unit's memory
    -  process-wide          registration of parameters and modules, optimizer steps: see `process_hooks`

Special cases:

- Activation recomputation runs 1 and 3 again inside backward, between 4 and 6. The parameters stay
  unsharded until 6.
- A module that runs several times has one 6 per call, and reduces in each.
- If a module calls itself, or a method that counts as forward calls it, only the outermost call
  has 2 and reshards.
- Modules sharded together share a state. 3 completes with the last of them or, if one never ran,
  with the forward root, which may be the group itself.
- Inside a ``torch.func`` transform, an autograd node takes the place of 4.
- If a module changes its only input in place, the node of 2 is left out of the graph. 6 is then a
  hook on the node that made the input (`nodes.follow_input`).
- An output that is a view has a second 4, on the tensor that it is a view of.
- What forward leaves elsewhere than in its outputs has a 4, too (`nodes.tensors_left`). Autograd runs what was recorded
  last first: it comes to what is younger than the outputs before it comes to these, and never to outputs that nothing uses.
- After an exception, the next forward or backward resets what was left. Gradients that earlier
  micro-batches accumulated are kept if the exception came in forward.
- A module that uses a parameter which a unit of another root owns has 1 and 3 of that unit around its own, see
  `attach_lenders`. To the owner's root, it is as if its module ran twice:

      encoder.forward     gather encoder; free it
      decoder.forward     gather encoder, decoder; free both

[Note: Joined units] A gather that needs all ranks has to come at the same place on all of them, also
on those that do not run the unit. So the innermost module around it that every rank runs gathers it too:
before its own forward and backward, and frees it after them. In between the unit's own modules find it
gathered, or nobody uses it.

    ranks 0 and 1      gather layer; gather expert.0; gather expert.1
    rank 0 runs        expert.0            rank 1 runs        expert.1

That takes the memory of all such units of a module at once. Ranks that read each other's memory need
nothing of the kind: each gathers what it runs.
"""

import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fullshard.engine.access import Registered, fake_form, is_running, refuse_while_used
from fullshard.engine.guard.forbidden import refuse_compiled_backward
from fullshard.engine.iteration import Iteration, Stage
from fullshard.engine.module_state import HOOKS, ModuleState, outermost, owners_of
from fullshard.engine.nodes import (
    follow_input,
    mark_after_backward,
    mark_before_backward,
    tensors_left,
    watch_output,
)
from fullshard.engine.observer import watchers
from fullshard.engine.precision import (
    Swap,
    cast_inputs,
    cast_outputs,
    differentiable_tensors,
    map_tensors,
    replace_tensors,
    undo_swaps,
)
from fullshard.engine.runtime import eager, passing_through
from fullshard.engine.unit import Unit, UnitPhase
from fullshard.engine.whole import refuse_while_whole, refusing_backward
from fullshard.errors import StateError
from fullshard.policies import TrainingState
from fullshard.torch_private import (
    are_transforms_active,
    current_graph_task_id,
    is_fake,
    is_fake_mode_active,
    local_part,
    next_sequence_number,
)


class Hooks:
    """The hooks of a sharded module, or of several that were sharded together.

    state: what the module carries, and its place in the model.
    methods: those that count as forward: the module, the method's name, the function that it was.
    forward_prefetch, backward_prefetch: the modules whose units the user chose to gather early, in
        place of the next unit in order; empty for the latter.
    """

    def __init__(
        self, modules: Sequence[nn.Module], units: Sequence[Unit], *, is_wrapper: bool = False
    ) -> None:
        """Register the hooks on the modules.

        is_wrapper: the module calls `run_as_forward` itself, so no hooks are registered on it.
        """
        self.state = ModuleState(modules, units, is_wrapper=is_wrapper)
        self.state.hooks = weakref.ref(self)
        self.forward_prefetch: list[Hooks] = []
        self.backward_prefetch: list[Hooks] = []
        self._calls_itself = False  # the forward under way has called its own module again
        self.called = "forward"  # the method whose call has begun, while `before_forward` runs
        self._in_method: list[Swap] | None = None  # what that has to undo, meanwhile
        self.methods: list[tuple[weakref.ref[nn.Module], str, Callable[..., Any]]] = []
        self._handles: list[RemovableHandle] = []
        self._registered: list[Registered] = []  # of state dicts that are being made
        self._faked: list[Registered] = []  # of forwards under a `FakeTensorMode`
        self._lent_to: weakref.WeakSet[Hooks] = weakref.WeakSet()
        self._begun = 0  # the number of the first node that the forward under way records
        self.attach()

    def attach(self) -> None:
        """Put the state and its hooks on the modules."""
        for module in self.state.modules:
            module.__dict__[HOOKS] = self
        for module in () if self.state.is_wrapper else self.state.modules:
            self._handles += [
                # In front of the user's hooks, which may compute with the module's parameters.
                module.register_forward_pre_hook(
                    self.before_forward, prepend=True, with_kwargs=True
                ),
                module.register_forward_hook(self.after_forward, with_kwargs=True),
                module.register_state_dict_pre_hook(self.begin_saving),
                module._register_state_dict_hook(self.end_saving),
                module.register_load_state_dict_pre_hook(self._before_load),
                module.register_load_state_dict_post_hook(self._after_load),
            ]
        self.attach_lenders()

    def detach(self) -> None:
        """Take the state and its hooks off the modules."""
        for module in self.state.modules:
            del module.__dict__[HOOKS]
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # 1. Before forward: unshard

    @eager
    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make a module's parameters usable; return its inputs, cast and marked for backward.

        Raises StateError as `Iteration.begin_forward` and `ModuleState.initialise` do.
        """
        state = self.state
        for unit in state.all_units:
            if unit.is_whole:
                return args, kwargs  # to compute with what is shown
        if is_fake_mode_active():
            some = next((p for each in state.modules for p in each.parameters()), None)
            if some is None or not is_fake(
                local_part(some)
            ):  # else all is fake that is done with them
                self._begin_fake(module)
                return cast_inputs(state.policy, args, kwargs)
        iteration = state.iteration()
        if iteration is None:
            iteration = state.initialise()
            if state.gathered:  # as this has found: from the next call on, it begins before this
                args, kwargs = self._begin_lenders(module, args, kwargs)
        if iteration.stage >= Stage.BACKWARD or current_graph_task_id() != -1:
            # First: a backward that raised leaves states in PRE_BACKWARD, as if this recomputed.
            state.forget_stale_backward(iteration)
            if current_graph_task_id() != -1 and iteration.awaits_backward:
                self.begin_backward()  # that no output has announced, and which recomputes this
            if state.training_state is TrainingState.PRE_BACKWARD and iteration.is_in_backward:
                # Recomputation. 4 has unsharded them, but a backward in between may have resharded.
                iteration.begin_units(state.units, joined=state.joined, prefetches=False)
                return cast_inputs(state.policy, args, kwargs)
        units = state.units
        has_begun = state.training_state is TrainingState.FORWARD and id(module) not in state.to_run
        # An exception ended the forward that has begun, or it still runs and this call is in it.
        # Only the stack tells, which is walked in this rare case alone.
        if has_begun and self._num_calls() > 1:
            return self._begin_inner_call(args, kwargs)
        self._calls_itself = False
        if iteration.has_raised_in_forward(is_root=state.is_root):
            state.forget(keeps_gradients=True)
        # After `forget`, which changes the state.
        is_first = state.training_state is not TrainingState.FORWARD
        begins = is_first and iteration.stage is Stage.IDLE
        if begins:
            iteration.look_for_capture()
            iteration.finalization.check_ended("forward")
            for watcher in tuple(watchers):
                watcher.forward_begins(state, module, args, kwargs)
        if len(state._modules) > 1 and not state.to_run:
            state.to_run = {id(module) for module in state.modules}
        state.training_state = TrainingState.FORWARD
        swaps: list[Swap] = []
        if begins:
            device = state.all_units[0].device
            if device.type != "cpu":  # as PyTorch does; the host does not wait
                args, kwargs = map_tensors(
                    lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs), swaps
                )
            caller = _caller() if len(state._modules) == 1 else None
            if iteration.has_skipped:
                join_units(state.everyone)
            iteration.begin_forward(self, is_training=module.training, caller=caller)
            state.look_for_strays()
        policy = state.all_units[0].config.mp_policy
        if policy.param_dtype is not None:
            args, kwargs = cast_inputs(policy, args, kwargs, swaps)
        iteration.begin_units(
            units,
            joined=state.joined,
            prefetches=not self.forward_prefetch,
            is_first=is_first,
            is_training=module.training,
        )
        if is_first:
            # After the module's own units: gathers run in the order in which they are started.
            for other in self.forward_prefetch:
                for unit in other.state.units:
                    iteration.start_forward_unshard(unit)
            # Of a group, only the inputs of the first module: backward comes to them last.
            if units and torch.is_grad_enabled():
                args, kwargs = self._mark_inputs(args, kwargs, swaps)
            self._begun = next_sequence_number()
        if swaps:
            self._undo_after(module, swaps)
        return args, kwargs

    @passing_through
    def run_as_forward(
        self,
        module: nn.Module,
        method: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        name: str = "forward",
    ) -> Any:
        """Call a method of the module as its forward is called: with 1 before and 3 after it.

        name: under which the program has called it.
        """
        if self.state.gathered:
            args, kwargs = self._begin_lenders(module, args, kwargs)
        self.called = name
        swaps = self._in_method = []
        try:
            args, kwargs = self.before_forward(module, args, kwargs)
        finally:
            self.called = "forward"
            self._in_method = None
        num_faked = len(self._faked)
        try:
            output = method(module, *args, **kwargs)
        except BaseException:
            undo_swaps(swaps)
            self._end_fake(num_faked)
            iteration = self.state.known_iteration
            root = None if iteration is None or iteration.root is None else iteration.root()
            # Only of a call that is not inside another one, whose module may catch this and go on.
            if iteration is not None and root is self and self._num_calls() == 1:
                iteration.hide_flat()
            raise
        output = self.after_forward(module, args, kwargs, output)
        if swaps:  # a call of a function would be a frame to compile
            undo_swaps(swaps)
        return self._end_lenders(module, args, kwargs, output) if self.state.gathered else output

    def wrap_method(self, module: nn.Module, name: str, method: Callable[..., Any]) -> None:
        """Run ``method(module, ...)`` as a forward whenever ``module.name`` is called."""
        reference = weakref.ref(module)  # the module keeps `run`, which must not keep the module
        self.methods.append((reference, name, method))

        @passing_through
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            this = reference()
            assert this is not None
            return self.run_as_forward(this, method, args, kwargs, name=name)

        setattr(module, name, run)

    # 1 and 3 of what owns some of these modules' parameters and has another root

    def attach_lenders(self) -> None:
        """Have what is ``state.gathered`` gathered, too, whenever these modules run."""
        if not self.state.gathered or self.state.is_wrapper:  # `run_as_forward` sees to it
            return
        for module in self.state.modules:
            self._handles += [
                module.register_forward_pre_hook(
                    self._begin_lenders, prepend=True, with_kwargs=True
                ),
                module.register_forward_hook(self._end_lenders, with_kwargs=True),
            ]

    def _lenders(self) -> list["Hooks"]:
        """Return the hooks of the owners; those that have yet to run get their root first, which may move parameters."""
        gathered = self.state.gathered
        for state in owners_of(gathered):
            if state.known_iteration is None:
                outermost(state).initialise()
        self.state.lenders()  # live as long as this
        lenders: list[Hooks] = [state.hooks() for state in owners_of(gathered)]
        for lender in lenders:
            lender._lent_to.add(self)
        return lenders

    @eager
    def _begin_lenders(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for lender in self._lenders():
            args, kwargs = lender.before_forward(module, args, kwargs)
        return args, kwargs

    @eager
    def _end_lenders(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        for lender in self._lenders():
            output = lender.after_forward(module, args, kwargs, output)
        return output

    def reshard(self) -> None:
        """Free these modules' parameters, and what a program has had gathered with them.

        What owner and sharer have in common stays while one of them computes, which frees it.
        """
        for state in self.states:
            computes = state.training_state in (TrainingState.FORWARD, TrainingState.PRE_BACKWARD)
            is_shared = state is not self.state or self._lent_to
            for unit in state.units:
                if computes and is_shared and is_running(state, if_unknown=True):
                    unit.is_held = False
                elif state is self.state or unit.is_held:
                    unit.settle()

    # 1 and 3 under a `FakeTensorMode`: shapes are computed, by parameters without memory

    def _begin_fake(self, module: nn.Module) -> None:
        """Show fake whole parameters until 3. Nothing is gathered, and the units do not notice."""
        num_faked = len(self._faked)
        self._faked.append(Registered(self.state.units, fake_form))
        if not self.state.is_wrapper:  # `run_as_forward` sees exceptions itself

            def end(*_: Any) -> None:
                handle.remove()
                self._end_fake(num_faked)

            handle = module.register_forward_hook(end, always_call=True)

    def _end_fake(self, num_left: int) -> None:
        """Undo what `_begin_fake` has registered and 3 has not undone, since an exception came."""
        while len(self._faked) > num_left:
            self._faked.pop().undo()

    # 2. Identity on inputs: marks the end of the module's backward

    def _mark_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], swaps: list[Swap]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs with one autograd node on those that require a gradient. swaps: see `map_tensors`."""
        if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):  # nearly always
            return (mark_after_backward(self, args) if args[0].requires_grad else args), kwargs
        # In classes of the program's nothing is marked: they would have to be copied, and writes to them be lost.
        found = differentiable_tensors(args, opens_all=False)
        if kwargs:
            found += differentiable_tensors(kwargs, opens_all=False)
        if len(found) > 1:  # of these, what is nested in torch's first way can be no view
            found = [
                each for each in found if not (each.is_nested and each.layout is torch.strided)
            ]
        if not found:
            return args, kwargs  # 7 stands in for 6
        inputs = {id(tensor): tensor for tensor in found}  # one that comes twice stays one
        marked = mark_after_backward(self, [*inputs.values()])
        # The usual case, all positional and differentiable, needs no walk through the containers.
        if not kwargs and len(marked) == len(args) and all(map(operator.is_, found, args)):
            return marked, kwargs
        replacements = dict(zip(inputs, marked, strict=True))
        args = replace_tensors(args, replacements, swaps)
        return args, replace_tensors(kwargs, replacements, swaps) if kwargs else kwargs

    def _undo_after(self, module: nn.Module, swaps: list[Swap]) -> None:
        """Give the caller's containers their own tensors back once the call that begins is over, however it ends."""
        if self._in_method is not None:
            self._in_method.extend(swaps)
            return

        def end(*_: Any) -> None:
            if not self._calls_itself or self._num_calls() == 1:
                handle.remove()
                undo_swaps(swaps)

        handle = module.register_forward_hook(end, always_call=True)

    # 3. After forward: reshard

    @eager
    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Free a module's parameters; return its outputs, marked for backward and cast."""
        state = self.state
        for unit in state.all_units:
            if unit.is_whole:
                return refusing_backward(output)
        policy = state.all_units[0].config.mp_policy
        if self._faked:
            self._faked.pop().undo()
            return cast_outputs(policy, output)
        if state.training_state is TrainingState.PRE_BACKWARD:
            return cast_outputs(policy, output)  # recomputation: unsharded until 6
        iteration = state.iteration() or state.initialise()
        if self._calls_itself and self._num_calls() > 1:
            return cast_outputs(policy, self._mark_outputs(output))
        is_root = iteration.root is not None and iteration.root() is self
        if state.to_run:
            state.to_run.discard(id(module))
            if state.to_run and not is_root:
                return cast_outputs(policy, output)  # others of the group are still to come
            state.to_run.clear()  # part of a group may be called alone, for the loss
        output = self._complete_forward(iteration, (*args, *kwargs.values()), output)
        if is_root:
            # Before `end_forward`, whose fence lets peers write to what these still read.
            for other in state.everyone:
                # Part of its group did not run, or an exception that the program caught ended it.
                began = other is not self.state and other.training_state is TrainingState.FORWARD
                if other.to_run or began:
                    other.to_run.clear()
                    output = other.hooks()._complete_forward(iteration, (), output)
            iteration.end_forward()
        if policy.output_dtype is not None:
            output = cast_outputs(policy, output)
        if is_root:
            for watcher in tuple(watchers):
                watcher.forward_ends(iteration, output)
        return output

    def _complete_forward(self, iteration: Iteration, inputs: Any, output: Any) -> Any:
        """Free the units of a forward that is over; return its output, marked for backward."""
        state = self.state
        if state.mark is not None:
            follow_input(self)
        outputs: list[torch.Tensor] = []
        may_follow = False  # a backward, for which outputs that are not differentiable say nothing
        if torch.is_grad_enabled():
            if isinstance(output, torch.Tensor):  # nearly always
                outputs = [output] if output.requires_grad else []
            else:
                outputs = differentiable_tensors(output)
            if may_follow := not are_transforms_active():
                outputs += tensors_left(inputs, state.attributes(), outputs, since=self._begun)
        units = state.units
        if may_follow:
            for unit in units:
                if unit.params.shown.has_frozen:
                    unit.params.warn_of_late_training()
        iteration.end_units(
            units,
            joined=state.joined,
            is_differentiable=True if outputs else None if may_follow else False,
        )
        state.training_state = TrainingState.IDLE
        if may_follow:
            for tensor in outputs:
                watch_output(self, tensor)
            return output
        return self._mark_outputs(output)

    def _mark_outputs(self, output: Any) -> Any:
        """Let the gradient of each differentiable output call `before_backward`."""
        if not torch.is_grad_enabled():
            return output
        if are_transforms_active():
            # A tensor hook is of one level, and an output may hide that it needs a gradient at
            # another, so all of them get a node, which every level sees.
            return map_tensors(lambda tensor: mark_before_backward(self, tensor), output)
        for tensor in differentiable_tensors(output):
            watch_output(self, tensor)
        return output

    # 1 and 3 of a call within a call of the same module: the outer call's parameters serve

    def _begin_inner_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Begin a call inside a call of the same module, which goes on to need the parameters.

        The inputs get no 2, since backward needs the parameters until the 6 of the outer call.
        """
        self._calls_itself = True
        for unit in self.state.units:
            unit.unshard()
            unit.wait_unshard()
        return cast_inputs(self.state.policy, args, kwargs)

    def _num_calls(self) -> int:
        """Count the calls of these modules that are running on this thread, by walking the stack.

        Slow, but right after any exception too. A counter would miss a KeyboardInterrupt.
        """
        counted = [self, *self._lent_to]
        states = [each.state for each in counted if not each.state.is_wrapper]
        modules = {id(module) for state in states for module in state.modules}
        count = 0
        frame = sys._getframe().f_back
        while frame is not None:
            code = frame.f_code
            if code is _CALLS_METHOD:
                count += frame.f_locals["self"] in counted
            elif code is _CALLS_FORWARD:
                count += id(frame.f_locals["self"]) in modules
            frame = frame.f_back
        return count

    # 4. A gradient reaches an output: unshard for backward

    def begin_backward(self) -> None:
        """Begin the backward pass of the model, and see that 7 comes, unless that was done.

        Whatever comes first calls it: 4, 6, or a gradient on an unsharded parameter. So 7 takes every
        gradient, however the outputs looked that led to it.
        """
        iteration = self.state.iteration() or self.state.initialise()
        if iteration.backward.end() is None:
            self.state.forget_stale_backward(iteration)
            refuse_while_whole(iteration.units)
            refuse_compiled_backward()
            for unit in iteration.units:
                if unit.phase >= UnitPhase.UNSHARDED:  # else it does when it is shown
                    unit.params.follow_trained()  # a forward that is computed again records what it would have
            # Each access makes a new bound method, to which nobody else refers: see `begin_backward`.
            iteration.begin_backward(self.end_backward)

    @eager
    def before_backward(self, grad: torch.Tensor) -> torch.Tensor:
        """Make a module's parameters usable for its backward; return the gradient as it is.

        Called for each output; all but the first call of a pass do nothing. Raises MisuseError if
        parameters were replaced since forward.
        """
        state = self.state
        iteration = state.iteration() or state.initialise()
        if iteration.backward.end() is None:
            # First: a backward that raised leaves states in PRE_BACKWARD, as if this had been done.
            self.begin_backward()
        if state.training_state is TrainingState.PRE_BACKWARD:
            return grad
        state.training_state = TrainingState.PRE_BACKWARD
        units = state.units
        for unit in units:  # all are started before the first is waited for
            if unit.phase >= UnitPhase.UNSHARDED:
                unit.params.check_unchanged()
            elif unit.phase is not UnitPhase.GATHERING:
                iteration.start_backward_unshard(unit)
        for unit in state.joined:
            iteration.start_backward_unshard(unit)
        for unit in units:
            unit.wait_unshard()
            # After `wait_unshard`, which gives ``.grad`` back to autograd: sums are put there.
            if unit.gradients.unreduced.is_holding:
                unit.gradients.unreduced.sums.lend()
        iteration.note_backward_units(units)
        # After the module's own gathers, which would queue behind. Reversed, as backward runs
        # against the order of forward.
        if not self.backward_prefetch:
            for unit in reversed(units):
                iteration.prefetch_backward(unit)
        for other in self.backward_prefetch:
            for unit in reversed(other.state.units):
                iteration.start_backward_unshard(unit)
        return grad

    # 6. The gradients of the inputs are complete, and so those of the parameters: reduce

    @eager
    def after_backward(self) -> None:
        """Take the units' gradients, free their parameters, and start reducing."""
        state = self.state
        iteration = state.iteration() or state.initialise()
        if iteration.backward.end() is None:
            self.begin_backward()
        if state.training_state is TrainingState.FORWARD:
            return  # this backward is called in the module's forward, which goes on to use them
        state.training_state = TrainingState.POST_BACKWARD
        for unit in reversed(state.units):
            iteration.after_backward(unit)
        if state.joined:
            iteration.free_joined(state.joined)

    # Between 4 and 7: a gradient of `live.gathered`, which is not part of any module's backward

    @eager
    @torch.no_grad()
    def accept_gradient(self, unit: Unit, index: int, grad: torch.Tensor) -> None:
        """Add a full gradient to those that autograd leaves on a unit, and see that 7 comes.

        What comes after the unit's 6 is reduced in 7. Raises StateError before the model's first forward.
        """
        iteration = self.state.known_iteration
        if iteration is None:
            raise StateError(
                f"{unit.params[index].name}: a gradient came through gathered() before the model's first "
                "forward, which settles what belongs to the model. Run a forward first."
            )
        self.begin_backward()
        unit.add_gradient(index, grad)

    # 7. The backward pass is over: the rest of the units, everything under way

    @eager
    def end_backward(self) -> None:
        """End a backward pass of the whole model, whichever module's state is asked to."""
        iteration = self.state.iteration_or_initialise()
        unfinished: list[Unit] = []
        running: list[Unit] = []
        for state in self.state.everyone:
            if state.training_state is not TrainingState.POST_BACKWARD:
                # PRE_BACKWARD had 4 and no 6, since no input required a gradient.
                unfinished += state.units
                if state.training_state is TrainingState.FORWARD and iteration.is_forward_running:
                    running += state.units  # has called this backward, and goes on
                    continue
            state.training_state = TrainingState.IDLE
        iteration.end_backward(unfinished, running=running)

    # 8. State dicts: sharded parameters are shown, and replaced ones adopted

    def begin_saving(self, *_: Any) -> None:
        """Register the sharded parameters, each under its own name, until `end_saving`."""
        if self.state.is_wrapper and self._registered:  # of a state dict that an exception ended
            self.end_saving()
        units: list[Unit] = []
        for state in self.states:
            runs = is_running(state, if_unknown=True)
            for unit in () if runs else state.units:
                unit.settle()
            # Else settling has registered them, but for those inside a flat parameter.
            units += (unit for unit in state.units if runs or unit.params.flat is not None)
        self._registered.append(Registered(units))

    def end_saving(self, *_: Any) -> None:
        """Undo what `begin_saving` has registered."""
        if self._registered:
            self._registered.pop().undo()

    def _before_load(self, *_: Any) -> None:
        units = [unit for state in self.states for unit in state.units]
        for unit in units:
            refuse_while_used(unit, "load_state_dict")
        for unit in units:
            unit.settle()
            unit.finish_reading()  # loading is about to write to shards

    def _after_load(self, *_: Any) -> None:
        for state in self.states:
            state.follow_changes()  # ``assign=True`` replaces parameters

    @property
    def states(self) -> list[ModuleState]:
        """The states whose units have parameters of these modules, also those of other roots."""
        return [self.state, *self.state.lenders()]


# By their code, frames are recognised in which a module's forward runs, or a method that counts as
# one. `_call_impl` is where torch runs hooks and forward, or in an inner function.
_CALLS_FORWARD = nn.Module._call_impl.__code__
_CALLS_METHOD = Hooks.run_as_forward.__code__
_RUN_FORWARDS = frozenset(  # and the functions that it defines, one of which calls the hooks
    {_CALLS_FORWARD, *(c for c in _CALLS_FORWARD.co_consts if isinstance(c, types.CodeType))}
)


@passing_through
def _caller() -> types.FrameType | None:
    """Return the frame that runs the forward whose hook calls this; None where it was compiled.

    Compiled code runs in frames of its own, of which Python cannot tell whether they still run.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _ENGINE_FILES:
        if frame.f_code is _CALLS_METHOD:
            return frame
        frame = frame.f_back
    return frame if frame is not None and frame.f_code in _RUN_FORWARDS else None


_ENGINE_FILES = frozenset({__file__, eager.__code__.co_filename})


def hooks_of(module: nn.Module) -> Hooks | None:
    """Return the hooks of a sharded module; None for any other."""
    return module.__dict__.get(HOOKS)


def join_units(states: Iterable[ModuleState]) -> None:
    """Decide, by the settings of now, which module's gathers each unit joins. The same on all ranks.

    See [Note: Joined units]. states: of the whole model.
    """
    states = list(states)
    for state in states:
        state.joined = []
    for state in states:
        outer = state.outer
        # The innermost that every rank runs: the root at last.
        while (
            outer is not None
            and outer.outer is not None
            and any(unit.config.may_be_skipped for unit in outer.all_units)
        ):
            outer = outer.outer
        for unit in state.units:
            needs_all = not unit.comm.gathers_alone or unit.params.extended is not None
            # Nothing is around a root, which every rank runs.
            unit.is_joined = outer is not None and unit.config.may_be_skipped and needs_all
            if outer is not None and unit.is_joined:
                outer.joined.append(unit)
