"""What follows for this rank from all that ranks say of themselves: an error, a report, or nothing yet."""

import logging
from collections.abc import Collection, Mapping
from typing import NamedTuple

from fullshard.comm import tails
from fullshard.comm.ledger import ledgers
from fullshard.comm.notices import Board
from fullshard.comm.processes import is_running
from fullshard.errors import DivergenceError, FullshardError, PeerLostError
from fullshard.plan.standstill import (
    GroupCounts,
    Notice,
    State,
    describe_still,
    describe_stuck,
    ended_without,
    find_stuck,
)

logger = logging.getLogger("fullshard")


class Verdict(NamedTuple):
    """An error that this rank has to raise.

    about: the ledger and place at which ranks differ; empty if that is not what it says. ranks: that will
    find a verdict too.
    """

    error: FullshardError
    about: str = ""
    ranks: Collection[int] = ()


def find_verdict(
    own: Notice, notices: dict[int, Notice], board: Board, world_size: int
) -> Verdict | None:
    """Return the verdict for this rank if ledgers differ, or if it can never go on.

    notices: of all ranks that have posted one, and ``own``; those of ranks that were killed are added.
    """
    if own.is_blocked:
        for ledger in ledgers():
            try:
                ledger.compare()
            except DivergenceError as error:
                return Verdict(error)
    if (found := tails.find_difference(board, own.rank, notices)) is not None:
        return Verdict(DivergenceError(found.text), found.about, found.ranks)
    _add_killed(notices, board)
    # The collectives on its device will never end, though it may not wait for them yet.
    ended = ended_without(own, notices)
    stuck = {own.rank} if ended else find_stuck(notices, world_size)
    if own.rank not in stuck:
        return None
    others = [each for rank, each in sorted(notices.items()) if rank != own.rank]
    if final := [final_error(each) for each in others if each.is_final]:
        return Verdict(final[0], ranks=stuck)
    text = describe_stuck(notices, stuck, world_size, ended)
    has_failed = any(each.state is State.ENDED and each.error for each in others)
    return Verdict(PeerLostError(text) if has_failed else DivergenceError(text), ranks=stuck)


def final_error(notice: Notice) -> FullshardError:
    """Return the error that ranks which wait for this one are to raise."""
    return PeerLostError(notice.error) if notice.is_loss else DivergenceError(notice.error)


def report_still(notices: Mapping[int, Notice], world_size: int, seconds: float) -> None:
    """Log what ranks do if none has moved for so long, though some may only compute."""
    if text := describe_still(notices, world_size):
        logger.warning(
            "No rank has moved for %.0f s: %s. A rank that runs may wait for its device, and that for another rank. "
            "If none of them computes, let every rank make the same calls in the same order; else the process "
            "group's timeout will end the job.",
            seconds,
            text,
        )


def _add_killed(notices: dict[int, Notice], board: Board) -> None:
    """Add notices for ranks that collectives on the device need, and that ended without a word."""
    for ledger in ledgers():
        if not ledger.is_on_device:
            continue
        silent = [
            each for each in ledger.ranks if each not in notices or not notices[each].has_gone
        ]
        gone = {
            each for each in silent if each in ledger.pids and not is_running(ledger.pids[each])
        }
        if board.needs_store:
            gone |= board.lost(silent)
        counts = {ledger.key: GroupCounts(len(ledger.ranks), 0, 0)}
        for rank in gone:
            notices[rank] = Notice(
                rank, State.ENDED, groups=counts, error="a signal, or by os._exit"
            )
