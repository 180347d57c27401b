"""Exporting: a folder that Transformers loads, written file by file from a model or a checkpoint.

Rank 0 writes. The others send it their parts of a bucket at a time, so no rank ever has the model.
"""

import contextlib
import dataclasses
import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from fullshard.checkpoint.drafts import new_tag
from fullshard.checkpoint.folder import Folder, Location, NewFile, disk_path, folder_at
from fullshard.checkpoint.manager import latest_checkpoint
from fullshard.checkpoint.manifest import MANIFEST
from fullshard.checkpoint.opening import said_below
from fullshard.checkpoint.peers import Peers
from fullshard.checkpoint.read import Reader
from fullshard.checkpoint.save import finish_background
from fullshard.checkpoint.write import Described, header_of
from fullshard.convert.export_folder import (
    Config,
    ExportFolder,
    as_json,
    check_ties,
    files_beside,
)
from fullshard.convert.hf_files import INDEX, SECTION, WEIGHTS
from fullshard.convert.hf_names import by_new_name, is_wide_float, plain_name
from fullshard.convert.opening import Progress, read_box
from fullshard.errors import CheckpointError
from fullshard.plan.boxes import in_rows, whole_box
from fullshard.plan.units import Rename
from fullshard.state.copies import numbered_and_compared
from fullshard.state.gathering import gathered_wholes
from fullshard.state.holdings import Holding, holdings_of
from fullshard.state.host_memory import host_bytes

_BUCKET_NBYTES = 64 << 20
_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY_UNITS = {f"{unit}I": 1024**power for power, unit in enumerate("KMGT", 1)}


@dataclasses.dataclass(frozen=True, slots=True)
class ExportedWeights:
    """What an export has written.

    files: names of all files, weights first. num_tensors, nbytes: of the weights.
    """

    path: Path
    files: tuple[str, ...]
    num_tensors: int
    nbytes: int


def export_hf(
    model: nn.Module | Location,
    path: str | os.PathLike[str],
    *,
    config: Config = None,
    dtype: torch.dtype | None = None,
    rename: Rename = None,
    max_shard_size: int | str = "5GB",
    key: str | None = None,
    overwrite: bool = False,
    progress: Progress = None,
) -> ExportedWeights:
    """Write a folder that ``from_pretrained`` of Transformers loads. Collective.

        export_hf(model, "exports/mine", config="downloads/llama", dtype=torch.bfloat16)

    model: sharded in any way or not at all; or the path of a checkpoint (or of a folder of checkpoints,
        of which the newest is taken), for which no model is built and rank 0 reads alone.
    config: what goes beside the weights: a folder, of which ``config.json``, tokenizer files and the
        like are copied; a ``config.json``; its fields; or a configuration of Transformers. By default
        that of the model and its generation, if it has one. The dtype that it names becomes that of
        the files.
    dtype: of floating-point tensors; by default each has its own.
    rename: from names in the model to names in the files, as `load_hf` has it in the other direction.
    max_shard_size: of a file, such as "5GB". A larger tensor has a file of its own.
    key: which of a checkpoint's models, if it was saved with several.
    overwrite: replace an export of this name, as a whole.
    progress: is called on rank 0 with the bytes written so far and in all.

    Names are those before sharding, wrapping and compiling. Of a tied parameter, the first name is
    written: the configuration, or `load_hf`, ties the others.

    The folder has its name only once all of it is on the disk. Raises CheckpointError, on all ranks, if
    it cannot be written; what was written is removed then.
    """
    finish_background()
    peers = Peers(call="export_hf")
    mapping = sorted(rename.items()) if isinstance(rename, Mapping) else callable(rename)
    options = {"max_shard_size": max_shard_size, "key": key, "overwrite": overwrite}
    is_model = isinstance(model, nn.Module)
    peers.check_alike(path=str(path), is_model=is_model, dtype=dtype, rename=mapping, **options)
    target = peers.together(lambda: disk_path(path, "an export"))
    if not target.name:
        raise CheckpointError(f"path is {str(path)!r}: name a folder.")
    source: ModelSource | CheckpointSource
    with contextlib.ExitStack() as stack:
        if isinstance(model, nn.Module):
            if key is not None:
                raise CheckpointError("key= is for checkpoints of several models; this is a model.")
            source = ModelSource(model, peers)
        else:
            reader = stack.enter_context(
                peers.together(lambda: Reader(_checkpoint(folder_at(model))))
            )
            source = peers.together(lambda: CheckpointSource(reader, key, reads=peers.rank == 0))
        most_nbytes = peers.together(lambda: size_of(max_shard_size))
        files = peers.together(lambda: _planned(source.available(), dtype, rename, most_nbytes))

        def beside() -> dict[str, bytes]:
            own = model if isinstance(model, nn.Module) else None
            found = files_beside(config, own, _main_dtype(files))
            if own is not None and isinstance(source, ModelSource):
                check_ties(found, own, source.tied())
            return found

        export = _Export(target, files, beside, overwrite, progress)
        return export.run(source, peers)


