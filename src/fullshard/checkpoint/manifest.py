"""The manifest: what a checkpoint contains and where. See docs/checkpoints.md for the format.

    Manifest
      files     FileEntry: name, size, header
      tensors   TensorEntry by name: shape, dtype, and its pieces, each a box of it in a file
      values    what is no tensor: step, optimizer options, the user's own, versions

Reading checks everything that can be checked without reading data: nothing of what a manifest says
is believed before. A manifest that was damaged, or made to do harm, is refused by name.
"""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.json_files import without_repeats
from fullshard.plan.boxes import Box, tiling_fault
from fullshard.plan.layout import Shape
from fullshard.state.host_memory import CHECKSUM, checksum

MANIFEST = "manifest.json"
FORMAT = "fullshard-checkpoint"
VERSION = 1
# Checksums are of blocks, so that a part of a piece can be read and checked without the rest.
BLOCK_NBYTES = 1 << 20

# As safetensors names them.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,200}\.safetensors")
_LARGEST = 2**62  # of any number in a manifest
# Of what is in memory as a whole. A manifest has about 20 bytes for each MiB of tensors, and 150 for each piece of
# one. A header: as the safetensors library has it.
_MOST_SMALL_NBYTES = 4 << 30
_LARGEST_HEADER_NBYTES = 100_000_000
_LARGEST_BLOCK_NBYTES = 1 << 30
_PLACEHOLDER = "0" * 16


@dataclasses.dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of tensors: its name, its size, and the size and checksum of its header, in bytes."""

    name: str
    nbytes: int
    header_nbytes: int
    header_checksum: str


@dataclasses.dataclass(frozen=True, slots=True)
class FilePiece:
    """A box of a tensor in a file.

    file: index in the manifest's files. start: first byte in the file.
    checksums: of each block of `block_nbytes`, the last one shorter.
    """

    box: Box
    file: int
    start: int
    checksums: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of files, in whichever form: its whole shape and its dtype.

    aliases: other names of the same tensor (tied parameters). placement: how it was divided, for
    readers.
    """

    shape: Shape
    dtype: torch.dtype
    aliases: tuple[str, ...] = ()
    placement: str = ""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEntry(SavedTensor):
    """A tensor of a checkpoint, with the pieces that cover it exactly once."""

    pieces: tuple[FilePiece, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about a checkpoint but its data."""

    files: tuple[FileEntry, ...]
    tensors: Mapping[str, TensorEntry]
    values: Mapping[str, Any]
    block_nbytes: int = BLOCK_NBYTES

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def piece_nbytes(self, tensor: TensorEntry, piece: FilePiece) -> int:
        return piece.box.numel * tensor.dtype.itemsize


def is_small(nbytes: int) -> bool:
    """Whether a file of this size is read, and so written, as a whole."""
    return nbytes <= _MOST_SMALL_NBYTES


def dtype_name(dtype: torch.dtype, tensor: str) -> str:
    """Return a dtype's name in files. Raises CheckpointError for one that safetensors lacks."""
    name = DTYPE_NAMES.get(dtype)
    if name is None:
        raise CheckpointError(
            f"{tensor} is of {dtype}, for which safetensors has no name. Convert it to one of "
            f"{', '.join(str(each) for each in DTYPE_NAMES)}."
        )
    return name


def dumps(manifest: Manifest) -> bytes:
    """Return a manifest's bytes, with the checksum of themselves.

    The checksum is that of the bytes in which the 16 digits of the checksum are zeros.
    """
    content = {
        "checksum": f"{CHECKSUM}:{_PLACEHOLDER}",
        "format": FORMAT,
        "version": VERSION,
        "block_nbytes": manifest.block_nbytes,
        **manifest.values,
        "files": [dataclasses.asdict(file) for file in manifest.files],
        "tensors": {name: _tensor_fields(name, each) for name, each in manifest.tensors.items()},
    }
    text = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    return text.replace(_PLACEHOLDER.encode(), checksum(text).encode(), 1)


def readable(manifest: Manifest, where: str) -> bytes:
    """Return a manifest's bytes, once they are known to be readable.

    where: of what is about to be complete. Raises CheckpointError if `loads` would refuse them.
    """
    data = dumps(manifest)
    if not is_small(len(data)):
        num_pieces = sum(len(tensor.pieces) for tensor in manifest.tensors.values())
        raise CheckpointError(
            f"{where} was not saved, because it could not be loaded: its manifest of {num_pieces:,} pieces has "
            f"{len(data):,} bytes. Save fewer pieces: shard over fewer ranks, and replicate over the rest (HSDP)."
        )
    try:
        loads(data, "Its manifest")
    except CheckpointError as error:
        raise CheckpointError(
            f"{where} was not saved, because it could not be loaded. {str(error).removesuffix(_ADVICE)} "
            "Please report it."
        ) from error
    return data


def loads(data: bytes, where: str) -> Manifest:
    """Return the manifest in a file's bytes.

    where: its path, for messages. Raises CheckpointError if it is damaged, of a newer format, or says
    what cannot be.
    """
    head = re.match(rb'\{"checksum":"%s:([0-9a-f]{16})"' % CHECKSUM.encode(), data)
    if head is None:
        raise _refused(
            where,
            "does not begin with a checksum, so it is damaged or no manifest",
            DamagedCheckpointError,
        )
    zeroed = data[: head.start(1)] + _PLACEHOLDER.encode() + data[head.end(1) :]
    if checksum(zeroed).encode() != head[1]:
        raise _refused(
            where, "is damaged: its content does not match its checksum", DamagedCheckpointError
        )
    try:
        content = json.loads(
            data, parse_constant=_refuse_constant, object_pairs_hook=without_repeats
        )
    except ValueError as error:
        raise _refused(where, f"is no JSON: {error}") from error
    except RecursionError as error:
        raise _refused(where, "is nested too deep") from error
    try:
        return _manifest(content)
    except CheckpointError as error:
        raise _refused(where, str(error)) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _refused(
            where, f"lacks what every manifest has, or has it otherwise ({error!r})"
        ) from error


def _is_dict(tree: Any) -> bool:
    """Whether an encoded value is a dict: see `values.encoded`."""
    if not isinstance(tree, dict):
        return False
    return not any(key.startswith("$") for key in tree) or [*tree] == ["$dict"]


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


_ADVICE = " Load another checkpoint, or restore this one."


def _refused(
    where: str, what: str, kind: type[CheckpointError] = CheckpointError
) -> CheckpointError:
    return kind(f"{where}: {what}.{_ADVICE}")


def _tensor_fields(name: str, tensor: TensorEntry) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "shape": list(tensor.shape),
        "dtype": dtype_name(tensor.dtype, name),
        "placement": tensor.placement,
    }
    if tensor.aliases:
        fields["aliases"] = list(tensor.aliases)
    fields["pieces"] = [
        {
            "offset": list(piece.box.offset),
            "shape": list(piece.box.shape),
            "file": piece.file,
            "start": piece.start,
            "checksums": list(piece.checksums),
        }
        for piece in tensor.pieces
    ]
    return fields


