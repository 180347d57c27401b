"""What is added to an exception that nobody catches: context that its message lacks.

Python calls `sys.excepthook` with it, as torch.distributed does to name the rank. The exception gets notes, which
are printed below it (before Python 3.11: lines on the log). A program that goes on pays nothing for that, and one that
catches its exceptions has them as they are.

Rejected, for modules that run without their unit: a subclass of DTensor for the shards, which every operation of an
optimizer would go through, and a hook where torch raises, which is in C++ (2.13).
"""

import contextlib
import logging
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator

from torch import nn

from fullshard.engine.module_state import ModuleState
from fullshard.engine.params.managed import ManagedParameter, manager_of
from fullshard.errors import FullshardError
from fullshard.plan.units import first_names
from fullshard.process_hooks import UNCAUGHT, at_first_use

logger = logging.getLogger("fullshard")

roots: "weakref.WeakSet[ModuleState]" = weakref.WeakSet()  # models that have run
# Each returns what is to be added to an exception, or None.
explainers: list[Callable[[BaseException], str | None]] = []


@at_first_use
def follow_exceptions() -> None:
    UNCAUGHT.add(_explain, "adds what fullshard knows to exceptions that end the program")


def _explain(error: BaseException) -> None:
    for explain in explainers:
        with contextlib.suppress(Exception):  # the exception itself is what counts
            if text := explain(error):
                if sys.version_info >= (3, 11):
                    error.add_note(text)
                else:
                    logger.error("%s", text)


def explain_sharded_use(error: BaseException) -> str | None:
    """Name the parameters of a module that raised because it ran without its unit."""
    if not isinstance(error, RuntimeError) or isinstance(error, FullshardError):
        return None
    for frame in reversed(list(frames_of(error))):
        if frame.f_code.co_name == "backward":
            return None  # which runs no module
        module = frame.f_locals.get("self")
        if not isinstance(module, nn.Module):
            continue
        sharded = [param.name for param, is_sharded in managed(module) if is_sharded]
        if not sharded:
            return None
        return (
            f"fullshard: {', '.join(sharded)}: sharded at that moment, so that this rank has a part of each: "
            f"{type(module).__name__}.{frame.f_code.co_name} ran, and not the forward of the sharded module that "
            "contains it. Call that one; for methods other than forward, use register_fsdp_forward_method; for a "
            "weight alone, fullshard.gathered(weight)."
        )
    return None


def explain_early_use(error: BaseException) -> str | None:
    """Name the parameters that a backward needed when no gradient had reached their unit's outputs, and so were freed.

    By the shape that torch names in its error, of a view of the memory that a weight had.
    """
    found = re.search(r"setStorage: sizes \[([\d, ]*)\].* storage of size 0", str(error))
    if found is None or not any(f.f_code.co_name == "backward" for f in frames_of(error)):
        return None
    shape = sorted(map(int, filter(None, found[1].split(", "))))
    names = [
        param.name
        for root in list(roots)
        for state in root.everyone
        for unit in state.units
        for param in unit.managed
        if unit.config.reshard_after_forward is not False and sorted(param.shape) == shape
    ]
    return (
        f"fullshard: backward needed a weight that was freed after forward and not gathered again ({first_names(names)}): its module has "
        "computed something that backward comes to before any gradient has reached what its forward returned. "
        "Return it, write it to an attribute of the module or to a list that it is given, or shard that module with "
        "reshard_after_forward=False."
    )


def managed(module: nn.Module) -> Iterator[tuple[ManagedParameter, bool]]:
    """Yield the module's own parameters that a unit manages, and whether its attributes are shards of them."""
    for name, parameter in module._parameters.items():
        if parameter is not None and (param := manager_of(parameter)) is not None:
            yield param, module.__dict__.get(name, parameter) is param.sharded


def frames_of(error: BaseException) -> Iterator[types.FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next
