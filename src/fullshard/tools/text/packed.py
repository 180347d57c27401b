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
from fullshard.tools.config import TrainConfig
from fullshard.tools.text.cache import CorpusError
from fullshard.tools.text.corpus import IGNORED, Batch, Survey, survey_of
from fullshard.tools.text.tokenizer import FILE, Tokenizer
from fullshard.tools.text.tokens import Tokens

_SURVEY_SIZE = 2**24
"""Entropy and fingerprint read about this many tokens, in evenly spaced blocks."""
_BLOCK_SIZE = 2**18


def borders(ends: npt.NDArray[np.int64], start: int, seq: int) -> npt.NDArray[np.int64]:
    """Return where documents begin within a sequence, counted from its first token: from 1 to seq.

    At seq itself begins the one whose first token the sequence reads only to be predicted, and that is not.
    """
    first, last = np.searchsorted(ends, (start, start + seq), side="right")
    return np.asarray(ends[first:last]) - start


def num_targets(ends: npt.NDArray[np.int64], start: int, seq: int) -> int:
    """Return how many tokens of the sequence that begins there are predicted: not the first of a document."""
    return seq - len(borders(ends, start, seq))


def positions(seq: int, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return each token's position in its document: borders 2 and 5 in 6 tokens give 0 1 0 1 2 0."""
    found = np.arange(seq)
    begins = np.zeros(seq, np.int64)
    inside = starts[starts < seq]
    begins[inside] = inside
    return found - np.maximum.accumulate(begins)


class Sequences(NamedTuple):
    """Tokens from `first` to `last`, cut into sequences of `seq` that are predicted.

    What is left behind the last sequence, less than one, is never seen.
    """

    tokens: Tokens
    first: int
    last: int
    seq: int

    @property
    def num_tokens(self) -> int:
        return self.last - self.first

    @property
    def num(self) -> int:
        return (self.num_tokens - 1) // self.seq

    def start(self, index: int) -> int:
        """Return where a sequence begins."""
        return self.first + index * self.seq


@dataclasses.dataclass(frozen=True)
class PackedText:
    """Documents packed into sequences, with the methods of `ByteText`."""

    tokenizer: Tokenizer
    paths: Sequence[Path]
    training: Sequences
    held: Sequences | None
    config: TrainConfig
    remarks: Sequence[str]

    @property
    def size(self) -> str:
        return f"{len(self.training.tokens):,} tokens"

    @property
    def end_token(self) -> int | None:
        return self.tokenizer.end_token

    @cached_property
    def survey(self) -> Survey:
        tokens = self.training.tokens
        digest = hashlib.sha256(self.tokenizer.files[FILE])
        digest.update(f"{self.tokenizer.end} {len(tokens)} {self.training.num_tokens}".encode())
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
            self.tokenizer.vocab_size,
            digest,
            most=_SURVEY_SIZE,
            block=_BLOCK_SIZE,
        )

    def notes(self) -> list[str]:
        tokens, num_files, num = self.training.tokens, len(self.paths), self.training.num
        num_documents = tokens.num_documents
        held = self.held and (
            f"held out: {self.held.num_tokens:,} tokens, {self.held.num:,} sequences, of which "
            f"{self.num_held_out:,} are measured"
        )
        return [
            f"text: {self.size} of {self.tokenizer.vocab_size:,} kinds in {num_documents:,} "
            f"document{'s' if num_documents != 1 else ''}, {num_files:,} file{'s' if num_files != 1 else ''} "
            f"({decimal(tokens.nbytes)}, kept in {tokens.folder}); unigram entropy "
            f"{self.survey.unigram_entropy:.3f} nats per token",
            f"an epoch is {num:,} sequences, {num / self.config.global_batch:,.1f} steps, so {self.config.steps:,} are "
            f"{self.epochs(self.config.steps):,.1f} epochs; documents end with {self.tokenizer.end}",
            *([held] if held else []),
            *self.remarks,
        ]

    @cached_property
    def _order(self) -> "fullshard.ResumableOrder":
        # Not looked up before it is used: it imports the engine.
        return fullshard.ResumableOrder(
            self.training.num,
            self.config.global_batch,
            seed=self.config.seed,
            rank=0,
            num_ranks=1,
        )

    def start(self, step: int, index: int) -> int:
        """Return where sequence `index` of a step begins."""
        return self.training.start(self._order.sample(step, index))

    def batch(self, step: int, indices: range) -> Batch:
        return self._batch(self.training.tokens, [self.start(step, index) for index in indices])

    def num_targets(self, step: int) -> int:
        seq, num_sequences = self.config.seq, self.config.global_batch
        if self.config.across_documents:
            return num_sequences * seq
        starts = (self.start(step, index) for index in range(num_sequences))
        return sum(num_targets(self.training.tokens.ends, start, seq) for start in starts)

    def held_out(self, indices: range) -> Batch:
        """Return sequences that are spread evenly over those held out; beyond the end comes the last one."""
        assert self.held is not None
        number, last = self.num_held_out, self.num_held_out - 1
        places = (min(index, last) * self.held.num // number for index in indices)
        return self._batch(self.held.tokens, [*map(self.held.start, places)])

    @property
    def num_held_out(self) -> int:
        return min(self.config.val_sequences, self.held.num) if self.held else 0

    def epochs(self, steps: int) -> float:
        """Return how often the text has been seen after so many steps."""
        return steps * self.config.global_batch / self.training.num

    def num_steps(self, epochs: float) -> int:
        """Return how many steps see the text so often; more epochs than can be counted are a very large number."""
        return math.ceil(min(epochs * self.training.num / self.config.global_batch, 2.0**63))

    def encode(self, prompt: str) -> list[int]:
        return [*self.tokenizer.before, *self.tokenizer.encode([prompt])[0]]

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens)

    def _batch(self, tokens: Tokens, starts: Sequence[int]) -> Batch:
        seq = self.config.seq
        rows = torch.from_numpy(np.stack(tokens.read(starts, seq + 1)).astype(np.int64))
        inputs, targets = rows[:, :-1], rows[:, 1:]
        if self.config.across_documents:
            return Batch(inputs, targets)
        targets, within = targets.clone(), np.empty(inputs.shape, np.int64)
        for row, start in enumerate(starts):
            found = borders(tokens.ends, start, seq)
            targets[row, torch.from_numpy(found - 1)] = IGNORED
            within[row] = positions(seq, found)
        is_whole = bool(within[:, 1:].all())
        return Batch(inputs, targets, None if is_whole else torch.from_numpy(within))


def check_length(sequences: Sequences, *, what: str) -> None:
    """Raise CorpusError for tokens that are fewer than one sequence. what: option and text."""
    if sequences.num < 1:
        raise CorpusError(
            f"{what} has {sequences.num_tokens:,} tokens, but one sequence needs {sequences.seq + 1:,}. Give more "
            "text, or a smaller --seq."
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
