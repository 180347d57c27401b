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
import itertools
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fullshard.checkpoint.content import Content, agreed_content, to_write
from fullshard.checkpoint.folder import Draft, Folder, new_tag
from fullshard.checkpoint.local_content import (
    LocalContent,
    Models,
    Optimizers,
    Stage,
    Told,
    compares,
    content_of,
    named,
    section_names,
    structures_of,
)
from fullshard.checkpoint.manifest import FileEntry, FilePiece, Manifest, TensorEntry, readable
from fullshard.checkpoint.module_states import module_states
from fullshard.checkpoint.opening import Location, folder_at
from fullshard.checkpoint.peers import Peers
from fullshard.checkpoint.values import encoded
from fullshard.checkpoint.writing import ToWrite, WrittenFiles, write_files
from fullshard.engine.checks.optimizers import known, num_updates
from fullshard.engine.unit import comms_of
from fullshard.errors import CheckpointError, FullshardError
from fullshard.peers.paths import by_text
from fullshard.plan.boxes import tiling_fault
from fullshard.state.structure import Structure
from fullshard.versions import VERSION


@dataclasses.dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that is complete and stored for good.

    path: of its folder; a string if it is a URL. nbytes: of all ranks' files. seconds: from the call on. stall_seconds: how long the program waited.
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


class Moments(NamedTuple):
    """At which places of the program a rank is, by what counts them.

    Numbers are the same on all ranks that count one thing. Of models that nothing keeps equal, nobody knows.

    places: what each group has done together, and how often each optimizer that is saved has stepped, in words too.
    updates: for each group, `num_updates` of all that its units train, in their order; runs of equal ones, with
        their lengths.
    """

    places: dict[str, tuple[int, str]]
    updates: dict[str, list[tuple[int | None, int]]]


@dataclasses.dataclass(frozen=True, slots=True)
class Captured:
    """What one rank alone brings to a save.

    values: of the manifest.
    """

    request: SaveRequest
    target: Folder
    content: LocalContent
    values: Mapping[str, Any]
    moments: Moments

    def staged(self, stage: Stage) -> Callable[[], "Captured"]:
        """Copy what it refers to; return what puts the same together over the copies, later."""
        over_copies = self.content.staged(stage)
        return lambda: dataclasses.replace(self, content=over_copies())


@dataclasses.dataclass(frozen=True, slots=True)
class SaveJob:
    """What one rank writes, once it is decided."""

    request: SaveRequest
    target: Folder
    items: Sequence[ToWrite]
    tensors: Mapping[str, dict[str, Any]]
    content: Content
    values: Mapping[str, Any]

    def staged(self, stage: Stage) -> "SaveJob":
        """Return the same over copies, which training does not change."""
        copies = stage([item.view for item in self.items])
        items = [item._replace(view=copy) for item, copy in zip(self.items, copies, strict=True)]
        return dataclasses.replace(self, items=items)

    def warning(self, peers: Peers) -> str:
        """Return what to tell this rank's user; "" if nothing."""
        return self.content.warning if peers.rank == 0 else ""

    def saved(self, nbytes: int, *, begun: float, stall_seconds: float) -> SavedCheckpoint:
        """Return what users are told of it. begun: when, by ``time.perf_counter``."""
        seconds = time.perf_counter() - begun
        return SavedCheckpoint(
            folder_at(self.request.path).location, self.request.step, nbytes, seconds, stall_seconds
        )


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
    values = {
        "step": encoded(request.step, "step", _refuse),
        "metadata": _encoded_metadata(request.metadata),
    }
    structures, optimizers = structures_of(request.model), named(request.optimizer, "optimizer")
    content = content_of(structures, optimizers).with_extras(
        request.extra,
        module_states(structures),
        rng=request.rng,
        compares=compares(request.model),
    )
    return Captured(request, target, content, values, _moments(structures, optimizers))


def _moments(
    structures: Mapping[str, Structure], optimizers: Mapping[str, torch.optim.Optimizer]
) -> Moments:
    """Return at which places of the program this rank is."""
    places: dict[str, tuple[int, str]] = {}
    updates: dict[str, list[int | None]] = {}
    for unit, _ in (each for structure in structures.values() for each in structure.units):
        for record in (comm.record for comm in comms_of([unit])):
            if record is not None:
                text = f"{record.moment} ({record.place} operations of the group)"
                places[record.key] = record.place, text
                updates.setdefault(record.key, []).extend(map(num_updates, unit.holders))
    if places:
        groups = ", ".join(sorted(places))
        for section, optimizer in optimizers.items():
            number = known(optimizer).steps.value
            places[f"{section} of {groups}"] = number, f"{number} steps of {section}"
    runs = {key: itertools.groupby(numbers) for key, numbers in updates.items()}
    return Moments(
        places, {key: [(each, len([*run])) for each, run in own] for key, own in runs.items()}
    )


def _check_moments(everyones: Sequence[Moments]) -> None:
    """Raise CheckpointError where ranks were at different places when they called this."""
    for key in dict.fromkeys(key for own in everyones for key in own.places):
        _check_same({r: own.places[key] for r, own in enumerate(everyones) if key in own.places})
    for key in dict.fromkeys(key for own in everyones for key in own.updates):
        rows = {
            rank: [number for number, length in own.updates[key] for _ in range(length)]
            for rank, own in enumerate(everyones)
            if key in own.updates
        }
        for numbers in set(zip(*rows.values(), strict=False)):
            known = zip(rows, numbers, strict=True)
            _check_same({r: (n, f"{n} steps of optimizers") for r, n in known if n is not None})


