"""What is added to the error for a module that activation checkpointing recomputes to something else."""

import contextlib
import inspect
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from fullshard.engine.module_state import states_in
from fullshard.plan.units import clean_name
from fullshard.watch.uncaught import frames_of, managed, roots


def explain_recomputation(error: BaseException) -> str | None:
    """Name the module whose recomputation differed from its forward, where, and how its parameters were."""
    if not isinstance(error, CheckpointError):
        return None
    for frame in frames_of(error):
        checkpointed = frame.f_locals.get("frame")  # torch's record of the forward
        recompute = getattr(checkpointed, "recompute_fn", None)
        if recompute is not None and (module := _module_in(recompute)) is not None:
            return _recomputed(module, checkpointed)
    return None


def _module_in(function: Any, depth: int = 3) -> nn.Module | None:
    """Return the first module that a function has: its own object, or in its closure and what is called there."""
    module = getattr(function, "__self__", function)
    if isinstance(module, nn.Module):
        return module
    inner = inspect.unwrap(function) if callable(function) else function
    held = [getattr(inner, "func", None), *getattr(inner, "args", ())]  # of a partial
    for cell in getattr(inner, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty one
            held.append(cell.cell_contents)
    found = (_module_in(each, depth - 1) for each in held if depth and each is not None)
    return next((each for each in found if each is not None), None)


def _recomputed(module: nn.Module, checkpointed: Any) -> str:
    shown = (each for inner in module.modules() for each in managed(inner))
    sharded = [param.name for param, is_sharded in shown if is_sharded]
    state = (
        f"{', '.join(sharded)} were sharded then, which a checkpointed module must not see"
        if sharded
        else "its parameters were whole then, as in forward, so the module itself has computed something else"
    )
    where = "" if sharded else _first_difference(module, checkpointed)
    return (
        f"fullshard: recomputed was {_path_of(module)} ({type(module).__name__}): {state}.{where} Look for what "
        "depends on more than its inputs: caches, counters, training mode, random numbers. "
        "torch.utils.checkpoint.set_checkpoint_debug_enabled(True) lists its operations."
    )


def _first_difference(module: nn.Module, checkpointed: Any) -> str:
    """Recompute once more, and say in which module the first tensor differs from forward's; "" if none does.

    checkpointed: torch's record, with the metadata of what forward has saved for backward. Modules compute with
    the whole parameters that they have, and gather nothing: other ranks may not come.
    """
    expected = checkpointed.x_metadatas
    running, found = [module], [""]
    num_saved = 0

    def enter(inner: nn.Module, _: Any) -> None:
        running.append(inner)

    def leave(*_: Any) -> None:
        running.pop()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal num_saved
        now = checkpointed.metadata_fn(tensor)
        before = expected[num_saved] if num_saved < len(expected) else "nothing"
        if now != before and not found[0]:
            found[0] = (
                f" The first tensor saved for backward that differs is of {_path_of(running[-1])} "
                f"({type(running[-1]).__name__}): {_shown(now)}; in forward {_shown(before)} came there, saved by it, "
                "or by one before it that saves less now."
            )
        num_saved += 1
        return tensor

    states = states_in(module.modules())
    units = [unit for state in states for unit in state.all_units if not unit.is_whole]
    with contextlib.ExitStack() as stack:
        for inner in module.modules():
            stack.callback(inner.register_forward_pre_hook(enter).remove)
            stack.callback(inner.register_forward_hook(leave, always_call=True).remove)
        for unit in units:
            unit.is_whole = True
            stack.callback(setattr, unit, "is_whole", False)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        stack.enter_context(contextlib.suppress(Exception))  # it is the user's code
        checkpointed.recompute_fn(*checkpointed.get_inputs())
    return found[0]


def _shown(metadata: Any) -> str:
    """Return the metadata of a tensor as torch keeps it, in short."""
    if not isinstance(metadata, dict):
        return str(metadata)
    shape = "x".join(map(str, metadata.get("shape", ())))
    return f"{shape} of {str(metadata.get('dtype')).removeprefix('torch.')}"


def _path_of(module: nn.Module) -> str:
    for root in (root for state in list(roots) for root in state.modules):
        for path, each in root.named_modules():
            if each is module:
                return clean_name(path) or "the root"
    return "a module of no model that has run"
