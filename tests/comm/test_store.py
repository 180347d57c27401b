"""The store that ranks met in, asked so that every question ends in time."""

from __future__ import annotations

import threading
import time

import pytest

from fullshard.comm.store import StoreInTime
from fullshard.errors import CommError, PeerTimeoutError


class Silent:
    """A store whose answers come once its link does."""

    def __init__(self) -> None:
        self.link = threading.Event()

    def add(self, key: str, amount: int) -> int:
        """Answer."""
        self.link.wait()
        if key == "broken":
            raise RuntimeError("Connection reset by peer")
        return amount


def test_a_question_without_an_answer_ends_and_later_ones_at_once_until_the_store_is_back() -> None:
    silent = Silent()
    store = StoreInTime(silent, 0.3)
    began = time.monotonic()
    for _ in range(20):
        with pytest.raises(CommError, match="answer"):
            store.add("key", 1)
    assert time.monotonic() - began < 3
    silent.link.set()
    deadline = time.monotonic() + 10
    answer = None
    while answer is None and time.monotonic() < deadline:
        try:
            answer = store.add("key", 2)
        except CommError:
            time.sleep(0.01)
    assert answer == 2
    with pytest.raises(RuntimeError, match="reset by peer"):
        store.add("broken", 1)


def test_whoever_waits_longer_says_itself_when_to_give_up() -> None:
    silent = Silent()
    looked = []

    def look() -> None:
        looked.append(time.monotonic())
        if len(looked) == 2:
            raise PeerTimeoutError("given up")

    with pytest.raises(PeerTimeoutError, match="given up"):
        StoreInTime(silent, 0.1).during(look).add("key", 1)
    silent.link.set()
