"""Workloads of shapes, beside those of modules and counts by hand."""

import itertools

import pytest
import torch

from fullshard.models.llama import Llama
from fullshard.models.sizes import LlamaConfig
from fullshard.plan.actions import Holding
from fullshard.plan.simulator import StepMemory, follow_memory
from fullshard.plan.step import StepSettings, plan_step
from fullshard.plan.unit_plan import Sharding
from fullshard.plan.ways import NCCL
from fullshard.plan.workload import Run, WorkKind, Workload
from fullshard.planning.pools import pooled_nbytes
from fullshard.planning.recomputing import recompute
from fullshard.planning.shapes import (
    EAGER,
    EAGER_FLOAT,
    EAGER_GELU,
    FUSED,
    Experts,
    MicroBatch,
    Parts,
    TransformerShape,
    shape_workload,
)
from fullshard.planning.traced import TraceOptions, token_example, trace_workload

LLAMA_8B = TransformerShape(32, 4096, 32, 8, 14336, 128_256, 128)
SMALL = LlamaConfig(512, 128, 384, 4, 4, 2)
SMALL_SHAPE = TransformerShape(4, 128, 4, 2, 384, 512, 32)


def flops(workload: Workload, kind: WorkKind, part: str) -> float:
    runs = (
        workload.stretches[event.stretch] for event in workload.events if isinstance(event, Run)
    )
    works = itertools.chain.from_iterable(getattr(stretch, part) for stretch in runs)
    return sum(work.flops * work.count for work in works if work.kind is kind)


def test_parameters_are_counted_as_the_model_has_them() -> None:
    assert LLAMA_8B.num_params == 8_030_261_248
    workload = shape_workload(LLAMA_8B, MicroBatch(1, 128))
    assert sum(spec.numel for unit in workload.units for spec in unit.params) == LLAMA_8B.num_params


