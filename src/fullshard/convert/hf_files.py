"""Safetensors files of a folder: what they contain, read without trust.

    model.safetensors                                       or
    model.safetensors.index.json and the files it names     or
    any *.safetensors                                       or one file

A file begins with 8 bytes, the length of its header; the header is JSON that says where each tensor
lies. Nothing of what it says is believed before it was compared with the file: a damaged file, or one
made to do harm, is refused by name.
"""

import dataclasses
import hashlib
import itertools
import os
import stat
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fullshard.checkpoint.local import LocalFolder
from fullshard.checkpoint.manifest import DTYPES, SavedTensor
from fullshard.checkpoint.opening import said_below
from fullshard.checkpoint.read import Limits, SavedState, Wanted, read_at_once, read_shared
from fullshard.checkpoint.write import PART_OF
from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.json_files import parse_json, read_json
from fullshard.plan.boxes import common, whole_box
from fullshard.state.host_memory import checksum

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SECTION = "model/"
"""Before names of tensors, as a checkpoint of ours has them."""
_INDEX_SUFFIX = ".safetensors.index.json"
_LARGEST_JSON_NBYTES = 100_000_000  # as the safetensors library has it
_LARGEST = 2**62
# Less than this between two rows is read along, as a filesystem reads ahead anyway.
_LIMITS = Limits(buffer_nbytes=8 << 20, gap_nbytes=128 << 10)
_TASK_NBYTES = 4 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry(SavedTensor):
    """A tensor in a file. start: its first byte in the file."""

    file: int
    start: int


class WeightFile(NamedTuple):
    """A file: its path, its size and the digest of its header, by which other ranks know it again."""

    path: Path
    nbytes: int
    header_nbytes: int
    digest: str


class Weights(NamedTuple):
    """What the files of a folder contain. source: what they were found by, for messages."""

    source: Path
    files: tuple[WeightFile, ...]
    tensors: Mapping[str, Entry]


def weights_of(path: Path) -> Weights:
    """Find and read the headers of a folder's files, or of one file.

    Links are followed, as the Hub's cache consists of them; an index names files beside it and no
    others. Raises CheckpointError if there are none, or what they say cannot be.
    """
    if path.is_dir():
        return _of_folder(path)
    if path.name.endswith(_INDEX_SUFFIX):
        return _of_index(path)
    return _joined(path, [path])


def _of_folder(folder: Path) -> Weights:
    if (folder / WEIGHTS).exists():
        return _joined(folder / WEIGHTS, [folder / WEIGHTS])
    found = sorted(folder.glob(f"*{_INDEX_SUFFIX}"))
    indices = [each for each in found if each.name == INDEX] or found
    if len(indices) > 1:
        names = ", ".join(index.name for index in indices)
        raise CheckpointError(f"{folder}: has several indices ({names}). Name one of them.")
    if indices:
        return _of_index(indices[0])
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        pickled = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
        other = (
            f" {pickled[0].name} is pickled, which load_hf never reads: load it in Transformers and "
            "save_pretrained() it."
            if pickled
            else ""
        )
        below = said_below(LocalFolder(folder))
        raise CheckpointError(f"{folder}: holds no *.safetensors.{other}{below}")
    return _joined(folder, paths)


def _of_index(path: Path) -> Weights:
    content = read_json(
        path,
        dict[str, Any],
        lambda why: _refused(path, why),
        most_nbytes=_LARGEST_JSON_NBYTES,
    )
    by_name = content.get("weight_map")
    if not isinstance(by_name, dict) or not by_name:
        raise _refused(path, "has no weight_map, so it is no index")
    for name in by_name.values():
        plain = isinstance(name, str) and Path(name).name == name
        if not plain or not name.endswith(".safetensors"):
            raise _refused(path, f"names the file {name!r}, which is none beside it")
    names = sorted(set(by_name.values()))
    whole = _joined(path, [path.parent / name for name in names], set(by_name))
    for tensor, name in by_name.items():
        entry = whole.tensors.get(tensor)
        if entry is None or names[entry.file] != name:
            raise _refused(path, f"says that {tensor} is in {name}, and it is not")
    return whole


def _joined(source: Path, paths: Sequence[Path], only: set[str] | None = None) -> Weights:
    files: list[WeightFile] = []
    tensors: dict[str, Entry] = {}
    for path in paths:
        file, entries = _read_header(path, len(files))
        for name, entry in entries.items():
            if only is not None and name not in only:
                continue
            if name in tensors:
                other = files[tensors[name].file].path.name
                raise _refused(path, f"has {name}, which {other} has as well")
            tensors[name] = entry
        files.append(file)
    return Weights(source, tuple(files), tensors)


