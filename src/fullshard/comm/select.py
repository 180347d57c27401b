"""Which communication a process group gets, and why."""

import logging
import weakref

import torch
import torch.distributed as dist

from fullshard.comm.collectives import CollectivesComm
from fullshard.comm.interface import Comm
from fullshard.comm.local import LocalComm
from fullshard.comm.peer_memory import PeerMemoryComm
from fullshard.comm.process_group import ProcessGroupComm
from fullshard.comm.shared_memory import UnavailableError
from fullshard.errors import CommError
from fullshard.policies import CommChoice

logger = logging.getLogger("fullshard")

# One connection a group serves all its units; it ends with the group.
_connected: "weakref.WeakKeyDictionary[dist.ProcessGroup, PeerMemoryComm | str]"
_connected = weakref.WeakKeyDictionary()


def select_comm(group: dist.ProcessGroup | None, device: torch.device, choice: CommChoice) -> Comm:
    """Return the communication for a group; None means a group of one.

    AUTO takes peer memory where it can be had, else the process group and logs the reason. Raises
    CommError if PEER_MEMORY is asked for and cannot be had. Every rank of the group has to call it.
    """
    if group is None or group.size() == 1:
        return LocalComm()
    if choice is CommChoice.PROCESS_GROUP or not isinstance(group, dist.ProcessGroup):
        return ProcessGroupComm(group, device)
    if choice is CommChoice.COLLECTIVES:
        return CollectivesComm(group, device)
    if group not in _connected:
        try:
            _connected[group] = PeerMemoryComm(group, device)
        except UnavailableError as reason:
            _connected[group] = str(reason)
            logger.info("peer memory is not used: %s", reason)
    comm = _connected[group]
    if isinstance(comm, PeerMemoryComm):
        return comm
    if choice is CommChoice.PEER_MEMORY:
        raise CommError(f"Peer memory was asked for but cannot be had: {comm}. Use 'auto'.")
    fallback = ProcessGroupComm(group, device)
    fallback.name += f"; no peer memory: {comm}"
    return fallback
