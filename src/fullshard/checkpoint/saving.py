"""Saving: every rank writes what it owns, then rank 0 writes the manifest and gives the folder its name.

    prepare   on the program's thread: what each rank holds (for a save in the background: copied)
    begin     rank 0 makes the partial folder, and every rank sees it
    write     every rank its files
    commit    rank 0 puts the manifest together, checks that every element is in it once, and renames

Each stage ends on all ranks together, so an error on one is an error on all, and nothing is left behind.
"""

import atexit
import dataclasses
import os
import platform
import secrets
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.content import (
    Content,
    Models,
    Optimizers,
    content_of,
    section_names,
    to_write,
)
from fullshard.checkpoint.folder import PartialFolder
from fullshard.checkpoint.manifest import FileEntry, Manifest, Piece, TensorEntry, dumps
from fullshard.checkpoint.peers import Peers, said
from fullshard.checkpoint.values import encoded
from fullshard.checkpoint.writing import ToWrite, WrittenFiles, write_files
from fullshard.errors import CheckpointError, FullshardError
from fullshard.plan.boxes import tiling_fault


@dataclasses.dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that is complete and on the disk.

    nbytes: of all ranks' files. seconds: from the call on. stall_seconds: how long the program waited.
    """

    path: Path
    step: int | None
    nbytes: int
    seconds: float
    stall_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """What one rank writes, once it is decided."""

    target: Path
    overwrite: bool
    items: Sequence[ToWrite]
    tensors: Mapping[str, dict[str, Any]]
    content: Content
    values: Mapping[str, Any]
    step: int | None


def save_checkpoint(
    path: str | os.PathLike[str],
    model: Models,
    optimizer: Optimizers = None,
    *,
    extra: Mapping[str, Any] | None = None,
    step: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    rng: bool = True,
    overwrite: bool = False,
) -> SavedCheckpoint:
    """Save models, optimizers and whatever else training needs to go on. Collective.

        save_checkpoint("runs/a/step-100", model, optimizer, step=100, extra={"scheduler": scheduler})

    path: becomes a directory, which has this name only once all of it is on the disk. All ranks have to
        see the same filesystem there.
    model, optimizer: sharded in any way or not at all; one, or several by key.
    extra: by key, objects with ``state_dict()`` (schedulers, scalers, data loaders, EMA), or values:
        numbers, strings, tensors, lists and dicts of them. What differs between ranks is kept for each.
    step, metadata: for readers; ``metadata`` is a dict of such values.
    rng: save the states of the random generators of every rank.
    overwrite: replace a checkpoint of this name; until the new one is complete, the old one is.

    Raises CheckpointError, on all ranks, if one cannot do its part; what was written is removed then, and
    an older checkpoint is as it was.
    """
    begun = time.perf_counter()
    finish_background()
    peers = Peers()
    job = _prepared(path, model, optimizer, extra, step, metadata, rng, overwrite, peers)
    nbytes = _execute(job, peers)
    seconds = time.perf_counter() - begun
    return SavedCheckpoint(job.target, step, nbytes, seconds, seconds)


def async_save_checkpoint(
    path: str | os.PathLike[str],
    model: Models,
    optimizer: Optimizers = None,
    *,
    extra: Mapping[str, Any] | None = None,
    step: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    rng: bool = True,
    overwrite: bool = False,
) -> "PendingSave":
    """Save in the background what `save_checkpoint` would save now. Collective.

    Returns once everything is copied to host memory, which is kept for the next time: as much as this
    rank writes. One save at a time: a second one waits for the first. An error of a save is raised by its
    ``wait()``, or else by the next save or load.
    """
    begun = time.perf_counter()
    finish_background()
    peers = Peers()
    job = _prepared(path, model, optimizer, extra, step, metadata, rng, overwrite, peers)
    staged = dataclasses.replace(job, items=_staging.staged(job.items))
    pending = PendingSave(staged, peers, begun)
    _in_flight.append(pending)
    return pending


class PendingSave:
    """A save in the background.

    stall_seconds: how long the program waited for the copy to host memory.
    """

    def __init__(self, job: _Job, peers: Peers, begun: float) -> None:
        self._job, self._peers, self._begun = job, peers, begun
        self._error: BaseException | None = None
        self._saved: SavedCheckpoint | None = None
        self.stall_seconds = time.perf_counter() - begun
        # Not a daemon: a program that ends waits for its last checkpoint.
        self._thread = threading.Thread(target=self._run, name="fullshard-checkpoint")
        self._thread.start()

    @property
    def path(self) -> Path:
        return self._job.target

    @property
    def failure(self) -> BaseException | None:
        """What went wrong and has not been raised yet."""
        return self._error

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> SavedCheckpoint:
        """Wait until the checkpoint is complete. Raises what went wrong, once."""
        self._thread.join()
        if self in _in_flight:
            _in_flight.remove(self)
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._saved is None:
            raise CheckpointError(f"{self.path}: was not saved; the error has been raised before.")
        return self._saved

    def _run(self) -> None:
        try:
            nbytes = _execute(self._job, self._peers)
            seconds = time.perf_counter() - self._begun
            self._saved = SavedCheckpoint(
                self._job.target, self._job.step, nbytes, seconds, self.stall_seconds
            )
        except FullshardError as error:
            self._error = error
        except BaseException as error:  # raised where somebody waits
            self._error = CheckpointError(
                f"{self.path}: the save in the background did not complete: {said(error)} Either a rank "
                "died, or destroy_process_group() came before wait(). Older checkpoints are as they were."
            )
            self._error.__cause__ = error


_in_flight: list[PendingSave] = []


@atexit.register
def _say_what_was_lost() -> None:
    """Name the save that failed while the program ended. Its thread has ended by now."""
    for pending in _in_flight:
        if pending.failure is not None:
            print(f"fullshard: {pending.failure}", file=sys.stderr)


def finish_background() -> None:
    """Wait for the save in the background, if there is one. Raises what went wrong in it."""
    while _in_flight:
        _in_flight[0].wait()


class _Staging:
    """Host memory that saves in the background copy to, kept from one to the next."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def staged(self, items: Sequence[ToWrite]) -> list[ToWrite]:
        """Return the same boxes over copies of their elements."""
        total = sum(_aligned(item.nbytes) for item in items)
        if self._memory.numel() < total:
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            on_device = any(item.view.device.type != "cpu" for item in items)
            self._memory = torch.empty(total, dtype=torch.uint8, pin_memory=on_device)
        copies, position = [], 0
        for item in items:
            memory = self._memory[position : position + item.nbytes].view(item.view.dtype)
            copies.append(memory.view(item.view.shape))
            position += _aligned(item.nbytes)
        if copies:
            torch._foreach_copy_(copies, [item.view for item in items])
        return [item._replace(view=copy) for item, copy in zip(items, copies, strict=True)]


