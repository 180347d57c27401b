"""From `--log` to loggers: what a name means, and several as one that cannot end a run."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fullshard.tools.config import OptionError
from fullshard.tools.import_path import check_import_path, function_at
from fullshard.tools.loggers.interface import RunInfo, RunLogger
from fullshard.tools.loggers.known import KNOWN


def check_loggers(names: Sequence[str]) -> None:
    """Raise OptionError for a name that means nothing, or whose package is not installed."""
    for name in names:
        if name in KNOWN:
            if importlib.util.find_spec(name) is None:
                raise OptionError(f"--log {name}: is not installed: pip install {name}.")
            continue
        if ":" not in name:
            raise OptionError(
                f"--log {name}: choose from {', '.join(KNOWN)}, or name a class as MODULE:CLASS."
            )
        check_import_path(name)


def make_loggers(names: Sequence[str], note: Callable[[str], None]) -> "Loggers":
    """Make the loggers of these names. note: takes a line for the user.

    Raises OptionError for a class that is not there or is no RunLogger; what its module raises passes.
    """
    return Loggers([(name, _make(name)) for name in names], note)


def _make(name: str) -> RunLogger:
    if name in KNOWN:
        return KNOWN[name]()
    made = function_at(name)()
    if not isinstance(made, RunLogger):
        raise OptionError(
            f"--log {name}: made a {type(made).__name__}, which is no fullshard.tools.loggers.RunLogger."
        )
    return made


class Loggers:
    """Several loggers as one. One that raises is reported and left out."""

    def __init__(
        self, loggers: Sequence[tuple[str, RunLogger]], note: Callable[[str], None]
    ) -> None:
        self._loggers = list(loggers)
        self._note = note

    def start(self, run: RunInfo) -> None:
        """Have all begin."""
        self._each(lambda logger: logger.start(run))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Tell all of a step."""
        self._each(lambda logger: logger.log(step, values))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Have all end."""
        self._each(lambda logger: logger.finish(summary))
        self._loggers = []

    def _each(self, call: Callable[[RunLogger], None]) -> None:
        for name, logger in list(self._loggers):
            try:
                call(logger)
            except Exception as error:  # of a network, a disk, a program: training goes on
                self._loggers.remove((name, logger))
                self._note(
                    f"--log {name}: failed, and is left out from here: {type(error).__name__}: {error}"
                )
