"""Clip gradients by their norm over all ranks."""

import functools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fullshard.comm.outside_steps import run_collective
from fullshard.engine.params.flat import FlatHolder
from fullshard.engine.params.managed import manager_of, owner_of
from fullshard.engine.runtime import Runtime
from fullshard.errors import StateError
from fullshard.torch_private import DTensorSpec, StridedShard

logger = logging.getLogger("fullshard")

Groups = tuple[dist.ProcessGroup, ...]


class _GradientPart(NamedTuple):
    """A gradient, or a run of a flat one, with the groups over which it is divided.

    grad: the local tensor that is scaled; None where this rank has none. dtype: the parameter's,
        which is the same on every rank.
    counted: the tensor whose norm is taken: ``grad`` itself, except for partial sums.
    """

    groups: Groups
    grad: torch.Tensor | None
    dtype: torch.dtype
    counted: torch.Tensor | None


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients so that their norm is at most ``max_norm``; return the norm before.

    parameters: sharded on any meshes, plain, or both. For a parameter that is unsharded at the
        moment, the gradient of its sharded form counts. Plain gradients count once, so they have to
        be the same on every rank.
    norm_type: 1, 2, any positive p, or infinity. Others, such as 0, mean what they mean in
        ``torch.nn.utils`` where no gradient is divided over ranks, and are a StateError elsewhere.

    Returns a 0-dim plain tensor, the norm over all ranks, the same on each. Every rank has to call
    it; there is one all-reduce per distinct set of mesh axes and axis in it. With
    ``error_if_nonfinite``, raises StateError, before scaling, if the norm is inf or NaN.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    parameters = [*dict.fromkeys(map(_trained, parameters))]
    by_groups: dict[Groups, list[_GradientPart]] = {}
    for part in _gradient_parts(parameters):
        by_groups.setdefault(part.groups, []).append(part)
    if not by_groups:
        return torch.tensor(0.0, device="cpu")
    if norm_type > 0:
        norm = _norm_over_ranks(by_groups, norm_type, parameters[-1].device)
    elif any(by_groups):
        raise StateError(
            f"norm_type is {norm_type}: norms of order 0 or less are not taken of gradients that are divided over "
            "ranks. Give 1, 2, another positive number, or math.inf."
        )
    else:
        counted = [part.counted for part in by_groups[()] if part.counted is not None]
        norm = nn.utils.get_total_norm(counted, norm_type)
    if error_if_nonfinite:
        Runtime.of(norm.device).refuse_capture("error_if_nonfinite=True reads the norm")
    if error_if_nonfinite and not torch.isfinite(norm):
        raise StateError(
            f"The gradients' norm of order {norm_type} is {norm.item()}. Run with FULLSHARD_DEBUG=nan "
            "to see where the first value is not finite, or pass error_if_nonfinite=False to continue."
        )
    # Of the CPU's alone: to know another device's, the host would have to wait for it.
    is_here = type(norm) is torch.Tensor and norm.device.type == "cpu"
    if is_here and not torch.compiler.is_compiling() and not math.isfinite(norm):
        _mention_debug(norm_type)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parts in by_groups.values():
        grads = [part.grad for part in parts if part.grad is not None]
        if grads:
            torch._foreach_mul_(grads, scale.to(grads[0].device))
    return norm


@functools.cache  # once
def _mention_debug(norm_type: float) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(
            "The gradients' norm%s is not finite, on all ranks. Run again with FULLSHARD_DEBUG=nan to see in "
            "which module, on which rank, the first value was not.",
            "" if norm_type == 2 else f" of order {norm_type}",
        )


def _norm_over_ranks(
    by_groups: Mapping[Groups, list[_GradientPart]], norm_type: float, device: torch.device
) -> torch.Tensor:
    if not any(by_groups):  # no power, of which the root would be another in its last bit
        return _local_norm(by_groups[()], norm_type, device)
    powers = []
    for groups, parts in by_groups.items():
        norm = _local_norm(parts, norm_type, device)
        power = norm if math.isinf(norm_type) else norm**norm_type
        for group in groups:
            op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
            # To a device that the group serves: offloaded gradients are in host memory. Process
            # groups made in Python may not say which they serve.
            devices = getattr(group, "_device_types", [])
            if devices and power.device.type not in {device.type for device in devices}:
                power = power.to(devices[0])
            run_collective(
                dist.all_reduce, power, op=op, group=group, label="the norm of all gradients"
            )
        powers.append(power)
    stacked = torch.stack([power.to(powers[0].device) for power in powers])
    return stacked.max() if math.isinf(norm_type) else stacked.sum() ** (1.0 / norm_type)


