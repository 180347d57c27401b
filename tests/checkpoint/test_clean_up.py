"""What clean-up removes, on a disk and in an object store: what dead saves of ours have left, and nothing else."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import functools
import os
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

import fullshard
from fullshard.checkpoint import drafts, local, objects
from fullshard.checkpoint.folder import Folder, folder_at
from fullshard.checkpoint.local import LocalDraft, LocalFolder
from fullshard.checkpoint.manager import prune_checkpoints, retained
from fullshard.errors import CheckpointError
from tests.checkpoint import checkpoints_in
from tests.fresh import in_warm_forks

_DAYS_AGO = time.time() - 2 * 86400


class Place:
    """A folder on a disk or a prefix of a store, and what a user does there."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.files, self.root = fsspec.core.url_to_fs(url)

    def put(self, name: str, content: bytes = b"mine") -> None:
        """Write a file; it and the folders that it is in are two days old then."""
        path = f"{self.root}/{name}"
        self.files.makedirs(path.rpartition("/")[0], exist_ok=True)
        self.files.pipe(path, content)
        self.age(name)

    def age(self, *names: str) -> None:
        then = datetime.datetime.fromtimestamp(_DAYS_AGO, tz=datetime.timezone.utc)
        for name in names:
            if isinstance(self.files, MemoryFileSystem):
                stored = self.files.store[f"{self.root}/{name}"]
                stored.created = stored.modified = then
            else:
                for path in (Path(self.root, name), Path(self.root, name).parent):
                    os.utime(path, (_DAYS_AGO, _DAYS_AGO))

    def names(self) -> set[str]:
        self.files.invalidate_cache()
        return {name.removeprefix(f"{self.root}/") for name in self.files.find(self.root)}

    def shards(self, name: str) -> set[str]:
        return {each for each in self.names() if each.startswith(f"{name}/shard-")}


@pytest.fixture(params=["disk", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "disk":
        yield Place(str(tmp_path))
        return
    place = Place(f"memory://{uuid.uuid4().hex}")
    yield place
    with contextlib.suppress(FileNotFoundError):
        place.files.rm(place.root, recursive=True)


@pytest.fixture
def short_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "BEAT_S", 0.1)


def _manager(place: Place, model: nn.Module, **options: Any) -> fullshard.CheckpointManager:
    return fullshard.CheckpointManager(
        place.url, model, every_steps=1, signals=(), in_background=False, **options
    )


# What is not ours


@pytest.mark.filterwarnings("ignore:.*are of step")
def test_what_a_user_keeps_beside_checkpoints_stays(place: Place) -> None:
    mine = {
        "data.partial-1/mine.txt",
        "notes.removed-2/mine.txt",
        "notes.partial-0123abcd/mine.txt",
        "step-00000001.removed-0123abcd/mine.txt",
        "step-00000001.partial-0123abcd/shard-00000-0.0123abcd.safetensors",
        "step-00000001.partial-0123abcd/mine.txt",
        "export/model.safetensors",
        "export/model-00001-of-00002.safetensors",
        "step-00000009/shard-00001-of-00002.safetensors",
        "step-00000008/shard-00000-0.safetensors",
        "step-00000007/shard-00000-0.0123abcd.safetensors.bak",
        "half/shard-00000-0.0123abcd.safetensors",
        "half/mine/writer-0123abcd.json",
        "latest-best/model.safetensors",
    }
    for name in mine:
        place.put(name)
    model = nn.Linear(2, 2)
    for steps in ((1, 2, 3), (1, 2)):
        with _manager(place, model, keep_last=1) as manager:
            manager.load_latest()
            if steps == (1, 2):
                manager._own_steps.clear()
            for step in steps:
                manager.step(step)
        prune_checkpoints(place.url, keep_last=1)
    assert mine <= place.names()
    assert all(place.files.cat(f"{place.root}/{name}") == b"mine" for name in mine)


def test_what_a_user_keeps_in_a_checkpoint_stays(place: Place) -> None:
    for step in (1, 2):
        fullshard.save_checkpoint(f"{place.url}/step-{step:08d}", nn.Linear(2, 2))
    old = place.shards("step-00000001")
    mine = {"step-00000001/model.safetensors", "step-00000001/mine/notes.txt"}
    for name in mine:
        place.put(name)
    model = nn.Linear(2, 2)
    fullshard.save_checkpoint(f"{place.url}/step-00000001", model, overwrite=True)
    assert mine <= place.names()
    assert not old & place.names()
    found = nn.Linear(2, 2)
    fullshard.load_checkpoint(f"{place.url}/step-00000001", found)
    assert found.weight.equal(model.weight)
    with pytest.warns(UserWarning, match=r"step-00000001 .*(model\.safetensors|notes\.txt)"):
        prune_checkpoints(place.url, keep_last=1)
    left = {name for name in place.names() if not name.startswith("step-00000002/")}
    assert left == mine
    assert [each.step for each in checkpoints_in(place.url)] == [2]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "shard-00001-of-00002.safetensors",
        "shard-00000-0.0123abc.safetensors",
        "writer-1.json",
        "mine/shard-00000-0.0123abcd.safetensors",
    ],
)
def test_a_folder_with_files_of_others_is_no_target(
    place: Place, name: str, overwrite: bool
) -> None:
    place.put(f"a/{name}")
    with pytest.raises(CheckpointError, match=name.partition("/")[0]):
        fullshard.save_checkpoint(f"{place.url}/a", nn.Linear(2, 2), overwrite=overwrite)
    assert place.names() == {f"a/{name}"}


