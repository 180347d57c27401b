"""Every example runs and keeps what it promises. What needs libraries runs in the environment of `make parity`."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from scripts import record_parity
from scripts.record_parity import CASES, Case, difference
from tests.fresh import on_forked_ranks

EXAMPLES = record_parity.ROOT / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
PYTHON = Path(os.environ.get("EXAMPLES_PYTHON", record_parity.ROOT / ".venv-examples/bin/python"))


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_can_be_found(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 120
    assert f"[{name}.py]({name}.py)" in (EXAMPLES / "README.md").read_text()
    compared = {case.name for case in CASES}
    assert (name in compared) is (name not in record_parity.WITHOUT_PARITY)
    if name in compared:
        assert f"[{name}](../examples/{name}.py)" in record_parity.PAGE.read_text()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_page_has_what_was_compared(case: Case) -> None:
    (row,) = [
        line for line in record_parity.PAGE.read_text().splitlines() if f"[{case.name}]" in line
    ]
    requirements = (EXAMPLES / "requirements.txt").read_text()
    for package in case.needs:
        version = re.search(rf"^{package}==(\S+)", requirements, re.M)
        assert version is None or f"{package} {version[1]}" in row  # Transformers' is TRL's choice
    assert f"| {case.ours.ranks} | {case.against} |" in row
    assert case.limit > 0 or row.endswith("| none |")


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_example_has_the_losses_of_what_it_is_compared_with(case: Case) -> None:
    if not PYTHON.is_file():
        pytest.skip(f"{PYTHON} is not there: `make parity` makes it, with the examples' libraries")
    ours, theirs = (run.losses(python=str(PYTHON)) for run in (case.ours, case.theirs))
    assert difference(ours, theirs) <= case.limit
    assert ours[-1] < ours[0]


# Those that need no library, in processes that have imported fullshard already.


def _run(folder: Path, name: str, *options: object, ranks: int = 2) -> str:
    """Run an example as the ranks that torchrun starts, and return what rank 0 prints."""
    program = f"""
import runpy, sys, torch
torch.set_num_threads(1)
sys.argv = [{name!r}, *{[str(option) for option in options]}]
sys.path.insert(0, {str(EXAMPLES)!r})
runpy.run_path({str(EXAMPLES / name)!r} + ".py", run_name="__main__")
"""
    ended = on_forked_ranks(ranks, program, folder=folder)
    assert all(each.code == 0 for each in ended), [each.err for each in ended]
    return ended[0].out


def _losses(text: str) -> list[tuple[int, float]]:
    return [(int(a), float(b)) for a, b in re.findall(r"step (\d+): loss ([\d.]+)", text)]


def test_experts_on_a_mesh_of_their_own_train_as_one_process(tmp_path: Path) -> None:
    runs = [_losses(_run(tmp_path, "moe", ranks=ranks)) for ranks in (1, 4)]
    for run in runs:
        assert len(run) == 8
        assert [loss for _, loss in run] == pytest.approx([loss for _, loss in runs[0]], abs=1e-5)
    assert runs[0][-1][1] < 1 < runs[0][0][1]


@pytest.mark.long  # fifteen steps with a generator
def test_a_policy_learns_from_what_a_generator_with_its_weights_samples(tmp_path: Path) -> None:
    rewards = re.findall(r"reward ([\d.]+)", _run(tmp_path, "grpo", "--steps", 15))
    assert float(rewards[0]) < 0.8
    assert float(rewards[-1]) > 0.9


@pytest.mark.long  # three runs
def test_a_moved_script_goes_on_from_the_other_api_s_checkpoint(tmp_path: Path) -> None:
    before = _losses(_run(tmp_path, "fsdp1", "--out", tmp_path / "saved"))  # under PyTorch's FSDP
    straight = _losses(_run(tmp_path, "fsdp1_moved", "--steps", 10))
    after = _losses(_run(tmp_path, "fsdp1_moved", "--steps", 2, "--load", tmp_path / "saved"))
    assert [step for step, _ in before + after] == [step for step, _ in straight]
    # They clip by norms whose squares are summed in another order.
    assert [loss for _, loss in before + after] == pytest.approx(
        [loss for _, loss in straight], abs=2e-4
    )


@pytest.mark.long  # tests/checkpoint and tests/convert do each of its steps
def test_a_checkpoint_goes_on_with_other_numbers_of_ranks_and_is_exported(tmp_path: Path) -> None:
    whole = _losses(_run(tmp_path, "checkpoint", "--steps", 12))
    folder = tmp_path / "runs" / "again"
    parts = _losses(_run(tmp_path, "checkpoint", "--folder", folder))
    parts += _losses(_run(tmp_path, "checkpoint", "--folder", folder, "--steps", 9, ranks=4))
    last = _run(
        tmp_path, "checkpoint", "--folder", folder, "--steps", 12, "--export", tmp_path / "out", ranks=1
    )  # fmt: skip
    parts += _losses(last)
    assert [step for step, _ in parts] == list(range(1, 13))
    assert [loss for _, loss in parts] == pytest.approx([loss for _, loss in whole], abs=1e-5)
    assert "model.safetensors" in last
    assert (tmp_path / "out" / "model.safetensors").is_file()
