"""Options of ``FullyShardedDataParallel``: names, fields, order and defaults are PyTorch's.

The dataclasses are mutable and unchecked because PyTorch's are, and code exists that sets fields
later. The wrapper translates them into a frozen ``UnitConfig``, where values are checked.
"""

import dataclasses
import enum
from collections.abc import Sequence

import torch
from torch import nn

from fullshard.torch_private import BatchNorm


class ShardingStrategy(enum.Enum):
    """Ways to divide a model over ranks, and times at which parameters are gathered."""

    FULL_SHARD = enum.auto()  # parameters, gradients, optimizer state; freed after each forward
    SHARD_GRAD_OP = enum.auto()  # the same, but parameters stay gathered from forward to backward
    NO_SHARD = enum.auto()  # nothing is divided: gradients are all-reduced, as with DDP
    HYBRID_SHARD = enum.auto()  # FULL_SHARD inside a node, replicas across nodes
    _HYBRID_SHARD_ZERO2 = enum.auto()  # SHARD_GRAD_OP inside a node, replicas across nodes


HYBRID_SHARDING_STRATEGIES = [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2]
NO_RESHARD_AFTER_FORWARD_STRATEGIES = (
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy._HYBRID_SHARD_ZERO2,
)


@dataclasses.dataclass
class MixedPrecision:
    """Dtypes of one unit; ``None`` leaves a dtype as it is. Only floating-point tensors are cast.

    param_dtype: of parameters in forward and backward. Shards and checkpoints keep their own dtype.
    reduce_dtype: of gradient reduction. ``None`` takes ``param_dtype``.
    buffer_dtype: of buffers, from the first forward on.
    keep_low_precision_grads: leave reduced gradients in ``reduce_dtype`` instead of casting them
        to the dtype of the shards.
    cast_forward_inputs: whether inputs are cast to ``param_dtype``.
    cast_root_forward_inputs: overrides ``cast_forward_inputs`` for the root.
    _module_classes_to_ignore: modules of these classes become units without mixed precision where
        an ``auto_wrap_policy`` is given, and compute in float32.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (BatchNorm,)


@dataclasses.dataclass
class CPUOffload:
    """Whether shards and their gradients live in host memory, where the optimizer then steps."""

    offload_params: bool = False
