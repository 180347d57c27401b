"""`FSDPModule`: the class that sharding gives to modules, and its methods."""

import collections
import contextlib
import contextvars
import copy
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal, cast, overload

import torch
from torch import nn
from typing_extensions import deprecated

from fullshard.comm.collectives import AllGather, ReduceScatter
from fullshard.engine.adoption import follow_changes
from fullshard.engine.checks.meta import (
    giving_memory,
    refuse_lack_of_memory,
)
from fullshard.engine.copying import copy_sharded
from fullshard.engine.hooks import Hooks, hooks_of
from fullshard.engine.iteration import Iteration
from fullshard.engine.module_state import ModuleState, states_in
from fullshard.engine.params.managed import ManagedParameter, said_grad_dtype
from fullshard.engine.unit import Unit, are_sharded, have_unreduced
from fullshard.errors import ShardingError, StateError
from fullshard.faces.interop import FSDPState, mark_sharded
from fullshard.fsdp2.communication import (
    refuse_symmetric_memory,
    use_collectives,
    use_process_group_memory,
    use_separate_reduce_groups,
    use_symmetric_memory,
)
from fullshard.policies import Unused

# Of the torch that runs: (2, 15). Where releases differ in what a call means, we follow the one that is
# installed; docs/migrating.md has the table.
RELEASE = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))

# By kind, then by original class. `install` hands out the inner dictionaries under PyTorch's names.
sharded_classes: dict[type, dict[type, type]] = collections.defaultdict(dict)

_as_is = contextvars.ContextVar("_as_is", default=False)


def is_from(release: tuple[int, int]) -> bool:
    return release <= RELEASE


