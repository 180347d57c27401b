"""Showing whole parameters outside of forward and backward, and gathering single ones.

They are gathered into memory of their own, in the dtype of the shards, apart from the unit's phase.
So what a program writes to them reaches the shards only if it is written back. `summon_full_params`
and `full_parameters` are this.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm.interface import shard_views
from fullshard.comm.outside_steps import broadcast_object, run_collective
from fullshard.comm.process_group import ProcessGroupComm
from fullshard.engine.adoption import follow_changes
from fullshard.engine.params.buffers import whole_views
from fullshard.engine.precision import differentiable_tensors
from fullshard.engine.unit import Unit
from fullshard.errors import MisuseError, StateError, UnsupportedError


@dataclasses.dataclass(frozen=True, slots=True)
class WholeOptions:
    """How whole parameters are shown.

    writeback: copy changed values to the shards afterwards; with ``rank0_only`` those of the first rank.
    rank0_only: show whole parameters on the first rank of the mesh alone; the others go on to show
        their shards.
    offload_to_cpu: show them in host memory.
    with_grads: show whole gradients too.
    copies: show copies where nothing is sharded too, so that only ``writeback`` changes the model.
        Without it, as in PyTorch, those are the parameters themselves.
    """

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False
    copies: bool = False


@torch.no_grad()
def gather_whole(unit: Unit) -> list[torch.Tensor]:
    """Gather every plain parameter, in the dtype of the shards. Every rank has to call it.

    Returns one tensor per parameter, in memory of its own; where nothing is sharded, the shards
    themselves.
    """
    if not unit.params:
        return []
    assert unit.params.buffers is not None
    label = f"{unit.entered_as}: gathering whole parameters"
    unit.comm.fence(label)  # all have written
    whole = unit.params.buffers.gather_whole(label)
    unit.comm.fence(label)  # all have read
    return [whole[index] for index in range(len(whole))]


@torch.no_grad()
def gather_one(unit: Unit, index: int) -> torch.Tensor:
    """Gather one parameter, in the dtype of the shards, into memory of its own. Collective.

    Every rank of the shard axis has to call it. Apart from the unit's phase and its way of communicating:
    ranks send their shards, so nobody reads what a peer may write to.
    """
    param, buffers = unit.params[index], unit.params.buffers
    if buffers is None:
        raise StateError(
            f"{param.name} is on the meta device and has no memory. Call model.to_empty(device=...) first."
        )
    bucket, place = next(
        (b, p) for b in buffers.layout.buckets for p in b.params if p.index == index
    )
    own = param.local.detach().reshape(-1).to(unit.device)
    if unit.mesh.shard_group is None or unit.mesh.plan.shard_size == 1:
        whole = own.clone() if own.data_ptr() == param.local.data_ptr() else own
        return param.as_unsharded(whole.view(param.shape))
    label = f"{unit.entered_as}: gathering {param.name}"
    unit.comm.fence(
        label
    )  # where ranks share memory: one that does something else is named at once
    pieces = [bucket.pieces(place, rank) for rank in range(unit.mesh.plan.shard_size)]
    longest = max(sum(piece.numel for piece in each) for each in pieces)
    message = own.new_empty(longest)
    message[: own.numel()] = own
    comm = ProcessGroupComm(unit.mesh.shard_group, unit.device)
    # As bytes: not every backend knows every dtype.
    received, work = comm.gather_bytes(message.view(torch.uint8), label)
    work.wait()
    messages = received.view(own.dtype)
    whole = own.new_empty(place.spec.numel)
    for rank, each in enumerate(pieces):
        start = rank * longest
        for piece in each:
            part = messages[start : start + piece.numel]
            whole[piece.param_start : piece.param_start + piece.numel] = part
            start += piece.numel
    return param.as_unsharded(whole.view(param.shape))


@torch.no_grad()
def gather_whole_grads(unit: Unit) -> list[torch.Tensor | None]:
    """Gather every gradient of a flat unit; None for those that no rank has.

    Every rank has to call it. Returns one tensor per parameter, in the dtype of the shards. Raises
    MisuseError, on every rank, if one has gradients that wait for a reduction: each has others then.
    """
    grads = [param.sharded.grad for param in unit.params]
    if not unit.params or unit.mesh.shard_group is None:
        return grads
    if unit.gradients.unreduced.is_holding:  # the same on all ranks
        own_some = [any(grad is not None for grad in grads)]
        if any(_on_any_rank(own_some, unit, f"{unit.path}: asking for gradients")):
            raise MisuseError(
                f"{unit.label}: its gradients are not reduced yet (no_sync), so there are no whole "
                "gradients to show. Run a backward outside of no_sync() first, or pass with_grads=False."
            )
    assert unit.params.buffers is not None
    comm = ProcessGroupComm(unit.mesh.shard_group, unit.device)
    label = f"{unit.path}: gathering whole gradients"
    for bucket in unit.params.buffers.layout.buckets:
        own = [grads[place.index] for place in bucket.params]
        # A missing gradient travels as zeros: what a rank has must not decide on sizes.
        flat = torch.zeros(bucket.shard_numel, dtype=bucket.dtype, device=unit.device)
        views = shard_views(bucket, flat, unit.mesh.plan.shard_rank)
        for grad, view in zip(own, views, strict=True):
            if grad is not None:
                view.copy_(grad)
        # Zeros may be a gradient too, so flags tell who had one.
        present = _on_any_rank([grad is not None for grad in own], unit, label)
        gathered, work = comm.gather_bytes(flat, label)
        work.wait()
        whole = whole_views(bucket, gathered)
        for place, has in zip(bucket.params, present, strict=True):
            grads[place.index] = whole[place.index] if has else None
    return grads


def _on_any_rank(own: Sequence[bool], unit: Unit, label: str) -> list[bool]:
    """Return for each flag whether it is set on any rank of the shard axis. Collective."""
    # Gloo and NCCL both reduce uint8.
    flags = torch.tensor(own, dtype=torch.uint8, device=unit.device)
    group = unit.mesh.shard_group
    run_collective(dist.all_reduce, flags, op=dist.ReduceOp.MAX, group=group, label=label)
    return [bool(flag) for flag in flags.tolist()]


@contextlib.contextmanager
def whole_parameters(units: Sequence[Unit], options: WholeOptions) -> Iterator[None]:
    """Show the whole parameters of units in the body. Every rank has to enter and leave.

    Raises MisuseError if they are shown already, and, on leaving, if a shape has changed that would
    be written back; UnsupportedError for parameters that define their own all-gather.
    """
    for unit in units:  # all are checked before the first is changed
        if unit.is_whole:
            raise MisuseError(
                f"{unit.label}: Cannot manually unshard parameters when already unsharding "
                "parameters. Leave the inner summon_full_params or full_parameters out."
            )
        if unit.params.extended is not None:
            raise UnsupportedError(
                f"{unit.label}: some parameters define their own all-gather, so there is no whole "
                "parameter to show or write back. Use its module's unshard()."
            )
    for unit in units:
        follow_changes(unit)
        unit.settle()
    with contextlib.ExitStack() as stack:  # which undoes the rest even if undoing one raises
        for unit in units:
            # Before `_show`, which sets it and may raise. Undone last, in reverse order.
            stack.callback(setattr, unit, "is_whole", False)
            is_shown = _show(unit, options)
            if is_shown or (options.rank0_only and options.writeback):
                stack.callback(_hide, unit, options, is_shown=is_shown)
        yield


def is_first(unit: Unit) -> bool:
    return unit.mesh.plan.shard_rank == 0 and unit.mesh.plan.replicate_rank == 0


@torch.no_grad()
def _show(unit: Unit, options: WholeOptions) -> bool:
    """Gather the whole parameters and register them; return whether this rank shows them."""
    # Both gathers are collective, so before `rank0_only` parts the ranks.
    params = gather_whole(unit)
    grads = gather_whole_grads(unit) if options.with_grads else [None] * len(params)
    unit.is_whole = True
    is_sharded = unit.mesh.plan.shard_size > 1
    if options.rank0_only and is_sharded and not is_first(unit):
        return False
    if options.offload_to_cpu:
        params = [tensor.cpu() for tensor in params]
    if options.copies and not is_sharded:
        params = [tensor.clone() for tensor in params]
    if unit.params.flat is not None:
        unit.params.flat.slot.remove()  # parameters() yields the whole ones in its place
    for param, full, grad in zip(unit.params, params, grads, strict=True):
        param.show_whole(full, grad)
    return True


@torch.no_grad()
def _hide(unit: Unit, options: WholeOptions, *, is_shown: bool) -> None:
    """Register the shards again, and write values back if the options ask for it."""
    if not unit.params:
        return
    assert unit.params.buffers is not None
    shards = unit.params.buffers.shards
    unit.params.bring_home(shards)  # the body may have written to them
    shown: list[tuple[torch.Tensor | None, torch.Tensor | None]] = [(None, None)] * len(shards)
    if is_shown:
        # All are registered before a value is written, since writing may raise.
        if unit.params.flat is not None:
            unit.params.flat.slot.register(unit.params.flat.sharded)
        shown = [p.hide_whole(shard) for p, shard in zip(unit.params, shards, strict=True)]
    names = [p.name for p, (_, grad) in zip(unit.params, shown, strict=True) if grad is not None]
    if names and not options.with_grads and not unit.params.is_flat:
        warnings.warn(
            f"{', '.join(names)} ({unit.label}) got gradients while whole parameters were shown. They are "
            "dropped, since nothing reduces them: use gathered() for losses of weights.",
            UserWarning,
            stacklevel=2,
        )
    if not options.writeback:
        return
    fulls = [full for full, _ in shown]
    _check_shapes(unit, fulls, agreed=options.rank0_only)
    unit.finish_reading()  # the host is about to write to shards
    for param, shard, (full, grad) in zip(unit.params, shards, shown, strict=True):
        if options.rank0_only:
            _write_first(unit, param.own_part, shard, full, param.shape)
        # The same memory where nothing is sharded: it has been written.
        elif full is not None and full.data_ptr() != shard.data_ptr():
            write_changed(shard, param.own_part(full))
        if options.with_grads and grad is not None and param.sharded.grad is not None:
            param.sharded.grad.copy_(param.own_part(grad))


def write_changed(own: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values if they differ. Nothing otherwise: autograd and the engine take writes for changes."""
    values = values.to(own.device)
    # As bytes, by which NaN equals itself and -0.0 is not 0.0.
    one, other = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (own, values))
    if not torch.equal(one, other):
        own.copy_(values)