# Where tensors come from: each source lists them and gives those that are asked for, in host memory and in
# pieces that follow one another, so that a writer needs a bucket of memory however large the model is.


class ModelSource:
    """A model, sharded in any way; rank 0 writes. Made and used by all ranks."""

    def __init__(self, model: nn.Module, peers: Peers) -> None:
        held = peers.together(lambda: holdings_of(model))
        self._by_name: dict[str, Holding] = {}
        for holding in numbered_and_compared(held, peers.group, taken="exported"):
            self._by_name.setdefault(plain_name(holding.name), holding)

    def available(self) -> list[Described]:
        """List the tensors, in the order of modules; a tied one by its first name."""
        return [Described(name, h.dtype, h.shape) for name, h in self._by_name.items()]

    def tied(self) -> list[set[str]]:
        """Return the names of each tensor that has several."""
        names = ({plain_name(name) for name in h.names} for h in self._by_name.values())
        return [own for own in names if len(own) > 1]

    def pieces(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors on rank 0, and nothing on the others. Collective at every step."""
        held = [self._by_name[name] for name in names]
        wholes = gathered_wholes(
            held, None, to_rank=0, bucket_nbytes=_BUCKET_NBYTES, device=torch.device("cpu")
        )
        for name, (holding, whole) in zip(names, wholes, strict=True):
            assert holding is self._by_name[name]
            if whole is not None:
                yield name, whole


class CheckpointSource:
    """One model of a checkpoint. reads: whether this rank is to read from it.

    Raises CheckpointError if the checkpoint has no model of this key.
    """

    def __init__(self, reader: Reader, key: str | None, *, reads: bool) -> None:
        self._reader, self._reads = reader, reads
        self._section = SECTION if key is None else f"model.{key}/"
        if not any(name.startswith(self._section) for name in reader.manifest.tensors):
            there = reader.manifest.values.get("models", [])
            keys = [str(name).partition(".")[2] for name in there if "." in str(name)]
            raise CheckpointError(
                f"{reader.folder}: has no {self._section[:-1]}. "
                + (f"Give key=, one of {', '.join(keys)}." if keys else "It has no model of a key.")
            )

    def available(self) -> list[Described]:
        """List the tensors, in the order in which they were saved."""
        return [
            Described(name.removeprefix(self._section), tensor.dtype, tensor.shape)
            for name, tensor in self._reader.manifest.tensors.items()
            if name.startswith(self._section)
        ]

    def pieces(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield rows of each tensor in turn, as many as a bucket takes; nothing if it does not read."""
        for name in names if self._reads else ():
            full_name = self._section + name
            tensor = self._reader.manifest.tensors[full_name]
            whole = whole_box(tensor.shape)
            for box in in_rows(whole, tensor.dtype.itemsize, _BUCKET_NBYTES):
                yield name, read_box(self._reader, full_name, box)


# What is written


class ToExport(NamedTuple):
    """A tensor: its name where it comes from, and what it is to be in the file."""

    source: str
    target: Described


class PlannedFile(NamedTuple):
    """A file of weights and its tensors, in the order in which they lie there."""

    name: str
    tensors: Sequence[ToExport]

    @property
    def nbytes(self) -> int:
        return sum(each.target.nbytes for each in self.tensors)


class _Export:
    """One export: its folder on rank 0, and what is written to it."""

    def __init__(
        self,
        path: Path,
        files: Sequence[PlannedFile],
        beside: Callable[[], dict[str, bytes]],
        overwrite: bool,
        progress: Progress,
    ) -> None:
        self._path, self._files, self._beside = path, files, beside
        self._overwrite, self._progress = overwrite, progress
        self._total = sum(file.nbytes for file in files)
        self._done = 0
        self._folder: ExportFolder | None = None

    def run(self, source: ModelSource | CheckpointSource, peers: Peers) -> ExportedWeights:
        """Write everything and give the folder its name. Collective."""
        try:
            others = peers.of_first(self._begin)
            for file in self._files:
                pieces = source.pieces([each.source for each in file.tensors])
                peers.together(functools.partial(self._write, file, pieces))
            peers.of_first(self._finish)
        except BaseException:
            if self._folder is not None:
                self._folder.give_up()
            raise
        names = (*(file.name for file in self._files), *others)
        return ExportedWeights(
            self._path, names, sum(len(file.tensors) for file in self._files), self._total
        )

    def _begin(self) -> list[str]:
        others = self._beside()
        if len(self._files) > 1:
            others[INDEX] = _index_of(self._files)
        self._folder = ExportFolder(self._path, new_tag(), overwrite=self._overwrite, names=others)
        self._folder.write(others)
        return [*others]

    def _write(self, file: PlannedFile, pieces: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write a file on rank 0; send what it needs on the others."""
        try:
            if self._folder is not None:
                self._write_weights(self._folder.folder.create(file.name), file, pieces)
        finally:
            # Where writing has failed, the others still send: all end this file, and then fail together.
            for _ in pieces:
                pass

    def _write_weights(
        self, out: NewFile, file: PlannedFile, pieces: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        header, _ = header_of([each.target for each in file.tensors], {"format": "pt"})
        dtypes = {each.source: each.target.dtype for each in file.tensors}
        left = file.nbytes
        try:
            out.write(header)
            for name, piece in pieces:
                data = host_bytes(piece.to(dtypes[name]))
                out.write(data)
                left -= len(data)
                self._done += len(data)
                if self._progress is not None:
                    self._progress(self._done, self._total)
            assert left == 0
        except BaseException:
            out.discard()
            raise
        out.finish()

    def _finish(self) -> None:
        assert self._folder is not None
        self._folder.finish()


def _planned(
    available: Sequence[Described], dtype: torch.dtype | None, rename: Rename, most_nbytes: int
) -> list[PlannedFile]:
    if dtype is not None and not is_wide_float(dtype):
        raise CheckpointError(f"dtype is {dtype}: give a floating-point one of at least two bytes.")
    by_name = {each.name: each for each in available}
    tensors = []
    for new, name in by_new_name(by_name, rename).items():
        found = by_name[name]
        own = dtype if dtype is not None and is_wide_float(found.dtype) else found.dtype
        tensors.append(ToExport(name, Described(new, own, found.shape)))
    if not tensors:
        raise CheckpointError(
            "There is nothing to export: no parameters, or rename= leaves all out."
        )
    return _divided(tensors, most_nbytes)


def _divided(tensors: Sequence[ToExport], most_nbytes: int) -> list[PlannedFile]:
    """Divide tensors among files, in their order; one that is larger than that has its own file."""
    parts: list[list[ToExport]] = [[]]
    size = 0
    for tensor in tensors:
        if parts[-1] and size + tensor.target.nbytes > most_nbytes:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.target.nbytes
    names = [WEIGHTS]
    if len(parts) > 1:
        names = [f"model-{n:05d}-of-{len(parts):05d}.safetensors" for n in range(1, len(parts) + 1)]
    # Wide dtypes first, which keeps every tensor aligned.
    ordered = [sorted(part, key=lambda each: -each.target.dtype.itemsize) for part in parts]
    return [PlannedFile(*each) for each in zip(names, ordered, strict=True)]


def _index_of(files: Sequence[PlannedFile]) -> bytes:
    """Return the index, which says in which file each tensor is."""
    names = {each.target.name: file.name for file in files for each in file.tensors}
    total = sum(file.nbytes for file in files)
    return as_json({"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))})


def size_of(text: int | str) -> int:
    """Return a number of bytes: 5_000_000_000, "5GB" and "4.66GiB" are about the same."""
    size: float | None = text if isinstance(text, int) else None
    if isinstance(text, str):
        found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([KMGT]?I?)B?\s*", text.upper())
        unit = (_UNITS | _BINARY_UNITS).get(found[2]) if found else None
        size = float(found[1]) * unit if found and unit else None
    if size is None:
        raise CheckpointError(f"max_shard_size is {text!r}: give bytes, or a size such as '5GB'.")
    if size < 1:
        raise CheckpointError(f"max_shard_size is {text!r}: must be at least a byte.")
    return int(size)


def _main_dtype(files: Sequence[PlannedFile]) -> torch.dtype | None:
    """Return the floating-point dtype of most of the weights."""
    nbytes: Counter[torch.dtype] = Counter()
    for file in files:
        for each in file.tensors:
            if is_wide_float(each.target.dtype):
                nbytes[each.target.dtype] += each.target.nbytes
    return nbytes.most_common(1)[0][0] if nbytes else None


def _checkpoint(folder: Folder) -> Folder:
    """Return a checkpoint, or the newest one of a folder of them."""
    if folder.size_of(MANIFEST) is not None:
        return folder
    found = latest_checkpoint(folder.location)
    if found is None:
        raise CheckpointError(
            f"{folder}: is no complete checkpoint, and holds none. Of files of other forms, make one first: "
            f"fullshard ckpt import.{said_below(folder)}"
        )
    return folder_at(found.path)
