"""Lets libraries that shard on accelerators alone do so on CPUs: `install(cpu=True)`.

Where there is no accelerator, PyTorch's FSDP had little to offer, so libraries pass it by there:

    Accelerate (Trainer, TRL)   trains with DDP on several CPU ranks, and each rank by itself unless told
                                that it is to use CPUs
    Lightning                   refuses its FSDP strategy

Both decide by the kind of device, in one place each, which is changed here as soon as it is imported.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fullshard.errors import StateError
from fullshard.process_hooks import Replacements, add_finder, remove_finder

Change = Callable[[Any], None]
_names = Replacements("install(cpu=True): Accelerate and Lightning shard on CPUs")


def shard_on_cpus() -> None:
    """Have Accelerate and Lightning shard on this machine's CPUs, now or once they are imported.

    Raises StateError if there is an accelerator, which they would use.
    """
    if torch.accelerator.is_available():
        raise StateError(
            f"There is an accelerator ({torch.accelerator.current_accelerator(check_available=True)}), and libraries would use it. "
            "Hide it (CUDA_VISIBLE_DEVICES=''), or leave out cpu=True, or --cpu."
        )
    if is_sharding_on_cpus():
        return
    add_finder(_finder, why="install(cpu=True) changes libraries once they are imported")
    for name, change in _CHANGES.items():
        if name in sys.modules:
            change(sys.modules[name])


def is_sharding_on_cpus() -> bool:
    return _finder in sys.meta_path


def shard_as_libraries_do() -> None:
    """Undo `shard_on_cpus`."""
    remove_finder(_finder)
    _names.undo()


def _change_accelerate(state: Any) -> None:
    """Start every state on CPUs, and have those that are to use FSDP treated as an accelerator's."""
    begin, begin_whole = state.PartialState.__init__, state.AcceleratorState.__init__

    @functools.wraps(begin)
    def begin_on_cpus(self: Any, cpu: bool = True, **kwargs: Any) -> None:  # noqa: ARG001
        begin(self, True, **kwargs)
        _go_on_to_fsdp(self)

    @functools.wraps(begin_whole)
    def begin_whole_on_cpus(self: Any, *args: Any, **kwargs: Any) -> None:
        if begun(state):  # before anybody wanted FSDP, as Trainer's is
            _go_on_to_fsdp(state.PartialState())
        begin_whole(self, *args, **kwargs)

    def _go_on_to_fsdp(partial: Any) -> None:
        if accelerate_wants_fsdp() and partial.distributed_type == state.DistributedType.MULTI_CPU:
            # From here Accelerate goes on to DistributedType.FSDP. The device stays the CPU.
            partial.distributed_type = state.DistributedType.MULTI_GPU

    _names.set(state.PartialState, "__init__", begin_on_cpus)
    _names.set(state.AcceleratorState, "__init__", begin_whole_on_cpus)


def _change_plugin(dataclasses: Any) -> None:
    """Let the plugin build on CPUs what FSDP1's sync_module_states fills, where it knows accelerators alone."""
    plugin = dataclasses.FullyShardedDataParallelPlugin
    finish = plugin.__post_init__

    @functools.wraps(finish)
    def finish_on_cpus(self: Any) -> None:
        try:
            finish(self)
        except RuntimeError:  # its last step but for warnings
            if not self.sync_module_states:
                raise
            self.param_init_fn = _to_empty_on_cpu

    _names.set(plugin, "__post_init__", finish_on_cpus)


def _to_empty_on_cpu(module: Any) -> None:
    module.to_empty(device=torch.device("cpu"), recurse=False)


def begun(state: Any) -> dict[str, Any]:
    """Return what all of Accelerate's states share, empty before the first. state: its module of that name."""
    return dict(vars(state.PartialState)["_shared_state"])


def accelerate_wants_fsdp() -> bool:
    """Whether Accelerate was told to use FSDP: by its launcher, or by a plugin in the program."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true", "yes")


def _change_lightning(connector: Any) -> None:
    """Leave the check out that wants a GPU for FSDP, whose strategy is an object or "fsdp", "fsdp_..."."""
    names = ("_AcceleratorConnector", "_Connector")
    owner = next(getattr(connector, name) for name in names if hasattr(connector, name))
    name = "_check_strategy_and_fallback"
    check = vars(owner)[name]

    @functools.wraps(check)
    def check_others(self: Any) -> None:
        strategy = vars(self)["_strategy_flag"]
        is_named = isinstance(strategy, str) and strategy.split("_")[0] == "fsdp"
        if not is_named and type(strategy) is not connector.FSDPStrategy:
            check(self)

    _names.set(owner, name, check_others)


_CONNECTORS = ("trainer.connectors.accelerator_connector", "connector")  # Trainer's and Fabric's
_CHANGES: dict[str, Change] = {
    "accelerate.state": _change_accelerate,
    "accelerate.utils.dataclasses": _change_plugin,
    **{
        f"{package}.{_CONNECTORS[package.endswith('fabric')]}": _change_lightning
        for package in (
            "lightning.pytorch",
            "lightning.fabric",
            "pytorch_lightning",
            "lightning_fabric",
        )
    },
}


class _Finder(importlib.abc.MetaPathFinder):
    """Changes a module of `_CHANGES` once it has run."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        change = _CHANGES.get(fullname)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_change(module: types.ModuleType) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


_finder = _Finder()