# Which checkpoints stay


@pytest.mark.parametrize(
    ("damaged", "keep_last", "keep_every", "kept"),
    [
        ({}, 2, None, {5, 6}),
        ({}, 9, None, {1, 2, 3, 4, 5, 6}),
        ({5}, 2, 3, {3, 4, 5, 6}),
        ({6, 5}, 1, None, {4, 5, 6}),
        ({1}, 5, None, {2, 3, 4, 5, 6}),
    ],
)
def test_the_newest_sound_ones_stay(
    damaged: set[int], keep_last: int, keep_every: int | None, kept: set[int]
) -> None:
    steps = [3, 1, 2, 6, 5, 4]
    found = retained(
        steps, lambda step: step not in damaged, keep_last=keep_last, keep_every=keep_every
    )
    assert found == kept


def test_a_manager_reads_each_manifest_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real: dict[Any, Any] = {kind: kind.read_small for kind in (LocalFolder, objects.ObjectFolder)}

    def counting(self: Folder, name: str) -> bytes:
        read.append(f"{self.name}/{name}")
        content: bytes = real[type(self)](self, name)
        return content

    for kind in real:
        monkeypatch.setattr(kind, "read_small", counting)
    with _manager(place, nn.Linear(2, 2), keep_last=3) as manager:
        for step in range(1, 6):
            manager.step(step)
        assert read
        assert len({*read}) == len(read)
        victim = place.shards("step-00000004").pop()
        place.files.rm_file(f"{place.root}/{victim}")
        with pytest.warns(UserWarning, match="00004 is damaged"):
            manager.step(6)
    assert [each.step for each in checkpoints_in(place.url)] == [3, 4, 5, 6]


# What is ours


