"""Averages gradients over ranks after each backward, by plain collectives: data parallelism, spelled out.

    before a backward    what was averaged already is set aside; what waits, unaveraged, is put back
    after it             what is there now is averaged, and added to what was set aside

So ``.grad`` is the sum over backwards of the mean over ranks, right after each of them. Where a module does not
synchronise, gradients wait, and the next backward that does averages them with its own.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

Groups = tuple[dist.ProcessGroup, ...]


@dataclasses.dataclass(eq=False)
class _Averaged:
    """A module whose parameters are averaged: over which groups, and whether the next backward does it.

    always: whether a parameter that no rank used gets a gradient of zeros.
    """

    module: nn.Module
    groups: Groups
    syncs: bool = True
    always: bool = False


class Averaging:
    """The gradients of all modules that the script shards.

    divide_by: what sums are divided by, instead of the number of ranks.
    """

    def __init__(self, divide_by: float | None = None) -> None:
        self._divide_by = divide_by
        self._modules: list[_Averaged] = []  # inner ones before those around them
        self._ignored: set[nn.Parameter] = set()
        self._earlier: dict[nn.Parameter, torch.Tensor] = {}
        self._waiting: dict[nn.Parameter, torch.Tensor] = {}
        self._weight: torch.Tensor | None = None  # of losses since the last average
        self._totals: dict[nn.Parameter, float] = {}

    # What the script asks for

    def add(
        self,
        module: nn.Module,
        groups: Sequence[dist.ProcessGroup],
        ignored: Iterable[nn.Parameter],
    ) -> None:
        """Average gradients of a module over groups, those of modules that were added before excepted."""
        self._ignored |= set(ignored)
        self._modules.append(_Averaged(module, tuple(groups)))

    def synchronise(self, module: nn.Module, *, does: bool, recurse: bool = True) -> None:
        """Average at the end of each backward, or let gradients wait."""
        for each in self._within(module, recurse=recurse):
            each.syncs = does

    def always_fill(self, module: nn.Module, *, does: bool, recurse: bool = True) -> None:
        """Give zeros to parameters that no rank used, or leave them without a gradient."""
        for each in self._within(module, recurse=recurse):
            each.always = does

    def drop(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            self._waiting.pop(parameter, None)

    def weight_next(self, weight: torch.Tensor) -> None:
        """Average by weights: the loss of the next backward was multiplied by this one."""
        weight = weight.detach().double().reshape(())
        self._weight = weight if self._weight is None else self._weight + weight

    # Around a backward

    @torch.no_grad()
    def before_backward(self) -> None:
        """Set gradients aside that were averaged already."""
        self._earlier = {}
        for parameter in itertools.chain(*self._by_module().values()):
            if parameter.grad is not None:
                self._earlier[parameter] = parameter.grad
            parameter.grad = self._waiting.pop(parameter, None)

    @torch.no_grad()
    def after_backward(self) -> None:
        """Average what the backward has left, and add it to what there was. Collective."""
        by_module = self._by_module()
        for each, parameters in by_module.items():
            if each.syncs:
                self._average(each, parameters)
            else:
                self._let_wait(parameters)
        if any(each.syncs for each in by_module):
            self._weight = None
        self._earlier = {}

    def _let_wait(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                self._waiting[parameter] = parameter.grad
            parameter.grad = self._earlier.get(parameter)

    def _average(self, each: _Averaged, parameters: Sequence[nn.Parameter]) -> None:
        device = parameters[0].device
        used = [float(each.always or p.grad is not None) for p in parameters]
        flags = torch.tensor(used, device=device)
        _sum(flags, each.groups)
        total = None
        if self._weight is not None:
            weight = self._weight.to(device, copy=True)
            _sum(weight, each.groups)
            total = float(weight)
        for parameter, num_users in zip(parameters, flags.tolist(), strict=True):
            earlier = self._earlier.get(parameter)
            if not num_users:
                parameter.grad = earlier
                continue
            own = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            wide = own.detach().to(torch.promote_types(own.dtype, torch.float32), copy=True)
            _sum(wide, each.groups)
            if total is None:
                num_ranks = math.prod(group.size() for group in each.groups)
                mean = (wide / (self._divide_by or num_ranks)).to(own.dtype)
                parameter.grad = mean if earlier is None else earlier + mean
                continue
            before = 0.0
            if earlier is not None and earlier.any():  # zeroed counts as dropped
                before = self._totals.get(parameter, 0.0)
                wide += earlier * before
            self._totals[parameter] = before + total
            parameter.grad = (wide / (before + total or 1.0)).to(own.dtype)

    def _within(self, module: nn.Module, *, recurse: bool) -> Iterator[_Averaged]:
        modules = set(module.modules()) if recurse else {module}
        return (each for each in self._modules if each.module in modules)

    def _by_module(self) -> dict[_Averaged, list[nn.Parameter]]:
        """Return what is averaged, by the first module that was added of those it is in."""
        seen: set[nn.Parameter] = set(self._ignored)
        found: dict[_Averaged, list[nn.Parameter]] = {}
        for each in self._modules:
            for parameter in each.module.parameters():
                if parameter not in seen and parameter.requires_grad:
                    found.setdefault(each, []).append(parameter)
                seen.add(parameter)
        return found


def _sum(tensor: torch.Tensor, groups: Groups) -> None:
    for group in groups:
        dist.all_reduce(tensor, group=group)
