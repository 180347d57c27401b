"""One process of one side: runs the script as ``python`` would, or trains the user's model, until its steps are done."""

import contextlib
import datetime
import faulthandler
import importlib
import os
import runpy
import signal
import sys
import sysconfig
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

import fullshard
from fullshard.local_ranks import die_with_launcher
from fullshard.peers.stacks import folded_traceback
from fullshard.tools.exits import Exit
from fullshard.tools.launch import Place, join_ranks, leave
from fullshard.tools.progress import Reporter, reporting
from fullshard.tools.verify.program import load_program, train
from fullshard.tools.verify.record import Diary, Failure
from fullshard.tools.verify.sides import Side
from fullshard.tools.verify.watching import EnoughError, Watch, Watching

_PACKAGE = Path(fullshard.__file__).parent
_OF_TORCH = ("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__")
_SLACK_S = 15.0  # after which a process that cannot even write its record is ended
_GRACE_S = 10.0  # for what a script does in ``finally`` blocks after its last step


class ScriptExitedError(Exception):
    """A script that ended itself with an exit code other than 0."""


def run_rank(side: Side, place: Place, *, threads: int, watch: type[Watching] = Watch) -> NoReturn:
    """Run one rank of a side from start to end; what went wrong is in its record, not in its exit code."""
    options = side.options
    die_with_launcher(place.launcher_pid)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(threads)

    def end_soon() -> None:
        side.diary.write()
        timer = threading.Timer(_GRACE_S, leave, (Exit.OK,))
        timer.daemon = True
        timer.start()

    with (
        reporting(rank=place.rank) as report,
        supervised(side.diary, options.timeout_s, on_stuck=lambda: leave(Exit.OK)),
    ):
        if not options.script:
            limit = datetime.timedelta(seconds=options.timeout_s)
            join_ranks(options.device, place.local_rank, timeout=limit)
        side.install()
        of_what = f" of {options.script}" if options.script else ""
        report.note(f"{options.ranks} ranks: {options.steps} steps{of_what}, {side.label}")
        run_side(side, report, on_over=end_soon, watch=watch)
    # Not by way of what is registered to run at exit: loggers that wait for a network, groups for ranks.
    leave(Exit.OK)


def run_side(
    side: Side,
    report: Reporter,
    *,
    on_over: Callable[[], object] = lambda: None,
    watch: type[Watching] = Watch,
) -> None:
    """Run what is verified in this process, and record it. Exceptions of the user's code pass.

    on_over: see `Watch`.
    """
    options = side.options
    side.diary.phase = "importing"
    program = None if options.script else load_program(options)
    seen = watch(side, report, on_over)  # from here on memory counts
    try:
        with seen.watching():
            if program is None:
                _run_script(side)
            else:
                report.begin(total=options.steps, done=0)
                assert isinstance(seen, Watch)
                train(program, side, seen)
    except EnoughError:
        return
    except BaseException as error:
        paths = {id(module): path for module, path in side.models.paths().items()}
        side.diary.paths = {**paths, **side.diary.paths}
        if seen.is_over:  # what it does in the end is its own affair
            return
        if not (isinstance(error, SystemExit) and options.script):
            raise
        if error.code:
            exited = ScriptExitedError(f"the script exited: {error.code}")
            raise exited.with_traceback(error.__traceback__) from None
    if not seen.is_over:
        seen.check()


def _run_script(side: Side) -> None:
    """Run the script, which finds its arguments, and modules beside it."""
    options = side.options
    side.diary.phase = "the script"
    side.seed()
    kept = sys.argv[:], sys.path[:]
    arguments = [each.replace("{side}", side.label) for each in options.arguments]
    sys.argv[:] = [options.script, *arguments]
    sys.path.insert(0, "" if options.is_module else str(Path(options.script).resolve().parent))
    try:
        with (
            side.names(),
            torch.compiler.set_stance("default" if side.is_compiled else "force_eager"),
            running_as_spawned(side.rank, options.ranks),
        ):
            if options.is_module:
                runpy.run_module(options.script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(options.script, run_name="__main__")
    finally:
        sys.argv[:], sys.path[:] = kept


class OtherRanksError(Exception):
    """A script that spawns another number of processes than there are ranks."""


@contextlib.contextmanager
def running_as_spawned(rank: int, num_ranks: int) -> Iterator[None]:
    """Let ``torch.multiprocessing.spawn`` run its function here, as this rank, inside the block.

    The ranks of a script that starts them itself are there already. Raises OtherRanksError from it if it would
    start another number of them.
    """

    def run(
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        join: bool = True,
        *_: Any,
        **__: Any,
    ) -> Any:
        if nprocs != num_ranks:
            raise OtherRanksError(
                f"the script spawns {nprocs} processes, and runs on {num_ranks} ranks: let it spawn as many, "
                f"or give --ranks {nprocs}"
            )
        # With it, a script's init_process_group would look for the launcher's store at its own address.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        fn(rank, *args)
        # A script that does not wait for its ranks waits for those here, which have ended.
        return None if join else types.SimpleNamespace(join=lambda *_, **__: True)

    # The function hides the module of its name.
    module = importlib.import_module("torch.multiprocessing.spawn")
    with contextlib.ExitStack() as stack:
        for where in (torch.multiprocessing, module):
            for name in ("spawn", "start_processes"):
                stack.enter_context(mock.patch.object(where, name, run))
        yield


# However a process ends, it leaves its record


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
    places = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    kind = type(error).__name__
    return Failure(
        phase, step, kind, text, tuple(calls), folded_traceback(error), line_of_user(places)
    )


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
