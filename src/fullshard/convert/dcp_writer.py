"""What DCP's writer asks for, of a checkpoint of ours: plan, metadata and values, a part at a time.

Apart from `dcp_export`, as importing torch.distributed.checkpoint takes longer than all of fullshard.
"""

import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    DefaultSavePlanner,
    FileSystemWriter,
    Metadata,
    SavePlan,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fullshard.checkpoint.manifest import SavedTensor
from fullshard.checkpoint.read import SavedState
from fullshard.convert.dcp_export import KeyPath, Leaf
from fullshard.convert.opening import Progress, counting, parts_of, read_box
from fullshard.errors import CheckpointError
from fullshard.plan.boxes import Box, whole_box


class Planner(DefaultSavePlanner):
    """Gives DCP's writer what it asks for, a part at a time."""

    def __init__(self, state: SavedState, leaves: list[Leaf], progress: Progress) -> None:
        super().__init__()
        self._state = state
        self._data: dict[MetadataIndex, Callable[[], Any]] = {}
        self.total = self.num_tensors = 0
        self.items: list[WriteItem] = []
        self.metadata = Metadata({})
        paths: dict[str, KeyPath] = {}
        for leaf in leaves:
            if leaf.key in paths:
                raise CheckpointError(f"{state.location}: two things would be named {leaf.key}.")
            paths[leaf.key] = leaf.path
            self._add(leaf)
        self.metadata.planner_data = paths
        self._count = counting(progress, self.total)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data: torch.Tensor | io.BytesIO = self._data[write_item.index]()
        if isinstance(data, torch.Tensor):
            self._count(data.numel() * data.itemsize)
        return data

    def _add(self, leaf: Leaf) -> None:
        if leaf.tensor is not None:
            name = leaf.tensor
            self._add_tensor(
                leaf.key, self._state.tensors[name], lambda box: read_box(self._state, name, box)
            )
        elif isinstance(leaf.value, torch.Tensor):
            self._add_tensor(
                leaf.key,
                leaf.value,
                lambda box: leaf.value[box.within(whole_box(leaf.value.shape))],
            )
        else:
            index = MetadataIndex(leaf.key)
            self._data[index] = lambda: _saved(leaf.value)
            self.items.append(WriteItem(index, WriteItemType.BYTE_IO))
            self.metadata.state_dict_metadata[leaf.key] = BytesStorageMetadata()

    def _add_tensor(
        self, key: str, tensor: SavedTensor | torch.Tensor, read: Callable[[Box], torch.Tensor]
    ) -> None:
        shape = torch.Size(tensor.shape)
        self.num_tensors += 1
        self.total += tensor.nbytes
        properties = TensorProperties(dtype=tensor.dtype)
        chunks: list[ChunkStorageMetadata] = []
        for box in parts_of(tensor):
            chunk = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
            index = MetadataIndex(key, chunk.offsets, len(chunks))
            data = TensorWriteData(chunk, properties, shape)
            self._data[index] = functools.partial(read, box)
            self.items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            chunks.append(chunk)
        self.metadata.state_dict_metadata[key] = TensorStorageMetadata(properties, shape, chunks)


def _saved(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer


def write(path: Path, planner: Planner) -> None:
    writer = FileSystemWriter(path)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(SavePlan(planner.items))
    (plan,) = writer.prepare_global_plan([plan])
    results = writer.write_data(plan, planner).wait()
    writer.finish(planner.metadata, [results])
