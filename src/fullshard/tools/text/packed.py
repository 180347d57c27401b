"""Text as packed documents, in the tokens of a tokenizer.

Documents lie one after the other, and are cut into sequences of `seq` tokens that are predicted:

    documents    A A A A A A B B B C C C C C C C C        ends 6, 9, 17
    sequences    |- - - - - -|- - - - - -|                seq 6: 2 of them; each reads one token more

In an epoch each sequence comes once, in the order of `fullshard.ResumableOrder`. Within a sequence, no document sees
another.
"""

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from rich.filesize import decimal

import fullshard
from fullshard.tools.text.cache import CorpusError
from fullshard.tools.text.interface import IGNORED, Batch, Survey, survey_of
from fullshard.tools.text.tokenizer import FILE, Tokenizer
from fullshard.tools.text.tokens import Tokens

_SURVEY_SIZE = 2**24
"""Entropy and fingerprint read about this many tokens, in evenly spaced blocks."""
_BLOCK_SIZE = 2**18


@dataclasses.dataclass(frozen=True)
class Packing:
    """Sequences of packed documents. num_tokens: those to train on. batch: sequences of a step, over all ranks."""

    num_tokens: int
    ends: npt.NDArray[np.int64]
    seq: int
    batch: int
    seed: int

    @property
    def num_sequences(self) -> int:
        """Sequences in an epoch. What is left behind the last one, less than a sequence, is never seen."""
        return (self.num_tokens - 1) // self.seq

    @cached_property
    def order(
        self,
    ) -> "fullshard.ResumableOrder":  # not looked up before it is used: it imports the engine
        return fullshard.ResumableOrder(
            self.num_sequences, self.batch, seed=self.seed, rank=0, num_ranks=1
        )

    def start(self, step: int, index: int) -> int:
        """Return where sequence `index` of a step begins."""
        return self.order.sample(step, index) * self.seq

    def epochs(self, steps: int) -> float:
        """Return how often the text has been seen after so many steps."""
        return steps * self.batch / self.num_sequences

    def num_targets(self, step: int) -> int:
        """Return how many tokens all ranks together predict in a step: not the first of a document."""
        starts = (self.start(step, index) for index in range(self.batch))
        return sum(num_targets(self.ends, start, self.seq) for start in starts)


def borders(ends: npt.NDArray[np.int64], start: int, seq: int) -> npt.NDArray[np.int64]:
    """Return where documents begin within a sequence, counted from its first token: from 1 to seq.

    At seq itself begins the one whose first token the sequence reads only to be predicted, and that is not.
    """
    first, last = np.searchsorted(ends, (start, start + seq), side="right")
    return np.asarray(ends[first:last]) - start


def num_targets(ends: npt.NDArray[np.int64], start: int, seq: int) -> int:
    """Return how many tokens of the sequence that begins there are predicted."""
    first, last = np.searchsorted(ends, (start, start + seq), side="right")
    return seq - int(last - first)


def positions(seq: int, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return each token's position in its document: borders 2 and 5 in 6 tokens give 0 1 0 1 2 0."""
    found = np.arange(seq)
    begins = np.zeros(seq, np.int64)
    inside = starts[starts < seq]
    begins[inside] = inside
    return found - np.maximum.accumulate(begins)


class HeldOut(NamedTuple):
    """Tokens from `first` to the end, as sequences of `seq`: all of them, or `most` that are spread evenly."""

    tokens: Tokens
    first: int
    seq: int
    most: int

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) - self.first

    @property
    def num_all(self) -> int:
        return (self.num_tokens - 1) // self.seq

    @property
    def num_sequences(self) -> int:
        """Sequences that are measured."""
        return min(self.most, self.num_all)

    def start(self, index: int) -> int:
        """Return where a sequence begins; beyond the last, that of the last."""
        index = min(index, self.num_sequences - 1)
        return self.first + index * self.num_all // self.num_sequences * self.seq


