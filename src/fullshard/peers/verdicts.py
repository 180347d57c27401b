"""What follows for this rank from all that ranks say of themselves: an error, a report, or nothing yet."""

import logging
from collections.abc import Collection, Mapping
from typing import NamedTuple

from fullshard.errors import DivergenceError, FullshardError, PeerLostError
from fullshard.host import is_running
from fullshard.peers import tails
from fullshard.peers.flight_record import flight_records
from fullshard.peers.standstill import describe_still, describe_stuck, ended_without, find_stuck
from fullshard.peers.status import GroupCounts, RankStatus, State
from fullshard.peers.status_board import StatusBoard

logger = logging.getLogger("fullshard")


class Verdict(NamedTuple):
    """An error that this rank has to raise.

    about: the flight record and place at which ranks differ; empty if that is not what it says. ranks: that will
    find a verdict too.
    """

    error: FullshardError
    about: str = ""
    ranks: Collection[int] = ()


def find_verdict(
    own: RankStatus, statuses: dict[int, RankStatus], board: StatusBoard, world_size: int
) -> Verdict | None:
    """Return the verdict for this rank if flight records differ, or if it can never go on.

    statuses: of all ranks that have posted one, and ``own``; those of ranks that were killed are added.
    """
    if own.is_blocked:
        for record in flight_records():
            try:
                record.compare()
            except DivergenceError as error:
                return Verdict(error)
    if (found := tails.find_difference(board, own.rank, statuses)) is not None:
        return Verdict(DivergenceError(found.text), found.about, found.ranks)
    _add_killed(statuses, board)
    # The collectives on its device will never end, though it may not wait for them yet.
    ended = ended_without(own, statuses)
    stuck = {own.rank} if ended else find_stuck(statuses, world_size)
    if own.rank not in stuck:
        return None
    others = [each for rank, each in sorted(statuses.items()) if rank != own.rank]
    if final := [final_error(each) for each in others if each.is_final]:
        return Verdict(final[0], ranks=stuck)
    text = describe_stuck(statuses, stuck, world_size, ended)
    has_failed = any(each.state is State.ENDED and each.error for each in others)
    return Verdict(PeerLostError(text) if has_failed else DivergenceError(text), ranks=stuck)


def final_error(status: RankStatus) -> FullshardError:
    """Return the error that ranks which wait for this one are to raise."""
    return PeerLostError(status.error) if status.is_loss else DivergenceError(status.error)


def report_still(statuses: Mapping[int, RankStatus], world_size: int, seconds: float) -> None:
    """Log what ranks do if none has moved for so long, though some may only compute."""
    if text := describe_still(statuses, world_size):
        logger.warning(
            "No rank has moved for %.0f s: %s. A rank that runs may wait for its device, and that for another rank. "
            "If none of them computes, let every rank make the same calls in the same order; else the process "
            "group's timeout will end the job.",
            seconds,
            text,
        )


def _add_killed(statuses: dict[int, RankStatus], board: StatusBoard) -> None:
    """Add statuses for ranks that collectives on the device need, and that ended without a word."""
    for record in flight_records():
        if not record.is_on_device:
            continue
        silent = [
            each for each in record.ranks if each not in statuses or not statuses[each].has_gone
        ]
        gone = {
            each for each in silent if each in record.pids and not is_running(record.pids[each])
        }
        if board.needs_store:
            gone |= board.lost(silent)
        counts = {record.key: GroupCounts(len(record.ranks), 0, 0)}
        for rank in gone:
            statuses[rank] = RankStatus(
                rank, State.ENDED, groups=counts, error="a signal, or by os._exit"
            )
