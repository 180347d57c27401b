"""Private names of PyTorch's FSDP that its own tests reach into, in terms of ours.

Thin on purpose: a test that needs more than a translation is listed as not passing instead.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence

import torch
from torch import nn

import fullshard
from fullshard.engine.flat_params import FLAT_PARAM  # noqa: F401
from fullshard.engine.nodes import AfterBackward as RegisterPostBackwardFunction  # noqa: F401
from fullshard.interop import is_composable, state_view
from fullshard.meshes import default_mesh, mesh_info
from fullshard.plan.units import WRAPPED_MODULE, clean_name
from fullshard.wrapping import CoveredParameters, covered_modules

# Tests count collectives, so ranks must make PyTorch's. "auto" runs the same tests on peer memory.
fullshard.set_default_comm(os.environ.get("CONFORMANCE_COMM", "collectives"))

FSDP_WRAPPED_MODULE = WRAPPED_MODULE
FSDP_PREFIX = f"{WRAPPED_MODULE}."
NO_RESHARD_AFTER_FORWARD_STRATEGIES = (
    fullshard.ShardingStrategy.SHARD_GRAD_OP,
    fullshard.ShardingStrategy._HYBRID_SHARD_ZERO2,
)
clean_tensor_name = clean_name


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
    return list(CoveredParameters(modules, ignored_params or set()).slots), list(buffers)


def _get_param_module_infos(
    params: Sequence[nn.Parameter], modules: Iterable[nn.Module]
) -> list[ParamModuleInfo]:
    slots = CoveredParameters(covered_modules(modules), set()).slots
    infos = []
    for param in params:
        first, *others = [(slot.module(), slot.name) for slot in slots[param]]
        assert first[0] is not None
        shared = [module for module, _ in others if module is not None]
        infos.append(ParamModuleInfo(*first, shared, [name for _, name in others]))  # type: ignore[arg-type]
    return infos
