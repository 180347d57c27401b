"""Values that are no model tensors, as JSON: optimizer options, scheduler states, the user's own.

Plain JSON for None, booleans, numbers, strings, lists and dicts with string keys. Anything else is an
object with one key that begins with "$":

    {"$tuple": [1, 2]}   {"$dict": [[key, value], ...]}   {"$float": "nan"}   {"$bytes": base64}
    {"$scalar": 0.5, "dtype": "F32"}     a 0-dim tensor
    {"$tensor": "extra/ema/w"}           a tensor of the checkpoint
    {"$array": "extra/rng/0"}            the same, as a NumPy array
    {"$dtype": "BF16"}                   a torch.dtype

Nothing is pickled, so nothing that is loaded can run code.
"""

import base64
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fullshard.checkpoint.manifest import DTYPES, dtype_name
from fullshard.errors import CheckpointError
from fullshard.state.holdings import HeldTensor


def encoded(value: Any, name: str, keep: Callable[[str, Any], object]) -> Any:
    """Return what stands for a value in JSON.

    name: of the value, as a path. keep: is called with the name and the value of each tensor inside, plain,
    DTensor or `HeldTensor`.
    Raises CheckpointError, with the path, for a value that JSON has no form for.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, torch.Tensor):
        return _encoded_tensor(value, name, keep)
    if isinstance(value, HeldTensor):
        keep(name, value)
        return {"$tensor": name}
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value, name)}
    if isinstance(value, torch.Size) or type(value) is tuple:
        return {"$tuple": [encoded(v, f"{name}/{n}", keep) for n, v in enumerate(value)]}
    if type(value) is list:
        return [encoded(each, f"{name}/{n}", keep) for n, each in enumerate(value)]
    if isinstance(value, Mapping):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encoded(each, f"{name}/{key}", keep) for key, each in value.items()}
        pairs = [
            [encoded(key, f"{name}/key", keep), encoded(each, f"{name}/{key}", keep)]
            for key, each in value.items()
        ]
        return {"$dict": pairs}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return encoded(value.item(), name, keep)
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
        "$float": lambda: float(content),
        "$bytes": lambda: base64.b64decode(content, validate=True),
        "$dtype": lambda: DTYPES[content],
        "$scalar": lambda: _scalar(content, value["dtype"]),
        "$tensor": lambda: tensor(content),
        "$array": lambda: tensor(content).numpy(),
    }
    if kind not in simple:
        raise CheckpointError(f"The checkpoint has a value of the unknown kind {kind!r}.")
    return simple[kind]()


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
    value: torch.Tensor, name: str, keep: Callable[[str, torch.Tensor], object]
) -> dict[str, Any]:
    if value.layout is not torch.strided or value.is_meta or value.is_quantized:
        raise CheckpointError(
            f"{name} is a tensor of layout {value.layout} and {value.dtype} on {value.device}, which a "
            "checkpoint does not hold. Convert it to one with plain memory."
        )
    if value.dim() == 0 and type(value) in (torch.Tensor, torch.nn.Parameter):
        number = value.item()
        return {"$scalar": encoded(number, name, keep), "dtype": dtype_name(value.dtype, name)}
    keep(name, value)
    return {"$tensor": name}


def _scalar(content: Any, dtype: str) -> torch.Tensor:
    number = float(content["$float"]) if isinstance(content, dict) else content
    return torch.tensor(number, dtype=DTYPES[dtype], device="cpu")


def _without(fields: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: each for name, each in fields.items() if name != key}
