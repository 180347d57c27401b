"""What a person sees of a run: one live line on a terminal, plain lines elsewhere.

Everything goes to standard error, so that standard output carries results alone.
"""

import contextlib
import re
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live as LiveDisplay
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.text import Text

SPEED_STEPS = 20
_BAR_AFTER_S = 2.0
_REDRAWN_PER_S = 4  # often enough for a spinner, and nothing to a step
_BAR = (8, 40)  # columns, at least and at most
_COMMAND = re.compile(r"(?<=: )\S*fullshard \w+ -.*")  # to be pasted, up to the end of its line
_ECHO = len("^C")  # what a terminal writes behind the line where Ctrl-C is pressed
_BEFORE_BAR = 5  # parts of the line that matter more than it: step, time left and three figures
# Of plain lines: at first every 2 s, then rarer the longer a run goes, in the end every 5 minutes. A day has 440.
_LEAST_INTERVAL_S, _MOST_INTERVAL_S, _SHARE_OF_RUN = 2.0, 300.0, 1 / 30


class Reporter:
    """Where the training loop reports to; this one, of every rank but 0, says nothing."""

    def note(self, text: str) -> None:
        """Say something. What ends in "..." goes on until the next call."""

    def begin(self, *, total: int, done: int) -> None:
        """Begin to count steps."""

    def step(self, done: int, figures: dict[str, str], *, measured: bool = False) -> None:
        """Say what came out of a step.

        figures: the most important one first. measured: whether this step measured something that others do not,
        such as the loss on text that is held out.
        """

    def end(self) -> None:
        """Leave the terminal as it was."""


class _Pace:
    """How many steps are done, and how long the last ones took, up to 20."""

    def __init__(self, total: int, done: int) -> None:
        self.total = total
        self.began = time.monotonic()
        self._first = done
        self._times = deque([(done, self.began)], maxlen=SPEED_STEPS + 1)

    @property
    def done(self) -> int:
        return self._times[-1][0]

    def step(self, done: int) -> None:
        self._times.append((done, time.monotonic()))
        if done == self._first + 2:  # the first one, which allocates and compiles, is not typical
            self._times.popleft()

    def left(self) -> str:
        """Return the time that is left, as "1:05", "2:00:00" or, before the first step, "-:--"."""
        (first, began), (last, ended) = self._times[0], self._times[-1]
        if first == last:
            return "-:--"
        each = (ended - began) / (last - first)
        return clock((self.total - last) * each - min(each, time.monotonic() - ended))


class Plain(Reporter):
    """Lines for a log: notes, the first step, the last, those that measured something, and some between."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pace = _Pace(0, 0)
        self._last = 0.0

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, *, total: int, done: int) -> None:
        self._pace, self._last = _Pace(total, done), 0.0

    def step(self, done: int, figures: dict[str, str], *, measured: bool = False) -> None:
        self._pace.step(done)
        now = time.monotonic()
        rare = (now - self._pace.began) * _SHARE_OF_RUN
        interval = min(_MOST_INTERVAL_S, max(_LEAST_INTERVAL_S, rare))
        if now - self._last < interval and not measured and done != self._pace.total:
            return
        self._last = now
        values = "  ".join(f"{name} {value}" for name, value in figures.items())
        self.note(f"step {done}/{self._pace.total}  {values}  {self._pace.left()} left")


class Live(Reporter):
    """One line at the bottom: what goes on now, or a bar, the steps, the time left and the latest figures.

    At 80 columns, and at 60:

        ⠋ ━━━━━━━━╸━━━━━━  step  60/350  0:24 left  loss 2.577  bytes/s 12,018
        ⠋ step  60/350  0:24 left  loss 2.577  bytes/s 12,018

    What does not fit is left out: figures after the third, then the bar, then other figures, the last one first. A
    figure keeps the width of its longest value, so that nothing moves from step to step.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._display: LiveDisplay | None = None
        self._spinner = Spinner("dots" if console.encoding.startswith("utf") else "line")
        self._now = ""
        self._pace: _Pace | None = None
        self._figures: dict[str, str] = {}
        self._widths: dict[str, int] = {}

    def note(self, text: str) -> None:
        if text.endswith("...") and self._pace is None:
            self._now = text
        else:
            for line in wrapped(Text(text), self._console):
                self._console.print(line, soft_wrap=True)
        self._show()

    def begin(self, *, total: int, done: int) -> None:
        self._pace, self._figures = _Pace(total, done), {}
        self._show()

    def step(self, done: int, figures: dict[str, str], *, measured: bool = False) -> None:
        assert self._pace is not None
        self._pace.step(done)
        self._figures = figures

    def end(self) -> None:
        display, self._display = self._display, None
        if display is not None:
            display.transient = self._pace is None
            display.stop()
        self._pace, self._now = None, ""

    def _show(self) -> None:
        if self._display is None:
            self._display = LiveDisplay(
                self,
                console=self._console,
                refresh_per_second=_REDRAWN_PER_S,
                redirect_stdout=sys.stdout.isatty(),  # a file or pipe keeps what is for it
            )
            self._display.start()
        self._display.refresh()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line, room = Text(no_wrap=True, overflow="crop", end=""), options.max_width - 1 - _ECHO
        if self._display is None and self._pace is None:
            return
        turning = self._spinner.render(console.get_time())
        line.append_text(turning if isinstance(turning, Text) else Text()).append(" ")
        if self._pace is None:
            line.append(self._now)
            line.truncate(room)
            yield line
            return
        total, done = self._pace.total, self._pace.done
        parts = [Text(f"step {done:>{len(str(total))}}/{total}"), self._part("left", "", " left")]
        parts += [self._part(name, f"{name} ") for name in self._figures]
        least, most = _BAR
        shown = Text("  ").join(parts)
        while len(parts) > 1 and line.cell_len + shown.cell_len > room - (
            least + 2 if len(parts) > _BEFORE_BAR else 0
        ):
            shown = Text("  ").join(parts := parts[:-1])
        if (width := room - line.cell_len - shown.cell_len - 2) >= least:
            yield line
            yield ProgressBar(total=total, completed=done, width=min(width, most))
            line = Text("  ", no_wrap=True, overflow="crop", end="")
        yield line.append_text(shown)

    def _part(self, name: str, before: str, after: str = "") -> Text:
        value = self._pace.left() if name == "left" and self._pace else self._figures[name]
        width = self._widths[name] = max(len(value), self._widths.get(name, 0))
        return Text.assemble(before, (value.rjust(width), "bold"), after)


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


