"""A check that all ranks have built the same model, from the same code.

At a model's first use, each rank enters a digest of its description in the flight records of its groups. Where
digests differ, ranks post their descriptions in the store that they met in, and every rank raises an
error with the first line that differs. Where they do not, nothing is exchanged.
"""

import dataclasses
import functools
import inspect
import itertools
import operator
import platform
import re
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fullshard.engine.params.managed import ShardHolder
from fullshard.engine.unit import Unit
from fullshard.peers.flight_record import FlightRecord
from fullshard.torch_private import WithoutSubclasses
from fullshard.versions import VERSION

# Of a unit's configuration, what every rank has to have set alike.
_OPTIONS = (
    "mp_policy",
    "offload_policy",
    "reshard_after_forward",
    "is_kept",
    "reshard_after_backward",
    "gradient_divide_factor",
    "style",
    "unused",
    "may_be_skipped",
)

_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.)")  # in the path of a module


def check_alike(
    units: Sequence[Unit], kinds: Sequence[type], records: Iterable[FlightRecord]
) -> None:
    """Compare a model with that of the other ranks of each group. Every rank must call it.

    kinds: the classes of its modules. Raises DivergenceError, here or in the next wait, if one has built another model or runs other
    code. The message has the first difference.
    """
    # Without numbers in paths: what a rank leaves out (ignored modules) moves those behind it.
    parameters = [_NUMBER.sub("#", line) for line in _parameters(units)]
    digest = zlib.crc32("\n".join([*_settings(units, kinds), *parameters]).encode())
    # The flight record outlives the model, so it must not keep the units.
    references = [weakref.ref(unit) for unit in units]

    def lines() -> list[str]:
        left = [unit for each in references if (unit := each()) is not None]
        return [*_settings(left, kinds), *_parameters(left)]

    for record in records:
        record.enter_compared("first use of the model", digest, lines)


class FreezeWatch:
    """Tells the other ranks when this one freezes parameters, or trains them again.

    What is frozen decides which gradients are reduced. Ranks that freeze the same parameters before the
    same step enter the same; others differ there, by name, before anything is reduced.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._frozen = self._now()

    def enter_changes(self, records: Iterable[FlightRecord]) -> None:
        """Enter what has changed since the last call, if anything has."""
        frozen = self._now()
        if frozen == self._frozen:
            return
        holders = list(self._holders())
        before = dict(zip(holders, self._frozen, strict=False))
        now = dict(zip(holders, frozen, strict=True))
        params = [param for unit in self._units for param in unit.params]
        changed = [param for param in params if before.get(param.holder) != now[param.holder]]
        self._frozen = frozen
        lines = [f"{p.name} is {'trained' if p.requires_grad else 'frozen'} now" for p in changed]
        others = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
        what = f"{lines[0]}{others}" if lines else "other parameters"
        digest = zlib.crc32("\n".join(lines).encode())
        for record in records:
            record.enter_compared(what, digest, lambda: lines)

    def _now(self) -> list[bool]:
        # By a map, which asks all in one go: asked in every forward.
        with WithoutSubclasses():
            return list(map(operator.attrgetter("sharded.requires_grad"), self._holders()))

    def _holders(self) -> Iterator[ShardHolder]:
        of_units = map(operator.attrgetter("params.holders"), self._units)
        return itertools.chain.from_iterable(of_units)


def _settings(units: Sequence[Unit], kinds: Sequence[type]) -> list[str]:
    python = ".".join(platform.python_version_tuple()[:2])
    lines = [f"torch {torch.__version__}", f"fullshard {VERSION}", f"Python {python}"]
    classes: set[Any] = {base for kind in kinds for base in kind.__mro__}
    lines += sorted(set(map(_source_of, classes)) - {""})
    for unit in units:
        mesh = unit.mesh.plan
        head = f"{unit.path} is a unit"
        lines.append(f"{head} over {mesh.shard_size} x {mesh.replicate_size} ranks")
        for name in _OPTIONS:
            lines.append(f"{head} with {name}={_shown(getattr(unit.config, name))}")
    return lines


def _parameters(units: Sequence[Unit]) -> list[str]:
    return [
        f"{param.name} is {tuple(param.shape)}, {param.local.dtype}, "
        f"{'trainable' if param.requires_grad else 'frozen'}"
        for unit in units
        for param in unit.params
    ]


def _shown(value: Any) -> str:
    """Return a text that is the same in every process for equal values."""
    if dataclasses.is_dataclass(value):
        fields = (f for f in dataclasses.fields(value) if f.repr)  # else it is each rank's own
        inner = (f"{f.name}={_shown(getattr(value, f.name))}" for f in fields)
        return f"{type(value).__name__}({', '.join(inner)})"
    if callable(value):  # its representation has an address
        return getattr(value, "__qualname__", type(value).__qualname__)
    return str(value)


@functools.cache
def _source_of(kind: type) -> str:
    """Return a class's file with a checksum of it; empty if it has none, or one of known version."""
    if kind.__module__.partition(".")[0] in ("torch", "fullshard", "builtins"):
        return ""
    try:
        path = inspect.getsourcefile(kind)
        data = Path(path).read_bytes() if path else None
    except (TypeError, OSError):  # built in, or made by a program
        return ""
    return f"{kind.__module__}: file with checksum {zlib.crc32(data):08x}" if data else ""
