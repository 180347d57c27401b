"""Methods of `FullyShardedDataParallel` for state dicts of models and of optimizers."""

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.engine.module_state import ModuleState
from fullshard.engine.runtime import passing_through
from fullshard.engine.unit import Unit, UnitPhase
from fullshard.errors import MisuseError, StateError
from fullshard.plan.units import WRAPPED_MODULE
from fullshard.state.model import after_loading, after_saving, before_loading, before_saving
from fullshard.state.optim import SaveOptions, Values, load, save
from fullshard.state.optim_keys import OptimInput, rekey
from fullshard.state.options import (
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    default_settings,
)

# The units that have the parameters of modules inside of wrappers.
_units: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Unit]]" = weakref.WeakKeyDictionary()


def _replaced_by(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for deprecated functions: each call warns that ``name`` replaces them."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            warnings.warn(
                f"``FullyShardedDataParallel.{function.__name__}`` is being deprecated and is "
                f"replaced by ``FullyShardedDataParallel.{name}``.",
                FutureWarning,
                stacklevel=2,
            )
            return function(*args, **kwargs)

        return call

    return decorate


class StateDictMethods(nn.Module):
    """The methods of `FullyShardedDataParallel` for state dicts, of models and of optimizers.

    Their values are of the kind that its settings say; keys are the names before wrapping.
    """

    _state_dict_settings: StateDictSettings
    _state: ModuleState

    @property
    @passing_through
    def _unit(self) -> Unit:
        return self._state.all_units[0]

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the kind of state dicts of all instances in a module; return the settings before.

        Raises RuntimeError for an options object of another kind, AssertionError if the instances
        have different settings now.
        """
        warnings.warn(
            "FSDP.state_dict_type() and FSDP.set_state_dict_type() are being deprecated. "
            "torch.distributed.checkpoint.state_dict has get_state_dict() and set_state_dict(), "
            "which serve every kind of sharding.",
            FutureWarning,
            stacklevel=2,
        )
        settings = default_settings(state_dict_type, state_dict_config, optim_state_dict_config)
        before = StateDictMethods.get_state_dict_type(module)
        for instance in _instances(module):
            has_mesh = instance._unit.mesh.mesh is not None
            if has_mesh and state_dict_type is StateDictType.LOCAL_STATE_DICT:
                raise StateError(
                    "DeviceMesh is not compatible with LOCAL_STATE_DICT. Use SHARDED_STATE_DICT, "
                    "which holds DTensors over the mesh."
                )
            for config in (settings.state_dict_config, settings.optim_state_dict_config):
                if hasattr(config, "_use_dtensor"):
                    config._use_dtensor = has_mesh
            instance._state_dict_settings = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Return the state-dict settings of the instances in a module.

        Raises AssertionError if they are not the same for all.
        """
        instances = _instances(module)
        found = [instance._state_dict_settings for instance in instances]
        for other in found[1:]:
            if other != found[0]:
                raise MisuseError(
                    "All FSDP modules must have the same state dict settings. Got "
                    f"{other} and {found[0]}. Call set_state_dict_type on the root."
                )
        return found[0] if found else default_settings(StateDictType.FULL_STATE_DICT)

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """Use other state-dict settings inside the block: see `set_state_dict_type`."""
        StateDictMethods.get_state_dict_type(module)  # raises if they differ
        with _restoring_settings(_instances(module)):
            StateDictMethods.set_state_dict_type(
                module, state_dict_type, state_dict_config, optim_state_dict_config
            )
            yield

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return an optimizer's state dict by parameter names, as of the model before wrapping.

        Values are whole tensors or sharded ones, as `state_dict_type` says. Every rank of ``group``
        has to call it.

        optim_state_dict: a result of the optimizer's own ``state_dict()``; default: of a call now.
        group: the ranks that take part; default: all ranks.
        """
        settings = StateDictMethods.get_state_dict_type(model)
        config = settings.optim_state_dict_config
        is_full = settings.state_dict_type is StateDictType.FULL_STATE_DICT
        return save(
            model,
            optim,
            optim.state_dict() if optim_state_dict is None else optim_state_dict,
            SaveOptions(
                Values.WHOLE if is_full else Values.SHARDED,
                rank0_only=getattr(config, "rank0_only", False),
                offload_to_cpu=config.offload_to_cpu,
                group=group,
            ),
        )

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return what ``optim.load_state_dict`` takes, from a state dict by parameter names.

        Values may be whole tensors or sharded ones; with ``rank0_only`` in the settings, whole ones
        that only the first rank has. Every rank has to call it.

        is_named_optimizer: the optimizer's own state dicts are by name as well. load_directly: also
        load the result into ``optim``.

        Raises ShardingError for values that do not fit this model's parameters.
        """
        config = StateDictMethods.get_state_dict_type(model).optim_state_dict_config
        result = load(
            model,
            optim,
            optim_state_dict,
            rank0_only=getattr(config, "rank0_only", False),
            is_named=is_named_optimizer,
            group=group,
        )
        if load_directly:
            optim.load_state_dict(result)
        return result

    @staticmethod
    @_replaced_by("optim_state_dict")
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: OptimInput = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return whole tensors. Deprecated: use `optim_state_dict`."""
        options = SaveOptions(Values.WHOLE, rank0_only=rank0_only, offload_to_cpu=True, group=group)
        return save(model, optim, optim.state_dict(), options, optim_input=optim_input)

    @staticmethod
    @_replaced_by("optim_state_dict")
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
    ) -> dict[str, Any]:
        """Return sharded tensors. Deprecated: use `optim_state_dict`."""
        options = SaveOptions(Values.SHARDED, offload_to_cpu=True, group=group)
        return save(model, optim, optim.state_dict(), options)

    @staticmethod
    @_replaced_by("optim_state_dict_to_load")
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Take a whole state dict from every rank. Deprecated: use `optim_state_dict_to_load`."""
        return load(model, optim, full_optim_state_dict, optim_input=optim_input)

    @staticmethod
    @_replaced_by("optim_state_dict_to_load")
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Take sharded tensors. Deprecated: use `optim_state_dict_to_load`."""
        return load(model, optim, sharded_optim_state_dict)

    @staticmethod
    @_replaced_by("optim_state_dict_to_load")
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Take the first rank's whole state dict. Deprecated: use `optim_state_dict_to_load`."""
        return load(
            model,
            optim,
            full_optim_state_dict or {},
            rank0_only=True,
            group=group,
            optim_input=optim_input,
        )

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Return the state dict with parameters by name, or by position in the optimizer.

        Optimizers of unwrapped models use positions; `optim_state_dict` returns names. Raises
        ShardingError for a dict with keys of both kinds.
        """
        if not isinstance(optim_state_key_type, OptimStateKeyType):
            raise MisuseError(f"Expected an OptimStateKeyType, got {optim_state_key_type!r}.")
        return rekey(optim_state_dict, optim_state_key_type, model, optim, optim_input)

    def _register_state_dict_hooks(self) -> None:
        self._state_dict_settings = default_settings(StateDictType.FULL_STATE_DICT)
        module: Any = self  # whose methods have no types
        module.register_state_dict_pre_hook(before_saving)
        module._register_state_dict_hook(after_saving)
        module._register_load_state_dict_pre_hook(before_loading, with_module=True)
        module.register_load_state_dict_post_hook(after_loading)
        for inner in {slot.module() for param in self._unit.managed for slot in param.slots}:
            if inner is not None:
                _units[inner] = weakref.ref(self._unit)
                inner.register_state_dict_pre_hook(_warn_of_pieces)


def _instances(module: nn.Module) -> list[StateDictMethods]:
    return [each for each in module.modules() if isinstance(each, StateDictMethods)]


@contextlib.contextmanager
def saving_sharded(model: nn.Module) -> Iterator[None]:
    """Let wrappers save DTensors inside the block, or whole tensors where nothing is sharded.

    Overrides their state-dict settings, which are restored when the block ends.
    """
    instances = _instances(model)
    with _restoring_settings(instances):
        for instance in instances:
            if instance._unit.mesh.shard_group is None:
                settings = default_settings(StateDictType.FULL_STATE_DICT)
            else:
                config = ShardedStateDictConfig(_use_dtensor=True)
                settings = default_settings(StateDictType.SHARDED_STATE_DICT, config)
            instance._state_dict_settings = settings
        yield


@contextlib.contextmanager
def _restoring_settings(instances: Sequence[StateDictMethods]) -> Iterator[None]:
    before = [instance._state_dict_settings for instance in instances]
    try:
        yield
    finally:
        for instance, settings in zip(instances, before, strict=True):
            instance._state_dict_settings = settings


def _warn_of_pieces(module: nn.Module, prefix: str, _: bool) -> None:
    unit = _units[module]() if module in _units else None
    if WRAPPED_MODULE in prefix or unit is None:
        return  # of the wrapper, which puts whole values in their place; or of a copy without one
    if unit.mesh.shard_group is not None and not (
        unit.is_whole or unit.phase is UnitPhase.UNSHARDED
    ):
        warnings.warn(
            f"state_dict() of a module inside of a FullyShardedDataParallel, {unit.label}, and not of the wrapper: "
            f"it has the pieces of {type(module).__name__}'s parameters that this rank holds, or none. Call "
            "state_dict() of the outermost wrapper, or this one inside summon_full_params().",
            stacklevel=4,
        )
