"""Waiting for collectives of Gloo, with an eye on what the other ranks do meanwhile.

Gloo pairs collectives by their order alone, so ranks on different paths could wait for ever or exchange
the wrong bytes. While a rank waits it compares ledgers, and asks its sentry.
"""

import datetime
from typing import Any

import torch.distributed as dist

from fullshard.comm.ledger import Ledger, group_key
from fullshard.comm.patience import Patience
from fullshard.comm.sentry import sentry

# Between two comparisons: rare enough to cost nothing, often enough that ranks on different paths
# end in a second with an error that says so.
_COMPARE_EVERY = datetime.timedelta(seconds=0.5)


def wait_comparing(
    work: Any,
    ledger: Ledger | None,
    label: str,
    timeout_s: float,
    *,
    moving: dist.ProcessGroup | None = None,
) -> None:
    """Wait for a collective of Gloo, and compare ledger entries while it lasts.

    ledger: of the group; None if it has none. label: what it is, for messages. timeout_s: when to give up. moving: the group of fullshard's own
    that it runs in; None if it runs where the program has collectives too. Raises DivergenceError if ranks turn out to take different
    paths, and PeerTimeoutError if one does not come in time.
    """
    if _ends_soon(work):
        return
    patience = Patience(label, timeout_s)
    keys: tuple[str, ...] = () if ledger is None else (ledger.key,)
    if moving is not None:
        keys += (group_key(moving.group_name, dist.get_process_group_ranks(moving)),)
    in_group = "" if moving is not None or ledger is None else ledger.key
    with sentry().waiting(label, keys, in_group=in_group):
        while True:
            if ledger is not None:
                ledger.compare()
                patience.check(dict.fromkeys(_late(ledger)))
            sentry().check()
            if _ends_soon(work):
                return


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


def _late(ledger: Ledger) -> list[int]:
    """Return the ranks that have entered less than this one, or all others if nobody has."""
    others = [rank for part, rank in enumerate(ledger.ranks) if part != ledger.rank]
    places = {rank: ledger.last_of(ledger.ranks.index(rank)) for rank in others}
    late = [rank for rank, entry in places.items() if entry is None or entry.place < ledger.place]
    return late or others
