"""What the training loop is given of text, and text as bytes: files seen as one long string, and windows drawn from it.

The tokenizer is the identity on bytes, so a token is a byte and a loss is in nats per byte. Text as packed documents
has the same methods (`PackedText`). Steps and sequences count from zero.
"""

import dataclasses
import hashlib
import math
import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from rich.filesize import decimal
from torch import Tensor

from fullshard.tools.config import TrainConfig
from fullshard.tools.text.documents import Source

NUM_BYTES = 256
_SURVEY_NBYTES, _BLOCK_NBYTES = 64 * 2**20, 2**20
IGNORED = -100
"""In the place of a token that is not to be predicted; what `cross_entropy` leaves out."""


class Batch(NamedTuple):
    """Sequences of text, each tensor (sequences, tokens) of int64.

    positions: of tokens in their documents, each of which sees itself alone; None where each row is one.
    """

    inputs: Tensor
    targets: Tensor
    positions: Tensor | None = None


class Survey(NamedTuple):
    """Entropy of single tokens in nats, which a model must beat to have learnt any context, and a
    fingerprint that tells one text from another."""

    unigram_entropy: float
    fingerprint: str


def survey_of(
    read: Callable[[int, int], npt.NDArray[Any]],
    size: int,
    num_kinds: int,
    digest: Any,
    *,
    most: int,
    block: int,
) -> Survey:
    """Count tokens, and add them to a digest of what else tells the text from another.

    read: gives tokens from a place on, as many as there are, at most so many. Text of more than `most` tokens is
    read in blocks that are spread evenly.
    """
    num_blocks = math.ceil(min(size, most) / block)
    stride = max(block, size // num_blocks)
    counts = np.zeros(num_kinds, np.int64)
    for number in range(num_blocks):
        part = read(number * stride, block)
        digest.update(part.tobytes())
        counts += np.bincount(part, minlength=num_kinds)
    odds = counts[counts > 0] / counts.sum()
    return Survey(float(-(odds * np.log(odds)).sum()), digest.hexdigest())


@dataclasses.dataclass(frozen=True)
class ByteText:
    """Files in a fixed order, with the offset of each end in their concatenation, and windows from anywhere in it.

    Files of 10 and 6 bytes have ends (10, 16); byte 12 is byte 2 of the second. Nothing is kept
    in memory: a window is read when it is drawn, so text larger than memory works. Each window is as likely as any other.

    val_nbytes: bytes at the end that are never trained on, of which some windows are measured. remarks: what else
    a person should know.
    """

    files: tuple[Source, ...]
    val_nbytes: int
    config: TrainConfig
    remarks: Sequence[str]
    end_token: None = None

    @cached_property
    def ends(self) -> tuple[int, ...]:
        return tuple(accumulate(file.nbytes for file in self.files))

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(file.path for file in self.files)

    @property
    def nbytes(self) -> int:
        return self.ends[-1]

    @property
    def train_nbytes(self) -> int:
        return self.nbytes - self.val_nbytes

    @property
    def size(self) -> str:
        """How much text there is, in words."""
        return f"{self.nbytes} bytes"

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

    @cached_property
    def survey(self) -> Survey:
        """Measure the distribution of bytes, and fingerprint the text, from as many bytes of it as suffice."""

        def read(start: int, nbytes: int) -> npt.NDArray[np.uint8]:
            return np.frombuffer(self.read(start, min(nbytes, self.nbytes - start)), np.uint8)

        digest = hashlib.sha256(struct.pack("<q", self.nbytes))
        return survey_of(
            read, self.nbytes, NUM_BYTES, digest, most=_SURVEY_NBYTES, block=_BLOCK_NBYTES
        )

    def notes(self) -> list[str]:
        """Say what a person should know about the text: how much there is, and what was left out."""
        num_files = len(self.paths)
        said = [
            f"corpus: {decimal(self.nbytes)} in {num_files} "
            f"file{'s' if num_files > 1 else ''}, "
            f"unigram entropy {self.survey.unigram_entropy:.3f} nats per byte"
        ]
        if self.val_nbytes:
            said.append(
                f"held out: {decimal(self.val_nbytes)}, of which {self.config.val_sequences:,} sequences of "
                f"{self.config.seq:,} are measured"
            )
        return [*said, *self.remarks]

    def start(self, step: int, index: int) -> int:
        """Choose where sequence `index` of a step begins.

        A hash of (seed, step, index) and no state: a resumed run draws what it would have drawn, and
        the sequences of a step are the same however many ranks share them.
        """
        key = struct.pack("<qqq", self.config.seed, step, index)
        drawn = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        return drawn % (self.train_nbytes - self.config.seq)

    def batch(self, step: int, indices: range) -> Batch:
        """Return some of the sequences of a step, which are the same however ranks share them."""
        return self._batch([self.start(step, index) for index in indices])

    def num_targets(self, step: int) -> int:
        """Return how many tokens all sequences of a step predict."""
        return self.config.global_batch * self.config.seq

    def held_out(self, indices: range) -> Batch:
        """Return sequences that are spread evenly over the text held out, the same ones every time.

        Where it is short they overlap; beyond the end comes the last one.
        """
        room, last = self.val_nbytes - self.config.seq - 1, self.config.val_sequences - 1
        first = self.train_nbytes
        return self._batch([first + min(index, last) * room // max(1, last) for index in indices])

    @property
    def num_held_out(self) -> int:
        """How many sequences are held out and measured."""
        return self.config.val_sequences if self.val_nbytes else 0

    def epochs(self, steps: int) -> float | None:
        """Return how often the text has been seen after so many steps; None, as windows are drawn at random."""
        return None

    def num_steps(self, epochs: float) -> int:
        """Return how many steps draw so often as many bytes as there are."""
        return math.ceil(min(epochs * self.train_nbytes / self.config.tokens_per_step, 2.0**63))

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens with which a sample begins."""
        return list(prompt.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def _batch(self, starts: Sequence[int]) -> Batch:
        parts = (np.frombuffer(self.read(start, self.config.seq + 1), np.uint8) for start in starts)
        rows = torch.from_numpy(np.stack([*parts]).astype(np.int64))
        return Batch(rows[:, :-1], rows[:, 1:])