def _manifest(content: dict[str, Any]) -> Manifest:
    if content["format"] != FORMAT:
        raise CheckpointError(f"is of the format {content['format']!r}, not {FORMAT!r}")
    version = _number(content["version"], "version")
    if version != VERSION:
        raise CheckpointError(
            f"is of version {version}, and this fullshard reads version {VERSION}"
        )
    block_nbytes = _number(content["block_nbytes"], "block_nbytes")
    if not 1 <= block_nbytes <= _LARGEST_BLOCK_NBYTES:
        raise CheckpointError(f"has blocks of {block_nbytes} bytes")
    files = tuple(_file(fields) for fields in content["files"])
    if len({file.name for file in files}) != len(files):
        raise CheckpointError("names a file twice")
    tensors = {
        name: _tensor(name, fields, files, block_nbytes)
        for name, fields in content["tensors"].items()
    }
    _check_apart(files, tensors)
    _check_values(content, tensors)
    known = {"checksum", "format", "version", "block_nbytes", "files", "tensors"}
    values = {key: value for key, value in content.items() if key not in known}
    return Manifest(files, tensors, values, block_nbytes)


def _file(fields: dict[str, Any]) -> FileEntry:
    name = fields["name"]
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise CheckpointError(f"names the file {name!r}, which is none of a checkpoint's")
    nbytes = _number(fields["nbytes"], name)
    header = _number(fields["header_nbytes"], name)
    if not 8 <= header <= min(nbytes, _LARGEST_HEADER_NBYTES):
        raise CheckpointError(f"says of {name} that its header has {header} bytes of {nbytes}")
    return FileEntry(name, nbytes, header, _digits(fields["header_checksum"], name))


def _tensor(
    name: str, fields: dict[str, Any], files: Sequence[FileEntry], block_nbytes: int
) -> TensorEntry:
    shape = _shape(fields["shape"], name)
    dtype = DTYPES.get(fields["dtype"])
    if dtype is None:
        raise CheckpointError(f"{name} is of the unknown dtype {fields['dtype']!r}")
    pieces = tuple(
        _piece(name, each, shape, dtype, files, block_nbytes) for each in fields["pieces"]
    )
    # Before the tiling, whose cost and answer depend on shapes: bytes that are there bound both.
    if math.prod(shape) != sum(piece.box.numel for piece in pieces):
        raise CheckpointError(f"{name}: its pieces have not as many elements as {shape}")
    if fault := tiling_fault(shape, [piece.box for piece in pieces]):
        raise CheckpointError(f"{name}: {fault}")
    aliases = tuple(str(each) for each in fields.get("aliases", ()))
    return TensorEntry(shape, dtype, aliases, str(fields.get("placement", "")), pieces)


