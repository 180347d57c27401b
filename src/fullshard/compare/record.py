"""Write and read a recorded step, as a folder that all ranks see.

    folder/replay.json            what it is, and of how many ranks
    folder/model/                 the model before the step: a checkpoint, for any number of ranks
    folder/rank-1/inputs-0.pt     what a rank's first forward was called with, and its surroundings
    folder/rank-1/event-0.pt      what it computed in its first forward or backward (`tape.Event`)

Files are complete under their names: those of a process that died are there up to where it was. Inputs are
pickled as they are, so replay a record only if you trust whoever wrote it.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fullshard.checkpoint.read import naming_malformed
from fullshard.compare.tape import Event, Seen
from fullshard.errors import CheckpointError
from fullshard.json_files import as_typed, read_json
from fullshard.versions import VERSION

_FORMAT = 1
_FACTS = "replay.json"
_OF_RANK = re.compile(r"rank-\d+/(inputs|event)-\d+\.(pt|part)")


class ReplayFacts(NamedTuple):
    """What a record is of. precision: in which dtypes units computed, other than their parameters'."""

    format: int
    fullshard: str
    torch: str
    ranks: int
    model: str
    device: str
    precision: tuple[str, ...]


class Inputs(NamedTuple):
    """What a forward was called with.

    module: its path, "" for the root. method: its name. surroundings: see there.
    """

    module: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    surroundings: dict[str, Any]


class ReplayRecord:
    """A folder with a recorded step, to write or to read."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def clear(self) -> None:
        """Make room for a new record. Raises CheckpointError where something else is."""
        self.folder.mkdir(parents=True, exist_ok=True)
        facts = self.folder / _FACTS
        if any(self.folder.iterdir()) and not _is_record(facts):
            raise CheckpointError(
                f"{self.folder}: has other files, and no recorded step. Name an empty folder."
            )
        facts.unlink(missing_ok=True)
        for path in self.folder.glob("rank-*/*"):
            if _OF_RANK.fullmatch(f"{path.parent.name}/{path.name}"):
                path.unlink()

    def write_facts(self, **facts: Any) -> None:
        """Write what the record is of: all fields of `ReplayFacts` that follow from the model."""
        values = {"format": _FORMAT, "fullshard": VERSION, "torch": str(torch.__version__), **facts}
        _written(
            self.folder / _FACTS,
            lambda path: path.write_text(json.dumps(values, indent=1)),
        )

    def facts(self) -> ReplayFacts:
        """Return what was recorded. Raises CheckpointError if nothing was, or by another version."""
        try:
            values = read_json(self.folder / _FACTS, dict[str, Any], CheckpointError)
        except CheckpointError:  # not there, or not complete
            raise CheckpointError(
                f"{self.folder}: no recorded step. Record one with fullshard.debug(replay={str(self.folder)!r})."
            ) from None
        if values.get("format") != _FORMAT:
            raise CheckpointError(
                f"{self.folder}: was recorded by fullshard {values.get('fullshard')}, in a form that this version "
                "does not read. Replay it with that version."
            )
        facts: ReplayFacts = as_typed(
            [values.get(name) for name in ReplayFacts._fields],
            ReplayFacts,
            lambda why: CheckpointError(
                f"{self.folder / 'replay.json'}: {why}. Record the step again."
            ),
        )
        return facts

    def write_inputs(self, rank: int, number: int, inputs: Inputs) -> None:
        _written(self._file(rank, f"inputs-{number}"), lambda p: torch.save(tuple(inputs), p))

    def inputs(self, rank: int, number: int, device: torch.device) -> Inputs | None:
        """Return what a forward was called with, on a device; None if there was no such forward."""
        path = self._file(rank, f"inputs-{number}")
        if not path.exists():
            return None
        with naming_malformed(f"{path}: what was recorded is"):
            return Inputs(*torch.load(path, map_location=_to(device), weights_only=False))

    def write_event(self, rank: int, number: int, event: Event) -> None:
        values = vars(event) | {"seen": [tuple(seen) for seen in event.seen]}
        _written(self._file(rank, f"event-{number}"), lambda p: torch.save(values, p))

    def events(self, rank: int) -> list[Event]:
        """Return what a rank did, in order."""
        found: list[Event] = []
        with contextlib.suppress(FileNotFoundError):
            while True:
                path = self._file(rank, f"event-{len(found)}")
                with naming_malformed(f"{path}: what was recorded is"):
                    values = torch.load(path, map_location="cpu", weights_only=True)
                    seen = [Seen(*each) for each in values.pop("seen")]
                    found.append(Event(seen=seen, **values))
        return found

    def _file(self, rank: int, name: str) -> Path:
        return self.folder / f"rank-{rank}" / f"{name}.pt"


def _is_record(facts: Path) -> bool:  # of any version
    try:
        return {"format", "fullshard"} <= read_json(facts, dict[str, Any], CheckpointError).keys()
    except CheckpointError:
        return False


def _written(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file that has its name once all of it is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    write(unfinished)
    unfinished.replace(path)


def _to(device: torch.device) -> Callable[[Any, str], Any]:
    """Put what was on an accelerator on this device, and leave what was on the host there."""

    def place(storage: Any, location: str) -> Any:
        if location == "cpu" or device.type == "cpu":
            return storage
        return storage.to(device=device)

    return place
