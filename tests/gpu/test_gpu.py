"""The checks of this folder under pytest, and their measuring where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.overlap import common, merge, overlap_of
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


@pytest.mark.parametrize("name", ["two-ranks-auto-is-peer-memory", "fp8-two-ranks-bytes"])
@pytest.mark.long  # two Pythons; above is what each of them does
def test_two_ranks_of_a_check_are_started_on_the_cpu(name: str) -> None:
    result = run_check(name, "cpu")
    if result.outcome == "skipped":
        pytest.skip(result.text)
    assert result.outcome == "passed", result.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == NO_GPU
    assert "no GPU" in capsys.readouterr().err


def test_overlap_is_the_share_of_copies_beside_kernels() -> None:
    def event(category: str, name: str, start: float, length: float, stream: int) -> object:
        return {
            "ph": "X", "cat": category, "name": name, "ts": start, "dur": length,
            "args": {"stream": stream},
        }  # fmt: skip

    trace = {
        "traceEvents": [
            event("kernel", "matmul", 0, 10, 7),
            event("kernel", "matmul", 8, 4, 7),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 5, 10, 20),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 20, 5, 24),
            {"ph": "M", "name": "process_name"},
        ]
    }
    found = overlap_of(trace)
    assert (found.to_device, found.to_host, found.streams) == (0.7, 0.0, 3)
    assert merge([(3.0, 4.0), (0.0, 1.0), (1.0, 2.0)]) == [(0.0, 2.0), (3.0, 4.0)]
    assert common([(0.0, 2.0), (3.0, 5.0)], [(1.0, 4.0)]) == 2.0
