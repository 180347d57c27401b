"""Both sides of a verification on the ranks that are there."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch.distributed as dist

from fullshard.tools.doctor.findings import Finding, Severity
from fullshard.tools.progress import Reporter
from fullshard.tools.verify.comparing import Comparison, compare
from fullshard.tools.verify.judging import judge
from fullshard.tools.verify.options import VerifyOptions
from fullshard.tools.verify.rank import run_side, supervised
from fullshard.tools.verify.sides import side_of
from tests.harness import rank


def run_one(options: VerifyOptions, folder: Path, *, is_whole: bool) -> None:
    """Run one side, and record it."""
    side = side_of(options, folder, rank(), is_whole=is_whole)
    with supervised(side.diary, 60.0, on_stuck=lambda: None):
        warnings.simplefilter("ignore", DeprecationWarning)
        run_side(side, Reporter())


def compared(options: VerifyOptions, folder: Path) -> tuple[Comparison, dict[str, Finding]]:
    """Wait for all ranks; return what their records say, and the findings that are not ok, by id."""
    dist.barrier()
    comparison = compare(options, folder)
    bad = [each for each in judge(comparison) if each.severity is not Severity.OK]
    return comparison, {each.id: each for each in bad}
