"""Access to shards for those who read or write a model: state dicts, checkpoints, exports, averages.

Between passes a unit is brought to rest first. Readers may also come while the model's forward or
backward runs, from a hook. Then units stay as they are: modules compute with the whole parameters, a
rank that reads alone must start no gather, and the shards lie unchanged beside what is used. Writers
are refused then, since the pass would go on with other values than those it began with.
"""

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fullshard.engine.adoption import adopt, follow_changes
from fullshard.engine.module_state import ModuleState
from fullshard.engine.params.managed import ManagedParameter
from fullshard.engine.unit import Unit
from fullshard.errors import MisuseError, StateError


def settle_to_read(unit: Unit) -> None:
    """Adopt what users have moved, and end a gather, unless a pass of the model runs.

    Raises StateError if copies of whole parameters are shown, which readers would take for shards.
    """
    _refuse_shown_whole(unit)
    state: ModuleState | None = unit.owner()
    if state is None or not is_running(state, if_unknown=True):
        unit.settle()
        follow_changes(unit)
    elif unit.is_sharded and unit.watch.have_moved:
        adopt(unit)


def settle_to_write(unit: Unit, call: str) -> None:
    """Adopt what users have moved, bring a unit to rest, and wait for copies that read it in host memory.

    Raises StateError if copies of whole parameters are shown, and as `refuse_while_used` does.
    """
    _refuse_shown_whole(unit)
    refuse_while_used(unit, call)
    unit.settle()
    unit.finish_reading()
    follow_changes(unit)


def refuse_while_used(unit: Unit, call: str) -> None:
    """Raise MisuseError if a forward or backward uses a unit's parameters. call: what would write."""
    state: ModuleState | None = unit.owner()
    if unit.is_unsharded and state is not None and is_running(state, if_unknown=False):
        raise MisuseError(
            f"{unit.label}: {call} is called while the model's forward or backward uses these "
            "parameters. Call it before or after."
        )


def is_running(state: ModuleState, *, if_unknown: bool) -> bool:
    """Return whether a forward or backward of the model runs: see `Iteration.is_running`."""
    iteration = state.known_iteration
    return iteration is not None and iteration.is_running(if_unknown=if_unknown)


def _refuse_shown_whole(unit: Unit) -> None:
    if unit.is_whole:
        raise StateError(
            f"{unit.label}: its parameters are shown whole now (summon_full_params, "
            "full_parameters). Leave that context first."
        )


def fake_form(param: ManagedParameter) -> nn.Parameter:
    """Return a whole parameter without memory, of the active `FakeTensorMode`."""
    dtype = param.holder.sharded.dtype if param.unsharded is None else param.unsharded.dtype
    device = param.local.device if param.unsharded is None else param.unsharded.device
    whole = param.as_unsharded(torch.empty(param.shape, dtype=dtype, device=device))
    return nn.Parameter(whole, requires_grad=param.requires_grad)


class Registered:
    """Another form of parameters that is registered for a while.

    Units do not notice: their phases stay, and in the end modules are as they were.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        form: Callable[[ManagedParameter], nn.Parameter] = operator.attrgetter("sharded"),
    ) -> None:
        """Register a form of each parameter, by default the sharded one, under its own name.

        That is so for those inside a flat parameter, too, which is not registered meanwhile.
        """
        self._before: list[tuple[dict[str, Any], str, Any]] = []  # None: there was nothing
        for unit in units:
            flat = unit.params.flat
            if flat is not None:
                self._set(flat.slot.registry, flat.slot.name, None)
            for param in unit.params:
                shown = form(param)
                for slot in param.slots:
                    module = slot.module()
                    # One inside a flat parameter is not registered; any other may have been removed.
                    if module is not None and (slot.current is not None or flat is not None):
                        self._set(slot.registry, slot.name, shown)
                        # An attribute hides what is registered.
                        self._set(vars(module), slot.name, None)

    def undo(self) -> None:
        """Leave modules as they were."""
        for names, name, value in reversed(self._before):
            _put(names, name, value)

    def _set(self, names: dict[str, Any], name: str, value: Any) -> None:
        self._before.append((names, name, names.get(name)))
        _put(names, name, value)


def _put(names: dict[str, Any], name: str, value: Any) -> None:
    if value is None:
        names.pop(name, None)
    else:
        names[name] = value
