"""The wrapper around a module: what it keeps, and what it looks up in the module it wraps.

`Wrapper` is the base of `FullyShardedDataParallel` and of the classes that give it its methods for
gradients (`gradients`), whole parameters (`whole`) and state dicts (`state_dicts`).
"""

import weakref
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.engine.hooks import Hooks
from fullshard.engine.params.flat import FlatParameter
from fullshard.engine.runtime import passing_through
from fullshard.engine.unit import Unit
from fullshard.faces.interop import FlatHandle
from fullshard.fsdp1.flatten import names_below
from fullshard.fsdp1.options import ShardingStrategy
from fullshard.fsdp1.setup import Ignored, ShardingRanks
from fullshard.plan.units import WRAPPED_MODULE
from fullshard.policies import TrainingState
from fullshard.torch_private import ActivationWrapper


class Wrapper(nn.Module):
    """A module that wraps another one and owns the flat unit of its parameters."""

    _fsdp_wrapped_module: nn.Module
    _ignored: Ignored  # with what nested instances ignore
    _ranks: ShardingRanks
    _device_mesh: DeviceMesh | None  # as given
    _use_orig_params: bool
    _computes_fully_in_eval: bool
    _state: Hooks
    _outer: "weakref.ref[Wrapper] | None"  # the instance made around this one last

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without a wrapper for activation checkpointing around it."""
        wrapped: Any = self._fsdp_wrapped_module
        if isinstance(wrapped, ActivationWrapper):
            return wrapped._checkpoint_wrapped_module
        return wrapped

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that parameters are sharded over, or replicated over if nothing is sharded."""
        return self._ranks.shard_group

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The strategy in effect. In a group of one rank it is NO_SHARD, unless hybrid."""
        return self._ranks.strategy

    @property
    def rank(self) -> int:
        """This process's rank in `process_group`."""
        return self.process_group.rank()

    @property
    def world_size(self) -> int:
        """The number of ranks in `process_group`."""
        return self.process_group.size()

    @property
    def training_state(self) -> TrainingState:
        """The wrapped module's phase in a training step."""
        return self._state.training_state

    @property
    def params(self) -> list[nn.Parameter]:
        """This rank's shard as flat parameters: the one that is trained, or views of the buffers.

        With ``use_orig_params=True`` there may be two views, of trainable and of frozen parameters.
        """
        unit = self._unit
        if unit.flat_parameter is not None:
            return [unit.flat_parameter]
        if not unit.managed:
            return []
        trainable = [bucket.params[0].spec.trainable for bucket in unit.plan_layout().buckets]
        views: list[nn.Parameter] = []
        grads = iter(unit.gradients.flat_gradients())
        for flat, has_grad in zip(unit.flat_shards, trainable, strict=True):
            views.append(FlatParameter(flat, requires_grad=has_grad))
            views[-1]._fqns = names_below(self.module, unit)  # type: ignore[attr-defined]
            views[-1].grad = next(grads, None) if has_grad else None
        return views

    @property
    @passing_through
    def _unit(self) -> Unit:
        return self._state.all_units[0]

    @property
    def _has_params(self) -> bool:
        return bool(self._unit.managed)

    @property
    def _flat_param(self) -> nn.Parameter | None:
        return next(iter(self.params), None)

    @property
    def _handle(self) -> FlatHandle | None:
        return FlatHandle(self._unit, self) if self._has_params else None

    @property
    def _is_root(self) -> bool | None:
        """Whether this instance is the root; None before the first forward, as in PyTorch's."""
        return None if self._state.known_iteration is None else self._state.is_root

    def check_is_root(self) -> bool:
        """Return whether this instance is in no other one, as far as known before a forward."""
        if self._state.known_iteration is not None:
            return self._state.is_root
        # `_outer` may have been taken apart, or hold this instance no longer.
        outer = self._outer() if self._outer is not None else None
        return outer is None or all(module is not self for module in outer.modules())

    @passing_through
    def __getattr__(self, name: str) -> Any:
        """Look missing attributes up on the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED_MODULE:  # not set yet: `__init__` has not come that far
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: int) -> Any:
        """Index the wrapped module, such as an ``nn.Sequential``."""
        return self._fsdp_wrapped_module[key]  # type: ignore[index]


def wrappers_in(module: nn.Module, *, outermost: bool = False) -> list[Wrapper]:
    """Return the instances in a module, itself included, or only those in no other one."""
    found = [each for each in module.modules() if isinstance(each, Wrapper)]
    if not outermost:
        return found
    inside: set[nn.Module] = set()  # `modules()` yields an instance before what is in it
    roots: list[Wrapper] = []
    for each in found:
        if each not in inside and each.check_is_root():
            roots.append(each)
            inside.update(each.modules())
    return roots


class KeptArguments(NamedTuple):
    """Arguments of a wrapper's constructor that are no public attributes of it.

    ranks: the result of process groups, mesh and strategy. device_mesh: as given. ignored: of
    nested instances as well. has_comm_hook: whether `register_comm_hook` was called since.
    """

    ranks: ShardingRanks
    device_mesh: DeviceMesh | None
    ignored: Ignored
    use_orig_params: bool
    computes_fully_in_eval: bool
    has_comm_hook: bool


def kept_arguments(wrapper: Wrapper) -> KeptArguments:
    """Return the arguments that a wrapper keeps, for `migrate`, which translates them."""
    # A function, because every further public attribute of the wrapper would hide one of the
    # wrapped module.
    return KeptArguments(
        ranks=wrapper._ranks,
        device_mesh=wrapper._device_mesh,
        ignored=wrapper._ignored,
        use_orig_params=wrapper._use_orig_params,
        computes_fully_in_eval=wrapper._computes_fully_in_eval,
        has_comm_hook=wrapper._unit.config.comm_hook is not None,
    )
