"""`bench.gpu` in its form for the CPU: the same code, a tiny model."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from bench import gpu


def _run(folder: Path, *options: str) -> tuple[dict[str, object], str]:
    assert gpu.main(["--device", "cpu", "--tiny", "--out", str(folder), *options]) == 0
    (results,), (page,) = folder.glob("gpu-*.json"), folder.glob("gpu-*.md")
    return json.loads(results.read_text()), page.read_text()


def test_it_measures_writes_and_traces(tmp_path: Path) -> None:
    options = ("--settings", "offload", "--implementations", "fullshard")
    results, page = _run(tmp_path, *options)
    measured = results["settings"]["offload"]["measured"]["fullshard"]  # type: ignore[index]
    assert len(measured["step_ms"]) == 2
    assert min(measured["step_ms"]) > 0.0
    assert "| fullshard |" in page
    assert f"torch {torch.__version__}" in page
    trace = json.loads(gzip.decompress((tmp_path / "trace-offload-fullshard.json.gz").read_bytes()))
    assert "traceEvents" in trace


@pytest.mark.long
def test_all_implementations_train_alike(tmp_path: Path) -> None:
    results, _ = _run(tmp_path, "--settings", "1b")
    measured = results["settings"]["1b"]["measured"]  # type: ignore[index]
    assert list(measured) == list(gpu.IMPLEMENTATIONS)
    first, *others = [found["losses"] for found in measured.values()]
    for losses in others:
        assert losses == pytest.approx(first, abs=1e-2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main(["--out", str(tmp_path)]) == gpu.NO_GPU
    assert "no GPU" in capsys.readouterr().err
