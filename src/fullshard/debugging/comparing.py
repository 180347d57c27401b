"""Compare a replayed step with the recorded one, bit for bit. Knows no model and no ranks."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Sequence

from fullshard.debugging.tape import INPUT, OUTPUT, Event, Seen


@dataclasses.dataclass(frozen=True)
class ReplayDifference:
    """A value that a replay computed otherwise.

    rank: whose part of the step it is. event: "forward 0", "backward 0". what: "output", "gradient" (of this
    rank alone, whole) or "reduced gradient" (this rank's part). path: of the module or parameter. call: the
    how manieth of that path in the event. kind: the module's class. unit: the path of its unit. problem: how it
    differs. order: sorts differences as they came about.
    """

    rank: int
    event: str
    what: str
    path: str
    call: int
    kind: str
    unit: str
    problem: str
    order: tuple[int, int, int]

    def __str__(self) -> str:
        kind = f" ({self.kind})" if self.kind else ""
        call = f", call {self.call}" if self.call else ""
        unit = self.unit or "the root"
        place = f"{self.path or 'the model'}{kind}{call}, in unit {unit}"
        return f"{self.event}, rank {self.rank}: the {self.what} of {place} {self.problem}"


@dataclasses.dataclass(frozen=True)
class Compared:
    """What comparing one event gave. counts: of values that were compared, by what they are."""

    differences: tuple[ReplayDifference, ...]
    counts: dict[str, int]


def name_events(events: Sequence[Event]) -> list[str]:
    """Return the names of events: "forward 0", "backward 0", each kind counted for itself."""
    counters: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)
    return [f"{event.kind} {next(counters[event.kind])}" for event in events]


def compare_events(
    recorded: Event, now: Event, *, rank: int, number: int, name: str, leaves_out: Collection[str]
) -> Compared:
    """Compare an event. number, name: of it. leaves_out: what is not compared, such as "reduced gradient"."""
    wanted = [seen for seen in recorded.seen if seen.what not in leaves_out]
    found = {seen.key: seen for seen in now.seen if seen.what not in leaves_out}
    counts = dict(collections.Counter(seen.what for seen in wanted))
    places = {seen.key: place for place, seen in enumerate(wanted)}

    def difference(seen: Seen, problem: str) -> ReplayDifference:
        order = (number, places.get(seen.key, len(places)), rank)
        values = (seen.what, seen.path, seen.call, seen.kind, seen.unit)
        return ReplayDifference(rank, name, *values, problem, order)

    problems = [
        difference(seen, problem)
        for seen in wanted
        if (problem := _problem(seen, found.get(seen.key)))
    ]
    if not (problems or recorded.error):  # else what ran until then is all that there is
        problems = [difference(*each) for each in _in_order(wanted, list(found.values()))]
    return Compared(tuple(problems), counts)


def _problem(recorded: Seen, now: Seen | None) -> str:
    """Say how a value differs; "" if it does not."""
    if now is None:
        return "was recorded, and is not computed now"
    if recorded.digest == now.digest and recorded.dtype == now.dtype:
        return ""
    if (recorded.shape, recorded.dtype) != (now.shape, now.dtype):
        return (
            f"is {now.shape} of {now.dtype.removeprefix('torch.')} now, and was {recorded.shape} of "
            f"{recorded.dtype.removeprefix('torch.')}"
        )
    if recorded.sample.shape != now.sample.shape:
        return "differs"
    gap = (recorded.sample - now.sample).abs()
    largest = recorded.sample.abs().max().item() if gap.numel() else 0.0
    worst = gap.max().item() if gap.numel() else 0.0
    if not worst:
        return "differs in elements that are not among those sampled, or in the sign of zeros"
    if math.isnan(worst) or math.isinf(largest):
        return "differs: there are values that are not finite"
    if not largest:
        return f"was 0, and differs by {worst:.1e}"
    return f"differs by {worst / largest:.1e} of its largest value"


def _in_order(recorded: Sequence[Seen], now: Sequence[Seen]) -> Iterator[tuple[Seen, str]]:
    """Yield what ran beside what was recorded, or in another place among the outputs. At most one."""
    known = {seen.key for seen in recorded}
    before, after = ([s for s in each if s.what in (INPUT, OUTPUT)] for each in (recorded, now))
    for extra in after:
        if extra.key not in known:
            yield extra, "is computed now, and was not recorded"
            return
    for old, new in zip(before, after, strict=True):
        if old.key != new.key:
            yield new, f"comes where that of {old.path or 'the model'} came when it was recorded"
            return
