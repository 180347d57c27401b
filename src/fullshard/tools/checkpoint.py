"""Checkpoints of model and optimizer through `torch.distributed.checkpoint`.

    checkpoints/step-00000350/           complete: renamed once every rank had written its part
    checkpoints/partial-step-00000500/   being written, or left by a crash; never read

The step is in the name and nothing is pickled by us; every rank reads and writes only its shards,
so a checkpoint loads on another number of ranks. On several hosts the folder must be shared.
"""

import os
import shutil
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

_PREFIX = "step-"


class Checkpoint(NamedTuple):
    """A complete checkpoint and the number of steps it has behind it."""

    step: int
    path: Path


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the complete checkpoint with the most steps, or None."""
    found = [each for each in _checkpoints(folder) if (each.path / ".metadata").is_file()]
    return max(found, default=None)


def _checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the folders named as checkpoints are; others (``step-12-copy``) are the user's own."""
    paths = [(path, path.name.removeprefix(_PREFIX)) for path in folder.glob(f"{_PREFIX}*")]
    return [Checkpoint(int(step), path) for path, step in paths if step.isdecimal()]


def save_checkpoint(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Write a checkpoint and then remove the older ones, so that there always is one. Collective."""
    import torch.distributed.checkpoint as dcp  # takes a second, and the launcher saves nothing

    final = folder / f"{_PREFIX}{step:08d}"
    partial = folder / f"partial-{final.name}"
    if dist.get_rank() == 0:
        for leftover in folder.glob("partial-*"):
            shutil.rmtree(leftover)
        partial.mkdir(parents=True)
    dist.barrier()
    with _quiet():
        dcp.save(_state(model, optimizer), checkpoint_id=partial)
    dist.barrier()
    if dist.get_rank() == 0:
        if (final / ".metadata").is_file():
            # A run resumed at its last step saves the same state again. To replace a folder takes
            # two steps, and a crash between them would leave no checkpoint: the first one stays.
            shutil.rmtree(partial)
        else:
            shutil.rmtree(final, ignore_errors=True)  # what is not complete
            partial.rename(final)
        _sync_directory(folder)
        for old in _checkpoints(folder):
            if old.path != final:
                shutil.rmtree(old.path)
    dist.barrier()


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill model and optimizer in place from a complete checkpoint. Collective."""
    import torch.distributed.checkpoint as dcp  # see `save_checkpoint`

    _allocate_optimizer_state(optimizer)
    with _quiet():
        dcp.load(_state(model, optimizer), checkpoint_id=path)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Name every tensor: `model.<fqn>` and `optimizer.<fqn>.<state>`."""
    optimizer_state = {
        f"{name}.{key}": value
        for name, param in model.named_parameters()
        for key, value in optimizer.state[param].items()
    }
    return {"model": model.state_dict(), "optimizer": optimizer_state}


def _allocate_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer create its state, which it does in its first step.

    A step of gradients zero at learning rate zero leaves the parameters as they are; the state
    is overwritten by the load.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _sync_directory(folder: Path) -> None:
    """Make a rename survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _quiet(warnings.catch_warnings):  # noqa: N801 -- reads as a statement
    """Hide torch's warnings about its own checkpoint internals."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")
