"""Loading: every rank reads the boxes that it holds, from whichever files contain them.

First everything is compared (`plan_load`), and what does not fit is refused on all ranks together, before a value is
changed. Then tensors are read straight into the model's memory, and what is no tensor is handed on (`SavedValues`).
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.content import Models, Optimizers, held_by, named, section_names
from fullshard.checkpoint.fit import (
    Load,
    check_allowed,
    check_fits,
    check_room,
    listed,
    other_shape,
)
from fullshard.checkpoint.folder import Location
from fullshard.checkpoint.opening import check_same_files, opened
from fullshard.checkpoint.optimizer import check_trained, parameters_of, trained_by
from fullshard.checkpoint.optimizer_load import OptimizerLoad
from fullshard.checkpoint.peers import Peers
from fullshard.checkpoint.read import Names, SavedState, Wanted, naming_malformed
from fullshard.checkpoint.save import finish_background
from fullshard.checkpoint.values import (
    MODULE_STATES,
    RNG,
    States,
    decoded,
    encoded,
    match_module_states,
    set_random_states,
    tensor_names,
)
from fullshard.errors import CheckpointError, StateError
from fullshard.plan.boxes import whole_box
from fullshard.process_hooks import collector_waits
from fullshard.state.holdings import HeldTensor, Holding, tell_loaded, tensor_holding
from fullshard.state.host_memory import bytes_of
from fullshard.state.optim_keys import Trained
from fullshard.state.structure import structure_of
from fullshard.state.unit_parts import HeldBox

OptimizerValues = tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]


class SavedValues:
    """The values of a checkpoint, as one of ``num_ranks`` ranks gets them.

    Raises CheckpointError for values of no known form.
    """

    def __init__(self, state: SavedState, rank: int, num_ranks: int) -> None:
        self._state, self._rank, self._num_ranks = state, rank, num_ranks
        # Extra state by key: what is equal on all ranks, and what is not. Nothing is in both.
        self._shared: Mapping[str, Any] = state.values.get("extra", {})
        self._by_rank: Mapping[str, Mapping[str, Any]] = state.values.get("extra_by_rank", {})

    def decoded(self, tree: Any, tensor: Callable[[str], torch.Tensor] | None = None) -> Any:
        """Return a value of the manifest. tensor: returns a tensor that it names; a whole one if None."""
        with naming_malformed(f"{self._state.location}: a value is"):
            return decoded(tree, tensor or self._tensor)

    def of_optimizer(self, section: str) -> OptimizerValues | None:
        """Return an optimizer's scalars, by parameter, and its groups; None if it was not saved."""
        own = self._state.values.get("optimizers", {}).get(section)
        if own is None:
            return None
        scalars = {name: self.decoded(each) for name, each in own["scalars"].items()}
        return scalars, self.decoded(own["groups"])

    def check(self, extra: Mapping[str, Any]) -> None:
        """Refuse what `hand_on` could not hand on: to be called before anything is changed."""
        for key in self._extra_keys():
            self._tree_of(key, _target_of(key, extra))

    def hand_on(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Load extra state into what has ``load_state_dict()`` under its key; return all other values."""
        others: dict[str, Any] = {}
        for key in self._extra_keys():
            target = _target_of(key, extra)
            value = self._value_of(self._tree_of(key, target), key, target)
            if target is None:
                others[key] = value
            else:
                target.load_state_dict(value)
        return others

    def _extra_keys(self) -> list[str]:
        """Return the keys of the extra state that is the user's own."""
        return [k for k in (*self._shared, *self._by_rank) if k not in (RNG, MODULE_STATES)]

    def module_states(self) -> States:
        """Return what modules have saved of their own.

        Where ranks differed, this rank's, and another rank's of modules that this one did not have.
        """
        if MODULE_STATES in self._shared:
            found: States = self.decoded(self._shared[MODULE_STATES])
            return found
        by_rank = self._by_rank.get(MODULE_STATES, {})
        joined: States = {}
        for rank in sorted(by_rank, key=lambda each: each != str(self._rank)):
            for section, states in self.decoded(by_rank[rank]).items():
                joined[section] = {**states, **joined.get(section, {})}
        return joined

    def restore_random_states(self) -> list[str]:
        """Set this rank's random generators; return notes for its log."""
        own = self._by_rank.get(RNG, {})
        tree = self._shared.get(RNG, own.get(str(self._rank), own.get("0")))
        if tree is None:
            return ["the checkpoint has no states of random generators"]
        with naming_malformed(
            f"{self._state.location}: the states of random generators are",
            " Load with rng=False to leave them.",
        ):
            set_random_states(self.decoded(tree))
        if RNG in self._shared or str(self._rank) in own:
            return []
        # A rank more than saved: it begins a sequence of its own, the same in every such load.
        seeds = torch.randint(2**31, (self._rank + 1,), device="cpu")
        torch.manual_seed(int(seeds[self._rank]))
        return [f"rank {self._rank} has new random generators: fewer ranks saved"]

    def _tree_of(self, key: str, target: Any) -> Any:
        """Return what this rank gets of a key, as in the manifest. target: what loads it, or None."""
        if key in self._shared:
            return self._shared[key]
        own = self._by_rank[key]
        if str(self._rank) in own and len(own) == self._num_ranks:
            return own[str(self._rank)]
        if target is None:
            return [*own.values()]
        raise CheckpointError(
            f"extra {key!r} was saved separately by {len(own)} ranks, and these are "
            f"{self._num_ranks}. Leave it out of extra=: it is returned as a list then, one "
            "state a rank, for you to divide."
        )

    def _value_of(self, tree: Any, key: str, target: Any) -> Any:
        templates: dict[str, Any] = {}
        names = tensor_names(tree)
        if target is not None and any(_is_sharded(self._state.tensors.get(name)) for name in names):
            encoded(target.state_dict(), f"extra/{key}", templates.__setitem__)

        def tensor(name: str) -> Any:
            template = templates.get(name)
            if not isinstance(template, DTensor | HeldTensor):
                return self._tensor(name)
            holding = tensor_holding(name, template)
            self._state.read([Wanted(name, box, view) for box, view in holding.boxes])
            return template

        return self.decoded(tree, tensor)

    def _tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor of the checkpoint, in host memory."""
        saved = self._state.tensors[name]
        result = torch.empty(saved.shape, dtype=saved.dtype, device="cpu")
        if result.numel():
            self._state.read([Wanted(name, whole_box(saved.shape), result)])
        return result


def _target_of(key: str, extra: Mapping[str, Any]) -> Any:
    """Return what loads the state under a key by itself, or None."""
    given = extra.get(key)
    return given if hasattr(given, "load_state_dict") else None


def _is_sharded(tensor: Any) -> bool:
    return tensor is not None and tensor.placement not in ("", "replicated", "buffer")


# What is taken from the files, and what does not fit, in the words of `fit`


class LoadPlan(NamedTuple):
    """What one rank loads.

    values: what is no tensor. holdings: memory, by the names that the files have for it. destinations: of
    optimizer state, with its scalars and groups, None if it was not saved. module_states: modules, and what
    each is given of its own. problems: what does not fit. notes: what a reader of a log should know.
    """

    values: SavedValues
    holdings: list[Holding]
    destinations: list[tuple[OptimizerLoad, OptimizerValues | None]]
    module_states: list[tuple[nn.Module, Any]]
    problems: list[str]
    notes: list[str]


def plan_load(
    state: SavedState,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    extra: Collection[str],
    peers: Peers,
) -> LoadPlan:
    """Compare what this rank holds with what was saved. extra: keys that are asked for.

    Makes optimizer state that is not there yet, and changes no value. Raises StateError for an optimizer
    of other parameters.
    """
    structures = {section: structure_of(model) for section, model in models.items()}
    holdings = held_by(structures, writes="load_checkpoint")
    trained = trained_by(structures, optimizers)
    state.find(_names_of(models, holdings, optimizers, trained, extra))
    values = SavedValues(state, peers.rank, peers.size)  # which `find` may have changed
    found, problems, taken = _found(state, holdings)
    module_states, own_problems = match_module_states(structures, values.module_states())
    problems += own_problems
    known_extra = {**state.values.get("extra", {}), **state.values.get("extra_by_rank", {})}
    problems += [f"missing extra/{key}" for key in extra if key not in known_extra]
    destinations = []
    notes: list[str] = []
    others = (each for each in found if state.tensors[each.name].dtype != each.dtype)
    converted = {name for holding in others for name in _in_optimizers(holding)}
    of_models = [*found]
    for section, optimizer in optimizers.items():
        check_trained(optimizer, trained[section])
        own = values.of_optimizer(section)
        saved = {name for group in (own[1] if own else ()) for name in group["params"]}
        own_trained = {p: trained[section][p] for p in parameters_of(optimizer)}
        by_saved = _named_as_saved(own_trained, saved, of_models)
        destination = OptimizerLoad(state, section, optimizer, by_saved, converted)
        destinations.append((destination, own))
        notes += destination.notes
        problems += destination.problems
        found += destination.holdings.values()
        taken.update(holding.name for holding in destination.holdings.values())
    mismatched = {h.name for h in found if state.tensors[h.name].shape != h.shape}
    problems += _of_other_kinds(state, found)
    held = {holding.name.partition("/")[0] for holding in holdings}
    sections = (*models, *optimizers)
    problems += [
        f"unexpected {name}"
        for name in state.tensors
        if name.partition("/")[0] in sections and name not in taken
    ]
    # A model may have no tensors, as a loss.
    needed = [section for section in sections if section in held or section in optimizers]
    own_problems, own_notes = _of_sections(state, sections, needed, has_optimizers=bool(optimizers))
    fitting = [holding for holding in found if holding.name not in mismatched]
    return LoadPlan(
        values, fitting, destinations, module_states, problems + own_problems, own_notes + notes
    )


def _found(
    state: SavedState, holdings: Sequence[Holding]
) -> tuple[list[Holding], list[str], set[str]]:
    """Return those of a model's holdings that the files have, by their name there (others follow), and problems.

    And all names of the files that are taken: those of a tied parameter may be several tensors there.
    """
    by_name = {
        name: first for first, tensor in state.tensors.items() for name in (first, *tensor.aliases)
    }
    found: list[Holding] = []
    problems: list[str] = []
    taken: set[str] = set()
    for holding in holdings:
        names = [*dict.fromkeys(by_name[name] for name in holding.names if name in by_name)]
        taken.update(names)
        if not names:
            problems.append(f"missing {holding.name}")
        elif any(map(_shares_elements, holding.boxes)):
            raise StateError(
                f"{holding.name}: several of its elements share memory (expand), so nothing can be loaded "
                "into it. Give the module a tensor of its own: tensor.clone()."
            )
        elif not _are_equal(state, names, holding):
            problems.append(f"untied {' and '.join(names)}")
        else:
            aliases = [alias for name in names for alias in state.tensors[name].aliases]
            every_name = dict.fromkeys((*names, *aliases, *holding.names))
            found.append(holding._replace(names=tuple(every_name)))
    return found, problems, taken


def _shares_elements(held: HeldBox) -> bool:
    pairs = zip(held.view.shape, held.view.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in pairs)


def _are_equal(state: SavedState, names: Sequence[str], holding: Holding) -> bool:
    """Whether several tensors of the files have the same values, as far as this rank holds them.

    As they may be one parameter's, saved under each of its names.
    """
    first = state.tensors[names[0]]
    for name in names[1:]:
        other = state.tensors[name]
        if (other.shape, other.dtype) != (first.shape, first.dtype):
            return False
        for box, _ in holding.boxes:
            one, two = (torch.empty(box.shape, dtype=first.dtype, device="cpu") for _ in range(2))
            state.read([Wanted(names[0], box, one), Wanted(name, box, two)])
            if bytes_of(one) != bytes_of(two):
                return False
    return True


def _of_other_kinds(state: SavedState, holdings: Sequence[Holding]) -> Iterator[str]:
    """Yield a problem for each holding whose tensor in the files has another shape or dtype."""
    for holding in holdings:
        saved, name = state.tensors[holding.name], holding.name
        if saved.shape != holding.shape:
            yield other_shape(name, saved.shape, holding.shape, "checkpoint")
        elif saved.dtype != holding.dtype:
            yield f"dtype {name}: {saved.dtype} in the checkpoint, {holding.dtype} here"


def _in_optimizers(holding: Holding) -> list[str]:
    """Return a parameter's names as optimizers may have them: with the model's key, and without."""
    parts = [full.partition("/") for full in holding.names]
    keyed = [f"{section.partition('.')[2]}.{name}" for section, _, name in parts]
    return [*(name for _, _, name in parts), *keyed]


def _named_as_saved(
    trained: Mapping[nn.Parameter, Trained], saved: Collection[str], found: Sequence[Holding]
) -> dict[nn.Parameter, Trained]:
    """Return what an optimizer's parameters stand for, by the names that it has for them in the files (``saved``).

    A tied one may have any of its names there, but no other parameter's. found: of the models, with all names.
    """
    tied: dict[str, list[str]] = {}
    for names in map(_in_optimizers, found):
        for name in names:  # where several models have one of this name: what is tied in all
            tied[name] = [each for each in tied.get(name, names) if each in names]
    taken = {name for entry in trained.values() for name in entry.names}

    def as_saved(name: str) -> str:
        if name not in saved:
            free = (each for each in tied.get(name, ()) if each in saved and each not in taken)
            taken.add(name := next(free, name))
        return name

    return {
        parameter: dataclasses.replace(entry, names=tuple(map(as_saved, entry.names)))
        for parameter, entry in trained.items()
    }


def _of_sections(
    state: SavedState, sections: Sequence[str], needed: Sequence[str], *, has_optimizers: bool
) -> tuple[list[str], list[str]]:
    """Return problems and notes for whole sections: needed and not saved, or saved and not asked for."""
    saved = {name.partition("/")[0] for name in state.tensors}
    saved |= {*state.values.get("optimizers", {})}
    problems = [f"missing {section}" for section in needed if section not in saved]
    notes = [
        f"{key} is in the files and was left out; name it in extra= to load it"
        for key in state.values.get("left_out", ())
    ]
    for section in sorted(saved - {*sections, "extra", "values"}):
        if section.partition(".")[0] == "optimizer" and not has_optimizers:
            notes.append(f"{section} is in the checkpoint and was not asked for")
        else:  # one of several, which would lose its state without a word
            problems.append(f"unexpected {section}")
    return problems, notes


def _names_of(
    models: Collection[str],
    holdings: Sequence[Holding],
    optimizers: Mapping[str, torch.optim.Optimizer],
    trained: Mapping[str, Mapping[nn.Parameter, Trained]],
    extra: Collection[str],
) -> Names:
    own: dict[str, list[str]] = {section: [] for section in models}
    for holding in holdings:
        for name in holding.names:
            section, _, rest = name.partition("/")
            own[section].append(rest)
    parameters = {
        section: [
            tuple(trained[section][p].names) if p in trained[section] else ()
            for p in parameters_of(optimizer)
        ]
        for section, optimizer in optimizers.items()
    }
    return Names(own, parameters, list(extra))


# The load

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

    def loads() -> Load:
        own = named(optimizers, "optimizer")
        state_nbytes = sum(
            tensor.nbytes for name, tensor in state.tensors.items() if name.partition("/")[0] in own
        )
        return named(models, "model").values(), own.values(), state_nbytes

    def known() -> tuple[LoadPlan, list[str]]:
        if not isinstance(extra, Mapping):
            raise CheckpointError(f"extra is {extra!r:.80}: give a dict.")
        own_optimizers = named(optimizers, "optimizer")
        plan = plan_load(state, named(models, "model"), own_optimizers, extra, peers)
        plan.values.check(extra)
        return plan, plan.problems

    if not allowed & {"missing", "memory"}:  # what is missing is not written to
        check_room(peers, state.location, loads)
    plan, problems = peers.together_telling(known)
    advice = "Load the checkpoint of this model, or say in allow= what may differ."
    differing = check_fits(state.location, "checkpoint", problems, allowed, advice=advice)
    nbytes = peers.together(lambda: _read(state, plan.holdings))

    def hand_on() -> tuple[dict[str, Any], list[str]]:
        for destination, own in plan.destinations:
            if own is not None:
                destination.assign(*own, peers.rank)
        for module, own_state in plan.module_states:
            module.set_extra_state(own_state)
        others = plan.values.hand_on(extra)
        return others, plan.values.restore_random_states() if rng else []

    others, notes = peers.together(hand_on)
    left_out = {*differing.get("missing", ()), *differing.get("unexpected", ())}
    return LoadedCheckpoint(
        state.location,
        state.values.get("step"),
        plan.values.decoded(state.values.get("metadata", {})),
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
