"""In what flight records differ whose ranks share no memory: found by one rank, from what others show.

Each shows the last of what it entered, its tail. At the place where tails differ, one rank of each kind
shows its trail too, so that the error says where paths parted, in the same words on all ranks.
"""

import sys
from collections.abc import Mapping
from typing import NamedTuple

from fullshard.peers.flight_record import FlightRecord, flight_records
from fullshard.peers.paths import Event, from_lines, to_lines
from fullshard.peers.standstill import first_mismatch
from fullshard.peers.status import RankStatus
from fullshard.peers.status_board import StatusBoard

_TRAILS_S = 2.5  # for ranks to say what they ran
_ANSWER_S = 1.0  # for ranks to say what is behind a digest


class Difference(NamedTuple):
    """What ranks differ in. about: the flight record's key and the place. ranks: that have come there."""

    about: str
    text: str
    ranks: frozenset[int]

    @property
    def key(self) -> str:
        """The flight record's key."""
        return key_of(self.about)


def about_place(record: FlightRecord, place: int) -> str:
    """Return a name for a place of a flight record, the same on all ranks."""
    return f"{record.key}/{place}"


def key_of(about: str) -> str:
    """Return the flight record's key in the name of a place of it."""
    return about.rpartition("/")[0]


def show(board: StatusBoard, record: FlightRecord, place: int) -> None:
    """Show others what is behind this rank's entry at a place, in case it differs from theirs."""
    show_lines(board, record, place)
    _show_trail(board, record, about_place(record, place))


def show_lines(board: StatusBoard, record: FlightRecord, place: int) -> None:
    """Show others what this rank has entered by its digest at a place, if it has."""
    if (lines := record.lines_at(place)) is not None:
        board.post_lines(about_place(record, place), lines)


def find_difference(
    board: StatusBoard, rank: int, statuses: Mapping[int, RankStatus]
) -> Difference | None:
    """Return in what flight records differ that share no memory, once for each place; None if in nothing.

    rank: this one. statuses: of all ranks, as far as they have posted one.
    """
    apart = {each.key: each for each in flight_records() if not each.is_shared}
    found = _told_by_others(apart, statuses) or _found_here(board, rank, apart, statuses)
    if found is not None:
        apart[found.key].settled_at = int(found.about.rpartition("/")[2])
    return found


def _told_by_others(
    apart: Mapping[str, FlightRecord], statuses: Mapping[int, RankStatus]
) -> Difference | None:
    """Return what another rank has found. It may be far ahead, and show no more what it entered there."""
    for status in statuses.values():
        key, _, place = status.about.rpartition("/")
        if status.is_final and key in apart:
            record = apart[key]
            if record.settled_at < int(place) <= record.place:
                return Difference(status.about, status.error, frozenset())
    return None


def _found_here(
    board: StatusBoard,
    rank: int,
    apart: Mapping[str, FlightRecord],
    statuses: Mapping[int, RankStatus],
) -> Difference | None:
    """Return the first difference of this rank's entries and those that others show."""
    tails = {
        other: {
            key: [entry for entry in tail if entry[0] > apart[key].settled_at]
            for key, tail in status.tails.items()
            if key in apart
        }
        for other, status in statuses.items()
    }
    # Its own from further back: those that others show may be of long ago.
    tails[rank] = {key: record.tail(sys.maxsize) for key, record in apart.items()}
    mismatch = first_mismatch(tails)
    if mismatch is None or rank not in mismatch.entries:
        return None
    record = apart[mismatch.key]
    about = about_place(record, mismatch.place)
    text = record.explain_entries(
        mismatch.place,
        mismatch.entries,
        _trails(board, rank, record, about, mismatch.entries),
        lambda others: board.read_lines(about, others, _ANSWER_S),
    )
    return Difference(about, text, frozenset(mismatch.entries))


def _trails(
    board: StatusBoard, rank: int, record: FlightRecord, about: str, entries: Mapping[int, str]
) -> dict[int, list[Event]]:
    """Return the trail of one rank of each that has entered something else, the same on all ranks."""
    first_with: dict[str, int] = {}
    for other, text in sorted(entries.items()):
        first_with.setdefault(text, other)
    tellers = set(first_with.values())
    if rank in tellers:
        _show_trail(board, record, about)
    # Others show theirs once they find the difference, by a clock of their own.
    lines = board.read_lines(f"{about}/trail", tellers, _TRAILS_S)
    return {other: from_lines(each) for other, each in lines.items()}


def _show_trail(board: StatusBoard, record: FlightRecord, about: str) -> None:
    """Show others which units this rank has run."""
    board.post_lines(f"{about}/trail", to_lines(record.trail_of(record.rank)))
