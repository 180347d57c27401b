"""Functions, arguments and results as bytes, from one process of this machine to another.

`pickle` names functions and classes instead of sending them. Those of `__main__` (a notebook's cell, a
prompt, a script) and those within functions are not found by name elsewhere: the package cloudpickle,
where it is installed, sends them whole. A class that went to a rank so comes back as the same class.
"""

import importlib.util
import io
import pickle
import types
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.engine.params.flat import FlatParameter
from fullshard.errors import LaunchError

_NEEDED = "Install cloudpickle, which sends such functions and classes: pip install cloudpickle"


class _RefusedError(Exception):
    """A value that does not travel, for a reason that pickling would not find."""


def pack(value: object) -> bytes:
    """Return a value as bytes; tensors as copies of their own elements, in host memory.

    Raises LaunchError for what cannot be pickled, and for what is sharded: one rank's part of it
    means nothing elsewhere.
    """
    buffer = io.BytesIO()
    try:
        _pickler()(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except _RefusedError as reason:
        raise LaunchError(str(reason)) from None
    except RecursionError:
        raise
    except Exception as error:  # whatever a class's own `__reduce__` raises
        kind, text = type(error).__name__, str(error).rstrip(".")
        hint = "" if _has_cloudpickle() else f" {_NEEDED}."
        raise LaunchError(f"it cannot be pickled: {kind}: {text}.{hint}") from error
    return buffer.getvalue()


def unpack(packed: bytes) -> Any:
    """Return the value that `pack` has made bytes of."""
    return pickle.loads(packed)


def _has_cloudpickle() -> bool:
    return importlib.util.find_spec("cloudpickle") is not None


def _pickler() -> Any:
    """Make the class that pickles: cloudpickle's, or Python's own, with rules of ours."""
    base: Any = pickle.Pickler
    if _has_cloudpickle():
        base = importlib.import_module("cloudpickle").Pickler
    by_name = base is pickle.Pickler

    class Pickler(base):  # type: ignore[misc]  # one of two classes
        """Says how values travel for which the base has no rule, or another one."""

        def reducer_override(self, value: Any) -> Any:
            _refuse(value, by_name=by_name)
            if type(value) is torch.Tensor and value.layout is torch.strided:
                return _alone(value).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return NotImplemented if by_name else super().reducer_override(value)

    return Pickler


def _refuse(value: Any, *, by_name: bool) -> None:
    """Raise _RefusedError for what is sharded, and for what will not be found by its name."""
    if isinstance(value, (DTensor, FlatParameter)):
        kind, shape = type(value).__name__, tuple(value.shape)
        raise _RefusedError(
            f"a {kind} of shape {shape} is sharded: it means nothing outside of its ranks. Return whole "
            "values: parameter.full_tensor(), or dict(fullshard.iter_full_state(model)), "
            "collected on every rank."
        )
    is_named = isinstance(value, (types.FunctionType, type))
    if by_name and is_named and value.__module__ == "__main__":
        raise _RefusedError(
            f"{value.__qualname__} is defined in a notebook, at a prompt or in the script itself, where "
            f"ranks do not find it by its name. {_NEEDED}; or put it into a module, and import it."
        )


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values in host memory, in a storage that holds no others."""
    plain = tensor.detach().cpu()
    if plain.untyped_storage().nbytes() > plain.nbytes:
        plain = plain.clone()
    return plain
