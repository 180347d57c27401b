"""Into a directory of torch.distributed.checkpoint: `export_dcp`.

Keys are those of ``{"model": ..., "optim": ..., "step": ...}`` with the state dicts that
``torch.distributed.checkpoint.state_dict.get_state_dict`` returns, and the keys of extra state besides.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from fullshard.checkpoint.dcp import METADATA
from fullshard.checkpoint.drafts import new_tag
from fullshard.checkpoint.folder import Location, disk_path
from fullshard.checkpoint.read import SavedState
from fullshard.checkpoint.values import MODULE_STATES, RNG, decoded, items, module_state_trees
from fullshard.convert.export_folder import ExportFolder
from fullshard.convert.opening import Progress, naming_disk_faults, open_state, read_box
from fullshard.errors import CheckpointError
from fullshard.plan.boxes import whole_box

KeyPath = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ExportedState:
    """What has been written. num_tensors, nbytes: of tensors; each name of a tied one has its own."""

    path: Path
    num_tensors: int
    nbytes: int


def export_dcp(
    source: Location,
    path: str | Path,
    *,
    weights_only: bool = False,
    overwrite: bool = False,
    progress: Progress = None,
) -> ExportedState:
    """Write a checkpoint as a directory that ``torch.distributed.checkpoint.load`` reads.

        export_dcp("runs/a/step-100", "dcp/step-100")

    No ranks and no model are needed. Memory: a part of a tensor. States of random generators stay out.
    weights_only: leave out optimizers and extra state. overwrite: replace a directory of DCP of this name, as a whole.

    Raises CheckpointError if the source cannot be read or the target cannot be written; what was written
    is removed then.
    """
    # Here: torch.distributed.checkpoint takes longer to import than all of fullshard.
    from fullshard.convert.dcp_writer import Planner, write

    target = disk_path(path, "an export")
    with open_state(source) as state:
        leaves = _leaves_of(state, weights_only)
        folder = _DcpFolder(target, new_tag(), overwrite=overwrite)
        try:
            planner = Planner(state, leaves, progress)
            with torch.no_grad(), naming_disk_faults(target):
                write(folder.path, planner)
            folder.finish()
        except BaseException:
            folder.give_up()
            raise
        return ExportedState(target, planner.num_tensors, planner.total)


class _DcpFolder(ExportFolder):
    def is_known(self, name: str) -> bool:
        return name == METADATA or name.endswith(".distcp")


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of the source, by its name there, or a value."""

    path: KeyPath
    tensor: str | None
    value: Any = None

    @property
    def key(self) -> str:
        return ".".join(map(str, self.path))


def _leaves_of(state: SavedState, weights_only: bool) -> list[Leaf]:
    found = []
    for name, tensor in state.tensors.items():
        for each in (name, *tensor.aliases):
            section, _, rest = each.partition("/")
            if section.partition(".")[0] == "model":
                found.append(Leaf((*section.split(".", 1), rest), name))
            elif section.partition(".")[0] == "optimizer" and not weights_only:
                parameter, _, key = rest.rpartition("/")
                found.append(Leaf((*_optim(section), "state", parameter, key), name))
    found += _module_leaves(state)
    if not weights_only:
        found += _value_leaves(state)
    if not found:
        raise CheckpointError(f"{state.location}: has nothing to export.")
    return found


def _optim(section: str) -> tuple[str, ...]:
    return ("optim", *section.split(".", 1)[1:])


def _module_leaves(state: SavedState) -> Iterator[Leaf]:
    """Yield what modules keep of their own, where PyTorch's state dicts have it."""
    first: dict[KeyPath, Any] = {}
    for sections in module_state_trees(state.values):
        for section, states in items(sections):
            for name, tree in items(states):
                first.setdefault((*section.split(".", 1), name), tree)
    for path, tree in first.items():
        yield from _of_tree(path, tree, state)


def _value_leaves(state: SavedState) -> Iterator[Leaf]:
    values = state.values
    for section, own in values.get("optimizers", {}).items():
        way = _optim(section)
        for name, kept in own.get("scalars", {}).items():
            for key, value in _plain(kept, state).items():
                yield Leaf((*way, "state", name, key), None, value)
        for number, group in enumerate(_plain(own.get("groups", []), state)):
            options = {**group["options"], "params": group["params"]}
            for key, value in options.items():
                yield Leaf((*way, "param_groups", number, key), None, value)
    # States of random generators are of this many ranks, and of no use to others.
    for key, tree in values.get("extra", {}).items():
        if key not in (RNG, MODULE_STATES):
            yield from _of_tree((key,), tree, state)
    for key, by_rank in values.get("extra_by_rank", {}).items():
        if key in (RNG, MODULE_STATES):
            continue
        for rank, tree in by_rank.items():
            yield Leaf(("extra_by_rank", key, rank), None, _plain(tree, state))
    for key in ("step", "metadata"):
        if values.get(key) and key not in values.get("extra", {}):
            yield Leaf((key,), None, _plain(values[key], state))


def _of_tree(path: KeyPath, tree: Any, state: SavedState) -> Iterator[Leaf]:
    """Yield what is in nested dicts of an encoded value, tensors by their names."""
    if isinstance(tree, dict) and tree and not any(key.startswith("$") for key in tree):
        for key, each in tree.items():
            yield from _of_tree((*path, key), each, state)
    elif isinstance(tree, dict) and isinstance(tree.get("$tensor"), str):
        yield Leaf(path, tree["$tensor"])
    else:
        yield Leaf(path, None, _plain(tree, state))


def _plain(tree: Any, state: SavedState) -> Any:
    """Return a value that DCP reads without trust: of NumPy's arrays, tensors."""
    value = decoded(tree, lambda name: read_box(state, name, whole_box(state.tensors[name].shape)))
    return _without_arrays(value)


def _without_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_arrays(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_without_arrays(each) for each in value])
    return torch.from_numpy(value) if isinstance(value, numpy.ndarray) else value
