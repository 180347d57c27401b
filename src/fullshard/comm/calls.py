"""All-gather and reduce-scatter, the collectives of every step, called with little overhead.

``torch.distributed``'s functions look up, check and log around each call; on a small model that is
a quarter of what a call costs the host. None of these checks can fail here. So the process group's
own method, which the functions end in, is called directly, unless somebody watches the functions:
if they were replaced (debug modes, tests), under a ``TorchFunctionMode``, or while collectives of a
group are being coalesced. Tools that watch the dispatcher see the call in either case.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import c10d_logger, distributed_c10d

from fullshard.torch_private import coalescing, is_function_mode_enabled

# The functions were renamed; older versions have the names on the right.
_HAS_NEW_NAMES = hasattr(dist, "all_gather_single")
_ALL_GATHER = "all_gather_single" if _HAS_NEW_NAMES else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if _HAS_NEW_NAMES else "reduce_scatter_tensor"
_GATHER_METHOD = "all_gather_single" if _HAS_NEW_NAMES else "_allgather_base"
_SCATTER_METHOD = "reduce_scatter_single" if _HAS_NEW_NAMES else "_reduce_scatter_base"


class GroupCalls:
    """Starts all-gathers and reduce-scatters of 1-D tensors over one process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: Any = group
        # A group of another class, written in Python, may implement only what the functions call.
        is_known = type(group) is dist.ProcessGroup
        self._gather = getattr(group, _GATHER_METHOD) if is_known else None
        self._scatter = getattr(group, _SCATTER_METHOD) if is_known else None
        self._gather_options = distributed_c10d.AllgatherOptions()
        self._gather_options.asyncOp = True
        self._scatter_options: dict[Any, Any] = {}

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Any:
        """Start gathering ``source`` of every rank into ``output``; return the work."""
        if self._gather is None or _is_watched(_ALL_GATHER, source):
            return all_gather(output, source, group=self._group, async_op=True)
        return self._gather(output, source, self._gather_options)

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, op: Any) -> Any:
        """Start reducing ``source`` over the ranks by ``op`` into ``output``; return the work."""
        if self._scatter is None or _is_watched(_REDUCE_SCATTER, source):
            return reduce_scatter(output, source, op=op, group=self._group, async_op=True)
        options = self._scatter_options.get(op)
        if options is None:
            options = self._scatter_options[op] = distributed_c10d.ReduceScatterOptions()
            options.reduceOp, options.asyncOp = op, True
        return self._scatter(output, source, options)


def all_gather(output: torch.Tensor, source: torch.Tensor, **options: Any) -> Any:
    """Call ``torch.distributed``'s all-gather on 1-D tensors by its name in this torch version."""
    return getattr(dist, _ALL_GATHER)(output, source, **options)


def reduce_scatter(output: torch.Tensor, source: torch.Tensor, **options: Any) -> Any:
    """Call ``torch.distributed``'s reduce-scatter on 1-D tensors, by its name in this version."""
    return getattr(dist, _REDUCE_SCATTER)(output, source, **options)


def _is_watched(function: str, source: torch.Tensor) -> bool:
    """Return whether somebody would miss a call that bypasses this function of torch's.

    Complex tensors: the functions view them as real ones, which the methods do not.
    """
    return (
        _functions[function] is not _ORIGINALS[function]
        or is_function_mode_enabled()
        or bool(coalescing)
        or source.is_complex()
    )


def _is_original(function: Any) -> bool:
    """Return whether a function is torch's own, inside the decorator that torch puts on it."""
    inner = getattr(function, "__wrapped__", None)
    return (
        inner is not None
        and function.__code__.co_filename == c10d_logger.__file__
        and inner.__code__.co_filename == distributed_c10d.__file__
    )


_functions = vars(dist)
# None for a function that was replaced before this import: it counts as watched.
_ORIGINALS = {
    name: _functions[name] if _is_original(_functions[name]) else None
    for name in (_ALL_GATHER, _REDUCE_SCATTER)
}
