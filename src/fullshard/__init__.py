"""Train PyTorch models larger than one device: fully sharded data parallel."""

import torch

from fullshard.engine.grad_norm import clip_grad_norm_
from fullshard.engine.observe import describe
from fullshard.errors import (
    CommError,
    FullshardError,
    LayoutError,
    MeshError,
    PeerLostError,
    PeerTimeoutError,
    ShardingError,
    StateError,
)
from fullshard.fsdp2 import (
    FSDPModule,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    set_default_comm,
)
from fullshard.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.versions import check_torch_version

__version__ = "0.1.0"

check_torch_version(torch.__version__)

__all__ = [
    "CPUOffloadPolicy",
    "CommError",
    "FSDPModule",
    "FullshardError",
    "LayoutError",
    "MeshError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "PeerLostError",
    "PeerTimeoutError",
    "ShardingError",
    "StateError",
    "UnshardHandle",
    "clip_grad_norm_",
    "describe",
    "fully_shard",
    "register_fsdp_forward_method",
    "set_default_comm",
]
