"""Private names of PyTorch's FSDP that its own tests reach into, in terms of ours.

Thin on purpose: a test that needs more than a translation is listed as not passing instead.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

import fullshard
from fullshard.engine.module_state import covered_modules
from fullshard.engine.nodes import AfterBackward as RegisterPostBackwardFunction  # noqa: F401
from fullshard.engine.params.flat import FLAT_PARAM  # noqa: F401
from fullshard.faces.coverage import Covered
from fullshard.faces.interop import FlatHandle, is_composable, state_view
from fullshard.faces.meshes import default_mesh, mesh_info
from fullshard.plan.boxes import chunks
from fullshard.plan.units import WRAPPED_MODULE, clean_name
from fullshard.policies import CommHook
from fullshard.state.sharded_tensors import sharded_tensor

# Tests count collectives, so ranks must make PyTorch's. "auto" runs the same tests on peer memory.
fullshard.set_default_comm(os.environ.get("CONFORMANCE_COMM", "collectives"))

FSDP_WRAPPED_MODULE = WRAPPED_MODULE
FSDP_PREFIX = f"{WRAPPED_MODULE}."
NO_RESHARD_AFTER_FORWARD_STRATEGIES = (
    fullshard.ShardingStrategy.SHARD_GRAD_OP,
    fullshard.ShardingStrategy._HYBRID_SHARD_ZERO2,
)
clean_tensor_name = clean_name


# The wrapper under names of its own, and what its flat parameter would be at the moment.

FSDP = fullshard.FullyShardedDataParallel
FSDP._state_dict_type = property(lambda self: self._state_dict_settings.state_dict_type)
FSDP._inter_node_pg = property(lambda self: self._unit.mesh.replicate_group)
FSDP._wait_unshard_streams_on_current_stream = lambda self: None  # no streams on a CPU
_params = FSDP.params


def _params_as_they_are(self: fullshard.FullyShardedDataParallel) -> list[nn.Parameter]:
    """Return the flat parameters, unsharded while their unit is, with their shards."""
    unit, sharded = self._unit, _params.fget(self)
    shown = sharded
    if unit.is_unsharded and unit.params.buffers is not None:
        shown = [fullshard.FlatParameter(each.flat) for each in unit.params.buffers._unsharded]
    for parameter, shard in zip(shown, sharded, strict=True):
        parameter._local_shard = shard
        if (low := unit.config.mp_policy.param_dtype) is not None:
            parameter._mp_shard = torch.empty(0, dtype=low)  # lives during the all-gather alone
    return shown


FSDP.params = property(_params_as_they_are)


def _comm_hook(self: fullshard.FullyShardedDataParallel) -> Callable[..., None] | None:
    registered = self._unit.config.comm_hook
    return None if registered is None else registered.function


def _set_comm_hook(self: fullshard.FullyShardedDataParallel, hook: Callable[..., None]) -> None:
    self._unit.configure(comm_hook=CommHook(None, hook))


FSDP._comm_hook = property(_comm_hook, _set_comm_hook)
FSDP._comm_hook_state = property(lambda self: self._unit.config.comm_hook.state)
_FSDP_USE_UNSAFE_SETATTR = "FSDP_USE_UNSAFE_SETATTR"  # there is one way only
_get_fsdp_states = FSDP.fsdp_modules


def _create_chunk_sharded_tensor(
    tensor: torch.Tensor, rank: int, world_size: int, num_devices: int, pg: dist.ProcessGroup
) -> ShardedTensor:
    rows = [*tensor.chunk(world_size), *[tensor.new_empty(0, *tensor.shape[1:])] * world_size]
    boxes = chunks(tuple(tensor.shape), 0, world_size)
    return sharded_tensor(rows[rank].clone(), tuple(tensor.shape), boxes, pg)


def _init_intra_and_inter_node_groups(
    global_process_group: dist.ProcessGroup, num_devices_per_node: int
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    size = dist.get_world_size(global_process_group)
    nodes = [
        [*range(start, start + num_devices_per_node)]
        for start in range(0, size, num_devices_per_node)
    ]
    within, _ = dist.new_subgroups_by_enumeration(nodes)
    across, _ = dist.new_subgroups_by_enumeration([list(each) for each in zip(*nodes, strict=True)])
    return within, across


def _get_fsdp_handles(module: nn.Module) -> list[FlatHandle]:
    return [each._handle for each in FSDP.fsdp_modules(module) if each._handle is not None]


def _get_module_fsdp_state_if_fully_sharded_module(module: nn.Module) -> nn.Module | None:
    return module if isinstance(module, fullshard.FullyShardedDataParallel) else None


_get_module_fsdp_state = state_view
_get_mesh_info = mesh_info
_init_default_fully_shard_mesh = default_mesh


@dataclasses.dataclass
class ParamModuleInfo:
    """Where a parameter is registered: first, and everywhere else."""

    module: nn.Module
    param_name: str
    shared_modules: list[nn.Module] = dataclasses.field(default_factory=list)
    shared_param_names: list[str] = dataclasses.field(default_factory=list)


def _get_managed_modules(
    root_modules: Iterable[nn.Module], ignored_params: set[nn.Parameter] | None = None
) -> list[nn.Module]:
    return covered_modules(root_modules, is_composable)


def _get_managed_states(
    modules: Iterable[nn.Module], ignored_params: set[nn.Parameter] | None = None
) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
    modules = list(modules)
    buffers = dict.fromkeys(b for module in modules for b in module.buffers(recurse=False))
    return list(Covered(modules, modules, ignored_params or set()).slots), list(buffers)


def _get_param_module_infos(
    params: Sequence[nn.Parameter], modules: Iterable[nn.Module]
) -> list[ParamModuleInfo]:
    covered = covered_modules(modules)
    slots = Covered(covered, covered, set()).slots
    infos = []
    for param in params:
        first, *others = [(slot.module(), slot.name) for slot in slots[param]]
        assert first[0] is not None
        shared = [module for module, _ in others if module is not None]
        infos.append(ParamModuleInfo(*first, shared, [name for _, name in others]))  # type: ignore[arg-type]
    return infos
