"""Waiting for collectives of Gloo, with an eye on what the other ranks do meanwhile.

Gloo pairs collectives by their order alone, so ranks on different paths could wait for ever or exchange
the wrong bytes. While a rank waits it compares flight records, and asks its watchdog.
"""

import datetime
from typing import Any

import torch.distributed as dist

from fullshard.peers.flight_record import FlightRecord, key_of
from fullshard.peers.wait_reporter import WaitReporter
from fullshard.peers.watchdog import watchdog

# Between two comparisons: rare enough to cost nothing, often enough that ranks on different paths
# end in a second with an error that says so.
_COMPARE_EVERY = datetime.timedelta(seconds=0.5)


def wait_comparing(
    work: Any,
    record: FlightRecord | None,
    label: str,
    timeout_s: float,
    *,
    moving: dist.ProcessGroup | None = None,
) -> None:
    """Wait for a collective of Gloo, and compare flight record entries while it lasts.

    flight record: of the group; None if it has none. label: what it is, for messages. timeout_s: when to give up. moving: the group of fullshard's own
    that it runs in; None if it runs where the program has collectives too. Raises DivergenceError if ranks turn out to take different
    paths, and PeerTimeoutError or PeerLostError if one does not come in time.
    """
    if _ends_soon(work):
        return
    reporter = WaitReporter(label, timeout_s)
    keys: tuple[str, ...] = () if record is None else (record.key,)
    if moving is not None:
        keys += (key_of(moving),)
    in_group = "" if moving is not None or record is None else record.key
    with watchdog().waiting(label, keys, in_group=in_group):
        while True:
            if record is not None:
                record.compare()
            watchdog().check()
            late = _late(record, moving)
            reporter.check(late)
            try:
                if _ends_soon(work):
                    return
            except RuntimeError as error:
                # The backend's own clock may be ahead, and has no names.
                if "timed out" not in str(error).lower():
                    raise
                raise reporter.end(late) from error


def _ends_soon(work: Any) -> bool:
    """Wait for a moment; return whether the collective has ended. Raises if it has failed."""
    try:
        work.wait(_COMPARE_EVERY)
    except RuntimeError:
        # A timeout of `wait` ends only the wait: the collective goes on, and may be waited for
        # again. If the work is completed, it has failed (and raises again) or has just ended.
        if not work.is_completed():
            return False
        work.wait()
    return True


def _late(record: FlightRecord | None, moving: dist.ProcessGroup | None) -> dict[int, int | None]:
    """Return the ranks that have entered less than this one, or all others if that is unknown.

    Each with its process on this host, if that is known.
    """
    if record is None or not record.is_shared:
        ranks = dist.get_process_group_ranks(moving) if record is None else list(record.ranks)
        return dict.fromkeys(rank for rank in ranks if rank != dist.get_rank())
    found: dict[int, int | None] = {}
    for part, rank in enumerate(record.ranks):
        entry = record.last_of(part)
        if part != record.rank and (entry is None or entry.place < record.place):
            found[rank] = record.pids.get(rank)
    return found