@contextlib.contextmanager
def reporting(*, rank: int) -> Iterator[Reporter]:
    """Give the right reporter for a rank, and restore the terminal on every way out."""
    console = Console(file=cast(IO[str], Lasting(sys.stderr)), emoji=False)
    report = Reporter()
    if rank == 0:
        report = Live(console) if console.is_terminal else Plain(console)
    try:
        yield report
    finally:
        report.end()


@contextlib.contextmanager
def counting(what: str, unit: str = "bytes") -> Iterator[Callable[[int, int], None]]:
    """Give what is told how many bytes, or else, of how many are done: on a terminal, a bar shows it after two seconds."""
    began, console = time.monotonic(), Console(stderr=True, emoji=False)
    of_units = TextColumn(f"{{task.completed:,}}/{{task.total:,}} {unit}")
    counted = DownloadColumn() if unit == "bytes" else of_units
    columns = (TextColumn("{task.description}"), BarColumn(), counted, TimeRemainingColumn())
    bar = Progress(*columns, console=console)
    task = bar.add_task(what, total=None)

    def update(done: int, total: int) -> None:
        if console.is_terminal and time.monotonic() - began >= _BAR_AFTER_S:
            bar.update(task, completed=done, total=total)
            bar.start()

    try:
        yield update
    finally:
        if bar.live.is_started:
            bar.stop()


class Speed:
    """Tokens, or bytes, per second over the last steps, up to 20: a single step's jumps too much to be read."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=SPEED_STEPS)

    def after(self, num_tokens: int, seconds: float) -> float:
        """Note a step, and return the speed of the last ones together."""
        self._steps.append((num_tokens, seconds))
        tokens, times = zip(*self._steps, strict=True)
        return float(sum(tokens) / sum(times))


def say_starting() -> None:
    """Say on standard error that a command has begun, where importing torch takes seconds until it can say more.

    On a terminal the next line takes its place: each is longer.
    """
    if "torch" not in sys.modules:
        end = "\r" if sys.stderr.isatty() else "\n"
        print("starting ...", end=end, file=Lasting(sys.stderr), flush=True)


def say(text: str) -> None:
    """Print on standard error, on a terminal in the place of a live line that another process has left there.

    There, lines are broken at spaces, but not within a command to type.
    """
    if sys.stderr.isatty():
        lines = _lines(text, Console(stderr=True).width, indent=0)
        text = "\r\x1b[2K" + "\n".join(lines)
    print(text, file=Lasting(sys.stderr), flush=True)


def before_first_step(run: Path | None) -> str:
    """Say what is left of a run that ends before its first step. run: the folder of one that was to go on.

    Reads a name alone: torch may not be there yet.
    """
    step = 0
    if run is not None:
        with contextlib.suppress(OSError, ValueError):
            step = int((run / "checkpoints" / "latest").read_text().rpartition("-")[2])
    left = f"the checkpoint of step {step} stays" if step else "nothing to save"
    return f"fullshard: stopped before the first step; {left}."


def wrapped(text: Text, console: Console, *, indent: int = 0) -> Iterator[Text]:
    """Yield the lines of a text, broken at spaces as a terminal's width asks for; those of a log are as long as they are.

    indent: columns of spaces before each line but the first. A word that is longer than a line, such as a path, stays
    whole, so that it can be copied.
    """
    begin, plain = 0, text.plain
    for line in _lines(plain, console.width, indent) if console.is_terminal else [plain]:
        own = line[indent if begin else 0 :]
        start = plain.index(own, begin)
        end = start + len(own)
        yield Text(line[: len(line) - len(own)]).append_text(text[start:end])
        begin = end


def _lines(text: str, width: int, indent: int) -> Iterator[str]:
    how = textwrap.TextWrapper(
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        expand_tabs=False,
        replace_whitespace=False,
    )
    for line in text.split("\n"):
        whole = _COMMAND.sub(lambda found: found[0].replace(" ", "\0"), line)
        yield from (each.replace("\0", " ") for each in how.wrap(whole) or [how.initial_indent])
        how.initial_indent = how.subsequent_indent


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


def clock(seconds: float) -> str:
    """Return a time as "1:05" or "27:46:40"."""
    minutes, seconds = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
