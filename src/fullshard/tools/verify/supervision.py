"""Sees to it that a process writes its record however it ends: well, by an exception, or not in time."""

import contextlib
import faulthandler
import sys
import sysconfig
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from torch import nn

import fullshard
from fullshard.tools.verify.record import Diary, Failure

_PACKAGE = Path(fullshard.__file__).parent
_OF_TORCH = ("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__")
_SLACK_S = 15.0  # after which a process that cannot even write its record is ended


class Supervised:
    """Runs a block: catches its exceptions into the diary, and its warnings; prints go to standard error.

    on_stuck: called in another thread, once the record of a block that takes too long is written.
    passing: exceptions that are not about the model, and stay the caller's.
    """

    def __init__(
        self,
        diary: Diary,
        timeout_s: float,
        *,
        on_stuck: Callable[[], object],
        passing: tuple[type[BaseException], ...] = (),
    ) -> None:
        self._diary, self._timeout_s, self._on_stuck = diary, timeout_s, on_stuck
        self._passing: tuple[type[BaseException], ...] = (KeyboardInterrupt, *passing)
        self._timer = threading.Timer(timeout_s, self._end_stuck)
        self._timer.daemon = True
        self._inner = contextlib.ExitStack()
        self._warned: list[warnings.WarningMessage] = []

    def __enter__(self) -> "Supervised":
        # In a thread that holds the interpreter for itself no timer of Python's comes.
        faulthandler.dump_traceback_later(
            self._timeout_s + _SLACK_S, exit=True, file=sys.__stderr__ or sys.stderr
        )
        self._timer.start()
        self._inner.enter_context(contextlib.redirect_stdout(sys.stderr))
        self._warned = self._inner.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("default")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()
        self._inner.close()
        self._note_warnings()
        if error is None:
            self._diary.write()
            return False
        if isinstance(error, self._passing):
            return False
        diary = self._diary
        diary.write(failure_of(error, diary.phase, diary.step, diary.paths))
        return True

    def _note_warnings(self) -> None:
        said = [each for each in self._warned if issubclass(each.category, UserWarning)]
        self._diary.note(warnings=tuple(dict.fromkeys(str(each.message) for each in said)))

    def _end_stuck(self) -> None:
        """Write what is known, with the stack of the thread that does not come to an end."""
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            trace = file.read()
        self._note_warnings()
        main = threading.main_thread().ident
        assert main is not None
        line, waits = stuck_at(main)
        text = f"did not end within {self._timeout_s:g} s"
        if waits:
            text += "; it waits for other ranks"
        diary = self._diary
        diary.write(Failure(diary.phase, diary.step, "TimeoutError", text, trace=trace, line=line))
        self._inner.close()  # standard output is what it was, for a report
        self._on_stuck()


def failure_of(
    error: BaseException, phase: str, step: int | None, paths: Mapping[int, str]
) -> Failure:
    """Say where an exception came from. paths: of the model's modules by their ids."""
    calls: list[str] = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        path, method = paths.get(id(frame.f_locals.get("self"))), frame.f_code.co_name
        is_torch = frame.f_code.co_filename == nn.modules.module.__file__ or method in _OF_TORCH
        if path is not None and not is_torch:
            calls.append(f"{path}.{method}".removeprefix("."))
    text = str(error) or type(error).__name__
    trace = "".join(traceback.format_exception(error))
    places = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    kind = type(error).__name__
    return Failure(phase, step, kind, text, tuple(calls), trace, line_of_user(places))


def line_of_user(places: Sequence[tuple[str, int]]) -> str:
    """Return the innermost of files and lines, which begin with the outermost, that is of no library."""
    libraries = (
        str(_PACKAGE),
        *(sysconfig.get_path(n) for n in ("stdlib", "purelib", "platlib")),
        "<",
    )
    own = [f"{file}:{line}" for file, line in places if not file.startswith(libraries)]
    return own[-1] if own else ""


def stuck_at(thread: int) -> tuple[str, bool]:
    """Return a thread's line as `line_of_user`, and whether it waits in a collective for other ranks."""
    frames = list(traceback.walk_stack(sys._current_frames()[thread]))
    places = [(frame.f_code.co_filename, line) for frame, line in frames]
    waits = places[0][0].startswith((str(_PACKAGE), str(Path(dist.__file__).parent)))
    return line_of_user(places[::-1]), waits