def _trained(parameter: torch.Tensor) -> torch.Tensor:
    """Return the parameter that has the gradient: for an unsharded form, the sharded one."""
    manager = manager_of(parameter)  # type: ignore[arg-type]
    if manager is None or manager.unsharded is not parameter:
        return parameter
    return manager.holder.sharded


def _gradient_parts(parameters: Iterable[torch.Tensor]) -> Iterator[_GradientPart]:
    """Yield parts with their groups, in an order and with groups that are the same on all ranks.

    A parameter that is divided over ranks is yielded even if it has no gradient here: other ranks
    may have one for their piece, and wait for this rank in the all-reduce.
    """
    groups_of = functools.cache(_shard_groups)
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor):
            counted, spec = grad, grad._spec
            if _is_partial(spec.placements):
                # Parts of a sum can be scaled like the sum, but their own norm says nothing of it.
                whole = [Replicate() if p.is_partial() else p for p in spec.placements]
                counted = grad.redistribute(placements=whole)
            groups = groups_of(spec.mesh, spec.placements)
            yield _GradientPart(groups, grad._local_tensor, parameter.dtype, counted._local_tensor)
        elif isinstance(parameter, DTensor):
            groups = groups_of(parameter._spec.mesh, parameter._spec.placements)
            if groups and parameter.requires_grad:
                yield _GradientPart(groups, None, parameter.dtype, None)
        else:
            yield from _plain_parts(parameter, grad)


def _plain_parts(parameter: torch.Tensor, grad: torch.Tensor | None) -> Iterator[_GradientPart]:
    """Yield the parts of a plain tensor's gradient.

    The tensor is a piece of a flat buffer, a whole flat parameter, or not sharded. A flat parameter
    may contain parameters that tensor parallel divides, and others that it replicates. Only the
    former are summed over the tensor-parallel axis, so their runs are yielded apart.
    """
    owner = owner_of(parameter)  # type: ignore[arg-type]
    if owner is None:
        if grad is not None:
            yield _GradientPart((), grad, parameter.dtype, grad)
        return
    unit = owner.unit()
    assert unit is not None  # who else refers to the owner
    group = unit.mesh.shard_group
    outer = (group,) if group is not None and group.size() > 1 else ()
    if not isinstance(owner.holder, FlatHolder):
        inner = _groups_below(owner.form.unsharded)
        if grad is not None or outer or inner:
            yield _GradientPart((*outer, *inner), grad, parameter.dtype, grad)
        return
    runs = [(piece, _groups_below(spec)) for piece, spec in owner.holder.contents]
    if len({inner for _, inner in runs}) == 1:
        runs = [(None, runs[0][1])]
    for piece, inner in runs:
        own = grad
        if grad is not None and len(runs) > 1:
            start, numel = (piece.shard_start, piece.numel) if piece is not None else (0, 0)
            own = grad[start : start + numel]
        if own is not None or outer or inner:
            yield _GradientPart((*outer, *inner), own, parameter.dtype, own)


def _groups_below(spec: DTensorSpec | None) -> Groups:
    """Return the groups over which tensor parallel divided a parameter before it was flattened."""
    return () if spec is None else _shard_groups(spec.mesh, spec.placements)


def _shard_groups(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Groups:
    """Return the groups over which a tensor is divided, not those of its replicas."""
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(placements)
        # `StridedShard`, which comes with tensor parallel, is no subclass of `Shard` (torch 2.13).
        if isinstance(placement, (Shard, StridedShard)) and mesh.size(axis) > 1
    )


@functools.cache
def _is_partial(placements: tuple[Placement, ...]) -> bool:
    return any(placement.is_partial() for placement in placements)


def _local_norm(parts: list[_GradientPart], norm_type: float, device: torch.device) -> torch.Tensor:
    """Return the norm of this rank's parts: 0-dim, float32 or float64."""
    # By the parameters' dtypes, not the gradients': all ranks have to all-reduce the same dtype,
    # and a rank may have no gradient.
    wide = {part.dtype for part in parts} & {torch.float64, torch.complex128}
    dtype = torch.float64 if wide else torch.float32
    counted = [part.counted for part in parts if part.counted is not None and part.counted.numel()]
    if not counted:
        return torch.zeros((), device=device, dtype=dtype)
    counted = [tensor.abs() if tensor.is_complex() else tensor for tensor in counted]
    norms = torch.stack(
        [norm.to(dtype) for norm in torch._foreach_norm(counted, norm_type, dtype=dtype)]
    )
    # As PyTorch's wrapper does: where ranks divide gradients as it does, the norm is its norm in every bit.
    return torch.linalg.vector_norm(norms, norm_type)
