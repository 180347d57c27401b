"""Results on the terminal and as JSON."""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

try:
    from rich.console import Console
    from rich.table import Table as RichTable
except ImportError:
    HAS_RICH = False
else:
    HAS_RICH = True


@dataclass
class Table:
    """Rows of text under headings; the first column is left-aligned, the others right."""

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
            table.add_row(*row)
        # Into a file or pipe rich assumes 80 columns and would break numbers apart.
        Console(width=None if sys.stdout.isatty() else 160).print(table)

    def _print_plain(self) -> None:
        widths = [max(map(len, cells)) for cells in zip(self.columns, *self.rows, strict=True)]
        print(self.title)
        for row in [self.columns, *self.rows]:
            first, *rest = zip(row, widths, strict=True)
            cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
            print("  ".join(cells).rstrip())


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


class Progress:
    """A line on standard error that says what runs and how far the run is."""

    def __init__(self, title: str, *, num_stages: int) -> None:
        self._title = title
        self._num_stages = num_stages
        self._num_done = 0
        self._start = time.perf_counter()

    def advance(self, stage: str) -> None:
        """Announce the stage that begins; a log file gets every tenth."""
        self._num_done += 1
        seconds = time.perf_counter() - self._start
        text = f"{self._title} {self._num_done}/{self._num_stages} {seconds:4.0f} s: {stage}"
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif self._num_done == 1 or self._num_done % 10 == 0:
            print(text, file=sys.stderr, flush=True)

    def finish(self) -> None:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


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
    text = json.dumps({"machine": machine(), **results}, indent=2)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")
    if options.json:
        print(text)
        return
    for table in tables:
        table.print()


def machine() -> dict[str, str | int | None]:
    """Say where numbers were measured; without it they mean nothing."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
