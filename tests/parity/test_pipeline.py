"""PyTorch's pipeline schedules over sharded stages train as one process does.

Four ranks: two in a pipeline, times two that share each stage's parameters.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.tensor import DTensor

from tests.api import Api
from tests.harness import mesh_of, on_ranks, rank, world_size
from tests.installing import installed
from tests.models import mlp
from tests.releases import needs_newest
from tests.selection import one_way
from tests.training import assert_equal, full_gradients, full_parameters, make_batch

pytestmark = one_way("test_matrix.py, where both ways equal one process in every bit")

NUM_LAYERS = 8
NUM_MICROBATCHES = 4

# Schedule, and whether layers are freed between the microbatches of a step. Zero-bubble schedules
# look up whole parameters before autograd gathers them: on PyTorch's engine too, they have to stay.
CASES = [
    ("ScheduleGPipe", False),
    ("ScheduleGPipe", True),
    ("Schedule1F1B", False),
    ("ScheduleLoopedBFS", False),
    ("ScheduleInterleaved1F1B", False),
    ("ScheduleInterleaved1F1B", True),
    ("ScheduleInterleavedZeroBubble", False),
]


@functools.cache
def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets)


def _data(step: int) -> tuple[Tensor, Tensor]:
    return make_batch(16, size=16, seed=step), make_batch(16, size=16, seed=100 + step)


def _my_part(batch: Tensor) -> Tensor:
    return batch.chunk(2)[_mesh().get_local_rank("dp")]


def _mean_over_dp(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total, group=_mesh().get_group("dp"))
    return total.item() / 2


@contextlib.contextmanager
def _watched(*prefixes: str) -> Iterator[list[mock.Mock]]:
    """Count calls of collectives. (`record_traffic` watches sends, which schedules compare by id.)"""
    names = [f"{prefix}_{form}" for prefix in prefixes for form in ("single", "tensor")]
    names = [*names, *(f"{prefix}_into_tensor" for prefix in prefixes)]
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(mock.patch.object(dist, name, wraps=getattr(dist, name)))
            for name in names
            if hasattr(dist, name)
        ]


class Pipeline:
    """This rank's stages of a model, sharded over `dp`, and the schedule that runs them.

    `layers` holds them under their numbers in the whole model, so that names agree with it.
    """

    def __init__(
        self,
        api: Api,
        schedule: str,
        model: nn.Sequential,
        schedule_options: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        kind: Any = getattr(pipelining, schedule)
        group = _mesh().get_group("pp")
        self.is_first = group.rank() == 0
        is_single = issubclass(kind, PipelineScheduleSingle)
        num_stages = group.size() * (1 if is_single else 2)
        size = NUM_LAYERS // num_stages
        self.layers = nn.ModuleDict()
        self.stages = []
        for index in range(group.rank(), num_stages, group.size()):
            own = {str(n): copy.deepcopy(model[n]) for n in range(index * size, (index + 1) * size)}
            for layer in own.values():
                api.fully_shard(layer, mesh=_mesh()["dp"], **options)
            module = api.fully_shard(nn.Sequential(*own.values()), mesh=_mesh()["dp"], **options)
            self.layers.update(own)
            self.stages.append(
                pipelining.PipelineStage(
                    module, index, num_stages, torch.device("cpu"), group=group
                )
            )
        stages = self.stages[0] if is_single else self.stages
        self.schedule = kind(
            stages, n_microbatches=NUM_MICROBATCHES, loss_fn=_loss, **schedule_options
        )

    def step(self, inputs: Tensor, targets: Tensor, **options: Any) -> float | None:
        """Run forward and backward on this rank's part of a batch; the last rank has a loss."""
        if self.is_first:
            self.schedule.step(_my_part(inputs), **options)
            return None
        losses: list[Tensor] = []
        self.schedule.step(target=_my_part(targets), losses=losses, **options)
        return _mean_over_dp(torch.stack(losses).mean().item())


def _check_step(pipeline: Pipeline, alone: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """Run forward and backward on both; compare losses and gradients."""
    loss = pipeline.step(inputs, targets)
    expected = _loss(alone(inputs), targets)
    expected.backward()
    assert (loss is None) == pipeline.is_first
    if loss is not None:
        assert loss == pytest.approx(expected.item(), rel=1e-5)
    whole = full_gradients(alone)
    own = [n for n, _ in alone.named_parameters() if n.partition(".")[0] in pipeline.layers]
    assert len(own) == NUM_LAYERS
    assert_equal(full_gradients(pipeline.layers), {n: whole[n] for n in own}, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("schedule", "reshard"), CASES)
@on_ranks(4, limit_s=60)
def test_schedule_trains_as_one_process(api: Api, schedule: str, reshard: bool) -> None:
    alone = mlp(NUM_LAYERS)
    with installed(api):
        pipeline = Pipeline(api, schedule, alone, reshard_after_forward=reshard)
        optimizers = [
            torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
            for model in (pipeline.layers, alone)
        ]
        for step in range(3):
            _check_step(pipeline, alone, *_data(step))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert all(isinstance(parameter, DTensor) for parameter in pipeline.layers.parameters())


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "ScheduleInterleavedZeroBubble"])
@on_ranks(4, limit_s=60)
def test_each_unit_is_reduced_once_a_step_whatever_the_microbatches(
    api: Api, schedule: str
) -> None:
    with installed(api):
        pipeline = Pipeline(api, schedule, mlp(NUM_LAYERS), reshard_after_forward=False)
        counts: Counter[str] = Counter()
        for name, layer in pipeline.layers.items():
            layer.set_all_reduce_hook(lambda _, name=name: counts.update([name]))
        pipeline.step(*_data(0))  # the first one also runs a microbatch to learn shapes
        counts.clear()
        pipeline.step(*_data(1))
        assert counts == dict.fromkeys(pipeline.layers, 1)


