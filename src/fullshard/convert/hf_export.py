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
from fullshard.convert.opening import (
    PART_NBYTES,
    Progress,
    checkpoint_at,
    counting,
    parts_of,
    read_box,
)
from fullshard.errors import CheckpointError
from fullshard.plan.units import Rename
from fullshard.state.copies import numbered_and_compared
from fullshard.state.gathering import gathered_wholes
from fullshard.state.holdings import Holding, holdings_of
from fullshard.state.host_memory import host_bytes

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
    with contextlib.ExitStack() as stack:
        if isinstance(model, nn.Module):
            if key is not None:
                raise CheckpointError("key= is for checkpoints of several models; this is a model.")
            source = _of_model(model, peers)
        else:
            reader = stack.enter_context(peers.together(lambda: Reader(_checkpoint(model))))
            source = peers.together(lambda: _of_checkpoint(reader, key, reads=peers.rank == 0))
        most_nbytes = peers.together(lambda: size_of(max_shard_size))
        files = peers.together(lambda: _planned(source.tensors, dtype, rename, most_nbytes))
        tensors = [tensor.target for file in files.values() for tensor in file]
        total = sum(tensor.nbytes for tensor in tensors)
        count = counting(progress, total)
        folder: ExportFolder | None = None  # on rank 0

        def begin() -> list[str]:
            nonlocal folder
            own = model if isinstance(model, nn.Module) else None
            others = files_beside(config, own, _main_dtype(tensors))
            if own is not None:
                check_ties(others, own, source.tied)
            if len(files) > 1:
                others[INDEX] = _index_of(files, total)
            folder = ExportFolder(target, new_tag(), overwrite=overwrite, names=others)
            folder.write(others)
            return [*others]

        def finish() -> None:
            assert folder is not None
            folder.finish()

        try:
            others = peers.of_first(begin)
            for name, file in files.items():
                pieces = source.pieces([tensor.source for tensor in file])
                peers.together(functools.partial(_write, folder, name, file, pieces, count))
            peers.of_first(finish)
        except BaseException:
            if folder is not None:
                folder.give_up()
            raise
        return ExportedWeights(target, (*files, *others), len(tensors), total)


# Where tensors come from


class _Source(NamedTuple):
    """A model, or one of a checkpoint. tied: the names of each tensor that has several.

    pieces: gives tensors on rank 0, in host memory and in pieces that follow one another, so that a writer
    needs a bucket of memory however large the model is. All ranks go through them, the others to send theirs.
    """

    tensors: Sequence[Described]
    pieces: Callable[[Sequence[str]], Iterator[tuple[str, torch.Tensor]]]
    tied: Sequence[set[str]] = ()


