"""`fullshard verify` of models on real ranks: what is recorded otherwise than of a script (`test_scripts.py`)."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.tools.doctor.findings import Finding, Severity
from fullshard.tools.verify.comparing import Comparison
from fullshard.tools.verify.options import VerifyOptions
from tests.harness import on_ranks, rank, world_size
from tests.selection import repeats
from tests.tools.verify.sides import compared, run_one

HERE = "tests.tools.verify.programs"


def verified(folder: Path, **given: Any) -> tuple[Comparison, dict[str, Finding]]:
    """Verify on the ranks that are there; the comparison and the findings that are not ok, by id.

    The one process is rank 0, before it is a rank.
    """
    given = {"model": "build", "batch": "batch", "ranks": world_size(), **given}
    paths = ("model", "batch", "loss", "shard")
    given |= {k: f"{HERE}:{given[k]}" for k in paths if given.get(k)}
    options = VerifyOptions(**given)
    if rank() == 0:
        with _without_group():
            run_one(options, folder, is_whole=True)
    run_one(options, folder, is_whole=False)
    return compared(options, folder)


@contextlib.contextmanager
def _without_group() -> Any:
    """Let a program think that there is no process group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: False)
        yield


COMPILED = "compiled blocks"  # the compiler takes as long as all others
_MEAN_SQUARE = {"model": "build_with_batch", "batch": "", "loss": "mean_square"}
CLEAN: dict[str, dict[str, Any]] = {
    "as it is": {},
    "fsdp1": {"api": "fsdp1"},
    "bfloat16": {"dtype": "bf16"},
    "mixed precision, and a loss of its own": {**_MEAN_SQUARE, "shard": "shard_in_bf16"},
    COMPILED: {"shard": "shard_compiled"},
    "a registered method": {"loss": "loss_by_encode", "shard": "shard_and_register"},
}


@repeats(lambda s: s["case"] == COMPILED)
@pytest.mark.parametrize("case", CLEAN)
@on_ranks(2)
def test_what_is_right_passes(case: str, tmp_path: Path) -> None:
    comparison, found = verified(tmp_path, **CLEAN[case])
    assert not found
    assert not comparison.differing
    assert comparison.first is None
    assert len(comparison.losses) == 3 * world_size()
    kinds = {each.kind for each in comparison.worst}
    assert kinds >= {"output", "gradient", "parameter"}
    for run in (comparison.alone, *comparison.ranks.values()):
        assert len(run.seconds) == 3
        assert run.peak_nbytes is None or run.peak_nbytes >= 0


@pytest.mark.long
@pytest.mark.parametrize("face", ["fully_shard", "fsdp1"])
@pytest.mark.parametrize("comm", ["process_group", "collectives"])
@on_ranks(3, 4)
def test_what_is_right_passes_on_more_ranks(face: str, comm: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.tools.verify.programs.batch", _batch_of_twelve)
        _, found = verified(tmp_path, api=face, comm=comm)
    assert not found


def _batch_of_twelve(step: int) -> dict[str, torch.Tensor]:
    words = torch.randint(32, (12,))
    return {"words": words, "targets": words.roll(step)}


@on_ranks(2)
def test_a_method_that_is_not_registered_is_named(tmp_path: Path) -> None:
    _, found = verified(tmp_path, loss="loss_by_encode", api="fsdp1")
    finding = found["forward-method"]
    assert finding.where == "ranks 0-1"
    assert finding.measured.startswith("forward of step 1: ")
    assert "(in encode, which is not a forward)" in finding.measured
    assert 'register_fsdp_forward_method(model, "encode")' in finding.advice


@on_ranks(2)
def test_first_values_that_nothing_decides_are_named(tmp_path: Path) -> None:
    _, found = verified(tmp_path, model="build_unseeded")
    assert found["initial-parameters"].where == "ranks 0-1"
    assert found["initial-parameters"].measured.startswith("blocks.0.linear.bias: ")


@on_ranks(2)
def test_a_tie_that_is_lost_is_named(tmp_path: Path) -> None:
    _, found = verified(tmp_path, shard="shard_untied")
    assert found["untied"].measured.startswith("embed.weight and head.weight are one parameter")
    assert found["gradients"].measured.startswith("embed.weight, head.weight: first in step 1")


@on_ranks(2)
def test_random_numbers_that_differ_are_explained(tmp_path: Path) -> None:
    _, found = verified(tmp_path, model="build_with_own_generator")
    assert found["random"].where == "blocks.1.dropout"
    assert "of OwnDropout, which draws random numbers" in found["random"].measured
    assert "--eval" in found["random"].advice
    _, found = verified(tmp_path / "eval", model="build_with_own_generator", evaluates=True)
    assert not found


@on_ranks(2)
def test_batches_that_differ_are_named(tmp_path: Path) -> None:
    _, found = verified(tmp_path, batch="batch_of_the_time")
    assert "first in step 1" in found["batches"].measured


@on_ranks(2)
def test_a_model_that_nothing_shards_is_named(tmp_path: Path) -> None:
    _, found = verified(tmp_path, shard="leave_whole")
    assert found["not-sharded"].severity is Severity.WARNING
    assert found["gradients"].measured.startswith("embed.weight")
