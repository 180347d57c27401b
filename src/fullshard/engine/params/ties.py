"""Keeping parameters tied while they get memory: torch gives each place a parameter of its own.

``to_empty()`` of a tied model on the meta device leaves two parameters where there was one. Nothing says so, and
from then on they are trained apart.
"""

import contextlib
from collections.abc import Iterable, Iterator

from torch import nn


@contextlib.contextmanager
def keeping_ties(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Register one parameter, after the body, wherever modules shared one on the meta device before."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                places.setdefault(id(parameter), []).append((module, name))
    tied = [each for each in places.values() if len(each) > 1]
    yield
    for (first, its_name), *others in tied:
        for module, name in others:
            module._parameters[name] = first._parameters[its_name]
