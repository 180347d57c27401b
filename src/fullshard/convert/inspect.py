"""What is in a checkpoint, whether it is whole, and what two differ in, in whichever form they are.

`inspect_checkpoint`, `verify_checkpoint`, `diff_checkpoints`.
"""

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.folder import Location
from fullshard.checkpoint.read import Reader, SavedState
from fullshard.convert.opening import (
    Progress,
    counting,
    form_of,
    open_state,
    parts_of,
    read_box,
)
from fullshard.errors import CheckpointError
from fullshard.state.host_memory import bytes_of


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSummary:
    """A tensor. nbytes: of all of it. placement: how the ranks that saved it had divided it."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    placement: str
    aliases: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """What is in a checkpoint, as its files say; tensors are not read.

    path: of the checkpoint itself, where a folder of several was asked for. form: of the files.
    tensors: by name with its section. facts: step, metadata, created, ranks, versions.
    optimizers: by section, the class and the options of each group. extra: keys.
    file_nbytes: of each file, where the form says it.
    """

    path: Path | str
    form: str
    tensors: Mapping[str, TensorSummary]
    facts: Mapping[str, Any]
    optimizers: Mapping[str, Any]
    extra: tuple[str, ...]
    file_nbytes: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def sections(self) -> dict[str, list[TensorSummary]]:
        """Return the tensors of each section: "model", "optimizer", "extra"."""
        found: dict[str, list[TensorSummary]] = {}
        for name, tensor in self.tensors.items():
            found.setdefault(name.partition("/")[0], []).append(tensor)
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        return {
            **dataclasses.asdict(self),
            "path": str(self.path),
            "nbytes": self.nbytes,
        }


def inspect_checkpoint(path: Location) -> CheckpointSummary:
    """Say what is in a checkpoint, a directory of DCP, a file of torch.save, or safetensors.

    Tensors are not read. Raises CheckpointError if there is nothing of the kind, or it is damaged.
    """
    with open_state(path) as state:
        tensors = {
            name: TensorSummary(
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                tensor.nbytes,
                tensor.placement,
                tensor.aliases,
            )
            for name, tensor in state.tensors.items()
        }
        values = state.values
        files = state.manifest.files if isinstance(state, Reader) else ()
        facts = ("step", "metadata", "created", "ranks", "versions", "converted_from")
        optimizers = {
            section: {
                "class": own.get("class"),
                "groups": [
                    {"num_params": len(group["params"]), "options": group["options"]}
                    for group in own.get("groups", ())
                ],
            }
            for section, own in values.get("optimizers", {}).items()
        }
        extra = {*values.get("extra", {}), *values.get("extra_by_rank", {})}
        return CheckpointSummary(
            state.location,
            form_of(state),
            tensors,
            {key: values[key] for key in facts if values.get(key) is not None},
            optimizers,
            tuple(sorted(extra)),
            {file.name: file.nbytes for file in files},
        )


@dataclasses.dataclass(frozen=True, slots=True)
class VerifiedCheckpoint:
    """What reading every byte has shown.

    has_checksums: whether bytes were compared with what was written, or could only be read. faults: by
    file or tensor, what is wrong with it.
    """

    path: Path | str
    nbytes: int
    has_checksums: bool
    faults: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointDifference:
    """Something that two checkpoints differ in.

    kind: "only in the first", "only in the second", "shape", "dtype", "values", or "value" for what is no
    tensor. num_elements: that differ. largest: the largest difference of two elements.
    """

    name: str
    kind: str
    first: str = ""
    second: str = ""
    num_elements: int = 0
    largest: float = 0.0


def verify_checkpoint(path: Location, *, progress: Progress = None) -> VerifiedCheckpoint:
    """Read every byte of a checkpoint and compare it with its checksum.

    For forms without checksums (torch.distributed.checkpoint, safetensors), that all of it can be read.
    Raises CheckpointError if it cannot even be opened.
    """
    with open_state(path) as state:
        total = sum(tensor.nbytes for tensor in state.tensors.values())
        faults: dict[str, str] = {}
        count = counting(progress, total)
        for name, nbytes, fault in _checked(state):
            if fault is not None:
                faults.setdefault(name, str(fault))
            count(nbytes)
        return VerifiedCheckpoint(state.location, total, isinstance(state, Reader), faults)


def diff_checkpoints(
    first: Location,
    second: Location,
    *,
    sections: Collection[str] = (),
    tolerance: float = 0.0,
    progress: Progress = None,
) -> list[CheckpointDifference]:
    """List what two checkpoints differ in: tensors bit for bit, values, names.

    However they are divided: only whole tensors are compared. sections: only these ("model",
    "optimizer", "extra"), all if empty. tolerance: the largest difference of two elements that counts as
    none. Raises CheckpointError if one cannot be read.
    """
    with open_state(first) as one, open_state(second) as two:
        ours, theirs = _by_alias(one, sections), _by_alias(two, sections)
        found = [
            CheckpointDifference(name, "only in the first") for name in ours if name not in theirs
        ]
        found += [
            CheckpointDifference(name, "only in the second") for name in theirs if name not in ours
        ]
        common = [name for name in ours if name in theirs]
        sizes = {name: one.tensors[ours[name]].nbytes for name in common}
        count = counting(progress, sum(sizes.values()))
        for name in common:
            difference = _tensor_difference(name, (one, ours[name]), (two, theirs[name]), tolerance)
            found += [difference] if difference is not None else []
            count(sizes[name])
        found += _value_differences(one, two, sections)
    return sorted(found, key=lambda each: (each.kind, each.name))


def _checked(state: SavedState) -> Iterator[tuple[str, int, CheckpointError | None]]:
    """Yield each file or tensor, the bytes read, and what is wrong."""
    if isinstance(state, Reader):
        yield from state.verify()
        return
    for name, tensor in state.tensors.items():
        for box in parts_of(tensor):
            fault = None
            try:
                read_box(state, name, box)
            except CheckpointError as error:
                fault = error
            yield name, box.numel * tensor.dtype.itemsize, fault


def _by_alias(state: SavedState, sections: Collection[str]) -> dict[str, str]:
    """Return the names of tensors by all of their names, so that it does not matter which of tied ones is first."""
    return {
        each: name
        for name, tensor in state.tensors.items()
        for each in (name, *tensor.aliases)
        if not sections or name.partition("/")[0].partition(".")[0] in sections
    }


def _tensor_difference(
    name: str, one: tuple[SavedState, str], two: tuple[SavedState, str], tolerance: float
) -> CheckpointDifference | None:
    first, second = (state.tensors[own_name] for state, own_name in (one, two))
    if first.shape != second.shape:
        return CheckpointDifference(name, "shape", str(first.shape), str(second.shape))
    if first.dtype != second.dtype:
        return CheckpointDifference(name, "dtype", str(first.dtype), str(second.dtype))
    count, largest = 0, 0.0
    for box in parts_of(first):
        a, b = read_box(*one, box), read_box(*two, box)
        if bytes_of(a) == bytes_of(b):
            continue
        apart = _distance(a, b)
        differing = apart > tolerance
        count += int(differing.sum())
        largest = max(largest, float(apart.max()))
    if count == 0:
        return None
    return CheckpointDifference(name, "values", num_elements=count, largest=largest)


def _distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return how far elements are apart; infinitely if one of them alone is no number."""
    a, b = (x.to(torch.complex128 if x.is_complex() else torch.float64) for x in (a, b))
    apart = (a - b).abs()
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, apart.nan_to_num(nan=math.inf))


def _value_differences(
    one: SavedState, two: SavedState, sections: Collection[str]
) -> Iterator[CheckpointDifference]:
    for key in ("step", "metadata", "optimizers", "extra", "extra_by_rank"):
        if sections and key.partition("_")[0].rstrip("s") not in sections:
            continue
        ours, theirs = (dict(_leaves(state.values.get(key), key)) for state in (one, two))
        for name in dict.fromkeys((*ours, *theirs)):
            if name not in ours or name not in theirs:
                if name.startswith("optimizers/") and name.endswith("/class"):
                    continue  # other forms do not say it
                kind = "only in the first" if name in ours else "only in the second"
                yield CheckpointDifference(name, kind)
            elif ours[name] != theirs[name]:
                yield CheckpointDifference(name, "value", repr(ours[name]), repr(theirs[name]))


def _leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for key, each in tree.items():
            yield from _leaves(each, f"{name}/{key}")
    elif isinstance(tree, list) and any(isinstance(each, dict | list) for each in tree):
        for number, each in enumerate(tree):
            yield from _leaves(each, f"{name}/{number}")
    elif tree not in (None, {}, []):
        yield name, tree
