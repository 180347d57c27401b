"""What DCP's writer asks for, of a checkpoint of ours: plan, metadata and values, a part at a time.

Keys are those of ``{"model": ..., "optim": ..., "step": ...}`` with the state dicts that
``torch.distributed.checkpoint.state_dict.get_state_dict`` returns, and the keys of extra state besides.
"""

import dataclasses
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    FileSystemWriter,
    Metadata,
    SavePlan,
    SavePlanner,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fullshard.checkpoint.read import SavedState, Wanted
from fullshard.checkpoint.values import MODULE_STATES, RNG, decoded, items, module_state_trees
from fullshard.errors import CheckpointError
from fullshard.offline.opening import Progress
from fullshard.plan.boxes import Box, in_rows, whole_box

_PART_NBYTES = 64 << 20
_Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor of the source, by its name there, or a value."""

    path: _Path
    tensor: str | None
    value: Any = None

    @property
    def key(self) -> str:
        return ".".join(map(str, self.path))


def leaves_of(state: SavedState, weights_only: bool) -> list[_Leaf]:
    found = []
    for name, tensor in state.tensors.items():
        for each in (name, *tensor.aliases):
            section, _, rest = each.partition("/")
            if section.partition(".")[0] == "model":
                found.append(_Leaf((*section.split(".", 1), rest), name))
            elif section.partition(".")[0] == "optimizer" and not weights_only:
                parameter, _, key = rest.rpartition("/")
                found.append(_Leaf((*_optim(section), "state", parameter, key), name))
    found += _module_leaves(state)
    if not weights_only:
        found += _value_leaves(state)
    if not found:
        raise CheckpointError(f"{state.location}: has nothing to export.")
    return found


def _optim(section: str) -> tuple[str, ...]:
    return ("optim", *section.split(".", 1)[1:])


def _module_leaves(state: SavedState) -> Iterator[_Leaf]:
    """Yield what modules keep of their own, where PyTorch's state dicts have it."""
    first: dict[_Path, Any] = {}
    for sections in module_state_trees(state.values):
        for section, states in items(sections):
            for name, tree in items(states):
                first.setdefault((*section.split(".", 1), name), tree)
    for path, tree in first.items():
        yield from _of_tree(path, tree, state)


def _value_leaves(state: SavedState) -> Iterator[_Leaf]:
    values = state.values
    for section, own in values.get("optimizers", {}).items():
        way = _optim(section)
        for name, kept in own.get("scalars", {}).items():
            for key, value in _plain(kept, state).items():
                yield _Leaf((*way, "state", name, key), None, value)
        for number, group in enumerate(_plain(own.get("groups", []), state)):
            options = {**group["options"], "params": group["params"]}
            for key, value in options.items():
                yield _Leaf((*way, "param_groups", number, key), None, value)
    # States of random generators are of this many ranks, and of no use to others.
    for key, tree in values.get("extra", {}).items():
        if key not in (RNG, MODULE_STATES):
            yield from _of_tree((key,), tree, state)
    for key, by_rank in values.get("extra_by_rank", {}).items():
        if key in (RNG, MODULE_STATES):
            continue
        for rank, tree in by_rank.items():
            yield _Leaf(("extra_by_rank", key, rank), None, _plain(tree, state))
    for key in ("step", "metadata"):
        if values.get(key) and key not in values.get("extra", {}):
            yield _Leaf((key,), None, _plain(values[key], state))


def _of_tree(path: _Path, tree: Any, state: SavedState) -> Iterator[_Leaf]:
    """Yield what is in nested dicts of an encoded value, tensors by their names."""
    if isinstance(tree, dict) and tree and not any(key.startswith("$") for key in tree):
        for key, each in tree.items():
            yield from _of_tree((*path, key), each, state)
    elif isinstance(tree, dict) and isinstance(tree.get("$tensor"), str):
        yield _Leaf(path, tree["$tensor"])
    else:
        yield _Leaf(path, None, _plain(tree, state))


def _plain(tree: Any, state: SavedState) -> Any:
    """Return a value that DCP reads without trust: of NumPy's arrays, tensors."""
    value = decoded(tree, lambda name: _read(state, name, whole_box(state.tensors[name].shape)))
    return _without_arrays(value)


def _without_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_arrays(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_without_arrays(each) for each in value])
    return torch.from_numpy(value) if isinstance(value, numpy.ndarray) else value


def _read(state: SavedState, name: str, box: Box) -> torch.Tensor:
    value = torch.empty(box.shape, dtype=state.tensors[name].dtype, device="cpu")
    if value.numel():
        state.read([Wanted(name, box, value)])
    return value


class Planner(SavePlanner):
    """Gives DCP's writer what it asks for, a part at a time."""

    def __init__(self, state: SavedState, leaves: list[_Leaf], progress: Progress) -> None:
        self._state, self._progress = state, progress
        self._data: dict[MetadataIndex, Callable[[], Any]] = {}
        self._done = self.total = self.num_tensors = 0
        self.items: list[WriteItem] = []
        self.metadata = Metadata({})
        paths: dict[str, _Path] = {}
        for leaf in leaves:
            if leaf.key in paths:
                raise CheckpointError(f"{state.location}: two things would be named {leaf.key}.")
            paths[leaf.key] = leaf.path
            self._add(leaf)
        self.metadata.planner_data = paths

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data: torch.Tensor | io.BytesIO = self._data[write_item.index]()
        if isinstance(data, torch.Tensor):
            self._done += data.numel() * data.itemsize
            if self._progress is not None:
                self._progress(self._done, self.total)
        return data

    def _add(self, leaf: _Leaf) -> None:
        if leaf.tensor is not None:
            tensor = self._state.tensors[leaf.tensor]
            name = leaf.tensor

            def read(box: Box) -> torch.Tensor:
                return _read(self._state, name, box)

            self._add_tensor(leaf.key, tuple(tensor.shape), tensor.dtype, read)
        elif isinstance(leaf.value, torch.Tensor):
            value = leaf.value
            self._add_tensor(leaf.key, tuple(value.shape), value.dtype, lambda _: value)
        else:
            index = MetadataIndex(leaf.key)
            self._data[index] = lambda: _saved(leaf.value)
            self.items.append(WriteItem(index, WriteItemType.BYTE_IO))
            self.metadata.state_dict_metadata[leaf.key] = BytesStorageMetadata()

    def _add_tensor(
        self,
        key: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        read: Callable[[Box], torch.Tensor],
    ) -> None:
        self.num_tensors += 1
        self.total += math.prod(shape) * dtype.itemsize
        properties = TensorProperties(dtype=dtype)
        chunks: list[ChunkStorageMetadata] = []
        for box in in_rows(whole_box(shape), dtype.itemsize, _PART_NBYTES):
            chunk = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
            index = MetadataIndex(key, chunk.offsets, len(chunks))
            data = TensorWriteData(chunk, properties, torch.Size(shape))
            self._data[index] = lambda box=box: read(box)  # type: ignore[misc]
            self.items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            chunks.append(chunk)
        self.metadata.state_dict_metadata[key] = TensorStorageMetadata(
            properties, torch.Size(shape), chunks
        )

    # What else the interface has is for state dicts in memory.

    def set_up_planner(self, *_: Any, **__: Any) -> None: ...

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self.items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan


def _saved(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer


def write(path: Path, planner: Planner) -> None:
    writer = FileSystemWriter(path)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(plan, planner).wait()
    writer.finish(metadata, [results])
