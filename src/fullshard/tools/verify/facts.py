"""What one process has recorded, as frozen values that go through JSON; tensors are in files beside it."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """What a module returned in a forward.

    path: of the module in the model before sharding; "" is the model. call: counts its calls, from 0.
    kind: the module's class. dtype, shape: of the first tensor in the output.
    is_random: whether random numbers were drawn meanwhile, or the module holds a generator of its own.
    """

    path: str
    call: int
    kind: str
    dtype: str
    shape: tuple[int, ...]
    is_random: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """The forward of one part of a batch: that of one rank.

    batch: fingerprint of the part. written: parameters that had other values after the forward.
    """

    step: int
    rank: int
    loss: float
    batch: str = ""
    outputs: tuple[Output, ...] = ()
    written: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Why a process ended before its last step.

    calls: methods of modules that were under way, outermost first: "blocks.0.forward".
    """

    phase: str
    step: int | None
    kind: str
    text: str
    calls: tuple[str, ...] = ()
    trace: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """A unit of the sharded model: names of its parameters, and what their gradients are divided by."""

    name: str
    parameters: tuple[str, ...]
    divide_factor: float


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One process, from the model's first values to its last step, or to its failure.

    own: fingerprint of every parameter as this process made it.
    initial: the same before the first step: of whole parameters after sharding (rank 0 and the one process).
    buffers: fingerprints of buffers before the first step.
    ties: names that share a parameter.
    seconds: of each step, without the recording between steps.
    peak_nbytes: above what the process held before it made the model; None where nothing says so.
    """

    own: Mapping[str, str] = dataclasses.field(default_factory=dict)
    initial: Mapping[str, str] = dataclasses.field(default_factory=dict)
    buffers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ties: tuple[tuple[str, ...], ...] = ()
    units: tuple[Unit, ...] = ()
    parts: tuple[Part, ...] = ()
    seconds: tuple[float, ...] = ()
    peak_nbytes: int | None = None
    warnings: tuple[str, ...] = ()
    failure: Failure | None = None


def run_from(fields: Mapping[str, Any]) -> Run:
    """Return the run that `dataclasses.asdict` made these fields of, after their way through JSON."""
    return typing.cast(Run, _value(Run, fields))


def _value(kind: Any, given: Any) -> Any:
    """Make a value of an annotated type from lists and dicts."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        fields = {name: _value(hints[name], each) for name, each in given.items()}
        return typing.cast(Any, kind)(**fields)
    arguments = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return given if given is None else _value(arguments[0], given)
    if typing.get_origin(kind) is tuple:
        return tuple(_value(arguments[0], each) for each in given)
    return given
