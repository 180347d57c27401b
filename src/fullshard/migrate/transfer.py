"""Save state of a model and its optimizer that either API can load, and load it.

Training begun as `FullyShardedDataParallel` can continue under `fully_shard`, and the reverse, on
any number of ranks. Ranks exchange the parts that move; no rank ever holds a whole copy.
"""

from typing import Any

import torch
from torch import nn

from fullshard.comm.outside_steps import gather_objects
from fullshard.errors import StateError
from fullshard.fsdp1.state_dicts import saving_sharded
from fullshard.state.first_state import first_state, with_first_states
from fullshard.state.optim import SaveOptions, Values, load, save
from fullshard.state.optim_keys import trained_in
from fullshard.state.structure import structure_of, whole_of
from fullshard.state.unit_parts import UnitParts, parts_of
from fullshard.state.unit_values import locals_of


def sharded_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Return ``{"model": ..., "optimizer": ...}``, by the names parameters had before sharding.

    Values are DTensors, except of what is not sharded. Where possible they share memory with the
    model. ``torch.distributed.checkpoint`` writes and reads them. Every rank has to call it.

    For trainable parameters without optimizer state, the state before a first step is included, so
    that a new process has something to load a checkpoint into. The optimizer itself is not changed.
    Raises StateError if the state before a first step cannot be known (see `first_state`).
    """
    model = whole_of(model)
    with saving_sharded(model):
        state: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        state["optimizer"] = save(
            model,
            optimizer,
            with_first_states(
                optimizer, optimizer.state_dict(), {*trained_in(structure_of(model))}
            ),
            SaveOptions(Values.DTENSORS),
        )
    return state


@torch.no_grad()
def load_sharded_state(
    state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Load a result of `sharded_state`, whichever way the model was sharded when it was made.

    Every rank has to call it. Raises RuntimeError for missing, unexpected or misshapen parameters,
    as ``load_state_dict`` does, and StateError if optimizer state is missing or belongs to
    parameters that the optimizer does not train. Both before anything is loaded into the optimizer.
    """
    model = whole_of(model)
    if optimizer is not None:
        # All ranks check together before any of them loads.
        _refuse_incomplete(model, optimizer, state["optimizer"])
    values = dict(state["model"])
    for unit, names in structure_of(model).units:
        if unit.is_flat:
            continue  # its own state-dict hooks take values of any kind
        parts = parts_of(unit)
        given = {i: n[0] for i, n in enumerate(names) if n and n[0] in values}
        _refuse_misshapen(parts, {name: values[name] for name in given.values()}, given)
        shards = locals_of(unit, list(given), [values[name] for name in given.values()])
        for index, shard in zip(given, shards, strict=True):
            wrapped = parts.as_shown(index, shard)
            values.update({name: wrapped for name in names[index] if name in values})
    model.load_state_dict(values)
    if optimizer is not None:
        optimizer.load_state_dict(load(model, optimizer, state["optimizer"]))


def _refuse_incomplete(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]
) -> None:
    """Raise StateError, on all ranks alike, for optimizer state that is missing or left over.

    Missing: of parameters that this optimizer trains, not in ``saved``. Left over: in ``saved``, of
    parameters of the model that this optimizer does not train.
    """
    if "state" not in saved:
        return  # `load` refuses it
    trained = trained_in(structure_of(model))
    missing: list[str] = []
    taken: set[str] = set()
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            names = trained[parameter].names if parameter in trained else ()
            taken.update(names)
            if not names or not parameter.requires_grad or not parameter.numel():
                continue  # of a piece without elements, ranks that have some say what is missing
            has_state = optimizer.state.get(parameter)  # `[]` would insert an empty one
            wanted = has_state or first_state(optimizer, number, position)
            missing += [
                f"{name} ({', '.join(sorted(gone))})"
                for name in names
                if (gone := wanted.keys() - saved["state"].get(name, {}).keys())
            ]
    known = {name for entry in trained.values() for name in entry.names}
    left = [name for name in saved["state"] if name in known - taken]
    # Ranks own different pieces, so one may see what others do not; all have to stop together.
    everyones = gather_objects((missing, left), None, "comparing optimizer state")
    problems = []
    if missing := list(dict.fromkeys(name for own, _ in everyones for name in own)):
        problems.append(f"it has no state of {', '.join(missing)}")
    if left := list(dict.fromkeys(name for _, own in everyones for name in own)):
        problems.append(f"the optimizer does not train {', '.join(left)}, of which it has state")
    if problems:
        raise StateError(
            f"The state does not fit this {type(optimizer).__name__}: {'; '.join(problems)}. Save "
            "and load with optimizers of one kind that train the same parameters. What was frozen "
            "when it was saved may be made trainable after loading."
        )


def _refuse_misshapen(parts: UnitParts, values: dict[str, Any], names: dict[int, str]) -> None:
    wrong = [
        f"{name}: {tuple(values[name].size())}, expected {expected}"
        for index, name in names.items()
        if tuple(values[name].size()) != (expected := parts.placed(index).shape)
    ]
    if wrong:
        raise StateError(f"size mismatch for {'; '.join(wrong)}. Load the state of this model.")
