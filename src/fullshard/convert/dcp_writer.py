"""What DCP's writer asks for, of a checkpoint of ours: plan, metadata and values, a part at a time.

Apart from `dcp_export`, as importing torch.distributed.checkpoint takes longer than all of fullshard.
"""

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

from fullshard.checkpoint.read import SavedState
from fullshard.convert.dcp_export import KeyPath, Leaf
from fullshard.convert.opening import Progress, read_box
from fullshard.errors import CheckpointError
from fullshard.plan.boxes import Box, in_rows, whole_box

_PART_NBYTES = 64 << 20


class Planner(SavePlanner):
    """Gives DCP's writer what it asks for, a part at a time."""

    def __init__(self, state: SavedState, leaves: list[Leaf], progress: Progress) -> None:
        self._state, self._progress = state, progress
        self._data: dict[MetadataIndex, Callable[[], Any]] = {}
        self._done = self.total = self.num_tensors = 0
        self.items: list[WriteItem] = []
        self.metadata = Metadata({})
        paths: dict[str, KeyPath] = {}
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

    def _add(self, leaf: Leaf) -> None:
        if leaf.tensor is not None:
            tensor = self._state.tensors[leaf.tensor]
            name = leaf.tensor

            def read(box: Box) -> torch.Tensor:
                return read_box(self._state, name, box)

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
