"""Write down how a whole run of the tests ended, in a file of its own and by version of torch."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Run:
    """One run.

    began: date and time, UTC. load: processes that ran or waited to, on average, before it and at
        its end: one that has the machine for itself begins near 0.
    counts: how many tests passed, failed and so on. failed: their names.
    """

    began: str
    commit: str
    machine: str
    load: tuple[float, float]
    seconds: float
    counts: Mapping[str, int]
    failed: Sequence[str] = ()

    def __str__(self) -> str:
        counts = ", ".join(f"{number:,} {word}" for word, number in self.counts.items())
        lines = [
            "# The last result of `make test-all`",
            "",
            "Written by that command; see `tests/recording.py`.",
            "",
            "| what | result |",
            "| --- | --- |",
            f"| tests | {counts} |",
            f"| minutes | {self.seconds / 60:.1f} |",
            f"| began | {self.began} UTC |",
            f"| commit | {self.commit} |",
            f"| machine | {self.machine} |",
            f"| load | {self.load[0]:.1f} before, {self.load[1]:.1f} at the end |",
        ]
        if self.failed:
            lines += ["", "Failed:", "", *(f"- `{name}`" for name in self.failed)]
        return "\n".join([*lines, ""])


def torch_row(run: Run, version: str, *, has_long: bool) -> str:
    """Return a run as a row of `docs/compatibility.md`. version: such as "2.15.0+cu132"."""
    number, _, build = version.partition("+")
    passed, failed, skipped = (
        sum(run.counts.get(word, 0) for word in words)
        for words in (("passed", "xfailed"), ("failed", "error", "xpassed"), ("skipped",))
    )
    cells = [number, build or "unknown", run.began.partition(" ")[0], "yes" if has_long else "no"]
    cells += [f"{passed:,}", f"{failed:,}", f"{skipped:,}", f"{run.seconds / 60:.1f}"]
    return f"| {' | '.join(cells)} |"


def with_row(page: str, row: str) -> str:
    """Return a page with a row in its table, in place of the same version's. Newest version first.

    page: has one table with a row for each version, whose first cell is the version.
    """
    lines = page.splitlines()
    rule = next(i for i, line in enumerate(lines) if re.fullmatch(r"\|( ?-+ ?\|)+", line))
    end = next((i for i in range(rule + 1, len(lines)) if lines[i][:1] != "|"), len(lines))
    rows = {_version(each): each for each in [*lines[rule + 1 : end], row]}
    ordered = [rows[version] for version in sorted(rows, reverse=True)]
    return "\n".join([*lines[: rule + 1], *ordered, *lines[end:], ""])


def _version(row: str) -> tuple[int, ...]:
    """Return the version that a row is of, as numbers: 2.9 comes before 2.10."""
    return tuple(map(int, re.findall(r"\d+", row.split("|")[1])))


def commit() -> str:
    """Return what is checked out, and whether it was changed since."""
    try:
        name = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name} with changes" if changed else name


def machine() -> str:
    """Return what runs the tests, and the versions that matter."""
    return (
        f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}; "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
