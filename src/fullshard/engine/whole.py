"""Showing whole parameters outside of forward and backward (``summon_full_params``).

They are gathered into memory of their own, in the dtype of the shards, apart from the unit's phase.
So what a program writes to them reaches the shards only if it is written back.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from fullshard.comm.interface import shard_views
from fullshard.comm.process_group import ProcessGroupComm
from fullshard.engine.params.buffers import whole_views
from fullshard.engine.params.flat import PieceParameter
from fullshard.engine.unit import Unit
from fullshard.errors import MisuseError


@dataclasses.dataclass(frozen=True, slots=True)
class WholeOptions:
    """Options of ``summon_full_params``, as PyTorch's.

    writeback: copy changed values to the shards afterwards.
    rank0_only: show whole parameters on rank 0 alone; the others go on to show their pieces.
    offload_to_cpu: show them in host memory.
    with_grads: show whole gradients too.
    """

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False


@torch.no_grad()
def gather_whole(unit: Unit) -> list[torch.Tensor]:
    """Gather every plain parameter, in the dtype of the shards. Every rank has to call it.

    Returns one tensor per parameter, in memory of its own; where nothing is sharded, the shards
    themselves.
    """
    if not unit.params:
        return []
    assert unit.params.buffers is not None
    label = f"{unit.path}: gathering whole parameters"
    unit.comm.fence(label)  # all have written
    whole = unit.params.buffers.gather_whole(label)
    unit.comm.fence(label)  # all have read
    return [whole[index] for index in range(len(whole))]


@torch.no_grad()
def gather_whole_grads(unit: Unit) -> list[torch.Tensor | None]:
    """Gather every gradient of a flat unit; None for those that no rank has.

    Every rank has to call it. Returns one tensor per parameter, in the dtype of the shards.
    """
    grads = [param.sharded.grad for param in unit.params]
    if not unit.params or unit.mesh.shard_group is None:
        return grads
    assert unit.params.buffers is not None
    comm = ProcessGroupComm(unit.mesh.shard_group, unit.device)
    for bucket in unit.params.buffers.layout.buckets:
        own = [grads[place.index] for place in bucket.params]
        # A missing gradient travels as zeros: what a rank has must not decide on sizes.
        flat = torch.zeros(bucket.shard_numel, dtype=bucket.dtype, device=unit.device)
        views = shard_views(bucket, flat, unit.mesh.plan.shard_rank)
        for grad, view in zip(own, views, strict=True):
            if grad is not None:
                view.copy_(grad)
        # Zeros may be a gradient too, so flags tell who had one. Gloo and NCCL both reduce uint8.
        has_grad = torch.tensor([grad is not None for grad in own], dtype=torch.uint8)
        present = has_grad.to(unit.device)
        dist.all_reduce(present, op=dist.ReduceOp.MAX, group=unit.mesh.shard_group)
        gathered, work = comm.gather_bytes(flat, f"{unit.path}: gathering whole gradients")
        work.wait()
        whole = whole_views(bucket, gathered)
        for place, has in zip(bucket.params, present.tolist(), strict=True):
            grads[place.index] = whole[place.index] if has else None
    return grads


@contextlib.contextmanager
def whole_parameters(units: Sequence[Unit], options: WholeOptions) -> Iterator[None]:
    """Show the whole parameters of flat units in the body. Every rank has to enter and leave.

    Raises MisuseError if they are shown already, and, on leaving, if a shape has changed that would
    be written back.
    """
    for unit in units:  # all are checked before the first is changed
        if unit.is_whole:
            raise MisuseError(
                f"{unit.label}: Cannot manually unshard parameters when already unsharding "
                "parameters. Leave the inner summon_full_params out."
            )
    for unit in units:
        unit.follow_changes()
        unit.settle()
    with contextlib.ExitStack() as stack:  # which undoes the rest even if undoing one raises
        for unit in units:
            # Before `_show`, which sets it and may raise. Undone last, in reverse order.
            stack.callback(setattr, unit, "is_whole", False)
            if _show(unit, options):
                stack.callback(_hide, unit, options)
        yield


@torch.no_grad()
def _show(unit: Unit, options: WholeOptions) -> bool:
    """Gather the whole parameters and register them; return whether this rank shows them."""
    # Both gathers are collective, so before `rank0_only` parts the ranks.
    params = gather_whole(unit)
    grads = gather_whole_grads(unit) if options.with_grads else [None] * len(params)
    unit.is_whole = True
    is_sharded = unit.mesh.plan.shard_size > 1
    if options.rank0_only and is_sharded and dist.get_rank() != 0:
        return False
    if options.offload_to_cpu:
        params = [tensor.cpu() for tensor in params]
    if unit.params.flat is not None:
        unit.params.flat.slot.remove()  # parameters() yields the whole ones in its place
    for param, full, grad in zip(unit.params, params, grads, strict=True):
        assert isinstance(param, PieceParameter)
        param.show_whole(full, grad)
    return True


@torch.no_grad()
def _hide(unit: Unit, options: WholeOptions) -> None:
    """Register the pieces again, and write values back if the options ask for it."""
    assert unit.params.buffers is not None
    shards = unit.params.buffers.shards
    pieces = [param for param in unit.params if isinstance(param, PieceParameter)]
    # All are registered before a value is written, since writing may raise.
    if unit.params.flat is not None:
        unit.params.flat.slot.register(unit.params.flat.sharded)
    shown = [param.hide_whole(shard) for param, shard in zip(pieces, shards, strict=True)]
    for param, shard, (full, grad) in zip(pieces, shards, shown, strict=True):
        if not options.writeback or full.data_ptr() == shard.data_ptr():
            continue  # the same memory where nothing is sharded: it has been written
        if full.shape != param.shape:
            raise MisuseError(
                f"{param.name}: its shape was changed from {param.shape} to {tuple(full.shape)}, "
                "which cannot be written back. Change values only, or pass writeback=False."
            )
        shard.copy_(param.owned.of(full))
        if options.with_grads and grad is not None and param.sharded.grad is not None:
            param.sharded.grad.copy_(param.owned.of(grad))
