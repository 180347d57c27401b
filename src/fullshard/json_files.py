"""JSON: that every reader takes (`json_text`, `write_whole`), and reading what somebody else may have written, or damaged.

Nothing of that is believed before it was looked at:

    fields = read_json(path, dict[str, Any], lambda why: OptionError(f"{path}: {why}."))

The caller's function makes the error, as each room has classes and advice of its own. Values are compared with
types as they are written in code: a dataclass for an object, a NamedTuple for a list with an item for each field.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import stat
import types
import typing
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

# Nothing that is written here is nested as deep, and Python's stack allows a few times as much.
_MOST_LEVELS = 250
_MOST_NBYTES = 1 << 30
LARGEST = 2**63
"""An integer beyond it is no count, size, time or seed."""

Refuse = Callable[[str], Exception]
_Check = Callable[[Any], Any]


def read_text(path: Path, refuse: Refuse, *, most_nbytes: int = _MOST_NBYTES) -> str:
    """Return a file's text. refuse: makes the error to raise of what is wrong."""
    try:
        # Without waiting for whoever writes to a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            is_readable = stat.S_ISREG(status.st_mode) and status.st_size <= most_nbytes
            text = file.read().decode() if is_readable else ""
    except FileNotFoundError as error:
        raise refuse("is not there") from error
    except OSError as error:
        raise refuse(f"cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise refuse(f"is not text in UTF-8 ({error})") from error
    except ValueError as error:  # a path with a zero byte
        raise refuse(f"cannot be read ({error})") from error
    if not stat.S_ISREG(status.st_mode):
        raise refuse("is no regular file")
    if status.st_size > most_nbytes:
        raise refuse(f"has {status.st_size} bytes, so it is not what its name says")
    return text


def read_json(path: Path, kind: Any, refuse: Refuse, *, most_nbytes: int = _MOST_NBYTES) -> Any:
    """Return what a file holds, if it is of a type. refuse: makes the error to raise of what is wrong."""
    return parse_json(read_text(path, refuse, most_nbytes=most_nbytes), kind, refuse)


def parse_json(text: str | bytes, kind: Any, refuse: Refuse) -> Any:
    """Return what JSON says, if it is of a type. refuse: makes the error to raise of what is wrong."""
    try:
        value = json.loads(text, object_pairs_hook=without_repeats)
    except ValueError as error:
        raise refuse(f"is no JSON ({error})") from error
    except RecursionError:
        raise refuse("is nested too deep") from None
    level = [value]
    for _ in range(_MOST_LEVELS):
        level = [part for each in level if isinstance(each, dict | list) for part in _parts(each)]
    if level:
        raise refuse("is nested too deep")
    return as_typed(value, kind, refuse)


def as_typed(value: Any, kind: Any, refuse: Refuse) -> Any:
    """Return a value of JSON as one of a type. refuse: makes the error to raise of what is wrong."""
    try:
        return _check_of(kind)(value)
    except _FormError as error:
        raise refuse(str(error)) from error.__cause__


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, whose names are each there once. Raises ValueError."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a name twice")
    return found