def _piece(
    name: str,
    fields: dict[str, Any],
    shape: Shape,
    dtype: torch.dtype,
    files: Sequence[FileEntry],
    block_nbytes: int,
) -> FilePiece:
    box = Box(_shape(fields["offset"], name), _shape(fields["shape"], name))
    inside = len(box.offset) == len(box.shape) == len(shape) and all(
        start + size <= extent
        for start, size, extent in zip(box.offset, box.shape, shape, strict=True)
    )
    if not inside:
        raise CheckpointError(f"{name}: {box} is not inside a tensor of shape {shape}")
    file, start = _number(fields["file"], name), _number(fields["start"], name)
    nbytes = box.numel * dtype.itemsize
    if file >= len(files) or not (
        files[file].header_nbytes <= start <= start + nbytes <= files[file].nbytes
    ):
        raise CheckpointError(f"{name}: {box} is outside of its file")
    checksums = tuple(_digits(each, name) for each in fields["checksums"])
    if len(checksums) != -(-nbytes // block_nbytes):
        raise CheckpointError(f"{name}: {box} has not one checksum a block")
    return FilePiece(box, file, start, checksums)


def _check_values(content: dict[str, Any], tensors: Mapping[str, TensorEntry]) -> None:
    """Refuse values of another form than loading takes for granted."""
    step = content.get("step")
    if step is not None and type(step) is not int:
        raise CheckpointError(f"has the step {step!r:.80}, which is no number of steps")
    for key in ("metadata", "extra", "extra_by_rank", "optimizers", "versions"):
        if not isinstance(content.get(key, {}), dict):
            raise CheckpointError(f"its {key} is no object")
    for key, own in content.get("extra_by_rank", {}).items():
        if not isinstance(own, dict) or not all(map(str.isdigit, own)):
            raise CheckpointError(f"its extra_by_rank has {key} not by ranks")
    for section, own in content.get("optimizers", {}).items():
        scalars, groups = own["scalars"], own["groups"]
        is_right = (
            all(isinstance(each, dict) for each in (own, scalars, *scalars.values()))
            and all(_is_dict(each) for each in scalars.values())
            and isinstance(own.get("class"), str | None)
            and isinstance(groups, list)
            and all(
                isinstance(g["params"], list)
                and all(isinstance(name, str) for name in g["params"])
                and _is_dict(g["options"])
                for g in groups
            )
        )
        if not is_right:
            raise CheckpointError(f"{section}: its groups or scalars are of no known form")
    sections = {name.partition("/")[0] for name in tensors}
    for section in sections - {*content.get("optimizers", {})}:
        if section.partition(".")[0] == "optimizer":
            raise CheckpointError(f"has tensors of {section}, and not its groups")
    names = [*tensors, *(alias for each in tensors.values() for alias in each.aliases)]
    if len(set(names)) < len(names):
        raise CheckpointError("gives two tensors the same name")


def _check_apart(files: Sequence[FileEntry], tensors: Mapping[str, TensorEntry]) -> None:
    """Refuse pieces that share bytes of a file."""
    ranges: list[list[tuple[int, int, str]]] = [[] for _ in files]
    for name, tensor in tensors.items():
        for piece in tensor.pieces:
            stop = piece.start + piece.box.numel * tensor.dtype.itemsize
            if stop > piece.start:
                ranges[piece.file].append((piece.start, stop, name))
    for file, found in zip(files, ranges, strict=True):
        found.sort()
        for (_, stop, name), (start, _, other) in itertools.pairwise(found):
            if start < stop:
                raise CheckpointError(f"{name} and {other} share bytes of {file.name}")


def _shape(numbers: Any, name: str) -> Shape:
    if not isinstance(numbers, list) or len(numbers) > 64:
        raise CheckpointError(f"{name}: {numbers!r:.80} is no shape")
    shape = tuple(_number(each, name) for each in numbers)
    if math.prod(shape) > _LARGEST:
        raise CheckpointError(f"{name}: the shape {shape} is too large for any tensor")
    return shape


def _number(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise CheckpointError(f"{name}: {value!r:.80} is no size")
    return value


def _digits(value: Any, name: str) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{16}", value):
        raise CheckpointError(f"{name}: {value!r:.80} is no checksum")
    return value


def blocks_of(nbytes: int, block_nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the stop of each block of a piece, in bytes."""
    for start in range(0, nbytes, block_nbytes):
        yield start, min(start + block_nbytes, nbytes)
