"""Training text: files of bytes seen as one long string, and windows drawn from it.

The tokenizer is the identity on bytes, so a token is a byte and a loss is in nats per byte.
"""

import dataclasses
import hashlib
import math
import os
import struct
import sysconfig
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from fullshard.tools.text_files import (
    BINARY_NBYTES,
    CorpusError,
    JsonLines,
    TextFile,
    is_binary,
    open_text,
)

_SURVEY_NBYTES = 64 * 2**20
"""Entropy and fingerprint read at most this much, in evenly spaced blocks."""
_BLOCK_NBYTES = 2**20
_NUM_NAMED = 3
_NOT_OURS = frozenset(("site-packages", "dist-packages", "__pycache__"))


@dataclasses.dataclass
class Skipped:
    """The files of --data that are not trained on, by the reason.

    Prints as "2 binary (a.png, b.gif), 1 empty (c.txt)".
    """

    binary: list[str] = dataclasses.field(default_factory=list)
    hidden: list[str] = dataclasses.field(default_factory=list)
    empty: list[str] = dataclasses.field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.binary or self.hidden or self.empty)

    def __str__(self) -> str:
        return ", ".join(
            f"{len(names)} {reason} ({', '.join(names[:_NUM_NAMED])}"
            f"{', ...' if len(names) > _NUM_NAMED else ''})"
            for reason, names in vars(self).items()
            if names
        )


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Files in a fixed order with the offset of each end in their concatenation.

    Files of 10 and 6 bytes have ends (10, 16); byte 12 is byte 2 of the second. Nothing is kept
    in memory: a window is read when it is drawn, so text larger than memory works.

    val_nbytes: bytes at the end that are never trained on.
    """

    files: tuple[TextFile | JsonLines, ...]
    ends: tuple[int, ...]
    skipped: Skipped
    val_nbytes: int = 0

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(file.path for file in self.files)

    @property
    def nbytes(self) -> int:
        return self.ends[-1]

    def read(self, start: int, nbytes: int) -> bytes:
        """Read across file borders; raises CorpusError when a file is gone or has shrunk."""
        parts = []
        index = bisect_right(self.ends, start)
        while nbytes:
            offset = start - (self.ends[index - 1] if index else 0)
            wanted = min(nbytes, self.ends[index] - start)
            parts.append(self.files[index].read(offset, wanted))
            start, nbytes, index = start + wanted, nbytes - wanted, index + 1
        return b"".join(parts)

    @property
    def train_nbytes(self) -> int:
        return self.nbytes - self.val_nbytes

    @cached_property
    def survey(self) -> "Survey":
        """Measure the byte distribution and fingerprint the text (see _SURVEY_NBYTES)."""
        num_blocks = math.ceil(min(self.nbytes, _SURVEY_NBYTES) / _BLOCK_NBYTES)
        stride = max(_BLOCK_NBYTES, self.nbytes // num_blocks)
        counts = torch.zeros(256, dtype=torch.int64, device="cpu")
        digest = hashlib.sha256(struct.pack("<q", self.nbytes))
        for block in range(num_blocks):
            start = block * stride
            data = self.read(start, min(_BLOCK_NBYTES, self.nbytes - start))
            digest.update(data)
            counts += torch.bincount(_as_tensor(data), minlength=256)
        odds = counts[counts > 0].double() / counts.sum()
        return Survey(-(odds * odds.log()).sum().item(), digest.hexdigest())


@dataclasses.dataclass(frozen=True)
class Survey:
    """Entropy of single bytes in nats, which a model must beat to have learnt any context, and a
    fingerprint that tells one text from another."""

    unigram_entropy: float
    fingerprint: str


def open_corpus(
    data: Sequence[str], *, seq: int, text_field: str = "text", val_fraction: float = 0.0
) -> Corpus:
    """Find the text: files and folders in the given order, or Python's own library for none.

    Folders give their files in the order of their relative paths, without hidden, binary and empty
    ones. val_fraction: of the text, at its end, that is held out. Raises CorpusError for a path that does
    not exist, a binary file that is named itself, or text of which a part is shorter than one sequence.
    """
    skipped = Skipped()
    if data:
        paths = [path for name in data for path in _text_files(Path(name), skipped)]
    else:
        stdlib = Path(sysconfig.get_path("stdlib"))
        paths = _in_order(_python_files(stdlib), stdlib)
    files = [open_text(path, text_field) for path in paths]
    if data:
        skipped.empty += [str(file.path) for file in files if not file.nbytes]
    files = [file for file in files if file.nbytes]
    total = sum(file.nbytes for file in files)
    if total < seq + 1:
        source = ", ".join(data) or "Python's standard library (its .py files may not be installed)"
        raise CorpusError(
            f"--data: {source} holds {total} bytes of text in {len(files)} files, but one sequence "
            f"needs {seq + 1}. {f'Skipped: {skipped}. ' if skipped else ''}Give more text with "
            "--data, or a smaller --seq."
        )
    val_nbytes = int(total * val_fraction)
    if val_fraction and min(val_nbytes, total - val_nbytes) < seq + 1:
        raise CorpusError(
            f"--val-fraction {val_fraction}: of {total} bytes of text it holds {val_nbytes} out and leaves "
            f"{total - val_nbytes}, but one sequence needs {seq + 1}. Give more text, or another fraction."
        )
    ends = tuple(accumulate(file.nbytes for file in files))
    return Corpus(tuple(files), ends, skipped, val_nbytes)


def window_start(corpus: Corpus, *, seq: int, seed: int, step: int, index: int) -> int:
    """Choose where sequence `index` of a step begins.

    A hash of (seed, step, index) and no state: a resumed run draws what it would have drawn, and
    the sequences of a step are the same however many ranks share them.
    """
    key = hashlib.blake2b(struct.pack("<qqq", seed, step, index), digest_size=8).digest()
    return int.from_bytes(key, "little") % (corpus.train_nbytes - seq)


def draw_batch(corpus: Corpus, *, seq: int, seed: int, step: int, indices: range) -> Tensor:
    """Return (len(indices), seq + 1) tokens: inputs are [:, :-1], targets [:, 1:]."""
    rows = [
        corpus.read(window_start(corpus, seq=seq, seed=seed, step=step, index=index), seq + 1)
        for index in indices
    ]
    return torch.stack([_as_tensor(row) for row in rows]).long()


def held_out_batch(corpus: Corpus, *, seq: int, count: int, indices: range) -> Tensor:
    """Return sequences of the text that is held out, as `draw_batch` does: the same ones every time.

    They are ``count`` in all, spread evenly over that text; where it is short they overlap. An index
    beyond gives the last one.
    """
    room = corpus.val_nbytes - seq - 1
    last = count - 1
    starts = [corpus.train_nbytes + min(index, last) * room // max(1, last) for index in indices]
    return torch.stack([_as_tensor(corpus.read(start, seq + 1)) for start in starts]).long()


def _as_tensor(data: bytes) -> Tensor:
    # bytearray, because torch warns that it cannot keep a tensor on bytes from being written.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _text_files(path: Path, skipped: Skipped) -> list[Path]:
    if path.is_file():
        if is_binary(path):
            raise CorpusError(
                f"--data {path}: is not text (a zero byte comes within its first "
                f"{BINARY_NBYTES}), and a folder's files of that kind are skipped. Give text in "
                "UTF-8, which has none."
            )
        return [path]
    if not path.is_dir():
        raise CorpusError(f"--data {path}: no such file or folder.")
    found = []
    for file in _in_order(path.rglob("*"), path):
        if any(part.startswith(".") for part in file.relative_to(path).parts):
            skipped.hidden.append(str(file))
        elif is_binary(file):
            skipped.binary.append(str(file))
        else:
            found.append(file)
    return found


def _python_files(root: Path) -> Iterator[Path]:
    for folder, inner, names in os.walk(root):
        # Not entered: what is installed beside the library is ten times its size.
        inner[:] = [name for name in inner if name not in _NOT_OURS]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _in_order(paths: Iterable[Path], root: Path) -> list[Path]:
    return sorted((p for p in paths if p.is_file()), key=lambda p: p.relative_to(root).as_posix())
