"""What changes in a planned step when parameters or the optimizer's state are kept in host memory.

params      shards arrive from the host before each gather, sums of gradients leave after each reduction, and the
            host steps: `CPUOffloadPolicy`
optimizer   states pass through the device unit by unit, in both directions: `stream_state`
"""

import collections
import itertools
from collections.abc import Sequence

from fullshard.plan.actions import ActionKind, Change, Holding
from fullshard.plan.state_placement import NUM_SLOTS
from fullshard.plan.step import PlannedStep
from fullshard.planning.machines import Gpu

_ON_HOST = {
    "optimizer": (Holding.OPTIMIZER,),
    "params": (Holding.OPTIMIZER, Holding.SHARDS, Holding.GRADIENT_SHARDS),
}
_HOST_MEMORY_RATE = (
    20e9  # bytes a second for one of 8 ranks on a host of two sockets, when all step at once
)
_COPIES = (ActionKind.ALL_GATHER, ActionKind.REDUCE_SCATTER)


def offloaded(
    step: PlannedStep, seconds: Sequence[float], offload: str, gpu: Gpu
) -> tuple[PlannedStep, list[float]]:
    """Return a step and the seconds of its actions, with what `offload` keeps on the host not on the device."""
    on_host = _ON_HOST[offload]
    of_units = {holding: _of_units(step, holding) for holding in on_host}
    resident = [change for change in step.resident if change.holding not in on_host]
    states = of_units[Holding.OPTIMIZER]
    if offload == "optimizer":
        slots = NUM_SLOTS * max(states.values(), default=0)
        resident.append(Change(Holding.OPTIMIZER, slots))
    actions, took = [], []
    for action, own_s in zip(step.actions, seconds, strict=True):
        changes = [each for each in action.changes if each.holding not in on_host]
        num_before = sum(
            each.holding not in on_host for each in action.changes[: action.num_before]
        )
        gone = sum(each.nbytes for each in action.changes) - sum(each.nbytes for each in changes)
        peak_nbytes, spent_s = action.peak_nbytes - gone, own_s
        if action.kind is ActionKind.OPTIMIZER:
            if offload == "params":  # the host's, as is its temporary memory
                peak_nbytes = 0
                spent_s = own_s * gpu.memory_rate / _HOST_MEMORY_RATE
            else:
                spent_s = max(own_s, 2 * sum(states.values()) / gpu.host_rate)
        elif offload == "params" and action.kind in _COPIES:
            shard_nbytes = of_units[Holding.SHARDS][action.unit]
            copy = Change(Holding.COMMUNICATION, shard_nbytes, action.unit)
            changes = [copy, *changes, copy._replace(nbytes=-shard_nbytes)]
            peak_nbytes = 0
            spent_s += shard_nbytes / gpu.host_rate
        highest = max(itertools.accumulate((each.nbytes for each in changes), initial=0))
        peak_nbytes = max(peak_nbytes, highest)
        actions.append(
            action._replace(changes=tuple(changes), num_before=num_before, peak_nbytes=peak_nbytes)
        )
        took.append(spent_s)
    return PlannedStep(tuple(actions), tuple(resident)), took


def host_nbytes(step: PlannedStep, offload: str, *, is_pinned: bool) -> int:
    """Return the bytes of tensors that a rank keeps in host memory.

    step: with all on the device. is_pinned: memory that the device copies from is page-locked, for which torch takes
    powers of two; what the host steps with is not.
    """
    levels: collections.Counter[tuple[Holding, int]] = collections.Counter()
    most: collections.Counter[tuple[Holding, int]] = collections.Counter()
    on_host = _ON_HOST.get(offload, ())
    changes = (*step.resident, *(each for action in step.actions for each in action.changes))
    for change in changes:
        key = change.holding, change.unit
        levels[key] += change.nbytes
        # Memory of gradients is kept: to lock other pages takes long.
        most[key] = max(most[key], levels[key])
    total = 0
    for (holding, _), nbytes in most.items():
        if holding in on_host and nbytes:
            is_copied = holding is not Holding.OPTIMIZER or offload == "optimizer"
            total += 1 << (nbytes - 1).bit_length() if is_pinned and is_copied else nbytes
    return total


def _of_units(step: PlannedStep, holding: Holding) -> collections.Counter[int]:
    return collections.Counter(
        {each.unit: each.nbytes for each in step.resident if each.holding is holding}
    )
