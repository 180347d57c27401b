"""One rank of one side: runs the script as ``python`` would, until its steps are done."""

import runpy
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import fullshard
from fullshard.local_ranks import die_with_launcher
from fullshard.tools.exits import Exit
from fullshard.tools.launch import Place
from fullshard.tools.progress import Reporter, Reporting
from fullshard.tools.verify.options import VerifyOptions
from fullshard.tools.verify.rank import leave
from fullshard.tools.verify.record import Diary, rank_folder, whole_folder
from fullshard.tools.verify.script.sides import Sharded, Side, Whole
from fullshard.tools.verify.script.spawning import running_as_spawned
from fullshard.tools.verify.script.watching import EnoughError, Watch
from fullshard.tools.verify.supervision import Supervised

_GRACE_S = 10.0  # for what a script does in ``finally`` blocks after its last step


class ScriptExitedError(Exception):
    """A script that ended itself with an exit code other than 0."""


def run_script_rank(
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
        Supervised(side.diary, options.timeout_s, on_stuck=lambda: leave(Exit.OK)),
    ):
        fullshard.set_default_comm(options.comm)
        fullshard.install()
        report.note(
            f"{options.ranks} ranks: {options.steps} steps of {options.script}, {side.label}"
        )
        run_side(options, side, report, on_over=end_soon)
    # Not by way of what is registered to run at exit: loggers that wait for a network, groups for ranks.
    return leave(Exit.OK)


def side_of(options: VerifyOptions, folder: Path, rank: int, *, is_whole: bool) -> Side:
    """Return a rank's side, and make its folder."""
    if is_whole:
        diary, factor = Diary(whole_folder(folder, rank)), options.divide_factor
        return Whole(diary, folder, rank=rank, seed=options.seed, divide_by=factor)
    return Sharded(Diary(rank_folder(folder, rank)), folder, rank=rank, seed=options.seed)


def run_side(
    options: VerifyOptions,
    side: Side,
    report: Reporter,
    *,
    on_over: Callable[[], object] = lambda: None,
) -> None:
    """Run the script in this process, and record it. Exceptions of the script pass.

    on_over: called after the last step, when all is recorded, before the script is ended.
    """
    side.diary.phase = "the script"
    side.seed()
    watch = Watch(side, options.steps, torch.device(options.device), report, on_over)
    try:
        # Not compiled: recording breaks graphs apart, which takes minutes and shows nothing of sharding.
        with (
            side.names(),
            watch.watching(),
            torch.compiler.set_stance("force_eager"),
            running_as_spawned(side.rank, options.ranks),
        ):
            _run(options.script, [each.replace("{side}", side.label) for each in options.arguments])
    except EnoughError:
        return
    except BaseException as error:
        side.diary.paths = {id(module): path for module, path in side.models.paths().items()}
        if watch.is_over:  # what it does in the end is its own affair
            return
        if not isinstance(error, SystemExit):
            raise
        if error.code:
            exited = ScriptExitedError(f"the script exited: {error.code}")
            raise exited.with_traceback(error.__traceback__) from None
    if not watch.is_over:
        watch.check()


def _run(script: str, arguments: Sequence[str]) -> None:
    """Run a script, which finds its arguments, and modules beside it."""
    kept = sys.argv[:], sys.path[:]
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv[:], sys.path[:] = kept
