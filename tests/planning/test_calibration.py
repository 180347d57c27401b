"""Figures of a measured machine: their file, sizes between measured ones, and steps planned with them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.plan.step import StepSettings
from fullshard.plan.unit_plan import Sharding
from fullshard.plan.ways import GLOO, PEER_MEMORY
from fullshard.plan.workload import Work, WorkKind, Workload
from fullshard.planning.calibration import (
    SCHEMA,
    CalibratedCosts,
    CalibrationError,
    EngineFigures,
    KernelTime,
    MachineFigures,
    Point,
    at_size,
    engine_key,
    machine_of,
    optimizer_key,
    read_machine,
)
from fullshard.planning.costs import CostError
from fullshard.planning.estimate import estimate_step
from fullshard.planning.machines import machine_named
from fullshard.planning.setup import SetupError, TrainingSetup
from fullshard.planning.subject import Subject
from fullshard.planning.traced import Example, TraceOptions, trace_workload
from fullshard.policies import MixedPrecisionPolicy
from fullshard.tools.calibrate import Model, measure_kernels
from tests.harness import on_ranks, rank

pytestmark = pytest.mark.ours("not part of the API")


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


_EXAMPLE = Example((torch.ones(4, 8),))
_ENGINE = engine_key(PEER_MEMORY.name, torch.float32, torch.float32)
_UNITS = [f"layers.{number}" for number in range(3)]


@pytest.fixture(scope="module")
def workload() -> Workload:
    return trace_workload(_Net(), _EXAMPLE, units=_UNITS)


def _figures(workload: Workload, **changes: object) -> MachineFigures:
    """Return figures by which each kernel takes a second, and nothing else any time."""
    works = {
        work._replace(count=1)
        for stretch in workload.stretches
        for work in (*stretch.forward, *stretch.backward)
    }
    kernels = (
        KernelTime(w.kind.value, w.name, w.dtype, w.shape, w.flops, w.nbytes, 1.0) for w in works
    )
    free = (Point(0, 0.0), Point(1, 0.0))
    figures = MachineFigures(
        *(SCHEMA, "here", "cpu", "2.13", "2026-01-01T00:00:00+00:00", 2, 1, 0.0),
        kernels=tuple(kernels),
        engine={_ENGINE: EngineFigures(free, free, 0.0, 0.0, 0.0)},
        optimizers={optimizer_key("adamw", torch.float32): free},
    )
    return dataclasses.replace(figures, **changes)


def _costs(figures: MachineFigures, **changes: Any) -> CalibratedCosts:
    same = torch.float32, torch.float32
    options = {"way": PEER_MEMORY.name, "dtypes": same, "optimizer": "adamw"} | changes
    return CalibratedCosts(machine_of(figures, 1e9), shard_size=2, **options)


def _step_s(workload: Workload, figures: MachineFigures, num_microbatches: int = 1) -> float:
    settings = StepSettings(Sharding(2, PEER_MEMORY), num_microbatches=num_microbatches)
    return estimate_step(workload, settings, _costs(figures)).step_s


def _num_kernels(workload: Workload) -> int:
    runs = [event.stretch for event in workload.events if hasattr(event, "stretch")]
    stretches = [workload.stretches[number] for number in runs]
    return sum(w.count for s in stretches for w in (*s.forward, *s.backward))


def test_a_step_takes_what_its_kernels_take(workload: Workload) -> None:
    num = _num_kernels(workload)
    assert _step_s(workload, _figures(workload)) == pytest.approx(num)
    # In two of three backwards, each unit's gradients are added to those before.
    thrice_s = _step_s(workload, _figures(workload), 3)
    twice_s = _step_s(workload, _figures(workload), 2)
    assert thrice_s - twice_s == pytest.approx(twice_s - num)
    assert twice_s > 2 * num
    assert _step_s(workload, _figures(workload, kernel_s=0.5)) == pytest.approx(1.5 * num)


def test_the_engine_takes_time_for_units_and_bytes(workload: Workload) -> None:
    base = _step_s(workload, _figures(workload))

    def added(**figures: object) -> float:
        free = (Point(0, 0.0), Point(1, 0.0))
        engine = dataclasses.replace(EngineFigures(free, free, 0.0, 0.0, 0.0), **figures)
        changed = _figures(workload, engine={_ENGINE: engine})
        return _step_s(workload, changed) - base

    # Three units with two parameters each, in forward and in backward; the root has nothing to compute or to gather.
    nbytes = 4 * (8 * 8 + 8)
    assert added(param_s=1.0) == pytest.approx(3 * 2 * 2)
    assert added(reduce=(Point(0, 0.0), Point(nbytes, 1.0))) == pytest.approx(3)
    assert added(gather=(Point(0, 0.0), Point(nbytes, 1.0))) == pytest.approx(6)
    assert added(fence_s=1.0) == pytest.approx(3)


def test_sizes_between_measured_ones_lie_on_a_line_in_logarithms() -> None:
    points = (Point(10, 1.0), Point(1000, 100.0), Point(4000, 100.0))
    assert at_size(points, 1) == 1.0
    assert at_size(points, 100) == pytest.approx(10.0)
    assert at_size(points, 2000) == pytest.approx(100.0)
    assert at_size(points, 8000) == pytest.approx(200.0)


def test_kernels_of_other_sizes_are_like_those_of_the_same_operator_alone(
    workload: Workload,
) -> None:
    sized = [
        KernelTime("matmul", "mm", "float32", (n, n, n), 2.0 * n**3, 12.0 * n**2, 1e-9 * n**3)
        for n in (10, 1000)
    ]
    costs = _costs(_figures(workload, kernels=tuple(sized)))
    work = Work(WorkKind.MATMUL, 2e6, 12e4, (100, 100, 100), "float32", name="mm")
    assert costs.work_seconds(work._replace(count=2)) == pytest.approx(2e-3)
    # A gradient's sum has no name; a convolution is not like a product, though it counts as one.
    assert costs.work_seconds(work._replace(name="")) == pytest.approx(1e-3)
    copied = Work(WorkKind.MEMORY, 0.0, 1e6, dtype="float32", name="copy_")  # without values alone
    moved = KernelTime("memory", "add", "float32", (), 0.0, 1e6, 0.5)
    found = _costs(_figures(workload, kernels=(*sized, moved))).work_seconds(copied)
    assert found == pytest.approx(0.5)
    for other in (Work(WorkKind.ATTENTION, 1.0, 1.0), work._replace(name="convolution")):
        with pytest.raises(CostError, match=f"no {other.name or 'attention'} .*--ranks 2"):
            costs.work_seconds(other)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"dtypes": (torch.bfloat16, torch.float32)}, "bfloat16 of float32"),
        ({"dtypes": (torch.float32, torch.bfloat16)}, "float32 of bfloat16"),
        ({"way": "gloo"}, "gloo"),
        ({"optimizer": "sgd"}, "sgd"),
    ],
)
def test_what_was_not_measured_is_refused(
    workload: Workload, changes: dict[str, Any], what: str
) -> None:
    with pytest.raises(CostError, match=what):
        _costs(_figures(workload), **changes)


def test_a_file_holds_all_of_it(workload: Workload, tmp_path: Path) -> None:
    figures = _figures(workload)
    figures.write(tmp_path / "machine.json")
    assert read_machine(tmp_path / "machine.json", 2) == figures
    assert figures.merged(_figures(workload, kernels=())) == figures
    fewer = _figures(workload, kernels=())
    assert fewer.merged(figures).kernels == figures.kernels
    assert fewer.merged(dataclasses.replace(figures, ranks=4)) == fewer


def test_ways_to_communicate_are_told_apart(workload: Workload) -> None:
    gloo = engine_key(GLOO.name, torch.float32, torch.float32)
    engine = _figures(workload).engine
    figures = _figures(workload, engine=engine | {gloo: engine[_ENGINE]})
    assert figures.has_way(GLOO.name)
    assert [*figures.with_way(GLOO.name).engine] == [gloo]


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "other/1"},
        {"kernel_s": -1.0},
        {"ranks": "two"},
        {"kernels": [["matmuls", "mm", "float32", [1, 1, 1], 2.0, 12.0, 1.0]]},
    ],
)
def test_a_damaged_file_is_refused_by_its_name(
    workload: Workload, tmp_path: Path, change: dict[str, object]
) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(dataclasses.asdict(_figures(workload)) | change))
    with pytest.raises(CalibrationError, match=r"machine\.json: .* --calibrate --ranks 4"):
        read_machine(path, 4)


class _Uneven(_Net):
    """Runs one kernel more on rank 1, as autograd does that finds a gradient in use and copies it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y.cos() if rank() else y