def _check_same(seen: Mapping[int, tuple[int, str]]) -> None:
    """Raise CheckpointError where ranks have different numbers. seen: by rank, with words for each."""
    if len({number for number, _ in seen.values()}) > 1:
        texts = by_text({rank: text for rank, (_, text) in seen.items()})
        copies = "; ".join(f"{ranks}: {text}" for ranks, text in texts)
        raise CheckpointError(
            f"Ranks save states of different moments. {copies}. Nothing was saved. Save on all ranks after "
            "the same step: let one rank look at its clock and tell the others, as CheckpointManager does."
        )


def alike_in(request: SaveRequest) -> dict[str, Any]:
    """Return what all ranks have to ask for alike, as it is now: the program may change its dicts."""
    return {
        "path": str(request.path),
        "step": request.step,
        "metadata": _comparable(request.metadata),
        "overwrite": request.overwrite,
        "rng": request.rng,
        "model": section_names(request.model, "model"),
        "optimizer": section_names(request.optimizer, "optimizer"),
        "extra": _keys(request.extra),
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
    content = agreed_content(own.content, [told for told, _ in everyones], peers)
    tensors = {
        holding.name: {
            "shape": holding.shape,
            "dtype": holding.dtype,
            "aliases": holding.names[1:],
            "placement": holding.placement,
        }
        for holding in content.holdings
    }
    return SaveJob(
        own.request, own.target, to_write(content.holdings), tensors, content, own.values
    )


def _encoded_metadata(metadata: Mapping[str, Any]) -> Any:
    try:
        return encoded(dict(metadata), "metadata", _refuse)
    except FullshardError:
        raise
    except Exception as error:  # of arrays of other kinds, or what contains itself
        raise CheckpointError(
            f"metadata cannot be saved: {type(error).__name__}: {error}. Give numbers, strings, and lists "
            "and dicts of them."
        ) from error


def _keys(extra: Any) -> Any:
    """Return the keys of the extra state in one order; itself if it is none, which is refused later."""
    return sorted(extra, key=str) if isinstance(extra, Mapping) else extra


def _comparable(metadata: Mapping[str, Any]) -> Any:
    """Return what ranks have alike that gave the same metadata; None for what cannot be saved."""
    try:
        return encoded(dict(metadata), "metadata", _refuse)
    except Exception:  # which is raised with what else the ranks find
        return None


def _refuse(name: str, _: torch.Tensor) -> None:
    raise CheckpointError(f"{name} is a tensor. Give tensors in extra=.")


def execute(job: SaveJob, peers: Peers) -> int:
    """Write and commit; return the number of bytes of all files. Collective over ``peers``."""
    drafts: list[Draft] = []

    def begin() -> tuple[str, str]:
        tag = new_tag()
        drafts.append(job.target.draft(tag, overwrite=job.request.overwrite))
        return str(drafts[0].folder), tag

    try:
        place, tag = peers.of_first(begin)
        # Names of files bear the tag: if this replaces a checkpoint, both have files there for a while.
        everyones = peers.at_first(
            lambda: (
                write_files(_seen(place, tag), peers.rank, tag, job.items),
                job.tensors,
                job.content.own_values,
            )
        )
        nbytes = peers.of_first(lambda: _commit(drafts[0], job, everyones(), peers.size))
    except BaseException:
        if drafts:
            drafts[0].give_up()
        raise
    if job.request.then is not None:
        peers.of_first(job.request.then)
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
    draft: Draft, job: SaveJob, everyones: Sequence[tuple[Any, Any, Any]], num_ranks: int
) -> int:
    own_values: dict[str, dict[str, Any]] = {}
    for rank, (_, _, own) in enumerate(everyones):
        for key, tree in own.items():
            own_values.setdefault(key, {})[str(rank)] = tree
    values = {
        **facts_of_today(num_ranks),
        **job.values,
        **job.content.values,
        "extra_by_rank": own_values,
    }
    manifest = manifest_of([(written, tensors) for written, tensors, _ in everyones], values)
    check_sizes(draft, manifest)
    content = readable(manifest, str(job.target))
    draft.complete(content, [file.name for file in manifest.files])
    return sum(file.nbytes for file in manifest.files)


def facts_of_today(num_ranks: int) -> dict[str, Any]:
    """Return what a manifest says of the save itself."""
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "ranks": num_ranks,
        "versions": {
            "fullshard": VERSION,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def check_sizes(draft: Draft, manifest: Manifest) -> None:
    """Raise CheckpointError if this process does not see all files as they were written."""
    for file in manifest.files:
        if draft.folder.size_of(file.name) != file.nbytes:
            raise CheckpointError(
                f"{draft.folder}/{file.name}: was written by another rank, but rank 0 does not see it. "
                "Save to a filesystem that all hosts share."
            )


def manifest_of(
    everyones: Sequence[tuple[WrittenFiles, Mapping[str, dict[str, Any]]]],
    values: Mapping[str, Any],
) -> Manifest:
    """Put together what all ranks have written, and facts of each tensor.

    Raises CheckpointError if ranks disagree on a tensor, or its pieces do not cover it exactly once.
    """
    files: list[FileEntry] = []
    pieces: dict[str, list[FilePiece]] = {}
    facts: dict[str, dict[str, Any]] = {}
    for rank, (written, tensors) in enumerate(everyones):
        for name, fact in tensors.items():
            known = facts.setdefault(name, fact)
            if (known["shape"], known["dtype"]) != (fact["shape"], fact["dtype"]):
                raise CheckpointError(
                    f"{name}: has shape {known['shape']} and {known['dtype']} on one rank, but "
                    f"{fact['shape']} and {fact['dtype']} on rank {rank}."
                )
        for each in written.pieces:
            piece = FilePiece(each.box, len(files) + each.file, each.start, each.checksums)
            pieces.setdefault(each.name, []).append(piece)
        files += written.files
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
    return Manifest(tuple(files), entries, values)
