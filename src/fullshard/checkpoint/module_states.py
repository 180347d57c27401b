"""What modules keep beside parameters and buffers: `torch.nn.Module.get_extra_state`.

In a checkpoint it is extra state under a key of its own: {"model": {"0._extra_state": what module 0 returned}}.
"""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from fullshard.plan.units import without_compile
from fullshard.state.structure import Structure

MODULE_STATES = "module_states"  # their key among the extra state
STATE_NAME = (
    "_extra_state"  # what PyTorch adds to a module's name. Source: torch/nn/modules/module.py
)

States = dict[str, dict[str, Any]]  # by section and name


def module_states(structures: Mapping[str, Structure]) -> States:
    """Return what the modules of models keep of their own. Without any, it is empty."""
    found: States = {}
    for section, structure in structures.items():
        _warn_of_own_ways(structure)
        for name, module in _named(structure, "get_extra_state"):
            found.setdefault(section, {})[name] = module.get_extra_state()
    return found


def match_module_states(
    structures: Mapping[str, Structure], saved: Mapping[str, Mapping[str, Any]]
) -> tuple[list[tuple[nn.Module, Any]], list[str]]:
    """Return the modules that are to get a state, with it, and what does not fit.

    saved: of all models of the files. As in PyTorch, a module that has ``set_extra_state`` has to get one.
    """
    matched: list[tuple[nn.Module, Any]] = []
    problems = []
    for section, structure in structures.items():
        left = dict(saved.get(section, {}))
        for name, module in _named(structure, "set_extra_state"):
            if name in left:
                matched.append((module, left.pop(name)))
            else:
                problems.append(f"missing {section}/{name}")
        problems += [f"unexpected {section}/{name}" for name in left]
    return matched, problems


def _named(structure: Structure, method: str) -> Iterator[tuple[str, Any]]:
    """Yield the modules whose class defines a method, by the names of their state."""
    for prefix, module in structure.modules:
        own = getattr(type(module), method, None)
        if own is not getattr(nn.Module, method):
            yield without_compile(prefix) + STATE_NAME, module


def _warn_of_own_ways(structure: Structure) -> None:
    classes = {
        type(module).__qualname__
        for _, module in structure.modules
        if type(module)._save_to_state_dict is not nn.Module._save_to_state_dict
    }
    if classes:
        warnings.warn(
            f"{', '.join(sorted(classes))}: fill state dicts in a way of their own (_save_to_state_dict). "
            "A checkpoint has their parameters, persistent buffers and get_extra_state(), and nothing else: "
            "return other state from get_extra_state().",
            UserWarning,
            stacklevel=2,
        )
