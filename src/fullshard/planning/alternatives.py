"""Other ways to train the same model on the same machines, which differ from one in a single setting."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from fullshard.planning.setup import OPTIMIZERS, TrainingSetup
from fullshard.policies import MixedPrecisionPolicy


class Alternative(NamedTuple):
    """A setup, and what to do to come to it."""

    text: str
    setup: TrainingSetup


def alternatives(
    setup: TrainingSetup, *, takes_batch: bool, room_nbytes: int = 0
) -> Iterator[Alternative]:
    """Yield what could be changed.

    takes_batch: whether the micro-batch can be chosen. room_nbytes: for units that stay unsharded, if some of them fit.
    """

    def other(text: str, **changes: Any) -> Alternative:
        return Alternative(text, dataclasses.replace(setup, **changes))

    computes_in = setup.precision.param_dtype or torch.float32
    if computes_in is torch.float32 and not setup.is_home:
        text = "compute in bfloat16 (MixedPrecisionPolicy(param_dtype=torch.bfloat16))"
        yield other(text, precision=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    for how, text in _CHECKPOINTING.items():
        if how != setup.checkpointing:
            yield other(text, checkpointing=how)
    if setup.reshard_after_forward is False:
        yield other("reshard after forward", reshard_after_forward=None)
    elif setup.shards > 1:
        text = "keep units unsharded after forward (reshard_after_forward=False)"
        yield other(text, reshard_after_forward=False)
    if setup.keep_unsharded_nbytes:
        yield other("keep no units unsharded (keep_unsharded)", keep_unsharded_nbytes=0)
    elif room_nbytes:
        size, unit = (1 << 30, "GiB") if room_nbytes >= 1 << 30 else (1 << 20, "MiB")
        tenths = 10 * room_nbytes // size  # as it is printed, so that it can be typed
        text = f"keep {tenths / 10} {unit} of units unsharded (keep_unsharded)"
        yield other(text, keep_unsharded_nbytes=tenths * size // 10)
    if not setup.is_fused and OPTIMIZERS[setup.optimizer].has_fused:
        yield other(f"let one kernel step ({setup.optimizer}: fused=True)", is_fused=True)
    if not setup.is_compiled:
        yield other("compile the units (torch.compile)", is_compiled=True)
    if takes_batch:
        yield from _batches(setup)
    # A size of smaller groups may not divide another number of shards.
    reshard = setup.reshard_after_forward
    reshard = reshard if isinstance(reshard, bool) else None
    per_host = setup.machine.per_host
    if setup.shards > per_host and setup.shards % per_host == 0:
        text = f"shard over the {per_host} ranks of a host, with replicas (HSDP)"
        yield other(text, shard_size=per_host, reshard_after_forward=reshard)
    if setup.shards < setup.ranks:
        text = f"shard over all {setup.ranks} ranks"
        yield other(text, shard_size=None, reshard_after_forward=reshard)
    if setup.accumulation > 1:
        last = "reduce gradients in the last micro-batch alone"
        text = last if setup.reduces_each else "reduce gradients in each micro-batch"
        yield other(text, reduces_each=not setup.reduces_each)
    for where, text in _OFFLOADS.items():
        if where != setup.offload:
            yield other(text, offload=where)


_CHECKPOINTING = {
    "none": "no activation checkpointing",
    "selective": "selective activation checkpointing",
    "full": "full activation checkpointing",
}
_OFFLOADS = {
    "none": "keep all on the device",
    "optimizer": "keep the optimizer's state on the host (stream_state)",
    "params": "keep parameters and optimizer state on the host (CPUOffloadPolicy)",
}


def _batches(setup: TrainingSetup) -> Iterator[Alternative]:
    """Yield micro-batches of twice and of half the size, with as many tokens a step where that can be."""
    batch, times = setup.batch, setup.accumulation
    fewer = (
        (times // 2, f"{times // 2} a step")
        if times % 2 == 0
        else (times, "so twice as many a step")
    )
    found = [(2 * batch, *fewer)]
    found += [(batch // 2, 2 * times, f"{2 * times} a step")] if batch % 2 == 0 else []
    for size, num, said in found:
        made = dataclasses.replace(setup, batch=size, accumulation=num)
        yield Alternative(f"micro-batches of {size}, {said}", made)
