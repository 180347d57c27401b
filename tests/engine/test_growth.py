"""What a program may do again and again leaves nothing of the engine's behind."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fullshard.comm import packing
from fullshard.comm.packing import Regions, Scratch
from tests.api import Api
from tests.harness import on_ranks
from tests.models import mlp
from tests.shared_memory import mapped
from tests.training import full_parameters, make_batch, mean_square, my_part

faces = pytest.mark.parametrize("face", ["rows", "pieces", "flat"])


def wrap(api: Api, model: nn.Module, face: str) -> nn.Module:
    """Make each layer and the rest a unit, with either API."""
    if face == "rows":
        for layer in model:
            api.fully_shard(layer)
        return api.fully_shard(model)
    policy = ModuleWrapPolicy({nn.Linear})
    return api.FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=face == "pieces"
    )


def whole_parameters(api: Api, model: nn.Module, face: str) -> list[Tensor]:
    if face == "rows":
        return list(full_parameters(model).values())
    with api.FullyShardedDataParallel.summon_full_params(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.ours("its record of forwards grows")
@on_ranks(2)
@faces
def test_forwards_without_a_backward_leave_nothing(api: Api, face: str) -> None:
    model, batch = wrap(api, mlp(), face), my_part(make_batch(16))
    for _ in range(2):
        mean_square(model(batch)).backward()
    model(batch)
    objects, blocks = [], []
    for num_forwards in (50, 400):
        for _ in range(num_forwards):
            model(batch)
        gc.collect()
        objects.append(len(gc.get_objects()))
        blocks.append(sys.getallocatedblocks())  # integers as well; tracemalloc and Gloo crash
    assert objects[1] - objects[0] < 100
    assert blocks[1] - blocks[0] < 400


@pytest.mark.ours("FSDP1 does not run on the CPU")
@on_ranks(2)
@faces
@pytest.mark.parametrize("together", [False, True])
def test_of_many_forwards_any_may_be_differentiated(api: Api, face: str, together: bool) -> None:
    alone = mlp()
    model = wrap(api, copy.deepcopy(alone), face)
    batches = [make_batch(16, seed=seed) for seed in (1, 2)]
    for _ in range(3):
        for run, part in ((alone, lambda batch: batch), (model, my_part)):
            for _ in range(20):
                run(part(batches[0]))
            outputs: Any = [mean_square(run(part(batch))) for batch in batches]
            if together:
                sum(outputs).backward()
            else:
                for output in outputs:  # in the order of the forwards, not the last one first
                    output.backward()
            torch.optim.SGD(run.parameters(), lr=0.1).step()
            run.zero_grad()
        own = whole_parameters(api, model, face)
        torch.testing.assert_close(own, [p.detach() for p in alone.parameters()])


def train(api: Api, face: str) -> nn.Module:
    model = wrap(api, mlp(dim=64), face)
    for _ in range(3):
        mean_square(model(my_part(make_batch(64)))).backward()
    return model


@pytest.mark.ours("shares no memory")
@on_ranks(2)
@faces
def test_shared_memory_goes_with_the_model(api: Api, face: str) -> None:
    model = train(api, face)
    del model
    gc.collect()
    before = mapped()  # counters, and the ring for gradients, which belong to the process group
    for _ in range(3):
        model = train(api, face)
        in_use = mapped()
        gc.collect()  # what building the model has left
        gc.disable()
        try:
            del model
            assert mapped() == before  # at once
        finally:
            gc.enable()
    assert (len(in_use) > len(before)) == (api.name == "peer_memory")


@pytest.mark.ours("has none of these")
@on_ranks(2)
@faces
def test_memory_for_moments_is_shared_by_models_and_goes_with_the_last(api: Api, face: str) -> None:
    with (  # hooks of other tests may keep their models for good: a hook on a tensor is no garbage
        mock.patch.object(packing, "_scratch", weakref.WeakValueDictionary()),
        mock.patch.object(packing, "_regions", weakref.WeakValueDictionary()),
    ):
        check_memory_for_moments(api, face)


def check_memory_for_moments(api: Api, face: str) -> None:
    cpu = torch.device("cpu")
    first, second = train(api, face), train(api, face)
    shared = [
        weakref.ref(each)
        for each in (Scratch.of(cpu), Regions.of(cpu, "gather"), Regions.of(cpu, "reduce"))
    ]
    del first
    gc.collect()
    held = [each() for each in shared]
    again = [Scratch.of(cpu), Regions.of(cpu, "gather"), Regions.of(cpu, "reduce")]
    is_same = [mine is None or mine is other for mine, other in zip(held, again, strict=True)]
    assert is_same == [True] * 3
    assert held[0] is not None
    if api.name == "process_group":
        assert held == again
        assert sum(memory.nbytes for each in again for memory in each.free) > 0
    del held, again, second
    gc.collect()
    assert [each() for each in shared] == [None] * 3