def _write_first(
    unit: Unit, own_part: Any, shard: torch.Tensor, full: torch.Tensor | None, shape: Any
) -> None:
    """Give every rank its part of the first rank's whole parameter. Collective."""
    mesh, label = unit.mesh, f"{unit.path}: writing whole parameters back"
    if mesh.plan.shard_size == 1 or mesh.plan.replicate_rank == 0:
        if full is None:
            full = torch.empty(shape, dtype=shard.dtype, device=unit.device)
        if mesh.plan.shard_size > 1:
            full = full.to(unit.device).contiguous()
            run_collective(dist.broadcast, full, group_src=0, group=mesh.shard_group, label=label)
        if full.data_ptr() != shard.data_ptr():
            write_changed(shard, own_part(full))
    if mesh.plan.replicate_size > 1:
        part = shard.to(unit.device).contiguous()
        run_collective(dist.broadcast, part, group_src=0, group=mesh.replicate_group, label=label)
        shard.copy_(part)


def _check_shapes(unit: Unit, fulls: Sequence[torch.Tensor | None], *, agreed: bool) -> None:
    """Raise MisuseError if a whole parameter has another shape now.

    agreed: what the first rank has decides for all. Collective then.
    """
    fault = ""
    for param, full in zip(unit.params, fulls, strict=True):
        if full is not None and tuple(full.shape) != param.shape:
            fault = fault or (
                f"{param.name}: its shape was changed from {param.shape} to {tuple(full.shape)}, "
                "which cannot be written back. Change values only, or pass writeback=False."
            )
    if agreed:
        label = f"{unit.path}: comparing shapes"
        for group in unit.mesh.groups:
            if dist.get_world_size(group) > 1:
                fault = broadcast_object(fault, 0, group, label)
    if fault:
        raise MisuseError(fault)


def refusing_backward(output: Any) -> Any:
    """Return a forward's output, a backward through which raises StateError.

    For a forward with whole parameters: no hook of ours sees it, so nothing would reduce gradients.
    """
    for tensor in differentiable_tensors(output) if torch.is_grad_enabled() else ():
        tensor.register_hook(_refuse_backward)
    return output


def refuse_while_whole(units: Iterable[Unit]) -> None:
    """Raise StateError if whole parameters of these units are shown, where backward would leave nothing."""
    for unit in units:
        if unit.is_whole:
            raise StateError(
                f"{unit.label}: backward was called inside summon_full_params or full_parameters, where modules "
                "show copies of whole parameters and its gradients would be lost. Call it outside."
            )


def _refuse_backward(_: torch.Tensor) -> None:
    raise StateError(
        "This forward ran inside summon_full_params or full_parameters, so its gradients would not be "
        "reduced. Run it outside, or under torch.no_grad()."
    )
