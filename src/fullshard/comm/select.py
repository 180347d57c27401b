"""Which communication a process group gets, and why."""

import logging
import weakref

import torch
import torch.distributed as dist

from fullshard.comm.backends import backend_names
from fullshard.comm.collectives import CollectivesComm
from fullshard.comm.cuda_ipc import CudaIpc, ranks_share_a_gpu
from fullshard.comm.device_memory import DeviceMemoryComm
from fullshard.comm.exchange import exchange_through_group
from fullshard.comm.interface import Comm
from fullshard.comm.local import LocalComm
from fullshard.comm.peer_memory import PeerMemoryComm
from fullshard.comm.process_group import ProcessGroupComm
from fullshard.comm.shared_memory import UnavailableError
from fullshard.errors import CommError, ShardingError
from fullshard.policies import CommChoice

logger = logging.getLogger("fullshard")

# One connection a group and device serves all units; it ends with the group. A text is why not.
_connected: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Comm | str]]"
_connected = weakref.WeakKeyDictionary()
_sharing: "weakref.WeakKeyDictionary[dist.ProcessGroup, bool]" = weakref.WeakKeyDictionary()
# Of each group, those of replicas that know whether it shares memory.
_agreed: "weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakSet[dist.ProcessGroup]]"
_agreed = weakref.WeakKeyDictionary()


_default_comm = CommChoice.AUTO


def set_default_comm(choice: str | CommChoice | None) -> CommChoice:
    """Choose how modules sharded from now on communicate; return the choice before.

    "auto" takes peer memory for CPU ranks of one host and the process group elsewhere;
    "process_group" always the latter; "peer_memory" raises where it cannot be had; "collectives"
    makes exactly the calls that PyTorch's FSDP makes, one all-gather and one reduce-scatter a unit
    and dtype, for tools that watch or count them. None changes nothing. Raises ShardingError for
    anything else.
    """
    global _default_comm
    try:
        chosen = _default_comm if choice is None else CommChoice(choice)
    except ValueError as error:
        names = ", ".join(repr(member.value) for member in CommChoice)
        raise ShardingError(f"set_default_comm({choice!r}): expected one of {names}.") from error
    before, _default_comm = _default_comm, chosen
    return before


def default_comm() -> CommChoice:
    """Return how modules sharded now communicate."""
    return _default_comm


def select_comm(
    group: dist.ProcessGroup | None,
    device: torch.device,
    choice: CommChoice,
    *,
    shards_on: torch.device | None = None,
    replicas: dist.ProcessGroup | None = None,
) -> Comm:
    """Return the communication for a group; None means a group of one.

    AUTO takes peer memory for CPU ranks of one host and for ranks that share a GPU, which NCCL does
    not serve; else, or where it cannot be had, the process group, and logs the reason. Raises
    CommError if PEER_MEMORY is asked for and cannot be had. Every rank of the group has to call it.

    shards_on: where shards are kept, if not on the device.
    replicas: the ranks that hold the same shards. They sum these with one another, so all lay them
        out in one way, and one group that cannot share memory keeps the others from it.
    """
    if group is None or group.size() == 1:
        return LocalComm()
    if choice is CommChoice.PROCESS_GROUP or not isinstance(group, dist.ProcessGroup):
        is_chosen = choice is CommChoice.PROCESS_GROUP
        return _process_group(group, device, "asked for" if is_chosen else "a stand-in")
    if choice is CommChoice.COLLECTIVES:
        collectives = CollectivesComm(group, device)
        collectives.compare_ranks()
        return collectives
    if choice is CommChoice.AUTO and device.type == "cuda" and not _share_a_gpu(group, device):
        return _process_group(group, device, "no two ranks share a GPU")
    is_demanded = choice is CommChoice.PEER_MEMORY
    comm = _offloaded(device, shards_on) or _peer_memory(group, device, replicas, again=is_demanded)
    if isinstance(comm, Comm):
        return comm
    return _without_peer_memory(group, device, choice, comm)


def leave_peer_memory(
    group: dist.ProcessGroup, device: torch.device, choice: CommChoice, reason: UnavailableError
) -> Comm:
    """Return what serves a group that can share no more memory, now and for later units.

    Raises CommError if PEER_MEMORY was asked for. Every rank has to call it with the same reason.
    """
    if choice is not CommChoice.PEER_MEMORY:  # else the same call may be made again
        _connected.setdefault(group, {})[device] = str(reason)
    logger.info("peer memory is not used any more: %s", reason)
    return _without_peer_memory(group, device, choice, str(reason))


def _without_peer_memory(
    group: dist.ProcessGroup, device: torch.device, choice: CommChoice, reason: str
) -> Comm:
    if choice is CommChoice.PEER_MEMORY:
        raise CommError(f"Peer memory was asked for but cannot be had: {reason}. Use 'auto'.")
    return _process_group(group, device, f"no peer memory: {reason}")


def _process_group(group: dist.ProcessGroup, device: torch.device, reason: str) -> Comm:
    """Return communication by the group's collectives, whose name says why it is that."""
    comm = ProcessGroupComm(group, device)
    comm.compare_ranks()
    comm.name += f"; {reason}"
    return comm


def _offloaded(device: torch.device, shards_on: torch.device | None) -> str | None:
    if shards_on is None or shards_on == device:
        return None
    return f"shards are on {shards_on}, and computing is on {device}"


def _peer_memory(
    group: dist.ProcessGroup,
    device: torch.device,
    replicas: dist.ProcessGroup | None,
    *,
    again: bool,
) -> Comm | str:
    """Return the group's connection, the same every time, or why there is none.

    again: connect once more if that failed, for a reason that may be gone.
    """
    known = _connected.setdefault(group, {})
    is_new = replicas is None or replicas not in _agreed.setdefault(group, weakref.WeakSet())
    if again and isinstance(known.get(device), str):
        del known[device]
        is_new = True  # replicas failed together, and connect together
    if device not in known:
        try:
            known[device] = _connect(group, device)
        except UnavailableError as reason:
            known[device] = str(reason)
            logger.info("peer memory is not used: %s", reason)
    if replicas is not None and is_new and device.type == "cpu":
        _agreed[group].add(replicas)
        if "gloo" in backend_names(group):  # else nobody shares, and there may be no processes
            found = known[device]
            theirs = exchange_through_group(found if isinstance(found, str) else None, replicas)
            known[device] = next((why_not for why_not in theirs if why_not is not None), found)
    return known[device]


def _connect(group: dist.ProcessGroup, device: torch.device) -> Comm:
    if device.type == "cpu":
        return PeerMemoryComm(group, device)
    if device.type == "cuda":
        return DeviceMemoryComm(group, CudaIpc(device), "CUDA IPC")
    raise UnavailableError(f"it serves CPU and CUDA ranks, this is {device.type}")


def _share_a_gpu(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ranks of the group compute on one GPU: found out once, by asking all."""
    if group not in _sharing:
        # Other backends may have no processes at all behind their ranks.
        of_processes = backend_names(group) & {"nccl", "gloo"}
        _sharing[group] = bool(of_processes) and ranks_share_a_gpu(group, device)
    return _sharing[group]
