"""Waiting for collectives of Gloo, with an eye on what the other ranks do meanwhile.

Gloo pairs collectives by their order alone, so ranks on different paths could wait for ever or exchange
the wrong bytes. While a rank waits it compares ledgers, and asks its sentry.
"""

import datetime
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fullshard.comm.backends import timeout_s
from fullshard.comm.ledger import Ledger
from fullshard.comm.liveness import name_lost_ranks
from fullshard.comm.own_group import own_group
from fullshard.comm.patience import Patience
from fullshard.comm.sentry import sentry
from fullshard.comm.shared_memory import known_ledger
from fullshard.torch_private import default_group

# Between two comparisons: rare enough to cost nothing, often enough that ranks on different paths
# end in a second with an error that says so.
_COMPARE_EVERY = datetime.timedelta(seconds=0.5)


def wait_comparing(
    work: Any, ledger: Ledger, label: str, timeout_s: float, *, is_shared: bool = False
) -> None:
    """Wait for a collective of Gloo, and compare ledger entries while it lasts.

    label: what it is, for messages. timeout_s: when to give up. is_shared: whether it runs in a group
    where the program has collectives too. Raises DivergenceError if ranks turn out to take different
    paths, and PeerTimeoutError if one does not come in time.
    """
    if _ends_soon(work):
        return
    patience = Patience(label, timeout_s)
    with sentry().waiting(label, ledger.key if is_shared else ""):
        while True:
            ledger.compare()
            sentry().check()
            patience.check(dict.fromkeys(_late(ledger)))
            if _ends_soon(work):
                return


def run_collective(
    call: Callable[..., Any],
    *args: Any,
    group: dist.ProcessGroup | None,
    label: str,
    **options: Any,
) -> None:
    """Call a function of torch.distributed and wait, as a part of what a group does together.

    Every rank of the group must call it. call: takes ``group`` and ``async_op``. group: None for all
    ranks. label: the same on all ranks, for the ledger and messages. Raises DivergenceError and
    PeerTimeoutError as `wait_comparing`, PeerLostError or CommError if a rank is gone or out of reach.
    """
    group = default_group() if group is None else group
    ledger = known_ledger(group)
    if ledger is not None:
        ledger.enter(label)
    try:
        moving = own_group(group)
        work = call(*args, group=moving, async_op=True, **options)
        if ledger is None or moving is group:  # not Gloo, or nobody to compare with
            work.wait()
        else:
            wait_comparing(work, ledger, label, timeout_s(group))
    except RuntimeError as error:
        name_lost_ranks(error, group, label)
        raise


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