@on_ranks(2)
def test_all_ranks_have_the_kernels_that_each_of_them_has_run() -> None:
    workload = trace_workload(_Net(), _EXAMPLE, units=_UNITS)
    model = Model(_Uneven, _EXAMPLE, _UNITS, TraceOptions(), workload)
    kernels, _ = measure_kernels(model, seconds=0.0)
    everyones: list[object] = [None, None]
    dist.all_gather_object(everyones, kernels)
    assert everyones == [kernels, kernels]
    assert {each.work for each in kernels} == {each.work for each in _figures(workload).kernels}
    assert all(each.seconds > 0 for each in kernels)


def test_a_model_that_is_too_large_to_run_here_is_refused_before_it_has_memory() -> None:
    made: list[nn.Module] = []

    def build() -> nn.Module:
        made.append(nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8))))
        return made[0]

    subject = Subject(build, inputs=lambda batch: torch.empty(batch, 1024, device="meta"))
    float32 = MixedPrecisionPolicy(torch.float32)
    setup = TrainingSetup(machine_named("H100-80GB-SXM"), 8, precision=float32)
    with pytest.raises(SetupError, match=r"32\.0 MiB or more on each rank, of which 32\.0 MiB"):
        subject.with_memory(setup, 32 << 20)
    assert all(parameter.is_meta for parameter in made[0].parameters())
    model, *_ = subject.with_memory(setup, 33 << 20)
    assert not any(parameter.is_meta for parameter in model.parameters())
