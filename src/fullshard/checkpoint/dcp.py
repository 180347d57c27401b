"""Directories of torch.distributed.checkpoint, read without running what they contain.

    .metadata           pickled: tensors, their chunks, and where each chunk lies
    __0_0.distcp        chunks, each a file of torch.save

The metadata are unpickled with a short list of classes, of which none does anything; chunks with
``weights_only=True``. Source: torch/distributed/checkpoint/{metadata,filesystem}.py, torch 2.11 to 2.15.
"""

import io
import pickle
import pickletools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fullshard.checkpoint.folder import Folder
from fullshard.checkpoint.foreign import (
    ForeignFiles,
    check_path,
    is_plain_tensor,
    loaded_without_trust,
)
from fullshard.checkpoint.manifest import DTYPE_NAMES, SavedTensor
from fullshard.checkpoint.read import Wanted
from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.plan.boxes import Box, common, tiling_fault, whole_box
from fullshard.plan.layout import Shape
from fullshard.process_hooks import collector_waits
from fullshard.state.host_memory import checksum

METADATA = ".metadata"
_PACKAGE = "torch.distributed.checkpoint"
_CLASSES = {
    f"{_PACKAGE}.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_PACKAGE}.filesystem": {"_StorageInfo"},
    "torch": {"device"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "pathlib._local": {"PosixPath"},
}
_BUILT_IN = {("torch", "Size"): tuple, ("collections", "OrderedDict"): dict}
# Steps of a pickle: how many bytes follow each, or how their number is given (negative, see `pickletools`).
_SIZES = {
    each.code.encode("latin-1"): each.arg.n if each.arg else 0 for each in pickletools.opcodes
}
_WIDTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_REFUSED = (
    pickle.BYTEARRAY8,
    pickle.EXT1,
    pickle.EXT2,
    pickle.EXT4,
    pickle.PERSID,
    pickle.BINPERSID,
)
_MOST_SMALL_NUMBER = 255  # of BINPUT, whose steps are not counted
_PLAIN_STEPS = re.compile(
    b"(?:%s){1,1000}"  # what a match may go back over takes memory
    % b"|".join(
        b"%s.{%d}" % (re.escape(code), size)
        for code, size in _SIZES.items()
        if size >= 0 and code not in (*_REFUSED, pickle.LONG_BINPUT, pickle.STOP)
    ),
    re.DOTALL,
)
_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}(/[A-Za-z0-9_.-]{1,200})?")


class _StandIn:
    """Stands for an object of a class: with its attributes, or its state if that is no dict."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


def _check_claims(content: bytes) -> None:
    """Refuse a pickle of which a step claims more than there is: a length, or a number in the memo.

    Python's unpickler in C takes memory for what is claimed, whatever follows. In Python it would not, and takes
    eight times as long.
    """
    position, num_kept, end = 0, 0, len(content)
    while position < end:
        if run := _PLAIN_STEPS.match(content, position):
            position = run.end()
            num_kept += content.count(pickle.MEMOIZE, run.start(), position)  # or arguments like it
            continue
        code = content[position : position + 1]
        size = _SIZES.get(code)
        if size is None or code in _REFUSED:
            raise pickle.UnpicklingError(f"has a step {code!r}, which no checkpoint needs")
        position += 1
        if size == pickletools.UP_TO_NEWLINE:
            size = content.find(b"\n", position) + 1 - position
            if size <= 0:
                raise pickle.UnpicklingError("ends within a step")
        elif size < 0:
            width = _WIDTHS[size]
            size = width + int.from_bytes(content[position : position + width], "little")
        if position + size > end:
            raise pickle.UnpicklingError("ends within a step")
        if code in (pickle.PUT, pickle.LONG_BINPUT):
            argument = content[position : position + size]
            number = int(argument) if code == pickle.PUT else int.from_bytes(argument, "little")
            num_kept += 1
            if number > num_kept + _MOST_SMALL_NUMBER:
                raise pickle.UnpicklingError(
                    f"keeps a value as number {number}, after {num_kept} others"
                )
        position += size
        if code == pickle.STOP:
            return


class _Unpickler(pickle.Unpickler):
    """Reads a pickle into stand-ins, made for this pickle alone, as it may change a class that it names."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in _BUILT_IN:
            return _BUILT_IN[module, name]
        if name in _CLASSES.get(module, ()):
            return type(name, (_StandIn,), {})
        raise CheckpointError(f"would use {module}.{name}, which no checkpoint needs")


def _shape(sizes: tuple[Any, ...]) -> Shape:
    if len(sizes) > 64 or not all(type(each) is int and 0 <= each < 2**62 for each in sizes):
        raise CheckpointError(f"has {sizes!r:.80} in place of sizes")
    return tuple(sizes)


def _offset(index: Any) -> Shape | None:
    offset = getattr(index, "offset", None)  # a default, which pickles leave out
    return None if offset is None else _shape(offset)


class _Chunk(NamedTuple):
    """A box of a tensor, and the bytes of a file that hold it."""

    box: Box
    place: "_Place"


class _Place(NamedTuple):
    file: str
    start: int
    nbytes: int


