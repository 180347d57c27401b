"""What a checkpoint holds beside tensors of models and optimizers, as JSON: options, scheduler states, the user's own.

Plain JSON for None, booleans, numbers, strings, lists and dicts with string keys. Anything else is an
object with one key that begins with "$":

    {"$tuple": [1, 2]}   {"$dict": [[key, value], ...]}   {"$float": "nan"}   {"$bytes": base64}
    {"$scalar": 0.5, "dtype": "F32"}     a 0-dim tensor
    {"$tensor": "extra/ema/w"}           a tensor of the checkpoint
    {"$array": "extra/rng/0"}            the same, as a NumPy array
    {"$dtype": "BF16"}                   a torch.dtype
    {"$counter": [[key, count], ...]}    a collections.Counter

Nothing is pickled, so nothing that is loaded can run code.
"""

import base64
import collections
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.manifest import DTYPES, dtype_name
from fullshard.errors import CheckpointError
from fullshard.plan.units import without_compile
from fullshard.state.holdings import HeldTensor
from fullshard.state.structure import Structure

# Far from what Python's stack and its conversion of integers to text allow.
MOST_LEVELS = 200
_MOST_BITS = 8192


def _refuse(name: str, tensor: Any) -> None:
    shape = tuple(getattr(tensor, "shape", ()))
    raise CheckpointError(
        f"{name} is a tensor of shape {shape} inside a value that holds none. Give tensors in extra=, or keep "
        "them in an optimizer's state."
    )


def encoded(value: Any, name: str, keep: Callable[[str, Any], object] = _refuse) -> Any:
    """Return what stands for a value in JSON.

    name: of the value, as a path. keep: is called with a name and the value of each tensor inside, plain,
    DTensor or `HeldTensor`; they are refused without it. Names are paths too; where two would be one, as of the keys 1 and "1", the later
    gets "~2" at its end.
    Raises CheckpointError, with the path, for a value that JSON has no form for, or that is nested too deep.
    """
    taken: set[str] = set()

    def named(path: str, tensor: Any) -> str:
        own, number = path, 1
        while own in taken:
            number += 1
            own = f"{path}~{number}"
        taken.add(own)
        keep(own, tensor)
        return own

    try:
        tree = _encoded(value, name, named)
        is_too_deep = _levels(tree) > MOST_LEVELS
    except RecursionError:
        is_too_deep = True
    if is_too_deep:
        raise CheckpointError(
            f"{name} cannot be saved: it contains itself, or is nested deeper than the {MOST_LEVELS} levels that "
            "a checkpoint holds (a tuple takes two)."
        )
    return tree


def _levels(tree: Any) -> int:
    """Return how deep lists and dicts are nested in each other."""
    count, level = 0, [tree]
    while level := [each for each in level if isinstance(each, list | dict)]:
        count += 1
        level = [v for each in level for v in (each.values() if isinstance(each, dict) else each)]
    return count


def _encoded(value: Any, name: str, keep: Callable[[str, Any], str]) -> Any:
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        if value.bit_length() > _MOST_BITS:
            raise CheckpointError(f"{name} is an integer of more than {_MOST_BITS} bits.")
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, torch.Tensor):
        return _encoded_tensor(value, name, keep)
    if isinstance(value, HeldTensor):
        return {"$tensor": keep(name, value)}
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value, name)}
    if isinstance(value, torch.Size) or type(value) is tuple:
        return {"$tuple": [_encoded(v, f"{name}/{n}", keep) for n, v in enumerate(value)]}
    if type(value) is list:
        return [_encoded(each, f"{name}/{n}", keep) for n, each in enumerate(value)]
    if type(value) is collections.Counter:  # a milestone scheduler's, which counts on it
        pairs = [
            [_encoded(k, f"{name}/key", keep), _encoded(n, name, keep)] for k, n in value.items()
        ]
        return {"$counter": pairs}
    if isinstance(value, Mapping):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encoded(each, f"{name}/{key}", keep) for key, each in value.items()}
        pairs = [
            [_encoded(key, f"{name}/key", keep), _encoded(each, f"{name}/{key}", keep)]
            for key, each in value.items()
        ]
        return {"$dict": pairs}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return _encoded(value.item(), name, keep)
    if numpy is not None and type(value) is numpy.ndarray:
        tensor = torch.from_numpy(value.copy()).reshape(value.shape)
        fields = _encoded_tensor(tensor, name, keep)
        return {"$array": fields.pop("$tensor", None), **fields}
    raise CheckpointError(
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint does not "
        "hold. Give numbers, strings, tensors, lists, tuples or dicts of them, or an object with "
        "state_dict() and load_state_dict()."
    )


