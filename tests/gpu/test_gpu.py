"""The checks of this folder under pytest, and their measuring where there is no GPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.overlap import collectives_issued, common, count_launches, lane_of, merge, overlap_of
from tests.fresh import in_warm_forks
from tests.gpu.__main__ import NO_GPU, main, run_check
from tests.gpu.checks import CHECKS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CHECKS)
def test_on_a_gpu(name: str) -> None:
    result = run_check(name, "cuda")
    if result.outcome == "skipped":
        pytest.skip(result.text)
    assert result.outcome == "passed", result.text


def test_a_check_runs_on_the_cpu(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--run", "one-rank-offload-accumulate", "--rank", "0"]
    options += ["--size", "1", "--store", str(tmp_path / "store")]
    (done,) = in_warm_forks(f"from tests.gpu.__main__ import main\nmain({options})")
    assert done.code == 0, done.err
    assert done.out


@pytest.mark.long  # two Pythons; above is what each of them does
@pytest.mark.parametrize(
    "name",
    [
        "two-ranks-auto-is-peer-memory",
        "two-ranks-nccl-as-fsdp2-mixed",
        "two-ranks-nccl-order-of-lanes",
        "two-ranks-nccl-no-host-sync-20-times",
        "fp8-two-ranks-bytes",
    ],
)
def test_two_ranks_of_a_check_are_started_on_the_cpu(name: str) -> None:
    result = run_check(name, "cpu")
    if result.outcome == "skipped":
        pytest.skip(result.text)
    assert result.outcome == "passed", result.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == NO_GPU
    assert "no GPU" in capsys.readouterr().err


def test_a_check_that_would_begin_too_late_does_not() -> None:
    result = run_check("one-rank-offload", "cpu", deadline=time.monotonic() - 1.0)
    assert result.outcome == "skipped"


def _event(
    category: str, name: str, start: float, length: float, stream: int | None = None
) -> dict[str, Any]:
    return {
        "ph": "X", "cat": category, "name": name, "ts": start, "dur": length,
        "args": {"stream": stream},
    }  # fmt: skip


def test_overlap_is_the_share_of_copies_beside_kernels() -> None:
    trace = {
        "traceEvents": [
            _event("kernel", "matmul", 0, 10, 7),
            _event("kernel", "matmul", 8, 4, 7),
            _event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 5, 10, 20),
            _event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 20, 5, 24),
            {"ph": "M", "name": "process_name"},
        ]
    }
    found = overlap_of(trace)
    assert (found.to_device, found.to_host, found.streams) == (0.7, 0.0, 3)
    assert merge([(3.0, 4.0), (0.0, 1.0), (1.0, 2.0)]) == [(0.0, 2.0), (3.0, 4.0)]
    assert common([(0.0, 2.0), (3.0, 5.0)], [(1.0, 4.0)]) == 2.0


def test_launches_are_the_hosts_calls_in_a_step() -> None:
    trace = {
        "traceEvents": [
            _event("user_annotation", "step", 0, 10),
            _event("cuda_runtime", "cudaLaunchKernel", 1, 1),
            _event("cuda_driver", "cuLaunchKernelEx", 2, 1),
            _event("cuda_runtime", "cudaGraphLaunch", 3, 1),
            _event("cuda_runtime", "cudaMemcpyAsync", 4, 1),
            _event("cuda_runtime", "cudaStreamSynchronize", 5, 1),
            _event("cuda_runtime", "cudaEventRecord", 6, 1),
            _event("cuda_runtime", "cudaDeviceSynchronize", 11, 1),  # after the step
            *(_event("kernel", "matmul", start, 1, 7) for start in range(9)),
            _event("gpu_memcpy", "Memcpy HtoD", 20, 1, 7),
        ]
    }
    assert count_launches(trace, during="step") == (9, 1, 4, 1)


def test_a_lane_is_a_stream_and_what_ran_beside_compute() -> None:
    gather, reduction = "ncclDevKernel_AllGather_RING_LL(x)", "ncclDevKernel_ReduceScatter_Sum_f32"
    trace = {
        "traceEvents": [
            _event("kernel", gather, 0, 2, 20),  # nothing beside it
            _event("kernel", "matmul", 2, 6, 7),
            _event("kernel", gather, 3, 2, 20),
            _event("kernel", reduction, 7, 4, 24),
            _event("kernel", gather, 9, 1, 20),  # beside the reduction alone
        ]
    }
    assert lane_of(trace, "AllGather") == ({20}, 3, 1)
    assert lane_of(trace, "ReduceScatter") == ({24}, 1, 1)


def test_products_until_a_wait_can_run_beside_a_collective() -> None:
    names = ["FSDP::all_gather (layers.0)", "FSDP::all_gather_wait (layers.0)"]
    trace = {
        "traceEvents": [
            _event("user_annotation", names[0], 0, 1),
            _event("user_annotation", names[1], 2, 1),
            _event("cpu_op", "aten::mm", 3, 1),
            _event("user_annotation", names[0], 5, 1),
            _event("cpu_op", "aten::mm", 7, 1),
            _event("user_annotation", names[1], 9, 1),
        ]
    }
    found = collectives_issued(trace, "all_gather")
    assert found == [("all_gather (layers.0)", 0), ("all_gather (layers.0)", 1)]
    assert collectives_issued(trace, "reduce_scatter") == []
