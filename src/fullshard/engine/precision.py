"""Casts at a unit's boundary, and the differentiable tensors in nested inputs and outputs."""

import copy
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fullshard.policies import MixedPrecisionPolicy
from fullshard.torch_private import pytree


def cast_inputs(
    policy: MixedPrecisionPolicy, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast floating-point inputs to the compute dtype, if the policy asks for it."""
    if policy.param_dtype is None or not policy.cast_forward_inputs:
        return args, kwargs
    return map_tensors(_caster(policy.param_dtype), (args, kwargs))


def cast_outputs(policy: MixedPrecisionPolicy, outputs: Any) -> Any:
    """Cast floating-point outputs to the output dtype, if the policy asks for it."""
    if policy.output_dtype is None:
        return outputs
    return map_tensors(_caster(policy.output_dtype), outputs)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Apply a function to every tensor in nested containers, dataclasses among them.

    Returns ``tree`` itself if the function returns every tensor as it is.
    """
    # The two most common cases need no flattening.
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if type(tree) is tuple and _are_tensors(tree):
        mapped = tuple(map(function, tree))
        return mapped if any(map(operator.is_not, mapped, tree)) else tree
    leaves, spec = pytree.tree_flatten(tree, is_leaf=_is_plain_dataclass)
    changed = False
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            new: Any = function(leaf)
        elif _is_plain_dataclass(leaf):
            new = _map_dataclass(function, leaf)
        else:
            continue
        changed |= new is not leaf
        leaves[position] = new
    return pytree.tree_unflatten(leaves, spec) if changed else tree


def differentiable_tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers that require a gradient, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree] if tree.requires_grad else []
    if type(tree) is tuple and _are_tensors(tree):
        return [tensor for tensor in tree if tensor.requires_grad]
    found: list[torch.Tensor] = []

    def visit(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(visit, tree)
    return found


def replace_differentiable(tree: Any, replacements: Iterator[torch.Tensor]) -> Any:
    """Replace the tensors that `differentiable_tensors` found, in the same order."""
    return map_tensors(lambda tensor: next(replacements) if tensor.requires_grad else tensor, tree)


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


def _map_dataclass(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return the dataclass with its tensors mapped; itself if none of them changed."""
    changes = {}
    for name in type(value).__dataclass_fields__:
        old = getattr(value, name, None)
        new = map_tensors(function, old)
        if new is not old:
            changes[name] = new
    if not changes:
        return value
    # Not dataclasses.replace: it reruns __init__, which may derive fields or refuse some.
    result = copy.copy(value)
    for name, new in changes.items():
        object.__setattr__(result, name, new)
    return result
