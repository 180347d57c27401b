"""A checkpoint in an object store, through fsspec: s3://, gs://, abfs://, memory:// and others.

An object appears whole or not at all, and nothing is renamed. So every file is written where it stays,
under a name that no other save uses, and the manifest comes last: it makes the checkpoint.

    s3://bucket/books/step-00000350/
      shard-00000-0.1f3a9c02.safetensors     stored before
      manifest.json                          complete since this is here
      writer-1f3a9c02.json                   while it is being written, or left by a crash

To replace a checkpoint is to write its next manifest over the old one, and to remove the old files then.
"""

import contextlib
import functools
import json
import os
import posixpath
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

from fullshard.checkpoint.folder import (
    SHARD_SUFFIX,
    DataFile,
    Draft,
    Folder,
    Heartbeat,
    NewFile,
    is_silent,
)
from fullshard.checkpoint.manifest import MANIFEST
from fullshard.errors import CheckpointError, DamagedCheckpointError, FullshardError

_WRITER = re.compile(r"writer-[0-9a-f]+\.json")
_LEFT_AFTER_S = 3600.0  # unfinished objects that have not changed for so long are nobody's


def object_folder(url: str) -> "ObjectFolder":
    """Return the folder at a URL. Credentials and endpoints are fsspec's to find (its configuration,
    the environment).

    Raises CheckpointError if fsspec or the plugin for this kind of URL is not installed.
    """
    if not url.partition("://")[2].strip("/"):
        raise CheckpointError(f"{url}: names no bucket. Give one: s3://bucket/runs/a.")
    try:
        from fsspec.core import url_to_fs  # an extra, which torch needs anyway
    except ImportError as error:
        raise CheckpointError(
            f"{url}: needs the package fsspec. Install it with: pip install 'fullshard[checkpoint]'"
        ) from error
    try:
        # Listings change by other processes' writes, so none is kept.
        files, root = url_to_fs(url.rstrip("/"), use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{url}: {error}") from error
    return ObjectFolder(files, root, url.rstrip("/"))


@contextlib.contextmanager
def _naming(url: str, doing: str) -> Iterator[None]:
    """Turn the errors of a store's client, of whatever class, into CheckpointError."""
    try:
        yield
    except FullshardError:
        raise
    except Exception as error:
        if isinstance(error, FileNotFoundError) and doing == "reading":
            raise DamagedCheckpointError(
                f"{url}: is missing. Restore it, or load another checkpoint."
            ) from error
        raise CheckpointError(
            f"{url}: {doing} failed: {type(error).__name__}: {error}. Check the URL, the credentials "
            "and the network."
        ) from error


class ObjectFolder(Folder):
    """The objects under a prefix."""

    reads_at_once = 16  # each waits for the network
    request_nbytes = 8 << 20

    def __init__(self, files: Any, root: str, url: str) -> None:
        self.files, self.root, self.url = files, root, url

    @property
    def location(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return posixpath.basename(self.root)

    def child(self, name: str) -> "ObjectFolder":
        return ObjectFolder(self.files, f"{self.root}/{name}", f"{self.url}/{name}")

    def exists(self) -> bool:
        return bool(self.entries())

    def size_of(self, name: str) -> int | None:
        self._forget()
        try:
            with _naming(f"{self.url}/{name}", "looking for it"):
                size: int = self.files.info(f"{self.root}/{name}")["size"]
        except CheckpointError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        return size

    def has_lost_manifest(self) -> bool:
        return False  # a save that is under way looks the same

    def sizes(self) -> dict[str, int]:
        files = (each for each in self.entries() if each["type"] == "file")
        return {posixpath.basename(each["name"]): each["size"] for each in files}

    def open_data(self, name: str) -> DataFile:
        return _ObjectData(self, name)

    def create(self, name: str) -> NewFile:
        return _NewObject(self, name)

    def replace_small(self, name: str, content: bytes) -> None:
        with _naming(f"{self.url}/{name}", "writing"):
            self.files.pipe_file(f"{self.root}/{name}", content)

    def children(self) -> list[Folder]:
        names = (
            posixpath.basename(each["name"].rstrip("/"))
            for each in self.entries()
            if each["type"] == "directory"
        )
        return [self.child(name) for name in sorted(names)]

    def draft(self, tag: str, *, overwrite: bool) -> Draft:
        return _ObjectDraft(self, tag, overwrite=overwrite)

    def sees_draft(self, tag: str) -> bool:
        return self.size_of(_writer_name(tag)) is not None

    def remove(self) -> None:
        """Remove the manifest, and with it the checkpoint, then the other objects."""
        self.delete(MANIFEST)
        self.delete(*(name for name in self.files_here() if name != MANIFEST))

    def rename(self, name: str) -> "ObjectFolder":
        """Copy the objects, the manifest last, since nothing is renamed here; then remove these."""
        parent, url = posixpath.dirname(self.root), posixpath.dirname(self.url)
        target = ObjectFolder(self.files, f"{parent}/{name}", f"{url}/{name}")
        with _naming(target.url, "copying"):
            for each in (*(n for n in self.files_here() if n != MANIFEST), MANIFEST):
                self.files.cp_file(f"{self.root}/{each}", f"{target.root}/{each}")
        self.remove()
        return target

    def remove_left_over(self) -> None:
        for child in self.children():
            assert isinstance(child, ObjectFolder)
            names = child.files_here()
            ours = all(name.endswith(SHARD_SUFFIX) or _WRITER.fullmatch(name) for name in names)
            if names and ours and all(child.is_old(name) for name in names):
                child.delete(*names)

    # For drafts

    def entries(self) -> list[dict[str, Any]]:
        """Return what lies directly under the prefix, as fsspec describes it."""
        self._forget()
        try:
            with _naming(self.url, "listing"):
                found: list[dict[str, Any]] = self.files.ls(self.root, detail=True)
        except CheckpointError as error:
            if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                return []
            raise
        # Stores list the prefix itself too where somebody has made it an object.
        return [each for each in found if each["name"].strip("/") != self.root.strip("/")]

    def files_here(self) -> list[str]:
        return [*self.sizes()]

    def delete(self, *names: str) -> None:
        with _naming(self.url, "removing files"):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    self.files.rm_file(f"{self.root}/{name}")

    def is_old(self, name: str) -> bool:
        """Whether an object has not changed for an hour; not if the store does not tell."""
        try:
            changed = self.files.modified(f"{self.root}/{name}")
        except Exception:  # a store without times, or an object that has gone meanwhile
            return False
        return bool(time.time() - changed.timestamp() > _LEFT_AFTER_S)

    def _forget(self) -> None:
        self.files.invalidate_cache()


def _writer_name(tag: str) -> str:
    return f"writer-{tag}.json"


class _ObjectData(DataFile):
    """An object, of which each read is a request."""

    def __init__(self, folder: ObjectFolder, name: str) -> None:
        self._files, self._path, self._url = (
            folder.files,
            f"{folder.root}/{name}",
            f"{folder}/{name}",
        )
        size = folder.size_of(name)
        if size is None:
            raise DamagedCheckpointError(
                f"{self._url}: is missing. Restore it, or load another checkpoint."
            )
        self.nbytes = size

    def read_into(self, out: memoryview, position: int) -> int:
        stop = min(position + len(out), self.nbytes)
        if stop <= position:
            return 0
        with _naming(self._url, "reading"):
            data = self._files.cat_file(self._path, start=position, end=stop)
        if len(data) > stop - position:
            raise CheckpointError(
                f"{self._url}: {stop - position} bytes were asked for, and {len(data)} came: this server "
                "sends whole files alone. Read from one that knows ranges, or copy the checkpoint to a disk."
            )
        out[: len(data)] = data
        return len(data)

    def close(self) -> None:
        pass


class _NewObject(NewFile):
    """An object that is there once `finish` returns: until then a store keeps its parts apart."""

    def __init__(self, folder: ObjectFolder, name: str) -> None:
        self._url = f"{folder}/{name}"
        with _naming(self._url, "writing"):
            path = f"{folder.root}/{name}"
            self._file = folder.files.open(path, "wb", block_size=ObjectFolder.request_nbytes)

    def write(self, data: bytes | memoryview) -> None:
        with _naming(self._url, "writing"):
            self._file.write(data)

    def finish(self) -> None:
        with _naming(self._url, "writing"):
            self._file.close()

    def discard(self) -> None:
        with contextlib.suppress(Exception):  # the store drops the parts of what never ends
            self._file.discard()


class _ObjectDraft(Draft):
    """Files at their place, without a manifest yet."""

    def __init__(self, target: ObjectFolder, tag: str, *, overwrite: bool) -> None:
        self.folder = self._target = target
        self._tag, self._overwrite = tag, overwrite
        self._may_be_complete = False
        self._old = self._check_target()
        self._refuse_other_writer()
        self._beat(0)
        self._heart = Heartbeat(self._beat)

    def complete(self, manifest: bytes, names: list[str]) -> None:
        if self._check_target() != self._old:
            raise CheckpointError(
                f"{self._target}: another job has saved here meanwhile. Give each job a URL of its own."
            )
        left = [name for name in self._target.files_here() if name.endswith(SHARD_SUFFIX)]
        self._heart.stop()
        self._put(manifest)
        with contextlib.suppress(
            CheckpointError
        ):  # it is complete, whatever is left of the old one
            self._target.delete(_writer_name(self._tag), *(n for n in left if n not in names))

    def _put(self, manifest: bytes) -> None:
        """Write the manifest. A write whose answer was lost may have come about all the same, or yet will."""
        try:
            self._target.replace_small(MANIFEST, manifest)
        except CheckpointError as error:
            with contextlib.suppress(CheckpointError):
                if self._target.read_small(MANIFEST) == manifest:
                    return
            self._may_be_complete = True
            raise CheckpointError(
                f"{error} If the store has written it all the same, this checkpoint is complete, so its files "
                "stay there."
            ) from error

    def give_up(self) -> None:
        self._heart.stop()
        if self._may_be_complete:
            return
        own = [name for name in self._target.files_here() if f".{self._tag}." in name]
        self._target.delete(*own, _writer_name(self._tag))

    def _beat(self, count: int) -> None:
        who = {"host": socket.gethostname(), "pid": os.getpid(), "beat": count}
        self._target.replace_small(_writer_name(self._tag), json.dumps(who).encode())

    def _check_target(self) -> bytes | None:
        """Return the manifest that is there, None without one."""
        names = self._target.files_here()
        if MANIFEST in names:
            if not self._overwrite:
                raise CheckpointError(
                    f"{self._target}: already holds a checkpoint. Save under another name, or pass "
                    "overwrite=True to replace it."
                )
            return self._target.read_small(MANIFEST)
        others = [n for n in names if not n.endswith(SHARD_SUFFIX) and not _WRITER.fullmatch(n)]
        if others:
            raise CheckpointError(
                f"{self._target}: has other files ({others[0]}) and no checkpoint. Name another URL, or "
                "empty it."
            )
        return None

    def _refuse_other_writer(self) -> None:
        names = self._target.files_here()
        complete = (self._old or b"").decode(errors="replace")
        for writer in filter(_WRITER.fullmatch, names):
            who = self._content(writer).decode()
            if not is_silent(functools.partial(self._content, writer)):
                raise CheckpointError(
                    f"{self._target}: another job is writing it ({who}). Give each job a URL of its own."
                )
            tag = writer.removeprefix("writer-").removesuffix(".json")
            left = [name for name in names if f".{tag}." in name and f'"{name}"' not in complete]
            self._target.delete(writer, *left)

    def _content(self, name: str) -> bytes:
        try:
            return self._target.read_small(name)
        except CheckpointError:  # it has ended meanwhile
            return b""
