"""Where the files of checkpoints are: a directory on a disk, or a prefix of an object store.

A `Folder` is one of them, by the path or the URL that the user gave. Everything else in this room sees
files through it: reading and writing them, giving a checkpoint its name, removing one.

    runs/a/step-100            LocalFolder: complete once it has its name
    s3://bucket/a/step-100     ObjectFolder: complete once it has its manifest

What a method promises is said in `LocalFolder`; mypy sees that both have what is used.
"""

import os
import re
from pathlib import Path
from typing import cast

from fullshard.checkpoint.local import LocalData, LocalDraft, LocalFolder, NewLocalFile
from fullshard.checkpoint.objects import (
    NewObject,
    ObjectData,
    ObjectDraft,
    ObjectFolder,
    object_folder,
)
from fullshard.errors import CheckpointError

Folder = LocalFolder | ObjectFolder
DataFile = LocalData | ObjectData
Draft = LocalDraft | ObjectDraft
NewFile = NewLocalFile | NewObject

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
