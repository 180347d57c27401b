"""The store that ranks met in, asked so that every question ends in time."""

from __future__ import annotations

import os
import resource
import threading
import time

import pytest

from fullshard.errors import CommError, PeerTimeoutError
from fullshard.peers import store as store_module
from fullshard.peers.store import StoreInTime, connected_store


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

    def clone(self) -> Silent:
        """Connect once more."""
        self.link.wait()
        return self


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


def test_a_store_that_lets_nobody_in_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own connection tries again for as long as ranks may take to meet."""
    silent = Silent()
    monkeypatch.setattr(store_module, "default_store", lambda: silent)
    monkeypatch.setattr(store_module, "_CONNECT_S", 0.3)
    began = time.monotonic()
    with pytest.raises(CommError, match="answer"):
        connected_store(1800.0)
    assert time.monotonic() - began < 10
    silent.link.set()


def test_a_process_that_may_open_no_more_files_does_not_try_to_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_module, "default_store", Silent)
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(CommError, match="ulimit -n"):
            connected_store(1800.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
