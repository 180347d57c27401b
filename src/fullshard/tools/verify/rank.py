"""One process of one side: runs the script as ``python`` would, or trains the user's model, until its steps are done."""

import contextlib
import datetime
import importlib
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing

import fullshard
from fullshard.local_ranks import die_with_launcher
from fullshard.tools.exits import Exit
from fullshard.tools.launch import Place
from fullshard.tools.progress import Reporter, Reporting
from fullshard.tools.verify.options import VerifyOptions
from fullshard.tools.verify.program import load_program, train
from fullshard.tools.verify.sides import Side, side_of
from fullshard.tools.verify.supervision import supervised
from fullshard.tools.verify.watching import EnoughError, Watch

_GRACE_S = 10.0  # for what a script does in ``finally`` blocks after its last step


class ScriptExitedError(Exception):
    """A script that ended itself with an exit code other than 0."""


def run_rank(
    options: VerifyOptions, place: Place, folder: Path, *, is_whole: bool, threads: int
) -> Exit:
    """Run one rank from start to end; what went wrong is in its record, not in its exit code."""
    die_with_launcher(place.launcher_pid)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(threads)
    side = side_of(options, folder, place.rank, is_whole=is_whole)

    def end_soon() -> None:
        side.diary.write()
        timer = threading.Timer(_GRACE_S, leave, (Exit.OK,))
        timer.daemon = True
        timer.start()

    with (
        Reporting(rank=place.rank) as report,
        supervised(side.diary, options.timeout_s, on_stuck=lambda: leave(Exit.OK)),
    ):
        if not options.script:
            _join(options, place)
        fullshard.set_default_comm(options.comm)
        fullshard.install()  # what is imported from torch.distributed.fsdp is fullshard's then
        of_what = f" of {options.script}" if options.script else ""
        report.note(f"{options.ranks} ranks: {options.steps} steps{of_what}, {side.label}")
        run_side(side, report, on_over=end_soon)
    # Not by way of what is registered to run at exit: loggers that wait for a network, groups for ranks.
    return leave(Exit.OK)


def run_side(side: Side, report: Reporter, *, on_over: Callable[[], object] = lambda: None) -> None:
    """Run what is verified in this process, and record it. Exceptions of the user's code pass.

    on_over: see `Watch`.
    """
    options = side.options
    side.diary.phase = "importing"
    program = None if options.script else load_program(options)
    watch = Watch(side, report, on_over)  # from here on memory counts
    try:
        with watch.watching():
            if program is None:
                _run_script(side)
            else:
                report.begin(total=options.steps, done=0)
                train(program, side, watch)
    except EnoughError:
        return
    except BaseException as error:
        paths = {id(module): path for module, path in side.models.paths().items()}
        side.diary.paths = {**paths, **side.diary.paths}
        if watch.is_over:  # what it does in the end is its own affair
            return
        if not (isinstance(error, SystemExit) and options.script):
            raise
        if error.code:
            exited = ScriptExitedError(f"the script exited: {error.code}")
            raise exited.with_traceback(error.__traceback__) from None
    if not watch.is_over:
        watch.check()


def _run_script(side: Side) -> None:
    """Run the script, which finds its arguments, and modules beside it."""
    options = side.options
    side.diary.phase = "the script"
    side.seed()
    kept = sys.argv[:], sys.path[:]
    arguments = [each.replace("{side}", side.label) for each in options.arguments]
    sys.argv[:] = [options.script, *arguments]
    sys.path.insert(0, str(Path(options.script).resolve().parent))
    try:
        # Not compiled: recording breaks graphs apart, which takes minutes and shows nothing of sharding.
        with (
            side.names(),
            torch.compiler.set_stance("force_eager"),
            running_as_spawned(side.rank, options.ranks),
        ):
            runpy.run_path(options.script, run_name="__main__")
    finally:
        sys.argv[:], sys.path[:] = kept


def _join(options: VerifyOptions, place: Place) -> None:
    limit = datetime.timedelta(seconds=options.timeout_s)
    if options.device == "cpu":
        dist.init_process_group("gloo", timeout=limit)
        return
    torch.accelerator.set_device_index(place.local_rank)
    device = torch.device(options.device, place.local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, timeout=limit)


def leave(code: Exit) -> Exit:
    """End this process at once, without what is registered to run at its exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class OtherRanksError(Exception):
    """A script that spawns another number of processes than there are ranks."""


class _Joined:
    """What a script that does not wait for its ranks gets: they have ended."""

    def join(self, *_: Any, **__: Any) -> bool:
        return True


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
    ) -> _Joined | None:
        if nprocs != num_ranks:
            raise OtherRanksError(
                f"the script spawns {nprocs} processes, and is verified on {num_ranks} ranks: let it spawn as many, "
                f"or run fullshard verify --ranks {nprocs}, of 2 to 4"
            )
        # With it, a script's init_process_group would look for the launcher's store at its own address.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        fn(rank, *args)
        return None if join else _Joined()

    # The function hides the module of its name.
    module = importlib.import_module("torch.multiprocessing.spawn")
    with contextlib.ExitStack() as stack:
        for where in (torch.multiprocessing, module):
            for name in ("spawn", "start_processes"):
                stack.enter_context(mock.patch.object(where, name, run))
        yield