def _read_header(path: Path, number: int) -> tuple[WeightFile, dict[str, Entry]]:
    """Return a file and its tensors. number: of the file among the others."""
    with os.fdopen(_open(path), "rb") as opened:
        nbytes = os.fstat(opened.fileno()).st_size
        begin = opened.read(8)
        if len(begin) < 8:
            raise _refused(path, f"has {nbytes} bytes, which is no safetensors file")
        (length,) = struct.unpack("<Q", begin)
        if length > min(_LARGEST_JSON_NBYTES, nbytes - 8):
            raise _refused(path, f"its header would have {length} bytes, and it has {nbytes}")
        header = opened.read(length)
    content: dict[str, Any] = parse_json(header, dict[str, Any], lambda why: _refused(path, why))
    metadata = content.pop("__metadata__", None)
    if isinstance(metadata, dict) and metadata.get("of") == PART_OF:
        raise CheckpointError(
            f"{path}: is a part of a fullshard checkpoint, without the rest. Load the checkpoint's folder, "
            "which has a manifest.json, with load_checkpoint."
        )
    data_start = 8 + length
    entries = {
        name: _entry(path, name, fields, number, data_start, nbytes)
        for name, fields in content.items()
    }
    _check_apart(path, entries)
    end = max((entry.start + entry.nbytes for entry in entries.values()), default=data_start)
    if end != nbytes:
        raise _refused(path, f"has {nbytes - end} bytes behind its last tensor")
    digest = hashlib.sha256(header).hexdigest()
    return WeightFile(path, nbytes, data_start, digest), entries


def _entry(path: Path, name: str, fields: Any, number: int, data_start: int, nbytes: int) -> Entry:
    try:
        dtype, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise _refused(path, f"{name} lacks its dtype, shape or data_offsets") from error
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _refused(path, f"{name} is of the dtype {dtype!r:.40}, which is not known here")
    numbers = [*shape, begin, end] if isinstance(shape, list) and len(shape) <= 64 else [None]
    if not all(type(each) is int and 0 <= each <= _LARGEST for each in numbers):
        raise _refused(path, f"{name} has the shape {shape!r:.80} at {begin!r:.40} to {end!r:.40}")
    entry = Entry(tuple(shape), DTYPES[dtype], file=number, start=data_start + begin)
    if entry.nbytes != end - begin:
        raise _refused(path, f"{name} of shape {shape} and {dtype} would have {end - begin} bytes")
    if data_start + end > nbytes:
        raise _refused(path, f"ends before {name} does; it may have been cut short")
    return entry


def _check_apart(path: Path, entries: Mapping[str, Entry]) -> None:
    """Refuse tensors that share bytes."""
    ranges = sorted((e.start, e.start + e.nbytes, n) for n, e in entries.items() if e.nbytes)
    for (_, stop, name), (start, _, other) in itertools.pairwise(ranges):
        if start < stop:
            raise _refused(path, f"{name} and {other} share bytes")


def _open(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: is not there. Name a folder with safetensors.") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}.") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _refused(path, "is no regular file")
    return descriptor


def _refused(path: Path, what: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{path}: {what}. Download or save it again, or load another.")


class WeightsReader(SavedState):
    """The weights of one model, in files that are opened when they are first read.

    path: what they were asked for by.
    """

    def __init__(self, path: Path, weights: Weights) -> None:
        self.location = path
        self.digest = checksum("".join(file.digest for file in weights.files).encode())
        self.tensors = {f"{SECTION}{name}": entry for name, entry in weights.tensors.items()}
        self.values = {"models": ["model"], "optimizers": {}, "extra": {}}
        self._weights = weights
        self._open: dict[int, int] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def read(
        self, wanted: Sequence[Wanted], progress: Callable[[int], object] | None = None
    ) -> None:
        """Read boxes into their memory, several at once. progress: is called with the bytes of some of them.

        Raises CheckpointError for a file that is gone, cut short, or another than when its header was
        read.
        """
        read_at_once(self._divided(wanted), self._read, progress)

    def _divided(self, wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
        part: list[Wanted] = []
        nbytes = 0
        for each in wanted:
            part.append(each)
            nbytes += each.view.numel() * each.view.itemsize
            if nbytes >= _TASK_NBYTES:
                yield part
                part, nbytes = [], 0
        if part:
            yield part

    def _read(self, wanted: Wanted) -> int:
        name = wanted.name.removeprefix(SECTION)
        entry = self._weights.tensors[name]
        descriptor = self._descriptor(entry.file)
        piece = whole_box(entry.shape)
        shared = common(wanted.box, piece)
        if shared is None:
            return 0

        def read(first: int, out: memoryview) -> int:
            position, rest = entry.start + first, out
            while rest:
                count = os.preadv(descriptor, [rest], position)
                if count == 0:
                    path = self._weights.files[entry.file].path
                    raise _refused(path, f"ends within {name}")
                position, rest = position + count, rest[count:]
            return len(out)

        return read_shared(wanted, piece, shared, entry.dtype, read, _LIMITS)

    def _descriptor(self, number: int) -> int:
        """Open a file, and compare it once with what was read of it before."""
        with self._lock:
            if number not in self._open:
                file = self._weights.files[number]
                descriptor = _open(file.path)
                header = os.pread(descriptor, file.header_nbytes - 8, 8)
                same = os.fstat(descriptor).st_size == file.nbytes
                if not same or hashlib.sha256(header).hexdigest() != file.digest:
                    os.close(descriptor)
                    raise _refused(
                        file.path,
                        "is another file here than on rank 0, or has changed. All ranks have to see the "
                        "same files",
                    )
                self._open[number] = descriptor
            return self._open[number]
