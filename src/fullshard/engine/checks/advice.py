"""What is looked at once, when a model or an optimizer is first used: the table of checks, and what runs them.

A check is a function that says what is wrong, or returns None, and a line in `CHECKS`. What has to be watched in every
pass is elsewhere: unused parameters and gradients that come past the modules in `gradients`, writes in `writes`,
values that are not finite in `finite`.
"""

import enum
import logging
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.optim import Optimizer

from fullshard.engine.checks import meta, model, optimizers
from fullshard.engine.guard.param_watch import note_step
from fullshard.engine.params.managed import marks
from fullshard.engine.runtime import eager
from fullshard.errors import StateError
from fullshard.process_hooks import AFTER_STEP, BEFORE_STEP, at_first_use

logger = logging.getLogger("fullshard")


class When(enum.Enum):
    """When a check is run, and of what."""

    HAS_MEMORY = "a model's first forward, where an error leaves it to begin again: of a `Model`"
    IS_ROOT = "the same, once a module is the root: of a `Model`"
    HAS_GROWN = "a forward after a registration anywhere: of names that no unit manages"
    NEW_OPTIMIZER = "a step, before it, of other parameters than the last: of the optimizer"
    FIRST_STEP = "an optimizer's first step, before it: of the optimizer"
    STEPPED = "an optimizer's first step, after it: of the optimizer"


def warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


def refuse(text: str) -> None:
    raise StateError(text)


class Check(NamedTuple):
    """What is looked for. find: says what is wrong; None if nothing is. tell: what to do then."""

    name: str
    when: When
    find: Callable[[Any], str | None]
    tell: Callable[[str], None]


CHECKS = (
    Check("buffers on meta", When.HAS_MEMORY, meta.find_meta_buffers, refuse),
    Check("memory of to_empty()", When.HAS_MEMORY, meta.find_unwritten, refuse),
    Check("ties to what is in no unit", When.HAS_MEMORY, model.find_ties_outside, refuse),
    Check("large root", When.IS_ROOT, model.find_large_root, logger.warning),
    Check("divisors", When.IS_ROOT, model.find_small_divisors, warn),
    Check("parameters added later", When.HAS_GROWN, model.find_strays, warn),
    Check("former parameters", When.NEW_OPTIMIZER, optimizers.find_former, refuse),
    Check("whole parameters", When.FIRST_STEP, optimizers.find_plain_parts, warn),
    Check("precision of state", When.STEPPED, optimizers.find_wide_state, warn),
    Check("state that nobody streams", When.STEPPED, optimizers.find_left_state, warn),
)


def advise(when: When, of: Any) -> None:
    """Run the checks of a moment, in their order. Raises StateError as they say."""
    for check in CHECKS:
        if check.when is when and (text := check.find(of)):
            check.tell(text)


@at_first_use
def _follow_optimizers() -> None:
    BEFORE_STEP.add(_before_step, "finds optimizers of former parameters, or that need whole ones")
    AFTER_STEP.add(
        _after_step, "counts steps, for checkpoints; finds state that depends on the mesh"
    )


@eager
def _before_step(optimizer: Optimizer, _: Any, __: Any) -> None:
    # Two comparisons in a step. Only if one differs is anything looked through.
    seen = (marks.value, len(optimizer.param_groups))
    record = optimizers.known(optimizer)
    if record.seen == seen:
        return
    advise(When.NEW_OPTIMIZER, optimizer)
    is_first, record.seen = record.seen is None, seen  # after what may refuse, to look again then
    if is_first:
        advise(When.FIRST_STEP, optimizer)


@eager
def _after_step(optimizer: Optimizer, _: Any, __: Any) -> None:
    note_step()
    steps = optimizers.known(optimizer).steps
    steps.value += 1
    if steps.value == 1:
        advise(When.STEPPED, optimizer)