@dataclasses.dataclass(frozen=True)
class PackedText:
    """Documents packed into sequences, with the methods of `ByteText`.

    across: whether documents of a sequence see those before them. remarks: what else a person should know.
    """

    tokenizer: Tokenizer
    tokens: Tokens
    paths: Sequence[Path]
    packing: Packing
    held: HeldOut | None
    across: bool
    remarks: Sequence[str]

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def size(self) -> str:
        return f"{len(self.tokens):,} tokens"

    @property
    def end_token(self) -> int | None:
        return self.tokenizer.end_token

    @cached_property
    def survey(self) -> Survey:
        tokens = self.tokens
        digest = hashlib.sha256(self.tokenizer.files[FILE])
        digest.update(f"{self.tokenizer.end} {len(tokens)} {self.packing.num_tokens}".encode())
        digest.update(tokens.ends[:_SURVEY_SIZE].tobytes())
        if self.held is not None:
            held = self.held.tokens
            for start in range(0, min(len(held), _SURVEY_SIZE), _BLOCK_SIZE):
                digest.update(
                    held.read([start], min(_BLOCK_SIZE, _SURVEY_SIZE - start))[0].tobytes()
                )
        return survey_of(
            lambda start, count: tokens.read([start], count)[0],
            len(tokens),
            self.vocab_size,
            digest,
            most=_SURVEY_SIZE,
            block=_BLOCK_SIZE,
        )

    def notes(self) -> list[str]:
        packing, num_files = self.packing, len(self.paths)
        num_documents = self.tokens.num_documents
        epoch = packing.num_sequences / packing.batch
        held = self.held and (
            f"held out: {self.held.num_tokens:,} tokens, {self.held.num_all:,} sequences, of which "
            f"{self.held.num_sequences:,} are measured"
        )
        return [
            f"text: {self.size} of {self.vocab_size:,} kinds in {num_documents:,} "
            f"document{'s' if num_documents != 1 else ''}, {num_files:,} file{'s' if num_files != 1 else ''} "
            f"({decimal(self.tokens.nbytes)}, kept in {self.tokens.folder}); unigram entropy "
            f"{self.survey.unigram_entropy:.3f} nats per token",
            f"an epoch is {packing.num_sequences:,} sequences, {epoch:,.1f} steps; documents end with "
            f"{self.tokenizer.end}",
            *([held] if held else []),
            *self.remarks,
        ]

    def batch(self, step: int, indices: range) -> Batch:
        starts = [self.packing.start(step, index) for index in indices]
        return self._batch(self.tokens, starts)

    def num_targets(self, step: int) -> int:
        if self.across:
            return self.packing.batch * self.packing.seq
        return self.packing.num_targets(step)

    def held_out(self, indices: range) -> Batch:
        assert self.held is not None
        starts = [self.held.start(index) for index in indices]
        return self._batch(self.held.tokens, starts)

    @property
    def num_held_out(self) -> int:
        return self.held.num_sequences if self.held else 0

    def num_held_out_targets(self) -> int:
        assert self.held is not None
        seq, ends = self.packing.seq, self.held.tokens.ends
        if self.across:
            return self.held.num_sequences * seq
        starts = (self.held.start(index) for index in range(self.held.num_sequences))
        return sum(num_targets(ends, start, seq) for start in starts)

    def epochs(self, steps: int) -> float:
        """Return how often the text has been seen after so many steps."""
        return self.packing.epochs(steps)

    def encode(self, prompt: str) -> list[int]:
        return [*self.tokenizer.before, *self.tokenizer.encode([prompt])[0]]

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens)

    def _batch(self, tokens: Tokens, starts: Sequence[int]) -> Batch:
        seq = self.packing.seq
        rows = torch.from_numpy(np.stack(tokens.read(starts, seq + 1)).astype(np.int64))
        inputs, targets = rows[:, :-1], rows[:, 1:]
        if self.across:
            return Batch(inputs, targets)
        targets, within = targets.clone(), np.empty(inputs.shape, np.int64)
        for row, start in enumerate(starts):
            found = borders(tokens.ends, start, seq)
            targets[row, torch.from_numpy(found - 1)] = IGNORED
            within[row] = positions(seq, found)
        is_whole = bool(within[:, 1:].all())
        return Batch(inputs, targets, None if is_whole else torch.from_numpy(within))


def check_length(num_tokens: int, seq: int, *, what: str) -> None:
    """Raise CorpusError for tokens that are fewer than one sequence. what: option and text."""
    if num_tokens < seq + 1:
        raise CorpusError(
            f"{what} has {num_tokens:,} tokens, but one sequence needs {seq + 1:,}. Give more text, or a "
            "smaller --seq."
        )


def where_held_out(tokens: Tokens, fraction: float) -> int:
    """Return where the last tokens begin that are at most that fraction of all, and whole documents.

    Of text that ends with a longer document, its end.
    """
    total = len(tokens)
    first = math.ceil(total * (1 - fraction))
    index = int(np.searchsorted(tokens.ends, first, side="left"))
    begins = int(tokens.ends[index]) if index < tokens.num_documents else total
    return begins if begins < total else first
