"""Options of state dicts: names, fields, order and defaults are PyTorch's.

Mutable and unchecked because PyTorch's are, and code that sets a field later relies on it.
"""

import dataclasses
import enum

from fullshard.errors import StateError


class StateDictType(enum.Enum):
    """The kind of values in a model's state dict."""

    FULL_STATE_DICT = enum.auto()  # whole tensors, as of the model that was wrapped
    LOCAL_STATE_DICT = enum.auto()  # this rank's flat shards; only the same wrapping can load them
    SHARDED_STATE_DICT = enum.auto()  # whole tensors by shape, of which each rank holds a part


@dataclasses.dataclass
class StateDictConfig:
    """Options of model state dicts. offload_to_cpu: values are moved to host memory."""

    offload_to_cpu: bool = False


@dataclasses.dataclass
class FullStateDictConfig(StateDictConfig):
    """Options of ``FULL_STATE_DICT``. rank0_only: the other ranks get an empty dict."""

    rank0_only: bool = False


@dataclasses.dataclass
class LocalStateDictConfig(StateDictConfig):
    """Options of ``LOCAL_STATE_DICT``."""


@dataclasses.dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Options of ``SHARDED_STATE_DICT``. _use_dtensor: set by the face, where it has a mesh."""

    _use_dtensor: bool = False


@dataclasses.dataclass
class OptimStateDictConfig:
    """Options of optimizer state dicts. offload_to_cpu: tensors are moved to host memory."""

    offload_to_cpu: bool = True


@dataclasses.dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Optimizer options of ``FULL_STATE_DICT``. rank0_only: the others get an empty dict."""

    rank0_only: bool = False


@dataclasses.dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Optimizer options of ``LOCAL_STATE_DICT``."""

    offload_to_cpu: bool = False


@dataclasses.dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Optimizer options of ``SHARDED_STATE_DICT``. _use_dtensor: as for the model's."""

    _use_dtensor: bool = False


@dataclasses.dataclass
class StateDictSettings:
    """The kind of state dict asked for, with the options of both kinds of dict."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


class OptimStateKeyType(enum.Enum):
    """The kind of keys by which an optimizer state dict identifies parameters."""

    PARAM_NAME = enum.auto()  # "blocks.0.weight"
    PARAM_ID = enum.auto()  # position in the optimizer, as torch.optim does


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def default_settings(
    kind: StateDictType,
    config: StateDictConfig | None = None,
    optim_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Return the settings of a kind of state dict, with default options where none are given.

    Raises StateError for an options object of another kind.
    """
    types = _CONFIGS[kind]
    config, optim_config = config or types[0](), optim_config or types[1]()
    for given, expected, name in (
        (config, types[0], "state_dict_config"),
        (optim_config, types[1], "optim_state_dict_config"),
    ):
        if type(given) is not expected:
            raise StateError(f"Expected {name} of type {expected} but got {type(given)}")
    return StateDictSettings(kind, config, optim_config)
