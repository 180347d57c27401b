"""From a path or a URL to its folder, and to what was saved there, in whichever form."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from fullshard.checkpoint.below import said_below
from fullshard.checkpoint.dcp_files import METADATA, DcpFiles
from fullshard.checkpoint.folder import SHARD_SUFFIX, Folder
from fullshard.checkpoint.foreign import ForeignState
from fullshard.checkpoint.local_folder import LocalFolder
from fullshard.checkpoint.manifest import MANIFEST
from fullshard.checkpoint.object_folder import object_folder
from fullshard.checkpoint.reading import Reader
from fullshard.checkpoint.saved_state import SavedState
from fullshard.checkpoint.torch_files import TorchFile
from fullshard.errors import CheckpointError, DamagedCheckpointError

Location = str | os.PathLike[str]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
_URL_IN_PATH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]")


def disk_path(location: Location, doing: str) -> Path:
    """Return a path of this machine's filesystem. Raises CheckpointError for a URL of anything else."""
    folder = folder_at(location)
    if not isinstance(folder, LocalFolder):
        raise CheckpointError(
            f"{location}: {doing} needs a path of a mounted filesystem. Give one, and copy from or to the URL."
        )
    return folder.path


def folder_at(location: Location, *, lasting: bool = False) -> Folder:
    """Return the folder at a path or a URL.

    lasting: that stays the same when the program changes its directory.

    Raises CheckpointError if the filesystem of a URL is not installed, a path is a spoilt URL, or it is
    none.
    """
    given = cast("object", location)  # whatever a user has passed
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(text, str) or "\0" in text:
        raise CheckpointError(f"{location!r} is no path. Give a string or a pathlib.Path.")
    if text.startswith("file://"):
        return LocalFolder(Path(text.removeprefix("file://")))
    if _URL.match(text):
        return object_folder(text)
    if not isinstance(location, str) and _URL_IN_PATH.match(text):
        raise CheckpointError(
            f"{text}: was a URL before pathlib took one of its slashes. Give it as a string."
        )
    return LocalFolder(Path(text).absolute() if lasting else Path(text))


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
