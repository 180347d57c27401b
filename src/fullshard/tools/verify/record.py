"""What a process records: facts, as frozen values that go through JSON, and the tensors of each step.

    folder/alone/run.json       facts
    folder/alone/step-1.pt      tensors by key: "gradient/NAME", "buffer/RANK/NAME", ...
    folder/rank-1/...
    folder/whole-1/...          instead of alone, of a script: a rank where nothing is sharded
    folder/rank-1/start.pt      of a script: what its models begin with

Keys are the same on both sides, so that one is compared with the other by key. Files are read without
unpickling objects (`weights_only`), a tensor at a time.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fullshard.json_files import read_json, write_whole
from fullshard.tools.config import OptionError

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

    @property
    def name(self) -> str:
        """Its name among the outputs of one part."""
        return f"{self.path}#{self.call}"


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """The forward of one part of a batch: that of one rank.

    step: from 1. batch: fingerprint of the part. written: parameters that had other values after the forward.
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
    def is_nothing(self) -> bool:
        """Whether the script ran, and there was nothing to compare."""
        return self.kind == "NothingToCompareError"

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


@dataclasses.dataclass(slots=True)
class Run:
    """One process, from the model's first values to its last step, or to its failure.

    own: fingerprint of every parameter as this process made it; of a script's, of those that it has not changed
        after it gave them to be sharded.
    initial: the same before the first step: of whole parameters after sharding (rank 0 and the one process).
    buffers: fingerprints of buffers before the first step.
    ties: names that share a parameter.
    seconds: of each step, without the recording between steps.
    bits: of each step, fingerprints of gradients, as they are compared between engines.
    seeds: whether a script seeds torch's generator before it builds its models.
    peak_nbytes: above what the process held before it made the model; None where nothing says so.
    """

    own: dict[str, str] = dataclasses.field(default_factory=dict)
    initial: dict[str, str] = dataclasses.field(default_factory=dict)
    buffers: dict[str, str] = dataclasses.field(default_factory=dict)
    ties: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    units: list[Unit] = dataclasses.field(default_factory=list)
    parts: list[Part] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    bits: list[dict[str, str]] = dataclasses.field(default_factory=list)
    peak_nbytes: int | None = None
    seeds: bool = False
    warnings: list[str] = dataclasses.field(default_factory=list)
    failure: Failure | None = None


def merged(runs: Sequence[Run]) -> Run:
    """Return several ranks' runs of one side as one: the first rank's, with the parts of all, and what failed first."""
    if not runs:
        return Run()
    failures = [run.failure for run in runs if run.failure is not None]
    return dataclasses.replace(
        runs[0],
        parts=[part for run in runs for part in run.parts],
        bits=[
            {name: bits for of_rank in step for name, bits in of_rank.items()}
            for step in zip(*(run.bits for run in runs), strict=False)
        ],
        warnings=list(dict.fromkeys(text for run in runs for text in run.warnings)),
        failure=min(failures, key=lambda failure: failure.may_follow, default=None),
    )


class Diary:
    """What a process has recorded so far, and what it is doing; written however the process ends.

    paths: of the model's modules by id, once there is one, to say in which module it failed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self.run = Run()
        self.phase = "starting"
        self.step: int | None = None
        self.paths: Mapping[int, str] = {}

    def write(self) -> None:
        """Write the facts, all at once, so that what is there is complete."""
        write_whole(self._folder / "run.json", json.dumps(dataclasses.asdict(self.run)))

    def write_tensors(self, name: str, content: Mapping[str, Any]) -> None:
        """Write tensors as a file: "step-1", or "start", with the prefix of a model's names before it."""
        torch.save(content, self._folder / f"{name}.pt")


def read_run(folder: Path) -> Run | None:
    """Return a process's facts; None if it ended without writing them."""
    path = folder / "run.json"
    if not path.exists():
        return None
    run: Run = read_json(path, Run, lambda why: OptionError(f"{path}: {why}."))
    return run


def read_tensors(folder: Path, name: str) -> dict[str, Any]:
    """Return what a file has, mapped from it; empty if the process did not get that far."""
    path = folder / f"{name}.pt"
    return torch.load(path, weights_only=True, mmap=True) if path.exists() else {}


def alone_folder(folder: Path) -> Path:
    return folder / "alone"


def rank_folder(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"


def whole_folder(folder: Path, rank: int) -> Path:
    """Return where a rank writes that runs a script with nothing sharded."""
    return folder / f"whole-{rank}"


def keyed(kind: str, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors by key: kind "buffer/1" and name "norm.mean" give "buffer/1/norm.mean"."""
    return {f"{kind}/{name}": tensor for name, tensor in named.items()}
