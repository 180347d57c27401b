"""Gradient clipping by the norm over all ranks."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from fullshard.engine.params import owner_of


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients so that their norm is at most ``max_norm``; return the norm before.

    parameters: sharded on any meshes, plain, or both. Every rank has to call it.
    norm_type: 1, 2, any positive p, or infinity.

    Returns a 0-dim plain tensor, the norm over all ranks, the same on each. One all-reduce for each
    different mesh. Raises RuntimeError on a norm that is not finite, if asked to.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    device = torch.device("cpu")
    for parameter in parameters:
        grad, piece_groups = parameter.grad, _piece_groups(parameter)
        if grad is None and not piece_groups:
            continue
        device = parameter.device
        # Other ranks may have a gradient for their piece where this one has none.
        locals_ = by_groups.setdefault(
            piece_groups if grad is None or piece_groups else _shard_groups(grad), []
        )
        if grad is not None:
            locals_.append(grad._local_tensor if isinstance(grad, DTensor) else grad)
    if not by_groups:
        return torch.tensor(0.0)
    parts = []
    for groups, locals_ in by_groups.items():
        part = _local_power(locals_, norm_type, device)
        for group in groups:
            op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
            part = _for_group(part, group)
            dist.all_reduce(part, op=op, group=group)
        parts.append(part)
    stacked = torch.stack([part.to(parts[0].device) for part in parts])
    norm = stacked.max() if math.isinf(norm_type) else stacked.sum() ** (1.0 / norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"The gradients' norm of order {norm_type} is {norm.item()}. Look for the first loss "
            "that is not finite, or pass error_if_nonfinite=False to go on."
        )
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for locals_ in filter(None, by_groups.values()):
        torch._foreach_mul_(locals_, scale.to(locals_[0].device))
    return norm


def _piece_groups(parameter: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the group over which a parameter is divided that is a piece of a flat buffer."""
    if isinstance(parameter, DTensor):
        return ()
    owner = owner_of(parameter)  # type: ignore[arg-type]
    group = owner.shard_group if owner is not None else None
    return (group,) if group is not None and group.size() > 1 else ()


def _for_group(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a number where the group can sum it: of offloaded gradients it is in host memory."""
    devices = getattr(group, "_device_types", [])  # a stand-in has none
    if not devices or part.device.type in {device.type for device in devices}:
        return part
    return part.to(devices[0])


def _shard_groups(grad: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups over which a gradient is divided; replicas hold the same and do not count."""
    if not isinstance(grad, DTensor):
        return ()
    return tuple(
        grad.device_mesh.get_group(axis)
        for axis, placement in enumerate(grad.placements)
        if isinstance(placement, Shard) and grad.device_mesh.size(axis) > 1
    )


def _local_power(
    locals_: list[torch.Tensor], norm_type: float, device: torch.device
) -> torch.Tensor:
    """Return the sum of p-th powers, or the maximum for infinity, in float32 or wider."""
    filled = [tensor for tensor in locals_ if tensor.numel()]
    if not filled:
        return torch.zeros((), device=device)
    dtype = torch.promote_types(filled[0].dtype, torch.float32)
    norms = torch.stack(
        [norm.to(dtype) for norm in torch._foreach_norm(filled, norm_type, dtype=dtype)]
    )
    return norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()