@pytest.mark.parametrize("calls", range(4))
def test_what_a_killed_removal_has_left_goes_with_the_next(
    place: Place, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    for step in range(1, 4):
        fullshard.save_checkpoint(f"{place.url}/step-{step:08d}", nn.Linear(2, 2))
    left = [calls]

    def dying(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for kind, name in ((MemoryFileSystem, "rm_file"), (os, "unlink"), (os, "rmdir")):
            patch.setattr(kind, name, dying(getattr(kind, name)))
        with contextlib.suppress(KeyboardInterrupt):
            prune_checkpoints(place.url, keep_last=2)
    assert [each.step for each in checkpoints_in(place.url)][-2:] == [2, 3]
    prune_checkpoints(place.url, keep_last=2)
    assert {name.partition("/")[0] for name in place.names()} == {"step-00000002", "step-00000003"}
    if place.url.startswith("/"):
        assert len(list(Path(place.root).iterdir())) == 2


@pytest.mark.parametrize("host", ["", "other"])
def test_no_clean_up_at_any_moment_removes_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """Another process cleans up before each call to the system by which a save completes, each of 10 s."""
    moments: list[str] = []
    now = time.time

    def cleaning(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not moments or moments[-1] != "cleaning up":
                moments.append("cleaning up")
                with monkeypatch.context() as here:
                    here.setattr(time, "time", lambda: now() + 10)
                    if host:
                        here.setattr(socket, "gethostname", lambda: "here")
                    LocalFolder(tmp_path).remove_left_over()
                moments.append(name)
            return real(*args, **kwargs)

        return call

    if host:
        monkeypatch.setattr(socket, "gethostname", lambda: host)
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    with monkeypatch.context() as patch:
        for name in ("rename", "unlink", "rmdir", "mkdir"):
            patch.setattr(Path, name, cleaning(name, getattr(Path, name)))
        for name in ("sync_folder", "write_durably"):
            patch.setattr(local, name, cleaning(name, getattr(local, name)))
        fullshard.save_checkpoint(tmp_path / "runs" / "a", first)
        fullshard.save_checkpoint(tmp_path / "a", first)
        fullshard.save_checkpoint(tmp_path / "a", second, overwrite=True)
    assert {"rename", "unlink", "mkdir", "sync_folder"} <= {*moments}
    found = nn.Linear(2, 2)
    fullshard.load_checkpoint(tmp_path / "a", found)
    assert found.weight.equal(second.weight)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "runs"]
    assert len(list((tmp_path / "a").iterdir())) == 2


def _draft(place: Place, name: str) -> Any:
    return folder_at(f"{place.url}/{name}").draft(secrets.token_hex(4), overwrite=False)


def test_two_jobs_do_not_write_to_one_place(
    place: Place, short_beats: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    other = _draft(place, "a")
    with pytest.raises(CheckpointError, match=f"another job is writing it .*{os.getpid()}"):
        fullshard.save_checkpoint(f"{place.url}/a", model)
    other.give_up()
    assert not place.names()
    late = _draft(place, "b")
    for kind in (LocalDraft, objects.ObjectDraft):  # neither sees that the other one is writing
        monkeypatch.setattr(kind, "_refuse_other_writer", lambda _: None)
    fullshard.save_checkpoint(f"{place.url}/b", model)
    with pytest.raises(CheckpointError, match="already holds"):
        late.complete(b"", [])
    late.give_up()
    fullshard.load_checkpoint(f"{place.url}/b", model)


def test_a_save_that_completes_while_it_is_watched_is_whole(
    place: Place, short_beats: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found = nn.Linear(2, 2), nn.Linear(2, 2)
    watched = threading.Event()
    begun: list[Any] = []
    silent = drafts.is_silent

    def completing(look: Callable[[], Any], **options: Any) -> bool:
        look()
        watched.set()
        saver.join()
        return silent(look, **options)

    def save() -> None:
        fullshard.save_checkpoint(f"{place.url}/a", model)

    real = {kind: kind.complete for kind in (LocalDraft, objects.ObjectDraft)}

    def complete(self: Any, *args: Any) -> None:
        begun.append(self)
        watched.wait(10)
        real[type(self)](self, *args)

    for kind in real:
        monkeypatch.setattr(kind, "complete", complete)
    monkeypatch.setattr(socket, "gethostname", lambda: "other")
    saver = threading.Thread(target=save)
    saver.start()
    while not begun:
        time.sleep(0.01)
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(local, "is_silent", completing)
    monkeypatch.setattr(objects, "is_silent", completing)
    with pytest.raises(CheckpointError, match=r"already holds|another job"):
        fullshard.save_checkpoint(f"{place.url}/a", nn.Linear(2, 2))
    fullshard.load_checkpoint(f"{place.url}/a", found)
    assert found.weight.equal(model.weight)
    assert len(place.names()) == 2


def test_a_save_that_was_taken_for_dead_and_completes_is_whole(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is decided by what was seen holds no longer once the folder has its name, or its manifest."""
    model, found = nn.Linear(2, 2), nn.Linear(2, 2)
    real = {kind: kind.complete for kind in (LocalDraft, objects.ObjectDraft)}
    given: list[Any] = []
    for kind in real:
        monkeypatch.setattr(kind, "complete", lambda *args: given.append(args))
    monkeypatch.setattr(socket, "gethostname", lambda: "other")
    fullshard.save_checkpoint(f"{place.url}/a", model, rng=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "here")

    def silent(*_: Any) -> bool:
        if given:
            draft, *rest = given.pop()
            real[type(draft)](draft, *rest)
        return True

    monkeypatch.setattr(local, "is_silent", silent)
    monkeypatch.setattr(objects, "is_silent", silent)
    with contextlib.suppress(CheckpointError):
        _draft(place, "a").give_up()
    fullshard.load_checkpoint(f"{place.url}/a", found)
    assert found.weight.equal(model.weight)


def test_of_two_jobs_that_complete_at_once_one_does(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is complete after the last look at what is there."""
    sooner, found = nn.Linear(2, 2), nn.Linear(2, 2)
    others: list[Any] = []
    is_late = False

    def between(real: Any) -> Any:
        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_late and others and ("manifest" in str(args[1]) or args[-1] == target):
                others.pop()()
            return real(*args, **kwargs)

        return call

    target = Path(place.root) / "a"
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", between(MemoryFileSystem.pipe_file))
    monkeypatch.setattr(Path, "rename", between(Path.rename))
    real = {kind: kind.complete for kind in (LocalDraft, objects.ObjectDraft)}
    with monkeypatch.context() as patch:
        for kind in real:
            patch.setattr(
                kind,
                "complete",
                lambda self, *args: others.append(functools.partial(real[type(self)], self, *args)),
            )
        patch.setattr(local, "_is_being_written", lambda *_, **__: True)
        fullshard.save_checkpoint(f"{place.url}/a", sooner, rng=False)
    for kind in real:  # neither sees that the other one is writing
        monkeypatch.setattr(kind, "_refuse_other_writer", lambda _: None)
    is_late = True
    with pytest.raises(CheckpointError):
        fullshard.save_checkpoint(f"{place.url}/a", nn.Linear(2, 2))
    assert not others
    fullshard.load_checkpoint(f"{place.url}/a", found)
    assert found.weight.equal(sooner.weight)
    assert len(place.names()) == 2


def _dead(folder: Path) -> Path:
    """Leave what a save that was killed on this host does."""
    in_warm_forks(
        "import os\nfrom pathlib import Path\n"
        "from fullshard.checkpoint.local import LocalDraft\n"
        f"LocalDraft(Path({str(folder / 'a')!r}), '0123abcd', overwrite=False)\nos._exit(1)"
    )
    return folder / "a.partial-0123abcd"


@pytest.mark.parametrize("locks", ["of NFS", "none"])
def test_locks_of_other_filesystems_tell_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: str
) -> None:
    flock = fcntl.flock

    def of_nfs(file: Any, operation: int) -> None:
        mode = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
        needs = {fcntl.LOCK_EX: os.O_RDONLY, fcntl.LOCK_SH: os.O_WRONLY}
        if locks == "none":
            raise OSError(errno.ENOLCK, "No locks available")
        if mode == needs.get(operation & ~fcntl.LOCK_NB):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", of_nfs)
    dead = _dead(tmp_path)
    alive = LocalDraft(tmp_path / "b", secrets.token_hex(4), overwrite=False)
    if locks == "none":  # then time tells
        for path in (*dead.iterdir(), dead):
            os.utime(path, (_DAYS_AGO, _DAYS_AGO))
    LocalFolder(tmp_path).remove_left_over()
    assert list(tmp_path.iterdir()) == [alive.path]
    alive.give_up()


def test_a_save_whose_fork_outlives_it_is_dead(tmp_path: Path) -> None:
    (ended,) = in_warm_forks(
        "import os, time\nfrom pathlib import Path\n"
        "from fullshard.checkpoint.local import LocalDraft\n"
        f"LocalDraft(Path({str(tmp_path / 'a')!r}), '0123abcd', overwrite=False)\n"
        "read, write = os.pipe()\n"
        "if (child := os.fork()) == 0:\n"
        "    os.write(write, b'x')\n"  # what is done after a fork is done
        "    os.closerange(0, 3)\n    time.sleep(60)\n    os._exit(0)\n"
        "os.read(read, 1)\nprint(child, flush=True)\nos._exit(1)"
    )
    try:
        LocalFolder(tmp_path).remove_left_over()
        assert not list(tmp_path.iterdir())
    finally:
        os.kill(int(ended.out), 9)


def test_a_beat_that_fails_is_not_the_last(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(drafts, "BEAT_S", 0.01)
    draft = _draft(place, "a")
    beats: list[bytes] = []
    real, done = draft._heart._write, threading.Event()

    def failing(text: bytes) -> None:
        beats.append(text)
        if len(beats) < 3:
            raise OSError(errno.EIO, "Input/output error")
        real(text)
        done.set()

    draft._heart._write = failing
    assert done.wait(10)
    assert "Input/output error" in caplog.text
    draft.give_up()


def test_a_disk_that_fails_after_the_last_step_has_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = local.sync_folder

    def failing(folder: Path) -> None:
        if (tmp_path / "a").exists():
            raise OSError(errno.EIO, "Input/output error")
        sync(folder)

    monkeypatch.setattr(local, "sync_folder", failing)
    model, found = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="is complete, but.*Input/output error"):
        fullshard.save_checkpoint(tmp_path / "a", model)
    fullshard.load_checkpoint(tmp_path / "a", found)
    assert torch.equal(found.weight, model.weight)
