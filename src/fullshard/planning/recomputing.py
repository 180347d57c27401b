"""Activation checkpointing, as plans assume it and as programs that a search prints have it, in the text of these."""

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fullshard.planning.setup import CHECKPOINTING, SetupError


def recompute(layers: Iterable[nn.Module], checkpointing: str) -> None:
    """Let layers compute again in backward what they did not keep. Before they are sharded.

    checkpointing: "full" keeps a layer's inputs; "selective" also what attention and every second matrix product
    return; "none" changes nothing. It is inside the layer, so a unit is gathered once for both.
    """
    if checkpointing not in CHECKPOINTING:
        raise SetupError(f"checkpointing {checkpointing!r}: expected {', '.join(CHECKPOINTING)}.")
    more: dict[str, Any] = (
        {"context_fn": selective_contexts} if checkpointing == "selective" else {}
    )
    for layer in layers if checkpointing != "none" else ():
        run = functools.partial(checkpoint, layer.forward, use_reentrant=False, **more)
        vars(layer)["forward"] = run


def selective_contexts() -> Any:
    """Return contexts of a checkpoint that keeps outputs of attention and of every second matrix product."""
    seen = {False: 0, True: 0}  # products, in the forward and when it is run again

    def choose(context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        name = operator.overloadpacket.__name__
        if "attention" in name:
            return CheckpointPolicy.MUST_SAVE
        if name not in ("mm", "addmm", "bmm"):
            return CheckpointPolicy.PREFER_RECOMPUTE
        seen[context.is_recompute] += 1
        is_kept = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)
