"""`install()`: makes PyTorch's FSDP names resolve to fullshard, also in libraries.

The modules of ``torch.distributed.fsdp`` stay, but names in them are set to ours. So are names that
other modules have imported from them already. Those are also torch's own modules (distributed
checkpoint, pipelining, compile), whose ``isinstance`` checks then recognise our classes.
"""

import gc
import importlib
import multiprocessing.spawn
import pkgutil
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from fullshard.comm import collectives
from fullshard.comm.select import default_comm, set_default_comm
from fullshard.drop_in.on_cpu import is_sharding_on_cpus, shard_as_libraries_do, shard_on_cpus
from fullshard.engine.module_state import flat_states
from fullshard.engine.params.flat import FlatParameter
from fullshard.errors import StateError
from fullshard.faces import interop, meshes
from fullshard.fsdp1 import auto_wrap, wrap_policies
from fullshard.fsdp1 import options as fsdp1_options
from fullshard.fsdp1.module import FullyShardedDataParallel
from fullshard.fsdp1.recognition import recognise
from fullshard.fsdp2 import module as fsdp2_module
from fullshard.fsdp2.fully_shard import fully_shard, replicate
from fullshard.fsdp2.module import FSDPModule, ReplicateModule, sharded_classes
from fullshard.optim import grad_scaler
from fullshard.policies import (
    BackwardPrefetch,
    CommChoice,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    TrainingState,
)
from fullshard.process_hooks import Replacements
from fullshard.state import options as state_options

_PACKAGES = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")
_ENGINE = "torch.distributed.fsdp._fully_shard"
_REPLICATE = "torch.distributed._composable.replicate_with_fsdp"
_FSDP1 = "torch.distributed.fsdp"


def get_cls_to_fsdp_cls() -> dict[type, type]:
    """Return the FSDP2 classes of sharded modules, by original class. PyTorch's name."""
    return sharded_classes[FSDPModule]


# By module of PyTorch, the names that it defines and what replaces them. Names that other modules
# import from there, packages above included, are found at run time.
_REPLACED: dict[str, dict[str, Any]] = {
    f"{_ENGINE}._fully_shard": {
        "fully_shard": fully_shard,
        "FSDPModule": FSDPModule,
        "UnshardHandle": fsdp2_module.UnshardHandle,
        "GradientReductionHandle": fsdp2_module.GradientReductionHandle,
        "register_fsdp_forward_method": fsdp2_module.register_fsdp_forward_method,
        "share_comm_ctx": fsdp2_module.share_comm_ctx,
        "get_cls_to_fsdp_cls": get_cls_to_fsdp_cls,
        "disable_fsdp_module_new_init": fsdp2_module.constructing_as_is,  # for ``torch.compile``
    },
    f"{_ENGINE}._fsdp_api": {
        "MixedPrecisionPolicy": MixedPrecisionPolicy,
        "OffloadPolicy": OffloadPolicy,
        "CPUOffloadPolicy": CPUOffloadPolicy,
        "DataParallelMeshDims": meshes.DataParallelMeshDims,
        "AllGather": collectives.AllGather,
        "ReduceScatter": collectives.ReduceScatter,
    },
    f"{_ENGINE}._fsdp_collectives": {
        name: getattr(collectives, name)
        for kind in ("AllGather", "ReduceScatter")
        for name in (f"Default{kind}", f"ProcessGroupAlloc{kind}", f"SymmMem{kind}")
    },
    f"{_ENGINE}._fsdp_common": {
        "DataParallelMeshInfo": meshes.DataParallelMeshInfo,
        "FSDPMeshInfo": meshes.FSDPMeshInfo,
        "DDPMeshInfo": meshes.DDPMeshInfo,
        "HSDPMeshInfo": meshes.HSDPMeshInfo,
        "ShardPlacementResult": meshes.ShardPlacementResult,
        "TrainingState": TrainingState,
    },
    f"{_ENGINE}._fsdp_init": {"_get_mesh_info": meshes.mesh_info},
    f"{_ENGINE}._fsdp_state": {"_get_module_fsdp_state": interop.state_view},
    f"{_FSDP1}.fully_sharded_data_parallel": {
        "FullyShardedDataParallel": FullyShardedDataParallel,
        "OptimStateKeyType": state_options.OptimStateKeyType,
    },
    f"{_FSDP1}.api": {
        "BackwardPrefetch": BackwardPrefetch,
        **{
            name: getattr(fsdp1_options, name)
            for name in ("CPUOffload", "MixedPrecision", "ShardingStrategy")
        },
        **{
            name: getattr(state_options, name)
            for kind in ("", "Optim")
            for name in (
                f"{kind}StateDictConfig",
                *(f"{part}{kind}StateDictConfig" for part in ("Full", "Local", "Sharded")),
            )
        },
        "StateDictSettings": state_options.StateDictSettings,
        "StateDictType": state_options.StateDictType,
    },
    f"{_FSDP1}.wrap": {
        **{
            name: getattr(wrap_policies, name)
            for name in (
                "CustomPolicy",
                "ModuleWrapPolicy",
                "always_wrap_policy",
                "lambda_auto_wrap_policy",
                "size_based_auto_wrap_policy",
                "transformer_auto_wrap_policy",
                "_Policy",
                "_module_wrap_policy",
                "_or_policy",
                "_wrap_module_cls_individually",
            )
        },
        **{
            name: getattr(auto_wrap, name)
            for name in ("enable_wrap", "wrap", "_ConfigAutoWrap", "_recursive_wrap", "_wrap")
        },
    },
    f"{_FSDP1}._wrap_utils": {
        name: getattr(auto_wrap, name) for name in ("_construct_wrap_fn", "_post_order_apply")
    },
    f"{_FSDP1}.sharded_grad_scaler": {"ShardedGradScaler": grad_scaler.ShardedGradScaler},
    f"{_FSDP1}._flat_param": {"FlatParameter": FlatParameter},
    f"{_FSDP1}._init_utils": {
        "HYBRID_SHARDING_STRATEGIES": fsdp1_options.HYBRID_SHARDING_STRATEGIES,
        "NO_RESHARD_AFTER_FORWARD_STRATEGIES": fsdp1_options.NO_RESHARD_AFTER_FORWARD_STRATEGIES,
    },
    f"{_FSDP1}._runtime_utils": {
        "_lazy_init": interop.initialise_wrapper,
        "_post_backward_final_callback": interop.end_wrapper,
    },
    f"{_FSDP1}._common_utils": {
        "_get_module_fsdp_state_if_fully_sharded_module": interop.wrapped_state,
    },
    _REPLICATE: {
        "replicate": replicate,
        "ReplicateModule": ReplicateModule,
        "_get_module_replicate_state": interop.state_view,
        "cls_to_replicate_cls": sharded_classes[ReplicateModule],
    },
}