@needs_newest
@pytest.mark.parametrize("schedule", ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"])
@on_ranks(4, limit_s=60)
def test_reductions_of_one_stage_may_run_beside_the_next(api: Api, schedule: str) -> None:
    alone = mlp(NUM_LAYERS)
    with installed(api):
        options = {"defer_reduce_grad_wait": True}
        pipeline = Pipeline(api, schedule, alone, options, reshard_after_forward=False)
        for step in range(2):
            alone.zero_grad()
            _check_step(pipeline, alone, *_data(step))
            pipeline.layers.zero_grad()


@needs_newest
@pytest.mark.parametrize(
    "schedule",
    ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"],
)
@on_ranks(4, limit_s=60)
def test_gradients_of_several_steps_may_be_reduced_once(api: Api, schedule: str) -> None:
    alone = mlp(NUM_LAYERS)
    counts: Counter[str] = Counter()
    with installed(api):
        pipeline = Pipeline(api, schedule, alone, reshard_after_forward=False)
        pipeline.step(*_data(0))  # the first one also runs a microbatch to learn shapes
        pipeline.layers.zero_grad()
        for name, layer in pipeline.layers.items():
            layer.set_all_reduce_hook(lambda _, name=name: counts.update([name]))
        pipeline.step(*_data(1), finalize_gradients=False)
        assert not counts
        _loss(alone(_data(1)[0]), _data(1)[1]).backward()
        _check_step(pipeline, alone, *_data(2))
        assert counts == dict.fromkeys(pipeline.layers, 1)


@pytest.mark.apis("process_group", "torch")
@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleInterleaved1F1B"])
@on_ranks(4, limit_s=60)
def test_step_gathers_and_reduces_each_unit_once(api: Api, schedule: str) -> None:
    with installed(api):
        pipeline = Pipeline(api, schedule, mlp(NUM_LAYERS), reshard_after_forward=False)
        pipeline.step(*_data(0))
        with _watched("all_gather") as gathers, _watched("reduce_scatter", "all_to_all") as reduces:
            pipeline.step(*_data(1))
        assert sum(watch.call_count for watch in gathers) == len(pipeline.layers)
        assert sum(watch.call_count for watch in reduces) == len(pipeline.layers)


@on_ranks(4, limit_s=60)
def test_evaluation_after_a_step_gives_the_outputs_of_one_process(api: Api) -> None:
    alone = mlp(NUM_LAYERS)
    inputs, targets = _data(0)
    with installed(api):
        pipeline = Pipeline(api, "ScheduleGPipe", alone, reshard_after_forward=False)
        pipeline.step(inputs, targets)
        with torch.no_grad():
            if pipeline.is_first:
                pipeline.schedule.eval(_my_part(inputs))
                return
            outputs = pipeline.schedule.eval(target=_my_part(targets), losses=[])
            torch.testing.assert_close(outputs, _my_part(alone(inputs)))


@on_ranks(4, limit_s=60)
def test_checkpoint_of_a_pipeline_is_loaded_without_one(api: Api, tmp_path: Path) -> None:
    """Each stage saves its layers; four ranks load all of them, sharded another way."""
    torch.manual_seed(1)
    whole, alone = mlp(NUM_LAYERS), mlp(NUM_LAYERS)
    with installed(api):
        pipeline = Pipeline(api, "ScheduleGPipe", alone, reshard_after_forward=False)
        optimizer = torch.optim.AdamW(pipeline.layers.parameters(), lr=0.1)
        alone_optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
        _check_step(pipeline, alone, *_data(0))
        optimizer.step()
        alone_optimizer.step()
        state, optim_state = get_state_dict(pipeline.layers, optimizer)
        dcp.save({"model": state, "optimizer": optim_state}, checkpoint_id=tmp_path)

        for layer in whole:
            api.fully_shard(layer, mesh=mesh_of(world_size()))
        api.fully_shard(whole, mesh=mesh_of(world_size()))
        whole_optimizer = torch.optim.AdamW(whole.parameters(), lr=0.1)
        state, optim_state = get_state_dict(whole, whole_optimizer)
        dcp.load({"model": state, "optimizer": optim_state}, checkpoint_id=tmp_path)
        set_state_dict(whole, whole_optimizer, model_state_dict=state, optim_state_dict=optim_state)
    own = {
        n: p for n, p in full_parameters(whole).items() if n.partition(".")[0] in pipeline.layers
    }
    assert_equal(own, full_parameters(pipeline.layers))
    inputs, targets = (batch.chunk(world_size())[rank()] for batch in _data(1))
    _loss(whole(inputs), targets).backward()
    alone.zero_grad()
    _loss(alone(_data(1)[0]), _data(1)[1]).backward()
    assert_equal(full_gradients(whole), full_gradients(alone), rtol=1e-3, atol=1e-5)
