"""The public names and where they come from; `fullshard` shows them once one of them is used."""

from fullshard.batches.ending import JoinedBatches, join
from fullshard.batches.order import ResumableOrder
from fullshard.batches.weighting import weighted_loss
from fullshard.checkpoint.load import LoadedCheckpoint, load_checkpoint
from fullshard.checkpoint.manager import (
    Checkpoint,
    CheckpointManager,
    latest_checkpoint,
    prune_checkpoints,
)
from fullshard.checkpoint.save import (
    PendingSave,
    SavedCheckpoint,
    async_save_checkpoint,
    save_checkpoint,
)
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
from fullshard.comm.select import set_default_comm
from fullshard.compare.replaying import Replay, ReplayDifference, replay
from fullshard.compare.switches import debug
from fullshard.convert.checkpoint_import import convert_checkpoint
from fullshard.convert.dcp_export import ExportedState, export_dcp
from fullshard.convert.hf_export import ExportedWeights, export_hf
from fullshard.convert.hf_import import LoadedWeights, load_hf
from fullshard.convert.inspect import (
    CheckpointDifference,
    CheckpointSummary,
    TensorSummary,
    VerifiedCheckpoint,
    diff_checkpoints,
    inspect_checkpoint,
    verify_checkpoint,
)
from fullshard.deferred.building import deferred_init, materialize
from fullshard.drop_in.install import install, uninstall
from fullshard.engine.params.flat import FlatParameter
from fullshard.errors import (
    AllocationError,
    CheckpointError,
    CommError,
    DamagedCheckpointError,
    DivergenceError,
    FullshardError,
    LaunchError,
    LayoutError,
    MeshError,
    MisuseError,
    PeerLostError,
    PeerTimeoutError,
    ShardingError,
    StateError,
    UnsupportedError,
)
from fullshard.faces.meshes import (
    DataParallelMeshDims,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
)
from fullshard.faces.unused import set_unused
from fullshard.fsdp1.auto_wrap import enable_wrap, wrap
from fullshard.fsdp1.module import FullyShardedDataParallel
from fullshard.fsdp1.options import CPUOffload, MixedPrecision, ShardingStrategy
from fullshard.fsdp1.wrap_policies import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from fullshard.fsdp2.fully_shard import fully_shard, replicate
from fullshard.fsdp2.module import (
    FSDPModule,
    GradientReductionHandle,
    ReplicateModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fullshard.launching.launch import launch
from fullshard.live.buffers import sync_buffers
from fullshard.live.captured import CapturedStep, capture_step
from fullshard.live.ema import EMA
from fullshard.live.gathered import gathered
from fullshard.live.keeping import KeptUnit, KeptUnits, keep_unsharded
from fullshard.live.streaming import iter_full_state, stream_weights
from fullshard.live.whole import full_parameters
from fullshard.migrate.report import MigrationReport, migrate_report
from fullshard.migrate.transfer import load_sharded_state, sharded_state
from fullshard.optim.grad_norm import clip_grad_norm_
from fullshard.optim.grad_scaler import ShardedGradScaler
from fullshard.optim.shard_step import step_on_shards, stream_state
from fullshard.planning.choices import SearchSpace
from fullshard.planning.machines import Machine, machine_named
from fullshard.planning.search import SearchResult, search_training
from fullshard.planning.setup import TrainingSetup
from fullshard.planning.shapes import TransformerShape
from fullshard.planning.training import TrainingPlan, plan_training
from fullshard.policies import (
    BackwardPrefetch,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    PlacementPolicy,
)
from fullshard.state.options import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fullshard.watch.describe import describe
from fullshard.watch.memory import MemoryCategory, MemoryReport, memory_report
from fullshard.watch.trace import Tracing, trace

__all__ = [  # noqa: RUF022  (sorted as Python sorts)
    "AllGather",
    "AllocationError",
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CapturedStep",
    "Checkpoint",
    "CheckpointDifference",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointSummary",
    "CommError",
    "CustomPolicy",
    "DDPMeshInfo",
    "DamagedCheckpointError",
    "DataParallelMeshDims",
    "DefaultAllGather",
    "DefaultReduceScatter",
    "DivergenceError",
    "EMA",
    "ExportedState",
    "ExportedWeights",
    "FSDPMeshInfo",
    "FSDPModule",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullshardError",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "HSDPMeshInfo",
    "JoinedBatches",
    "KeptUnit",
    "KeptUnits",
    "LaunchError",
    "LayoutError",
    "LoadedCheckpoint",
    "LoadedWeights",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "Machine",
    "MemoryCategory",
    "MemoryReport",
    "MeshError",
    "MigrationReport",
    "MisuseError",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "ModuleWrapPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "PeerLostError",
    "PeerTimeoutError",
    "PendingSave",
    "PlacementPolicy",
    "ProcessGroupAllocAllGather",
    "ProcessGroupAllocReduceScatter",
    "ReduceScatter",
    "Replay",
    "ReplayDifference",
    "ReplicateModule",
    "ResumableOrder",
    "SavedCheckpoint",
    "SearchResult",
    "SearchSpace",
    "ShardPlacementResult",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingError",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "StateError",
    "SymmMemAllGather",
    "SymmMemReduceScatter",
    "TensorSummary",
    "Tracing",
    "TrainingPlan",
    "TrainingSetup",
    "TransformerShape",
    "UnshardHandle",
    "UnsupportedError",
    "VerifiedCheckpoint",
    "always_wrap_policy",
    "async_save_checkpoint",
    "capture_step",
    "clip_grad_norm_",
    "convert_checkpoint",
    "debug",
    "deferred_init",
    "describe",
    "diff_checkpoints",
    "enable_wrap",
    "export_dcp",
    "export_hf",
    "full_parameters",
    "fully_shard",
    "gathered",
    "inspect_checkpoint",
    "install",
    "iter_full_state",
    "join",
    "keep_unsharded",
    "lambda_auto_wrap_policy",
    "latest_checkpoint",
    "launch",
    "load_checkpoint",
    "load_hf",
    "load_sharded_state",
    "machine_named",
    "materialize",
    "memory_report",
    "migrate_report",
    "plan_training",
    "prune_checkpoints",
    "register_fsdp_forward_method",
    "replay",
    "replicate",
    "save_checkpoint",
    "search_training",
    "set_default_comm",
    "set_unused",
    "sharded_state",
    "share_comm_ctx",
    "size_based_auto_wrap_policy",
    "step_on_shards",
    "stream_state",
    "stream_weights",
    "sync_buffers",
    "trace",
    "transformer_auto_wrap_policy",
    "uninstall",
    "verify_checkpoint",
    "weighted_loss",
    "wrap",
]
