"""What a load takes from the files, and what does not fit: `plan_load`.

Each rank compares names, shapes and dtypes of what it holds with those of the files, before a value is
changed. What does not fit is a problem, in the words of `fitting`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fullshard.checkpoint.fitting import other_shape
from fullshard.checkpoint.local_content import held_by
from fullshard.checkpoint.module_states import match_module_states
from fullshard.checkpoint.optimizer_loading import Destination
from fullshard.checkpoint.optimizer_plan import plan_optimizer
from fullshard.checkpoint.optimizer_state import TrainedBy, check_trained
from fullshard.checkpoint.saved_state import Names, SavedState
from fullshard.checkpoint.saved_values import SavedValues
from fullshard.checkpoint.spans import Wanted
from fullshard.errors import StateError
from fullshard.state.holdings import Holding
from fullshard.state.host_memory import bytes_of
from fullshard.state.optim_keys import Trained
from fullshard.state.structure import structure_of
from fullshard.state.unit_parts import HeldBox


class LoadPlan(NamedTuple):
    """What one rank loads.

    holdings: memory, by the names that the files have for it. destinations: of optimizer state, by section.
    module_states: modules, and what each is given of its own. problems: what does not fit. notes: what a
    reader of a log should know.
    """

    holdings: list[Holding]
    destinations: dict[str, Destination]
    module_states: list[tuple[nn.Module, Any]]
    problems: list[str]
    notes: list[str]


def plan_load(
    state: SavedState,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    extra: Collection[str],
    values_of: Callable[[SavedState], SavedValues],
) -> LoadPlan:
    """Compare what this rank holds with what was saved.

    extra: keys that are asked for. values_of: returns a state's values, as this rank gets them.

    Makes optimizer state that is not there yet, and changes no value. Raises StateError for an optimizer
    of other parameters.
    """
    structures = {section: structure_of(model) for section, model in models.items()}
    holdings = held_by(structures, writes="load_checkpoint")
    all_trained = TrainedBy(structures)
    trained = {section: all_trained.of(each) for section, each in optimizers.items()}
    state.find(_names_of(models, holdings, optimizers, trained, extra))
    found, problems, taken = _found(state, holdings)
    module_states, own_problems = match_module_states(structures, values_of(state).module_states())
    problems += own_problems
    known_extra = {**state.values.get("extra", {}), **state.values.get("extra_by_rank", {})}
    problems += [f"missing extra/{key}" for key in extra if key not in known_extra]
    destinations = {}
    notes: list[str] = []
    converted = _of_other_dtypes(state, found)
    for section, optimizer in optimizers.items():
        check_trained(optimizer, trained[section])
        destination, own_problems, own_notes = plan_optimizer(
            state, section, optimizer, trained[section], converted
        )
        destinations[section] = destination
        notes += own_notes
        problems += own_problems
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
        fitting, destinations, module_states, problems + own_problems, own_notes + notes
    )


def _found(
    state: SavedState, holdings: Sequence[Holding]
) -> tuple[list[Holding], list[str], set[str]]:
    """Return those of a model's holdings that the files have, by their name there, and problems.

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
            found.append(holding._replace(names=(names[0],)))
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


def _of_other_dtypes(state: SavedState, found: Sequence[Holding]) -> set[str]:
    """Return names of parameters whose dtype in the files is another than here, as optimizers have them."""
    names = set()
    for holding in found:
        saved = state.tensors[holding.name]
        if saved.dtype != holding.dtype:
            for full in (holding.name, *saved.aliases):
                section, _, name = full.partition("/")
                names |= {name, f"{section.partition('.')[2]}.{name}"}
    return names


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
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        for section, optimizer in optimizers.items()
    }
    return Names(own, parameters, list(extra))
