"""The folder that an export writes to, until it gets its name, and the names of its files."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fullshard.checkpoint.local import (
    LocalDraft,
    discard,
    others_in,
    removed_folders,
    set_aside,
    sync_folder,
    write_durably,
)
from fullshard.checkpoint.write import Described
from fullshard.errors import CheckpointError
from fullshard.huggingface.files import INDEX, WEIGHTS

CONFIG = "config.json"
# Of files beside weights: configurations, tokenizers, chat templates, code of models.
_SIDE_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"})
_OF_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin.index.json")
# What may be replaced with an export: names that models and tokenizers of Transformers are saved under.
_USUAL = frozenset(
    {
        INDEX,
        CONFIG,
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "generation_config.json",
        "merges.txt",
        "preprocessor_config.json",
        "processor_config.json",
        "sentencepiece.bpe.model",
        "special_tokens_map.json",
        "spiece.model",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)
_WEIGHTS_NAME = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY_UNITS = {f"{unit}I": 1024**power for power, unit in enumerate("KMGT", 1)}


class ToExport(NamedTuple):
    """A tensor: its name where it comes from, and what it is to be in the file."""

    source: str
    target: Described


class PlannedFile(NamedTuple):
    """A file of weights and its tensors, in the order in which they lie there."""

    name: str
    tensors: Sequence[ToExport]


def planned_files(tensors: Sequence[ToExport], most_nbytes: int) -> list[PlannedFile]:
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


def index_of(files: Sequence[PlannedFile]) -> bytes:
    """Return the index, which says in which file each tensor is."""
    names = {each.target.name: file.name for file in files for each in file.tensors}
    total = sum(each.target.nbytes for file in files for each in file.tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
    return as_json(index)


def as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def size_of(text: int | str) -> int:
    """Return a number of bytes: 5_000_000_000, "5GB" and "4.66GiB" are about the same."""
    if not isinstance(text, int | str):
        raise CheckpointError(f"max_shard_size is {text!r}: give bytes, or a size such as '5GB'.")
    if isinstance(text, int):
        size = float(text)
    else:
        found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([KMGT]?I?)B?\s*", text.upper())
        unit = (_UNITS | _BINARY_UNITS).get(found[2]) if found else None
        if found is None or unit is None:
            raise CheckpointError(
                f"max_shard_size is {text!r}: give bytes, or a size such as '5GB'."
            )
        size = float(found[1]) * unit
    if size < 1:
        raise CheckpointError(f"max_shard_size is {text!r}: must be at least a byte.")
    return int(size)


def side_files(folder: Path) -> Iterator[str]:
    """Yield the names of what lies beside the weights in a folder, and in folders in it."""
    for pattern in ("*", "*/*"):
        for path in sorted(folder.glob(pattern)):
            name = str(path.relative_to(folder))
            if _is_side_file(path) and not name.startswith("."):
                yield name


def _is_side_file(path: Path) -> bool:
    is_of_weights = path.name.endswith(_OF_WEIGHTS)
    return path.is_file() and path.suffix in _SIDE_SUFFIXES and not is_of_weights


class ExportFolder(LocalDraft):
    """A folder that is being written. It has its name only once all of it is on the disk.

    names: of files that it is to have beside weights. What else is in a folder that it replaces has to be
    of names that exports have.
    """

    def __init__(
        self, target: Path, tag: str, *, overwrite: bool, names: Collection[str] = ()
    ) -> None:
        self._names = frozenset(names)
        super().__init__(target, tag, overwrite=overwrite)

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write small files, by names that may have a folder in them."""
        for name, content in files.items():
            path = self.path / name
            if path.parent != self.path:
                path.parent.mkdir(exist_ok=True)
            write_durably(path, content)
            sync_folder(path.parent)

    def finish(self) -> None:
        """Give the folder its name.

        A folder that it replaces loses its name just before: a crash between leaves both, neither under
        the name.
        """
        self.check_target()
        sync_folder(self.path)
        self._remove_old()  # what a crash has left
        old = set_aside(self.target) if self.target.is_dir() else None
        try:
            self.path.rename(self.target)
        except OSError:
            if old is not None:
                old.rename(self.target)
            raise
        self.settle(self.target.parent, self.target)
        self._remove_old()

    def _remove_old(self) -> None:
        for old in removed_folders(self.target.parent, self.target.name):
            discard(old, self.is_ours)

    def is_known(self, name: str) -> bool:
        """Whether an export may have written a file of this name, which may be replaced then."""
        return name in self._names or name in _USUAL or bool(_WEIGHTS_NAME.fullmatch(name))

    def check_target(self) -> bool:
        """Return whether something is to be replaced.

        Raises CheckpointError if it is something that an export would not have written.
        """
        target = self.target
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            raise CheckpointError(f"{target}: is a file or a link. Name another path.")
        if not target.is_dir() or not any(target.iterdir()):
            return False
        if not self.overwrite:
            raise CheckpointError(
                f"{target}: is there already. Name another path, or pass overwrite=True to replace it."
            )
        if others := others_in(target, self.is_ours):
            raise CheckpointError(
                f"{target}: holds {others[0]}, which no export has written, and would be removed with the "
                "folder. Name another path, or move that file."
            )
        return True
