"""Sees to it that a process writes its record however it ends: well, by an exception, or not in time."""

import contextlib
import faulthandler
import sys
import sysconfig
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import nn

import fullshard
from fullshard.tools.verify.record import Diary, Failure

_PACKAGE = Path(fullshard.__file__).parent
_OF_TORCH = ("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__")
_SLACK_S = 15.0  # after which a process that cannot even write its record is ended


@contextlib.contextmanager
def supervised(
    diary: Diary,
    timeout_s: float,
    *,
    on_stuck: Callable[[], object],
    passing: tuple[type[BaseException], ...] = (),
) -> Iterator[None]:
    """Run a block: its exceptions are caught into the diary, and its warnings; prints go to standard error.

    on_stuck: called in another thread, once the record of a block that takes too long is written.
    passing: exceptions that are not about the model, and stay the caller's.
    """
    inside = contextlib.ExitStack()
    warned: list[warnings.WarningMessage] = []

    def write(failure: Failure | None) -> None:
        texts = [str(each.message) for each in warned if issubclass(each.category, UserWarning)]
        diary.run.warnings = list(dict.fromkeys(texts))
        diary.run.failure = failure or diary.run.failure
        diary.write()

    def end_stuck() -> None:
        """Write what is known, with the stack of the thread that does not come to an end."""
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            trace = file.read()
        main = threading.main_thread().ident
        assert main is not None
        line, waits = stuck_at(main)
        text = f"did not end within {timeout_s:g} s"
        if waits:
            text += "; it waits for other ranks"
        write(Failure(diary.phase, diary.step, "TimeoutError", text, trace=trace, line=line))
        inside.close()  # standard output is what it was, for a report
        on_stuck()

    timer = threading.Timer(timeout_s, end_stuck)
    timer.daemon = True
    # In a thread that holds the interpreter for itself no timer of Python's comes.
    faulthandler.dump_traceback_later(
        timeout_s + _SLACK_S, exit=True, file=sys.__stderr__ or sys.stderr
    )
    timer.start()
    failure = None
    try:
        with inside:
            inside.enter_context(contextlib.redirect_stdout(sys.stderr))
            warned = inside.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("default")
            yield
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, *passing)):
            raise
        failure = failure_of(error, diary.phase, diary.step, diary.paths)
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()
    write(failure)


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
