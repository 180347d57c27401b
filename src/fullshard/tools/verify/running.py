"""One verification from start to end: both sides, then the report."""

import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fullshard.local_ranks import threads_for
from fullshard.tools.cli_options import refuse
from fullshard.tools.config import OptionError
from fullshard.tools.exits import Exit
from fullshard.tools.job import check_local_ranks
from fullshard.tools.launch import Ending, launch, place_in
from fullshard.tools.progress import reporting
from fullshard.tools.verify.comparing import WELL, compare
from fullshard.tools.verify.options import VerifyOptions
from fullshard.tools.verify.printing import show
from fullshard.tools.verify.rank import run_rank, run_side, supervised
from fullshard.tools.verify.record import rank_folder, read_run
from fullshard.tools.verify.sides import side_of


def run_verify(
    given: Mapping[str, Any],
    environment: Mapping[str, str],
    words: Sequence[str],
    *,
    keep: Path | None,
    is_whole: bool,
    as_json: bool,
) -> Exit:
    """Compare a sharded model or script with a whole one, or be one of the ranks that this has started.

    given: fields of `VerifyOptions`. words: what was typed, for the ranks to read again. keep: a folder for the records; the
    ranks are always given one. is_whole: of a rank that runs a script, whether nothing is to be sharded.
    """
    place = None
    try:
        place = place_in(environment)
        options = VerifyOptions(**given)
        if place is not None and (place.launcher_pid is None or keep is None):
            raise OptionError(f"verify starts its ranks itself. Run it without {place.started_by}.")
        check_local_ranks(options.device, options.ranks)
        # Of each process, so that both sides add up in the same order where they can.
        threads = threads_for(options.ranks, environment)
        if place is None or keep is None:
            return _verify(options, words, keep, threads=threads, as_json=as_json)
        side = side_of(options, keep, place.rank, is_whole=is_whole)
    except OptionError as error:
        if place is None or place.rank == 0:
            refuse("verify", error)
        return Exit.USAGE
    return run_rank(side, place, threads=threads)


def _verify(
    options: VerifyOptions, words: Sequence[str], keep: Path | None, *, threads: int, as_json: bool
) -> Exit:
    """Run a script sharded, then whole; or train in this process, then on ranks. Print the report. Raises OptionError."""
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

    with reporting(rank=0) as report:
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
