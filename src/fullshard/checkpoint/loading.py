"""Loading: every rank reads the boxes that it holds, from whichever files contain them.

First everything is compared: names, shapes and dtypes of what the ranks hold with the manifest. What
does not fit is refused on all ranks together, before a value is changed. Then tensors are read straight
into the model's memory.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.background import finish_background
from fullshard.checkpoint.collector import collector_waits
from fullshard.checkpoint.fitting import Source, check_allowed, check_fits, listed
from fullshard.checkpoint.local_content import (
    Models,
    Optimizers,
    held_by,
    named,
    section_names,
)
from fullshard.checkpoint.locations import Location
from fullshard.checkpoint.opening import check_same_files, opened
from fullshard.checkpoint.optimizer_loading import Destination
from fullshard.checkpoint.optimizer_state import (
    TrainedBy,
    check_trained,
    kind_of,
    state_keys,
)
from fullshard.checkpoint.peers import Peers
from fullshard.checkpoint.random_states import RNG, set_random_states
from fullshard.checkpoint.saved_state import Names, SavedState
from fullshard.checkpoint.spans import Wanted
from fullshard.checkpoint.values import decoded, encoded, tensor_names
from fullshard.checkpoint.writing import bytes_of
from fullshard.errors import CheckpointError
from fullshard.plan.boxes import whole_box
from fullshard.state.holdings import HeldTensor, Holding, tell_loaded, tensor_holding
from fullshard.state.optim_keys import Trained
from fullshard.state.structure import structure_of

ALLOWED = ("missing", "unexpected", "dtype")


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

    Raises CheckpointError, on all ranks, for a checkpoint that is not complete, is damaged or does not
    fit. What does not fit is found before anything is changed. If reading fails later, the values of the
    model and the optimizer are no longer those of before.
    """
    finish_background()
    peers = Peers()

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
            load = _Load(state, allowed, peers)
            return load.run(model, optimizer, extra or {}, rng=rng)


