"""Values that are no model tensors, as JSON: optimizer options, scheduler states, the user's own.

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
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fullshard.checkpoint.manifest import DTYPES, dtype_name
from fullshard.checkpoint.module_states import MODULE_STATES
from fullshard.errors import CheckpointError
from fullshard.state.holdings import HeldTensor

# Far from what Python's stack and its conversion of integers to text allow.
MOST_LEVELS = 200
_MOST_BITS = 8192


def encoded(value: Any, name: str, keep: Callable[[str, Any], object]) -> Any:
    """Return what stands for a value in JSON.

    name: of the value, as a path. keep: is called with a name and the value of each tensor inside, plain,
    DTensor or `HeldTensor`. Names are paths too; where two would be one, as of the keys 1 and "1", the later
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
        tensor_name = _encoded_tensor(
            torch.from_numpy(value.copy()).reshape(value.shape), name, keep
        )
        return {"$array": tensor_name.get("$tensor"), **_without(tensor_name, "$tensor")}
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


def _without(fields: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: each for name, each in fields.items() if name != key}
