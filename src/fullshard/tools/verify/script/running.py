"""Both launches of a script, then the report."""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fullshard.tools.exits import Exit
from fullshard.tools.launch import launch
from fullshard.tools.verify.comparing import WELL, compare
from fullshard.tools.verify.options import VerifyOptions
from fullshard.tools.verify.printing import show
from fullshard.tools.verify.record import rank_folder, read_run
from fullshard.tools.verify.running import records_folder


def verify_script(
    options: VerifyOptions, words: Sequence[str], keep: Path | None, *, threads: int, as_json: bool
) -> Exit:
    """Run the script sharded, then whole, compare, and print the report. Raises OptionError.

    words: what was typed, for the ranks to read again. keep: where records stay, if they are to.
    threads: of each process.
    """
    began = time.monotonic()
    with records_folder(keep) as folder:
        endings = [WELL, WELL]
        for index, side in enumerate(([], ["--whole"])):
            arguments = ["verify", *side, "--keep", str(folder), *words]
            endings[index] = launch(arguments, ranks=options.ranks, threads=threads)
            if endings[index].code is Exit.STOPPED:
                print("fullshard verify: stopped", file=sys.stderr)
                return Exit.FAILED
            if endings[index].code is not Exit.OK or _has_nothing(options, folder):
                break
        comparison = compare(options, folder, ending=endings[0], ending_of_whole=endings[1])
    seconds = time.monotonic() - began
    return show(dataclasses.replace(comparison, seconds=seconds), as_json=as_json)


def _has_nothing(options: VerifyOptions, folder: Path) -> bool:
    """Return whether a rank found nothing to compare, which the other side would find as well."""
    runs = [read_run(rank_folder(folder, rank)) for rank in range(options.ranks)]
    kinds = {run.failure.kind for run in runs if run is not None and run.failure is not None}
    return "NothingToCompareError" in kinds
