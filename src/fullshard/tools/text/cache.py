"""Files that are made once from others, and kept: tokens of a text, bytes of a table's column.

Several processes may want the same file at once: one makes it, the others wait and take it.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fullshard.tools.text.files import CorpusError

_SIZES = "sizes.json"


def kept(cache: Path, key: Any, make: Callable[[Path], None]) -> Path:
    """Return the folder for a key, after `make` has filled it if it is not there yet.

    key: all that decides what is in it, as JSON takes it. Raises CorpusError if nothing can be written.
    """
    from filelock import FileLock  # which torch needs anyway

    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    folder, unfinished = cache / name, cache / f"{name}.unfinished"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if _is_whole(folder):  # without the lock: the cache may be read-only by now
            return folder
        with FileLock(cache / f"{name}.lock"):
            if not _is_whole(folder):
                for left in (folder, unfinished):
                    shutil.rmtree(left, ignore_errors=True)
                unfinished.mkdir()
                make(unfinished)
                (unfinished / _SIZES).write_text(json.dumps(_sizes(unfinished)))
                unfinished.rename(folder)
    except OSError as error:
        raise CorpusError(
            f"--cache {cache}: cannot be written ({error.strerror}). Name another folder."
        ) from error
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether a folder has its files as they were made: a full disk, or somebody, may have cut them."""
    try:
        return bool(json.loads((folder / _SIZES).read_text()) == _sizes(folder))
    except (OSError, ValueError):
        return False


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.name != _SIZES}