def decoded(value: Any, tensor: Callable[[str], Any]) -> Any:
    """Return the value that `encoded` was given. tensor: returns a tensor of the checkpoint by name."""
    if isinstance(value, list):
        return [decoded(each, tensor) for each in value]
    if not isinstance(value, dict):
        return value
    kind = next((key for key in value if key.startswith("$")), None)
    if kind is None:
        return {key: decoded(each, tensor) for key, each in value.items()}
    content = value[kind]
    if kind == "$array" and content is None:
        return _scalar(value["$scalar"], value["dtype"]).numpy()
    simple: dict[str, Callable[[], Any]] = {
        "$tuple": lambda: tuple(decoded(each, tensor) for each in content),
        "$dict": lambda: {decoded(k, tensor): decoded(v, tensor) for k, v in content},
        "$counter": lambda: collections.Counter(
            {decoded(k, tensor): decoded(n, tensor) for k, n in content}
        ),
        "$float": lambda: float(content),
        "$bytes": lambda: base64.b64decode(content, validate=True),
        "$dtype": lambda: DTYPES[content],
        "$scalar": lambda: _scalar(content, value["dtype"]),
        "$tensor": lambda: tensor(content),
        "$array": lambda: tensor(content).numpy(),
    }
    if kind not in simple:
        raise CheckpointError(f"has a value of the unknown kind {kind!r:.80}")
    return simple[kind]()


def check_encoded(values: Mapping[str, Any], dtypes: Mapping[str, torch.dtype]) -> None:
    """Decode a manifest's values on trial. dtypes: of the checkpoint's tensors.

    Raises CheckpointError for what no checkpoint has, and whatever Python raises for a value of another form.
    """

    def stand_in(name: str) -> torch.Tensor:
        if name not in dtypes:
            raise CheckpointError(f"has no tensor {name}, which a value names")
        return torch.empty(0, dtype=dtypes[name], device="cpu")

    if _levels(values) > MOST_LEVELS + 5:  # those around a value
        raise CheckpointError(f"has values of more than {MOST_LEVELS} levels")
    trees = [values.get("metadata", {}), *values.get("extra", {}).values()]
    for by_rank in values.get("extra_by_rank", {}).values():
        trees += by_rank.values()
    for own in values.get("optimizers", {}).values():
        trees += [own["groups"], *own["scalars"].values()]
    for tree in trees:
        decoded(tree, stand_in)
    for tree in module_state_trees(values):
        for _, states in items(tree):
            items(states)


def module_state_trees(values: Mapping[str, Any]) -> list[Any]:
    """Return what modules have saved of their own: one tree by model and module, or one of each rank."""
    by_rank = values.get("extra_by_rank", {}).get(MODULE_STATES, {})
    return [values.get("extra", {}).get(MODULE_STATES, {}), *by_rank.values()]


def items(tree: Any) -> list[tuple[str, Any]]:
    """Return the keys and the values of an encoded dict. Raises TypeError or ValueError for anything else."""
    if [*tree] == ["$dict"]:
        return [(str(key), value) for key, value in tree["$dict"]]
    if not isinstance(tree, dict) or any(key.startswith("$") for key in tree):
        raise TypeError(f"{tree!r:.80} is no dict")
    return [*tree.items()]


def tensor_names(value: Any) -> list[str]:
    """Return the names of the tensors inside an encoded value."""
    found: list[str] = []
    if isinstance(value, list):
        for each in value:
            found += tensor_names(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            if key in ("$tensor", "$array") and isinstance(each, str):
                found.append(each)
            else:
                found += tensor_names(each)
    return found


def _encoded_tensor(
    value: torch.Tensor, name: str, keep: Callable[[str, torch.Tensor], str]
) -> dict[str, Any]:
    if value.layout is not torch.strided or value.is_meta or value.is_quantized:
        raise CheckpointError(
            f"{name} is a tensor of layout {value.layout} and {value.dtype} on {value.device}, which a "
            "checkpoint does not hold. Convert it to one with plain memory."
        )
    if value.dim() == 0 and type(value) in (torch.Tensor, torch.nn.Parameter):
        number = value.item()
        return {"$scalar": _encoded(number, name, keep), "dtype": dtype_name(value.dtype, name)}
    return {"$tensor": keep(name, value)}


def _scalar(content: Any, dtype: str) -> torch.Tensor:
    number = float(content["$float"]) if isinstance(content, dict) else content
    return torch.tensor(number, dtype=DTYPES[dtype], device="cpu")


# What modules keep beside parameters and buffers: `torch.nn.Module.get_extra_state`
#
# It is extra state under a key of its own: {"model": {"0._extra_state": what module 0 returned}}.

MODULE_STATES = "module_states"  # their key among the extra state
# What PyTorch adds to a module's name. Source: torch/nn/modules/module.py
STATE_NAME = "_extra_state"

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


# Random generators of this process, as extra state

RNG = "rng"  # their key among the extra state


def random_states() -> dict[str, Any]:
    """Return the states of the random generators of this process: Python's, NumPy's and torch's."""
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": (version, torch.tensor(numbers, dtype=torch.int64, device="cpu"), gauss),
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = tuple(numpy.random.get_state())
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        module = torch.get_device_module(accelerator.type)
        states["device"] = module.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Continue random generators from states; those of generators that are not here are left out."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    torch.set_rng_state(states["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(states["numpy"])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and "device" in states:
        torch.get_device_module(accelerator.type).set_rng_state(states["device"])