def _of_model(model: nn.Module, peers: Peers) -> _Source:
    """Return a model as a source, in the order of modules; a tied tensor by its first name."""
    held = peers.together(lambda: holdings_of(model))
    by_name: dict[str, Holding] = {}
    for holding in numbered_and_compared(held, peers.group, taken="exported"):
        by_name.setdefault(plain_name(holding.name), holding)

    def pieces(names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        holdings = [by_name[name] for name in names]
        cpu = torch.device("cpu")
        wholes = gathered_wholes(holdings, None, to_rank=0, bucket_nbytes=PART_NBYTES, device=cpu)
        for name, (_, whole) in zip(names, wholes, strict=True):
            if whole is not None:
                yield name, whole

    tied = [{plain_name(name) for name in holding.names} for holding in by_name.values()]
    return _Source(
        [Described(name, holding.dtype, holding.shape) for name, holding in by_name.items()],
        pieces,
        [names for names in tied if len(names) > 1],
    )


def _of_checkpoint(reader: Reader, key: str | None, *, reads: bool) -> _Source:
    """Return one model of a checkpoint as a source, in the order in which it was saved.

    reads: whether this rank is to read from it. Raises CheckpointError if it has no model of this key.
    """
    section = SECTION if key is None else f"model.{key}/"
    tensors = {
        name.removeprefix(section): tensor
        for name, tensor in reader.tensors.items()
        if name.startswith(section)
    }
    if not tensors:
        there = reader.values.get("models", [])
        keys = [str(name).partition(".")[2] for name in there if "." in str(name)]
        raise CheckpointError(
            f"{reader.folder}: has no {section[:-1]}. "
            + (f"Give key=, one of {', '.join(keys)}." if keys else "It has no model of a key.")
        )

    def pieces(names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names if reads else ():
            for box in parts_of(tensors[name]):
                yield name, read_box(reader, f"{section}{name}", box)

    return _Source(
        [Described(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()], pieces
    )


def _checkpoint(path: Location) -> Folder:
    """Return a checkpoint, or the newest one of a folder of them."""
    folder = checkpoint_at(folder_at(path))
    if folder.size_of(MANIFEST) is None:
        raise CheckpointError(
            f"{folder}: is no complete checkpoint, and holds none. Of files of other forms, make one first: "
            f"fullshard ckpt import.{said_below(folder)}"
        )
    return folder


# What is written


class _ToExport(NamedTuple):
    """A tensor: its name where it comes from, and what it is to be in the file."""

    source: str
    target: Described


_File = Sequence[_ToExport]  # in the order in which they lie there


def _write(
    folder: ExportFolder | None,
    name: str,
    file: _File,
    pieces: Iterator[tuple[str, torch.Tensor]],
    count: Callable[[int], None],
) -> None:
    """Write a file on rank 0; send what it needs on the others, which have no folder."""
    try:
        if folder is not None:
            _write_weights(folder.folder.create(name), file, pieces, count)
    finally:
        # Where writing has failed, the others still send: all end this file, and then fail together.
        for _ in pieces:
            pass


def _write_weights(
    out: NewFile,
    file: _File,
    pieces: Iterator[tuple[str, torch.Tensor]],
    count: Callable[[int], None],
) -> None:
    header, _ = header_of([each.target for each in file], {"format": "pt"})
    dtypes = {each.source: each.target.dtype for each in file}
    left = sum(each.target.nbytes for each in file)
    try:
        out.write(header)
        for name, piece in pieces:
            data = host_bytes(piece.to(dtypes[name]))
            out.write(data)
            left -= len(data)
            count(len(data))
        assert left == 0
    except BaseException:
        out.discard()
        raise
    out.finish()


def _planned(
    available: Sequence[Described], dtype: torch.dtype | None, rename: Rename, most_nbytes: int
) -> dict[str, _File]:
    """Return the files of weights by their names: which tensors go where, as what."""
    if dtype is not None and not is_wide_float(dtype):
        raise CheckpointError(f"dtype is {dtype}: give a floating-point one of at least two bytes.")
    by_name = {each.name: each for each in available}
    tensors = []
    for new, name in by_new_name(by_name, rename).items():
        found = by_name[name]
        own = dtype if dtype is not None and is_wide_float(found.dtype) else found.dtype
        tensors.append(_ToExport(name, Described(new, own, found.shape)))
    if not tensors:
        raise CheckpointError(
            "There is nothing to export: no parameters, or rename= leaves all out."
        )
    return _divided(tensors, most_nbytes)


def _divided(tensors: _File, most_nbytes: int) -> dict[str, _File]:
    """Divide tensors among files, in their order; one that is larger than that has its own file."""
    parts: list[list[_ToExport]] = [[]]
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
    return dict(zip(names, ordered, strict=True))


def _index_of(files: Mapping[str, _File], total: int) -> bytes:
    """Return the index, which says in which file each tensor is."""
    names = {tensor.target.name: name for name, file in files.items() for tensor in file}
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


def _main_dtype(tensors: Sequence[Described]) -> torch.dtype | None:
    """Return the floating-point dtype of most of the weights."""
    nbytes: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        if is_wide_float(tensor.dtype):
            nbytes[tensor.dtype] += tensor.nbytes
    return nbytes.most_common(1)[0][0] if nbytes else None
