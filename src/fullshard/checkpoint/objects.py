"""A checkpoint in an object store, through fsspec: s3://, gs://, abfs://, memory:// and others.

An object appears whole or not at all, and nothing is renamed. So every file is written where it stays,
under a name that no other save uses, and the manifest comes last: it makes the checkpoint.

    s3://bucket/books/step-00000350/
      shard-00000-0.1f3a9c02.safetensors     stored before
      manifest.json                          complete since this is here
      writer-1f3a9c02.json                   while it is being written, or left by a crash

To replace a checkpoint is to write its next manifest over the old one, and to remove the old files then.
A new one's manifest is put there on the condition that there is none, where the store knows conditions.
"""

import contextlib
import errno
import functools
import inspect
import json
import posixpath
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from fullshard.checkpoint.drafts import (
    LEFT_AFTER_S,
    TAG,
    Heartbeat,
    error_of_other_writer,
    error_of_taken,
    is_silent,
    new_tag,
    tag_of,
    whole_of,
    writer_in,
)
from fullshard.checkpoint.manifest import MANIFEST
from fullshard.errors import CheckpointError, DamagedCheckpointError, FullshardError
from fullshard.versions import install_hint

_WRITER = re.compile(rf"writer-({TAG})\.json")
# There from before the manifest goes until all has gone.
_REMOVED = re.compile(rf"removed-{TAG}\.json")
_ABANDONED = "abandoned.json"  # beside checkpoints: a list of the names of some


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
            f"{url}: needs the package fsspec. Install it with: {install_hint('checkpoint')}"
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


class ObjectFolder:
    """The objects under a prefix, as `LocalFolder` is a directory."""

    reads_at_once = 16  # each waits for the network
    request_nbytes = 8 << 20

    def __init__(self, files: Any, root: str, url: str) -> None:
        self.files, self.root, self.url = files, root, url

    def __str__(self) -> str:
        return self.url

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
        self.files.invalidate_cache()
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
        return {_base(each): each["size"] for each in self.entries() if each["type"] == "file"}

    def open_data(self, name: str) -> "ObjectData":
        return ObjectData(self, name)

    def read_small(self, name: str) -> bytes:
        return whole_of(self.open_data(name), f"{self}/{name}")

    def create(self, name: str) -> "NewObject":
        return NewObject(self, name)

    def replace_small(self, name: str, content: bytes) -> None:
        with _naming(f"{self.url}/{name}", "writing"):
            self.files.pipe_file(f"{self.root}/{name}", content)

    @property
    def knows_conditions(self) -> bool:
        """Whether fsspec's class for this store can write what is not there yet, and nothing else."""
        return "mode" in inspect.signature(self.files.pipe_file).parameters

    def create_small(self, name: str, content: bytes) -> None:
        """Write a small file that is not there yet. Of several jobs at once, one can."""
        if not self.knows_conditions:
            return self.replace_small(name, content)
        with _naming(f"{self.url}/{name}", "writing"):
            try:
                self.files.pipe_file(f"{self.root}/{name}", content, mode="create")
            except OSError as error:
                if error.errno != errno.ENOSYS:
                    raise
                self.replace_small(name, content)  # a server that speaks S3, but for conditions

    def children(self) -> Sequence["ObjectFolder"]:
        entries = self.entries()
        names = {_base(each): each["type"] for each in entries}
        left_out = self.abandoned() if _ABANDONED in names else ()
        return [
            self.child(name)
            for name, kind in sorted(names.items())
            if kind == "directory" and name not in left_out
        ]

    def draft(self, tag: str, *, overwrite: bool) -> "ObjectDraft":
        return ObjectDraft(self, tag, overwrite=overwrite)

    def sees_draft(self, tag: str) -> bool:
        return self.size_of(_writer_name(tag)) is not None

    def remove(self) -> list[str]:
        names = [*self.sizes()]
        self.replace_small(mark := f"removed-{new_tag()}.json", b"{}")
        self.delete(*dict.fromkeys((MANIFEST, *filter(_is_ours, names), mark)))
        return [name for name in names if not _is_ours(name)]

    def abandon(self, names: Sequence[str]) -> str:
        """Enter the names in a list, since nothing is renamed here."""
        content = json.dumps(sorted({*self.abandoned(), *names}))
        self.replace_small(_ABANDONED, content.encode())
        return f"where they were, and named in {_ABANDONED}"

    def abandoned(self) -> Collection[str]:
        if self.size_of(_ABANDONED) is None:
            return ()
        try:
            names = json.loads(self.read_small(_ABANDONED))
        except ValueError:
            names = None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(
                f"{self}/{_ABANDONED}: is no list of names. Restore it, or remove it if no checkpoint beside it "
                "was abandoned."
            )
        return names

    def remove_left_over(self) -> None:
        for child in self.children():
            names = {_base(each): each["type"] for each in child.entries()}
            if MANIFEST in names or not all(map(_is_ours, names)) or "directory" in names.values():
                continue
            marks = [name for name in names if _REMOVED.fullmatch(name)]
            # Without a mark somebody may be copying a checkpoint here, file by file.
            may_live = filter(_WRITER.fullmatch, names) if marks else names
            if all(map(child.is_old, may_live)) and child.size_of(MANIFEST) is None:
                child.delete(*(name for name in names if name not in marks), *marks)

    def entries(self) -> list[dict[str, Any]]:
        """Return what lies directly under the prefix, as fsspec describes it."""
        self.files.invalidate_cache()
        try:
            with _naming(self.url, "listing"):
                found: list[dict[str, Any]] = self.files.ls(self.root, detail=True)
        except CheckpointError as error:
            if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                return []
            raise
        # Stores list the prefix itself too where somebody has made it an object.
        return [each for each in found if each["name"].strip("/") != self.root.strip("/")]

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
        return bool(time.time() - changed.timestamp() > LEFT_AFTER_S)


