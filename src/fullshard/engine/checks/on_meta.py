"""Buffers that are on the meta device still when a model first runs.

Parameters on the meta device are refused when a unit takes memory. No unit has buffers, so nothing would
notice that ``to_empty`` or a load left some out (those that are not persistent are in no checkpoint),
and torch computes with some of them as if they had values.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from fullshard.engine.checks.strays import first_names
from fullshard.errors import StateError
from fullshard.plan.units import clean_name


def refuse_meta_buffers(
    root: nn.Module, modules: Iterable[nn.Module], device: torch.device
) -> None:
    """Raise StateError, with their paths, if some of the modules have buffers on the meta device.

    device: where they should be.
    """
    on_meta = {
        module: [
            name for name, each in module._buffers.items() if each is not None and each.is_meta
        ]
        for module in modules
    }
    if not any(on_meta.values()):
        return
    names = [
        clean_name(f"{path}.{name}")
        for path, module in root.named_modules()
        for name in on_meta.get(module, ())
    ]
    raise StateError(
        "FSDP buffers should be materialized from meta device before training, but the following were "
        f"still on meta device: {first_names(names)} (rank {dist.get_rank()}). Call "
        f"model.to_empty(device={str(device)!r}) and compute their values. Those with persistent=False "
        "are in no checkpoint."
    )
