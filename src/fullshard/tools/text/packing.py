"""Which tokens a step is given, from numbers alone: no token is read here.

Documents lie one after the other, and are cut into sequences of `seq` tokens that are predicted:

    documents    A A A A A A B B B C C C C C C C C        ends 6, 9, 17
    sequences    |- - - - - -|- - - - - -|                seq 6: 2 of them; each reads one token more

In an epoch each sequence comes once, in an order that depends on seed and epoch alone. So a resumed run goes
on exactly, and ranks need not tell each other anything. Within a sequence, no document sees another.
"""

import dataclasses
import hashlib
import math
import struct

import numpy as np
import numpy.typing as npt

_ROUNDS = 4


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

    def start(self, step: int, index: int) -> int:
        """Return where sequence `index` of a step begins."""
        epoch, number = divmod(step * self.batch + index, self.num_sequences)
        return shuffled(number, self.num_sequences, seed=self.seed, epoch=epoch) * self.seq

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


def shuffled(number: int, count: int, *, seed: int, epoch: int) -> int:
    """Return where an order of `count` things, chosen by seed and epoch, has put one: a permutation.

    Halves of the number's bits are mixed with hashes of each other, which can be undone and so is one to one
    (a Feistel network, 1973); a result beyond `count` is mixed again. No memory, and the same in every version
    of every library.
    """
    half = max(1, math.ceil((count - 1).bit_length() / 2))
    mask = (1 << half) - 1
    while True:
        left, right = number >> half, number & mask
        for each in range(_ROUNDS):
            key = struct.pack("<qqqq", seed, epoch, each, right)
            mixed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
            left, right = right, left ^ (mixed & mask)
        number = (left << half) | right
        if number < count:
            return number
