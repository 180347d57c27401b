"""Choice of the communication for a process group, with the reason.

[Note: Alike on all ranks] Every rank of a group has to choose the same communication, since all of
them are collective. So whatever may differ between ranks (limits, hosts, devices) is exchanged
before it decides, and a failure of one rank is a failure of all.
"""

import logging
import weakref

import torch
import torch.distributed as dist

import fullshard.host as host  # noqa: PLR0402  (`from fullshard` would ask for a public name)
from fullshard.comm.collectives import CollectivesComm
from fullshard.comm.cuda_ipc import CudaIpc, gpu_uuid
from fullshard.comm.device_memory import DeviceMemoryComm
from fullshard.comm.interface import Comm
from fullshard.comm.local import LocalComm
from fullshard.comm.peer_memory import PeerMemoryComm
from fullshard.comm.process_group import ProcessGroupComm
from fullshard.comm.shared_memory import UnavailableError
from fullshard.errors import AllocationError, CommError, ShardingError
from fullshard.peers.groups import backend_names, exchange
from fullshard.peers.waits import announce, naming_lost_ranks
from fullshard.policies import CommChoice

logger = logging.getLogger("fullshard")

# One connection per group and device serves all units, and ends with the group. A text says why
# there is none.
_connected: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Comm | str]]"
_connected = weakref.WeakKeyDictionary()
_sharing: "weakref.WeakKeyDictionary[dist.ProcessGroup, bool]" = weakref.WeakKeyDictionary()
# For each group, the groups of replicas that have agreed whether its kind shares memory.
_agreed: "weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakSet[dist.ProcessGroup]]"
_agreed = weakref.WeakKeyDictionary()


_default_comm = CommChoice.AUTO


def set_default_comm(choice: str | CommChoice | None) -> CommChoice:
    """Set how modules that are sharded from now on communicate; return the previous choice.

    - "auto": peer memory for CPU ranks of one host and for ranks that share a GPU, the process
      group for others;
    - "process_group": always the process group;
    - "peer_memory": peer memory; CommError if ranks cannot share it;
    - "collectives": exactly the calls that PyTorch's FSDP makes, one all-gather and one
      reduce-scatter per unit and dtype, for tools that watch or count them.

    None changes nothing. Raises ShardingError for anything else.
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
    """Return how modules that are sharded now communicate."""
    return _default_comm


def select_comm(
    group: dist.ProcessGroup | None,
    device: torch.device,
    choice: CommChoice,
    *,
    shards_on: torch.device | None = None,
    replicas: dist.ProcessGroup | None = None,
) -> Comm:
    """Return the communication for a group. Every rank of the group must call it.

    AUTO takes peer memory for CPU ranks of one host and for ranks that share a GPU, which NCCL does
    not support. For other ranks, and if these cannot share memory, it takes the process group and
    logs the reason. Raises CommError if PEER_MEMORY is asked for and ranks cannot share memory.

    group: the ranks that parameters are sharded over; None means this rank alone.
    shards_on: device that shards are kept on, if not ``device``.
    replicas: the ranks that hold the same shards. Replicas sum gradients shard by shard, so they
        must all have one layout: if one group of ranks cannot share memory, none of them does.
    """
    if group is None or group.size() == 1:
        return LocalComm()
    announce()  # first, so that others can tell whether this rank has come to the collectives below
    with naming_lost_ranks(group, "connecting ranks"):
        return _select(group, device, choice, shards_on, replicas)


def _select(
    group: dist.ProcessGroup,
    device: torch.device,
    choice: CommChoice,
    shards_on: torch.device | None,
    replicas: dist.ProcessGroup | None,
) -> Comm:
    """Return the communication for a group of several ranks: see `select_comm`."""
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
    comm: Comm | str = f"shards are on {shards_on}, and computing is on {device}"
    if shards_on in (None, device):
        comm = _peer_memory(group, device, replicas, again=is_demanded)
    if isinstance(comm, Comm):
        return comm
    return _without_peer_memory(group, device, choice, comm)


def leave_peer_memory(
    group: dist.ProcessGroup, device: torch.device, choice: CommChoice, reason: UnavailableError
) -> Comm:
    """Return the communication for a group that can share no more memory; later units get it too.

    Raises CommError if PEER_MEMORY was asked for. Every rank must call it with the same reason.
    """
    # Whoever demands peer memory gets an error, may raise the limit, and may call again: so that
    # failure is not remembered.
    if choice is not CommChoice.PEER_MEMORY:
        _connected.setdefault(group, {})[device] = str(reason)
    logger.info("peer memory is not used any more: %s", reason)
    return _without_peer_memory(group, device, choice, str(reason))


def _without_peer_memory(
    group: dist.ProcessGroup, device: torch.device, choice: CommChoice, reason: str
) -> Comm:
    """Return the process group's communication; raise CommError if peer memory was demanded."""
    if choice is CommChoice.PEER_MEMORY:
        raise CommError(
            f"Peer memory was asked for, but these ranks cannot use it: {reason}. "
            "Use set_default_comm('auto')."
        )
    return _process_group(group, device, f"no peer memory: {reason}")


