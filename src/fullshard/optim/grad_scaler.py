"""`ShardedGradScaler`: loss scaling for float16 where every rank holds a part of the gradients."""

import types
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor

from fullshard.comm.outside_steps import run_collective


class ShardedGradScaler(GradScaler):
    """Scale losses, and skip a step on every rank if any rank finds an inf or NaN gradient.

        scaler = ShardedGradScaler()
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # divides the gradients by the scale first; may skip
        scaler.update()         # a smaller scale after a skip, a larger one after many steps

    Differs from ``torch.amp.GradScaler`` in three ways: ranks of ``process_group`` (default: all)
    agree in one all-reduce per step; gradients may be float16, DTensors, on several devices, or
    missing on a rank; scaled outputs keep their dtype.

    device: the device type on which ranks communicate if all their gradients are in host memory.
    Arguments, methods and errors are otherwise those of ``torch.amp.GradScaler``.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or all tensors of nested iterables, by the scale."""
        if not self.is_enabled():
            return outputs
        if not isinstance(outputs, torch.Tensor) and isinstance(outputs, Iterable):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        # The scale is a float32 scalar, to which a float16 scalar would be promoted.
        return super().scale(outputs).to(outputs.dtype)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,  # ignored: AMP passes False, for masters in float32
    ) -> dict[torch.device, torch.Tensor]:
        """Multiply the gradients by ``inv_scale`` and agree on whether one was not finite.

        Returns, per device with gradients, a tensor shaped as ``found_inf``: 1 if any rank has an
        inf or NaN, else 0. `unscale_` calls this, and so does the check for fused optimizers, which
        unscale by themselves; so neither can act on one rank's gradients alone. Collective.
        """
        params = [_local_view(p) for group in optimizer.param_groups for p in group["params"]]
        local: Any = types.SimpleNamespace(param_groups=[{"params": params}])
        found = super()._unscale_grads_(local, inv_scale, found_inf, allow_fp16=True)
        # One tensor and one collective on every rank, whichever devices its gradients are on, and
        # also if it has none.
        found = found or {found_inf.device: found_inf}
        device = next((d for d in found if d.type != "cpu"), self._device)
        agreed = torch.stack([each.to(device) for each in found.values()]).amax(0)
        run_collective(
            dist.all_reduce,
            agreed,
            dist.ReduceOp.MAX,
            group=self.process_group,
            label="agreeing on gradients that are not finite",
        )
        for each in found.values():
            each.copy_(agreed)
        return found


def _local_view(parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose ``grad`` shares memory with this rank's part of the gradient.

    torch's unscaling kernel takes plain tensors or DTensors, but not both in one call (torch 2.13).
    """
    if not isinstance(parameter.grad, DTensor):
        return parameter
    view = parameter.grad._local_tensor.detach()
    view.grad = view.detach()
    return view
