"""Whether ranks that stand still wait for each other, by what each says of itself.

A rank that has done nothing for a second posts a `RankStatus`. Who waits for whom follows from counters:
a rank that is blocked in a collective waits for every member of its group that has issued fewer.

    rank 0   blocked in ours       group "0": 17 issued, at place 42 of the flight record
    rank 1   blocked in a barrier  group "0": 18 issued, at place 41
    -> 0 waits for 1 (place 41 < 42), 1 waits for 0 (17 < 18): neither will ever go on

[Note: Certainty] An error here ends a run, so a rank counts as blocked only if it has said the same
several times and runs no other threads of the program's, and ranks count as stuck only if all that they wait for, and all that those wait for,
are blocked and known. A rank that computes, loads data, or is silent may still come; a collective that
all its ranks have issued may still be moving bytes. Neither is ever called stuck.
"""

import dataclasses
from collections.abc import Collection, Mapping

from fullshard.peers.paths import by_text, name_ranks
from fullshard.peers.status import STEADY_BEATS, RankStatus, State, Tails


def waits_for(
    status: RankStatus, statuses: Mapping[int, RankStatus], world_size: int
) -> set[int] | None:
    """Return the ranks that a blocked rank waits for; None if one of them may be unknown."""
    found: set[int] = set()
    if status.meets_all:
        same = {r for r, each in statuses.items() if each.meets_all and each.where == status.where}
        return set(statuses) - same if len(statuses) == world_size else None
    for key, counts in status.groups.items():
        if status.waited and key not in status.waited:
            continue
        members = {rank: each for rank, each in statuses.items() if key in each.groups}
        found |= {rank for rank, each in members.items() if _waits(status, each, key)}
        if len(members) < counts.size:
            return None  # who is not known may be the one that it waits for
    return found


def _waits(one: RankStatus, other: RankStatus, key: str) -> bool:
    """Whether one rank has issued or entered something in a group that another has not."""
    mine, its = one.groups[key], other.groups[key]
    if its.issued < mine.issued or its.place < mine.place:
        return True
    if mine.issued != its.issued:
        return False
    # Both have issued equally many, so this one's last is paired with the other's last. They are no pair
    # if the program calls different functions,
    has_ops = one.op != "" and other.op not in ("", one.op)
    if has_ops and other.is_blocked and _may_be_in(one, key) and _may_be_in(other, key):
        return bool(one.waited or other.waited)
    # or if the other one's is fullshard's, which has entered more than this one.
    is_other_kind = one.state is State.CALLS and other.in_group == key
    return is_other_kind and its.place > mine.place


def _may_be_in(status: RankStatus, key: str) -> bool:
    """Whether a rank may be blocked in a group's collective."""
    return key in status.waited or not status.waited


def find_stuck(statuses: Mapping[int, RankStatus], world_size: int) -> set[int]:
    """Return the ranks that can never go on, as all that they wait for are blocked or gone."""
    waits: dict[int, set[int]] = {}
    for rank, status in statuses.items():
        if status.is_blocked:
            found = waits_for(status, statuses, world_size)
            if found:  # a rank that waits for nobody we know of may yet go on
                waits[rank] = found
    # Ranks that wait for one that may go on may go on themselves, and so forth.
    while True:
        free = {
            rank
            for rank, others in waits.items()
            if any(other not in waits and not statuses[other].has_gone for other in others)
        }
        if not free:
            return set(waits)
        for rank in free:
            del waits[rank]


def ended_without(status: RankStatus, statuses: Mapping[int, RankStatus]) -> set[int]:
    """Return ranks that ended before a collective that this rank has started on a device.

    It will never be complete, and the host that waits for the device cannot be told otherwise.
    """
    if status.state is not State.RUNS or status.beat < STEADY_BEATS:
        return set()
    return {
        rank
        for rank, each in statuses.items()
        if each.state is State.ENDED and not each.has_left
        for key in status.on_device
        if key in each.groups and _waits(status, each, key)
    }


def describe_still(statuses: Mapping[int, RankStatus], world_size: int) -> str:
    """Say what ranks do that stand still, one of them in a collective; empty if one moves.

    For ranks whose collectives run on a device: one that waits there looks like one that computes.
    """
    are_all_still = len(statuses) == world_size and all(
        each.beat >= STEADY_BEATS and not each.has_gone for each in statuses.values()
    )
    if not are_all_still or not any(each.is_blocked for each in statuses.values()):
        return ""
    seen = by_text({rank: str(each) for rank, each in statuses.items()})
    return "; ".join(f"{ranks}: {text}" for ranks, text in seen)


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A place at which flight records differ. key: of the group. entries: moments and texts, by rank."""

    key: str
    place: int
    entries: Mapping[int, str]


def first_mismatch(tails: Mapping[int, Tails]) -> Mismatch | None:
    """Return the first place at which flight records differ. tails: by rank.

    None if none differ as far as they are known.
    """
    for key in dict.fromkeys(key for each in tails.values() for key in each):
        at: dict[int, dict[int, tuple[int, str]]] = {}
        for rank, each in tails.items():
            for place, checksum, text in each.get(key, ()):
                at.setdefault(place, {})[rank] = checksum, text
        for place, entries in sorted(at.items()):
            if len({checksum for checksum, _ in entries.values()}) > 1:
                return Mismatch(key, place, {rank: text for rank, (_, text) in entries.items()})
    return None


def describe_stuck(
    statuses: Mapping[int, RankStatus],
    stuck: set[int],
    world_size: int,
    ended: Collection[int] = (),
) -> str:
    """Say what each stuck rank does and who is missing. The same words on every rank.

    ended: ranks that they wait for on a device.
    """
    involved = {*stuck, *ended}
    for rank in stuck:
        involved |= waits_for(statuses[rank], statuses, world_size) or set()
    gone = {rank for rank in involved if statuses[rank].has_gone}
    seen = "; ".join(
        f"{ranks}: {text}" for ranks, text in by_text({r: str(statuses[r]) for r in involved})
    )
    if gone:
        has_failed = any(statuses[rank].error for rank in gone)
        if has_failed:
            return (
                f"Ranks wait for {name_ranks(gone)}, which will not come: {seen}. The cause is in that rank's own "
                "output; restart from the last checkpoint."
            )
        return (
            f"Ranks do not end together: {seen}. Let every rank run as many steps, and leave together; one that has "
            "run out of data has to tell the others."
        )
    return (
        f"Ranks wait for each other, and none can go on: {seen}. Let every rank make the same calls "
        "in the same order. What one rank does alone must not need the others."
    )
