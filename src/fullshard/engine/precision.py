"""Casts at a unit's boundary, and the differentiable tensors in nested inputs and outputs."""

import copy
import functools
import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from fullshard.policies import MixedPrecisionPolicy
from fullshard.torch_private import pytree


class Swap(NamedTuple):
    """A container whose tensors were changed in place: what is there now and what was before, by the `id` of the first.

    Both are kept: the program may drop what is there, and another object take its `id`.
    """

    container: Any
    pairs: dict[int, tuple[Any, Any]]


def undo_swaps(swaps: list[Swap]) -> None:
    """Put tensors back that are still in their containers; what a program has put there since stays."""
    for container, pairs in reversed(swaps):
        for key, value in _items(container):
            if id(value) in pairs:
                _put(container, key, pairs[id(value)][1])


def cast_inputs(
    policy: MixedPrecisionPolicy,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    swaps: list[Swap] | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast floating-point inputs to the compute dtype, if the policy asks for it. swaps: see `map_tensors`."""
    if policy.param_dtype is None or not policy.cast_forward_inputs:
        return args, kwargs
    return map_tensors(_caster(policy.param_dtype), (args, kwargs), swaps)


def cast_outputs(policy: MixedPrecisionPolicy, outputs: Any) -> Any:
    """Cast floating-point outputs to the output dtype, if the policy asks for it."""
    if policy.output_dtype is None:
        return outputs
    return map_tensors(_caster(policy.output_dtype), outputs)


def map_tensors(
    function: Callable[[torch.Tensor], torch.Tensor],
    tree: Any,
    swaps: list[Swap] | None = None,
    *,
    opens_all: bool = True,
) -> Any:
    """Apply a function to every tensor in nested containers, dataclasses among them.

    swaps: lists, dicts and dataclasses are changed in place and listed there, so that a module gets the caller's
    own, and what it writes to them is not lost; `undo_swaps` puts back what they had. Without it they are copied.
    opens_all: go into other classes that pytree knows, too. These are always copied.
    Returns ``tree`` itself if the function returns every tensor as it is.
    """
    # The two most common cases need no look at containers.
    if isinstance(tree, torch.Tensor):
        return function(tree)
    kind = type(tree)
    if kind in _PLAIN:
        return tree
    if kind is tuple and _are_tensors(tree):
        mapped = tuple(map(function, tree))
        return mapped if any(map(operator.is_not, mapped, tree)) else tree
    if _is_mutable(tree) or _is_plain_dataclass(tree):
        changes = {
            key: (old, new)
            for key, old in _items(tree)
            if (new := map_tensors(function, old, swaps, opens_all=opens_all)) is not old
        }
        if not changes:
            return tree
        # Of dataclasses not dataclasses.replace: it reruns __init__, which may derive fields or refuse some.
        result = copy.copy(tree) if swaps is None or _is_frozen(tree) else tree
        for key, (_, new) in changes.items():
            _put(result, key, new)
        if result is tree and swaps is not None:
            swaps.append(Swap(tree, {id(new): (new, old) for old, new in changes.values()}))
        return result
    if isinstance(tree, tuple) and (kind is tuple or hasattr(kind, "_make")):
        leaves, rebuild = [*tree], tuple if kind is tuple else kind._make
    elif opens_all and kind in pytree.SUPPORTED_NODES:
        node = pytree.SUPPORTED_NODES[kind]
        leaves, context = node.flatten_fn(tree)
        rebuild = functools.partial(_unflatten, node, context)
    else:
        return tree
    inner = [map_tensors(function, leaf, swaps, opens_all=opens_all) for leaf in leaves]
    return rebuild(inner) if any(map(operator.is_not, inner, leaves)) else tree


def _unflatten(node: Any, context: Any, leaves: list[Any]) -> Any:
    return node.unflatten_fn(leaves, context)


def differentiable_tensors(tree: Any, *, opens_all: bool = True) -> list[torch.Tensor]:
    """Return the tensors in nested containers that require a gradient, in order. opens_all: see `map_tensors`."""
    if isinstance(tree, torch.Tensor):
        return [tree] if tree.requires_grad else []
    if type(tree) is tuple and _are_tensors(tree):
        return [tensor for tensor in tree if tensor.requires_grad]
    found: list[torch.Tensor] = []

    def visit(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(visit, tree, opens_all=opens_all)
    return found


def replace_tensors(tree: Any, replacements: Mapping[int, torch.Tensor], swaps: list[Swap]) -> Any:
    """Replace those tensors, by `id`, that `differentiable_tensors` found without ``opens_all``. swaps: see `map_tensors`."""
    return map_tensors(
        lambda tensor: replacements.get(id(tensor), tensor), tree, swaps, opens_all=False
    )


def _are_tensors(values: tuple[Any, ...]) -> bool:
    for value in values:  # noqa: SIM110  (a third of the cost of `all`)
        if not isinstance(value, torch.Tensor):
            return False
    return True


def _caster(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def _is_plain_dataclass(leaf: Any) -> bool:
    """Return whether this is an instance of a dataclass that pytree does not know how to flatten."""
    return (
        hasattr(type(leaf), "__dataclass_fields__")
        and not isinstance(leaf, type)
        and type(leaf) not in pytree.SUPPORTED_NODES
    )


def _is_mutable(tree: Any) -> bool:
    """Return whether this is a list, a deque or a dict, or a class of dicts that pytree knows (as Transformers' outputs)."""
    kind = type(tree)
    return kind in _MUTABLE or (isinstance(tree, dict) and kind in pytree.SUPPORTED_NODES)


def _is_frozen(tree: Any) -> bool:
    """Return whether this is a dataclass that no program writes to."""
    return not _is_mutable(tree) and type(tree).__dataclass_params__.frozen


_PLAIN = frozenset((bool, int, float, str, type(None)))
_MUTABLE = frozenset((list, deque, dict, OrderedDict, defaultdict))


def _items(container: Any) -> list[tuple[Any, Any]]:
    """Return keys, positions or names of fields, with what is there."""
    if isinstance(container, dict):
        return list(container.items())
    if isinstance(container, (list, deque)):
        return list(enumerate(container))
    return [(name, getattr(container, name, None)) for name in type(container).__dataclass_fields__]


def _put(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, (dict, list, deque)):
        container[key] = value
    else:
        object.__setattr__(container, key, value)  # a frozen one's copy has no other way
