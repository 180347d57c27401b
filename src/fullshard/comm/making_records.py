"""Making the flight record of a group: in memory that its ranks share, or one on each rank.

Over NCCL each rank has its own, also on one host. A host starts collectives far ahead of its device: in a
shared flight record, whoever comes late would find the other one waiting for a device that never comes free.
"""

import logging

import torch.distributed as dist

from fullshard.comm.shared_memory import SharedMemory, UnavailableError
from fullshard.errors import AllocationError
from fullshard.peers.agreed_order import AgreedOrder
from fullshard.peers.flight_record import FlightRecord, keep_record, known_record
from fullshard.peers.groups import exchange_through_store
from fullshard.peers.watchdog import watchdog

logger = logging.getLogger("fullshard")

# Backends that have no processes behind their ranks, who could never agree on anything.
WITHOUT_PROCESSES = {"fake"}


def record_of(group: dist.ProcessGroup, backend: str) -> FlightRecord | None:
    """Return the flight record of a group, the same one every time; None if its ranks may be threads.

    backend: of the group. Over Gloo, ranks of one host share the flight record's memory; others have one each, and
    agree on the order of what they do. Every rank of the group must call it.
    """
    if type(group) is not dist.ProcessGroup:
        return None
    return known_record(group) or keep_record(group, _make_record(group, backend))


def _make_record(group: dist.ProcessGroup, backend: str) -> FlightRecord:
    shared: SharedMemory | None = None
    try:
        if backend == "gloo":
            return SharedMemory.connect(group).record
        if backend == "nccl":
            # Its collectives want a device, which may be another one later.
            shared = SharedMemory.connect(group, exchange_through_store)
    except AllocationError:
        raise
    # RuntimeError of a store that cannot exchange anything, as that of fake process groups.
    except (UnavailableError, RuntimeError) as reason:
        logger.info("ranks share no flight record: %s", reason)
    ranks = dist.get_process_group_ranks(group)
    record = FlightRecord(group.rank(), ranks, None, name=group.group_name)
    if shared is not None:
        record.slots, record.pids = shared.slots, shared.pids
    if backend in WITHOUT_PROCESSES:
        return record
    record.is_on_device = backend != "gloo"
    if shared is None:
        watchdog().board.serve_other_hosts()
    record.order = AgreedOrder.of(record, group)
    if shared is None and record.order is not None:
        watchdog().board.meet(ranks)
    return record