_staging = _Staging()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


@torch.no_grad()
def _prepared(
    path: str | os.PathLike[str],
    model: Models,
    optimizer: Optimizers,
    extra: Mapping[str, Any] | None,
    step: int | None,
    metadata: Mapping[str, Any] | None,
    rng: bool,
    overwrite: bool,
    peers: Peers,
) -> _Job:
    peers.check_alike(
        path=str(path),
        step=step,
        overwrite=overwrite,
        rng=rng,
        model=section_names(model, "model"),
        optimizer=section_names(optimizer, "optimizer"),
    )
    if not isinstance(step, int | None):
        raise CheckpointError(f"step is {step!r}: give an int, or None.")
    if not Path(path).name:
        raise CheckpointError(f"path is {str(path)!r}: name a folder.")
    content = content_of(model, optimizer, extra or {}, rng=rng, peers=peers)

    def local_part() -> _Job:
        values = {
            "step": encoded(step, "step", _refuse),
            "metadata": encoded(dict(metadata or {}), "metadata", _refuse),
        }
        tensors = {
            holding.name: {
                "shape": holding.shape,
                "dtype": holding.dtype,
                "aliases": holding.names[1:],
                "placement": holding.placement,
            }
            for holding in content.holdings
        }
        items = list(to_write(content.holdings))
        return _Job(Path(path), overwrite, items, tensors, content, values, step)

    return peers.together(local_part)


