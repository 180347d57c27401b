"""Functions of a user's program, given as MODULE:FUNCTION."""

import importlib
import sys
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from fullshard.plan.units import first_names
from fullshard.tools.config import OptionError

_MOST_NAMED = 10


def check_import_path(target: str) -> None:
    """Raise OptionError for a target that is not of the form MODULE:FUNCTION."""
    module, _, function = target.partition(":")
    if not (function and all(part.isidentifier() for part in module.split("."))):
        raise OptionError(
            f"{target!r}: expected MODULE:FUNCTION, such as my_package.train:build (a module's name, not its file)."
        )


def function_at(target: str) -> Callable[..., Any]:
    """Import MODULE and return its FUNCTION; modules in the current folder are found, as by `python -m`.

    Raises OptionError if there is no such module or function; what the module itself raises passes.
    """
    check_import_path(target)
    if "" not in sys.path:
        sys.path.insert(0, "")
    module_name, _, name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks something itself
        raise OptionError(
            f"{target}: no module {error.name!r}. It is looked for in the current folder and among "
            "installed packages."
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        there = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module.__name__
        ]
        near = get_close_matches(name, there, n=_MOST_NAMED)
        others = sorted({*there} - {*near}, key=lambda key: (key.startswith("_"), key))
        known = first_names([*near, *others], _MOST_NAMED) or "none"
        raise OptionError(f"{target}: {module_name} has no function {name!r}; it has {known}.")
    return function
