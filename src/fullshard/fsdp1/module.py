"""`FullyShardedDataParallel`: the wrapper class, on the engine that `fully_shard` runs on.

Names, signatures, defaults and state-dict keys are those of ``torch.distributed.fsdp``. The wrapper
holds a flat unit: where the unit's parameters are gathered and reduced, see `engine.hooks`.
"""

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.device_mesh import DeviceMesh

from fullshard.build.coverage import covered_modules, ignored_names
from fullshard.build.interop import FlatHandle, mark_managed
from fullshard.comm.select import default_comm
from fullshard.engine.hooks import Hooks
from fullshard.engine.module_state import state_of
from fullshard.engine.params.flat import FlatParameter
from fullshard.engine.precision import differentiable_tensors
from fullshard.engine.restoring import restoring
from fullshard.engine.runtime import eager, passing_through
from fullshard.engine.unit import Unit
from fullshard.engine.unit_setup import choose_comms
from fullshard.engine.whole import WholeOptions, whole_parameters
from fullshard.errors import MisuseError, ShardingError, StateError, UnsupportedError
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
    ProcessGroups,
    broadcast_states,
    check_layouts,
    check_one_device,
    compute_device,
    find_ignored,
    full_precision_in_eval,
    materialise,
    move,
    place,
)
from fullshard.fsdp1.state_dicts import WithStateDicts
from fullshard.fsdp1.wrap_policies import CustomPolicy, ModuleWrapPolicy
from fullshard.fsdp2.module import UnshardHandle
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


