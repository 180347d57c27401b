"""The row that a whole run of the tests writes into `docs/limits.md`, for the torch that it ran on."""

from __future__ import annotations

import re
from collections.abc import Mapping


def torch_row(
    version: str, date: str, seconds: float, counts: Mapping[str, int], *, has_long: bool
) -> str:
    """Return the row. version: such as "2.15.0+cu132". counts: number of tests by how they ended, in pytest's words."""
    number, _, build = version.partition("+")
    passed, failed, skipped = (
        sum(counts.get(word, 0) for word in words)
        for words in (("passed", "xfailed"), ("failed", "error", "xpassed"), ("skipped",))
    )
    cells = [number, build or "unknown", date, "yes" if has_long else "no"]
    cells += [f"{passed:,}", f"{failed:,}", f"{skipped:,}", f"{seconds / 60:.1f}"]
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
