"""Autograd nodes that stand for moments in the backward of a sharded module.

A node on a module's inputs marks the end of its backward, and one on its outputs the beginning.
Every level of a transform (``torch.func``, forward mode) sees a node, where a tensor hook would
belong to one level alone. Outside of transforms, `hooks` uses tensor hooks on the outputs.
"""

import collections
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from fullshard.engine.runtime import passing_through
from fullshard.policies import TrainingState
from fullshard.torch_private import (
    SingleLevelFunction,
    are_transforms_active,
    current_graph_task_id,
    next_sequence_number,
    sequence_number,
    will_engine_execute_node,
)


class Mark(NamedTuple):
    """The mark on a module's only input, while its forward runs.

    version: of the view, which advances if the input is changed in place. hook: on its node.
    """

    view: torch.Tensor
    version: int
    node: torch.autograd.graph.Node
    hook: RemovableHandle


class ModuleHooks(Protocol):
    """The hooks of a sharded module, as nodes call them: `hooks.Hooks`.

    state: its `ModuleState`.
    """

    state: Any

    def before_backward(self, grad: torch.Tensor) -> torch.Tensor: ...

    def after_backward(self) -> None: ...


class AfterBackward(SingleLevelFunction):
    """Identity on inputs, whose backward runs once the gradients of all of them are complete.

    `SingleLevelFunction` is the base of `torch.autograd.Function` without the dispatch to
    transforms.
    """

    @staticmethod
    def forward(ctx: Any, hooks: ModuleHooks, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.hooks = hooks
        ctx.set_materialize_grads(False)  # zeros would be gradients of what made an unused input
        return tensors

    @staticmethod
    @passing_through
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, *_after_backward(ctx.hooks, grads, ()))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # A view, not the tangent: torch asks for that where forward returns its inputs as they are.
        return tuple(tangent.view_as(tangent) for tangent in tangents)


