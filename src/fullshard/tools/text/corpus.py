"""Training text: files of bytes seen as one long string, and windows drawn from it.

The tokenizer is the identity on bytes, so a token is a byte and a loss is in nats per byte.
"""

import dataclasses
import hashlib
import math
import struct
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import torch
from rich.filesize import decimal
from torch import Tensor

from fullshard.tools.text.files import ByteSource, CorpusError
from fullshard.tools.text.finding import (
    HELD_OUT,
    TRAINING,
    Skipped,
    check_apart,
    find_sources,
    python_library,
)
from fullshard.tools.text.interface import Batch, Survey

NUM_BYTES = 256
_SURVEY_NBYTES = 64 * 2**20
"""Entropy and fingerprint read at most this much, in evenly spaced blocks."""
_BLOCK_NBYTES = 2**20


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Files in a fixed order with the offset of each end in their concatenation.

    Files of 10 and 6 bytes have ends (10, 16); byte 12 is byte 2 of the second. Nothing is kept
    in memory: a window is read when it is drawn, so text larger than memory works.

    val_nbytes: bytes at the end that are never trained on.
    """

    files: tuple[ByteSource, ...]
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
        counts = torch.zeros(NUM_BYTES, dtype=torch.int64, device="cpu")
        digest = hashlib.sha256(struct.pack("<q", self.nbytes))
        for block in range(num_blocks):
            start = block * stride
            data = self.read(start, min(_BLOCK_NBYTES, self.nbytes - start))
            digest.update(data)
            counts += torch.bincount(_as_tensor(data), minlength=NUM_BYTES)
        odds = counts[counts > 0].double() / counts.sum()
        return Survey(-(odds * odds.log()).sum().item(), digest.hexdigest())


def open_corpus(
    data: Sequence[str],
    *,
    seq: int,
    text_field: str = "",
    val_fraction: float = 0.0,
    val_data: Sequence[str] = (),
    cache: Path = Path(),
) -> Corpus:
    """Find the text: files and folders in the given order, or Python's own library for none.

    Folders give their files in the order of their relative paths, without hidden, binary and empty
    ones. val_fraction: of the text, at its end, that is held out. val_data: other text to hold out. cache: a
    folder for the bytes of tables. Raises CorpusError for a path that does not exist, a binary file that is
    named itself, or text of which a part is shorter than one sequence.
    """
    skipped = Skipped()
    if data:
        found = find_sources(data, TRAINING, text_field=text_field, cache=cache, skipped=skipped)
        skipped.empty += [str(file.path) for file in found if not file.nbytes]
    else:
        found = python_library()
    held = find_sources(val_data, HELD_OUT, text_field=text_field, cache=cache, skipped=Skipped())
    check_apart(found, held)
    files = [file for file in (*found, *held) if file.nbytes]
    total = sum(file.nbytes for file in files)
    num_held = sum(file.nbytes for file in held)
    if total - num_held < seq + 1:
        source = ", ".join(data) or "Python's standard library (its .py files may not be installed)"
        num_files = sum(1 for file in found if file.nbytes)
        raise CorpusError(
            f"--data: {source} holds {total - num_held} bytes of text in {num_files} files, but one sequence "
            f"needs {seq + 1}. {f'Skipped: {skipped}. ' if skipped else ''}Give more text with "
            "--data, or a smaller --seq."
        )
    if val_data and num_held < seq + 1:
        raise CorpusError(
            f"--val-data: {', '.join(val_data)} holds {num_held} bytes of text, but one sequence needs {seq + 1}. "
            "Give more text, or a smaller --seq."
        )
    val_nbytes = num_held or int(total * val_fraction)
    if val_fraction and min(val_nbytes, total - val_nbytes) < seq + 1:
        raise CorpusError(
            f"--val-fraction {val_fraction}: of {total} bytes of text it holds {val_nbytes} out and leaves "
            f"{total - val_nbytes}, but one sequence needs {seq + 1}. Give more text, or another fraction."
        )
    ends = tuple(accumulate(file.nbytes for file in files))
    return Corpus(tuple(files), ends, skipped.without(held), val_nbytes)


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


@dataclasses.dataclass(frozen=True)
class ByteText:
    """A corpus as the text of a run: sequences are windows from anywhere in it, each as likely as any other.

    num_sequences: windows of the text held out that are measured. read_as: which files are tables and which are not,
    in words.
    """

    corpus: Corpus
    seq: int
    batch_size: int
    seed: int
    num_sequences: int
    vocab_size: int = NUM_BYTES
    end_token: None = None
    read_as: Sequence[str] = ()

    @property
    def paths(self) -> tuple[Path, ...]:
        return self.corpus.paths

    @property
    def size(self) -> str:
        return f"{self.corpus.nbytes} bytes"

    @property
    def survey(self) -> Survey:
        return self.corpus.survey

    def notes(self) -> list[str]:
        num_files = len(self.paths)
        said = [
            f"corpus: {decimal(self.corpus.nbytes)} in {num_files} "
            f"file{'s' if num_files > 1 else ''}, "
            f"unigram entropy {self.survey.unigram_entropy:.3f} nats per byte"
        ]
        if self.corpus.val_nbytes:
            said.append(
                f"held out: {decimal(self.corpus.val_nbytes)}, of which {self.num_sequences:,} sequences of "
                f"{self.seq:,} are measured"
            )
        said += self.read_as
        if self.corpus.skipped:
            said.append(f"of --data, not trained on: {self.corpus.skipped}")
        return said

    def batch(self, step: int, indices: range) -> Batch:
        return _as_batch(
            draw_batch(self.corpus, seq=self.seq, seed=self.seed, step=step, indices=indices)
        )

    def num_targets(self, step: int) -> int:
        return self.batch_size * self.seq

    def held_out(self, indices: range) -> Batch:
        count = self.num_sequences
        return _as_batch(held_out_batch(self.corpus, seq=self.seq, count=count, indices=indices))

    @property
    def num_held_out(self) -> int:
        return self.num_sequences if self.corpus.val_nbytes else 0

    def num_held_out_targets(self) -> int:
        return self.num_sequences * self.seq

    def epochs(self, steps: int) -> float | None:
        return None

    def encode(self, prompt: str) -> list[int]:
        return list(prompt.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


def _as_batch(rows: Tensor) -> Batch:
    return Batch(rows[:, :-1], rows[:, 1:])
