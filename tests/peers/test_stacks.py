"""Where threads are, as seen from another thread."""

from __future__ import annotations

import inspect
import json
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from fullshard.errors import DivergenceError, PeerLostError
from fullshard.peers import stacks
from fullshard.peers.stacks import (
    folded_traceback,
    line_in_program,
    line_of_error,
    lines_of,
    raise_in,
    runs_program_beside,
    shown_stack,
)
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
    assert line_in_program(lines_of(None)) == ""


def _frames_at(call: Callable[[Callable[[], object]], object]) -> types.FrameType:
    """Return the innermost frame of what a call runs."""
    frames: list[types.FrameType] = []
    call(lambda: frames.append(sys._getframe()))
    return frames[0]


def test_a_stack_shows_the_program_and_folds_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.Linear(1, 1)

    def in_libraries(run: Callable[[], object]) -> None:
        layer.register_forward_pre_hook(lambda *_: run() and None)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(layer, torch.ones(1)).result()

    lines = lines_of(_frames_at(in_libraries))
    shown = shown_stack(lines)
    assert len([line for line in shown if line.startswith("  File")]) == 2  # the two lambdas
    (folded,) = [line for line in shown if "..." in line]
    assert "of Python and torch" in folded
    monkeypatch.setattr(stacks, "shows_all_frames", True)
    assert len(shown_stack(lines)) > 6
    assert shown_stack([]) == ()


def test_a_traceback_keeps_its_causes_and_the_frame_that_raised() -> None:
    def fail() -> None:
        try:
            json.loads("{")
        except ValueError as error:
            raise RuntimeError("no batch") from error

    with pytest.raises(RuntimeError) as caught:
        fail()
    text = folded_traceback(caught.value)
    assert text.endswith("RuntimeError: no batch\n")
    assert "JSONDecodeError" in text
    assert "frames of Python" in text
    assert "in raw_decode" in text
    assert line_of_error(caught.value).startswith(__file__)


def test_an_error_left_in_a_call_is_shown_at_the_call_and_alone() -> None:
    """And not where torch came to next, nor below the error of the connection that ended the call."""
    file = torch.distributed.distributed_c10d.__file__
    known: dict[str, Any] = {"time": time}
    call = (
        "def call():\n try:\n  raise RuntimeError('GLHF')\n except RuntimeError:\n  time.sleep(0.5)"
    )
    exec(compile(call, file, "exec"), known)
    left = PeerLostError("rank 1 ended")
    timer = threading.Timer(0.1, raise_in, (threading.get_ident(), left))
    timer.start()
    with pytest.raises(PeerLostError) as caught:
        known["call"]()
    text = folded_traceback(caught.value)
    assert "GLHF" not in text
    assert 'known["call"]()' in text
    assert file not in text
    assert text.endswith("PeerLostError: rank 1 ended\n")


def test_a_call_is_named_and_not_a_decorator_around_it() -> None:
    def decorated(function: Callable[[], object]) -> Callable[[], object]:
        def inner_func() -> object:
            return function()

        return inner_func

    def all_reduce() -> types.FrameType:
        return sys._getframe()

    for code, expected in (
        (decorated(all_reduce).__code__, True),
        (torch.distributed.all_reduce.__code__, True),  # torch's own, of a decorator
        (inspect.unwrap(torch.distributed.all_reduce).__code__, False),
    ):
        assert stacks._is_wrapper(code) == expected
