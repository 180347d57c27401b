"""From any form into ours, divided as for any number of ranks: `convert_checkpoint`."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fullshard.checkpoint.drafts import new_tag
from fullshard.checkpoint.folder import Location, folder_at
from fullshard.checkpoint.manifest import SavedTensor
from fullshard.checkpoint.read import SavedState
from fullshard.checkpoint.save import SavedCheckpoint, commit
from fullshard.checkpoint.values import MODULE_STATES
from fullshard.checkpoint.write import ToWrite, WrittenFiles, write_files
from fullshard.convert.opening import (
    Progress,
    counting,
    form_of,
    naming_disk_faults,
    open_state,
    read_box,
)
from fullshard.errors import CheckpointError
from fullshard.plan.boxes import Cut, box_after, in_rows, whole_box
from fullshard.state.host_memory import bytes_of

# Of a tensor that one thread of a few has in memory.
_PART_NBYTES = 32 << 20
# Smaller tensors are not divided.
_WORTH_DIVIDING_NBYTES = 1 << 20


def convert_checkpoint(
    source: Location,
    target: Location,
    *,
    ranks: int = 1,
    weights_only: bool = False,
    overwrite: bool = False,
    progress: Progress = None,
) -> SavedCheckpoint:
    """Write what was saved as a checkpoint of our own form. No ranks and no model are needed.

        convert_checkpoint("dcp/step-100", "runs/a/step-100")

    source: a checkpoint, to divide it anew; a directory of torch.distributed.checkpoint, a file of
    torch.save, safetensors. ranks: files are divided as this many would have written them, so that as
    many read their own. weights_only: leave out optimizers and extra state. Memory: a few parts of
    tensors, however large the checkpoint is.

    Raises CheckpointError if the source cannot be read or the target cannot be written; what was written
    is removed then.
    """
    if type(ranks) is not int or ranks < 1:
        raise CheckpointError(f"ranks is {ranks!r}: must be a whole number from 1 on.")
    begun = time.perf_counter()
    with naming_disk_faults(target), open_state(source) as state:
        tensors = _kept(state, weights_only)
        draft = folder_at(target).draft(tag := new_tag(), overwrite=overwrite)
        try:
            count = counting(progress, sum(tensor.nbytes for tensor in tensors.values()))

            def data_of(item: ToWrite) -> memoryview:
                data = bytes_of(read_box(state, item.name, item.box))
                count(item.nbytes)
                return data

            facts = {name: _facts(tensor, ranks) for name, tensor in tensors.items()}
            written: list[tuple[WrittenFiles, Mapping[str, SavedTensor]]] = []
            for rank in range(ranks):
                items = list(_items(tensors, rank, ranks))
                files = write_files(draft.folder, rank, tag, items, data_of)
                written.append((files, facts))
            values = _values(state, weights_only)
            values["converted_from"] = f"{form_of(state)} {state.location}"
            nbytes = commit(draft, target, written, values)
        except BaseException:
            draft.give_up()
            raise
        seconds = time.perf_counter() - begun
        return SavedCheckpoint(
            folder_at(target).location, values.get("step"), nbytes, seconds, seconds
        )


def _kept(state: SavedState, weights_only: bool) -> dict[str, SavedTensor]:
    def is_kept(name: str) -> bool:
        section, _, rest = name.partition("/")
        if section == "extra":
            return not weights_only or rest.partition("/")[0].partition("@")[0] == MODULE_STATES
        return not weights_only or section.partition(".")[0] == "model"

    kept = {name: tensor for name, tensor in state.tensors.items() if is_kept(name)}
    if not weights_only and _is_by_number(state):
        raise CheckpointError(
            f"{state.location}: has optimizer state by numbers of parameters, whose names only a model "
            "tells. Load it into one and save that, or take the weights alone."
        )
    if not kept:
        raise CheckpointError(f"{state.location}: has no tensors to convert.")
    return kept


def _is_by_number(state: SavedState) -> bool:
    optimizers = state.values.get("optimizers", {}).values()
    groups = [group for own in optimizers for group in own["groups"]]
    found = {name for group in groups for name in group["params"] if name.isdigit()}
    of_models = (name.partition("/")[2] for name in state.tensors if name.startswith("model"))
    return bool(found.difference(of_models))  # those of a ParameterList are named so


def _items(tensors: Mapping[str, SavedTensor], rank: int, ranks: int) -> Iterator[ToWrite]:
    """Yield the parts that one of the ranks would write: its rows of each tensor, small ones in turn."""
    for number, (name, tensor) in enumerate(tensors.items()):
        shape = tuple(tensor.shape)
        own = whole_box(shape)
        if tensor.nbytes >= _WORTH_DIVIDING_NBYTES:
            own = box_after(shape, [Cut(0, rank, ranks)])
        elif number % ranks != rank:
            continue
        for box in in_rows(own, tensor.dtype.itemsize, _PART_NBYTES):
            if box.numel:
                view = torch.empty(box.shape, dtype=tensor.dtype, device="meta")
                yield ToWrite(name, shape, box, view)


def _facts(tensor: SavedTensor, ranks: int) -> SavedTensor:
    is_divided = tensor.nbytes >= _WORTH_DIVIDING_NBYTES and ranks > 1
    placement = f"dim 0 over {ranks}" if is_divided else tensor.placement
    return SavedTensor(tuple(tensor.shape), tensor.dtype, tensor.aliases, placement)


def _values(state: SavedState, weights_only: bool) -> dict[str, Any]:
    values = dict(state.values)
    if weights_only:
        values["optimizers"] = {}
        for key in ("extra", "extra_by_rank"):
            values[key] = {k: v for k, v in values.get(key, {}).items() if k == MODULE_STATES}
    values.setdefault("extra_by_rank", {})
    values.setdefault("metadata", {})
    return values
