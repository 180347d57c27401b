"""`FullyShardedDataParallel`: the wrapper class, on the engine that `fully_shard` runs on.

Names, signatures, defaults and state-dict keys are those of ``torch.distributed.fsdp``. The wrapper
holds a flat unit: where the unit's parameters are gathered and reduced, see `engine.hooks`.
"""

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.comm.select import default_comm
from fullshard.engine.hooks import Hooks
from fullshard.engine.module_state import state_of
from fullshard.engine.restoring import restoring
from fullshard.engine.runtime import eager, passing_through
from fullshard.engine.unit import Unit
from fullshard.engine.unit_setup import choose_comms
from fullshard.engine.whole import refusing_backward
from fullshard.errors import MisuseError, StateError
from fullshard.faces.coverage import covered_modules, ignored_names
from fullshard.faces.interop import mark_managed
from fullshard.fsdp1.auto_wrap import auto_wrap
from fullshard.fsdp1.flatten import flat_unit
from fullshard.fsdp1.gradients import WithGradients
from fullshard.fsdp1.options import (
    NO_RESHARD_AFTER_FORWARD_STRATEGIES,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from fullshard.fsdp1.recognition import recognise
from fullshard.fsdp1.setup import (
    ProcessGroups,
    broadcast_states,
    check_one_device,
    check_parameters,
    choose_ranks,
    compute_device,
    find_ignored,
    full_precision_in_eval,
    materialise,
    move,
)
from fullshard.fsdp1.state_dicts import WithStateDicts
from fullshard.fsdp1.whole import WithWholeParameters
from fullshard.fsdp1.wrap_policies import CustomPolicy, ModuleWrapPolicy
from fullshard.fsdp1.wrapper import wrappers_in
from fullshard.fsdp2.module import UnshardHandle, start_unshard
from fullshard.policies import (
    BackwardPrefetch,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ParamStyle,
    UnitConfig,
)


class FullyShardedDataParallel(WithStateDicts, WithGradients, WithWholeParameters):
    """Shard a module's parameters, gradients and optimizer state over data-parallel ranks.

    All parameters in ``module`` that are in no nested instance become one unit. They are gathered
    before its forward and backward, and freed afterwards. Build the optimizer after wrapping.

        model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
        optimizer = torch.optim.AdamW(model.parameters())

    process_group: the ranks to shard over (default: all). For a hybrid strategy, a pair of groups:
        to shard over, and to replicate over.
    sharding_strategy: see `ShardingStrategy`. Default: FULL_SHARD.
    auto_wrap_policy: chooses the modules inside that become instances of their own.
    backward_prefetch, forward_prefetch: whether and when the next unit is gathered early, where
        communication overlaps with compute.
    mixed_precision, cpu_offload: dtypes, and whether shards live in host memory.
    ignored_states, ignored_modules: parameters or modules that are left as they are.
    param_init_fn: called on every module if some are on the meta device, to give them values.
        Default: ``to_empty`` and the module's ``reset_parameters()``, on those that are.
    device_id: the device to compute on. Default: this process's accelerator, else the CPU.
    sync_module_states: begin with the parameters and buffers of the group's first rank.
    limit_all_gathers: accepted for compatibility; memory is bounded in any case.
    use_orig_params: True keeps every parameter, which while sharded is this rank's 1-D piece of it;
        False replaces all of them by one `FlatParameter`.
    device_mesh: instead of process_group: 1-D, or (replicate, shard) for a hybrid strategy.

    Raises ShardingError before parameters are changed. If memory is lacking, restores the module
    and raises AllocationError; not all of it if ``auto_wrap_policy`` wraps modules on an
    accelerator, whose memory is freed module by module. Source: PyTorch FSDP, arXiv 2304.11277.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroups = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Callable[..., Any] | ModuleWrapPolicy | CustomPolicy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        recognise(FullyShardedDataParallel)
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            warnings.warn(
                "FSDP will not all-gather parameters for containers that do not implement forward: "
                f"{module}",
                stacklevel=2,
            )
        self._ignored = find_ignored(module, ignored_modules, ignored_states)
        self.compute_device = compute_device(device_id, device_mesh)
        self._ranks = choose_ranks(
            process_group,
            sharding_strategy,
            device_mesh,
            wraps_children=auto_wrap_policy is not None,
        )
        self._device_mesh = device_mesh
        self.cpu_offload = cpu_offload or CPUOffload()
        self.mixed_precision = mixed_precision or MixedPrecision()
        self.backward_prefetch = backward_prefetch
        self.forward_prefetch = bool(forward_prefetch)
        self.limit_all_gathers = bool(limit_all_gathers)
        self._use_orig_params = bool(use_orig_params)
        self._computes_fully_in_eval = full_precision_in_eval()
        wrap_children = None
        if auto_wrap_policy is not None:
            wrap_children = functools.partial(
                auto_wrap,
                module,
                auto_wrap_policy,
                FullyShardedDataParallel,
                root_kwargs={
                    "process_group": self._groups_of_children(process_group),
                    "sharding_strategy": sharding_strategy,
                    "cpu_offload": cpu_offload,
                    "backward_prefetch": backward_prefetch,
                    "mixed_precision": mixed_precision,
                    "param_init_fn": param_init_fn,
                    "device_id": device_id,
                    "sync_module_states": sync_module_states,
                    "forward_prefetch": forward_prefetch,
                    "limit_all_gathers": limit_all_gathers,
                    "use_orig_params": use_orig_params,
                    "ignored_states": self._ignored.params,
                    "device_mesh": device_mesh,
                },
                ignored_modules=self._ignored.modules,
                ignored_params=self._ignored.params,
                use_orig_params=use_orig_params,
                mixed_precision=mixed_precision,
            )
        values = _FirstValues(
            device_id=device_id,
            param_init_fn=param_init_fn,
            sync_module_states=sync_module_states,
        )
        unit, covered = self._make_unit(module, wrap_children, values)
        self._attach(unit, covered)

    def _groups_of_children(self, given: ProcessGroups) -> ProcessGroups:
        """Return the process groups of the instances that a policy makes inside this one.

        Those of a hybrid strategy are passed on, so that they are made once for the whole model.
        """
        if self._device_mesh is not None or self._ranks.replicate_group is None:
            return given
        return self._ranks.shard_group, self._ranks.replicate_group

    def _make_unit(
        self, module: nn.Module, wrap_children: Callable[[], None] | None, values: "_FirstValues"
    ) -> tuple[Unit, list[nn.Module]]:
        """Wrap what a policy chooses, and flatten the rest; return the unit and its modules.

        If anything raises, the modules are made as they were before. Arguments, ranks and
        communication are settled before the first change.
        """
        config, mesh, ignored = _unit_config(self), self._ranks.mesh, self._ignored
        comms = choose_comms(mesh, self.compute_device, config)  # may raise: so before any change
        what = f"FullyShardedDataParallel of {type(module).__name__}"
        with contextlib.ExitStack() as stack:
            restores_all = wrap_children is None or _is_in_host_memory(module)
            if restores_all:
                stack.enter_context(restoring(module.modules(), what))
            if wrap_children is not None:
                wrap_children()
            self._fsdp_wrapped_module = module
            is_wrapped = state_of(module) is not None  # then its own unit has all parameters
            covered = (
                []
                if is_wrapped
                else covered_modules([module], lambda each: each not in ignored.modules)
            )
            if not restores_all:
                stack.enter_context(restoring(covered, what))
            # Values are made before they are broadcast, and moved to where groups communicate.
            check_parameters(covered, ignored)
            check_one_device(covered, ignored, values.device_id)
            materialise(covered, ignored, self.compute_device, values.param_init_fn)
            move(covered, ignored, self.compute_device, offload=self.cpu_offload.offload_params)
            if values.sync_module_states:
                broadcast_states(covered, ignored, mesh)
            unit = flat_unit(
                self.module, covered, mesh, self.compute_device, config, ignored.params, comms
            )
        return unit, covered

    def _attach(self, unit: Unit, covered: list[nn.Module]) -> None:
        """Register the unit with the engine, nested instances with this one, and hooks."""
        self._state = Hooks([self], [unit], is_wrapper=True)
        self._outer = None
        self._state.ignored.update(self._ignored.modules)
        self._state.ignored_names.update(ignored_names(covered, self._ignored.params))
        for inner in wrappers_in(self._fsdp_wrapped_module):
            inner._outer = weakref.ref(self)
        mark_managed(covered, keeps_parameters=self._use_orig_params)
        self._register_state_dict_hooks()

    @staticmethod
    def fsdp_modules(
        module: nn.Module, root_only: bool = False
    ) -> list["FullyShardedDataParallel"]:
        """Return the instances in a module, itself included, or those in no other one."""
        return cast("list[FullyShardedDataParallel]", wrappers_in(module, outermost=root_only))

    # Running

    @passing_through
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with its parameters gathered."""
        if self._computes_fully_in_eval:
            self._follow_mode()
        if self._unit.is_whole:
            return refusing_backward(self._fsdp_wrapped_module(*args, **kwargs))
        if self._state.known_iteration is None:
            self._refuse_overlap()
        return self._state.run_as_forward(self, _run_wrapped, args, kwargs)

    @eager
    def _refuse_overlap(self) -> None:
        for instance in wrappers_in(self):
            if instance._unit.flat_parameter is not None and any(
                hasattr(parameter, "_in_backward_optimizers") for parameter in instance.params
            ):
                raise StateError(
                    "FSDP optimizer in backward only supported with use_orig_params=True!"
                )

    @eager
    def _follow_mode(self) -> None:
        """Let all instances compute in full precision in evaluation, if this one is the root."""
        if self._state.known_iteration is not None and not self._state.is_root:
            return
        for instance in wrappers_in(self):
            instance._state.use_precision(full=not instance.training)

    def _unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this instance's parameters ahead of its forward. Every rank has to call it.

        Values written to the unsharded parameters do not reach the shards. See
        `FSDPModule.unshard`.
        """
        handle = start_unshard([self._unit])
        if async_op:
            return handle
        handle.wait()
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise MisuseError(
            "A FullyShardedDataParallel instance cannot be deep-copied: its process groups cannot. "
            "Copy the module before wrapping it, or load its state_dict into a second one."
        )


class _FirstValues(NamedTuple):
    """The arguments of `FullyShardedDataParallel` for devices and values before flattening."""

    device_id: int | str | torch.device | None
    param_init_fn: Callable[[nn.Module], None] | None
    sync_module_states: bool


@passing_through
def _run_wrapped(instance: Any, *args: Any, **kwargs: Any) -> Any:
    return instance._fsdp_wrapped_module(*args, **kwargs)


def _is_in_host_memory(module: nn.Module) -> bool:
    """Return whether a module is in host memory.

    Restoring keeps whole parameters alive until all of a module is wrapped. Host memory has room
    for that; an accelerator's may not.
    """
    return all(p.device.type in ("cpu", "meta") for p in module.parameters())


def _stays_whole(instance: FullyShardedDataParallel) -> bool:
    """Return whether parameters are whole from forward to backward, for whoever uses them there.

    Without a strategy that divides them they always are, unless they are cast, which takes memory.
    """
    strategy, dtype = instance.sharding_strategy, instance.mixed_precision.param_dtype
    is_undivided = strategy is ShardingStrategy.NO_SHARD and dtype is None
    return is_undivided or strategy in NO_RESHARD_AFTER_FORWARD_STRATEGIES


def _unit_config(instance: FullyShardedDataParallel) -> UnitConfig:
    """Return the constructor's options as the engine's."""
    precision = instance.mixed_precision
    offload = instance.cpu_offload.offload_params
    return UnitConfig(
        mp_policy=MixedPrecisionPolicy(
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            cast_forward_inputs=precision.cast_forward_inputs,
        ),
        cast_root_inputs=bool(precision.cast_root_forward_inputs),
        buffer_dtype=precision.buffer_dtype,
        keep_low_precision_grads=bool(precision.keep_low_precision_grads),
        offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
        reshard_after_forward=False if _stays_whole(instance) else None,
        comm=default_comm(),
        style=ParamStyle.PIECES if instance._use_orig_params else ParamStyle.FLAT,
        forward_prefetch=instance.forward_prefetch,
        backward_prefetch=instance.backward_prefetch,
    )