class AfterBackwardInTransforms(torch.autograd.Function):
    """`AfterBackward` in the form that transforms ask for, with ``setup_context``.

    Outside of transforms it costs 25 us more per call, since torch binds its arguments by their
    signature. It is left to transforms for that.
    """

    generate_vmap_rule = True
    backward = AfterBackward.backward
    jvp = AfterBackward.jvp

    @staticmethod
    def forward(hooks: ModuleHooks, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.hooks = inputs[0]


class BeforeBackward(torch.autograd.Function):
    """Identity on an output, whose backward calls `Hooks.before_backward`.

    For outputs inside transforms, where a tensor hook would serve the innermost one alone, and for
    gradients that are differentiated themselves (``create_graph=True``).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(hooks: ModuleHooks, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.hooks = inputs[0]

    @staticmethod
    @passing_through
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, ctx.hooks.before_backward(grad)

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: torch.Tensor | None) -> torch.Tensor | None:
        return None if tangent is None else mark_before_backward(ctx.hooks, tangent)


def mark_after_backward(
    hooks: ModuleHooks, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return the tensors with one node on all of them, whose backward calls `after_backward`.

    One node, not one per tensor: autograd runs it when all their gradients are complete.
    """
    marked: tuple[torch.Tensor, ...]
    if are_transforms_active():
        marked = AfterBackwardInTransforms.apply(hooks, *tensors)  # type: ignore[no-untyped-call]
        return marked
    # For one tensor, a hook on the node of a view does the same at half of the cost. If the module
    # changes its input in place, `follow_input` moves the hook; with `AfterBackward` the change
    # would be an error.
    if len(tensors) == 1 and type(tensors[0]) is torch.Tensor:
        only = tensors[0]
        view = torch.ops.aten.alias(only) if only.is_nested else only.view_as(only)
        node = view.grad_fn
        if node is not None:  # a tensor made in inference mode has no graph
            hook = node.register_hook(functools.partial(_after_backward, hooks))
            hooks.state.mark = Mark(view, view._version, node, hook)
            return (view,)
    marked = AfterBackward.apply(hooks, *tensors)  # type: ignore[attr-defined]
    return marked


def follow_input(hooks: ModuleHooks) -> None:
    """Move the hook of `mark_after_backward` if the module has changed its only input in place.

    Autograd then leaves the marked view's node out. The node before it, which made the input, gets
    its gradient when the module's backward is over. Call it when the module's forward is.
    """
    (view, version, marked, hook), hooks.state.mark = hooks.state.mark, None
    if view._version == version:
        return
    # Each change puts a node in front of what the view's base was made by.
    node = None if view._base is None else view._base.grad_fn
    while node is not None and sequence_number(node) > sequence_number(marked):
        node = node.next_functions[0][0]
    if node is None:
        return  # the base is no result: the unit is reduced at the end of backward
    hook.remove()

    @passing_through
    def before_input(grads: tuple[torch.Tensor | None, ...]) -> Any:
        # Others may have used the input before it was changed: a backward of theirs is none of ours.
        if hooks.state.training_state is TrainingState.PRE_BACKWARD:
            return _after_backward(hooks, grads, ())
        return None

    node.register_prehook(before_input)


@passing_through
def _after_backward(
    hooks: ModuleHooks, grads: tuple[torch.Tensor | None, ...], _: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...]:
    """Call `after_backward`; return the gradients of the module's inputs.

    The last argument is what a node's hook gets besides: the gradients of the outputs.
    """
    hooks.after_backward()
    if not torch.is_grad_enabled():
        return grads
    # create_graph=True: these gradients may be differentiated, and their backward begins inside
    # this module, whose parameters have just been freed. So they are marked as its outputs are.
    return tuple(g if g is None else mark_before_backward(hooks, g) for g in grads)


def mark_before_backward(hooks: ModuleHooks, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with a `BeforeBackward` on it, or as it is if it can have no gradient."""
    if not tensor.dtype.is_floating_point:
        return tensor
    marked: torch.Tensor = BeforeBackward.apply(hooks, tensor)  # type: ignore[no-untyped-call]
    return marked


class _View:
    """The hooks of one output that is a view, which may be changed in place after forward.

    A view that is changed in place gets another node, which has none of its hooks. The base, the
    tensor that it is a view of, keeps its node behind that of the change. So there is a hook on
    both, of which the first to fire in a backward pass counts. The second would come too late: if
    nothing was changed and the module returned a view of its input, after the module's backward.

    Rejected: an autograd function around the view, since autograd then refuses the change.
    """

    __slots__ = ("_hooks", "_seen")

    def __init__(self, hooks: ModuleHooks) -> None:
        self._hooks = hooks
        self._seen = -1  # the id of the last backward pass in which a hook has fired

    @passing_through
    def of_view(self, grad: torch.Tensor) -> torch.Tensor:
        """Tensor hook of the view itself: fires unless the view was changed in place."""
        self._seen = current_graph_task_id()
        return self._hooks.before_backward(grad)

    @passing_through
    def of_base(self, grads: tuple[torch.Tensor | None, ...]) -> None:
        """Pre-hook of the base's node: fires in any case, so it counts only if it is the first."""
        task = current_graph_task_id()
        grad = next((grad for grad in grads if grad is not None), None)
        if grad is not None and task != self._seen:
            self._seen = task
            self._hooks.before_backward(grad)


def watch_output(hooks: ModuleHooks, tensor: torch.Tensor) -> None:
    """Call `Hooks.before_backward` when an output's gradient is ready, changed in place or not."""
    if not tensor._is_view():
        tensor.register_hook(hooks.before_backward)
        return
    view = _View(hooks)
    # Read first: after a change in place it is made anew, and `register_hook`, which makes room for its
    # hooks before it reads it, crashes there (torch 2.13).
    assert tensor.grad_fn is not None
    tensor.register_hook(view.of_view)
    # Without a node of the base no second hook is needed: autograd refuses a change in place there,
    # and also where one function made several views.
    node = tensor._base.grad_fn if tensor._base is not None else None
    if node is not None:
        node.register_prehook(view.of_base)


def tensors_left(
    inputs: Sequence[Any],
    attributes: Sequence[dict[str, Any]],
    outputs: Sequence[torch.Tensor],
    *,
    since: int,
) -> list[torch.Tensor]:
    """Return what a forward that has just ended computed and left elsewhere than in its outputs, where others can see it.

    That is in containers and objects among the inputs, or in attributes of modules; in containers among these only if
    autograd has recorded something since the outputs. Two containers deep, of up to 1000 elements each. outputs: those
    that require a gradient. since: the number of the first node that the forward may have recorded.
    """
    next_number = next_sequence_number()
    newest = since - 1
    for tensor in outputs:
        if (node := tensor.grad_fn) is not None:
            newest = max(newest, sequence_number(node))
    holders = [each for each in inputs if type(each) not in _HOLD_NOTHING]
    if next_number > newest + 1:  # rarely
        holders += attributes
    else:
        holders += [each for each in attributes if torch.Tensor in map(type, each.values())]
    if not holders:  # nearly always
        return []
    known = set(map(id, outputs))
    left = {id(each): each for each in itertools.chain.from_iterable(map(_tensors_in, holders))}
    return [
        tensor
        for key, tensor in left.items()
        if (node := tensor.grad_fn) is not None
        and since <= sequence_number(node) < next_number
        and key not in known
    ]


def _tensors_in(tree: Any, levels: int = 4) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    if not levels or isinstance(tree, torch.Tensor | torch.nn.Module | type):
        return
    if isinstance(tree, Mapping):
        values: Any = tree.values()
    elif isinstance(tree, list | tuple | collections.deque):
        values = tree
    elif type(tree).__module__.partition(".")[0] in _OTHERS:
        return
    else:
        values = getattr(tree, "__dict__", {}).values()
    if len(values) <= _MOST_VALUES:
        for value in [*values]:
            yield from _tensors_in(value, levels - 1)


_HOLD_NOTHING = frozenset((torch.Tensor, torch.nn.Parameter, bool, int, float, str, type(None)))
_OTHERS = frozenset(("builtins", "torch", "fullshard"))  # whose objects are not the program's
_MOST_VALUES = 1000


def is_captured(leaf: torch.Tensor) -> bool:
    """Return whether `torch.autograd.grad` is running, and returns the gradient of this leaf."""
    if current_graph_task_id() == -1:
        return False  # no backward: a pipeline schedule asks for the reduction itself
    try:
        will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node)
    except RuntimeError:  # raised for leaves in `torch.autograd.grad` (torch 2.13)
        return True
    return False