def _writer_name(tag: str) -> str:
    return f"writer-{tag}.json"


def _base(entry: Mapping[str, Any]) -> str:
    return posixpath.basename(entry["name"].rstrip("/"))


def _is_ours(name: str) -> bool:
    """Whether saves and removals give objects of a checkpoint such a name."""
    if name == MANIFEST or tag_of(name):
        return True
    return bool(_WRITER.fullmatch(name) or _REMOVED.fullmatch(name))


class ObjectData:
    """An object, of which each read is a request."""

    def __init__(self, folder: ObjectFolder, name: str) -> None:
        self._files, self._path = folder.files, f"{folder.root}/{name}"
        self._url = f"{folder}/{name}"
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


class NewObject:
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


class ObjectDraft:
    """Files at their place, without a manifest yet."""

    def __init__(self, target: ObjectFolder, tag: str, *, overwrite: bool) -> None:
        self.folder = self._target = target
        self._tag, self._overwrite = tag, overwrite
        self._may_be_complete = False
        self._old = self._check_target()
        self._refuse_other_writer()
        self._heart = Heartbeat(self._tell)

    def complete(self, manifest: bytes, names: list[str]) -> None:
        # Before the check: what is nobody's now is not another job's that is complete by then.
        left = self._left_behind()
        if self._check_target() != self._old:
            raise self._sooner()
        self._put(manifest)
        self._heart.stop()
        with contextlib.suppress(CheckpointError):
            # It is complete, whatever is left of the old one.
            self._target.delete(*(n for n in left if n not in names), _writer_name(self._tag))

    def _left_behind(self) -> list[str]:
        """Return the objects here that no save is writing: of the checkpoint to replace, and of dead ones."""
        names = [*self._target.sizes()]
        alive = {match[1] for match in map(_WRITER.fullmatch, names) if match} | {self._tag}
        return [
            name
            for name in names
            if _REMOVED.fullmatch(name) or ((tag := tag_of(name)) and tag not in alive)
        ]

    def _sooner(self) -> CheckpointError:
        return CheckpointError(
            f"{self._target}: another job has saved here meanwhile. Give each job a URL of its own."
        )

    def _put(self, manifest: bytes) -> None:
        """Write the manifest. A write whose answer was lost may have come about all the same, or yet will."""
        is_new = self._old is None
        write = self._target.create_small if is_new else self._target.replace_small
        try:
            write(MANIFEST, manifest)
        except CheckpointError as error:
            there: bytes | None = None
            with contextlib.suppress(CheckpointError):
                there = self._target.read_small(MANIFEST)
            if there == manifest:
                return
            if there is not None and is_new and self._target.knows_conditions:
                raise self._sooner() from error
            self._may_be_complete = True
            raise CheckpointError(
                f"{error} If the store has written it all the same, this checkpoint is complete, so its files "
                "stay there."
            ) from error

    def give_up(self) -> None:
        self._heart.stop()
        if self._may_be_complete:
            return
        own = [name for name in self._target.sizes() if tag_of(name) == self._tag]
        self._target.delete(*own, _writer_name(self._tag))

    def _tell(self, text: bytes) -> None:
        self._target.replace_small(_writer_name(self._tag), text)

    def _check_target(self) -> bytes | None:
        """Return the manifest that is there, None without one."""
        names = [_base(each) for each in self._target.entries()]
        if MANIFEST in names:
            if not self._overwrite:
                raise error_of_taken(self._target)
            return self._target.read_small(MANIFEST)
        if others := [name for name in names if not _is_ours(name)]:
            raise CheckpointError(
                f"{self._target}: has other files ({others[0]}) and no checkpoint. Name another URL, or "
                "empty it."
            )
        return None

    def _refuse_other_writer(self) -> None:
        for match in filter(None, map(_WRITER.fullmatch, self._target.sizes())):
            writer, tag = match[0], match[1]
            who = self._content(writer)
            if who is None:  # it has ended
                continue
            if not is_silent(functools.partial(self._content, writer)):
                raise error_of_other_writer(self._target, writer_in(who))
            # It may have died, or lost its mark alone, once its manifest was there.
            complete = (self._content(MANIFEST) or b"").decode(errors="replace")
            names = [name for name in self._target.sizes() if tag_of(name) == tag]
            self._target.delete(*(n for n in names if f'"{n}"' not in complete), writer)
        self._old = self._check_target()

    def _content(self, name: str) -> bytes | None:
        """Return what is in a small file; None if it is not there."""
        try:
            return self._target.read_small(name)
        except DamagedCheckpointError:
            return None
