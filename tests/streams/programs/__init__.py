"""Programs that the engine is proven on: every way to train that moves memory between lanes."""

from tests.streams.programs import (
    collectives,
    extensions,
    fully_sharded,
    interrupted,
    optim_state,
    wrapped,
)
from tests.streams.programs.common import PROGRAMS, SMALL, run_program

__all__ = [
    "PROGRAMS",
    "SMALL",
    "collectives",
    "extensions",
    "fully_sharded",
    "interrupted",
    "optim_state",
    "run_program",
    "wrapped",
]