def _parts(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value


class _FormError(Exception):
    """A value of another form. The path to it grows from its end."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.path: list[str] = []

    def __str__(self) -> str:
        return f"{''.join(reversed(self.path)).removeprefix('.') or 'it'} {self.what}"


@functools.cache
def _check_of(kind: Any) -> _Check:
    """Return what checks a value of JSON, and returns it as a type has it."""
    if kind is Any:
        return lambda value: value
    if kind in _PLAIN:
        return functools.partial(_plain, kind)
    arguments = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if isinstance(kind, types.UnionType) or origin is typing.Union:
        (own,) = [_check_of(each) for each in arguments if each is not type(None)]
        return lambda value: None if value is None else own(value)
    if origin is tuple and arguments[-1] is not ...:
        return functools.partial(_row, tuple, [_check_of(each) for each in arguments], 0)
    if origin in (list, tuple):
        return functools.partial(_items, origin, _check_of(arguments[0]))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return functools.partial(_values, _check_of(arguments[1]))
    hints = typing.get_type_hints(kind)
    checks = {name: _check_of(hint) for name, hint in hints.items()}
    if dataclasses.is_dataclass(kind):
        needed = {
            field.name
            for field in dataclasses.fields(kind)
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        }
        return functools.partial(_fields, typing.cast(Any, kind), checks, needed)
    if typing.is_typeddict(kind):
        return functools.partial(_fields, dict, checks, kind.__required_keys__)
    make = functools.partial(_call, kind)
    return functools.partial(_row, make, list(checks.values()), len(kind._field_defaults))


_PLAIN = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
}


def _plain(kind: Any, value: Any) -> Any:
    found = type(value)
    if found is not kind and not (kind is float and found is int):
        raise _FormError(f"is {value!r:.60}, not {_PLAIN[kind]}")
    if found is int and not -LARGEST <= value < LARGEST:
        raise _FormError("is a number that is far too large")
    return kind(value) if kind is float else value


def _items(kind: Callable[[Any], Any], check: _Check, value: Any) -> Any:
    if not isinstance(value, list):
        raise _FormError(f"is {value!r:.60}, not a list")
    found: list[Any] = []
    try:
        for each in value:
            found.append(check(each))  # noqa: PERF401 - its length says where a fault is
    except _FormError as error:
        error.path.append(f"[{len(found)}]")
        raise
    return kind(found)


def _row(make: Callable[[Any], Any], checks: list[_Check], num_defaults: int, value: Any) -> Any:
    """Make a tuple of a list that has an item for each of its fields."""
    if not isinstance(value, list) or not len(checks) - num_defaults <= len(value) <= len(checks):
        raise _FormError(f"is {value!r:.60}, not a list of {len(checks)}")
    return make([check(each) for check, each in zip(checks, value, strict=False)])


def _call(kind: Callable[..., Any], values: list[Any]) -> Any:
    return kind(*values)


def _values(check: _Check, value: Any) -> Any:
    if not isinstance(value, dict):
        raise _FormError(f"is {value!r:.60}, not an object")
    found: dict[str, Any] = {}
    for key, each in value.items():
        try:
            found[key] = check(each)
        except _FormError as error:
            error.path.append(f".{key:.60}")
            raise
    return found


def _fields(
    make: Callable[..., Any], checks: Mapping[str, _Check], needed: Set[str], value: Any
) -> Any:
    """Make a value of an object that has a type's fields, and, for a TypedDict, perhaps others."""
    if not isinstance(value, dict):
        raise _FormError(f"is {value!r:.60}, not an object")
    if lacking := sorted(needed - value.keys()):
        raise _FormError(f"lacks {', '.join(lacking)}")
    others = {} if make is dict else dict.fromkeys(value.keys() - checks.keys())
    if others:
        raise _FormError(f"has {', '.join(sorted(others))!s:.80}, which is not known here")
    found = {}
    for key, each in value.items():
        try:
            found[key] = checks[key](each) if key in checks else each
        except _FormError as error:
            error.path.append(f".{key:.60}")
            raise
    try:
        return make(**found)
    except ValueError as error:  # what a dataclass finds in values that do not fit together
        raise _FormError(str(error)) from error


def json_text(value: Any, **layout: Any) -> str:
    """Write a value as `json.dumps` does; numbers that are not finite become text, "nan"."""
    return json.dumps(_finite(value), allow_nan=False, **layout)


def write_whole(path: Path, text: str) -> None:
    """Write a file that appears when it is complete; a link stays one. Raises OSError.

    What is no regular file, such as a pipe or a device, is written into: nothing must take its place.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = Path(os.path.realpath(path))
    partial = path.with_name(f"{path.name}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
