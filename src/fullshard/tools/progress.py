"""What a person sees of a run: a live bar on a terminal, plain lines elsewhere.

Everything goes to standard error, so that standard output carries results alone.
"""

import contextlib
import sys
import time
from collections import deque
from typing import IO, Any, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

SPEED_STEPS = 20
_PLAIN_INTERVAL_S = 2.0
_COPYING_AFTER_S = 2.0


class Reporter:
    """Where the training loop reports to; this one, of every rank but 0, says nothing."""

    def note(self, text: str) -> None:
        """Say something between steps."""

    def begin(self, *, total: int, done: int) -> None:
        """Begin to count steps."""

    def step(self, done: int, figures: dict[str, str]) -> None:
        """Say what came out of a step."""

    def end(self) -> None:
        """Leave the terminal as it was."""


class Plain(Reporter):
    """Lines for a log: each note, and a step at most every two seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._total = 0
        self._first_step = 0
        self._started = self._last = 0.0

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, *, total: int, done: int) -> None:
        self._total, self._first_step = total, done
        self._started = time.monotonic()

    def step(self, done: int, figures: dict[str, str]) -> None:
        now = time.monotonic()
        if now - self._last < _PLAIN_INTERVAL_S and done != self._total:
            return
        self._last = now
        left = (self._total - done) * (now - self._started) / (done - self._first_step)
        values = "  ".join(f"{name} {value}" for name, value in figures.items())
        self.note(f"step {done}/{self._total}  {values}  {_clock(left)} left")


class Live(Reporter):
    """A bar with the latest figures, and a spinner that turns while nothing else changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
            transient=False,
        )
        self._task: TaskID | None = None
        self._status = console.status("")

    def note(self, text: str) -> None:
        if self._task is not None:
            self._progress.console.print(escape(text), highlight=False)
            return
        self._console.print(escape(text), highlight=False)
        self._status.update(escape(text))
        self._status.start()

    def begin(self, *, total: int, done: int) -> None:
        self._status.stop()
        self._progress.start()
        self._task = self._progress.add_task("training", total=total, completed=done, figures="")

    def step(self, done: int, figures: dict[str, str]) -> None:
        assert self._task is not None
        shown = "  ".join(f"{name} [bold]{value}[/bold]" for name, value in figures.items())
        self._progress.update(self._task, completed=done, figures=shown)

    def end(self) -> None:
        self._status.stop()
        self._progress.stop()
        self._task = None


class Lasting:
    """A standard stream as long as there is one: a closed terminal or pipe must not make a run fail."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream  # kept: a live bar puts itself in the place of standard error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


class Reporting:
    """Give the right reporter for a rank, and restore the terminal on every way out."""

    def __init__(self, *, rank: int) -> None:
        console = Console(file=cast(IO[str], Lasting(sys.stderr)), emoji=False)
        self.reporter = Reporter()
        if rank == 0:
            self.reporter = Live(console) if console.is_terminal else Plain(console)

    def __enter__(self) -> Reporter:
        return self.reporter

    def __exit__(self, *_: object) -> None:
        self.reporter.end()


class Copying:
    """A bar of bytes, on a terminal, for what takes longer than two seconds. Use it in a `with`."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = time.monotonic()
        self._console = Console(stderr=True, emoji=False)
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> "Copying":
        return self

    def update(self, done: int, total: int) -> None:
        """Show how many bytes are done."""
        if self._progress is None:
            if not self._console.is_terminal or time.monotonic() - self._began < _COPYING_AFTER_S:
                return
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
            self._progress = Progress(*columns, TimeRemainingColumn(), console=self._console)
            self._progress.start()
            self._task = self._progress.add_task(self._what, total=total)
        assert self._task is not None
        self._progress.update(self._task, completed=done)

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()


class Speed:
    """Tokens per second over the last steps, up to 20: a single step's jumps too much to be read."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=SPEED_STEPS)

    def after(self, num_tokens: int, seconds: float) -> float:
        """Note a step, and return the speed of the last ones together."""
        self._steps.append((num_tokens, seconds))
        tokens, times = zip(*self._steps, strict=True)
        return float(sum(tokens) / sum(times))


def printable(text: str) -> str:
    r"""Escape what would control a terminal; newlines and tabs stay.

    The escape character, for one, is shown as the four characters \x1b.
    """
    return "".join(
        each if each in "\n\t" or each.isprintable() else each.encode("unicode_escape").decode()
        for each in text
    )


def as_it_is(text: str) -> str:
    """Return what a console prints as this text: without marks of its own, such as [bold]."""
    return escape(printable(text))


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"
