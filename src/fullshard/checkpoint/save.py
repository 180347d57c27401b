"""One save, stage by stage: every rank writes what it owns, then rank 0 makes it a checkpoint.

    capture   what this rank alone knows and holds; for a save in the background, copied
    decide    the ranks agree on what there is, and who writes what
    begin     rank 0 makes the draft, and every rank sees it
    write     every rank its files
    commit    rank 0 puts the manifest together, checks that every element is in it once, and completes

Capturing is done on the program's thread, everything else may be in the background. Each stage after it ends
on all ranks together, so an error on one is an error on all, and nothing is left behind.
"""

import dataclasses
import functools
import itertools
import platform
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from fullshard.checkpoint.content import (
    Content,
    LocalContent,
    Models,
    Optimizers,
    Told,
    agreed_content,
    content_of,
    named,
    section_names,
)
from fullshard.checkpoint.drafts import new_tag
from fullshard.checkpoint.fit import check_copies
from fullshard.checkpoint.folder import Draft, Folder, Location, folder_at
from fullshard.checkpoint.manifest import (
    FileEntry,
    FilePiece,
    Manifest,
    SavedTensor,
    TensorEntry,
    readable,
)
from fullshard.checkpoint.peers import Peers, said
from fullshard.checkpoint.values import encoded
from fullshard.checkpoint.write import WrittenFiles, write_files
from fullshard.engine.checks.optimizers import known, num_updates
from fullshard.engine.unit import comms_of
from fullshard.errors import CheckpointError, FullshardError
from fullshard.peers.paths import by_text
from fullshard.plan.boxes import tiling_fault
from fullshard.process_hooks import at_exit, collector_waits, start_thread
from fullshard.state.holdings import is_ddp
from fullshard.state.structure import Structure, structure_of
from fullshard.versions import VERSION

Tensors = Mapping[str, SavedTensor]


