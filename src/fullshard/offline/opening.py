"""Opening whatever holds saved state, without a model: checkpoints, DCP, files of torch.save, safetensors."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.dcp import METADATA
from fullshard.checkpoint.folder import SHARD_SUFFIX, Folder
from fullshard.checkpoint.foreign import VALUES, ForeignState
from fullshard.checkpoint.manager import latest_checkpoint
from fullshard.checkpoint.manifest import DTYPES, MANIFEST, SavedTensor
from fullshard.checkpoint.opening import Location, folder_at, opened
from fullshard.checkpoint.peers import said
from fullshard.checkpoint.read import Reader, SavedState, Wanted, naming_malformed
from fullshard.checkpoint.values import encoded
from fullshard.errors import CheckpointError
from fullshard.huggingface.files import WeightsReader, weights_of
from fullshard.offline.guessing import guessed_names
from fullshard.plan.boxes import whole_box
from fullshard.state.host_memory import checksum

_OF_A_RUN = "checkpoints"  # where `fullshard train` keeps them in a run's folder
_WEIGHTS = "model/"

Progress = Callable[[int, int], object] | None  # bytes done so far, and in all


@contextlib.contextmanager
def naming_disk_faults(path: object) -> Iterator[None]:
    """Say of errors of a disk that is written to which path they are of."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(said(error)) from error
    except RuntimeError as error:
        if "inline_container" not in str(
            error
        ):  # torch's writer of files, which tells nothing else
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
        return _WeightsState(location)
    state = opened(str(location))
    if isinstance(state, ForeignState):
        with naming_malformed(f"{state.location}: a value is"):
            names = guessed_names(state.files)
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
        value = torch.empty((), dtype=state.tensors[name].dtype, device="cpu")
        state.read([Wanted(name, whole_box(()), value)])
        return encoded(value, name, lambda *_: None)
    return {key: _with_scalars(each, state) for key, each in tree.items()}


def form_of(state: SavedState) -> str:
    """Say what files a state is in, for readers."""
    if isinstance(state, Reader):
        return "fullshard checkpoint"
    if isinstance(state, _WeightsState):
        return "safetensors"
    return "torch.distributed.checkpoint" if Path(state.location).is_dir() else "torch.save"


def _has_index(folder: Folder) -> bool:
    return any(folder.size_of(name) is not None for name in (MANIFEST, METADATA))


def _has_weights(path: Path) -> bool:
    return path.suffix == SHARD_SUFFIX if path.is_file() else any(path.glob(f"*{SHARD_SUFFIX}"))


class _WeightsState(SavedState):
    """Safetensors files as Hugging Face has them: weights of one model."""

    def __init__(self, path: Path) -> None:
        weights = weights_of(path)
        self.location = path
        self.digest = checksum("".join(file.digest for file in weights.files).encode())
        self.tensors = {
            f"{_WEIGHTS}{name}": SavedTensor(entry.shape, DTYPES[entry.dtype])
            for name, entry in weights.tensors.items()
        }
        self.values = {"models": ["model"], "optimizers": {}, "extra": {}}
        self._reader = WeightsReader(weights)

    def close(self) -> None:
        self._reader.__exit__()

    def read(
        self, wanted: Sequence[Wanted], progress: Callable[[int], object] | None = None
    ) -> None:
        own = [each._replace(name=each.name.removeprefix(_WEIGHTS)) for each in wanted]
        self._reader.read(own, progress)
