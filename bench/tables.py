"""Results on the terminal and as JSON."""

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, NamedTuple

import torch

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress
    from rich.table import Table as RichTable
except ImportError:
    HAS_RICH = False
else:
    HAS_RICH = True


@dataclass
class Table:
    """Rows of text under headings; the first column is left-aligned, the others right.

    A row of a single cell is the heading of the rows that follow.
    """

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def print(self) -> None:
        if HAS_RICH:
            self._print_rich()
        else:
            self._print_plain()
        for note in self.notes:
            print(f"  {note}")

    def _print_rich(self) -> None:
        table = RichTable(title=self.title, title_justify="left")
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in self.rows:
            if len(row) == 1:
                table.add_section()
                table.add_row(*row, style="bold")
            else:
                table.add_row(*row)
        # Into a file or pipe rich assumes 80 columns and would break numbers apart.
        Console(width=None if sys.stdout.isatty() else 160).print(table)

    def _print_plain(self) -> None:
        print(self.title)
        print(self.plain())

    def plain(self) -> str:
        """Return the rows with their columns padded to the widest cell."""
        rows = [self.columns, *(row for row in self.rows if len(row) > 1)]
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        lines = []
        for row in [self.columns, *self.rows]:
            first, *rest = zip(row, widths, strict=False)
            cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)

    def markdown(self) -> str:
        """Return the table as Markdown; a heading within it becomes bold."""
        rule = ["---", *("---:" for _ in self.columns[1:])]
        lines = [f"## {self.title}", "", _markdown_row(self.columns), _markdown_row(rule)]
        for row in self.rows:
            heading = [f"**{row[0]}**", *("" for _ in self.columns[1:])]
            lines.append(_markdown_row(heading if len(row) == 1 else row))
        if self.notes:
            lines += ["", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


class Spread(NamedTuple):
    """Median and range of one number over the rounds of a run."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def ratio_spread(values: Sequence[float], base: Sequence[float]) -> Spread:
    """Spread of the ratios within each round, from which what slows a whole round cancels."""
    return spread([value / other for value, other in zip(values, base, strict=True)])


def ratio_across(
    batches: Sequence[Mapping[str, Sequence[float]]], name: str, base: str, *, by_way_of: str
) -> Spread | None:
    """Take the ratio round by round where both were in one batch, else by way of a third that is in both's."""
    for batch in batches:
        if name in batch and base in batch:
            return ratio_spread(batch[name], batch[base])
    if base == by_way_of:
        return None
    one, other = (
        ratio_across(batches, each, by_way_of, by_way_of=by_way_of) for each in (name, base)
    )
    if one is None or other is None:
        return None
    return Spread(one.median / other.median, one.low / other.high, one.high / other.low)


class Interval(NamedTuple):
    """The median of a sample, and where the median of all such samples lies with 95 %."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"


def median_interval(values: Sequence[float]) -> Interval:
    """Bound the median by order statistics, which asks nothing of the noise but independence.

    As many values lie below the true median as heads fall in as many throws, so the k-th lowest and
    k-th highest bound it with probability 1 - 2 P(fewer than k heads).
    Fewer than 6 values bound nothing with 95 %: then their range is returned.
    """
    ordered = sorted(values)
    count = len(ordered)
    below = 0.0
    k = 0
    while (below := below + math.comb(count, k) / 2**count) <= 0.025:
        k += 1
    rank = max(k - 1, 0)
    return Interval(median(ordered), ordered[rank], ordered[count - 1 - rank])


class Progress:
    """Say on standard error what runs and how far it is: a bar on a terminal, else some lines.

    Use as a context manager, so that the bar is gone before an error is printed.
    """

    def __init__(self, title: str, *, num_stages: int) -> None:
        self._title = title
        self._num_stages = num_stages
        self._num_done = 0
        self._start = time.perf_counter()
        self._bar = _start_bar(title, num_stages) if HAS_RICH and sys.stderr.isatty() else None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish()

    def advance(self, stage: str) -> None:
        """Announce the stage that begins; a log file gets every tenth."""
        self._num_done += 1
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._num_done - 1, stage=stage)
        elif self._num_done == 1 or self._num_done % 10 == 0:
            seconds = time.perf_counter() - self._start
            text = f"{self._title} {self._num_done}/{self._num_stages} {seconds:4.0f} s: {stage}"
            print(text, file=sys.stderr, flush=True)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _start_bar(title: str, num_stages: int) -> "RichProgress":
    """Show a bar that disappears when it is stopped."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[stage]}"),
    )
    bar = RichProgress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(title, total=num_stages, stage="")
    bar.start()
    return bar


def positive(text: str) -> int:
    """Parse the value of an option that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON to FILE")


def emit(options: argparse.Namespace, tables: Sequence[Table], results: dict[str, Any]) -> None:
    """Print tables or JSON, as the options from `add_output_options` say."""
    text = as_json(results)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")
    if options.json:
        print(text)
        return
    for table in tables:
        table.print()


def as_json(results: dict[str, Any]) -> str:
    return json.dumps({"machine": machine(), **results}, indent=2)


def machine() -> dict[str, str | int | None]:
    """Say where numbers were measured; without it they mean nothing."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": _version("deepspeed"),
        "date": time.strftime("%Y-%m-%d"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
