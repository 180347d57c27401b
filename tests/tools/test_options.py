"""Options that cannot work are refused before any rank starts, and nothing is written."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from fullshard.tools import cli, commands, job
from fullshard.tools.config import OptionError, TrainConfig, lower_lr, with_defaults
from fullshard.tools.exits import Exit
from fullshard.tools.job import check_local_ranks, crowding, new_job, resumed_job, what_begins
from fullshard.tools.run_folder import RunFolder
from tests.tools.conftest import save_nothing


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Call the command, expect exit code 2 and an untouched folder, return what it said."""

    def no_launch(*args: object, **kwargs: object) -> None:
        pytest.fail("ranks were started")

    monkeypatch.setattr(commands, "launch", no_launch)
    monkeypatch.chdir(tmp_path)

    def call(*options: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        result: Result = CliRunner().invoke(cli.app, ["train", "--device", "cpu", *options])
        assert result.exit_code == Exit.USAGE, result.output
        assert sorted(tmp_path.rglob("*")) == before
        return result.output

    return call


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--batch", "0"], "--batch 0: must be at least 1"),
        (["--steps", "-5"], "--steps -5: must be at least 1"),
        (["--ranks", "0"], "--ranks 0: must be at least 1"),
        (["--seq", "0"], "--seq 0: must be at least 1"),
        (["--grad-accum", "0"], "--grad-accum 0: must be at least 1"),
        (["--model", "7t"], "--model 7t: no such size; choose from tiny, 10m"),
        (["--dtype", "fp16"], "--dtype fp16: choose from auto, fp32, bf16"),
        (["--device", "tpu"], "--device tpu: choose from auto, cpu, cuda"),
        (["--lr", "1e-5", "--min-lr", "1e-4"], "--min-lr 0.0001: must be from 0 to --lr 1e-05"),
        (["--lr", "nan"], "--lr nan: must be a number from 0 on"),
        (["--clip", "-1"], "--clip -1.0: must not be negative"),
        (["--seed", "-1"], "--seed -1: must be from 0"),
        (["--data", "missing/folder"], "--data missing/folder: no such file or folder"),
        (["--data", "text", "--seq", "950"], "one sequence needs 951"),
        (["--resume", "nowhere"], "--resume nowhere: there is no such folder"),
        (["--resume", "text"], "--resume text: is a file"),
        (["--out", "text"], "--out text: is a file"),
        (["--resume", "a", "--out", "b"], "a resumed run stays in its folder"),
        (["--no-such-option"], "--no-such-option"),
        (["--steps", "many"], "--steps"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_unusable_options_are_named_with_what_would_work(
    refused, text: Path, options: list[str], said: str
) -> None:
    assert said in refused(*options)


@pytest.mark.parametrize(
    "name", [f.name for f in dataclasses.fields(TrainConfig) if f.type in (int, "int")]
)
def test_a_whole_number_of_more_than_64_bits_is_refused_by_name(refused, name: str) -> None:
    option = f"--{name.replace('_', '-')}"
    for value in (2**63, 10**4000):
        said = refused(f"{option}={value}")
        assert option in said
        assert "far too large" in said
    assert len(said) < 2000


def test_every_problem_is_said_at_once(refused) -> None:
    said = refused("--batch", "0", "--steps", "0", "--model", "x")
    assert said.count("--batch 0") == said.count("--steps 0") == said.count("--model x") == 1


def test_a_folder_that_holds_a_run_is_not_overwritten(refused, text: Path, tmp_path: Path) -> None:
    RunFolder(tmp_path / "old").start(TrainConfig(), fingerprint="", done=0)
    assert "fullshard train --resume old (or --auto-resume" in refused("--out", "old")


def test_a_rank_under_torchrun_refuses_another_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, refused, text: Path
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "h"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    said = refused("--data", str(text), "--seq", "8", "--ranks", "3")
    assert "torchrun has started 4 ranks" in said


def test_more_ranks_than_cores_are_said_to_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "num_cores", lambda: 2)
    config = TrainConfig(ranks=10)
    assert "10 ranks share 2 cores" in crowding(config, None)
    assert not crowding(config, 2)  # of several hosts
    assert not crowding(TrainConfig(ranks=2), None)
    assert not crowding(TrainConfig(ranks=10, device="cuda"), None)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _have(monkeypatch, "cuda", available=True)
    with pytest.raises(
        OptionError, match=r"has 2 GPUs, and each rank needs its own\. Use --ranks 2 or"
    ):
        check_local_ranks("cuda", 3)


@pytest.mark.parametrize(
    ("cuda", "said"),
    [
        (None, "is built without CUDA. Install one that is built with it"),
        ("12.8", "finds no CUDA device. See what `nvidia-smi` says"),
    ],
    ids=["torch for CPUs", "torch for GPUs"],
)
@pytest.mark.parametrize("ranks", [(), ("--ranks", "2")], ids=["default ranks", "two ranks"])
def test_cuda_without_a_gpu_is_said_to_lack_one(
    refused,
    monkeypatch: pytest.MonkeyPatch,
    text: Path,
    cuda: str | None,
    ranks: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.setattr(job, "num_gpus", lambda: 0)
    monkeypatch.setattr("torch.version.cuda", cuda)
    shown = refused("--device", "cuda", "--data", str(text), "--seq", "16", *ranks)
    assert "--device cuda: " in shown
    assert said in shown
    assert "use --device cpu" in shown
    assert "--ranks" not in shown


def test_what_is_not_typed_depends_on_the_model_and_the_number_of_steps(
    text: Path, tmp_path: Path
) -> None:
    untyped = dict.fromkeys(("steps", "batch", "lr", "warmup", "ranks"))
    options = {"device": "cpu", "dtype": "auto", "data": (str(text),), "seq": 16, **untyped}

    def chosen(**typed: object) -> tuple[float, ...]:
        config = new_job({**options, **typed}, tmp_path / "run").config
        return (config.steps, config.batch, config.lr, config.warmup)

    assert chosen(model="10m") == (350, 2, 2e-3, 30)
    assert chosen(model="tiny") == (400, 8, 1e-2, 20)
    assert with_defaults({"lr": 1e-5})["min_lr"] == pytest.approx(1e-6)
    assert with_defaults({"lr": 1e-2})["min_lr"] == 1e-4
    assert with_defaults({"lr": 1e-2, "min_lr": 0.0})["min_lr"] == 0
    assert chosen(model="tiny", steps=50) == (50, 8, 1e-2, 5)
    assert chosen(model="tiny", steps=50, lr=1e-3, warmup=40) == (50, 8, 1e-3, 40)


@pytest.mark.parametrize(
    ("options", "proposed"),
    [
        ({"lr": 3e-3}, 1e-3),
        ({"lr": 1e6}, 2e-3),
        ({"lr": 1e6, "model": "tiny"}, 1e-2),
        ({"lr": 1e6, "model": "./llama", "init_from": "llama"}, 2e-5),
        ({"lr": 3e-5, "min_lr": 0, "model": "./llama", "init_from": "llama"}, 1e-5),
    ],
)
def test_a_lower_learning_rate_is_proposed_that_others_have_learnt_with(
    options: dict[str, Any], proposed: float
) -> None:
    assert lower_lr(TrainConfig(**options)) == pytest.approx(proposed)


def test_epochs_are_counted_in_steps(text: Path, tmp_path: Path) -> None:
    options = {"device": "cpu", "data": (str(text),), "seq": 16, "model": "TINY", "batch": 1}
    job = new_job({**options, "epochs": 2.5}, tmp_path / "run")
    # 950 bytes, 2 x 16 a step; the text is that of these options too.
    assert (job.config.model, job.config.steps, job.config.warmup) == ("tiny", 75, 7)
    assert job.text.config is job.config
    for epochs, said in ((0, "more than 0"), (math.inf, "more than 0"), (1e300, "far too large")):
        with pytest.raises(OptionError, match=said):
            new_job({**options, "epochs": epochs}, tmp_path / "run")
    with pytest.raises(OptionError, match="--epochs 2 and --steps 3"):
        new_job({**options, "epochs": 2, "steps": 3}, tmp_path / "run")


def _have(monkeypatch: pytest.MonkeyPatch, kind: str, *, available: bool) -> None:
    """Let torch be built for an accelerator of which this machine has two, or none."""

    def current(check_available: bool = False) -> torch.device | None:
        return torch.device(kind) if available or not check_available else None

    monkeypatch.setattr("torch.accelerator.current_accelerator", current)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)


@pytest.mark.parametrize(
    ("kind", "available", "expected"),
    [
        ("cuda", True, ("cuda", "bf16", 2)),
        ("cuda", False, ("cpu", "fp32", 2)),
        ("mps", True, ("cpu", "fp32", 2)),
    ],
    ids=["there", "only built in", "another kind"],
)
def test_auto_takes_the_gpus_that_are_there(
    kind: str,
    available: bool,
    expected: tuple[str, str, int],
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _have(monkeypatch, kind, available=available)
    options = {"device": "auto", "dtype": "auto", "ranks": None, "data": (str(text),), "seq": 16}
    config = new_job(options, tmp_path / "run").config
    assert (config.device, config.dtype, config.ranks) == expected


class TestResume:
    @pytest.fixture(autouse=True)
    def _saved(self, folder: RunFolder) -> None:
        save_nothing(folder.checkpoints / "step-00000020")

    def test_the_options_come_from_the_run(self, folder: RunFolder) -> None:
        job = resumed_job(folder.path, {"steps": 100})
        assert job.done == 20
        assert job.config == dataclasses.replace(folder.read_config(), steps=100)

    def test_a_model_s_folder_may_be_gone(self, folder: RunFolder) -> None:
        fields = json.loads(folder.config_file.read_text())
        fields["options"] |= {"model": "./mine", "init_from": "mine"}
        folder.config_file.write_text(json.dumps(fields))
        folder.model_file.write_text('{"model_type": "llama"}')
        for same in ({"finetune": "mine"}, {"model": "mine"}):
            assert resumed_job(folder.path, same).config.model_name == "mine"
        with pytest.raises(OptionError, match=r"--init-from other .* --model other"):
            resumed_job(folder.path, {"finetune": "other"})

    def test_epochs_become_steps(self, folder: RunFolder) -> None:
        # Of 950 bytes, a step takes 64.
        assert resumed_job(folder.path, {"epochs": 4.0}).config.steps == 60
        with pytest.raises(OptionError, match="nothing is left to do"):
            resumed_job(folder.path, {"epochs": 1.0})

    @pytest.mark.parametrize(
        ("name", "value"),
        [("model", "10m"), ("seq", 17), ("seed", 1), ("lr", 1.0), ("data", ("x",))],
    )
    def test_another_run_is_refused(self, folder: RunFolder, name: str, value: object) -> None:
        with pytest.raises(OptionError, match=f"other options: --{name} .* \\(the run has"):
            resumed_job(folder.path, {name: value})

    def test_ranks_and_batch_may_change_together(self, folder: RunFolder) -> None:
        assert resumed_job(folder.path, {"ranks": 1, "batch": 4}).config.global_batch == 4
        for changes, what_fits in (
            ({"ranks": 1, "batch": 2}, "= 2 .* x 1 = 4. Give --batch 4 or --grad-accum 2,"),
            ({"ranks": 4, "grad_accum": 1}, "= 8 .* Give --batch 1, or leave out"),
            ({"ranks": 4, "batch": 3, "grad_accum": 3}, "= 36 .* Rather leave out"),
            ({"ranks": 3}, r"3 ranks cannot share 4 evenly. --ranks that can: 1, 2, 4\."),
        ):
            with pytest.raises(OptionError, match=what_fits):
                resumed_job(folder.path, changes)

    @pytest.mark.parametrize(
        ("shared", "ranks", "expected"),
        [
            ((2, 2, 1), 1, (2, 2)),
            ((2, 2, 1), 4, (1, 1)),
            ((2, 3, 2), 3, (2, 2)),
            ((4, 8, 1), 2, (8, 2)),
        ],
    )
    def test_another_number_of_ranks_shares_the_same_sequences(
        self, folder: RunFolder, shared: tuple[int, int, int], ranks: int, expected: tuple[int, int]
    ) -> None:
        ours = dict(zip(("ranks", "batch", "grad_accum"), shared, strict=True))
        fields = json.loads(folder.config_file.read_text())
        fields["options"] |= ours
        folder.config_file.write_text(json.dumps(fields))
        assert what_begins(resumed_job(folder.path, {})) == ""
        job = resumed_job(folder.path, {"ranks": ranks})
        assert (job.config.batch, job.config.grad_accum) == expected
        assert f"--batch {expected[0]} x --grad-accum {expected[1]}" in what_begins(job)

    def test_repeating_an_option_of_the_run_is_fine(self, folder: RunFolder) -> None:
        assert resumed_job(folder.path, {"seq": 16, "dtype": "auto", "ranks": None}).done == 20

    def test_a_half_written_checkpoint_does_not_count(self, folder: RunFolder) -> None:
        (folder.checkpoints / "step-00000020").rename(
            folder.checkpoints / "step-00000020.partial-1"
        )
        with pytest.raises(OptionError, match="no complete checkpoint") as refused:
            resumed_job(folder.path, {})
        assert "--lr" not in str(refused.value)
        numbers = dict.fromkeys(("seconds", "tokens_per_second", "peak_memory"), 1)
        folder.add_metrics({"step": 21, "loss": math.nan, **numbers})
        with pytest.raises(OptionError, match=r"step 21 was not finite .*--auto-resume --lr "):
            resumed_job(folder.path, {})

    def test_changed_text_is_refused(self, folder: RunFolder, text: Path) -> None:
        text.write_bytes(text.read_bytes()[::-1])
        with pytest.raises(OptionError, match="the text has changed"):
            resumed_job(folder.path, {})

    def test_a_run_without_steps_left_is_refused(self, folder: RunFolder) -> None:
        for steps in (20, 10):
            said = (
                f"has 20 steps .* asked for {steps}, so nothing is left to do. Ask for more than 20"
            )
            with pytest.raises(OptionError, match=said):
                resumed_job(folder.path, {"steps": steps})

    def test_a_damaged_configuration_is_named(self, folder: RunFolder) -> None:
        folder.config_file.write_text("{")
        with pytest.raises(OptionError, match=r"config\.json: is no JSON"):
            resumed_job(folder.path, {})


def test_help_shows_examples_and_exit_codes() -> None:
    said = CliRunner().invoke(cli.app, ["train", "--help"]).output
    assert "torchrun --nnodes 2" in said
    words = " ".join(said.replace("│", " ").split())
    assert "saves memory and costs up to a quarter of the time" in words
    assert "for tiny 400" in words
    assert "--tie-embeddings Embedding and head" in words  # a flag has no <bool>
    assert "Exit codes" in said
