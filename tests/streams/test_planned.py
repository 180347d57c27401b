"""A planned step with streams, and the one that the engine queues on a virtual device: the same order and memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard.plan.step import StepSettings, plan_step
from fullshard.plan.unit_plan import Sharding
from fullshard.plan.ways import NCCL
from fullshard.torch_private import swap_memory
from tests import planned
from tests.selection import repeats
from tests.streams.lab import Lab, fake_world
from tests.streams.programs.common import mesh_of
from tests.streams.recording import DEVICE

pytestmark = pytest.mark.skipif(swap_memory is None, reason="this torch cannot swap memory")
BF16 = torch.bfloat16


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Yield a virtual device, as one rank of four."""
    with fake_world(), Lab(host_waits=None) as lab:
        yield lab


CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"reshard": False},
    "all resharded": {"reshard": True},
    "mixed": {"param_dtype": BF16, "reduce_dtype": torch.float32},
    "low": {"param_dtype": BF16, "reduce_dtype": BF16},
    "replicas": {"mesh": (2, 2)},
    "low replicas": {"mesh": (2, 2), "param_dtype": BF16, "reduce_dtype": BF16},
    "micro-batches": {"num": 2},
    "mixed micro-batches": {"num": 3, "param_dtype": BF16, "reduce_dtype": torch.float32},
    "put off": {"mesh": (2, 2), "num": 3, "puts_off": True},
    "low, put off": {
        "mesh": (2, 2),
        "num": 2,
        "puts_off": True,
        "param_dtype": BF16,
        "reduce_dtype": BF16,
    },
    "whole": {"mesh": (4, 1), "param_dtype": BF16, "reduce_dtype": torch.float32},
    "two at once": {"max_input_buffers": 2},
    "offloaded": {"offloads": True},
    "offloaded, mixed": {"offloads": True, "param_dtype": BF16, "reduce_dtype": torch.float32},
}


@repeats(lambda s: s["name"] not in ("mixed", "replicas"))
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_queued_as_planned(lab: Lab, name: str) -> None:
    case = {"mesh": (4,), "reshard": None, "param_dtype": None, "reduce_dtype": None, "num": 1}
    case |= {"max_input_buffers": 1, "offloads": False, "puts_off": False} | CASES[name]
    blocks = [nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 16)) for _ in range(5)]
    offload = fullshard.CPUOffloadPolicy() if case["offloads"] else fullshard.OffloadPolicy()
    model: Any = nn.Sequential(nn.Linear(16, 16), *blocks, nn.Linear(16, 16))
    policy = fullshard.MixedPrecisionPolicy(case["param_dtype"], case["reduce_dtype"])
    for each in (*blocks, model):
        fullshard.fully_shard(
            each,
            mesh=mesh_of(*case["mesh"]),
            mp_policy=policy,
            reshard_after_forward=case["reshard"],
            offload_policy=offload,
        )
    if case["max_input_buffers"] > 1:
        model.set_reduce_scatter_max_input_buffers(case["max_input_buffers"])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.ones(2, 16, device=DEVICE)

    def step() -> None:
        with lab.step():
            for number in range(case["num"]):
                is_last = number == case["num"] - 1
                model.set_requires_gradient_sync(is_last or case["puts_off"])
                model.set_requires_all_reduce(is_last)
                model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(3):
        step()
    workload = planned.observe(model, lambda: model(x).sum().backward())
    optimizer.zero_grad()
    step()
    executed = planned.Executed(model, optimizer)
    with executed.watching():
        step()
    replicate_size, shard_size = (1, *case["mesh"])[-2:]
    sharding = Sharding(
        shard_size,
        NCCL,
        replicate_size=replicate_size,
        reduce_dtype=case["reduce_dtype"],
        offloads=case["offloads"],
    )
    settings = StepSettings(
        sharding,
        has_streams=True,
        reshard_after_forward=case["reshard"],
        num_microbatches=case["num"],
        reduces_each=case["puts_off"],
        sums_replicas_last=case["puts_off"],
        max_input_buffers=case["max_input_buffers"],
    )
    expected = planned.told(plan_step(workload, settings))
    lines = itertools.zip_longest(map(str, executed.moments), map(str, expected))
    differences = [f"{a}\n   {b}" for a, b in lines if a != b]
    assert not differences, f"{len(differences)} of {len(expected)}:\n" + "\n".join(differences[:4])
