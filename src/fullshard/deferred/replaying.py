"""Computing what was recorded: the same operators on the same values, one memory at a time."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fullshard.deferred.record import Operation, Record, View, last_uses
from fullshard.torch_private import pytree

Storages = dict[int, torch.UntypedStorage]


def tensor_of(view: View, storages: Mapping[int, torch.UntypedStorage]) -> torch.Tensor:
    """Return a tensor over the storage of its memory."""
    storage = storages[view.memory]
    tensor = torch.empty(0, dtype=view.dtype, device=storage.device)
    return tensor.set_(storage, view.offset, view.shape, view.strides)


@torch.no_grad()
def replay(
    record: Record,
    operations: Sequence[Operation],
    done_with: Callable[[int, torch.UntypedStorage], object],
) -> None:
    """Compute operations of a record in order.

    done_with: is called with each memory and its storage after the last operation that touches it. Memory
        is dropped then, and wherever its contents are not needed until they are overwritten.
    """
    storages: Storages = {}
    last = {memory: n for n, operation in enumerate(operations) for memory in operation.touched}
    for number, (operation, ended) in enumerate(
        zip(operations, last_uses(operations), strict=True)
    ):
        for memory in operation.touched - operation.creates:
            if memory not in storages:  # a constant, or about to be overwritten
                storages[memory] = _begin(record, memory)
        _compute(operation, storages)
        for memory in ended:
            storage = storages.pop(memory)
            if last[memory] == number:
                done_with(memory, storage)


def _begin(record: Record, memory: int) -> torch.UntypedStorage:
    constant = record.constants.get(memory)
    if constant is None:
        return torch.UntypedStorage(record.nbytes[memory])
    return constant.clone()  # operations may write to it


def _compute(operation: Operation, storages: Storages) -> None:
    args, kwargs = pytree.tree_map_only(
        View, lambda view: tensor_of(view, storages), (operation.args, operation.kwargs)
    )
    result = operation.function(*args, **kwargs)
    if not operation.creates:
        return
    for view, tensor in zip(operation.outputs, tensors_in(result), strict=True):
        if view.memory not in operation.creates or view.memory in storages:
            continue
        if tuple(tensor.stride()) != view.strides or tensor.storage_offset() != view.offset:
            arranged = torch.empty_strided(
                view.shape, view.strides, dtype=view.dtype, device=tensor.device
            )
            storages[view.memory] = arranged.copy_(tensor).untyped_storage()
        else:
            storages[view.memory] = tensor.untyped_storage()


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists and dicts, in order."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
