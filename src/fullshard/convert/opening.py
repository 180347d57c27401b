"""Opening whatever holds saved state, without a model: checkpoints, DCP, files of torch.save, safetensors.

Which tensors of foreign files are a model's and an optimizer's is told by the files alone. Where there are
``param_groups``, there is an optimizer, and its state beside them. Of the other dicts of tensors the one under a
usual key (model, state_dict) is the model, else the largest. Those with the same names are models as well if none
of them is under a usual key, or all are in a dict "model"; else they are extra state, as averages are.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.dcp import METADATA
from fullshard.checkpoint.drafts import SHARD_SUFFIX
from fullshard.checkpoint.folder import Folder, Location, folder_at
from fullshard.checkpoint.foreign import (
    GROUPS,
    USUAL,
    VALUES,
    ForeignFiles,
    ForeignState,
    clean_key,
    endings,
)
from fullshard.checkpoint.manager import latest_checkpoint
from fullshard.checkpoint.manifest import MANIFEST, SavedTensor
from fullshard.checkpoint.opening import opened
from fullshard.checkpoint.peers import said
from fullshard.checkpoint.read import Names, Reader, SavedState, Wanted, naming_malformed
from fullshard.checkpoint.values import encoded
from fullshard.convert.hf_files import WeightsReader, weights_of
from fullshard.errors import CheckpointError
from fullshard.plan.boxes import Box, in_rows, whole_box

PART_NBYTES = 64 << 20  # of a tensor that are in memory at a time
_OF_A_RUN = "checkpoints"  # where `fullshard train` keeps them in a run's folder
_Path = tuple[str | int, ...]

Progress = Callable[[int, int], object] | None  # bytes done so far, and in all


def counting(progress: Progress, total: int) -> Callable[[int], None]:
    """Return what threads call with the bytes of each part that is done, to tell the progress."""
    done, lock = 0, threading.Lock()

    def count(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            if progress is not None:
                progress(done, total)

    return count


@contextlib.contextmanager
def naming_disk_faults(path: object) -> Iterator[None]:
    """Say of errors of a disk that is written to which path they are of."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(said(error)) from error
    except RuntimeError as error:
        # From torch's writer of files, which tells nothing else.
        if "inline_container" not in str(error):
            raise
        raise CheckpointError(f"{path}: cannot be written. Check space and permissions.") from error


def open_state(path: Location) -> SavedState:
    """Open what was saved at a path, with all that is in it under names of ours.

    path: a checkpoint; a folder of checkpoints, or of a run of ``fullshard train``, of which the newest
    is taken; a directory of torch.distributed.checkpoint; a file of torch.save; safetensors. Raises
    CheckpointError if it is none of them, or cannot be read.
    """
    folder = checkpoint_at(folder_at(path))
    location = folder.location
    if isinstance(location, Path) and not _has_index(folder) and _has_weights(location):
        return WeightsReader(location, weights_of(location))
    state = opened(str(location))
    if isinstance(state, ForeignState):
        with naming_malformed(f"{state.location}: a value is"):
            names = _guessed_names(state.files)
        state.find(names)
        state.values["optimizers"] = _with_scalars(state.values["optimizers"], state)
        for name in [name for name in state.tensors if name.startswith(VALUES)]:
            del state.tensors[name]
    return state


def checkpoint_at(folder: Folder) -> Folder:
    """Return the newest checkpoint of a folder or of a run; the folder itself if it has none."""
    if not _has_index(folder):
        for parent in (folder, folder.child(_OF_A_RUN)):
            newest = latest_checkpoint(parent.location)
            if newest is not None:
                return folder_at(newest.path)
    return folder


def _with_scalars(tree: Any, state: SavedState) -> Any:
    """Return values in which step counters, which lie in files as tensors, are values."""
    if isinstance(tree, list):
        return [_with_scalars(each, state) for each in tree]
    if not isinstance(tree, dict):
        return tree
    name = tree.get("$tensor")
    if isinstance(name, str) and name.startswith(VALUES):
        return encoded(read_box(state, name, whole_box(())), name, lambda *_: None)
    return {key: _with_scalars(each, state) for key, each in tree.items()}


def read_box(state: SavedState, name: str, box: Box) -> torch.Tensor:
    """Return a box of a tensor, in host memory of its own."""
    value = torch.empty(box.shape, dtype=state.tensors[name].dtype, device="cpu")
    if value.numel():
        state.read([Wanted(name, box, value)])
    return value


