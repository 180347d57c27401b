"""Saving: `save_checkpoint` and `async_save_checkpoint`."""

import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from fullshard.checkpoint.background import PendingSave, finish_background, staging
from fullshard.checkpoint.local_content import Models, Optimizers
from fullshard.checkpoint.opening import Location
from fullshard.checkpoint.peers import Peers, said
from fullshard.checkpoint.stages import (
    SavedCheckpoint,
    SaveJob,
    SaveRequest,
    alike_in,
    capture,
    decide,
    execute,
)
from fullshard.errors import CheckpointError, FullshardError
from fullshard.process_hooks import collector_waits


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
        nbytes = execute(job, peers)
    saved = job.saved(nbytes, begun=begun, stall_seconds=time.perf_counter() - begun)
    if warning := job.warning(peers):  # last: it may be an error, and peers would wait
        warnings.warn(warning, stacklevel=3)
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
        own = captured.staged(staging.copies if knows else list)
    except Exception as error:
        fault = error
        if not isinstance(error, FullshardError):  # of a state_dict() of the user's, say
            fault = CheckpointError(f"{request.path}: cannot be saved: {said(error)}")
            fault.__cause__ = error
        failed = _raising(fault)
        return lambda: decide(alike, failed, peers)
    if knows:
        return lambda: decide(alike, own, peers)
    try:
        job = decide(alike, own, peers).staged(staging.copies)
    except Exception as error:  # raised where the other ranks raise it
        return _raising(error)
    return lambda: job


def _raising(error: Exception) -> Callable[[], NoReturn]:
    def fail() -> NoReturn:
        raise error

    return fail
