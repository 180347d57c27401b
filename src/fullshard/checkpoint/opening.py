"""Opening what was saved, in whichever form."""

from collections.abc import Sequence
from pathlib import Path

from fullshard.checkpoint.below import said_below
from fullshard.checkpoint.dcp_files import METADATA, DcpFiles
from fullshard.checkpoint.folder import SHARD_SUFFIX
from fullshard.checkpoint.foreign import ForeignState
from fullshard.checkpoint.locations import Location, folder_at
from fullshard.checkpoint.manifest import MANIFEST
from fullshard.checkpoint.reading import Reader
from fullshard.checkpoint.saved_state import SavedState
from fullshard.checkpoint.torch_files import TorchFile
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
