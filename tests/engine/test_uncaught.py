"""What is added to an exception that ends a program: `watch.uncaught`."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import torch
import torch.distributed as dist
from torch import nn
from fullshard import fully_shard
from fullshard.watch import uncaught

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8))
fully_shard(model[0])
fully_shard(model)
{first}
{then}
"""
_NAMED = "fullshard: 0.0.weight, 0.0.bias: sharded at that moment"


def _stderr(then: str, first: str = "model(torch.ones(2, 8))") -> str:
    out = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(first=first, then=then)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert out.returncode == 1, out.stderr
    return out.stderr


def test_parameters_are_named_with_the_exception() -> None:
    said = _stderr("model[0][0](torch.ones(2, 8))")
    assert "got mixed torch.Tensor and DTensor" in said
    assert _NAMED in said
    assert said.count("fullshard: ") == 1


def test_parameters_are_named_before_the_model_has_run() -> None:
    said = _stderr("model[0][0](torch.ones(2, 8))", first="")
    assert "weight, " in said
    assert "sharded at that moment" in said


@pytest.mark.parametrize("then", ["1 / 0", "model(torch.ones(2, 9))"])
def test_others_are_as_they_were(then: str) -> None:
    assert "fullshard: " not in _stderr(then)


def test_an_explanation_that_fails_hides_nothing() -> None:
    said = _stderr(
        "uncaught.explainers.insert(0, lambda error: 1 / 0)\nmodel[0][0](torch.ones(2, 8))"
    )
    assert "got mixed torch.Tensor and DTensor" in said
    assert _NAMED in said
    assert "ZeroDivisionError" not in said
