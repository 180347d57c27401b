"""Showing whole parameters outside of forward and backward.

They are gathered into memory of their own, in the dtype of the shards, so nothing that happens to
them reaches the shards unless it is written back.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from fullshard.engine.flat_params import PieceParameter
from fullshard.engine.unit import Unit
from fullshard.errors import MisuseError


@dataclasses.dataclass(frozen=True, slots=True)
class WholeOptions:
    """writeback: what is changed goes to the shards. rank0_only: other ranks keep their pieces.
    offload_to_cpu: in host memory. with_grads: gradients as well."""

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False


@contextlib.contextmanager
def whole_parameters(units: Sequence[Unit], options: WholeOptions) -> Iterator[None]:
    """Show the whole parameters of flat units for a while. Every rank has to take part."""
    for unit in units:
        if unit.is_whole:
            raise MisuseError(
                f"{unit.label}: Cannot manually unshard parameters when already unsharding "
                "parameters. Leave the inner summon_full_params out."
            )
    for unit in units:
        unit.follow_changes()
        unit.wait_unshard()
        unit.reshard()
    shown = [unit for unit in units if _show(unit, options)]
    try:
        yield
    finally:
        for unit in shown:
            _hide(unit, options)
        for unit in units:
            unit.is_whole = False


@torch.no_grad()
def _show(unit: Unit, options: WholeOptions) -> bool:
    """Returns whether this rank shows them."""
    params = unit.gather_whole()
    grads = unit.gather_whole_grads() if options.with_grads else [None] * len(params)
    unit.is_whole = True
    is_sharded = unit.mesh.plan.shard_size > 1
    if options.rank0_only and is_sharded and dist.get_rank() != 0:
        return False
    if options.offload_to_cpu:
        params = [tensor.cpu() for tensor in params]
    if unit.flat is not None:
        unit.flat.slot.remove()
    for param, full, grad in zip(unit.params, params, grads, strict=True):
        assert isinstance(param, PieceParameter)
        param.show_whole(full, grad)
    return True


@torch.no_grad()
def _hide(unit: Unit, options: WholeOptions) -> None:
    assert unit.buffers is not None
    for index, param in enumerate(unit.params):
        assert isinstance(param, PieceParameter)
        shard = unit.buffers.shard(index)
        full, grad = param.hide_whole(shard)
        if not options.writeback or full.data_ptr() == shard.data_ptr():
            continue
        if full.shape != param.shape:
            raise MisuseError(
                f"{param.name}: its shape was changed from {param.shape} to {tuple(full.shape)}, "
                "which cannot be written back. Change values only, or pass writeback=False."
            )
        shard.copy_(param.owned.of(full))
        if options.with_grads and grad is not None and param.sharded.grad is not None:
            param.sharded.grad.copy_(param.owned.of(grad))
    if unit.flat is not None:
        unit.flat.slot.register(unit.flat.sharded)
