"""Let torch's distributed state dicts recognise the wrapper.

``torch.distributed.checkpoint.state_dict`` finds wrapped modules by PyTorch's class. A model that
it does not recognise would be saved as if nothing were sharded: one rank's pieces, under wrong keys.
So when the first wrapper is made, PyTorch's class in that one module is replaced by a class that
stands for both. Models with our wrappers are then saved by ours, all others by PyTorch's.
"""

import dataclasses
import importlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fullshard.errors import StateError
from fullshard.faces.interop import wrapped_state
from fullshard.fsdp1.options import HYBRID_SHARDING_STRATEGIES
from fullshard.fsdp1.state_dicts import StateDictMethods
from fullshard.process_hooks import Replacements
from fullshard.state import options
from fullshard.state.options import StateDictType

_MODULE = "torch.distributed.checkpoint.state_dict"
_STATE_OF = "_get_module_fsdp_state_if_fully_sharded_module"
_HYBRID = "HYBRID_SHARDING_STRATEGIES"
_UNFLATTEN = "_unflatten_optim_state_dict"
_flattened = Replacements("flattened optimizer state of wrappers of fullshard can be loaded")
_names = Replacements("torch's distributed state dicts recognise wrappers of fullshard")


class _Either(type):
    """Metaclass of a class that stands for PyTorch's wrapper class and ours."""

    ours: Any
    theirs: Any  # PyTorch's

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (cls.ours, cls.theirs))

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.theirs, name)

    def _of(cls, model: nn.Module) -> Any:
        """Return the class of a model's wrappers; PyTorch's if it has none.

        Raises StateError for a model with wrappers of both.
        """
        if not any(isinstance(module, cls.ours) for module in model.modules()):
            return cls.theirs
        if cls.theirs.fsdp_modules(model):
            raise StateError(
                f"{type(model).__name__} has wrappers of fullshard and of torch.distributed.fsdp. "
                "Wrap it by one of them, or save its parts apart."
            )
        return cls.ours

    def fsdp_modules(cls, module: nn.Module, root_only: bool = False) -> list[Any]:
        found: list[Any] = cls._of(module).fsdp_modules(module, root_only)
        return found

    def state_dict_type(
        cls,
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> Any:
        wrapper = cls._of(module)
        if wrapper is cls.ours:
            state_dict_type = StateDictType[state_dict_type.name]
            state_dict_config = _as_ours(state_dict_config)
            optim_state_dict_config = _as_ours(optim_state_dict_config)
        return wrapper.state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )

    def optim_state_dict(cls, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return cls._of(model).optim_state_dict(model, *args, **kwargs)

    def optim_state_dict_to_load(cls, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return cls._of(model).optim_state_dict_to_load(model, *args, **kwargs)


def recognise(ours: type[StateDictMethods]) -> None:
    """Make torch's distributed state dicts recognise wrappers of this class beside PyTorch's.

    Does nothing if they do already, after an earlier call or through `install`.
    """
    module: Any = importlib.import_module(_MODULE)
    if not _flattened and hasattr(module, _UNFLATTEN):
        _unflatten_all(module, ours)
    theirs = module.FSDP
    if theirs is ours or isinstance(theirs, _Either):
        return
    either = _Either("FullyShardedDataParallel", (), {"ours": ours, "theirs": theirs})
    _names.set(module, "FSDP", either)
    # What torch looks at beside the class differs between releases.
    if (their_state_of := getattr(module, _STATE_OF, None)) is not None:

        def state_of(each: nn.Module) -> Any:
            return wrapped_state(each) if isinstance(each, ours) else their_state_of(each)

        _names.set(module, _STATE_OF, state_of)
    if (strategies := getattr(module, _HYBRID, None)) is not None:
        _names.set(module, _HYBRID, [*strategies, *HYBRID_SHARDING_STRATEGIES])


def _unflatten_all(module: Any, ours: type[StateDictMethods]) -> None:
    theirs = getattr(module, _UNFLATTEN)

    def unflatten(optim: Optimizer, state_dict: dict[str, Any], info: Any) -> Any:
        is_ours = any(isinstance(each, ours) for each in info.fsdp_modules)
        with _knowing_names(optim, state_dict, info) if is_ours else nullcontext():
            return theirs(optim, state_dict, info)

    _flattened.set(module, _UNFLATTEN, unflatten)


@contextmanager
def _knowing_names(optim: Optimizer, state_dict: dict[str, Any], info: Any) -> Iterator[None]:
    """Let an optimizer have the names of all state in a flattened dict, for as long as torch goes by them.

    An optimizer has no state of a parameter of which this rank owns nothing. Torch would leave that out,
    although ranks exchange it.
    """
    lacking = [p for group in optim.param_groups for p in group["params"] if not optim.state.get(p)]
    for parameter in lacking:
        for name in info.fqn_param_mapping[parameter]:
            prefix = f"state.{name}."
            keys = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
            optim.state[parameter] |= dict.fromkeys(key.partition(".")[0] for key in keys)
    try:
        yield
    finally:
        for parameter in lacking:
            del optim.state[parameter]


def _as_ours(config: Any) -> Any:
    """Return PyTorch's options object as one of our class of that name; None stays None."""
    if config is None:
        return None
    kind = getattr(options, type(config).__name__)
    fields = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in vars(config).items() if name in fields})