class FSDPModule:
    """Methods of a sharded module, whose class becomes a subclass of this and of its own class."""

    applied_by: ClassVar = "fully_shard"
    _prefix: ClassVar = "FSDP"  # of class names: ``Linear`` becomes ``FSDPLinear``
    _orig_cls_mro_index: ClassVar = 2  # the module's own class in ``__mro__``; PyTorch reads this

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an instance of the original class, so that slicing a sharded container works."""
        if _as_is.get():
            return super().__new__(cls)
        original = cls.__mro__[cls._orig_cls_mro_index]
        self = original.__new__(original, *args, **kwargs)
        self.__init__(*args, **kwargs)
        return self

    # Parameters

    def unshard(self, async_op: bool = False) -> "UnshardHandle | None":
        """Gather this module's parameters, but not those of sharded modules inside it.

        With them those that a module of another root shares with it.

        Every rank has to call it. Values written to the unsharded parameters do not reach the
        shards.
        async_op: return a handle to wait on, instead of waiting and returning None.
        """
        units = [unit for state in _hooks(self).states for unit in state.units]
        return unshard(units, async_op=async_op)

    def reshard(self) -> None:
        """Free this module's unsharded parameters, but what a running module of another root shares."""
        _hooks(self).reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free parameters after forward, or keep them until backward, whatever `keep_unsharded` has chosen.

        Raises ShardingError for what is no bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ShardingError(
                f"reshard_after_forward should be a bool, got {reshard_after_forward!r}."
            )
        self._configure(recurse=recurse, reshard_after_forward=reshard_after_forward, is_kept=False)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Free parameters after backward, or keep them for the next micro-batch."""
        self._configure(recurse=recurse, reshard_after_backward=bool(reshard_after_backward))

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Keep the memory of unsharded parameters while they are sharded, or free it as usual.

        Their addresses then stay the same, which CUDA graphs need, at the price of the memory of
        every such module at once.
        """
        if keep:
            for unit in self._units(recurse=recurse):
                unit.read_privately()  # peers' shards, read in place, have addresses of their own
        self._configure(recurse=recurse, keep_unsharded_storage=keep)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Gather parameters for backward, or not: that of an embedding does not read them."""
        self._configure(recurse=False, unshard_in_backward=unshard_in_backward)

    # Order

    def set_modules_to_forward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """Start gathering these modules, not the next in order, when this one's forward starts."""
        _hooks(self).forward_prefetch = _hooks_of_all(modules)

    def set_modules_to_backward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """Start gathering these modules, not the next in order, when this one's backward starts."""
        _hooks(self).backward_prefetch = _hooks_of_all(modules)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is this iteration's last, if a forward has several.

        It holds for the whole model, whichever of its modules is told. Before the first forward, what the
        root is told wins.
        """
        _state(self).said["is_last_backward"] = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Let the program end backwards by `finalize_backward`, instead of each ending by itself.

        For schedules that reduce at a moment of their own, once for several backwards. Call it on
        the root, before forward; `set_is_last_backward` has no effect then. Raises StateError on
        another module, and from the first backward on until that is finalized or reset.
        """
        _state(self).set_manual_finalization(enabled=enabled)

    @overload
    def finalize_backward(self, *, async_op: Literal[False] = False) -> None: ...

    @overload
    def finalize_backward(self, *, async_op: Literal[True]) -> "GradientReductionHandle": ...

    @overload
    def finalize_backward(self, *, async_op: bool) -> "GradientReductionHandle | None": ...

    def finalize_backward(self, *, async_op: bool = False) -> "GradientReductionHandle | None":
        """Reduce what backwards have left, and free parameters, by the settings that hold now.

        Call it on the root after all backwards of an iteration, before gradients are read, with
        `set_manual_backward_finalization(True)`. If several backwards come first, keep gradients
        with `set_requires_gradient_sync(False)`, and set it to True before this. Collective. Has no
        effect before the first forward.

        async_op: return a handle to wait on before anything else is done with the model.

        Raises StateError on another module, without manual finalization, while a backward runs or
        a reduction was not waited for, and for gradients that wait for an all-reduce.
        """
        state = _state(self)
        iteration = state.known_iteration
        if iteration is None:
            return GradientReductionHandle() if async_op else None
        if not state.is_root:
            raise StateError("finalize_backward must be called on the root FSDP module.")
        handle = GradientReductionHandle(iteration, iteration.finalize())
        if async_op:
            return handle
        handle.wait()
        return None

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the root's next all-gathers wait for this event, recorded after the optimizer step.

        Without effect where there are no streams. Each event is waited for once.
        """
        _state(self).said["post_optim_event"] = event

    def reset_iter_state(self) -> None:
        """Drop what an iteration that an exception ended left behind.

        The root's next forward does this itself. With torch 2.15, and while a reduction that
        `finalize_backward` has begun was not waited for, gradients that are there are dropped as
        well, since some units have added theirs and others not. Raises StateError on a module that
        is not the root.
        """
        state = _state(self)
        iteration = state.known_iteration
        if iteration is not None and not state.is_root:
            raise StateError("reset_iter_state must be called on the root FSDP module.")
        is_mixed = iteration is not None and iteration.finalization.is_under_way
        state.reset()
        if is_mixed or is_from((2, 15)):
            for unit in self._units(recurse=True):
                unit.zero_gradients(set_to_none=True)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing; accepted for compatibility.

        In PyTorch's FSDP it moves the all-gathers' allocations to the default stream, at the price
        of implicit prefetch. Here they are always made there, and prefetch works all the same.
        """

    # Gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero all gradients, also those not reduced yet and those of hidden parameters.

        Between forward and backward the registered parameters may be the unsharded ones, while the
        sharded ones, which are trained, still have the gradients of earlier backwards.
        """
        cast(Any, super()).zero_grad(set_to_none)
        state = _state(self)
        # Of a root, without a walk through the modules: programs call this in every step.
        iteration = state.known_iteration if state.is_root else None
        units = self._units(recurse=True) if iteration is None else iteration.units
        if have_unreduced(units):
            for unit in units:
                unit.gradients.drop_unreduced()
        if not are_sharded(units):
            for unit in units:
                if not unit.is_sharded:
                    unit.zero_gradients(set_to_none=set_to_none)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Reduce gradients in backward, or keep them unreduced for a later one."""
        self._configure(
            recurse=recurse,
            reduce_grads=requires_gradient_sync,
            all_reduce_grads=requires_gradient_sync,
        )

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Sum over the replicate axis in backward, or keep the shard axis' sums for later (HSDP)."""
        self._configure(recurse=recurse, all_reduce_grads=requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Divide summed gradients by ``factor`` instead of the number of data-parallel ranks (None)."""
        if factor is not None and not factor > 0:
            raise ShardingError(
                f"set_gradient_divide_factor({factor!r}): expected a positive number."
            )
        own = None if factor is None else float(factor)
        self._configure(recurse=False, gradient_divide_factor=own)

    @deprecated("Use set_gradient_divide_factor instead")
    def set_reduce_scatter_divide_factor(self, factor: float | None) -> None:
        """Use `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Let NCCL sum gradients and divide the sums afterwards, instead of letting it average.

        Averaging by NCCL saves a kernel. Other backends are always asked for sums.
        """
        self._configure(recurse=False, force_sum_reduction=enable)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Reduce a unit also if this rank used none of its parameters, with zeros.

        Gradients are then always set, to zeros where no rank had one. For modules that only some ranks
        run at all there is `set_unused`.
        """
        unused = Unused.ZERO if reduce_scatter_unused_params else Unused.LEAVE
        self._configure(recurse=recurse, unused=unused)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Let this many reduce-scatters hold their input at once (default 1).

        With more, backward can run ahead where communication is slower than compute, at the cost of
        their memory. The largest number among a model's units counts for all. Raises TypeError or
        ShardingError for what is no positive int.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}."
            )
        if max_input_buffers < 1:
            raise ShardingError(
                f"max_input_buffers must be a positive int, got {max_input_buffers}."
            )
        if max_input_buffers > 1:
            for unit in self._units(recurse=recurse):
                refuse_symmetric_memory(unit, max_input_buffers)
        self._configure(recurse=recurse, reduce_scatter_max_input_buffers=max_input_buffers)

    def set_all_reduce_hook(
        self,
        hook: Callable[[torch.Tensor], None],
        *,
        stream: torch.Stream | None = None,
    ) -> None:
        """Call ``hook(sums)`` on this module's reduced gradients before they are set.

        For reductions over ranks that are not in the mesh, such as replicas that may fail. ``sums``
        is 1-D, divided already, and to be changed in place; with HSDP it is summed over the
        replicate axis first. stream: on which to run the hook (not with HSDP).
        """
        unit = self._only_unit("set_all_reduce_hook")
        if stream is not None and unit.mesh.replicate_group is not None:
            raise ShardingError("stream cannot be set when using native HSDP.")
        self._configure(recurse=False, all_reduce_hook=hook, all_reduce_hook_stream=stream)

    # Communication

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this module's parameters through ``comm``: one call per dtype."""
        use_collectives(self._only_unit("set_custom_all_gather"), gather=comm)
        self._reconnect()

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce this module's gradients through ``comm``: one call per dtype."""
        use_collectives(self._only_unit("set_custom_reduce_scatter"), reduce=comm)
        self._reconnect()

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Run reduce-scatters in a process group of their own, so that they overlap all-gathers.

        Makes one new group per distinct set of ranks, so every rank has to call it. No effect where
        ranks read each other's memory.
        """
        use_separate_reduce_groups(self._units(recurse=recurse), enable=enable)
        self._reconnect()

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Stage communication in memory of the process group's own allocator (NCCL).

        Raises StateError where the group has none.
        """
        for unit in self._units(recurse=False):
            use_process_group_memory(unit, enable=enable)
        self._reconnect()

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Stage communication in symmetric memory, for which NCCL has faster kernels.

        Raises StateError where the group is not NCCL's.
        """
        for unit in self._units(recurse=False):
            use_symmetric_memory(unit, backend)
        self._reconnect()

    # Inside

    def _get_fsdp_state(self) -> FSDPState:
        return FSDPState(_state(self))

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> Any:
        """Give memory to what is on the meta device. The first forward refuses what nobody writes to.

        Raises AllocationError, before anything is changed, if the host has too little memory.
        """
        if device is not None and torch.device(device).type == "cpu":
            buffers = cast(nn.Module, self).buffers(recurse)
            refuse_lack_of_memory("to_empty", self._units(recurse=recurse), buffers)
        with giving_memory(cast(nn.Module, self), recurse=recurse):
            return super().to_empty(device=device, recurse=recurse)  # type: ignore[misc]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Convert the sharded parameters, for ``.to()`` and ``.half()``, also if unsharded now."""
        states = _hooks(self).states
        units = [unit for state in states for unit in state.units]
        for unit in units:
            unit.settle()
        # A conversion would convert gradients as well, but those of a parameter with a ``grad_dtype``
        # have a dtype that is not the parameter's.
        kept: dict[ManagedParameter, torch.Tensor] = {}
        for param in (param for unit in units for param in unit.managed):
            param.follow_grad_dtype()
            grad = param.sharded.grad
            if grad is not None and said_grad_dtype(param.sharded).is_set:
                kept[param] = grad
                param.sharded.grad = None
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for state in states:
            state.follow_changes()
        for param, grad in kept.items():
            param.sharded.grad = grad.to(param.sharded.device)
        return result

    def _units(self, *, recurse: bool) -> list[Unit]:
        module = cast(nn.Module, self)
        states = states_in(module.modules() if recurse else [module])
        return [unit for state in states for unit in state.all_units]

    def _only_unit(self, method: str) -> Unit:
        units = _state(self).all_units
        if len(units) > 1:
            raise ShardingError(
                f"{method} is not supported with multiple param groups: this module's parameters "
                f"are sharded over {len(units)} meshes, and it could mean any of them."
            )
        return units[0]

    def _configure(self, *, recurse: bool, **changes: Any) -> None:
        for unit in self._units(recurse=recurse):
            unit.configure(**changes)
        if "reduce_scatter_max_input_buffers" in changes:
            self._reconnect()

    def _reconnect(self) -> None:
        iteration = _state(self).known_iteration
        if iteration is not None:
            iteration.connect()


class ReplicateModule(FSDPModule):
    """Methods of a module that `replicate` was applied to; every rank has all of its parameters."""

    applied_by = "replicate"
    _prefix = "Replicate"
    _orig_cls_mro_index = 3


class GradientReductionHandle:
    """Handle of an asynchronous `FSDPModule.finalize_backward`."""

    def __init__(self, iteration: Iteration | None = None, token: object = None) -> None:
        self._iteration, self._token = iteration, token

    def wait(self) -> None:
        """Wait until gradients are reduced. Every rank has to call it; again, it does nothing.

        Raises StateError if the iteration was reset in between.
        """
        if self._iteration is not None:
            self._iteration.finish_finalizing(self._token)
            self._iteration = None


class UnshardHandle:
    """Handle of an asynchronous `FSDPModule.unshard`."""

    def __init__(self, units: Iterable[Unit] = ()) -> None:
        self._units = list(units)

    def wait(self) -> None:
        """Wait until the unsharded parameters can be used."""
        for unit in self._units:
            unit.wait_unshard()
            unit.show_earlier_gradients()
        self._units.clear()


def unshard(units: Sequence[Unit], *, async_op: bool) -> UnshardHandle | None:
    """Gather units because a user asks for it, and hold them until they are resharded.

    Every rank has to call it. Values written to the unsharded parameters do not reach the shards.
    async_op: return a handle to wait on, instead of waiting and returning None.
    """
    # Two fences: peers have written their shards before anybody reads, and nobody still reads when
    # the caller goes on and may write.
    for unit in units:
        follow_changes(unit)
        unit.read_privately()
        unit.comm.fence(f"{unit.path}: unshard")
    for unit in units:
        unit.runtime.look()
        unit.is_held = True
        unit.unshard()
        unit.comm.fence(f"{unit.path}: unshard")
    handle = UnshardHandle(units)
    if async_op:
        return handle
    handle.wait()
    return None


def sharded_class(original: type, kind: Any) -> type:
    """Return the subclass of a kind of sharded module and a module's class, the same every time.

    ``FSDPLinear`` of `FSDPModule` and ``Linear``. kind: `FSDPModule` or `ReplicateModule`.
    """
    classes = sharded_classes[kind]
    if original not in classes:
        namespace = {"__deepcopy__": _deepcopy, "__module__": original.__module__}
        classes[original] = type(f"{kind._prefix}{original.__name__}", (kind, original), namespace)
    return classes[original]


@contextlib.contextmanager
def constructing_as_is() -> Iterator[None]:
    """Let the constructors of sharded classes make instances of these classes, inside the block.

    Elsewhere they make instances of the original class: see `FSDPModule.__new__`.
    """
    token = _as_is.set(True)
    try:
        yield
    finally:
        _as_is.reset(token)


def _deepcopy(module: nn.Module, memo: dict[int, Any]) -> Any:
    """Copy a sharded module that has not run yet. Every rank has to call it."""
    copied = copy_sharded(module, lambda plain: copy.deepcopy(plain, memo), memo)
    for state in states_in(copied.modules()):
        mark_sharded(state.modules, cast(Any, state.modules[0]).applied_by)
    return copied


def register_fsdp_forward_method(module: Any, method_name: str) -> None:
    """Let a method of a sharded module gather parameters, as its forward does.

    For models that are called through ``generate`` or ``encode``. No effect on a module that is not
    sharded. Raises ShardingError if the module has no such method.
    """
    hooks = hooks_of(module) if isinstance(module, nn.Module) else None
    if hooks is None:
        return
    method: Any = getattr(module, method_name, None)
    if not callable(method):
        raise ShardingError(f"{type(module)} does not have a method {method_name}.")
    # A method of the class is kept unbound: the module keeps it, and would otherwise keep itself.
    unbound = getattr(method, "__func__", None)
    is_bound = getattr(method, "__self__", None) is module and unbound is not None
    function: Any = unbound if is_bound else (lambda _, *args, **kwargs: method(*args, **kwargs))
    hooks.wrap_method(module, method_name, functools.wraps(method)(function))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Check the modules and do nothing more; accepted for compatibility.

    In PyTorch's FSDP every root (every chunk of a pipeline stage) has streams of its own unless
    they are shared like this. Here roots on one device always share them. Raises ShardingError for
    what is no FSDPModule.
    """
    _hooks_of_all(modules)


def _state(module: Any) -> ModuleState:
    return _hooks(module).state


def _hooks(module: Any) -> Hooks:
    hooks = hooks_of(module) if isinstance(module, nn.Module) else None
    if hooks is None:
        raise StateError(
            f"No FSDP state found on {type(module).__name__}: call fully_shard on it first."
        )
    return hooks


def _hooks_of_all(modules: Iterable[Any]) -> list[Hooks]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ShardingError(
                f"Expects FSDPModule but got {type(module).__name__}. Pass modules that "
                "fully_shard was applied to."
            )
    return [_hooks(module) for module in modules]
