"""One verification from start to end: both sides, then the report."""

import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from fullshard.tools.config import OptionError
from fullshard.tools.exits import Exit
from fullshard.tools.launch import Ending, launch
from fullshard.tools.progress import Reporting
from fullshard.tools.verify.comparing import WELL, compare
from fullshard.tools.verify.options import VerifyOptions
from fullshard.tools.verify.printing import show
from fullshard.tools.verify.rank import run_side, supervised
from fullshard.tools.verify.record import rank_folder, read_run
from fullshard.tools.verify.sides import side_of


def verify(
    options: VerifyOptions, words: Sequence[str], keep: Path | None, *, threads: int, as_json: bool
) -> Exit:
    """Run a script sharded, then whole; or train in this process, then on ranks. Print the report.

    words: what was typed, for the ranks to read again. keep: where records stay, if they are to.
    threads: of each process, so that both sides add up in the same order where they can. Raises OptionError.
    """
    began = time.monotonic()

    def start(*words_before: str) -> Ending:
        # Of an option that is given twice the last counts, which is the same folder.
        arguments = ["verify", *words_before, "--keep", str(folder), *words]
        return launch(arguments, ranks=options.ranks, threads=threads)

    with records_folder(keep) as folder:
        ending = ending_of_whole = WELL
        if options.script:
            ending = start()
            if ending.code is Exit.OK and not _has_nothing(options, folder):
                ending_of_whole = start("--whole")
        else:
            torch.set_num_threads(threads)
            if _alone(options, folder, is_kept=keep is not None, as_json=as_json):
                ending = start()
        if Exit.STOPPED in (ending.code, ending_of_whole.code):
            print("fullshard verify: stopped", file=sys.stderr)
            return Exit.FAILED
        comparison = compare(options, folder, ending=ending, ending_of_whole=ending_of_whole)
    seconds = time.monotonic() - began
    return show(dataclasses.replace(comparison, seconds=seconds), as_json=as_json)


def _has_nothing(options: VerifyOptions, folder: Path) -> bool:
    """Return whether a rank found nothing to compare, which the other side would find as well."""
    runs = [read_run(rank_folder(folder, rank)) for rank in range(options.ranks)]
    return any(run is not None and run.failure and run.failure.is_nothing for run in runs)


def _alone(options: VerifyOptions, folder: Path, *, is_kept: bool, as_json: bool) -> bool:
    """Return whether the one process got to its end."""
    side = side_of(options, folder, 0, is_whole=True)

    def end_stuck() -> None:
        code = show(compare(options, folder), as_json=as_json)
        sys.stdout.flush()
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(code)

    with Reporting(rank=0) as report:
        report.note(f"one process: {options.steps} steps, not sharded")
        with supervised(side.diary, options.timeout_s, on_stuck=end_stuck, passing=(OptionError,)):
            run_side(side, report)
    return side.diary.run.failure is None


@contextlib.contextmanager
def records_folder(keep: Path | None) -> Iterator[Path]:
    """Give a folder for records: the one to keep, which has to be empty, or a temporary one."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="fullshard-verify-") as name:
            yield Path(name)
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise OptionError(f"--keep {keep}: is not an empty folder. Name another one.")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep
