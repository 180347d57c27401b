"""What ranks do together once they are connected: NCCL's all-reduce, and a step of a sharded model."""

import functools
import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fullshard
from fullshard.errors import FullshardError
from fullshard.tools.doctor.devices import wait_for_device
from fullshard.tools.doctor.facts import Collective, Communication

_REDUCED_NBYTES = 64 << 20
_NUM_TIMES = 3


def reduce_over_nccl(
    scopes: Sequence[Sequence[int]], device: torch.device, timeout_s: float
) -> tuple[Collective, ...]:
    """Sum a tensor over the ranks of each scope, in turn, until one fails. Collective.

    scopes: groups of ranks; every rank gives the same. Not run on a GPU yet.
    """
    found: list[Collective] = []
    for ranks in scopes:
        group = dist.new_group(list(ranks), backend="nccl")
        if dist.get_rank() not in ranks:
            continue
        assert group is not None
        try:
            seconds = _within(timeout_s, functools.partial(_reduce, group, device))
        except (RuntimeError, TimeoutError) as error:
            return (*found, Collective(tuple(ranks), error=str(error).splitlines()[0]))
        found.append(Collective(tuple(ranks), seconds, _REDUCED_NBYTES / seconds))
    return tuple(found)


def _reduce(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds that an all-reduce takes. Raises RuntimeError if the sum is wrong."""
    load = torch.empty(_REDUCED_NBYTES // 4, dtype=torch.float32, device=device)
    times = []
    for _ in range(_NUM_TIMES):
        load.fill_(1.0)
        wait_for_device(device)
        began = time.perf_counter()
        dist.all_reduce(load, group=group)
        wait_for_device(device)
        times.append(time.perf_counter() - began)
    if not bool((load == group.size()).all()):
        raise RuntimeError(f"the sum of {group.size()} ones is {load.min().item():g}")
    return min(times)


def _within(seconds: float, work: Callable[[], float]) -> float:
    """Return what work returns, which runs in a thread: NCCL may wait for ever. Raises TimeoutError."""
    results: list[float] = []
    errors: list[RuntimeError] = []

    def run() -> None:
        try:
            results.append(work())
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="fullshard-doctor-nccl", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no end within {seconds:g} s")
    return results[0]


def try_fullshard(
    scopes: Sequence[Sequence[int]], device: torch.device
) -> tuple[Communication, ...]:
    """Shard a small model over the ranks of each scope and train it for a step. Collective.

    scopes: groups of ranks; every rank gives the same. Those of one rank are left out.
    """
    found: list[Communication] = []
    for ranks in scopes:
        if len(ranks) == 1:
            continue
        group = dist.new_group(list(ranks))
        if dist.get_rank() not in ranks:
            continue
        assert group is not None
        try:
            chosen = _step(group, device)
        except (FullshardError, RuntimeError, ImportError) as error:
            reason = str(error).splitlines()[0]
            return (*found, Communication(tuple(ranks), device.type, error=reason))
        found.append(Communication(tuple(ranks), device.type, chosen))
    return tuple(found)


def _step(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return how fullshard communicates, after a forward and a backward."""
    model = nn.Linear(64, 64, device=device)
    fullshard.fully_shard(model, mesh=DeviceMesh.from_group(group, device.type))
    model(torch.ones(1, 64, device=device)).sum().backward()
    (unit,) = fullshard.describe(model).units
    return unit.communication
