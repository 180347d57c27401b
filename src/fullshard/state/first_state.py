"""The state that an optimizer begins with, before its first step has made it.

Most optimizers make their state in their first step, so a new process has nothing to load a
checkpoint into. Here it is made as if that step had begun, on a copy of the optimizer and of one
parameter at a time: the optimizer itself, its parameters and its counters stay as they are.
"""

import collections
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fullshard.errors import StateError


def lacking_state(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, int]]:
    """Yield (number of the group, position in it) of each trainable parameter without state.

    Frozen parameters are left out: they need no state, and it might be larger than all the rest.
    """
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            has_state = optimizer.state.get(parameter)  # `[]` would insert an empty one
            if parameter.requires_grad and not has_state:
                yield number, position


def device_of_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> torch.device:
    """Return where an optimizer has the state of a parameter between steps: for `stream_state`, on the host."""
    step = vars(optimizer).get("_local_step")
    device: torch.device = parameter.device if step is None else step.device_of_state(parameter)
    return device


@torch.no_grad()
def first_state(
    optimizer: torch.optim.Optimizer,
    group: int,
    position: int,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a parameter's state as it is before the first step: AdamW's moments 0 and step 0.

    options: take the place of those of the group. Empty if the optimizer keeps no state. Raises
    StateError if it can be known only by a real step, as with LBFGS, whose steps take a closure.
    """
    own = {**optimizer.param_groups[group], **(options or {})}
    stand_in = nn.Parameter(own["params"][position].detach().clone())
    stand_in.grad = torch.zeros_like(stand_in)
    copy = _copy_without_state(optimizer)
    copy.param_groups = [{**own, "params": [stand_in]}]
    try:
        if _initialise(copy):
            return dict(copy.state[stand_in])
        _step_of(copy)(copy)
    except Exception as error:
        raise StateError(
            f"{type(optimizer).__name__} has not made its state yet, and it cannot be made for it: "
            f"{type(error).__name__}: {error}. Take a step first, then save or load."
        ) from error
    state = dict(copy.state.get(stand_in, {}))
    if "step" in state:
        state["step"] = state["step"] * 0
    return state


def with_first_states(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], parameters: set[nn.Parameter]
) -> dict[str, Any]:
    """Return an optimizer's state dict with first states for parameters that have none."""
    keys = [group["params"] for group in state_dict["param_groups"]]
    added = {}
    for group, position in lacking_state(optimizer):
        parameter = optimizer.param_groups[group]["params"][position]
        # After a step, an optimizer has no state of parameters that are empty on this rank.
        if parameter in parameters and (parameter.numel() or not state_dict["state"]):
            state = first_state(optimizer, group, position)
            if state:
                added[keys[group][position]] = state
    return {**state_dict, "state": {**state_dict["state"], **added}}


def _copy_without_state(optimizer: torch.optim.Optimizer) -> Any:
    """Return an optimizer with the same settings, without state and hooks."""
    copy: Any = object.__new__(type(optimizer))
    settings = vars(optimizer)
    # Schedulers replace the instance's `step` by one that counts the steps of the original.
    vars(copy).update({name: value for name, value in settings.items() if name != "step"})
    copy.state = collections.defaultdict(dict)
    if "_local_step" in settings:  # of `step_on_shards`: it refers to the original
        copy._local_step = settings["_local_step"].for_copy(copy)
    return copy


def _initialise(copy: Any) -> bool:
    """Let an optimizer of torch.optim make its state without a step; return whether it did.

    By ``_init_group``, a private method of torch's own; others return False.
    """
    initialise = getattr(copy, "_init_group", None)
    if initialise is None:
        return False
    (group,) = copy.param_groups
    # Beside the group, it takes lists to fill with what it finds; how many depends on the class.
    lists = len(inspect.signature(initialise).parameters) - 1
    initialise(group, *([] for _ in range(lists)))
    return bool(copy.state.get(group["params"][0]))


def _step_of(optimizer: Any) -> Any:
    """Return the step that an optimizer's class defines, without the hooks around it."""
    step = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step