def _refuse(name: str, _: torch.Tensor) -> None:
    raise CheckpointError(f"{name} is a tensor. Give tensors in extra=.")


def _execute(job: _Job, peers: Peers) -> int:
    """Write and commit; return the number of bytes of all files. Collective over ``peers``."""
    partial: list[PartialFolder] = []

    def begin() -> tuple[str, str]:
        tag = secrets.token_hex(4)
        partial.append(PartialFolder(job.target, tag, overwrite=job.overwrite))
        return str(partial[0].path), tag

    try:
        folder, tag = peers.of_first(begin)
        peers.together(lambda: _check_seen(Path(folder)))
        # Names of files bear the tag: if this replaces a checkpoint, both have files there for a while.
        written = peers.together(lambda: write_files(Path(folder), peers.rank, tag, job.items))
        everyones = peers.at_first((written, job.tensors, job.content.own_values))
        return peers.of_first(lambda: _commit(partial[0], job, everyones or [], peers.size))
    except BaseException:
        if partial:
            partial[0].give_up()
        raise


def _check_seen(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: rank 0 has made this folder, and this rank does not see it. Save to a filesystem "
            "that all hosts share."
        )


def _commit(
    partial: PartialFolder, job: _Job, everyones: Sequence[tuple[Any, Any, Any]], num_ranks: int
) -> int:
    manifest = manifest_of(job, everyones, num_ranks)
    for file in manifest.files:
        path = partial.path / file.name
        if not path.is_file() or path.stat().st_size != file.nbytes:
            raise CheckpointError(
                f"{path}: was written by another rank, but rank 0 does not see it. Save to a filesystem "
                "that all hosts share."
            )
    partial.complete(dumps(manifest), [file.name for file in manifest.files])
    return sum(file.nbytes for file in manifest.files)


def manifest_of(
    job: _Job, everyones: Sequence[tuple[WrittenFiles, Any, Any]], num_ranks: int
) -> Manifest:
    """Put together what all ranks have written.

    Raises CheckpointError if ranks disagree on a tensor, or its pieces do not cover it exactly once.
    """
    files: list[FileEntry] = []
    pieces: dict[str, list[Piece]] = {}
    facts: dict[str, dict[str, Any]] = {}
    own_values: dict[str, dict[str, Any]] = {}
    for rank, (written, tensors, own) in enumerate(everyones):
        for name, fact in tensors.items():
            known = facts.setdefault(name, fact)
            if (known["shape"], known["dtype"]) != (fact["shape"], fact["dtype"]):
                raise CheckpointError(
                    f"{name}: has shape {known['shape']} and {known['dtype']} on one rank, but "
                    f"{fact['shape']} and {fact['dtype']} on rank {rank}."
                )
        for each in written.pieces:
            piece = Piece(each.box, len(files) + each.file, each.start, each.checksums)
            pieces.setdefault(each.name, []).append(piece)
        files += written.files
        for key, tree in own.items():
            own_values.setdefault(key, {})[str(rank)] = tree
    entries = {}
    for name, fact in facts.items():
        own_pieces = tuple(sorted(pieces.get(name, ()), key=lambda piece: piece.box))
        if fault := tiling_fault(fact["shape"], [piece.box for piece in own_pieces]):
            raise CheckpointError(
                f"{name} of shape {fact['shape']}: {fault} of those that the ranks hold. Save with all "
                "ranks of the mesh, and one copy of the model in the job."
            )
        entries[name] = TensorEntry(
            fact["shape"], fact["dtype"], own_pieces, fact["aliases"], fact["placement"]
        )
    values = {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "ranks": num_ranks,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        **job.values,
        **job.content.values,
        "extra_by_rank": own_values,
    }
    return Manifest(tuple(files), entries, values)
