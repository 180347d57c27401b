"""`install()`: PyTorch's FSDP2 names resolve to fullshard, in libraries that know nothing of it.

The modules of ``torch.distributed.fsdp`` stay; names in them are set to ours, and so are names that
other modules have imported from them already, torch's own among them (distributed checkpoint,
pipelining, compile), so that their ``isinstance`` checks recognise our classes. What fullshard does
not replace (``FullyShardedDataParallel``) keeps running on PyTorch's engine.
"""

import contextlib
import importlib
import multiprocessing.spawn
import pkgutil
import sys
import types
from collections.abc import Iterator
from typing import Any

from fullshard import fsdp2, fsdp_module, interop, meshes, policies
from fullshard.comm import collectives
from fullshard.errors import StateError
from fullshard.fsdp_module import FSDPModule, ReplicateModule
from fullshard.replicate import replicate
from fullshard.sharding import set_default_comm

_PACKAGES = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")
_ENGINE = "torch.distributed.fsdp._fully_shard"
_REPLICATE = "torch.distributed._composable.replicate_with_fsdp"


def get_cls_to_fsdp_cls() -> dict[type, type]:
    """Return the sharded class of every class that has one."""
    return fsdp_module.sharded_classes[FSDPModule]


@contextlib.contextmanager
def disable_fsdp_module_new_init() -> Iterator[None]:
    """Let sharded classes be constructed as they are, for ``torch.compile`` unpickling guards."""
    with fsdp_module.constructing_as_is():
        yield


# Where PyTorch defines each name, and what takes its place. Packages above re-export some.
_REPLACED: dict[str, dict[str, Any]] = {
    f"{_ENGINE}._fully_shard": {
        "fully_shard": fsdp2.fully_shard,
        "FSDPModule": FSDPModule,
        "UnshardHandle": fsdp_module.UnshardHandle,
        "register_fsdp_forward_method": fsdp_module.register_fsdp_forward_method,
        "share_comm_ctx": fsdp_module.share_comm_ctx,
        "get_cls_to_fsdp_cls": get_cls_to_fsdp_cls,
        "disable_fsdp_module_new_init": disable_fsdp_module_new_init,
    },
    f"{_ENGINE}._fsdp_api": {
        "MixedPrecisionPolicy": policies.MixedPrecisionPolicy,
        "OffloadPolicy": policies.OffloadPolicy,
        "CPUOffloadPolicy": policies.CPUOffloadPolicy,
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
        "TrainingState": policies.TrainingState,
    },
    f"{_ENGINE}._fsdp_init": {"_get_mesh_info": meshes.mesh_info},
    f"{_ENGINE}._fsdp_state": {"_get_module_fsdp_state": interop.state_view},
    _REPLICATE: {
        "replicate": replicate,
        "ReplicateModule": ReplicateModule,
        "_get_module_replicate_state": interop.state_view,
        "cls_to_replicate_cls": fsdp_module.sharded_classes[ReplicateModule],
    },
}


class _Installed:
    """Travels with every process that `multiprocessing` starts, and installs where it arrives.

    That is before the process imports the main program again.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (set_default_comm(None),)


def _arrive(comm: policies.CommChoice) -> _Installed:
    set_default_comm(comm)
    install()
    return _Installed()


_undo: list[tuple[types.ModuleType, str, Any]] = []


def install() -> None:
    """Make ``torch.distributed.fsdp``'s FSDP2 names resolve to fullshard, until `uninstall`.

    Call it before the program shards anything, best before it imports the libraries that do. What
    `multiprocessing` starts from then on installs as well. Calling it again does nothing. Raises StateError if PyTorch's ``fully_shard`` was applied to a
    module in this process already: two engines would then hold parts of one program.
    """
    if _undo:
        return
    originals: dict[int, Any] = {}
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
                _set(module, name, ours)
    for module_name, module in list(sys.modules.items()):
        if _is_engine(module_name):
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            ours = originals.get(id(value))
            if ours is not None:
                _set(module, name, ours)
    prepare = multiprocessing.spawn.get_preparation_data
    _set(
        multiprocessing.spawn,
        "get_preparation_data",
        lambda name: {**prepare(name), "fullshard": _Installed()},
    )


def uninstall() -> None:
    """Restore every name that `install` set. Modules sharded meanwhile stay as they are."""
    while _undo:
        module, name, value = _undo.pop()
        setattr(module, name, value)


def _set(module: types.ModuleType, name: str, value: Any) -> None:
    _undo.append((module, name, vars(module)[name]))
    setattr(module, name, value)


def _is_engine(module_name: str) -> bool:
    """Whether a module is part of PyTorch's engine, which goes on using its own names."""
    return module_name.startswith((f"{_ENGINE}.", "fullshard."))


def _refuse_if_in_use() -> None:
    classes = sys.modules[f"{_ENGINE}._fully_shard"].get_cls_to_fsdp_cls()
    classes = [*classes, *getattr(sys.modules[_REPLICATE], "cls_to_replicate_cls", ())]
    if classes:
        names = ", ".join(sorted(cls.__name__ for cls in classes))
        raise StateError(
            f"PyTorch's fully_shard or replicate was applied in this process already (to {names}), so "
            "fullshard cannot take its place. Call fullshard.install() before anything is sharded."
        )
