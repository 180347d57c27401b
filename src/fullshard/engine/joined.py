"""Units that some ranks leave out, gathered together with a module around them.

A gather that needs all ranks has to come at the same place on all of them, also on those that do not run the
unit. So the innermost module around it that every rank runs gathers it too: before its own forward and
backward, and frees it after them. In between the unit's own modules find it gathered, or nobody uses it.

    ranks 0 and 1      gather layer; gather expert.0; gather expert.1
    rank 0 runs        expert.0            rank 1 runs        expert.1

That takes the memory of all such units of a module at once. Ranks that read each other's memory need nothing
of the kind: each gathers what it runs.
"""

from collections.abc import Iterable

from fullshard.engine.module_state import ModuleState
from fullshard.engine.unit import Unit


def join_units(states: Iterable[ModuleState]) -> None:
    """Decide, by the settings of now, which module's gathers each unit joins. The same on all ranks.

    states: of the whole model.
    """
    states = list(states)
    for state in states:
        state.joined = []
    for state in states:
        outer = state.outer
        while outer is not None and outer.outer is not None and _may_be_skipped(outer):
            outer = outer.outer
        for unit in state.units:
            # Nothing is around a root, which every rank runs.
            unit.is_joined = outer is not None and unit.config.may_be_skipped and _needs_all(unit)
            if outer is not None and unit.is_joined:
                outer.joined.append(unit)


def _may_be_skipped(state: ModuleState) -> bool:
    return any(unit.config.may_be_skipped for unit in state.all_units)


def _needs_all(unit: Unit) -> bool:
    return not unit.comm.gathers_alone or unit.params.extended is not None
