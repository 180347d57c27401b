"""A table of what takes memory, at the moment when memory is lacking.

When an allocation on a GPU fails in forward, backward or an optimizer's step, torch's allocator tells
its observers before it raises. Ours writes `memory_report` of this rank's models on the log, and what
to do. Elsewhere nobody is told of a failed allocation, so the table comes when the exception ends the
program: its traceback still holds what was in use. Neither costs anything in a step, and neither may
raise, or allocate on the device.
"""

import contextlib
import logging
import re
import time

import torch

from fullshard.engine.checks.optimizers import stepped_optimizers
from fullshard.engine.module_state import ModuleState
from fullshard.engine.restoring import is_lack
from fullshard.engine.runtime import Runtime
from fullshard.host import memory_pools, resident_nbytes
from fullshard.process_hooks import OUT_OF_MEMORY
from fullshard.torch_private import attach_out_of_memory_observer
from fullshard.watch.describe import format_nbytes
from fullshard.watch.memory import MemoryCategory, memory_report
from fullshard.watch.uncaught import roots

logger = logging.getLogger("fullshard")

_PAUSE_S = 10.0  # between tables: libraries try again, with less memory

_last_s = [-_PAUSE_S]  # when the last table was written
# Bytes of host memory that this process occupied when its first model began to run.
_before: list[int] = []
_ASKED = re.compile(r"tried to allocate (\d+) bytes")  # of torch's allocator of host memory

_SPLIT = "shard smaller modules (each unit is whole while it computes)"
_SHARE = (
    "use more ranks, or, of a GPU, let the host hold parameters and optimizer (CPUOffloadPolicy)"
)
_ADVICE = {
    MemoryCategory.SHARDS: _SHARE,
    MemoryCategory.UNSHARDED: f"{_SPLIT}, and reshard after forward",
    MemoryCategory.FULL_GRADIENTS: f"let each backward reduce its gradients (no_sync keeps them whole), or {_SPLIT}",
    MemoryCategory.GRADIENT_SHARDS: _SHARE,
    MemoryCategory.KEPT: _SHARE,
    MemoryCategory.COMMUNICATION: _SPLIT,
    MemoryCategory.OPTIMIZER: f"{_SHARE}, or take an optimizer with less state",
    MemoryCategory.UNMANAGED: "shard what is ignored now, and look at large buffers",
    MemoryCategory.OTHER: "take smaller micro-batches and accumulate gradients, or checkpoint activations of each block",
}


_FEWER = "start fewer ranks on this host, or load less in each"
_LOOK = "see in the traceback what asks for it"


def note_host_memory() -> None:
    """Note what this process occupies before it trains, which no smaller batch makes less."""
    if not _before:
        _before.append(resident_nbytes() or 0)


def observe_allocator(root: ModuleState) -> None:
    """Have the allocator of a root's device tell us, if it can."""
    if root.all_units[0].device.type == "cuda" and attach_out_of_memory_observer is not None:
        with contextlib.suppress(RuntimeError):  # cudaMallocAsync has no observers
            OUT_OF_MEMORY.add(_observe, "a table of what takes memory")


def _observe(device: int, asked: int, total: int, free: int) -> None:
    """Be told by the allocator of CUDA that it is about to raise. Sizes are in bytes."""
    with contextlib.suppress(Exception):
        where = torch.device("cuda", device)
        have = f"{format_nbytes(asked)} were asked for, and {format_nbytes(free)} of {format_nbytes(total)} are free"
        if text := _tables(where, have, used=total - free, asked=asked):
            logger.error("%s", text)


def explain_lack(error: BaseException) -> str | None:
    """Return the table for an exception for lack of memory that ends the program."""
    if not is_lack(error) or (
        OUT_OF_MEMORY.is_installed and isinstance(error, torch.OutOfMemoryError)
    ):
        return None
    device = next(iter(roots)).all_units[0].device
    text = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    asked = _ASKED.search(text)
    return _tables(device, text, asked=int(asked[1]) if asked else 0)


def _tables(device: torch.device, what: str, *, used: int = 0, asked: int = 0) -> str:
    """Return a table per model. used: bytes of the device, by whatever process. "" soon after others."""
    now = time.monotonic()
    if now - _last_s[0] < _PAUSE_S:
        return ""
    _last_s[0] = now
    lines = []
    modules = [module for root in list(roots) for module in root.modules]
    for report in (memory_report(module, stepped_optimizers()) for module in modules):
        sizes = {each: report.total(each, device=str(device)) for each in MemoryCategory}
        advice = {each: f"is {each.value}: {_ADVICE[each]}" for each in MemoryCategory}
        lines += [f"Out of memory on {device}, rank {report.rank}: {what}.", str(report), ""]
        most: list[tuple[int, str]] = []
        if device.type == "cpu":
            resident, before = resident_nbytes() or 0, sum(_before)
            lines += _host(resident, before, asked)
            built = sizes[MemoryCategory.SHARDS] + sizes[MemoryCategory.UNMANAGED]
            sizes[MemoryCategory.OTHER] = resident - before - (report.total() - built)
            most.append((before - built, f"was there before training: {_FEWER}"))
        else:
            lines += _cache(Runtime.of(device), used, asked)
        most += [(sizes[each], advice[each]) for each in MemoryCategory]
        if asked > sum(max(nbytes, 0) for nbytes, _ in most):
            lines.append(f"What was asked for is more than all that is held: {_LOOK}.")
        else:
            lines.append(f"Most of it {max(most, key=lambda one: one[0])[1]}.")
    return "\n".join(lines)


def _host(resident: int, before: int, asked: int) -> list[str]:
    """Say what this process occupies of host memory, and what it could still get, where that is known."""
    lines = [
        f"This process occupies {format_nbytes(resident)} of host memory, {format_nbytes(before)} of it since before "
        "its first forward: Python, libraries, data, the model as it was built."
    ]
    if asked and (pools := memory_pools()):
        free = min(pool.free_nbytes for pool in pools.values())
        lines.append(f"{format_nbytes(asked)} were asked for, and {format_nbytes(free)} are free.")
    return lines


def _cache(runtime: Runtime, used: int, asked: int) -> list[str]:
    """Say what the device's allocator keeps, and what is in use outside of it."""
    reserved, allocated = runtime.reserved_nbytes, runtime.allocated_nbytes
    if reserved is None or allocated is None:
        return []
    lines = [f"The allocator keeps {format_nbytes(reserved - allocated)} more, as cache."]
    if used > reserved:
        lines.append(
            f"Outside of it {format_nbytes(used - reserved)} are in use: by other processes, CUDA and NCCL."
        )
    if reserved - allocated >= asked > 0:
        lines.append(
            "Its cache would do, but is in pieces: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
        )
    return lines