class _Call(NamedTuple):
    """A value that calls a function where it is unpickled."""

    function: Callable[..., object]
    arguments: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


def call_in_spawned(
    names: Replacements, function: Callable[..., object], arguments: Callable[[], tuple[Any, ...]]
) -> None:
    """Call a function in each process that `multiprocessing` spawns, before it imports the main program again.

    arguments: returns them, when the process is started. names: undoes it.
    """
    prepare = multiprocessing.spawn.get_preparation_data

    def prepare_and_call(name: str) -> dict[str, Any]:
        call = _Call(function, arguments())
        return {**prepare(name), f"fullshard {function.__qualname__}": call}

    names.set(multiprocessing.spawn, "get_preparation_data", prepare_and_call)


def _arrive(comm: CommChoice, cpu: bool) -> None:
    set_default_comm(comm)
    install(cpu=cpu)


_names = Replacements("install(): names of PyTorch's FSDP are fullshard's")


def install(*, cpu: bool = False) -> None:
    """Make names of ``torch.distributed.fsdp`` resolve to fullshard, until `uninstall`.

    Call it before the program shards anything, preferably before it imports libraries that do.
    Processes that `multiprocessing` starts afterwards install as well. A second call does nothing.

    cpu: also have Accelerate and Lightning, which shard on accelerators alone, do so on CPUs. They must not
        have begun yet. Raises StateError if there is an accelerator.
    Raises StateError if PyTorch's FSDP was applied to a module in this process already: one program
    would then run on two engines.
    """
    if cpu:
        shard_on_cpus()
    if _names:
        return
    originals: dict[int, Any] = {}
    # Everything is imported before the first name is set: PyTorch's engine keeps its own names, and
    # a name in a module that is not there yet could not be set.
    for package in _PACKAGES:
        parent = importlib.import_module(package)
        for info in pkgutil.walk_packages(parent.__path__, f"{package}."):
            importlib.import_module(info.name)
    importlib.import_module(_REPLICATE)
    _refuse_if_in_use()
    for module_name, names in _REPLACED.items():
        module = sys.modules[module_name]
        for name, ours in names.items():
            if hasattr(module, name):  # older versions lack some
                originals[id(getattr(module, name))] = ours
                _names.set(module, name, ours)
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith((f"{_ENGINE}.", "fullshard.")):
            continue  # those keep their own names
        for name, value in list(getattr(module, "__dict__", {}).items()):
            ours = originals.get(id(value))
            if ours is not None:
                _names.set(module, name, ours)
    call_in_spawned(_names, _arrive, lambda: (default_comm(), is_sharding_on_cpus()))


def is_installed() -> bool:
    """Whether names resolve to fullshard now."""
    return bool(_names)


def uninstall() -> None:
    """Restore every name that `install` set. What fullshard has sharded stays sharded."""
    shard_as_libraries_do()
    _names.undo()
    if flat_states():  # made while torch had our class itself
        recognise(FullyShardedDataParallel)


def _wrappers() -> list[Any]:
    """Return the instances of PyTorch's wrapper class that are alive."""
    kind = sys.modules[f"{_FSDP1}.fully_sharded_data_parallel"].FullyShardedDataParallel
    return [each for each in gc.get_referrers(kind) if type(each) is kind]


def _refuse_if_in_use() -> None:
    classes = sys.modules[f"{_ENGINE}._fully_shard"].get_cls_to_fsdp_cls()
    classes = [*classes, *getattr(sys.modules[_REPLICATE], "cls_to_replicate_cls", ())]
    if _wrappers():
        gc.collect()  # those that nobody uses any more do not count
    classes += {type(each.module) for each in _wrappers()}
    if classes:
        names = ", ".join(sorted(cls.__name__ for cls in classes))
        raise StateError(
            f"PyTorch's FSDP was applied in this process already (to {names}), so fullshard cannot "
            "take its place. Call fullshard.install() before anything is sharded."
        )
