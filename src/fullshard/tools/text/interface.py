"""What text of every kind gives: batches, and a survey of its tokens."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

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
