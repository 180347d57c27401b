"""What a logger is told of a run. Subclass `RunLogger`, and name it: `--log my_package.logs:MyLogger`."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """A run that begins or goes on.

    folder: where everything of it is; a logger may keep files there. config: every option, by name, as in
    config.json. done: steps that are behind it: what was logged of later ones is of an attempt that was
    given up.
    """

    folder: Path
    config: Mapping[str, Any]
    done: int

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name


class RunLogger:
    """Is told of a run, on rank 0; a subclass overrides what it wants to know.

    What a method raises is reported once, and the logger is left out from then on: training goes on.
    """

    def start(self, run: RunInfo) -> None:
        """Begin, before the first step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take a step's numbers; steps count from 1.

        loss, lr, grad_norm, seconds, tokens_per_second, peak_memory (bytes), and where it was measured
        val_loss. Losses are in nats per token.
        """

    def finish(self, summary: Mapping[str, Any]) -> None:
        """End. summary: what summary.json holds; its ``status`` is "finished", "stopped" or "failed"."""
