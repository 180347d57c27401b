"""From a path or a URL to what was saved there, in whichever form."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from fullshard.checkpoint.dcp import METADATA, DcpFiles
from fullshard.checkpoint.drafts import SHARD_SUFFIX
from fullshard.checkpoint.folder import Folder, Location, folder_at
from fullshard.checkpoint.foreign import ForeignState, TorchFile
from fullshard.checkpoint.manifest import MANIFEST
from fullshard.checkpoint.read import Reader, SavedState
from fullshard.errors import CheckpointError, DamagedCheckpointError


def opened(path: Location) -> SavedState:
    """Open what was saved at a path, in whichever form.

    Raises CheckpointError if there is nothing that can be loaded.
    """
    folder = folder_at(path)
    if folder.size_of(MANIFEST) is not None:
        return Reader(folder)
    if folder.size_of(METADATA) is not None:
        return ForeignState(DcpFiles(folder))
    location = folder.location
    if isinstance(location, Path) and location.is_file():
        if location.suffix == SHARD_SUFFIX:
            raise CheckpointError(f"{location}: holds weights alone. Load it with load_hf.")
        return ForeignState(TorchFile(location))
    if folder.has_lost_manifest():
        raise DamagedCheckpointError(
            f"{folder}: has lost its {MANIFEST}. Load another checkpoint, or restore this one."
        )
    why = "has no manifest, so no save was completed there" if folder.exists() else "is no folder"
    raise CheckpointError(
        f"{folder}: {why}. Name a complete checkpoint, on a filesystem that all hosts share."
        f"{said_below(folder)}"
    )


def check_same_files(seen: Sequence[tuple[str, str]]) -> None:
    """Raise CheckpointError if ranks see different files. seen: each one's digest and location."""
    others = [rank for rank, (digest, _) in enumerate(seen) if digest != seen[0][0]]
    if not others:
        return
    first, other = seen[0][1], seen[others[0]][1]
    if first != other:
        raise CheckpointError(
            f"path is {first} on rank 0 and {other} on rank {others[0]}, where another checkpoint is. Give "
            "all ranks the same."
        )
    raise CheckpointError(
        f"{first}: ranks {others} see another checkpoint there than rank 0. Load from a filesystem that all "
        "hosts share."
    )


# What can be loaded below a folder that is no checkpoint itself
#
#     runs/trainer/checkpoint-500/pytorch_model_fsdp_0/    .metadata: a model, by torch.distributed.checkpoint
#     runs/trainer/checkpoint-500/optimizer_0/             .metadata: an optimizer
#     runs/trainer/checkpoint-500/optimizer.pt             a file of torch.save
#
# So Accelerate and Transformers' Trainer leave it, whose side files (`random_states_0.pkl`, `scheduler.bin`,
# `trainer_state.json`) are theirs alone.

_LEVELS = 3  # project/checkpoints/checkpoint_0/optimizer_0
_MOST_FOLDERS = 200  # that are looked into: it may be anybody's home
_MOST_SAID = 6
_SAVED = re.compile(r"(pytorch_model|model|optimizer).*\.(bin|pt|pth)")  # by torch.save
_OURS = "a checkpoint of fullshard: load_checkpoint(PATH, model, optimizer) or --init-from PATH"
_WEIGHTS = "safetensors: load_hf(model, PATH) or --init-from PATH"
_MODEL = "load_checkpoint(PATH, model) or --init-from PATH"
_OPTIMIZER = "load_checkpoint(PATH, model, optimizer, allow='missing')"


def said_below(folder: Folder) -> str:
    """Say what can be loaded in a folder and below it, and by which call; "" if there is nothing.

    Begins with a space, to follow a message's sentence.
    """
    try:
        found = sorted(_found(folder), key=lambda each: _by_numbers(each[0]), reverse=True)
    except (CheckpointError, OSError):  # it is said why, where it is to be read
        return ""
    if not found:
        return ""
    lines = [f"\n  {name!r}: {call}" for name, call in found[:_MOST_SAID]]
    more = len(found) - _MOST_SAID
    rest = f"\n  and {more} more" if more > 0 else ""
    return f" What can be loaded is below it:{''.join(lines)}{rest}"


def _found(folder: Folder) -> Iterator[tuple[str, str]]:
    """Yield the path of each thing that can be loaded, from the folder on, and what loads it."""
    level, num_seen = [("", folder)], 0
    for _ in range(_LEVELS + 1):
        following = []
        for way, each in level:
            num_seen += 1
            if num_seen > _MOST_FOLDERS:
                return
            sizes = each.sizes() if each.exists() else {}
            if way and MANIFEST in sizes:
                yield way, _OURS
                continue  # its files are parts of it
            if way and METADATA in sizes:
                yield way, f"torch.distributed.checkpoint: {_loads(each.name)}"
                continue
            if any(name.endswith(SHARD_SUFFIX) for name in sizes):
                yield way or ".", _WEIGHTS
            for name in sizes:
                if _SAVED.fullmatch(name):
                    yield f"{way}/{name}".lstrip("/"), f"torch.save: {_loads(name)}"
            following += [(f"{way}/{child.name}".lstrip("/"), child) for child in each.children()]
        level = following


def _loads(name: str) -> str:
    return _OPTIMIZER if name.startswith("optim") else _MODEL


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """Return a key by which checkpoint-1000 comes after checkpoint-500."""
    return [(int(part or 0), text) for text, part in re.findall(r"(\D*)(\d{0,18})", name)]
