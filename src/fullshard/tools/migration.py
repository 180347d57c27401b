"""Build a user's wrapped model and report what it would be with `fully_shard`."""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

import fullshard
from fullshard.tools.config import OptionError


def report_on(target: str, *, under_torchrun: bool) -> fullshard.MigrationReport:
    """Call a function given as MODULE:FUNCTION, and report on the model it returns.

    PyTorch's names are fullshard's meanwhile. Sets up a Gloo group if importing the module did not:
    of torchrun's ranks, or of this process alone. What the function prints goes to stderr.

    Raises OptionError for a target that names no such function, StateError if what it returns is
    not wrapped.
    """
    if not all(target.partition(":")):
        raise OptionError(f"{target!r}: expected MODULE:FUNCTION, such as my_package.train:build.")
    fullshard.install()
    sys.path.insert(0, "")  # as `python -m` does: modules beside where the command was typed
    with contextlib.redirect_stdout(sys.stderr):
        build = _function(target)
        with _gloo_group(under_torchrun=under_torchrun):
            model = build()
            if not isinstance(model, nn.Module):
                kind = type(model).__name__
                raise OptionError(f"{target} returned {kind}, not a model (nn.Module).")
            return fullshard.migrate_report(model)


@contextlib.contextmanager
def _gloo_group(*, under_torchrun: bool) -> Iterator[None]:
    """Set up the default group, if there is none, for a while."""
    if dist.is_initialized():
        yield
        return
    if under_torchrun:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _function(target: str) -> Callable[[], Any]:
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
        there = sorted(
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module.__name__
        )
        raise OptionError(
            f"{target}: {module_name} has no function {name!r}; it has {', '.join(there) or 'none'}."
        )
    return function
