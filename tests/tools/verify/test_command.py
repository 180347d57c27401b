"""`fullshard verify` as a user runs it: its report, its JSON object, its exit codes."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullshard.tools.cli import app
from fullshard.tools.exits import Exit
from tests.fresh import FORKED_RANKS, Ended, fullshard_in_fork

HERE = "tests.tools.verify.programs"
ROOT = Path(__file__).parents[3]


def _verify(
    *options: str, model: str = "build", batch: str = "batch", forks: bool = False
) -> Ended:
    """Run it with functions of `programs.py`. forks: whether ranks are forks, not processes of their own."""
    before = "import warnings\nwarnings.simplefilter('error')"
    return fullshard_in_fork(
        *("verify", f"{HERE}:{model}", "--batch", f"{HERE}:{batch}", *options),
        folder=ROOT,
        before=f"{before}\n{FORKED_RANKS}" if forks else before,
        variables={"PYTHONWARNINGS": "error"},  # of the ranks
    )


def _verify_script(name: str, *words: str, forks: bool = False) -> Ended:
    """Run it with a script of `scripts/`, from another folder."""
    return fullshard_in_fork(
        *("verify", f"scripts/{name}.py", *words),
        folder=Path(__file__).parent,
        before=FORKED_RANKS if forks else "",
    )


def _refused(*words: str) -> str:
    """Run it in this process, without ranks; what it says on standard error."""
    result = CliRunner().invoke(app, ["verify", *words])
    assert result.exit_code == Exit.USAGE, result.output
    assert "Options: fullshard verify --help" in result.stderr
    return result.stderr


@pytest.mark.long  # below, a model with a fault and a script that is right are told as this one is
def test_a_model_that_is_right_is_equal_and_leaves_its_records(tmp_path: Path) -> None:
    result = _verify("--steps", "2", "--keep", str(tmp_path / "records"))
    assert result.code == Exit.OK, result.err
    for pattern in (
        r"^step 2, rank 1 +(\S+) +\1 *$",
        r"^gradients +\S+ +\S+",
        r"^one process \(all parts\) +.* m?s *$",
        r"^rank 1 +.* m?s *$",
        r"^ok +buffers +all ranks +equal",
        r"^equal: nothing differs by more than 0\.01 % of its largest value .*\. 2 ranks, 2 steps of SGD \(lr\s+0\.01\)",
    ):
        assert re.search(pattern, result.out, re.MULTILINE), (pattern, result.out)
    assert "one process: 2 steps, not sharded" in result.err
    assert "2 ranks: 2 steps, sharded" in result.err
    there = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.*"))
    assert [str(path) for path in there] == [
        f"records/{process}/{name}"
        for process in ("alone", "rank-0", "rank-1")
        for name in ("run.json", "step-1.pt", "step-2.pt")
    ]


def test_a_fault_is_reported_with_the_first_module_and_what_to_do(tmp_path: Path) -> None:
    keep = ("--keep", str(tmp_path / "records"))
    words = ("--shard", f"{HERE}:shard_with_sums", "--comm", "collectives", *keep)
    result = _verify(*words, forks=True)
    assert result.code == Exit.FAILED
    assert {path.name for path in (tmp_path / "records").iterdir()} == {"alone", "rank-0", "rank-1"}
    said = " ".join(result.out.split())
    assert "problem divide-factor unit blocks.0 gradients of 4 parameters are 2 times" in said
    assert "first module that differs: blocks.0.norm (BatchNorm1d) in step 2 on rank 0" in said
    assert "differs: divide-factor (unit blocks.0)." in said


def test_a_script_by_torch_s_names_runs_twice_and_is_equal() -> None:
    words = ("--steps", "2", "--json", "--", "--width", "16", "--out", "runs/{side}")
    result = _verify_script("by_torch_names", *words, forks=True)
    assert result.code == Exit.OK, result.err
    found = json.loads(result.out)
    assert found["verdict"] == "ok"
    assert {each["id"] for each in found["findings"]} == {
        *("losses", "outputs", "gradients", "final-gradients", "parameters")
    }
    assert len(found["losses"]) == 4
    assert found["options"]["script"] == "scripts/by_torch_names.py"
    for side in ("sharded", "whole"):  # the last step is ended before it prints
        assert result.err.count(f"a step, for runs/{side} by scripts/by_torch_names.py") == 2
        assert f"2 ranks: 2 steps of scripts/by_torch_names.py, {side}" in result.err


@pytest.mark.long
def test_a_rank_of_a_script_that_dies_is_named() -> None:
    result = _verify_script("train", "--", "--fault", "dies")
    assert result.code == Exit.RANK_LOST
    assert re.search(r"rank-died +rank 1 ", result.out)


def test_a_rank_that_is_killed_is_named() -> None:
    result = _verify("--shard", f"{HERE}:shard_and_die", forks=True)
    assert result.code == Exit.RANK_LOST
    assert re.search(r"rank-died +rank 1 +rank 1 \(pid \d+\) was killed by SIGKILL", result.out)
    assert "failed: rank 1 died." in result.out
    assert not re.search(r"^problem +failed", result.out, re.MULTILINE), "rank 0 only followed"


@pytest.mark.long
def test_a_rank_that_exits_without_a_word_is_named() -> None:
    result = _verify("--shard", f"{HERE}:shard_and_exit")
    assert result.code == Exit.RANK_LOST
    assert re.search(r"rank-died +rank 1 +ended by itself, without an exception", result.out)


@pytest.mark.long
def test_a_rank_that_raises_is_told_from_one_that_follows() -> None:
    result = _verify("--shard", f"{HERE}:shard_and_raise")
    assert result.code == Exit.FAILED
    assert re.search(r"^problem +failed +rank 1 +sharding: ValueError: no such", result.out, re.M)
    assert re.search(r"^note +followed +rank 0 ", result.out, re.MULTILINE)
    assert re.search(r"in shard_and_raise$", result.out, re.MULTILINE)


@pytest.mark.long
def test_a_rank_that_hangs_is_ended() -> None:
    began = time.monotonic()
    result = _verify("--shard", f"{HERE}:shard_and_sleep", "--timeout", "20")
    assert time.monotonic() - began < 100
    assert result.code == Exit.FAILED
    assert re.search(r"timeout +ranks? .*did not end within 20 s", result.out)
    assert "in shard_and_sleep" in result.out


@pytest.mark.long
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_one_process_that_hangs_is_ended(form: tuple[str, ...]) -> None:
    result = _verify("--timeout", "1", *form, model="build_that_sleeps")
    assert result.code == Exit.FAILED
    assert "building the model: TimeoutError: did not end within 1 s" in result.out
    assert "in build_that_sleeps" in result.out


def test_a_factory_that_raises_is_reported_without_ranks() -> None:
    result = CliRunner().invoke(app, ["verify", f"{HERE}:build_that_raises"])
    assert result.exit_code == Exit.FAILED
    assert "building the model: ValueError: no such dataset" in result.stdout
    assert "in build_that_raises" in result.stdout
    assert "sharded\n" not in result.stderr.replace("not sharded\n", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.build"], "'train.build': expected MODULE:FUNCTION"),
        (["no_such_module:build"], "no module 'no_such_module'"),
        ([f"{HERE}:no_such"], "has no function 'no_such'"),
        ([f"{HERE}:build"], "returned a model alone. Return (model, batch), or give --batch"),
        ([f"{HERE}:build", "--batch", f"{HERE}:batch_of_seven"], "(7, 4), whose dim 0 cannot be"),
        ([f"{HERE}:build", "--batch", f"{HERE}:batch_of_words"], "is a str without tensors"),
        ([f"{HERE}:build_with_batch"], "a tensor of shape (4, 1), not a scalar loss. Give --loss"),
        ([f"{HERE}:build_nothing"], "returned str, not a model"),
        ([f"{HERE}:build", "--ranks", "5"], "--ranks 5: give a number from 2 to 4"),
        ([f"{HERE}:build", "--steps", "0"], "--steps 0: give a number of at least 1"),
        ([f"{HERE}:build", "--comm", "mpi"], "--comm mpi: choose from auto, process_group"),
        ([f"{HERE}:build", "--keep", "src"], "--keep src: is not an empty folder"),
        (["no_such.py"], "no_such.py: there is no such file"),
        ([f"{HERE}:build", "--", "--lr", "1"], "--lr 1: for a script, and"),
        ([__file__, "--lr", "0.1", "--eval"], "--lr, --eval: for MODULE:FUNCTION."),
        ([__file__, "--divide-factor", "0"], "--divide-factor 0: give a positive number"),
    ],
)
def test_what_cannot_be_used_is_refused(words: list[str], said: str) -> None:
    assert said in " ".join(_refused(*words).split()).replace("fullshard verify: ", "")


def test_ranks_of_torchrun_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert "Run it without torchrun" in _refused(f"{HERE}:build")
