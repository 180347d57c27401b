"""Text as packed documents, in the tokens of a tokenizer."""

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.filesize import decimal
from torch import Tensor

from fullshard.tools.text.files import CorpusError
from fullshard.tools.text.interface import IGNORED, Batch, Survey
from fullshard.tools.text.packing import Packing, borders, num_targets, positions
from fullshard.tools.text.tokenizer import FILE, Tokenizer
from fullshard.tools.text.tokens import Tokens

_SURVEY_SIZE = 2**24
"""Entropy and fingerprint read about this many tokens, in evenly spaced blocks."""
_BLOCK_SIZE = 2**18


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
    """Documents packed into sequences (`text/packing.py`).

    across: whether documents of a sequence see those before them. skipped: what was left out, read_as: which files are
    tables and which are not, both in words.
    """

    tokenizer: Tokenizer
    tokens: Tokens
    paths: Sequence[Path]
    packing: Packing
    held: "HeldOut | None" = None
    across: bool = False
    skipped: str = ""
    read_as: Sequence[str] = ()

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
        num_blocks = math.ceil(min(len(tokens), _SURVEY_SIZE) / _BLOCK_SIZE)
        stride = max(_BLOCK_SIZE, len(tokens) // num_blocks)
        counts = np.zeros(self.vocab_size, np.int64)
        digest = hashlib.sha256(self.tokenizer.files[FILE])
        digest.update(f"{self.tokenizer.end} {len(tokens)} {self.packing.num_tokens}".encode())
        digest.update(self.tokens.ends[:_SURVEY_SIZE].tobytes())
        if self.held is not None:
            held = self.held.tokens
            for start in range(0, min(len(held), _SURVEY_SIZE), _BLOCK_SIZE):
                digest.update(
                    held.read([start], min(_BLOCK_SIZE, _SURVEY_SIZE - start))[0].tobytes()
                )
        for block in range(num_blocks):
            (part,) = tokens.read([block * stride], _BLOCK_SIZE)
            digest.update(part.tobytes())
            counts += np.bincount(part, minlength=self.vocab_size)
        odds = counts[counts > 0] / counts.sum()
        return Survey(float(-(odds * np.log(odds)).sum()), digest.hexdigest())

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
            *self.read_as,
            *([f"of --data, not trained on: {self.skipped}"] if self.skipped else []),
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

    def epochs(self, steps: int) -> float | None:
        return self.packing.epochs(steps)

    def encode(self, prompt: str) -> list[int]:
        return [*self.tokenizer.before, *self.tokenizer.encode([prompt])[0]]

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens)

    def _batch(self, tokens: Tokens, starts: Sequence[int]) -> Batch:
        rows = _rows(tokens, starts, self.packing.seq)
        return Batch(rows[:, :-1], rows[:, 1:]) if self.across else _apart(rows, tokens, starts)


def _rows(tokens: Tokens, starts: Sequence[int], seq: int) -> Tensor:
    rows = np.stack(tokens.read(starts, seq + 1))
    return torch.from_numpy(rows.astype(np.int64))


def _apart(rows: Tensor, tokens: Tokens, starts: Sequence[int]) -> Batch:
    inputs, targets = rows[:, :-1], rows[:, 1:].clone()
    seq = inputs.shape[1]
    within = np.empty(inputs.shape, np.int64)
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
