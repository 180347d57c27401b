"""What `fullshard run` says of a script: what was sharded, and why nothing was.

A script may be written for FSDP and still train otherwise, as its library passes FSDP by, or as it was
started without ranks. Nothing in its output would tell.
"""

import functools
import sys
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.drop_in import install
from fullshard.drop_in.on_cpu import accelerate_wants_fsdp, begun, is_sharding_on_cpus
from fullshard.drop_in.traces import Traces, Wanted
from fullshard.engine.module_state import is_anything_sharded
from fullshard.engine.observer import PassWatcher, watchers
from fullshard.fsdp1.module import FullyShardedDataParallel
from fullshard.fsdp2.module import sharded_classes
from fullshard.process_hooks import HAS_FORKED, MODULES, Replacements, before_exit
from fullshard.watch.describe import Description, UnitDescription, describe, format_nbytes

_NOTHING = "nothing was sharded."
_START = "Start ranks: fullshard run --ranks 2 SCRIPT, or torchrun --nproc-per-node 2 -m fullshard.run SCRIPT."


class Account(PassWatcher):
    """Watches a program from its start, and says on rank 0 what it has sharded, once a model.

    rank, num_ranks: as far as the launcher has said; 0 if it has not.
    traces: tells at the end of what it has recorded.
    """

    def __init__(self, rank: int = 0, num_ranks: int = 0, traces: Traces | None = None) -> None:
        self._rank, self._num_ranks, self._traces = rank, num_ranks, traces
        self._told: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._running: weakref.ref[nn.Module] | None = None
        self._has_told = False
        self._has_ddp = False
        self._has_children = False
        watchers.append(self)
        MODULES.add(self._look_for_ddp, "fullshard.run says whether the program used DDP")
        # Processes that `multiprocessing` starts tell of theirs; this one cannot know then.
        names = Replacements("processes that the program starts say what they have sharded")
        install.call_in_spawned(names, _begin_in_child, self._note_child)
        HAS_FORKED.add(self._note_child, "fullshard.run knows nothing of what children shard")

    def forward_begins(self, state: Any, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Remember the root."""
        self._running = weakref.ref(module)

    def forward_ends(self, iteration: Any, output: Any) -> None:
        """Tell of the root, when what is in effect is settled."""
        module = self._running() if self._running is not None else None
        if module is None or module in self._told:
            return
        self._told.add(module)
        self._has_told = True
        self._rank = dist.get_rank()
        if self._rank == 0:
            _say(summary(_class_of(module), describe(module)))

    def end(self, *, has_failed: bool = False) -> None:
        """Say that nothing was sharded, with the reason, if that is so. For the end of the program.

        has_failed: by an exception, perhaps before it came to shard.
        """
        if dist.is_available() and dist.is_initialized():
            self._rank = dist.get_rank()
        if self._rank == 0 and not self._has_told and (said := self._untold(has_failed)):
            _say(said)
        if self._rank == 0 and self._traces is not None:
            for said in self._traces.said():
                _say(said)

    def _look_for_ddp(self, module: nn.Module, name: str, submodule: Any) -> None:
        self._has_ddp |= isinstance(module, nn.parallel.DistributedDataParallel)

    def _note_child(self) -> tuple[Any, ...]:
        """Return what an account in a child is to record."""
        self._has_children = True
        return (self._traces.wanted if self._traces is not None else None,)

    def _untold(self, has_failed: bool) -> str:
        """Say why no model was told of; empty if one may have been, or may have come to be."""
        if self._accelerate_passed_by():
            if is_sharding_on_cpus():
                return f"{_NOTHING} There was one process, and Accelerate shards among several. {_START}"
            how = "with DistributedDataParallel" if self._has_ddp else "on each rank by itself"
            return (
                f"{_NOTHING} Accelerate was to use FSDP, but does so on accelerators alone, so the model was trained "
                f"{how}. On CPUs, start it with --cpu: python -m fullshard.run --cpu SCRIPT."
            )
        if self._has_ddp:
            return (
                f"{_NOTHING} The model was trained with DistributedDataParallel: each rank held all of it. Where a "
                "library chose that, its own option for FSDP was not set, or needs another strategy."
            )
        if has_failed or self._has_children:  # one of them may have
            return ""
        if is_anything_sharded():
            return (
                "modules were sharded, but none of them ran a forward, so nothing is said of them."
            )
        if not install.is_installed():
            return f"{_NOTHING} The program called fullshard.uninstall(), and PyTorch's names were its own again."
        if self._num_ranks < 2 and not (dist.is_available() and dist.is_initialized()):
            return (
                f"{_NOTHING} The program left no process group, and called neither fully_shard nor "
                f"FullyShardedDataParallel. If it did not, {_START[0].lower()}{_START[1:]}"
            )
        return (
            f"{_NOTHING} The program called neither fully_shard nor FullyShardedDataParallel, by none of the names "
            "that torch.distributed.fsdp has for them."
        )

    def _accelerate_passed_by(self) -> bool:
        """Whether Accelerate was to use FSDP and has not, as there is no accelerator."""
        state = sys.modules.get("accelerate.state")
        if state is None or torch.accelerator.is_available():
            return False
        kind = str(begun(state).get("distributed_type", ""))
        return accelerate_wants_fsdp() and kind.endswith((".MULTI_CPU", ".NO"))


def _begin_in_child(wanted: Wanted | None) -> None:
    """Keep an account in a process that `multiprocessing` has spawned, which ends by no exit function."""
    account = Account(traces=None if wanted is None else Traces(wanted))
    end = functools.partial(account.end, has_failed=True)
    before_exit(end, why="fullshard.run says what was sharded")


def _say(text: str) -> None:
    print(f"[fullshard] {text}", file=sys.stderr, flush=True)


def _class_of(module: nn.Module) -> str:
    """Return the name of a model's class, without what sharding makes of it."""
    if isinstance(module, FullyShardedDataParallel):
        module = module.module
    kind = type(module)
    made = (pair for pairs in sharded_classes.values() for pair in pairs.items())
    return next((own.__name__ for own, its in made if its is kind), kind.__name__)


def summary(name: str, description: Description) -> str:
    """Say in one line what a model is divided into, and over what.

    Llama: 9 units, sharded over 2 ranks (peer memory); this rank holds 19.7 MiB of parameters
    """
    units = description.units
    over = " and ".join(dict.fromkeys(_over(unit) for unit in units))
    held = format_nbytes(sum(unit.shard_nbytes for unit in units))
    count = f"{len(units)} unit{'s' * (len(units) != 1)}"
    return f"{name}: {count}, {over}; this rank holds {held} of parameters"


def _over(unit: UnitDescription) -> str:
    shards, replicas = unit.shard_size, unit.replicate_size
    if shards == 1:
        return f"replicated on {replicas} ranks" if replicas > 1 else "whole on 1 rank"
    text = f"sharded over {shards} ranks ({unit.communication})"
    return f"{text}, {replicas} times" if replicas > 1 else text