class DcpFiles(ForeignFiles):
    """The files of one directory."""

    def __init__(self, folder: Folder) -> None:
        self.location = folder.location
        self._folder = folder
        content = folder.read_small(METADATA)
        self.digest = checksum(content)
        self.tensors, self.paths = {}, {}
        self._chunks: dict[str, list[_Chunk]] = {}
        self._objects: dict[str, _Place] = {}
        try:
            with collector_waits():
                _check_claims(content)
                self._take(_Unpickler(io.BytesIO(content)).load())
        except CheckpointError as error:
            raise self._refused(f"{METADATA} {error}") from error
        except Exception as error:  # whatever damaged bytes make of a pickle
            refused = self._refused(f"{METADATA} is damaged, or of another version ({error!r})")
            raise DamagedCheckpointError(str(refused)) from error

    def value_of(self, key: str) -> Any:
        return self._loaded(key, self._objects[key])

    def read(self, wanted: Sequence[Wanted], progress: Callable[[int], object] | None) -> None:
        """Read boxes into their memory: chunk by chunk, of which one at a time is in memory."""
        by_key: dict[str, list[Wanted]] = {}
        for each in wanted:
            by_key.setdefault(each.name, []).append(each)
        for key, own in by_key.items():
            for chunk in self._chunks[key]:
                shared = [(each, common(each.box, chunk.box)) for each in own]
                parts = [(each, box) for each, box in shared if box is not None]
                if not parts:
                    continue
                value = self._tensor(key, chunk)
                for each, box in parts:
                    source = value[box.within(chunk.box)]
                    each.view[box.within(each.box)].copy_(source)
                if progress is not None:
                    progress(chunk.place.nbytes)

    def _tensor(self, key: str, chunk: _Chunk) -> torch.Tensor:
        value = self._loaded(key, chunk.place)
        expected = self.tensors[key]
        if not is_plain_tensor(value) or tuple(value.shape) != chunk.box.shape:
            raise self._refused(f"{key}: {chunk.place.file} holds something else at its place")
        if value.dtype != expected.dtype:
            raise self._refused(f"{key}: is of {value.dtype} in {chunk.place.file}")
        return value.detach()

    def _loaded(self, key: str, place: _Place) -> Any:
        file = self._folder.open_data(place.file)
        try:
            if not 0 <= place.start <= place.start + place.nbytes <= file.nbytes:
                raise self._refused(f"{key}: {place.file} ends before it")
            content = bytearray(place.nbytes)
            file.read_into(memoryview(content), place.start)
        finally:
            file.close()
        where = f"{self._folder}/{place.file}"
        return loaded_without_trust(io.BytesIO(content), len(content), f"{where}: {key}")

    # Metadata

    def _take(self, metadata: Any) -> None:
        places = {
            (index.fqn, _offset(index)): self._place(info)
            for index, info in metadata.storage_data.items()
        }
        paths: Mapping[str, Any] = metadata.planner_data or {}
        left = len(places)  # a chunk lies at a place of its own
        for key, entry in metadata.state_dict_metadata.items():
            path = paths.get(key)
            self.paths[key] = tuple(path) if isinstance(path, tuple) and path else (key,)
            check_path(key, self.paths[key])
            if not hasattr(entry, "chunks"):
                self._objects[key] = places[key, None]
                continue
            left -= len(entry.chunks)
            if left < 0:
                raise CheckpointError("has more chunks than places of chunks")
            shape, dtype = _shape(entry.size), entry.properties.state[0]
            if dtype not in DTYPE_NAMES:
                raise CheckpointError(
                    f"says of {key} that it is of {dtype}, which is not known here"
                )
            chunks = self._chunks_of(key, entry, places)
            if any(c.place.nbytes < c.box.numel * dtype.itemsize for c in chunks):
                raise CheckpointError(f"says of {key} of shape {shape} that fewer bytes hold it")
            if fault := tiling_fault(shape, [chunk.box for chunk in chunks]):
                raise CheckpointError(f"says of {key} of shape {shape}: {fault}")
            placement = f"in {len(chunks)} parts" if len(chunks) > 1 else ""
            self.tensors[key] = SavedTensor(shape, dtype, placement=placement)
            self._chunks[key] = chunks

    def _chunks_of(
        self, key: str, entry: Any, places: Mapping[tuple[str, Shape | None], "_Place"]
    ) -> list[_Chunk]:
        chunks = []
        for each in entry.chunks:
            box = Box(_shape(each.offsets), _shape(each.sizes))
            place = places.get((key, box.offset))
            if place is None and box == whole_box(box.shape):
                place = places.get((key, None))
            if place is None:
                raise CheckpointError(f"does not say where {key} at {box.offset} lies")
            chunks.append(_Chunk(box, place))
        return chunks

    def _place(self, info: Any) -> _Place:
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"has compressed files ({', '.join(info.transform_descriptors)}), which are not read here. "
                "Load it with torch.distributed.checkpoint, and save it again without"
            )
        name = info.relative_path
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or ".." in name:
            raise CheckpointError(f"names the file {name!r}, which is none of a checkpoint's")
        return _Place(name, *_shape((info.offset, info.length)))

    def _refused(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._folder}: {what}. Load another checkpoint, or restore this one."
        )
