"""`fullshard verify` of whole scripts, on real ranks: it passes what is right, and names each planted fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fullshard.tools.doctor.findings import Finding, Severity
from fullshard.tools.verify.comparing import Comparison
from fullshard.tools.verify.options import VerifyOptions
from tests.harness import on_ranks, world_size
from tests.selection import repeats
from tests.tools.verify.sides import compared, run_one

SCRIPTS = Path(__file__).parent / "scripts"


def verified(folder: Path, *arguments: str, **given: Any) -> tuple[Comparison, dict[str, Finding]]:
    """Run the script on both sides on the ranks that are there; the comparison, and what is not ok, by id."""
    given = {"model": str(SCRIPTS / "train.py"), "ranks": world_size(), **given}
    options = VerifyOptions(arguments=arguments, **given)
    for is_whole in (False, True):
        run_one(options, folder, is_whole=is_whole)
        dist.barrier()
    return compared(options, folder)


CLEAN = {
    "blocks": "--does accumulate clip",
    "plain SGD": "--optimizer SGD",
    "FSDP1": "--face fsdp1 --does no_sync clip",
    "FSDP1 with flat parameters": "--face flat --does accumulate --optimizer SGD",
    "FSDP1 that sends values": "--face fsdp1 --does sync",
    "kept gradients": "--does no_sync clip",
    "mixed precision": "--does mixed",
    "mixed precision with FSDP1": "--face fsdp1 --does mixed",
    "a registered method": "--does encode register",
    "a registered method in mixed precision": "--does encode register mixed",
    "a wrapper's parts, called by themselves": "--face fsdp1 --does parts",
    "weighted losses": "--does weighted accumulate",
    "a script with fewer steps": "--steps 2",
    "a script that catches everything": "--does catch",
    "a script that spawns its ranks": "--spawn 2",
}


# Of those that do in another combination, or on another face, what others here do.
REPEATED = {"plain SGD", "FSDP1 that sends values", "kept gradients", "mixed precision"}
REPEATED |= {"a registered method", "a script with fewer steps", "a script that catches everything"}
REPEATED |= {"FSDP1", "mixed precision with FSDP1"}


@repeats(lambda s: s["case"] in REPEATED)
@pytest.mark.parametrize("case", CLEAN)
@on_ranks(2)
def test_what_is_right_passes(case: str, tmp_path: Path) -> None:
    comparison, found = verified(tmp_path, *CLEAN[case].split())
    assert not found, [f"{f.id}: {f.where}: {f.measured}" for f in found.values()]
    assert not comparison.differing
    assert comparison.first is None
    kinds = {each.kind for each in comparison.worst}
    assert kinds == {"output", "gradient", "final-gradient", "parameter", "buffer"}
    assert not max(each.worst for each in comparison.worst if each.kind == "output")


@on_ranks(2)
def test_a_divide_factor_that_is_meant_passes(tmp_path: Path) -> None:
    _, found = verified(tmp_path / "said", "--fault", "sums", divide_factor=1.0)
    assert not found
    _, found = verified(tmp_path / "not said", "--fault", "sums")
    assert found["divide-factor"].measured.endswith("divided by 1")
    assert "--divide-factor" in found["divide-factor"].advice


@on_ranks(2)
def test_several_models_pass(tmp_path: Path) -> None:
    comparison, found = verified(tmp_path, model=str(SCRIPTS / "two_models.py"), steps=4)
    assert not found, [f"{f.id}: {f.where}: {f.measured}" for f in found.values()]
    assert {"0.weight", "model1.0.weight"} <= set(comparison.alone.initial)


@pytest.mark.long  # four ranks; two groups to average over are all that it adds
@on_ranks(4)
def test_hybrid_sharding_passes(tmp_path: Path) -> None:
    _, found = verified(tmp_path, *["--does", "hybrid", "accumulate", "clip"])
    assert not found, [f"{f.id}: {f.where}: {f.measured}" for f in found.values()]


@on_ranks(2)
def test_values_that_are_drawn_after_sharding_are_a_warning(tmp_path: Path) -> None:
    comparison, found = verified(tmp_path, "--does", "meta")
    assert not comparison.differing
    assert found.keys() == {"initial-parameters", "warned"}  # of torch's DTensors, on CPUs
    assert found["initial-parameters"].severity is Severity.WARNING
    assert found["initial-parameters"].where == "after sharding"


# By fault: arguments; the finding that names it; where; and what it says.
FAULTS = {
    "factor": (
        "divide-factor",
        "unit blocks.0",
        "are 2 times those of the whole model; divided by 1",
    ),
    "seeds": ("initial-parameters", "rank 1", "embed.weight"),
    "buffer": ("initial-buffers", "rank 1", "blocks.1.scale: other values"),
    "untied": (
        "warned",
        "ranks 0-1",
        "head.weight was replaced, and embed.weight, which shares its",
    ),
    "clamp": ("forward-writes", "blocks.1.linear", "the forward writes to blocks.1.linear.weight"),
    "generator": ("random", "blocks.1.dropout", "of OwnDropout, which draws random numbers"),
    "outside": ("failed", "ranks 0-1", "got mixed torch.Tensor and DTensor"),
    "no root": ("gradients", "all ranks", "embed.weight"),
    "no steps": ("failed", "ranks 0-1", "without a step of a torch.optim.Optimizer"),
    "nothing": ("failed", "ranks 0-1", "the script has sharded nothing"),
    "same data": (
        "same-batches",
        "ranks 0-1",
        "every rank has the same batches, in 3 steps",
    ),
    "exit": ("failed", "ranks 0-1", "the script exited: 3"),
    "raises": (
        "failed",
        "ranks 0-1",
        "in both runs, sharded and whole: after the optimizer step of step 1: ValueError: no such thing",
    ),
}


# What test_judging.py has from records, test_faults.py of a model, or another of these tells alike.
REPEATED_FAULTS = {"no root", "same data", "generator", "nothing", "exit"}


@repeats(lambda s: s["fault"] in REPEATED_FAULTS)
@pytest.mark.parametrize("fault", FAULTS)
@on_ranks(2)
def test_a_fault_is_named(fault: str, tmp_path: Path) -> None:
    _, found = verified(tmp_path, "--fault", fault)
    name, where, said = FAULTS[fault]
    everything = [f"{f.id}: {f.where}: {f.measured}" for f in found.values()]
    assert name in found, everything
    assert found[name].where == where, everything
    assert said in found[name].measured, everything


@on_ranks(2)
def test_a_script_that_spawns_other_ranks_is_told(tmp_path: Path) -> None:
    _, found = verified(tmp_path, "--spawn", "4")
    assert "OtherRanksError: the script spawns 4 processes" in found["failed"].measured


@on_ranks(2)
def test_a_script_that_seeds_nothing_is_given_seeds(tmp_path: Path) -> None:
    comparison, found = verified(tmp_path, "--fault", "no seed")
    assert found.keys() == {"seeds"}
    assert found["seeds"].severity is Severity.NOTE
    first, second = (part for part in comparison.alone.parts if part.step == 1)
    assert first.loss != second.loss  # each rank draws its own masks and data


@on_ranks(2)
def test_a_method_that_is_not_registered_is_named(tmp_path: Path) -> None:
    _, found = verified(tmp_path, "--does", "encode")
    assert 'register_fsdp_forward_method(model, "encode")' in found["forward-method"].advice
