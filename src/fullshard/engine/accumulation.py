"""Whole gradients that wait for a later reduction.

Those of a flat unit lie in one buffer a bucket, and users see them as ``.grad``: dropping or zeroing
those (``optimizer.zero_grad()``) drops what is accumulated, as it would in training on one process.
Reduced gradients of earlier backwards are put aside meanwhile, and the sum is added to them. Those
of other units stay where autograd left them, out of sight.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from fullshard.engine.buffers import whole_views
from fullshard.engine.params import ManagedParameter, ShardHolder
from fullshard.plan.layout import UnitLayout


class Accumulation(Protocol):
    """The unreduced gradients of one unit."""

    @property
    def memory(self) -> list[torch.Tensor]:
        """What it keeps."""
        ...

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add whole gradients, one a parameter."""
        ...

    def take(self) -> list[torch.Tensor | None]:
        """Return the sums, one a parameter, and forget them."""
        ...


class RowsAccumulation:
    """Of parameters that are sharded one by one."""

    def __init__(self, params: Sequence[ManagedParameter], dtype: torch.dtype | None) -> None:
        """dtype: as what gradients are accumulated; None is their own."""
        self._params = params
        self._dtype = dtype

    @property
    def memory(self) -> list[torch.Tensor]:
        return [p.accumulated_grad for p in self._params if p.accumulated_grad is not None]

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        for param, grad in zip(self._params, grads, strict=True):
            if grad is not None and param.accumulated_grad is not None:
                param.accumulated_grad.add_(grad)
            elif grad is not None:
                param.accumulated_grad = grad if self._dtype is None else grad.to(self._dtype)

    def take(self) -> list[torch.Tensor | None]:
        grads = [param.accumulated_grad for param in self._params]
        for param in self._params:
            param.accumulated_grad = None
        return grads


class FlatAccumulation:
    """Of parameters in flat buffers, shown as what they are."""

    def __init__(
        self,
        layout: UnitLayout,
        params: Sequence[ManagedParameter],
        device: torch.device,
        dtype: torch.dtype | None,
    ) -> None:
        """device, dtype: where and as what gradients are accumulated; None is their own dtype."""
        self._params = params
        self._flats: dict[int, torch.Tensor] = {}  # of each parameter, by index
        self._views: dict[int, torch.Tensor] = {}
        self._present: set[int] = set()
        self._shown: dict[ShardHolder, torch.Tensor] = {}
        self._aside: dict[ShardHolder, torch.Tensor | None] = {}
        for bucket in layout.buckets:
            members = [params[param.index] for param in bucket.params]
            if not any(member.requires_grad for member in members):
                continue
            flat = torch.zeros(
                bucket.unsharded_numel,
                dtype=dtype or bucket.compute_dtype,
                device=device,
            )
            self._views.update(whole_views(bucket, flat))
            self._flats.update({param.index: flat for param in bucket.params})

    @property
    def memory(self) -> list[torch.Tensor]:
        """The buffers of whole gradients, one a bucket."""
        return list({id(flat): flat for flat in self._flats.values()}.values())

    @torch.no_grad()
    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add whole gradients, one a parameter, and show the sums."""
        self._forget_dropped()
        for index, grad in enumerate(grads):
            if grad is None:
                continue
            if index in self._present:
                self._views[index].add_(grad)
            else:
                self._views[index].copy_(grad)  # reading zeros costs a page fault as well
                self._present.add(index)
        for index in self._present:
            holder = self._params[index].holder
            if holder in self._shown:
                continue
            self._aside[holder] = holder.sharded.grad
            is_one = isinstance(holder, ManagedParameter)
            self._shown[holder] = self._views[index] if is_one else self._flats[index]
            show_gradient(holder.sharded, self._shown[holder])

    def take(self) -> list[torch.Tensor | None]:
        """Return the sums, one a parameter, and show what was put aside again."""
        self._forget_dropped()
        for holder, grad in self._aside.items():
            show_gradient(holder.sharded, grad)
        self._shown.clear()
        self._aside.clear()
        return [
            self._views[index] if index in self._present else None
            for index in range(len(self._params))
        ]

    def _forget_dropped(self) -> None:
        """Forget what users have dropped since."""
        dropped = {h for h, shown in self._shown.items() if h.sharded.grad is not shown}
        for holder in dropped:
            del self._shown[holder]
            self._aside[holder] = None  # the user means it all
        for index in [i for i in self._present if self._params[i].holder in dropped]:
            self._views[index].zero_()
            self._present.remove(index)


def show_gradient(parameter: nn.Parameter, grad: torch.Tensor | None) -> None:
    """Set a parameter's gradient, of whatever shape and dtype."""
    parameter.grad = None
    if grad is None:
        return
    data = parameter.data
    parameter.data = grad  # which autograd compares the gradient with
    parameter.grad = grad
    parameter.data = data
