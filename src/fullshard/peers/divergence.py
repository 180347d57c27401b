"""Where flight records differ: finding the place, and one rank's words on all ranks.

Ranks that share memory come to the place themselves: each that finds the difference says so in its status, and the lowest
one's words are everybody's. Ranks that share none show the last that they entered, in their status (`RankStatus.tails`). At the
place where these differ, one rank of each kind shows its trail too, so that the error says where paths parted.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence

from fullshard.peers.diagnosis import describe_difference, describe_lines, first_mismatch
from fullshard.peers.flight_record import FlightRecord, flight_records
from fullshard.peers.paths import Event
from fullshard.peers.status import RankStatus, Verdict
from fullshard.peers.status_board import StatusBoard

_GATHER_S = 0.5  # for ranks to come to a place at which two differ
_TELL_S = 1.5  # for the first rank at such a place to say how they differ
_TRAILS_S = 2.5  # for ranks to say what they ran
_ANSWER_S = 1.0  # for ranks to say what is behind a digest


def settle(board: StatusBoard, rank: int, record: FlightRecord, place: int) -> Verdict:
    """Return in what ranks that share memory differ at a place, in one rank's words on all of them.

    rank: this one. Waits for the others to come to the place as well, and to the words of the lowest one.
    """
    about = _about(record, place)
    _show_lines(board, record, place)

    def told_by(other: int) -> str:
        status = board.read([other]).get(other)
        verdict = None if status is None else status.verdict
        return verdict.text if verdict is not None and verdict.about == about else ""

    # The others come here as well, or are far. Nothing more moves until then.
    _wait_until(lambda: len(record.entries_at(place)) == len(record.ranks), _GATHER_S)
    entries = record.entries_at(place)
    first = min(entries)
    if first != rank:  # it tells, unless it has not noticed or has gone
        _wait_until(lambda: told_by(first) != "", _TELL_S)
    text = next((told for other in entries if (told := told_by(other))), "")
    text = text or _explained(board, record, place, entries, record.trails)
    record.settled_at = place
    return Verdict(text, about=about)


def find(board: StatusBoard, rank: int, statuses: Mapping[int, RankStatus]) -> Verdict | None:
    """Return in what flight records differ that share no memory, once for each place; None if in nothing.

    rank: this one. statuses: of all ranks, as far as they have posted one.
    """
    apart = {each.key: each for each in flight_records() if not each.is_shared}
    # What another rank has found. It may be far ahead, and show no more what it entered there.
    for verdict in [each.verdict for each in statuses.values() if each.verdict is not None]:
        key, _, at = verdict.about.rpartition("/")
        record = apart.get(key)
        if record is not None and record.settled_at < int(at) <= record.place:
            record.settled_at = int(at)
            return verdict
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
    if (found := first_mismatch(tails)) is None or rank not in found[2]:
        return None
    key, place, entries = found
    record = apart[key]
    # One rank of each that has entered something else shows its trail, the same on all ranks.
    first_with: dict[str, int] = {}
    for other, text in sorted(entries.items()):
        first_with.setdefault(text, other)

    def trails() -> dict[int, list[Event]]:
        # Others show theirs once they find the difference, by a clock of their own.
        return board.shown(f"{_about(record, place)}/trail", {*first_with.values()}, _TRAILS_S)

    if rank in first_with.values():
        show(board, record, place)
    text = _explained(board, record, place, entries, trails)
    record.settled_at = place
    return Verdict(text, about=_about(record, place), ranks=tuple(entries))


def show(board: StatusBoard, record: FlightRecord, place: int) -> None:
    """Show others what is behind this rank's entry at a place and which units it has run, in case they differ."""
    _show_lines(board, record, place)
    board.show(f"{_about(record, place)}/trail", record.trail_of(record.rank))


def _explained(
    board: StatusBoard,
    record: FlightRecord,
    place: int,
    entries: Mapping[int, str],
    trails: Callable[[], Mapping[int, Sequence[Event]]],
) -> str:
    """Say how ranks differ at a place: by what is behind their digests, if that tells; else by entries and trails."""
    heads = {text.partition(" (digest ")[0] for text in entries.values()}
    lines = record.lines_at(place)
    if lines is not None and len(heads) == 1:
        own = record.ranks[record.rank]
        others = [rank for rank in entries if rank != own]
        found = {own: lines, **board.shown(_about(record, place), others, _ANSWER_S)}
        if text := describe_lines(dict(sorted(found.items()))):
            return text
    return describe_difference(place, entries, trails(), record.names)


def _about(record: FlightRecord, place: int) -> str:
    """Return a name for a place of a flight record, the same on all ranks."""
    return f"{record.key}/{place}"


def _show_lines(board: StatusBoard, record: FlightRecord, place: int) -> None:
    """Show others what this rank has entered by its digest at a place, if it has."""
    if (lines := record.lines_at(place)) is not None:
        board.show(_about(record, place), list(lines))


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
