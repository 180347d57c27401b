"""Build a user's model and replay a recorded step with it."""

import contextlib
import sys
from pathlib import Path

import torch
from torch import nn

import fullshard
from fullshard.tools.config import OptionError
from fullshard.tools.groups import default_group
from fullshard.tools.import_path import check_import_path, function_at
from fullshard.tools.launch import Place


def replay_step(
    folder: Path, target: str, *, rank: int | None, place: Place | None
) -> fullshard.Replay:
    """Replay a folder with the model that MODULE:FUNCTION returns.

    Names of PyTorch's FSDP are fullshard's meanwhile. Without torchrun (no place) this is the only rank. What
    the function prints goes to stderr. Raises OptionError for a target that returns no model, and as
    `fullshard.replay`; what the model raises passes.
    """
    check_import_path(target)
    fullshard.install()
    is_on_cpu = torch.accelerator.current_accelerator(check_available=True) is None
    if not is_on_cpu and place is not None:
        torch.accelerator.set_device_index(place.local_rank)
    with contextlib.redirect_stdout(sys.stderr):
        build = function_at(target)
        with default_group("gloo" if is_on_cpu else None, under_torchrun=place is not None):
            model = build()
            if not isinstance(model, nn.Module):
                kind = type(model).__name__
                raise OptionError(f"{target} returned {kind}, not a model (nn.Module).")
            return fullshard.replay(folder, model, rank=rank)