def _process_group(group: dist.ProcessGroup, device: torch.device, reason: str) -> Comm:
    """Return communication through the group's collectives. Its name says why it was chosen."""
    comm = ProcessGroupComm(group, device)
    comm.compare_ranks()
    comm.name += f"; {reason}"
    return comm


def _peer_memory(
    group: dist.ProcessGroup,
    device: torch.device,
    replicas: dist.ProcessGroup | None,
    *,
    again: bool,
) -> Comm | str:
    """Return the group's connection, the same one every time, or the reason why there is none.

    again: try to connect once more if that failed before, since the reason may be gone.
    """
    known = _connected.setdefault(group, {})
    is_new = replicas is None or replicas not in _agreed.setdefault(group, weakref.WeakSet())
    if again and isinstance(known.get(device), str):
        del known[device]
        is_new = True  # all replicas failed together, so all of them come here again
    lack: AllocationError | None = None
    if device not in known:
        try:
            known[device] = _connect(group, device)
        except UnavailableError as reason:
            known[device] = str(reason)
            logger.info("peer memory is not used: %s", reason)
        except AllocationError as error:
            lack = error
    is_agreed_on = replicas is not None and is_new and device.type == "cpu"
    # With other backends CPU ranks do not share memory, and a fake one has nobody to ask.
    if replicas is not None and is_agreed_on and "gloo" in backend_names(group):
        found = known.get(device)
        with naming_lost_ranks(replicas, "connecting ranks"):
            told = exchange((found if isinstance(found, str) else None, lack), replicas)
        lack = next((theirs for _, theirs in told if theirs is not None), None)
        if found is not None:
            known[device] = next((why_not for why_not, _ in told if why_not is not None), found)
    if lack is not None:
        known.pop(device, None)  # so that all connect when they are called again
        raise lack
    if replicas is not None and is_agreed_on:
        _agreed[group].add(replicas)
    return known[device]


def _connect(group: dist.ProcessGroup, device: torch.device) -> Comm:
    """Return new communication through peer memory. Raises UnavailableError on all ranks alike."""
    if device.type == "cpu":
        return PeerMemoryComm(group)
    if device.type == "cuda":
        return DeviceMemoryComm(group, CudaIpc(device))
    raise UnavailableError(f"it serves CPU and CUDA ranks, this is {device.type}")


def _share_a_gpu(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether two ranks of the group compute on one GPU. All ranks are asked, once per group."""
    if group not in _sharing:
        # With a visible GPU for every rank nobody is asked: sharing one would then be a mistake, which NCCL reports.
        # Backends such as the fake one may have no process behind their ranks.
        has_processes = not {"nccl", "gloo"}.isdisjoint(backend_names(group))
        places: list[tuple[str, str]] = []
        if has_processes and group.size() > torch.accelerator.device_count():
            places = exchange((host.identity(), gpu_uuid(device.index)), group)
        _sharing[group] = len({*places}) < len(places)
    return _sharing[group]
