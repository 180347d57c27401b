"""What the training loop wants of text, whatever it is made of."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

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


class Text(Protocol):
    """Text to train on and text held out, for one run. Steps and sequences count from zero."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def paths(self) -> Sequence[Path]:
        """What is read."""
        ...

    @property
    def size(self) -> str:
        """How much text there is, in words."""
        ...

    @property
    def survey(self) -> Survey: ...

    def notes(self) -> list[str]:
        """Say what a person should know about the text: how much there is, and what was left out."""
        ...

    def batch(self, step: int, indices: range) -> Batch:
        """Return some of the sequences of a step, which are the same however ranks share them."""
        ...

    def num_targets(self, step: int) -> int:
        """Return how many tokens all sequences of a step predict."""
        ...

    def held_out(self, indices: range) -> Batch:
        """Return some of the sequences that are held out, the same ones every time; beyond the end the last one."""
        ...

    @property
    def num_held_out(self) -> int:
        """How many sequences are held out and measured."""
        ...

    def num_held_out_targets(self) -> int:
        """Return how many tokens the sequences that are held out predict."""
        ...

    def epochs(self, steps: int) -> float | None:
        """Return how often the text has been seen after so many steps; None where it is drawn at random."""
        ...

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens with which a sample begins."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    @property
    def end_token(self) -> int | None:
        """The token with which a document ends, and so a sample."""
        ...
