"""In what ledgers differ whose ranks share no memory: found by one rank, from what others show.

Each shows the last of what it entered, its tail. At the place where tails differ, one rank of each kind
shows its trail too, so that the error says where paths parted, in the same words on all ranks.
"""

import sys
from collections.abc import Mapping
from typing import NamedTuple

from fullshard.comm.ledger import Ledger, ledgers
from fullshard.comm.notices import Board
from fullshard.plan.paths import Event, from_lines, to_lines
from fullshard.plan.standstill import Notice, first_mismatch

_TRAILS_S = 2.5  # for ranks to say what they ran
_ANSWER_S = 1.0  # for ranks to say what is behind a digest


class Difference(NamedTuple):
    """What ranks differ in. about: the ledger's key and the place. ranks: that have come there."""

    about: str
    text: str
    ranks: frozenset[int]

    @property
    def key(self) -> str:
        """The ledger's key."""
        return key_of(self.about)


def about_place(ledger: Ledger, place: int) -> str:
    """Return a name for a place of a ledger, the same on all ranks."""
    return f"{ledger.key}/{place}"


def key_of(about: str) -> str:
    """Return the ledger's key in the name of a place of it."""
    return about.rpartition("/")[0]


def show(board: Board, rank: int, ledger: Ledger, place: int) -> None:
    """Show others what is behind this rank's entry at a place, in case it differs from theirs."""
    show_lines(board, rank, ledger, place)
    _show_trail(board, rank, ledger, about_place(ledger, place))


def show_lines(board: Board, rank: int, ledger: Ledger, place: int) -> None:
    """Show others what this rank has entered by its digest at a place, if it has."""
    if (lines := ledger.lines_at(place)) is not None:
        board.post_lines(about_place(ledger, place), rank, lines)


def find_difference(board: Board, rank: int, notices: Mapping[int, Notice]) -> Difference | None:
    """Return in what ledgers differ that share no memory, once for each place; None if in nothing.

    rank: this one. notices: of all ranks, as far as they have posted one.
    """
    apart = {each.key: each for each in ledgers() if not each.is_shared}
    found = _told_by_others(apart, notices) or _found_here(board, rank, apart, notices)
    if found is not None:
        apart[found.key].settled_at = int(found.about.rpartition("/")[2])
    return found


def _told_by_others(
    apart: Mapping[str, Ledger], notices: Mapping[int, Notice]
) -> Difference | None:
    """Return what another rank has found. It may be far ahead, and show no more what it entered there."""
    for notice in notices.values():
        key, _, place = notice.about.rpartition("/")
        if notice.is_final and key in apart:
            ledger = apart[key]
            if ledger.settled_at < int(place) <= ledger.place:
                return Difference(notice.about, notice.error, frozenset())
    return None


def _found_here(
    board: Board, rank: int, apart: Mapping[str, Ledger], notices: Mapping[int, Notice]
) -> Difference | None:
    """Return the first difference of this rank's entries and those that others show."""
    tails = {
        other: {
            key: [entry for entry in tail if entry[0] > apart[key].settled_at]
            for key, tail in notice.tails.items()
            if key in apart
        }
        for other, notice in notices.items()
    }
    # Its own from further back: those that others show may be of long ago.
    tails[rank] = {key: ledger.tail(sys.maxsize) for key, ledger in apart.items()}
    mismatch = first_mismatch(tails)
    if mismatch is None or rank not in mismatch.entries:
        return None
    ledger = apart[mismatch.key]
    about = about_place(ledger, mismatch.place)
    text = ledger.explain_entries(
        mismatch.place,
        mismatch.entries,
        _trails(board, rank, ledger, about, mismatch.entries),
        lambda others: board.read_lines(about, others, _ANSWER_S),
    )
    return Difference(about, text, frozenset(mismatch.entries))


def _trails(
    board: Board, rank: int, ledger: Ledger, about: str, entries: Mapping[int, str]
) -> dict[int, list[Event]]:
    """Return the trail of one rank of each that has entered something else, the same on all ranks."""
    first_with: dict[str, int] = {}
    for other, text in sorted(entries.items()):
        first_with.setdefault(text, other)
    tellers = set(first_with.values())
    if rank in tellers:
        _show_trail(board, rank, ledger, about)
    # Others show theirs once they find the difference, by a clock of their own.
    lines = board.read_lines(f"{about}/trail", tellers, _TRAILS_S)
    return {other: from_lines(each) for other, each in lines.items()}


def _show_trail(board: Board, rank: int, ledger: Ledger, about: str) -> None:
    """Show others which units this rank has run."""
    board.post_lines(f"{about}/trail", rank, to_lines(ledger.trail_of(ledger.rank)))
