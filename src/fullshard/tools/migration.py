"""Build a user's wrapped model and report what it would be with `fully_shard`."""

import contextlib
import sys

from torch import nn

import fullshard
from fullshard.tools.config import OptionError
from fullshard.tools.groups import default_group
from fullshard.tools.import_path import check_import_path, function_at


def report_on(target: str, *, under_torchrun: bool) -> fullshard.MigrationReport:
    """Call a function given as MODULE:FUNCTION, and report on the model it returns.

    PyTorch's names are fullshard's meanwhile. Sets up a Gloo group if importing the module did not:
    of torchrun's ranks, or of this process alone. What the function prints goes to stderr.

    Raises OptionError for a target that names no such function, StateError if what it returns is
    not wrapped.
    """
    check_import_path(target)
    fullshard.install()
    with contextlib.redirect_stdout(sys.stderr):
        build = function_at(target)
        with default_group("gloo", under_torchrun=under_torchrun):
            model = build()
            if not isinstance(model, nn.Module):
                kind = type(model).__name__
                raise OptionError(f"{target} returned {kind}, not a model (nn.Module).")
            return fullshard.migrate_report(model)
