"""What one process has recorded, as frozen values that go through JSON; tensors are in files beside it."""

import dataclasses
from collections.abc import Mapping, Sequence

_OF_FOLLOWERS = ("PeerLostError", "PeerTimeoutError", "DivergenceError", "DistBackendError")
_SAID_BY_FOLLOWERS = (
    "gloo/transport",
    "Connection reset by peer",
    "Connection closed by peer",
    "waits for other ranks",
)


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
    backward: which of the step's backwards it ends with, from 0.
    """

    step: int
    rank: int
    loss: float
    batch: str = ""
    outputs: tuple[Output, ...] = ()
    written: tuple[str, ...] = ()
    backward: int = 0

    @property
    def place(self) -> tuple[int, int, int]:
        """Step, rank and backward, by which two sides' parts are compared."""
        return self.step, self.rank, self.backward


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Why a process ended before its last step.

    calls: methods of modules that were under way, outermost first: "blocks.0.forward".
    line: the innermost that is not of a library: "train.py:40"; empty if there is none.
    """

    phase: str
    step: int | None
    kind: str
    text: str
    calls: tuple[str, ...] = ()
    trace: str = ""
    line: str = ""

    @property
    def may_follow(self) -> bool:
        """Whether it may come from another rank's."""
        said = any(text in self.text for text in _SAID_BY_FOLLOWERS)
        return said or self.kind in _OF_FOLLOWERS


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """A unit of the sharded model: names of its parameters, and what their gradients are divided by."""

    name: str
    parameters: tuple[str, ...]
    divide_factor: float


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One process, from the model's first values to its last step, or to its failure.

    own: fingerprint of every parameter as this process made it; of a script's, of those that it has not changed
        after it gave them to be sharded.
    initial: the same before the first step: of whole parameters after sharding (rank 0 and the one process).
    buffers: fingerprints of buffers before the first step.
    ties: names that share a parameter.
    seconds: of each step, without the recording between steps.
    seeds: whether a script seeds torch's generator before it builds its models.
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
    seeds: bool = False
    warnings: tuple[str, ...] = ()
    failure: Failure | None = None


def merged(runs: Sequence[Run]) -> Run:
    """Return several ranks' runs of one side as one: the first rank's, with the parts of all, and what failed first."""
    if not runs:
        return Run()
    failures = [run.failure for run in runs if run.failure is not None]
    return dataclasses.replace(
        runs[0],
        parts=tuple(part for run in runs for part in run.parts),
        warnings=tuple(dict.fromkeys(text for run in runs for text in run.warnings)),
        failure=min(failures, key=lambda failure: failure.may_follow, default=None),
    )