@dataclasses.dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that is complete and stored for good.

    path: of its folder; a string if it is a URL. nbytes: of all ranks' files. seconds: from the call on.
    stall_seconds: how long the program waited.
    """

    path: Path | str
    step: int | None
    nbytes: int
    seconds: float
    stall_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class SaveRequest:
    """What the user asks for, as `save_checkpoint` describes it.

    then: is called on rank 0 once the checkpoint is complete; its errors are the save's.
    """

    path: Location
    model: Models
    optimizer: Optimizers
    extra: Mapping[str, Any]
    step: int | None = None
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rng: bool = True
    overwrite: bool = False
    then: Callable[[], object] | None = None

    def saved(self, nbytes: int, *, begun: float, stall_seconds: float) -> SavedCheckpoint:
        """Return what users are told of it. begun: when, by ``time.perf_counter``."""
        seconds = time.perf_counter() - begun
        return SavedCheckpoint(
            folder_at(self.path).location, self.step, nbytes, seconds, stall_seconds
        )


# At which places of the program a rank is, by what counts them: in words, and as runs of equal numbers with their
# lengths. Numbers are the same on all ranks that count one thing. Of models that nothing keeps equal, nobody knows.
Moments = dict[str, tuple[str, list[tuple[int | None, int]]]]


class Captured(NamedTuple):
    """What one rank alone brings to a save."""

    target: Folder
    content: LocalContent
    moments: Moments


class SaveJob(NamedTuple):
    """What one rank writes, once it is decided."""

    target: Folder
    content: Content


@torch.no_grad()
def capture(request: SaveRequest) -> Captured:
    """Return what this rank alone brings to a save. Raises FullshardError for what cannot be saved."""
    if type(request.step) not in (int, type(None)):
        raise CheckpointError(f"step is {request.step!r}: give an int, or None.")
    if not folder_at(request.path).name:
        raise CheckpointError(f"path is {str(request.path)!r}: name a folder.")
    target = folder_at(request.path, lasting=True)
    for name, given in (("metadata", request.metadata), ("extra", request.extra)):
        if not isinstance(given, Mapping):
            raise CheckpointError(f"{name} is {given!r:.80}: give a dict.")
    metadata, fault = _tried_encoding(request.metadata)
    if isinstance(fault, FullshardError):
        raise fault
    if fault is not None:  # of arrays of other kinds, or what contains itself
        raise CheckpointError(
            f"metadata cannot be saved: {said(fault)}. Give numbers, strings, and lists and dicts of them."
        ) from fault
    models = named(request.model, "model")
    structures = {section: structure_of(model) for section, model in models.items()}
    optimizers = named(request.optimizer, "optimizer")
    content = content_of(structures, optimizers, request.extra, rng=request.rng)
    # Reading all values takes as long as copying them. DistributedDataParallel keeps them equal.
    every = request.model.values() if isinstance(request.model, Mapping) else [request.model]
    values = {"step": encoded(request.step, "step"), "metadata": metadata}
    content = dataclasses.replace(content, compares=not all(map(is_ddp, every)), given=values)
    return Captured(target, content, _moments(structures, optimizers))


def _moments(
    structures: Mapping[str, Structure], optimizers: Mapping[str, torch.optim.Optimizer]
) -> Moments:
    """Return what each group has done together, how often its units were updated, and optimizers have stepped."""
    moments: Moments = {}
    updates: dict[str, list[int | None]] = {}
    for unit, _ in (each for structure in structures.values() for each in structure.units):
        for record in (comm.record for comm in comms_of([unit])):
            if record is not None:
                text = f"{record.moment} ({record.place} operations of the group)"
                moments[record.key] = text, [(record.place, 1)]
                updates.setdefault(record.key, []).extend(map(num_updates, unit.holders))
    groups = ", ".join(sorted(updates))
    for section, optimizer in optimizers.items() if groups else ():
        number = known(optimizer).steps.value
        moments[f"{section} of {groups}"] = f"{number} steps of {section}", [(number, 1)]
    for key, numbers in updates.items():
        runs = [(number, len([*run])) for number, run in itertools.groupby(numbers)]
        moments[f"updates of {key}"] = "", runs
    return moments


def _check_moments(everyones: Sequence[Moments]) -> None:
    """Raise CheckpointError where ranks were at different places when they called this."""
    for key in dict.fromkeys(key for own in everyones for key in own):
        rows = {
            rank: [number for number, length in own[key][1] for _ in range(length)]
            for rank, own in enumerate(everyones)
            if key in own
        }
        for numbers in set(zip(*rows.values(), strict=False)):
            seen = {rank: n for rank, n in zip(rows, numbers, strict=True) if n is not None}
            if len({*seen.values()}) < 2:
                continue
            texts = by_text(
                {r: everyones[r][key][0] or f"{n} steps of optimizers" for r, n in seen.items()}
            )
            copies = "; ".join(f"{ranks}: {text}" for ranks, text in texts)
            raise CheckpointError(
                f"Ranks save states of different moments. {copies}. Nothing was saved. Save on all ranks after "
                "the same step: let one rank look at its clock and tell the others, as CheckpointManager does."
            )


def alike_in(request: SaveRequest) -> dict[str, Any]:
    """Return what all ranks have to ask for alike, as it is now: the program may change its dicts."""
    extra: object = request.extra  # refused later if it is no dict
    return {
        "path": str(request.path),
        "step": request.step,
        # None for what cannot be saved, which is raised with what else the ranks find.
        "metadata": _tried_encoding(request.metadata)[0],
        "overwrite": request.overwrite,
        "rng": request.rng,
        "model": section_names(request.model, "model"),
        "optimizer": section_names(request.optimizer, "optimizer"),
        "extra": sorted(extra, key=str) if isinstance(extra, Mapping) else extra,
    }


@torch.no_grad()
def decide(alike: Mapping[str, Any], captured: Callable[[], Captured], peers: Peers) -> SaveJob:
    """Agree with the other ranks on what there is, and decide what this rank writes. Collective.

    alike: see `alike_in`. captured: returns what this rank brings; its error is raised on all ranks.
    Raises CheckpointError, on all ranks, for arguments that differ between them or cannot be saved.
    """

    def known() -> tuple[Captured, tuple[Told, Moments]]:
        own = captured()
        return own, (own.content.told(), own.moments)

    own, everyones = peers.together_telling(known, alike=alike)
    _check_moments([moments for _, moments in everyones])
    return SaveJob(own.target, agreed_content(own.content, [told for told, _ in everyones], peers))


def _tried_encoding(metadata: Mapping[str, Any]) -> tuple[Any, Exception | None]:
    """Return metadata as a manifest has it, or why it cannot."""
    try:
        return encoded(dict(metadata), "metadata"), None
    except Exception as error:
        return None, error


def execute(request: SaveRequest, job: SaveJob, peers: Peers) -> int:
    """Write and commit; return the number of bytes of all files. Collective over ``peers``."""
    drafts: list[Draft] = []

    def begin() -> tuple[str, str]:
        tag = new_tag()
        drafts.append(job.target.draft(tag, overwrite=request.overwrite))
        return str(drafts[0].folder), tag

    try:
        place, tag = peers.of_first(begin)
        # Names of files bear the tag: if this replaces a checkpoint, both have files there for a while.
        everyones = peers.at_first(
            lambda: (
                write_files(_seen(place, tag), peers.rank, tag, job.content.to_write()),
                job.content.tensors(),
                job.content.own_values,
            )
        )
        nbytes = peers.of_first(lambda: _commit(drafts[0], job, everyones()))
    except BaseException:
        if drafts:
            drafts[0].give_up()
        raise
    if request.then is not None:
        peers.of_first(request.then)
    return nbytes


def _seen(place: str, tag: str) -> Folder:
    folder = folder_at(place)
    if not folder.sees_draft(tag):
        raise CheckpointError(
            f"{folder}: rank 0 has made this folder, and this rank does not see it. Save to a filesystem "
            "that all hosts share."
        )
    return folder


def _commit(
    draft: Draft, job: SaveJob, everyones: Sequence[tuple[WrittenFiles, Tensors, dict[str, Any]]]
) -> int:
    own_values: dict[str, dict[str, Any]] = {}
    for rank, (_, _, own) in enumerate(everyones):
        for key, tree in own.items():
            own_values.setdefault(key, {})[str(rank)] = tree
    values = {**job.content.values, "extra_by_rank": own_values}
    return commit(draft, job.target, [(files, tensors) for files, tensors, _ in everyones], values)


def commit(
    draft: Draft,
    target: object,
    everyones: Sequence[tuple[WrittenFiles, Tensors]],
    values: Mapping[str, Any],
) -> int:
    """Make a draft the checkpoint of what all ranks have written; return the number of bytes of all files.

    target: where, for messages. Raises CheckpointError if this process does not see all files as they were
    written, or they could not be loaded.
    """
    facts = {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "ranks": len(everyones),
        "versions": {
            "fullshard": VERSION,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    manifest = manifest_of(everyones, {**facts, **values, **facts})  # of this save, and first
    for file in manifest.files:
        if draft.folder.size_of(file.name) != file.nbytes:
            raise CheckpointError(
                f"{draft.folder}/{file.name}: was written by another rank, but rank 0 does not see it. "
                "Save to a filesystem that all hosts share."
            )
    draft.complete(readable(manifest, str(target)), [file.name for file in manifest.files])
    return sum(file.nbytes for file in manifest.files)


def manifest_of(
    everyones: Sequence[tuple[WrittenFiles, Tensors]], values: Mapping[str, Any]
) -> Manifest:
    """Put together what all ranks have written, and what each says of its tensors.

    Raises CheckpointError if ranks disagree on a tensor, or its pieces do not cover it exactly once.
    """
    files: list[FileEntry] = []
    pieces: dict[str, list[FilePiece]] = {}
    facts: dict[str, SavedTensor] = {}
    for rank, (written, tensors) in enumerate(everyones):
        for name, fact in tensors.items():
            known = facts.setdefault(name, fact)
            if (known.shape, known.dtype) != (fact.shape, fact.dtype):
                raise CheckpointError(
                    f"{name}: has shape {known.shape} and {known.dtype} on one rank, but "
                    f"{fact.shape} and {fact.dtype} on rank {rank}."
                )
        for name, piece in written.pieces:
            moved = dataclasses.replace(piece, file=len(files) + piece.file)
            pieces.setdefault(name, []).append(moved)
        files += written.files
    entries = {}
    for name, fact in facts.items():
        own_pieces = tuple(sorted(pieces.get(name, ()), key=lambda piece: piece.box))
        if fault := tiling_fault(fact.shape, [piece.box for piece in own_pieces]):
            raise CheckpointError(
                f"{name} of shape {fact.shape}: {fault} of those that the ranks hold. Save with all "
                "ranks of the mesh, and one copy of the model in the job."
            )
        entries[name] = TensorEntry(
            fact.shape, fact.dtype, fact.aliases, fact.placement, own_pieces
        )
    return Manifest(tuple(files), entries, values)


# In the background

# Python lets one thread run at a time, for 5 ms. The program goes first: it has waited for the copy.
_HEAD_START_SECONDS = 0.002


class PendingSave:
    """A save in the background.

    stall_seconds: how long the program waited for the copy to host memory.
    """

    def __init__(
        self, request: SaveRequest, decided: Callable[[], SaveJob], peers: Peers, begun: float
    ) -> None:
        """Begin it. decided: returns what this rank writes. begun: when, by ``time.perf_counter``."""
        self._peers, self._begun = peers, begun
        try:
            self.path: Path | str = folder_at(request.path).location
        except CheckpointError:  # which `decided` raises, on all ranks, once they have met
            self.path = str(request.path)
        self._error: BaseException | None = None
        self._saved: SavedCheckpoint | None = None
        self._warning = ""
        self.stall_seconds = time.perf_counter() - begun
        # Not a daemon: a program that ends waits for its last checkpoint.
        _in_flight.append(self)
        _begin_in_background()
        self._thread = start_thread(
            self._run,
            request,  # not kept beyond the save, lest its model lives on
            decided,
            name="fullshard-checkpoint",
            why="saves in the background",
            is_daemon=False,
        )

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
        if self._warning:
            warning, self._warning = self._warning, ""
            warnings.warn(warning, stacklevel=2)
        return self._saved

    def _run(self, request: SaveRequest, decided: Callable[[], SaveJob]) -> None:
        time.sleep(_HEAD_START_SECONDS)
        try:
            with self._peers.naming_absent(self.path):
                # Ranks share cores and disks: what one does in the background would hold up others' copies.
                self._peers.gathered(None)
                job = decided()
                nbytes = execute(request, job, self._peers)
            self._warning = job.content.warning
            self._saved = request.saved(nbytes, begun=self._begun, stall_seconds=self.stall_seconds)
        except FullshardError as error:
            self._error = error
        except BaseException as error:  # raised where somebody waits
            self._error = CheckpointError(
                f"{self.path}: the save in the background did not complete: {said(error)} Either a rank "
                "died, or destroy_process_group() came before wait(). Older checkpoints are as they were."
            )
            self._error.__cause__ = error


_in_flight: list[PendingSave] = []


def _say_what_was_lost() -> None:
    """Say what went wrong with the save while the program ended. Its thread has ended by now."""
    for pending in _in_flight:
        if left_unsaid := pending._error or pending._warning:
            print(f"fullshard: {left_unsaid}", file=sys.stderr)


@functools.cache
def _begin_in_background() -> None:
    at_exit(_say_what_was_lost, why="a save in the background may have failed since")


def finish_background() -> None:
    """Wait for the save in the background, if there is one. Raises what went wrong in it."""
    while _in_flight:
        _in_flight[0].wait()


class Staging:
    """Host memory that saves in the background copy to, kept from one to the next."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._copies: list[torch.Tensor] = []
        self._kinds: list[tuple[torch.Size, torch.dtype]] = []  # of the copies

    @torch.no_grad()
    def copies(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of tensors, which last until the next call."""
        kinds = [(view.shape, view.dtype) for view in views]
        if kinds != self._kinds:
            self._divide(views)
            self._kinds = kinds
        if self._copies:
            torch._foreach_copy_(self._copies, [*views])
        return [*self._copies]

    @torch.inference_mode(False)  # or nothing could be copied there outside of that mode
    def _divide(self, views: Sequence[torch.Tensor]) -> None:
        """Make memory for copies of tensors, if there is too little of it, and divide it among them."""
        sizes = [view.numel() * view.itemsize for view in views]
        total = sum(map(_aligned, sizes))
        self._copies, self._kinds = [], []
        if self._memory.numel() < total:
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # the old one goes first
            check_copies(total)
            on_device = any(view.device.type != "cpu" for view in views)
            self._memory = torch.empty(total, dtype=torch.uint8, device="cpu", pin_memory=on_device)
        position = 0
        for view, nbytes in zip(views, sizes, strict=True):
            memory = self._memory[position : position + nbytes].view(view.dtype)
            self._copies.append(memory.view(view.shape))
            position += _aligned(nbytes)


staging = Staging()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


# What users call


def save_checkpoint(
    path: Location,
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
        see the same filesystem there. Or a URL that fsspec knows: s3://bucket/a/step-100.
    model, optimizer: sharded in any way or not at all; one, or several by key.
    extra: by key, objects with ``state_dict()`` (schedulers, scalers, data loaders, EMA), or values:
        numbers, strings, tensors, lists and dicts of them. What differs between ranks is kept for each.
    step, metadata: for readers; ``metadata`` is a dict of such values.
    rng: save the states of the random generators of every rank.
    overwrite: replace a checkpoint of this name; until the new one is complete, the old one is.

    Raises CheckpointError, on all ranks, if one cannot do its part; what was written is removed then, and
    an older checkpoint is as it was.
    """
    request = SaveRequest(path, model, optimizer, extra or {}, step, metadata or {}, rng, overwrite)
    return save_now(request)


def async_save_checkpoint(
    path: Location,
    model: Models,
    optimizer: Optimizers = None,
    *,
    extra: Mapping[str, Any] | None = None,
    step: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    rng: bool = True,
    overwrite: bool = False,
) -> PendingSave:
    """Save in the background what `save_checkpoint` would save now. Collective.

    Returns once this rank's part is copied to host memory, which is kept for the next time; mostly without
    waiting for other ranks. One save at a time: a second one waits for the first. An error of a save is
    raised on all ranks by its ``wait()``, or else by the next save or load.
    """
    request = SaveRequest(path, model, optimizer, extra or {}, step, metadata or {}, rng, overwrite)
    return save_later(request)


def save_now(request: SaveRequest) -> SavedCheckpoint:
    """Do what `save_checkpoint` does. Collective."""
    begun = time.perf_counter()
    finish_background()
    peers = Peers(call="save_checkpoint")
    peers.come()
    with collector_waits(), peers.naming_absent(request.path):
        job = decide(alike_in(request), lambda: capture(request), peers)
        nbytes = execute(request, job, peers)
    saved = request.saved(nbytes, begun=begun, stall_seconds=time.perf_counter() - begun)
    if job.content.warning:  # last: it may be an error, and peers would wait
        warnings.warn(job.content.warning, stacklevel=3)
    return saved


def save_later(request: SaveRequest) -> PendingSave:
    """Do what `async_save_checkpoint` does. Collective."""
    begun = time.perf_counter()
    finish_background()
    peers = Peers(call="async_save_checkpoint")
    peers.come()
    with collector_waits():
        return PendingSave(request, _decided_later(request, peers), peers, begun)


def _decided_later(request: SaveRequest, peers: Peers) -> Callable[[], SaveJob]:
    """Copy what this rank may have to write; return what decides, in the background, what it writes.

    Where a rank has much of which it cannot know alone who writes it, the ranks decide first.
    """
    alike = alike_in(request)
    try:
        captured = capture(request)
        knows = peers.size == 1 or captured.content.is_mostly_numbered
        if knows:
            captured = captured._replace(content=captured.content.staged(staging.copies))
    except Exception as error:
        fault = error
        if not isinstance(error, FullshardError):  # of a state_dict() of the user's, say
            fault = CheckpointError(f"{request.path}: cannot be saved: {said(error)}")
            fault.__cause__ = error
        failed = _raising(fault)
        return lambda: decide(alike, failed, peers)
    if knows:
        return lambda: decide(alike, lambda: captured, peers)
    try:
        job = decide(alike, lambda: captured, peers)
        job = job._replace(content=job.content.staged(staging.copies))
    except Exception as error:  # raised where the other ranks raise it
        return _raising(error)
    return lambda: job


def _raising(error: Exception) -> Callable[[], NoReturn]:
    def fail() -> NoReturn:
        raise error

    return fail
