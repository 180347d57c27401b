"""Which tokens a step is given: every sequence once an epoch, documents apart, each token predicted once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fullshard.tools.config import TrainConfig
from fullshard.tools.text.packed import PackedText, Sequences, borders, num_targets, positions

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=12)


def _ends(lengths: list[int]) -> np.ndarray:
    return np.cumsum(np.array(lengths, np.int64))


def _text(lengths: list[int], seq: int, batch: int) -> PackedText:
    """Return text of documents of such lengths, of which only their ends are known."""
    tokens: Any = SimpleNamespace(ends=_ends(lengths))
    config = TrainConfig(seq=seq, batch=batch, ranks=1, seed=3)
    nothing: Any = None
    return PackedText(nothing, [], Sequences(tokens, 0, sum(lengths), seq), None, config, [])


@given(num_tokens=st.integers(10, 200), seq=st.integers(1, 8), batch=st.integers(1, 7))
def test_an_epoch_has_every_sequence_once_and_the_next_begins_behind_it(
    num_tokens: int, seq: int, batch: int
) -> None:
    text = _text([num_tokens], seq, batch)
    count = text.training.num
    drawn = [text.start(n // batch, n % batch) for n in range(2 * count)]
    every = [number * seq for number in range(count)]
    assert sorted(drawn[:count]) == sorted(drawn[count:]) == every
    assert max(drawn) + seq + 1 <= num_tokens
    assert text.epochs(count) == batch


@given(lengths=LENGTHS, seq=st.integers(1, 9), start=st.integers(0, 60))
def test_each_token_counts_from_the_beginning_of_its_document(
    lengths: list[int], seq: int, start: int
) -> None:
    ends = _ends(lengths)
    start = min(start, max(0, int(ends[-1]) - seq - 1))
    seq = min(seq, int(ends[-1]) - 1 - start)
    if seq < 1:
        return
    document = np.repeat(np.arange(len(lengths)), lengths)
    found = borders(ends, start, seq)
    within = positions(seq, found)
    for offset in range(seq):
        same = document[start : start + offset + 1] == document[start + offset]
        assert within[offset] == same.sum() - 1
    is_apart = document[start : start + seq] != document[start + 1 : start + seq + 1]
    assert list(np.flatnonzero(is_apart)) == list(found - 1)
    assert num_targets(ends, start, seq) == seq - is_apart.sum()


def test_a_step_counts_the_targets_of_all_its_sequences() -> None:
    text = _text([3, 4, 14], 5, 4)
    assert text.training.num == 4
    # Documents begin at 3 and 7, each in another sequence; all four are in one step.
    assert text.num_targets(0) == 20 - 2
