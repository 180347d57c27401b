"""A process's record: a folder with its facts, and the tensors of each step.

    folder/alone/run.json       facts
    folder/alone/step-0.pt      tensors by key: "gradient/NAME", "buffer/RANK/NAME", ...
    folder/rank-1/...
    folder/whole-1/...          instead of alone, of a script: a rank where nothing is sharded
    folder/rank-1/start.pt      of a script: what its models begin with

Keys are the same on both sides, so that one is compared with the other by key. Files are read without
unpickling objects (`weights_only`), a tensor at a time.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fullshard.json_files import read_json
from fullshard.tools.config import OptionError
from fullshard.tools.verify.facts import Failure, Part, Run


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

    def note(self, **changes: object) -> None:
        """Add facts."""
        self.run = dataclasses.replace(self.run, **changes)  # type: ignore[arg-type]

    def note_part(self, part: Part) -> None:
        """Add a part."""
        self.note(parts=(*self.run.parts, part))

    def write_step(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the tensors of a step."""
        own = {key: tensor.detach().cpu().clone() for key, tensor in tensors.items()}
        torch.save(own, _step_file(self._folder, step))

    def write_start(self, prefix: str, content: Mapping[str, Any]) -> None:
        """Write what a model begins with. prefix: of its names."""
        torch.save(content, _start_file(self._folder, prefix))

    def write(self, failure: Failure | None = None) -> None:
        """Write the facts, all at once, so that what is there is complete."""
        if failure is not None:
            self.note(failure=failure)
        unfinished = self._folder / "run.json.part"
        unfinished.write_text(json.dumps(dataclasses.asdict(self.run)))
        unfinished.rename(self._folder / "run.json")


def read_run(folder: Path) -> Run | None:
    """Return a process's facts; None if it ended without writing them."""
    path = folder / "run.json"
    if not path.exists():
        return None
    run: Run = read_json(path, Run, lambda why: OptionError(f"{path}: {why}."))
    return run


def read_step(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a step by key, mapped from their file; empty if it was not reached."""
    path = _step_file(folder, step)
    if not path.exists():
        return {}
    tensors: dict[str, torch.Tensor] = torch.load(path, weights_only=True, mmap=True)
    return tensors


def read_start(folder: Path, prefix: str) -> dict[str, Any]:
    """Return what a model begins with; empty if it was not reached."""
    path = _start_file(folder, prefix)
    if not path.exists():
        return {}
    content: dict[str, Any] = torch.load(path, weights_only=True, mmap=True)
    return content


def alone_folder(folder: Path) -> Path:
    """Return where the one process writes."""
    return folder / "alone"


def rank_folder(folder: Path, rank: int) -> Path:
    """Return where a rank writes."""
    return folder / f"rank-{rank}"


def whole_folder(folder: Path, rank: int) -> Path:
    """Return where a rank writes that runs a script with nothing sharded."""
    return folder / f"whole-{rank}"


def _start_file(folder: Path, prefix: str) -> Path:
    return folder / f"{prefix}start.pt"


def _step_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step}.pt"
