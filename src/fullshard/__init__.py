"""Train PyTorch models larger than one device: fully sharded data parallel."""

import torch

from fullshard.comm.collectives import (
    AllGather,
    DefaultAllGather,
    DefaultReduceScatter,
    ProcessGroupAllocAllGather,
    ProcessGroupAllocReduceScatter,
    ReduceScatter,
    SymmMemAllGather,
    SymmMemReduceScatter,
)
from fullshard.engine.grad_norm import clip_grad_norm_
from fullshard.engine.observe import describe
from fullshard.errors import (
    CommError,
    FullshardError,
    LayoutError,
    MeshError,
    MisuseError,
    PeerLostError,
    PeerTimeoutError,
    ShardingError,
    StateError,
    UnsupportedError,
)
from fullshard.fsdp2 import fully_shard
from fullshard.fsdp_module import (
    FSDPModule,
    ReplicateModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fullshard.install import install, uninstall
from fullshard.meshes import (
    DataParallelMeshDims,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
)
from fullshard.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.replicate import replicate
from fullshard.sharding import set_default_comm
from fullshard.versions import check_torch_version

__version__ = "0.1.0"

check_torch_version(torch.__version__)

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "CommError",
    "DDPMeshInfo",
    "DataParallelMeshDims",
    "DefaultAllGather",
    "DefaultReduceScatter",
    "FSDPMeshInfo",
    "FSDPModule",
    "FullshardError",
    "HSDPMeshInfo",
    "LayoutError",
    "MeshError",
    "MisuseError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "PeerLostError",
    "PeerTimeoutError",
    "ProcessGroupAllocAllGather",
    "ProcessGroupAllocReduceScatter",
    "ReduceScatter",
    "ReplicateModule",
    "ShardPlacementResult",
    "ShardingError",
    "StateError",
    "SymmMemAllGather",
    "SymmMemReduceScatter",
    "UnshardHandle",
    "UnsupportedError",
    "clip_grad_norm_",
    "describe",
    "fully_shard",
    "install",
    "register_fsdp_forward_method",
    "replicate",
    "set_default_comm",
    "share_comm_ctx",
    "uninstall",
]