def parts_of(tensor: SavedTensor | torch.Tensor) -> Iterator[Box]:
    """Cut a tensor into parts that are in memory at a time: rows, as many as fit."""
    return in_rows(whole_box(tensor.shape), tensor.dtype.itemsize, PART_NBYTES)


def form_of(state: SavedState) -> str:
    """Say what files a state is in, for readers."""
    if isinstance(state, Reader):
        return "fullshard checkpoint"
    if isinstance(state, WeightsReader):
        return "safetensors"
    return "torch.distributed.checkpoint" if Path(state.location).is_dir() else "torch.save"


def _has_index(folder: Folder) -> bool:
    return any(folder.size_of(name) is not None for name in (MANIFEST, METADATA))


def _has_weights(path: Path) -> bool:
    return path.suffix == SHARD_SUFFIX if path.is_file() else any(path.glob(f"*{SHARD_SUFFIX}"))


# Names in foreign files


def _guessed_names(files: ForeignFiles) -> Names:
    """Return the names to look for in files of others, for want of a model."""
    keys = {clean_key(key): key for key in files.paths}
    beginnings = {
        key.removesuffix(rest) for key in keys for rest in endings(key) if rest.startswith(GROUPS)
    }
    optimizers = {
        beginning: sorted(
            {
                *_with_state(keys, f"{beginning}state."),
                *_in_groups(files, keys, f"{beginning}{GROUPS}"),
            }
        )
        for beginning in beginnings
    }
    labels = _labels([tuple(b.rstrip(".").split(".")) for b in sorted(beginnings)])
    sections = {
        ("optimizer" if len(beginnings) == 1 else f"optimizer.{label}"): optimizers[beginning]
        for beginning, label in zip(sorted(beginnings), labels, strict=True)
    }
    of_optimizers = tuple(f"{b}{part}" for b in beginnings for part in ("state.", GROUPS))
    dicts = _dicts(files, {k: raw for k, raw in keys.items() if not k.startswith(of_optimizers)})
    return Names(
        _models(dicts),
        {section: [(name,) for name in names] for section, names in sections.items()},
        {str(path[0]) for path in files.paths.values()},
    )


def _with_state(keys: Iterable[str], beginning: str) -> set[str]:
    """Return the names that have state under keys with a beginning: of beginning + name + "." + state."""
    own = (key.removeprefix(beginning) for key in keys if key.startswith(beginning))
    return {key.rpartition(".")[0] for key in own}


def _in_groups(files: ForeignFiles, keys: Mapping[str, str], beginning: str) -> set[str]:
    """Return the names or numbers of the parameters that groups list, in one list or one by one."""
    found: set[str] = set()
    for key, raw in keys.items():
        if key == beginning:
            listed = [group.get("params") for group in files.value_of(raw)]
        elif key.startswith(f"{beginning}.") and key.endswith(".params"):
            listed = [files.value_of(raw)]
        else:
            continue
        found |= {clean_key(str(each)) for own in listed if isinstance(own, list) for each in own}
    return found


def _dicts(files: ForeignFiles, keys: Mapping[str, str]) -> dict[_Path, dict[str, int]]:
    """Return the sizes of tensors in bytes, by the path of the dict that holds them and their names."""
    found: dict[_Path, dict[str, int]] = {}
    for key, raw in keys.items():
        if raw in files.tensors:
            tensor, path = files.tensors[raw], files.paths[raw][:-1]
            name = key.removeprefix("".join(f"{part}." for part in path))
            found.setdefault(path, {})[name] = tensor.nbytes
    return found


def _models(dicts: Mapping[_Path, Mapping[str, int]]) -> dict[str, list[str]]:
    if not dicts:
        return {}
    usual = [path for path in dicts if "".join(f"{part}." for part in path) in USUAL]
    first = max(usual or dicts, key=lambda path: sum(dicts[path].values()))
    alike = [
        path
        for path, own in dicts.items()
        if path and (own.keys() == dicts[first].keys() or path[:-1] == first[:-1] == ("model",))
    ]
    if len(alike) < 2 or (usual and not all(path[:-1] == ("model",) for path in alike)):
        return {"model": [*dicts[first]]}
    labels = _labels([tuple(map(str, path)) for path in alike])
    return {f"model.{label}": [*dicts[path]] for path, label in zip(alike, labels, strict=True)}


def _labels(paths: Sequence[tuple[str, ...]]) -> list[str]:
    """Return a key for each path: its last part, or one before it, that differs in all of them."""
    for depth in range(1, min(map(len, paths), default=0) + 1):
        labels = [path[-depth] for path in paths]
        if len(set(labels)) == len(paths):
            return labels
    return [".".join(path) for path in paths]
