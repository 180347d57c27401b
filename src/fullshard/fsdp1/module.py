"""`FullyShardedDataParallel`: the wrapper class, on the engine that `fully_shard` runs on.

Names, signatures, defaults and state-dict keys are those of ``torch.distributed.fsdp``. The wrapper
holds a flat unit: where the unit's parameters are gathered and reduced, see `engine.hooks`.
"""

import contextlib
import functools
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Self

from fullshard.comm.select import default_comm
from fullshard.engine.hooks import Hooks
from fullshard.engine.module_state import covered_modules, state_of
from fullshard.engine.params.flat import FlatParameter
from fullshard.engine.params.form import UnitMesh
from fullshard.engine.restoring import restoring
from fullshard.engine.runtime import eager, passing_through
from fullshard.engine.unit import Unit, choose_comms
from fullshard.engine.whole import WholeOptions, whole_parameters
from fullshard.errors import MisuseError, ShardingError, StateError, UnsupportedError
from fullshard.faces.coverage import Covered, move_tensors
from fullshard.faces.interop import FlatHandle, mark_managed
from fullshard.fsdp1.auto_wrap import auto_wrap
from fullshard.fsdp1.flatten import flat_unit, names_below
from fullshard.fsdp1.options import (
    HYBRID_SHARDING_STRATEGIES,
    NO_RESHARD_AFTER_FORWARD_STRATEGIES,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from fullshard.fsdp1.recognition import recognise
from fullshard.fsdp1.setup import (
    Ignored,
    ProcessGroups,
    broadcast_states,
    check_flattenable,
    choose_ranks,
    compute_device,
    find_ignored,
    materialise,
)
from fullshard.fsdp1.state_dicts import StateDictMethods
from fullshard.fsdp1.wrap_policies import CustomPolicy, ModuleWrapPolicy
from fullshard.fsdp2.module import UnshardHandle, unshard
from fullshard.optim.grad_norm import clip_grad_norm_
from fullshard.plan.units import WRAPPED_MODULE, clean_name
from fullshard.policies import (
    BackwardPrefetch,
    CommHook,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ParamStyle,
    TrainingState,
    UnitConfig,
)
from fullshard.torch_private import ActivationWrapper

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


class FullyShardedDataParallel(StateDictMethods):
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

    _fsdp_wrapped_module: nn.Module
    _ignored: Ignored  # with what nested instances ignore
    _outer: "weakref.ref[FullyShardedDataParallel] | None" = None  # made around this one last

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
        mesh, self._strategy = choose_ranks(
            process_group,
            sharding_strategy,
            device_mesh,
            wraps_children=auto_wrap_policy is not None,
        )
        if not hasattr(cpu_offload or CPUOffload(), "offload_params"):
            raise ShardingError(
                f"cpu_offload={cpu_offload!r}: expected a CPUOffload. Where the state of an optimizer is, stream_state is told."
            )
        self.cpu_offload = cpu_offload or CPUOffload()
        self.mixed_precision = mixed_precision or MixedPrecision()
        self.backward_prefetch = backward_prefetch
        self.forward_prefetch = bool(forward_prefetch)
        self.limit_all_gathers = bool(limit_all_gathers)
        self._use_orig_params = bool(use_orig_params)
        # An environment variable because PyTorch's FSDP1 has no other switch for it.
        self._computes_fully_in_eval = os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1"
        wrap_children = None
        if auto_wrap_policy is not None:
            if device_mesh is None and len(mesh.groups) > 1:
                # Passed on, so that hybrid groups are made once for the whole model.
                shard_group, replicate_group = mesh.groups
                process_group = shard_group, replicate_group
            wrap_children = functools.partial(
                auto_wrap,
                module,
                auto_wrap_policy,
                FullyShardedDataParallel,
                ignored=self._ignored,
                root_kwargs={
                    "process_group": process_group,
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
            )
        unit, covered = self._make_unit(
            module,
            mesh,
            wrap_children,
            device_id=device_id,
            param_init_fn=param_init_fn,
            sync_module_states=sync_module_states,
        )
        self._hooks = Hooks([self], [unit], is_wrapper=True)
        self._state = self._hooks.state
        self._state.ignored.update(self._ignored.modules)
        self._state.ignored_names.update(covered.ignored)
        for inner in self.fsdp_modules(module):
            inner._outer = weakref.ref(self)
        mark_managed(covered.modules)
        self._register_state_dict_hooks()

    def _make_unit(
        self,
        module: nn.Module,
        mesh: UnitMesh,
        wrap_children: Callable[[], None] | None,
        *,
        device_id: int | str | torch.device | None,
        param_init_fn: Callable[[nn.Module], None] | None,
        sync_module_states: bool,
    ) -> tuple[Unit, Covered]:
        """Wrap what a policy chooses, and flatten the rest; return the unit and what it covers.

        If anything raises, the modules are made as they were before. Arguments, ranks and
        communication are settled before the first change.
        """
        config, ignored = _unit_config(self), self._ignored
        comms = choose_comms(mesh, self.compute_device, config)  # may raise: so before any change
        what = f"FullyShardedDataParallel of {type(module).__name__}"
        # Restoring keeps whole parameters alive until all of a module is wrapped. Host memory has
        # room for that; an accelerator's may not.
        is_on_host = all(p.device.type in ("cpu", "meta") for p in module.parameters())
        restores_all = wrap_children is None or is_on_host
        with contextlib.ExitStack() as stack:
            if restores_all:
                stack.enter_context(restoring(module.modules(), what))
            if wrap_children is not None:
                wrap_children()
            self._fsdp_wrapped_module = module
            modules: list[nn.Module] = []
            if state_of(module) is None:  # else it is wrapped, and its own unit has all parameters
                modules = covered_modules([module], lambda each: each not in ignored.modules)
            if not restores_all:
                stack.enter_context(restoring(modules, what))
            # Values are made before they are broadcast, and moved to where groups communicate.
            check_flattenable(modules, ignored, device_id)
            materialise(modules, ignored, self.compute_device, param_init_fn)
            covered = Covered([self.module], modules, ignored.params)
            home = torch.device("cpu") if config.offload_to_cpu else self.compute_device
            move_tensors(covered.slots, home)
            move_tensors(covered.buffers, self.compute_device)
            if sync_module_states:
                broadcast_states([*covered.slots, *covered.buffers], mesh)
            unit = flat_unit(self.module, covered, mesh, self.compute_device, config, comms)
        return unit, covered

    @staticmethod
    def fsdp_modules(
        module: nn.Module, root_only: bool = False
    ) -> list["FullyShardedDataParallel"]:
        """Return the instances in a module, itself included, or those in no other one."""
        found = [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]
        if not root_only:
            return found
        inside: set[nn.Module] = set()  # `modules()` yields an instance before what is in it
        roots: list[FullyShardedDataParallel] = []
        for each in found:
            if each not in inside and each.check_is_root():
                roots.append(each)
                inside.update(each.modules())
        return roots

    # What it is

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
        return self._unit.mesh.groups[0]

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The strategy in effect. In a group of one rank it is NO_SHARD, unless hybrid."""
        return self._strategy

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
    def _flat_param(self) -> nn.Parameter | None:
        return next(iter(self.params), None)

    @property
    def _handle(self) -> FlatHandle | None:
        return FlatHandle(self._unit, self) if self._unit.managed else None

    @property
    def _all_handles(self) -> list[FlatHandle]:  # of the root's model, as in PyTorch's
        instances = self.fsdp_modules(self) if self._is_root else []
        return [FlatHandle(each._unit, each) for each in instances if each._unit.managed]

    @property
    def _is_root(self) -> bool | None:  # None before the first forward, as in PyTorch's
        return None if self._state.known_iteration is None else self._state.is_root

    def check_is_root(self) -> bool:
        """Return whether this instance is in no other one, as far as known before a forward."""
        if self._state.known_iteration is not None:
            return self._state.is_root
        # `_outer` may have been taken apart, or hold this instance no longer.
        outer = self._outer() if self._outer is not None else None
        return outer is None or all(module is not self for module in outer.modules())

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
        grads = iter([each.in_use for each in unit.gradients.buckets.current()])
        for flat, has_grad in zip(unit.flat_shards, trainable, strict=True):
            views.append(FlatParameter(flat, requires_grad=has_grad))
            views[-1]._fqns = names_below(unit)  # type: ignore[attr-defined]
            views[-1]._local_shard = flat  # type: ignore[attr-defined]
            views[-1].grad = next(grads, None) if has_grad else None
        return views

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

    # Running

    @passing_through
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with its parameters gathered."""
        if self._computes_fully_in_eval:
            self._follow_mode()
        if self._state.known_iteration is None:
            self._refuse_overlap()
        return self._hooks.run_as_forward(self, _run_wrapped, args, kwargs)

    @eager
    def _refuse_overlap(self) -> None:
        for instance in self.fsdp_modules(self):
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
        for instance in self.fsdp_modules(self):
            instance._state.use_precision(full=not instance.training)

    def _unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this instance's parameters ahead of its forward. Every rank has to call it.

        Values written to the unsharded parameters do not reach the shards. See
        `FSDPModule.unshard`.
        """
        return unshard([self._unit], async_op=async_op)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise MisuseError(
            "A FullyShardedDataParallel instance cannot be deep-copied: its process groups cannot. "
            "Copy the module before wrapping it, or load its state_dict into a second one."
        )

    # Gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero gradients, of parameters that an exception left unsharded as well."""
        super().zero_grad(set_to_none)
        for instance in self.fsdp_modules(self):
            if not instance._unit.is_sharded:
                instance._unit.zero_gradients(set_to_none=set_to_none)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients unreduced inside the block; the next backward outside of it reduces all.

        Costs the memory of whole gradients. Raises RuntimeError on an instance that is not the
        root.
        """
        if not self.check_is_root():
            raise StateError(
                "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on "
                "root FSDP module."
            )
        instances = self.fsdp_modules(self)
        if not all(instance._unit.config.reduce_grads for instance in instances):
            raise MisuseError("Already in no_sync(): one context is enough.")
        before = []
        for instance in instances:
            reshards = instance.sharding_strategy not in NO_RESHARD_AFTER_FORWARD_STRATEGIES
            unsynced = {
                "reduce_grads": False,
                "all_reduce_grads": False,
                "reshard_after_backward": reshards,
            }
            before.append({name: getattr(instance._unit.config, name) for name in unsynced})
            instance._unit.configure(**unsynced)
        try:
            yield
        finally:
            # These options alone: the first forward inside of this decides on others.
            for instance, options in zip(instances, before, strict=True):
                instance._unit.configure(**options)

    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int = 2.0) -> torch.Tensor:
        """Scale gradients so that their norm over all ranks is at most ``max_norm``.

        norm_type: 1, 2, any p, or infinity. Returns the norm before scaling as a 0-dim tensor, the
        same on every rank, in the widest dtype of the gradients. Every rank has to call it. Raises
        RuntimeError on an instance that is not the root.
        """
        if not self.check_is_root():
            raise StateError("`clip_grad_norm_()` should only be called on the root FSDP instance")
        # In PyTorch's order, which the norm's last bit depends on.
        units = [instance._unit for instance in self.fsdp_modules(self)]
        own = (holder.sharded for unit in units for holder in unit.holders)
        is_divided = any(unit.mesh.shard_group is not None for unit in units)
        parameters = [*dict.fromkeys((*(own if is_divided else ()), *self.parameters()))]
        dtypes = [p.grad.dtype for p in parameters if p.grad is not None]
        trained = [p for p in parameters if p.requires_grad] or parameters
        if not dtypes and any(p.numel() for p in trained):
            warnings.warn(
                f"called FSDP.clip_grad_norm_() on rank {self.rank} with no gradients -- returning "
                "the total norm in the default dtype torch.float32",
                stacklevel=2,
            )
        norm = clip_grad_norm_(parameters, float(max_norm), float(norm_type))
        return norm.to(
            functools.reduce(torch.promote_types, dtypes, dtypes[0] if dtypes else torch.float32)
        )

    def register_comm_hook(self, state: object, hook: Callable[..., None]) -> None:
        """Reduce gradients by ``hook(state, grads, shard)`` from now on.

        grads: this rank's flat gradients, undivided; shard: to be filled with this rank's part of
        the result. Where nothing is sharded, ``hook(state, grads)`` reduces them in place. Hooks
        are those of ``torch.distributed.algorithms._comm_hooks``. Raises AssertionError on an
        instance that is not the root, and for hybrid strategies.
        """
        if not self.check_is_root():
            raise MisuseError("register_comm_hook can only be called on a root instance.")
        if not callable(hook):
            raise ShardingError(f"The communication hook must be callable but got {hook}")
        for instance in self.fsdp_modules(self):
            if instance.sharding_strategy in HYBRID_SHARDING_STRATEGIES:
                raise MisuseError(
                    "Communication hook is currently not supported for hybrid strategies, of which "
                    f"{instance.sharding_strategy} is one."
                )
            if instance._unit.config.comm_hook is not None:
                raise MisuseError("A communication hook is already registered")
            instance._unit.configure(comm_hook=CommHook(state, hook))

    # Whole parameters

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Show whole parameters, in the dtype of the shards, inside the block. Collective.

        recurse: of all instances in ``module``; else of the outermost ones alone.
        writeback: what the block changes is written to the shards when it ends.
        rank0_only: other ranks keep their pieces. offload_to_cpu: in host memory.
        with_grads: gradients as well, which takes ``use_orig_params=True``.

        Raises UnsupportedError for options that exclude each other, and MisuseError during forward
        or backward and inside another such block.
        """
        if writeback and rank0_only:
            raise UnsupportedError(
                "writeback=True and rank0_only=True is not supported: ranks would differ. Pass "
                "writeback=False."
            )
        if offload_to_cpu and not rank0_only:
            warnings.warn(
                "offload_to_cpu=True with rank0_only=False keeps one copy of the parameters for "
                "every rank of a host in its memory. Pass rank0_only=True to keep one.",
                stacklevel=3,
            )
        instances = FullyShardedDataParallel.fsdp_modules(module)
        if with_grads and (offload_to_cpu or not all(i._use_orig_params for i in instances)):
            raise UnsupportedError(
                "with_grads=True takes use_orig_params=True and offload_to_cpu=False."
            )
        if not recurse and isinstance(module, FullyShardedDataParallel):
            instances = [module]
        elif not recurse:
            instances = FullyShardedDataParallel.fsdp_modules(module, root_only=True)
        with _shown_whole(
            instances,
            WholeOptions(
                writeback=writeback,
                rank0_only=rank0_only,
                offload_to_cpu=offload_to_cpu,
                with_grads=with_grads,
            ),
        ):
            yield

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Apply a function to every module inside, with whole parameters. Collective."""
        if self._unit.is_whole:
            raise MisuseError(
                "apply() expects to be in the state IDLE, not SUMMON_FULL_PARAMS: it gathers whole "
                "parameters itself. Call it outside."
            )
        # This instance's alone: nested ones gather theirs when `nn.Module.apply` calls their apply.
        with _shown_whole([self], WholeOptions()):
            return super().apply(fn)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters; inside `summon_full_params` by the names they had before wrapping."""
        named = super().named_parameters(*args, **kwargs)
        yield from _by_old_names(named) if self._unit.is_whole else named

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield buffers; inside `summon_full_params` by the names they had before wrapping."""
        named = super().named_buffers(*args, **kwargs)
        yield from _by_old_names(named) if self._unit.is_whole else named


def _by_old_names(named: Iterable[tuple[str, _Tensor]]) -> Iterator[tuple[str, _Tensor]]:
    return ((clean_name(name), tensor) for name, tensor in named)


@passing_through
def _run_wrapped(instance: Any, *args: Any, **kwargs: Any) -> Any:
    return instance._fsdp_wrapped_module(*args, **kwargs)


@contextlib.contextmanager
def _shown_whole(
    instances: Sequence[FullyShardedDataParallel], options: WholeOptions
) -> Iterator[None]:
    for instance in instances:
        if instance.training_state is not TrainingState.IDLE:
            raise MisuseError("Cannot manually unshard parameters during forward/backward.")
    with whole_parameters([instance._unit for instance in instances], options):
        yield


def _unit_config(instance: FullyShardedDataParallel) -> UnitConfig:
    """Return the constructor's options as the engine's."""
    precision, strategy = instance.mixed_precision, instance.sharding_strategy
    # Parameters that nothing divides are always whole, unless they are cast, which takes memory.
    is_undivided = strategy is ShardingStrategy.NO_SHARD and precision.param_dtype is None
    stays_whole = is_undivided or strategy in NO_RESHARD_AFTER_FORWARD_STRATEGIES
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
        reshard_after_forward=False if stays_whole else None,
        comm=default_comm(),
        style=ParamStyle.PIECES if instance._use_orig_params else ParamStyle.FLAT,
        forward_prefetch=instance.forward_prefetch,
        backward_prefetch=instance.backward_prefetch,
    )
