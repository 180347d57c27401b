"""What a finding is, and how to say where it is."""

import dataclasses
import enum
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from fullshard.tools.doctor.facts import Arrival, Examination, RankFacts

Value = TypeVar("Value", bound=Hashable)


class Severity(enum.Enum):
    """How bad a finding is, worst first."""

    PROBLEM = "problem"
    WARNING = "warning"
    NOTE = "note"
    OK = "ok"


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: where, what was measured, and what to do about it.

    id: stays the same from release to release, for scripts that look for it.
    advice: empty where there is nothing to do.
    """

    id: str
    severity: Severity
    where: str
    measured: str
    advice: str = ""


def _of(severity: Severity) -> Callable[..., Finding]:
    def make(name: str, where: str, measured: str, advice: str = "") -> Finding:
        return Finding(name, severity, where, measured, advice)

    return make


problem, warning, note, ok = map(_of, Severity)


def grouped(
    ranks: Iterable[RankFacts], value_of: Callable[[RankFacts], Value]
) -> dict[Value, list[RankFacts]]:
    """Group ranks by a value, in the order of their numbers."""
    found: dict[Value, list[RankFacts]] = {}
    for each in ranks:
        found.setdefault(value_of(each), []).append(each)
    return found


def by_host(exam: Examination) -> dict[str, list[RankFacts]]:
    """Group the ranks whose facts are known by their host's label."""
    labels = host_labels(exam.arrivals)
    return grouped(exam.ranks, lambda each: labels[each.rank])


def host_labels(arrivals: Sequence[Arrival]) -> dict[int, str]:
    """Name the host of each rank: by its name, and by a number too if several hosts have one name.

    Hosts a, b and b of three ranks become {0: "a", 1: "b", 2: "b (2)"}.
    """
    machines: dict[str, list[str]] = {}
    for each in arrivals:
        same = machines.setdefault(each.host, [])
        if each.boot_id not in same:
            same.append(each.boot_id)
    labels = {}
    for each in arrivals:
        number = machines[each.host].index(each.boot_id) + 1
        labels[each.rank] = each.host if number == 1 else f"{each.host} ({number})"
    return labels


def at(exam: Examination, ranks: Iterable[int]) -> str:
    """Say where ranks are: "vm", "a, b", or "rank 3 of b"."""
    chosen = sorted(ranks)
    labels = host_labels(exam.arrivals)
    of_host: dict[str, list[int]] = {}
    for rank, label in labels.items():
        of_host.setdefault(label, []).append(rank)
    said = []
    for label, there in of_host.items():
        here = [rank for rank in there if rank in chosen]
        if here:
            said.append(label if here == sorted(there) else f"{numbered(here)} of {label}")
    if len(said) > 1 and chosen == sorted(labels):
        return f"all {len(said)} hosts"
    return ", ".join(said)


def numbered(ranks: Iterable[int]) -> str:
    """Name ranks by number: "rank 3", "ranks 0-3, 7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    said = ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
    is_one = len(runs) == 1 and len(runs[0]) == 1
    return f"{'rank' if is_one else 'ranks'} {said}"


def counted(number: int, noun: str) -> str:
    """Say how many: "1 rank", "2 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def sized(nbytes: float) -> str:
    """Say a number of bytes: "512 MB", "23.9 GB"."""
    for unit in ("B", "KB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} GB" if nbytes < 1000 else f"{nbytes / 1000:.1f} TB"


def timed(seconds: float) -> str:
    """Say a duration: "45 us", "3.1 ms", "2.0 s"."""
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if abs(seconds) < 1 else f"{seconds:.1f} s"
