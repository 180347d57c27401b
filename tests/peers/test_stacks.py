"""Where threads are, as seen from another thread."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from fullshard.errors import DivergenceError
from fullshard.peers.stacks import line_in_program, raise_in, runs_program_beside
from tests.autograd_thread import waiting_for_backward


@pytest.fixture
def in_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[Callable[[], object]], threading.Thread]]:
    """Return what starts a function in a thread; all are waited for. Threads of other tests are not seen."""
    threads = []
    others = set(sys._current_frames())
    see_all = sys._current_frames
    monkeypatch.setattr(
        sys, "_current_frames", lambda: {i: f for i, f in see_all().items() if i not in others}
    )

    def start(function: Callable[[], object]) -> threading.Thread:
        threads.append(threading.Thread(target=function, daemon=True))
        threads[-1].start()
        return threads[-1]

    yield start
    for thread in threads:
        thread.join(10)


def test_threads_of_libraries_do_not_count_as_the_program(
    in_thread: Callable[[Callable[[], object]], threading.Thread],
) -> None:
    here = threading.get_ident()
    ended = threading.Event()
    in_thread(ended.wait)  # a thread with frames of the standard library alone, as libraries have
    assert not runs_program_beside(here)

    def of_program() -> None:
        ended.wait()

    in_thread(of_program)
    assert runs_program_beside(here)
    ended.set()


def test_a_thread_that_waits_for_its_backward_does_not_count_as_the_program(
    in_thread: Callable[[Callable[[], object]], threading.Thread],
) -> None:
    """On a device, hooks of a backward run in a thread of autograd's."""
    here, ended = threading.get_ident(), threading.Lock()
    ended.acquire()
    in_thread(lambda: waiting_for_backward(ended.acquire))
    time.sleep(0.1)
    assert not runs_program_beside(here)
    ended.release()


def test_an_error_reaches_a_thread_with_its_words(
    in_thread: Callable[[Callable[[], object]], threading.Thread],
) -> None:
    caught: list[BaseException] = []
    begun = threading.Event()

    def run() -> None:
        try:
            begun.set()
            while True:
                pass
        except DivergenceError as error:
            caught.append(error)

    thread = in_thread(run)
    begun.wait(5)
    assert thread.ident is not None
    raise_in(thread.ident, DivergenceError("rank 1 waits"))
    thread.join(10)
    assert [str(error) for error in caught] == ["rank 1 waits"]
    assert type(caught[0]).__name__ == "DivergenceError"


def test_a_frame_without_any_line_of_the_program_has_none() -> None:
    assert line_in_program(None) == ""
