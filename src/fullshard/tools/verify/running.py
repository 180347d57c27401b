"""One verification from start to end: the one process here, then the ranks, then the report."""

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
from fullshard.tools.launch import launch
from fullshard.tools.progress import Reporting
from fullshard.tools.verify.alone import run_alone
from fullshard.tools.verify.comparing import WELL, compare
from fullshard.tools.verify.options import VerifyOptions
from fullshard.tools.verify.printing import show
from fullshard.tools.verify.program import load_program
from fullshard.tools.verify.record import Diary, alone_folder
from fullshard.tools.verify.supervision import Supervised


def verify(
    options: VerifyOptions, words: Sequence[str], keep: Path | None, *, threads: int, as_json: bool
) -> Exit:
    """Train in this process and on ranks, compare, and print the report. Raises OptionError.

    words: what was typed, for the ranks to read again. keep: where records stay, if they are to.
    threads: of each process, so that both sides add up in the same order where they can.
    """
    began = time.monotonic()
    with records_folder(keep) as folder:
        ending = WELL
        torch.set_num_threads(threads)
        if _alone(options, folder, is_kept=keep is not None, as_json=as_json):
            # Of an option that is given twice the last counts, which is the same folder.
            arguments = ["verify", "--keep", str(folder), *words]
            ending = launch(arguments, ranks=options.ranks, threads=threads)
        if ending.code is Exit.STOPPED:
            print("fullshard verify: stopped", file=sys.stderr)
            return Exit.FAILED
        comparison = compare(options, folder, ending=ending)
    seconds = time.monotonic() - began
    return show(dataclasses.replace(comparison, seconds=seconds), as_json=as_json)


def _alone(options: VerifyOptions, folder: Path, *, is_kept: bool, as_json: bool) -> bool:
    """Return whether the one process got to its end."""
    diary = Diary(alone_folder(folder))

    def end_stuck() -> None:
        code = show(compare(options, folder), as_json=as_json)
        sys.stdout.flush()
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(code)

    with Reporting(rank=0) as report:
        report.note(f"one process: {options.steps} steps, not sharded")
        with Supervised(diary, options.timeout_s, on_stuck=end_stuck, passing=(OptionError,)):
            diary.phase = "importing"
            program = load_program(options)
            report.begin(total=options.steps, done=0)
            run_alone(program, diary, report)
    return diary.run.failure is None


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