class _Load:
    """One load: plans what is read where, reads it, and hands on what is no tensor."""

    def __init__(self, state: SavedState, allow: frozenset[str], peers: Peers) -> None:
        self._state = state
        self._allow = allow
        self._peers = peers
        self._notes: list[str] = []
        self._left_out: set[str] = set()

    def run(
        self, models: Models, optimizers: Optimizers, extra: Mapping[str, Any], *, rng: bool
    ) -> LoadedCheckpoint:
        by_section = named(models, "model")
        opts = named(optimizers, "optimizer")

        def plan() -> tuple[tuple[list[Holding], dict[str, Destination]], list[str]]:
            holdings, destinations, problems = self._plan(by_section, opts, extra)
            return (holdings, destinations), problems

        (holdings, destinations), problems = self._peers.together_telling(plan)
        differing = check_fits(_source(self._state.location), problems, self._allow)
        self._left_out.update(differing.get("missing", ()), differing.get("unexpected", ()))
        nbytes = self._peers.together(lambda: self._read(holdings))
        values = self._peers.together(lambda: self._hand_on(destinations, extra, rng=rng))
        return LoadedCheckpoint(
            self._state.location,
            self._state.values.get("step"),
            self._decoded(self._state.values.get("metadata", {})),
            values,
            len(holdings),
            nbytes,
            tuple(sorted(self._left_out)),
            tuple(self._notes),
        )

    # What fits

    def _plan(
        self, models: Mapping[str, Any], optimizers: Mapping[str, Any], extra: Mapping[str, Any]
    ) -> tuple[list[Holding], dict[str, Destination], list[str]]:
        structures = {section: structure_of(model) for section, model in models.items()}
        holdings = held_by(structures)
        all_trained = TrainedBy(structures)
        trained = {section: all_trained.of(each) for section, each in optimizers.items()}
        self._state.find(_names_of(models, holdings, optimizers, trained, extra))
        by_name = {
            name: first
            for first, tensor in self._state.tensors.items()
            for name in (first, *tensor.aliases)
        }
        found: list[Holding] = []
        shared, by_rank = (
            self._state.values.get("extra", {}),
            self._state.values.get("extra_by_rank", {}),
        )
        problems = [f"missing extra/{key}" for key in extra if key not in {**shared, **by_rank}]
        taken: set[str] = set()
        for holding in holdings:
            names = [by_name[name] for name in holding.names if name in by_name]
            taken.update(names)
            if not names:
                problems.append(f"missing {holding.name}")
                continue
            if not self._are_equal([*dict.fromkeys(names)], holding):
                problems.append(f"untied {' and '.join(dict.fromkeys(names))}")
                continue
            found.append(holding._replace(names=(names[0],)))
        destinations = {}
        for section, optimizer in optimizers.items():
            check_trained(optimizer, trained[section])
            destination, own_problems = self._destination(section, optimizer, trained[section])
            destinations[section] = destination
            problems += own_problems
            found += destination.holdings.values()
            taken.update(h.name for h in destination.holdings.values())
        for holding in found:
            saved = self._state.tensors[holding.name]
            if saved.shape != holding.shape:
                problems.append(
                    f"mismatched {holding.name}: {saved.shape} in the checkpoint, {holding.shape} here"
                )
            elif saved.dtype != holding.dtype:
                problems.append(
                    f"dtype {holding.name}: {saved.dtype} in the checkpoint, {holding.dtype} here"
                )
        mismatched = {
            problem.partition(" ")[2].partition(":")[0]
            for problem in problems
            if problem.startswith("mismatched")
        }
        sections = (*models, *optimizers)
        present = {name.partition("/")[0] for name in self._state.tensors}
        for name in self._state.tensors:
            section = name.partition("/")[0]
            if section in sections and name not in taken and name not in mismatched:
                problems.append(f"unexpected {name}")
        for section in sections:
            if section not in present and section not in self._state.values.get("optimizers", {}):
                problems.append(f"missing {section}")
        for key in self._state.values.get("left_out", ()):
            self._notes.append(
                f"{key} is in the files and was left out; name it in extra= to load it"
            )
        present |= {*self._state.values.get("optimizers", {})}
        for section in sorted(present - {*sections, "extra", "values"}):
            if section.partition(".")[0] == "optimizer" and not optimizers:
                self._notes.append(f"{section} is in the checkpoint and was not asked for")
            else:  # one of several, which would lose its state without a word
                problems.append(f"unexpected {section}")
        return [h for h in found if h.name not in mismatched], destinations, problems

    def _are_equal(self, names: Sequence[str], holding: Holding) -> bool:
        """Whether several tensors of the files have the same values, as far as this rank holds them.

        As they may be one parameter's, saved under each of its names.
        """
        first = self._state.tensors[names[0]]
        for name in names[1:]:
            other = self._state.tensors[name]
            if (other.shape, other.dtype) != (first.shape, first.dtype):
                return False
            for box, _ in holding.boxes:
                one, two = (
                    torch.empty(box.shape, dtype=first.dtype, device="cpu") for _ in range(2)
                )
                self._state.read([Wanted(names[0], box, one), Wanted(name, box, two)])
                if bytes_of(one) != bytes_of(two):
                    return False
        return True

    def _destination(
        self, section: str, optimizer: Any, trained: Mapping[Any, Any]
    ) -> tuple[Destination, list[str]]:
        prefix = f"{section}/"
        saved = {}
        for name, tensor in self._state.tensors.items():
            if name.startswith(prefix):
                parameter, _, key = name[len(prefix) :].rpartition("/")
                saved[parameter, key] = (tensor.shape, tensor.dtype)
        values = self._state.values.get("optimizers", {}).get(section)
        problems = []
        if values is not None and values.get("class") not in (None, kind_of(optimizer)):
            kinds = f"{values.get('class')} in the checkpoint, {kind_of(optimizer)} here"
            return Destination(optimizer, trained, {}, prefix), [f"class {section}: {kinds}"]
        if values is not None and values.get("class") is None:
            keys = {key for _, key in saved}.union(*map(set, values["scalars"].values()))
            own_keys = state_keys(optimizer)
            if keys and own_keys and keys != own_keys:
                kinds = f"{sorted(keys)} in the checkpoint, {sorted(own_keys)} here"
                return Destination(optimizer, trained, {}, prefix), [f"class {section}: {kinds}"]
        if values is not None:
            options = {
                name: sorted(group["options"].items())
                for group in values["groups"]
                for name in group["params"]
            }
            for group in optimizer.param_groups:
                names = [name for p in group["params"] for name in trained[p].names]
                problems += [f"missing {prefix}{name}" for name in names if name not in options]
                if len({repr(options[name]) for name in names if name in options}) > 1:
                    problems.append(f"groups {section}: {names[0]} and others of its group")
            problems += _divided_groups(section, values["groups"], optimizer, trained)
        destination = Destination(optimizer, trained, saved, prefix)
        return destination, [*problems, *destination.problems]

    # Reading

    @torch.no_grad()
    def _read(self, holdings: Sequence[Holding]) -> int:
        """Read what this rank holds into its memory; return the number of bytes."""
        wanted = [Wanted(h.name, box, view) for h in holdings for box, view in h.boxes]
        self._state.read(wanted)
        tell_loaded(holdings)
        return sum(each.view.numel() * each.view.itemsize for each in wanted)

    def _tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor of the checkpoint, in host memory."""
        saved = self._state.tensors.get(name)
        if saved is None:
            raise CheckpointError(
                f"{self._state.location}: has no tensor {name}, which a value names."
            )
        result = torch.empty(saved.shape, dtype=saved.dtype, device="cpu")
        if result.numel():
            self._state.read([Wanted(name, whole_box(saved.shape), result)])
        return result

    # Values

    def _decoded(self, tree: Any, tensor: Callable[[str], torch.Tensor] | None = None) -> Any:
        try:
            return decoded(tree, tensor or self._tensor)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{self._state.location}: a value in the manifest is of no known form ({error!r})."
            ) from error

    def _hand_on(
        self, destinations: Mapping[str, Destination], extra: Mapping[str, Any], *, rng: bool
    ) -> dict[str, Any]:
        for section, destination in destinations.items():
            values = self._state.values.get("optimizers", {}).get(section)
            if values is not None:
                destination.assign(
                    self._decoded(values["scalars"]),
                    self._decoded(values["groups"]),
                    self._peers.rank,
                )
        shared, by_rank = (
            self._state.values.get("extra", {}),
            self._state.values.get("extra_by_rank", {}),
        )
        found: dict[str, Any] = {}
        for key in (*shared, *by_rank):
            if key == RNG:
                continue
            target = extra.get(key)
            if target is not None and hasattr(target, "load_state_dict"):
                target.load_state_dict(self._extra(key, target))
            else:
                found[key] = self._extra(key, None)
        if rng:
            self._restore_random_states()
        return found

    def _extra(self, key: str, target: Any) -> Any:
        tree = self._state.values.get("extra", {}).get(key)
        if tree is None and key not in self._state.values.get("extra", {}):
            own = self._state.values["extra_by_rank"][key]
            if str(self._peers.rank) not in own or len(own) != self._peers.size:
                if target is None:
                    return [self._decoded(each) for each in own.values()]
                raise CheckpointError(
                    f"extra {key!r} was saved separately by {len(own)} ranks, and these are "
                    f"{self._peers.size}. Leave it out of extra=: it is returned as a list then, one "
                    "state a rank, for you to divide."
                )
            tree = own[str(self._peers.rank)]
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

        return self._decoded(tree, tensor)

    def _restore_random_states(self) -> None:
        try:
            self._restore_own_random_states()
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{self._state.location}: the states of random generators are of no known form ({error!r}). "
                "Load with rng=False to leave them."
            ) from error

    def _restore_own_random_states(self) -> None:
        shared, by_rank = (
            self._state.values.get("extra", {}),
            self._state.values.get("extra_by_rank", {}),
        )
        if RNG in shared:
            set_random_states(self._decoded(shared[RNG]))
            return
        states = by_rank.get(RNG)
        if states is None:
            self._notes.append("the checkpoint has no states of random generators")
            return
        own = states.get(str(self._peers.rank))
        if own is not None:
            set_random_states(self._decoded(own))
            return
        # A rank more than saved: it begins a sequence of its own, the same in every such load.
        set_random_states(self._decoded(states["0"]))
        rank = self._peers.rank
        seeds = torch.randint(2**31, (rank + 1,), device="cpu")
        torch.manual_seed(int(seeds[rank]))
        self._notes.append(f"rank {rank} has new random generators: fewer ranks saved")


def _source(location: Path | str) -> Source:
    advice = "Load the checkpoint of this model, or say in allow= what may differ."
    return Source(location, "checkpoint", advice)


def _divided_groups(
    section: str,
    saved: Sequence[Mapping[str, Any]],
    optimizer: Any,
    trained: Mapping[nn.Parameter, Trained],
) -> Iterator[str]:
    """Yield a problem for each saved group whose parameters are in several groups here.

    All of them would get the options that were saved, whatever they were divided for.
    """
    groups = enumerate(optimizer.param_groups)
    own = {name: n for n, group in groups for p in group["params"] for name in trained[p].names}
    for group in saved:
        first: dict[int, str] = {}
        for name in group["params"]:
            if name in own:
                first.setdefault(own[name], name)
        if len(first) > 1:
            yield f"groups {section}: {' and '.join([*first.values()][:2])}"


def _names_of(
    models: Mapping[str, Any],
    holdings: Sequence[Holding],
    optimizers: Mapping[str, Any],
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
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        for section, optimizer in optimizers.items()
    }
    return Names(own, parameters, list(extra))


def _is_sharded(tensor: Any) -> bool:
    return tensor is not None and tensor.placement not in ("", "replicated", "buffer")
