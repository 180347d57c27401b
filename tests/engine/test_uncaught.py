"""What is added to an exception that ends a program: `watch.uncaught`."""

from __future__ import annotations

from tests.fresh import in_warm_forks

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
{run}
{then}
"""
_NAMED = "fullshard: 0.0.weight, 0.0.bias: "


def test_parameters_are_named_with_the_exception_of_their_module_alone() -> None:
    """An explanation that fails, too, hides neither the exception nor the other explanations."""
    used_sharded = "model[0][0](torch.ones(2, 8))"
    named, divided, misshapen, failing = _ended(
        used_sharded,
        "1 / 0",
        "model(torch.ones(2, 9))",
        f"uncaught.explainers.insert(0, lambda error: 1 / 0)\n{used_sharded}",
    )
    for said in (named, failing):
        assert "got mixed torch.Tensor and DTensor" in said
        assert _NAMED in said
    assert named.count("fullshard: ") == 1
    assert "ZeroDivisionError" not in failing
    assert "ZeroDivisionError" in divided
    assert "fullshard: " not in divided
    assert "shapes cannot be multiplied" in misshapen
    assert "fullshard: " not in misshapen


def test_parameters_are_named_before_the_model_has_run() -> None:
    (said,) = _ended("model[0][0](torch.ones(2, 8))", run="")
    assert "weight, " in said
    assert "sharded at that moment" in said


def _ended(*ends: str, run: str = "model(torch.ones(2, 8))") -> list[str]:
    """Return what programs that end so write to standard error."""
    programs = [_PROGRAM.format(run=run, then=then) for then in ends]
    runs = in_warm_forks(*programs)
    assert [run.code for run in runs] == [1] * len(ends), runs
    return [run.err for run in runs]
