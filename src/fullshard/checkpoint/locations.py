"""From a path or a URL to its folder: `folder_at`; `disk_path` where only disks will do."""

import os
import re
from pathlib import Path
from typing import cast

from fullshard.checkpoint.folder import Folder
from fullshard.checkpoint.local_folder import LocalFolder
from fullshard.checkpoint.object_folder import object_folder
from fullshard.errors import CheckpointError

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
