"""DeepSpeed ZeRO-3 as one more implementation, on CPU ranks over Gloo.

It comes from PyPI and only `make bench` installs it; where it is missing the tables say so. Its
settings are its own defaults wherever they are the fast ones for this model:

overlap_comm, reduce_scatter           on (on CPU every collective is waited for all the same)
contiguous_gradients                   on, as by default
bucket and live-parameter limits       as by default, all larger than the model: every gradient
                                       joins one reduction, and what forward gathered stays until
                                       backward, which saves the second all-gather that the other
                                       sharded implementations make, and costs their memory
bf16                                   bfloat16 weights; float32 master weights, reductions and
                                       accumulation
optimizer                              torch's AdamW over the float32 shards, as everywhere

Two ways through several micro-batches: ZeRO-3 reduces after each, and refuses `no_sync`;
`coalesce_grad_reduction` is its way to reduce once a step.

No HSDP: the version pinned here has no MiCS any more, and `zero_hpz_partition_size` keeps a second
copy of the weights but reduces gradients over all ranks.
"""

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

NO_HYBRID = "shards over all ranks only"


def is_installed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def wrap(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, sequences: int, in_bf16: bool
) -> Any:
    """Return DeepSpeed's engine: a module that also has `step` and `zero_grad`."""
    # Read on import: which device to work on, and that nothing is to be compiled.
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    os.environ["LOCAL_SIZE"] = str(dist.get_world_size())
    import deepspeed  # noqa: PLC0415 - optional, and seconds to import

    deepspeed.utils.logger.setLevel("ERROR")
    # Its own all-reduce in shared memory, for inference: it would be compiled now.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=config(sequences=sequences, in_bf16=in_bf16),
        dist_init_required=False,
    )
    return engine


def config(*, sequences: int, in_bf16: bool) -> dict[str, Any]:
    """Return DeepSpeed's configuration; micro-batches are counted by us, not by it."""
    options: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": sequences,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": 1 << 60,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_scatter": True,
        },
    }
    if in_bf16:
        options["bf16"] = {"enabled": True}
        options["data_types"] = {"grad_accum_dtype": "fp32"}
        options["communication_data_type"] = "fp32"
    return options


def reduce_in_each(engine: Any, num_microbatches: int) -> Iterator[int]:
    for i in range(num_microbatches):
        engine.set_gradient_accumulation_boundary(i == num_microbatches - 1)
        yield i


def reduce_in_last(engine: Any, num_microbatches: int) -> Iterator[int]:
    with engine.coalesce_grad_reduction():
        yield from range(num_microbatches)
    engine.set_gradient_accumulation_boundary(True)