class FullyShardedDataParallel(WithStateDicts):
    """Shard a module's parameters, gradients and optimizer state over data-parallel ranks.

    What is inside ``module`` and in no nested instance becomes one unit, gathered before its
    forward and backward and freed after. Build the optimizer afterwards.

        model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
        optimizer = torch.optim.AdamW(model.parameters())

    process_group: the ranks to shard over (default: all), or for a hybrid strategy a pair: to shard
        over, and to replicate over.
    sharding_strategy: see `ShardingStrategy`. Default: FULL_SHARD.
    auto_wrap_policy: which modules inside become instances of their own.
    backward_prefetch, forward_prefetch: whether and when the next unit is gathered early, where
        communication runs beside compute.
    mixed_precision, cpu_offload: dtypes, and whether shards live in host memory.
    ignored_states, ignored_modules: parameters or modules that are left as they are.
    param_init_fn: called on each module with parameters on the meta device; default: ``to_empty``
        and the module's ``reset_parameters()``.
    device_id: where to compute. Default: this process's accelerator, else the CPU.
    sync_module_states: start from the values of the first rank.
    limit_all_gathers: accepted for compatibility; memory is bounded in any case.
    use_orig_params: True keeps every parameter as itself, showing this rank's piece of it while
        sharded; False replaces them by one `FlatParameter`.
    device_mesh: instead of process_group: 1-D, or (replicate, shard) for a hybrid strategy.

    Raises ShardingError before parameters are changed, and AllocationError after all was made as it
    was before; not so if ``auto_wrap_policy`` wraps what is on an accelerator, whose memory is freed
    module by module. Source: PyTorch FSDP, arXiv 2304.11277.
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
        self._ignored = ignored = find_ignored(module, ignored_modules, ignored_states)
        device = compute_device(device_id, device_mesh)
        self._placement = place(
            process_group,
            sharding_strategy,
            device_mesh,
            wraps_children=auto_wrap_policy is not None,
        )
        self.cpu_offload = cpu_offload or CPUOffload()
        self.mixed_precision = mixed_precision or MixedPrecision()
        self.backward_prefetch = backward_prefetch
        self.forward_prefetch = forward_prefetch
        self._use_orig_params = use_orig_params
        config = _unit_config(self)
        comms = choose_comms(self._placement.mesh, device, config)  # before anything is changed
        with contextlib.ExitStack() as stack:
            what = f"FullyShardedDataParallel of {type(module).__name__}"
            restores_all = auto_wrap_policy is None or _is_in_host_memory(module)
            if restores_all:
                stack.enter_context(restoring(module.modules(), what))
            if auto_wrap_policy is not None:
                groups: ProcessGroups = process_group
                if sharding_strategy in HYBRID_SHARDING_STRATEGIES and device_mesh is None:
                    assert self._placement.replicate_group is not None
                    groups = (self._placement.shard_group, self._placement.replicate_group)
                auto_wrap(
                    module,
                    auto_wrap_policy,
                    FullyShardedDataParallel,
                    root_kwargs={
                        "process_group": groups,
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
                        "ignored_states": ignored.params,
                        "device_mesh": device_mesh,
                    },
                    ignored_modules=ignored.modules,
                    ignored_params=ignored.params,
                    use_orig_params=use_orig_params,
                    mixed_precision=mixed_precision,
                )
            self.compute_device = device
            self._device_mesh = device_mesh
            self.limit_all_gathers = limit_all_gathers
            self._computes_fully_in_eval = full_precision_in_eval()
            self._fsdp_wrapped_module = module
            is_wrapped = state_of(module) is not None  # and then holds all there is
            covered = (
                []
                if is_wrapped
                else covered_modules([module], lambda each: each not in ignored.modules)
            )
            if not restores_all:
                stack.enter_context(restoring(covered, what))
            check_layouts(covered, ignored)
            check_one_device(covered, ignored, device_id)
            materialise(covered, device, param_init_fn)
            move(covered, ignored, device, offload=self.cpu_offload.offload_params)
            if sync_module_states:
                mesh = self._placement.mesh
                groups_in_turn = (mesh.shard_group, mesh.replicate_group)
                broadcast_states(covered, ignored, [g for g in groups_in_turn if g is not None])
            unit = flat_unit(
                self.module, covered, self._placement.mesh, device, config, ignored.params, comms
            )
        self._state = Hooks([self], [unit], is_wrapper=True)
        self._outer: weakref.ref[FullyShardedDataParallel] | None = None
        self._state.ignored.update(ignored.modules)
        self._state.ignored_names.update(ignored_names(covered, ignored.params))
        for inner in self.fsdp_modules(module):
            inner._outer = weakref.ref(self)
        mark_managed(covered, keeps_parameters=use_orig_params)
        self._register_state_dict_hooks()

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
        return self._placement.shard_group

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        return self._placement.strategy

    @property
    def rank(self) -> int:
        return self.process_group.rank()

    @property
    def world_size(self) -> int:
        return self.process_group.size()

    @property
    def training_state(self) -> TrainingState:
        return self._state.training_state

    @property
    def params(self) -> list[nn.Parameter]:
        """This rank's shard as one flat parameter: the one that is trained, or a view of it all."""
        unit = self._unit
        if unit.params.flat is not None:
            return [unit.params.flat.sharded]
        if not unit.params:
            return []
        assert unit.params.buffers is not None
        trainable = [bucket.params[0].spec.trainable for bucket in unit.plan_layout().buckets]
        views: list[nn.Parameter] = []
        grads = iter(unit.gradients.flat_gradients())
        for flat, has_grad in zip(unit.params.buffers.flat_shards, trainable, strict=True):
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
        return bool(self._unit.params)

    @property
    def _flat_param(self) -> nn.Parameter | None:
        return next(iter(self.params), None)

    @property
    def _handle(self) -> FlatHandle | None:
        return FlatHandle(self._unit, self) if self._has_params else None

    @property
    def _is_root(self) -> bool | None:
        return None if self._state.known_iteration is None else self._state.is_root

    def check_is_root(self) -> bool:
        """Whether this instance is in no other one. Before the first forward, as far as is known."""
        if self._state.known_iteration is not None:
            return self._state.is_root
        outer = self._outer() if self._outer is not None else None
        return outer is None or all(module is not self for module in outer.modules())

    @staticmethod
    def fsdp_modules(
        module: nn.Module, root_only: bool = False
    ) -> list["FullyShardedDataParallel"]:
        """Return the instances in a module, itself included, or those in no other one."""
        found = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        if not root_only:
            return found
        inside: set[nn.Module] = set()  # of those before: an instance comes before what is in it
        roots: list[FullyShardedDataParallel] = []
        for each in found:
            if each not in inside and each.check_is_root():
                roots.append(each)
                inside.update(each.modules())
        return roots

    @passing_through
    def __getattr__(self, name: str) -> Any:
        """Look missing attributes up on the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED_MODULE:
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: int) -> Any:
        """Index the wrapped module, such as an ``nn.Sequential``."""
        return self._fsdp_wrapped_module[key]  # type: ignore[index]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters; inside `summon_full_params` by the names they had before wrapping."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield (clean_name(name) if self._unit.is_whole else name), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield buffers; inside `summon_full_params` by the names they had before wrapping."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield (clean_name(name) if self._unit.is_whole else name), buffer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, of parameters that an exception left unsharded as well."""
        super().zero_grad(set_to_none)
        for instance in self.fsdp_modules(self):
            if not instance._unit.is_sharded:
                instance._unit.params.zero_gradients(set_to_none=set_to_none)

    # Running

    @passing_through
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with its parameters gathered."""
        if self._computes_fully_in_eval:
            self._follow_mode()
        if self._unit.is_whole:
            return _without_backward(self._fsdp_wrapped_module(*args, **kwargs))
        if self._state.known_iteration is None:
            self._refuse_overlap()
        return self._state.run_as_forward(self, _run_wrapped, args, kwargs)

    @eager
    def _refuse_overlap(self) -> None:
        for instance in self.fsdp_modules(self):
            if instance._unit.params.flat is not None and any(
                hasattr(parameter, "_in_backward_optimizers") for parameter in instance.params
            ):
                raise StateError(
                    "FSDP optimizer in backward only supported with use_orig_params=True!"
                )

    @eager
    def _follow_mode(self) -> None:
        """Compute in full precision if in evaluation, from the root down."""
        if self._state.known_iteration is not None and not self._state.is_root:
            return
        for instance in self.fsdp_modules(self):
            instance._state.use_precision(full=not instance.training)

    def apply(self, fn: Callable[[nn.Module], None]) -> "FullyShardedDataParallel":
        """Apply a function to every module inside, with whole parameters. Every rank has to."""
        if self._unit.is_whole:
            raise MisuseError(
                "apply() expects to be in the state IDLE, not SUMMON_FULL_PARAMS: it gathers whole "
                "parameters itself. Call it outside."
            )
        with _whole([self], WholeOptions()):
            return super().apply(fn)

    def _unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this instance's parameters ahead of its forward. Every rank has to call it.

        What is written to the unsharded parameters does not reach the shards.
        """
        unit = self._unit
        unit.follow_changes()
        unit.read_privately()
        unit.comm.fence(f"{unit.path}: unshard")
        unit.is_held = True
        unit.unshard()
        unit.comm.fence(f"{unit.path}: unshard")
        handle = UnshardHandle([unit])
        if async_op:
            return handle
        handle.wait()
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise MisuseError(
            "A FullyShardedDataParallel instance cannot be deep-copied: its process groups cannot. "
            "Copy the module before wrapping it, or load its state_dict into a second one."
        )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients unreduced, and add them to those of a backward outside of this.

        Costs the memory of whole gradients. Raises RuntimeError on an instance that is not the root.
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
        """Show whole parameters, in the dtype of the shards, for a while. Every rank has to.

        recurse: of all instances in ``module``; else of the outermost ones alone.
        writeback: what is changed goes to the shards when this ends.
        rank0_only: other ranks keep their pieces. offload_to_cpu: in host memory.
        with_grads: gradients as well, which takes ``use_orig_params=True``.
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
        with _whole(instances, WholeOptions(writeback, rank0_only, offload_to_cpu, with_grads)):
            yield

    # Gradients

    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int = 2.0) -> torch.Tensor:
        """Scale gradients so that their norm over all ranks is at most ``max_norm``.

        norm_type: 1, 2, any p, or infinity. Returns the norm before, the same on every rank. Raises
        RuntimeError on an instance that is not the root.
        """
        if not self.check_is_root():
            raise StateError("`clip_grad_norm_()` should only be called on the root FSDP instance")
        parameters = list(self.parameters())
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


@passing_through
def _run_wrapped(instance: Any, *args: Any, **kwargs: Any) -> Any:
    return instance._fsdp_wrapped_module(*args, **kwargs)


def _is_in_host_memory(module: nn.Module) -> bool:
    """Whether whole parameters may live until all is wrapped. Memory of a device is too scarce."""
    return all(p.device.type in ("cpu", "meta") for p in module.parameters())


def _unit_config(instance: FullyShardedDataParallel) -> UnitConfig:
    """Translate the constructor's options."""
    precision, strategy = instance.mixed_precision, instance.sharding_strategy
    offload = instance.cpu_offload.offload_params
    return UnitConfig(
        mp_policy=MixedPrecisionPolicy(
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            cast_forward_inputs=precision.cast_forward_inputs,
        ),
        cast_root_inputs=precision.cast_root_forward_inputs,
        buffer_dtype=precision.buffer_dtype,
        keep_low_precision_grads=precision.keep_low_precision_grads,
        offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
        reshard_after_forward=False if strategy in NO_RESHARD_AFTER_FORWARD_STRATEGIES else None,
        comm=default_comm(),
        style=ParamStyle.PIECES if instance._use_orig_params else ParamStyle.FLAT,
        forward_prefetch=instance.forward_prefetch,
        backward_prefetch=instance.backward_prefetch,
    )


@contextlib.contextmanager
def _whole(instances: list[FullyShardedDataParallel], options: WholeOptions) -> Iterator[None]:
    for instance in instances:
        if instance.training_state is not TrainingState.IDLE:
            raise MisuseError("Cannot manually unshard parameters during forward/backward.")
    with whole_parameters([instance._unit for instance in instances], options):
        yield


def _without_backward(output: Any) -> Any:
    """Refuse a backward through whole parameters: nothing would reduce the gradients."""
    for tensor in differentiable_tensors(output) if torch.is_grad_enabled() else ():
        tensor.register_hook(_refuse_backward)
    return output


def _refuse_backward(_: torch.Tensor) -> None:
    raise StateError(
        "This forward ran inside summon_full_params, so its gradients would not be reduced. Run it "
        "outside, or under torch.no_grad()."
    )
