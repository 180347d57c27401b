"""Refuse a load that does not fit into the memory of its hosts, before anything is read.

Linux gives out memory that it does not have, and kills a process when it is written to. What a load writes
to is known before: if it cannot fit, all ranks get an error in place of a signal.

[Note: A lower bound] Only what is certain counts. When a rank has loaded, its tensors in host memory are
resident; so it needs at least their size beyond all that it occupies now, whatever that is. Optimizer
state counts as large as in the files, divided among ranks as what they train is: replicas need more.
Memory counts as free with caches of files and swap.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from fullshard.checkpoint.peers import Peers
from fullshard.checkpoint.saved_state import SavedTensor
from fullshard.errors import CheckpointError
from fullshard.host import Pool, memory_pools, resident_nbytes

logger = logging.getLogger("fullshard")

_CLOSE = 0.9  # of what is free without swap


class Load(NamedTuple):
    """What is loaded. state_nbytes: of all optimizer state in the files."""

    models: Iterable[nn.Module]
    optimizers: Iterable[torch.optim.Optimizer] = ()
    state_nbytes: int = 0


class _Rank(NamedTuple):
    """What a rank tells the others. held: bytes of the tensors that are loaded, in host memory."""

    held: int
    trained_numel: int
    resident: int
    pools: dict[str, Pool]


def check_room(peers: Peers, path: Path | str, load: Callable[[], Load]) -> None:
    """Raise CheckpointError, on all ranks, if some host lacks memory for a load. Collective.

    load: returns what is loaded; its error is raised on all ranks. Logs a warning where it is close. See
    [Note: A lower bound].
    """

    def own() -> tuple[int, _Rank]:
        models, optimizers, state_nbytes = load()
        held = {id(t): t for model in models for t in (*model.parameters(), *model.buffers())}
        in_groups = (p for o in optimizers for group in o.param_groups for p in group["params"])
        trained = (parameter for parameter in in_groups if parameter.requires_grad)
        return state_nbytes, _Rank(
            sum(tensor.nbytes for tensor in _in_host_memory(held.values())),
            sum(tensor.numel() for tensor in _in_host_memory(trained)),
            resident_nbytes() or 0,
            memory_pools(),
        )

    state_nbytes, ranks = peers.together_telling(own)
    num_trained = sum(each.trained_numel for each in ranks)
    loaded = [
        each.held + (state_nbytes * each.trained_numel // num_trained if num_trained else 0)
        for each in ranks
    ]
    for key in dict.fromkeys(key for each in ranks for key in each.pools):
        members = [number for number, each in enumerate(ranks) if key in each.pools]
        needed = sum(max(loaded[n] - ranks[n].resident, 0) for n in members)
        pool = max((ranks[n].pools[key] for n in members), key=lambda one: one.free_nbytes)
        what = (
            f"{path}: on {pool.name} (ranks {', '.join(map(str, members))}), tensors of "
            f"{_size(sum(loaded[n] for n in members))} are to be loaded into host memory. At least {_size(needed)} "
            f"of that is not there yet, and {_size(pool.free_nbytes + pool.swap_nbytes)} can be had, caches and "
            "swap included."
        )
        if needed > pool.free_nbytes + pool.swap_nbytes:
            raise CheckpointError(
                f"{what} Use more hosts, let devices hold the model, or free memory. "
                'If this is wrong, allow=["memory"] tries it.'
            )
        if needed > _CLOSE * pool.free_nbytes and peers.rank == members[0]:
            logger.warning("%s That is close: the system may end a process.", what)


def check_copies(nbytes: int) -> None:
    """Raise CheckpointError if this rank alone lacks the memory for new copies of so many bytes."""
    for pool in memory_pools().values():
        if nbytes > pool.free_nbytes + pool.swap_nbytes:
            raise CheckpointError(
                f"A save in the background needs copies of {_size(nbytes)}, and on {pool.name} "
                f"{_size(pool.free_nbytes + pool.swap_nbytes)} can be had. Use save_checkpoint, which copies nothing."
            )


def state_nbytes(tensors: Mapping[str, SavedTensor], sections: Iterable[str]) -> int:
    """Return the bytes of the tensors in these sections."""
    wanted = {*sections}
    return sum(
        math.prod(tensor.shape) * tensor.dtype.itemsize
        for name, tensor in tensors.items()
        if name.partition("/")[0] in wanted
    )


def _in_host_memory(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield what of tensors this rank has, if that is on the CPU."""
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        if local.device.type == "cpu":
            yield local


def _size(nbytes: int) -> str:
    return f"{math.ceil(nbytes / 2**20):,} MiB"
