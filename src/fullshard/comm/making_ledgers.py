"""Making the ledger of a group: in memory that its ranks share, or one on each rank.

Over NCCL each rank has its own, also on one host. A host starts collectives far ahead of its device: in a
shared ledger, whoever comes late would find the other one waiting for a device that never comes free.
"""

import logging

import torch.distributed as dist

from fullshard.comm.agreed_order import AgreedOrder
from fullshard.comm.exchange import exchange_through_store
from fullshard.comm.ledger import Ledger
from fullshard.comm.ledgers import keep_ledger, known_ledger
from fullshard.comm.sentry import sentry
from fullshard.comm.shared_memory import SharedMemory, UnavailableError
from fullshard.errors import AllocationError

logger = logging.getLogger("fullshard")

# Backends that have no processes behind their ranks, who could never agree on anything.
WITHOUT_PROCESSES = {"fake"}


def ledger_of(group: dist.ProcessGroup, backend: str) -> Ledger | None:
    """Return the ledger of a group, the same one every time; None if its ranks may be threads.

    backend: of the group. Over Gloo, ranks of one host share the ledger's memory; others have one each, and
    agree on the order of what they do. Every rank of the group must call it.
    """
    if type(group) is not dist.ProcessGroup:
        return None
    return known_ledger(group) or keep_ledger(group, _make_ledger(group, backend))


def _make_ledger(group: dist.ProcessGroup, backend: str) -> Ledger:
    shared: SharedMemory | None = None
    try:
        if backend == "gloo":
            return SharedMemory.connect(group).ledger
        if backend == "nccl":
            # Its collectives want a device, which may be another one later.
            shared = SharedMemory.connect(group, exchange_through_store)
    except AllocationError:
        raise
    # RuntimeError of a store that cannot exchange anything, as that of fake process groups.
    except (UnavailableError, RuntimeError) as reason:
        logger.info("ranks share no ledger: %s", reason)
    ranks = dist.get_process_group_ranks(group)
    ledger = Ledger(group.rank(), ranks, None, name=group.group_name)
    if shared is not None:
        ledger.slots, ledger.pids = shared.slots, shared.pids
    if backend in WITHOUT_PROCESSES:
        return ledger
    ledger.is_on_device = backend != "gloo"
    if shared is None:
        sentry().serve_other_hosts()
    ledger.order = AgreedOrder.of(ledger, group)
    if shared is None and ledger.order is not None:
        sentry().meet(ranks)
    return ledger
