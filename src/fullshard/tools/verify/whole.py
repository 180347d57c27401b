"""What a script finds where sharding was: modules stay whole, and the methods of sharded ones do the plain thing.

A module that the script shards becomes an instance of a subclass of its own class, as with ``fully_shard``; so
does what it gives to the wrapper, which then is no wrapper: ``FullyShardedDataParallel(module)`` is the module.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard import (
    FSDPModule,
    FullyShardedDataParallel,
    GradientReductionHandle,
    ReplicateModule,
    ShardedGradScaler,
    ShardPlacementResult,
    UnshardHandle,
    clip_grad_norm_,
    fully_shard,
    register_fsdp_forward_method,
    replicate,
    set_unused,
    share_comm_ctx,
    step_on_shards,
    weighted_loss,
)
from fullshard.errors import UnsupportedError
from fullshard.tools.verify.averaging import Averaging
from fullshard.tools.verify.casting import Casting, Precision


class _Run(NamedTuple):
    """What calls that shard lead to: gradients are averaged, the module is cast, and noted."""

    averaging: Averaging
    casting: Casting
    note: Callable[[nn.Module], object]


def _do_nothing(*_: Any, **__: Any) -> None:
    """Stand for what changes memory, order or time alone."""


def _refusing(name: str) -> Any:
    return staticmethod(lambda *_, **__: _refuse(f"FullyShardedDataParallel.{name}"))


def _refuse(what: str) -> NoReturn:
    raise UnsupportedError(
        f"{what}: `fullshard verify` cannot do what it does to a model that is not sharded. Leave it out of the "
        "steps to verify, or verify the model by MODULE:FUNCTION."
    )


class Whole(nn.Module):
    """Methods of a module that stays whole; the base of what stands for sharded classes.

    Its attributes are set on subclasses, of which each run has its own. Their names are not to hide any of a
    user's module.
    """

    _verify_run: ClassVar[_Run]
    _verify_original: ClassVar[Any] = None  # the module's own class

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an instance of the original class, so that slicing a container works."""
        if cls._verify_original is None or not (args or kwargs):  # copies call it without arguments
            return super().__new__(cls)
        return cls._verify_original(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero all gradients, also those that wait to be averaged."""
        super().zero_grad(set_to_none)
        self._verify_run.averaging.drop(self)

    def to_empty(self, *, device: Any, recurse: bool = True) -> Any:
        """Give memory to what is on the meta device; names that share a parameter go on to."""
        modules = list(self.modules()) if recurse else [self]
        before = [(m, name, p) for m in modules for name, p in m._parameters.items()]
        result = super().to_empty(device=device, recurse=recurse)
        first: dict[nn.Parameter, Any] = {}
        for module, name, parameter in before:
            if parameter is not None:
                module._parameters[name] = first.setdefault(parameter, module._parameters[name])
        return result


class WholeModule(Whole):
    """In the place of `fullshard.FSDPModule`. Methods that are not here change nothing but memory and time."""

    def unshard(self, async_op: bool = False) -> Any:
        """Do nothing: parameters are whole."""
        return UnshardHandle() if async_op else None

    def set_requires_gradient_sync(self, does: bool, *, recurse: bool = True) -> None:
        """Average gradients in backward, or let them wait."""
        self._verify_run.averaging.synchronise(self, does=does, recurse=recurse)

    def set_requires_all_reduce(self, does: bool, *, recurse: bool = True) -> None:
        """Let gradients wait: to average over one axis now and over the other later gives the same."""
        self.set_requires_gradient_sync(does, recurse=recurse)

    def set_reduce_scatter_unused_params(self, does: bool, *, recurse: bool = True) -> None:
        """Give zeros to parameters that no rank used."""
        self._verify_run.averaging.always_fill(self, does=does, recurse=recurse)

    def finalize_backward(self, *, async_op: bool = False) -> Any:
        self._verify_run.averaging.before_backward()
        self._verify_run.averaging.after_backward()
        return GradientReductionHandle() if async_op else None

    def set_all_reduce_hook(self, *_: Any, **__: Any) -> None:
        """Refuse: what a hook does to gradients is not known."""
        _refuse("set_all_reduce_hook")


class WholeWrapper(Whole):
    """In the place of `fullshard.FullyShardedDataParallel`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the module that is to be wrapped, if this is the wrapper's own class."""
        if cls._verify_original is not None:
            return super().__new__(cls, *args, **kwargs)
        return _wrapped(cls, *args, **kwargs)

    def __init__(self, *_: Any, **__: Any) -> None:
        """Do nothing: the module is there already."""

    @property
    def module(self) -> Any:
        """The module, unless it has one of this name itself."""
        return self._modules.get("module", self)

    @property
    def _fsdp_wrapped_module(self) -> Any:
        return self

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._verify_run.averaging.synchronise(self, does=False)
        try:
            yield
        finally:
            self._verify_run.averaging.synchronise(self, does=True)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients, which are the same on every rank."""
        parameters = self.parameters()
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[nn.Module]:
        found: list[nn.Module] = [m for m in module.modules() if isinstance(m, WholeWrapper)]
        return found[:1] if root_only else found

    # Parameters and state dicts are whole.
    summon_full_params = state_dict_type = staticmethod(lambda *_, **__: contextlib.nullcontext())
    set_state_dict_type = staticmethod(_do_nothing)


def standing_in(
    averaging: Averaging, casting: Casting, note: Callable[[nn.Module], object]
) -> Mapping[Any, Any]:
    """Return what stands for functions and classes of fullshard, by these.

    note: called with each module that the script gives to be sharded.
    """
    run = _Run(averaging, casting, note)
    module = _complete(WholeModule, FSDPModule, run, lambda _: _do_nothing)
    replicated = type("ReplicateModule", (module,), {})
    wrapper = _complete(WholeWrapper, FullyShardedDataParallel, run, _refusing)
    return {
        FSDPModule: module,
        ReplicateModule: replicated,
        FullyShardedDataParallel: wrapper,
        ShardedGradScaler: _WholeGradScaler,
        fully_shard: functools.partial(_left_whole, module),
        replicate: functools.partial(_left_whole, replicated),
        clip_grad_norm_: nn.utils.clip_grad_norm_,
        register_fsdp_forward_method: casting.register_method,
        set_unused: lambda module, unused, *, recurse=True, **_: averaging.always_fill(
            module, does=unused == "zero", recurse=recurse
        ),
        share_comm_ctx: _do_nothing,
        step_on_shards: lambda optimizer, **_: optimizer,
        weighted_loss: functools.partial(_weighted, averaging),
    }


def _complete(base: type, real: type, run: _Run, make: Callable[[str], Any]) -> Any:
    """Return a class with the public methods of the real one: those that the base lacks, by ``make(name)``."""
    names = [n for n in dir(real) if not n.startswith("_") and callable(getattr(real, n))]
    lacking = {name: make(name) for name in names if not hasattr(base, name)}
    return type(real.__name__, (base,), {**lacking, "_verify_run": run})


class _WholeGradScaler(torch.amp.GradScaler):
    """In the place of `ShardedGradScaler`: gradients are the same on every rank."""

    def __init__(self, device: str = "cuda", *args: Any, process_group: Any = None, **kwargs: Any):
        super().__init__(device, *args, **kwargs)


def _left_whole(
    kind: type,
    module: Any,
    *,
    mesh: Any = None,
    mp_policy: Any = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    dp_mesh_dims: object = None,
    **_: Any,
) -> Any:
    """Take the place of `fully_shard` and `replicate`."""
    if not dist.is_initialized():
        dist.init_process_group()
    if dp_mesh_dims is not None:
        _refuse("dp_mesh_dims")
    groups = _groups_of(mesh)
    device = mesh.device_type if mesh is not None else None
    precision = Precision(ignored=frozenset(ignored_params or ()))
    if mp_policy is not None:
        casts = mp_policy.cast_forward_inputs
        precision = precision._replace(
            param_dtype=mp_policy.param_dtype,
            output_dtype=mp_policy.output_dtype,
            casts_inputs=casts,
            casts_root_inputs=casts,
        )
    for each in module if isinstance(module, (list, tuple)) else [module]:
        for parameter in each.parameters():
            place = shard_placement_fn(parameter) if shard_placement_fn is not None else None
            if isinstance(place, ShardPlacementResult):
                _refuse("a shard_placement_fn that gives a mesh")
        _leave_whole(each, kind, groups, device, precision)
    return module


def _wrapped(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """Take the place of `FullyShardedDataParallel`. The policy chooses nothing: there are no units."""
    signature = inspect.signature(FullyShardedDataParallel.__init__)
    given = signature.bind(None, *args, **kwargs).arguments
    module, mesh, group = given["module"], given.get("device_mesh"), given.get("process_group")
    groups = _groups_of(mesh)
    if mesh is None and group is not None:
        groups = list(group) if isinstance(group, tuple) else [group]
    ignored: set[nn.Parameter] = set()
    for each in (*(given.get("ignored_modules") or ()), *(given.get("ignored_states") or ())):
        ignored |= set(each.parameters()) if isinstance(each, nn.Module) else {each}
    _materialise(module, given.get("param_init_fn"))
    where = given.get("device_id")
    device = torch.device(where).type if isinstance(where, (str, torch.device)) else None
    sync = given.get("sync_module_states", False)
    precision = Precision(ignored=frozenset(ignored))
    if (policy := given.get("mixed_precision")) is not None:
        precision = precision._replace(
            param_dtype=policy.param_dtype,
            buffer_dtype=policy.buffer_dtype,
            casts_inputs=policy.cast_forward_inputs,
            casts_root_inputs=policy.cast_root_forward_inputs,
        )
        if given.get("auto_wrap_policy") is not None:
            for each in module.modules():
                if isinstance(each, tuple(policy._module_classes_to_ignore)):
                    kind._verify_run.casting.add_float32(each)
    _leave_whole(module, kind, groups, device, precision, sync=sync)
    kind._verify_run.averaging.always_fill(module, does=True)  # as flat gradients do
    return module


def _groups_of(mesh: Any) -> list[dist.ProcessGroup]:
    """Return the groups of a mesh's dimensions; of all ranks without one."""
    if mesh is not None:
        return [mesh.get_group(dim) for dim in range(mesh.ndim)]
    assert dist.group.WORLD is not None
    return [dist.group.WORLD]


def _leave_whole(
    module: nn.Module,
    kind: Any,
    groups: list[dist.ProcessGroup],
    device: str | None,
    precision: Precision,
    *,
    sync: bool = False,
) -> None:
    """Give a module the methods of a sharded one, on its device; average its gradients; let it compute as told."""
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        _refuse("sharding parameters that are DTensors (tensor or expert parallel)")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and device != "cpu":
        here = torch.device(accelerator.type, torch.accelerator.current_device_index())
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(here))
    if sync:
        for tensor in (*module.parameters(), *module.buffers()):
            for group in groups:
                dist.broadcast(tensor.detach(), group_src=0, group=group)
    if not isinstance(module, kind):
        original = type(module)
        module.__class__ = type(original.__name__, (kind, original), {"_verify_original": original})
    kind._verify_run.averaging.add(module, groups, precision.ignored)
    kind._verify_run.casting.add(module, precision)
    kind._verify_run.note(module)


def _materialise(module: nn.Module, param_init_fn: Callable[[nn.Module], None] | None) -> None:
    """Give values to what is on the meta device, as the wrapper does."""
    for each in list(module.modules()):
        tensors = (*each.parameters(recurse=False), *each.buffers(recurse=False))
        if not any(tensor.is_meta for tensor in tensors):
            continue
        if param_init_fn is not None:
            param_init_fn(each)
            continue
        each.to_empty(device=torch.get_default_device(), recurse=False)
        with torch.no_grad():
            each.reset_parameters()  # type: ignore[operator]


def _weighted(
    averaging: Averaging,
    loss: torch.Tensor,
    weight: Any,
    model: nn.Module,  # noqa: ARG001
) -> torch.Tensor:
    """Take the place of `weighted_loss`: gradients are summed by weights, and divided by their sum."""
    weight = torch.as_tensor(weight, dtype=torch.float64, device=loss.device)
    averaging.weight_next(weight)
    weighted = loss.view_as(loss)
    weighted.register_hook(lambda grad: grad * weight.to(grad.dtype))
    return weighted
