"""Whole steps on ranks of this machine: the most bytes of tensors that they have, and that are planned."""

from __future__ import annotations

import dataclasses

import pytest

import fullshard
from bench.home import Home, HomeTraining, settings_of, workload_of
from bench.model import BatchSize
from bench.ranks import Rank
from fullshard.plan.simulator import follow_memory
from fullshard.plan.step import plan_step
from tests.harness import on_ranks, rank, world_size

pytestmark = pytest.mark.ours("not part of the API")

_GPT = Home(width=128, num_layers=4, batch=BatchSize(2, 32))
_CONV = Home("conv", width=64, num_layers=4, batch=BatchSize(8, 1))
QUICK = (
    dataclasses.replace(_GPT, num_layers=3, bf16=True, checkpoints=True, num_microbatches=2),
    dataclasses.replace(_GPT, num_layers=3, kind="lora"),
)
LONG = (
    _GPT,
    dataclasses.replace(_GPT, checkpoints=True),
    dataclasses.replace(_GPT, num_microbatches=3),
    dataclasses.replace(_GPT, bf16=True),
    dataclasses.replace(_GPT, reshard=False),
    dataclasses.replace(_GPT, optimizer="foreach"),
    dataclasses.replace(_GPT, optimizer="fused", batch=BatchSize(1, 8)),
    dataclasses.replace(_GPT, width=256, batch=BatchSize(2, 8)),
    dataclasses.replace(_GPT, kind="moe", bf16=True),
    dataclasses.replace(_GPT, kind="moe", num_microbatches=2),
    dataclasses.replace(_GPT, kind="lora", checkpoints=True, num_microbatches=2),
    _CONV,
    dataclasses.replace(_CONV, num_microbatches=2),
    dataclasses.replace(_GPT, comm="process_group"),
    dataclasses.replace(_GPT, comm="process_group", bf16=True, num_microbatches=2),
)


def _compare(home: Home) -> None:
    home = dataclasses.replace(home, num_ranks=world_size())
    before = fullshard.set_default_comm(home.comm)
    try:
        step = plan_step(workload_of(home), settings_of(home, rank()))
        planned = follow_memory(step).peak_nbytes
        training = HomeTraining(Rank(rank(), world_size(), 0), home)
        executed = training.peak_nbytes()
    finally:
        fullshard.set_default_comm(before)
    assert abs(planned - executed) <= 0.01 * executed, (
        f"{home.name}: {planned} planned, {executed} executed"
    )


@pytest.mark.parametrize("home", QUICK, ids=lambda home: home.name)
@on_ranks(2)
def test_bytes_of_two_ranks(home: Home) -> None:
    _compare(home)


@pytest.mark.long
@pytest.mark.parametrize("home", LONG, ids=lambda home: home.name)
@on_ranks(2, 3, 4, limit_s=120)
def test_bytes_of_more(home: Home) -> None:
    _compare(home)
