"""Loading: every rank reads the boxes that it holds, from whichever files contain them.

First everything is compared (`load_plan`), and what does not fit is refused on all ranks together, before a
value is changed. Then tensors are read straight into the model's memory, and what is no tensor is handed on.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.background import finish_background
from fullshard.checkpoint.fitting import Source, check_allowed, check_fits, listed
from fullshard.checkpoint.load_plan import LoadPlan, plan_load
from fullshard.checkpoint.local_content import Models, Optimizers, named, section_names
from fullshard.checkpoint.opening import Location, check_same_files, opened
from fullshard.checkpoint.peers import Peers
from fullshard.checkpoint.room import Load, check_room, state_nbytes
from fullshard.checkpoint.saved_state import SavedState
from fullshard.checkpoint.saved_values import OptimizerValues, SavedValues
from fullshard.checkpoint.spans import Wanted
from fullshard.process_hooks import collector_waits
from fullshard.state.holdings import Holding, tell_loaded

ALLOWED = ("missing", "unexpected", "dtype", "memory")


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """What a load has done.

    step, metadata: as they were saved. extra: by key, the values that were saved; what has
    ``load_state_dict()`` was loaded. num_tensors: that were read, of the model and of the optimizer.
    left_out: names of tensors of the checkpoint that nothing took, and of the model that it lacks,
    where that was allowed. notes: what else a reader of a log should know.
    """

    path: Path | str
    step: int | None
    metadata: dict[str, Any]
    extra: dict[str, Any]
    num_tensors: int
    nbytes: int
    left_out: tuple[str, ...]
    notes: tuple[str, ...]


def load_checkpoint(
    path: Location,
    model: Models,
    optimizer: Optimizers = None,
    *,
    extra: Mapping[str, Any] | None = None,
    rng: bool = True,
    allow: Collection[str] | str = (),
) -> LoadedCheckpoint:
    """Load what `save_checkpoint` has saved, on any number of ranks and sharded in any way. Collective.

        loaded = load_checkpoint("runs/a/step-100", model, optimizer, extra={"scheduler": scheduler})

    Without an optimizer, only the model is loaded. extra: objects with ``load_state_dict()`` are given
    what was saved under their key; other values are only returned. rng: continue the random generators.
    allow: what is not to be an error:

        "missing"     the model has tensors that the checkpoint lacks; they stay as they are
        "unexpected"  the checkpoint has tensors of the model's or optimizer's that nothing takes
        "dtype"       tensors of another dtype are converted
        "memory"      the hosts seem to have too little memory

    Raises CheckpointError, on all ranks, for a checkpoint that is not complete, is damaged or does not
    fit. What does not fit is found before anything is changed. If reading fails later, the values of the
    model and the optimizer are no longer those of before.
    """
    finish_background()
    peers = Peers(call="load_checkpoint")

    def begin() -> tuple[tuple[SavedState, frozenset[str]], tuple[str, str]]:
        allowed = check_allowed(allow, ALLOWED)
        state = opened(path)
        return (state, allowed), (state.digest, str(state.location))

    alike = {
        "rng": rng,
        "allow": listed(allow),
        "model": section_names(model, "model"),
        "optimizer": section_names(optimizer, "optimizer"),
    }
    # Outside of inference mode, in which optimizer state would be of no use for training.
    with collector_waits(), torch.inference_mode(False):
        (state, allowed), seen = peers.together_telling(begin, alike=alike)
        with state:
            check_same_files(seen)
            return _load(state, model, optimizer, extra or {}, peers, allowed=allowed, rng=rng)


def _load(
    state: SavedState,
    models: Models,
    optimizers: Optimizers,
    extra: Mapping[str, Any],
    peers: Peers,
    *,
    allowed: frozenset[str],
    rng: bool,
) -> LoadedCheckpoint:
    """Plan on all ranks, refuse on all what does not fit, read tensors, then hand on what is none."""

    def values_of(state: SavedState) -> SavedValues:
        return SavedValues(state, peers.rank, peers.size)

    def loads() -> Load:
        own = named(optimizers, "optimizer")
        return Load(named(models, "model").values(), own.values(), state_nbytes(state.tensors, own))

    of_optimizers: dict[str, OptimizerValues] = {}

    def known() -> tuple[LoadPlan, list[str]]:
        optimizers_by_section = named(optimizers, "optimizer")
        plan = plan_load(state, named(models, "model"), optimizers_by_section, extra, values_of)
        for section in optimizers_by_section:
            own = values_of(state).of_optimizer(section)
            if own is not None:
                of_optimizers[section] = own
        values_of(state).check(extra)
        return plan, plan.problems

    if not allowed & {"missing", "memory"}:  # what is missing is not written to
        check_room(peers, state.location, loads)
    plan, problems = peers.together_telling(known)
    differing = check_fits(_source(state.location), problems, allowed)
    nbytes = peers.together(lambda: _read(state, plan.holdings))
    values = values_of(state)

    def hand_on() -> tuple[dict[str, Any], list[str]]:
        for section, (scalars, groups) in of_optimizers.items():
            plan.destinations[section].assign(scalars, groups, peers.rank)
        for module, own_state in plan.module_states:
            module.set_extra_state(own_state)
        others = values.hand_on(extra)
        return others, values.restore_random_states() if rng else []

    others, notes = peers.together(hand_on)
    left_out = {*differing.get("missing", ()), *differing.get("unexpected", ())}
    return LoadedCheckpoint(
        state.location,
        state.values.get("step"),
        values.decoded(state.values.get("metadata", {})),
        others,
        len(plan.holdings),
        nbytes,
        tuple(sorted(left_out)),
        (*plan.notes, *notes),
    )


@torch.no_grad()
def _read(state: SavedState, holdings: Sequence[Holding]) -> int:
    """Read what this rank holds into its memory; return the number of bytes."""
    wanted = [Wanted(h.name, box, view) for h in holdings for box, view in h.boxes]
    state.read(wanted)
    tell_loaded(holdings)
    return sum(each.view.numel() * each.view.itemsize for each in wanted)


def _source(location: Path | str) -> Source:
    advice = "Load the checkpoint of this model, or say in allow= what may differ."
    return Source(location, "checkpoint", advice)