def test_products_are_those_of_the_module() -> None:
    with torch.device("meta"):
        model = Llama(SMALL)
    traced = trace_workload(model, token_example(model, batch=2, seq=64))
    shaped = shape_workload(SMALL_SHAPE, MicroBatch(2, 64))
    for part in ("forward", "backward"):
        assert flops(shaped, WorkKind.MATMUL, part) == pytest.approx(
            flops(traced, WorkKind.MATMUL, part), rel=0.01
        )
    assert shaped.tokens == traced.tokens
    assert [u.name for u in shaped.units][1:] == [f"layers.{n}" for n in range(4)]
    assert sum(s.numel for u in shaped.units for s in u.params) == sum(
        s.numel for u in traced.units for s in u.params
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_bytes_are_about_those_of_the_module(checkpointing: str, dtype: torch.dtype) -> None:
    num_shared = 8 if dtype == torch.bfloat16 else 32  # in float32 shared keys write all scores
    with torch.device("meta"):
        model = Llama(LlamaConfig(32_000, 4096, 11_008, 2, 32, num_shared)).to(dtype)
    recompute(model.model.layers, checkpointing)
    traced = trace_workload(
        model, token_example(model, batch=2, seq=4096), options=TraceOptions(attends_as_gpu=True)
    )
    shaped = shape_workload(
        TransformerShape(2, 4096, 32, num_shared, 11_008, 32_000, 128),
        MicroBatch(
            2,
            4096,
            checkpointing,
            EAGER if dtype == torch.bfloat16 else EAGER_FLOAT,
            param_dtype=dtype,
            compute_dtype=dtype,
        ),
    )
    settings = StepSettings(Sharding(8, NCCL), has_streams=True)
    peaks = [follow_memory(plan_step(each, settings)).peak_nbytes for each in (shaped, traced)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.1)
    moved = [
        [
            sum(w.nbytes * w.count for w in works if w.kind is WorkKind.MEMORY)
            for works in (each.stretches[1].forward, each.stretches[1].backward)
        ]
        for each in (shaped, traced)
    ]
    assert moved[0] == pytest.approx(moved[1], rel=0.35)  # the module's norms are more operators


def test_pools_of_streams_add_up_though_they_peak_one_after_the_other() -> None:
    order = list(Holding)

    def levels(**nbytes: int) -> tuple[int, ...]:
        return tuple(nbytes.get(holding.name, 0) for holding in order)

    memory = StepMemory(
        levels=(levels(ACTIVATIONS=9), levels(ACTIVATIONS=2, GRADIENT_SHARDS=5)),
        highest=(10, 8),
        peak_nbytes=10,
        peak_action=0,
        at_peak=(),
    )
    assert pooled_nbytes(memory, ()) == 10
    assert pooled_nbytes(memory, (Holding.GRADIENT_SHARDS,)) == 10 + 5


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("kernels", [EAGER, EAGER_GELU, FUSED])
def test_what_is_saved_is_freed(checkpointing: str, kernels: object) -> None:
    batch = MicroBatch(2, 512, checkpointing, kernels, has_outer_units=True)  # type: ignore[arg-type]
    workload = shape_workload(LLAMA_8B, batch)
    runs = [workload.stretches[e.stretch] for e in workload.events if isinstance(e, Run)]
    assert sum(s.saved_nbytes for s in runs) == pytest.approx(
        sum(s.freed_nbytes for s in runs), rel=1e-6
    )
    assert all(s.forward_peak_nbytes >= s.saved_nbytes for s in runs)
    gradients = sum(s.gradient_nbytes for s in runs)
    assert gradients == pytest.approx(2 * LLAMA_8B.num_params, rel=0.001)


def test_recomputation_saves_memory_and_costs_products() -> None:
    peaks, again = [], []
    for checkpointing in ("none", "selective", "full"):
        workload = shape_workload(LLAMA_8B, MicroBatch(1, 4096, checkpointing))
        runs = [workload.stretches[e.stretch] for e in workload.events if isinstance(e, Run)]
        peaks.append(sum(stretch.saved_nbytes for stretch in runs))
        again.append(flops(workload, WorkKind.MATMUL, "recomputed"))
    assert peaks[0] > peaks[1] > peaks[2]
    assert again[0] == 0 < again[1] < again[2]
    assert again[2] == pytest.approx(
        flops(workload, WorkKind.MATMUL, "forward") - 2 * 4096 * 4096 * 128_256, rel=1e-6
    )


@pytest.mark.parametrize("name", ["tensor", "context", "pipeline"])
def test_other_parallelism_divides_the_work(name: str) -> None:
    whole = shape_workload(LLAMA_8B, MicroBatch(1, 8192))
    part = shape_workload(LLAMA_8B, MicroBatch(1, 8192, parts=Parts(**{name: 4})))
    blocks = [
        sum(flops(w, kind, "forward") for kind in (WorkKind.MATMUL, WorkKind.ATTENTION))
        for w in (whole, part)
    ]
    assert blocks[1] == pytest.approx(blocks[0] / 4, rel=0.06)


def test_frozen_weights_have_no_gradients() -> None:
    workload = shape_workload(LLAMA_8B, MicroBatch(1, 512, "full", lora_rank=8))
    runs = [workload.stretches[e.stretch] for e in workload.events if isinstance(e, Run)]
    trained = sum(s.numel for u in workload.units for s in u.params if s.trainable)
    assert sum(s.gradient_nbytes for s in runs) == 2 * trained
    assert 0 < trained < 0.01 * LLAMA_8B.num_params


def test_experts_are_visited_by_some_tokens() -> None:
    experts = Experts(8, 2, 14336)
    shape = TransformerShape(4, 4096, 32, 8, 14336, 32_000, 128, experts=experts)
    dense = TransformerShape(4, 4096, 32, 8, 14336, 32_000, 128)
    moved = [
        flops(shape_workload(s, MicroBatch(1, 1024)), WorkKind.MATMUL, "forward")
        for s in (shape, dense)
    ]
    mlp = 4 * 3 * 2 * 1024 * 4096 * 14336
    router = 4 * 2 * 1024 * 4096 * 8
    assert moved[0] == pytest.approx(moved[1] + mlp + router, rel=1e-6)


def test_a_step_is_planned_of_it() -> None:
    workload = shape_workload(LLAMA_8B, MicroBatch(1, 1024, "full"))
    step = plan_step(workload, StepSettings(Sharding(64, NCCL), has_streams=True))
    assert len(step.actions) > 6 * 32
