"""Weights leave a run for Transformers, and a run begins with weights; what does not fit is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

import fullshard
from fullshard.models.llama import Llama, init_weights
from fullshard.models.sizes import SIZES
from fullshard.tools import cli, commands
from fullshard.tools.config import FINETUNE_LR, OptionError, TrainConfig, with_defaults
from fullshard.tools.exits import Exit
from fullshard.tools.run_folder import RunFolder
from fullshard.tools.weights import (
    fine_tuning,
    load_initial_weights,
    model_config,
    what_it_begins_with,
)
from tests.fresh import fullshard_on_ranks
from tests.tools.processes import PAGES, TINY, losses


def _model(*, tied: bool = False, seed: int = 0) -> Llama:
    config = TrainConfig(model="tiny", tie_embeddings=tied)
    model = Llama(model_config(config))
    init_weights(model, seed=seed)
    return model


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a run of which two checkpoints were saved."""
    folder = RunFolder(tmp_path / "run")
    folder.start(TrainConfig(model="tiny", seq=32), fingerprint="text", done=0)
    for step in (1, 2):
        path = folder.checkpoints / f"step-{step:08d}"
        fullshard.save_checkpoint(path, _model(seed=step), step=step)
    return folder.path


def _call(*words: object) -> Result:
    return CliRunner().invoke(cli.app, [str(word) for word in words])


# Out


def test_the_newest_checkpoint_of_a_run_is_exported(run: Path, tmp_path: Path) -> None:
    result = _call("export", run, "--hf", tmp_path / "a", "--json")
    assert result.exit_code == Exit.OK, result.output
    said = json.loads(result.stdout)
    assert said["checkpoint"] == str(run / "checkpoints" / "step-00000002")
    assert said["files"] == ["model.safetensors", "config.json"]
    expected = _model(seed=2).state_dict()
    weights = load_file(tmp_path / "a" / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(value.equal(weights[name]) for name, value in expected.items())


def test_any_checkpoint_of_a_run_is_exported_in_any_dtype(run: Path, tmp_path: Path) -> None:
    checkpoint = run / "checkpoints" / "step-00000001"
    result = _call("export", checkpoint, "--hf", tmp_path / "a", "--dtype", "bf16")
    assert result.exit_code == Exit.OK, result.output
    assert "no tokenizer" in result.stdout
    weights = load_file(tmp_path / "a" / "model.safetensors")
    assert weights["lm_head.weight"].equal(_model(seed=1).lm_head.weight.bfloat16())
    assert json.loads((tmp_path / "a" / "config.json").read_text())["dtype"] == "bfloat16"


def test_ckpt_export_knows_the_model_of_a_run(run: Path, tmp_path: Path) -> None:
    for source in (run, run / "checkpoints" / "step-00000001"):
        result = _call(
            "ckpt", "export", source, tmp_path / "a", "--to", "hf", "--overwrite", "--json"
        )
        assert result.exit_code == Exit.OK, result.output
        assert json.loads(result.stdout)["files"] == ["model.safetensors", "config.json"]
        assert json.loads((tmp_path / "a" / "config.json").read_text())["model_type"] == "llama"
    result = _call("ckpt", "export", run, tmp_path / "b", "--to", "hf", "--config", run)
    assert result.exit_code == Exit.USAGE
    assert "is a run" in result.output
    result = _call("ckpt", "export", run, tmp_path / "a", "--to", "hf")
    assert result.exit_code == Exit.USAGE
    assert "--overwrite" in result.output


def test_how_the_model_of_finetune_generates_leaves_with_its_weights(
    run: Path, tmp_path: Path
) -> None:
    generation = {"eos_token_id": [7, 8], "temperature": 0.6}
    source = tmp_path / "source"
    source.mkdir()
    (source / "generation_config.json").write_text(json.dumps(generation))
    config = TrainConfig(model="tiny", seq=32, init_from=str(source))
    RunFolder(run).start(config, fingerprint="text", done=0)
    (source / "generation_config.json").unlink()  # the run has its own
    RunFolder(run).start(config, fingerprint="text", done=2)
    result = _call("export", run, "--hf", tmp_path / "a")
    assert result.exit_code == Exit.OK, result.output
    assert json.loads((tmp_path / "a" / "generation_config.json").read_text()) == generation


def test_what_cannot_be_exported_is_said(run: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").touch()
    for words, said in (
        ((tmp_path, "--hf", tmp_path / "a"), "is no run of `fullshard train`"),
        ((run, "--hf", tmp_path / "a", "--dtype", "fp8"), "--dtype fp8: choose from fp32"),
        ((run, "--hf", tmp_path / "other"), "is there already. Name another folder, or add"),
    ):
        result = _call("export", *words)
        assert result.exit_code == Exit.USAGE
        assert said in result.output
        assert "fullshard export --help" in result.output
    for file in (run / "checkpoints" / "step-00000002").glob("*.safetensors"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    result = _call("export", run, "--hf", tmp_path / "a")
    assert result.exit_code == Exit.FAILED
    assert "is damaged" in result.output
    assert not (tmp_path / "a").exists()


def test_the_newest_whole_checkpoint_is_exported(run: Path, tmp_path: Path) -> None:
    for file in (run / "checkpoints" / "step-00000002").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-4])
    with pytest.warns(UserWarning, match="step-00000002 is damaged"):
        result = _call("export", run, "--hf", tmp_path / "a")
    assert result.exit_code == Exit.OK, result.output
    assert "step-00000001" in result.stdout
    for file in (run / "checkpoints" / "step-00000001").glob("*.safetensors"):
        file.unlink()
    damaged = [pytest.warns(UserWarning, match=f"step-0000000{n} is damaged") for n in (1, 2)]
    with damaged[0], damaged[1]:
        result = _call("export", run, "--hf", tmp_path / "b")
    assert result.exit_code == Exit.USAGE
    assert "no complete checkpoint" in result.output


# In


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Call `fullshard train`, expect that it starts nothing, and return what it said."""
    monkeypatch.setattr(commands, "launch", lambda *_, **__: pytest.fail("ranks were started"))

    def call(source: Path, *options: str) -> str:
        result = _call("train", "--device", "cpu", "--init-from", source, *options)
        assert result.exit_code == Exit.USAGE, result.output
        return result.output

    return call


def test_weights_of_another_model_are_refused_before_any_rank_starts(
    run: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    assert "is a run of --model tiny. Give the same" in refused(run)
    assert "is no folder" in refused(tmp_path / "nowhere")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{")
    assert "config.json is no JSON" in refused(other)
    (other / "config.json").write_text('{"model_type": "bert"}')
    assert "model_type is 'bert'" in refused(other)
    fields = SIZES["tiny"].config_fields(seq=32, marks={})
    (other / "config.json").write_text(json.dumps(fields))
    assert "hidden_size is 64, and 384 here" in refused(other)
    assert "tie_word_embeddings is False" in refused(other, "--model", "tiny", "--tie-embeddings")
    assert "tie_word" not in refused(other, "--model", "10m")
    assert "holds no weights" in refused(other, "--model", "tiny")
    fullshard.export_hf(_model(tied=True), other, config=fields, overwrite=True)
    said = refused(other, "--model", "tiny")
    assert f"--init-from {other}: its weights are not of" in said
    assert "lack 1 of its tensors (lm_head.weight)" in said


def _hugging_face(folder: Path, **fields: object) -> Path:
    """Write what a folder of Hugging Face has: of a model with so many kinds of tokens, and of its weights nothing."""
    folder.mkdir()
    files = {
        "config.json": {"model_type": "llama", "vocab_size": 600, **fields},
        "tokenizer.json": {},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "model.safetensors").touch()
    return folder


def test_finetune_stands_for_model_weights_and_tokenizer_of_a_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = _hugging_face(Path("mine"))
    whole = {"model": "./mine", "init_from": "mine", "tokenizer": "mine"}
    assert fine_tuning({"finetune": "mine", "seed": 3}) == {**whole, "seed": 3}
    assert fine_tuning({"finetune": "mine", "tokenizer": "./mine/"}) == whole
    # Values of a model that has learnt something already would be ruined by what one from scratch needs.
    assert with_defaults(whole)["lr"] == FINETUNE_LR
    assert with_defaults({**whole, "lr": 0.1})["lr"] == 0.1
    assert with_defaults({"model": "tiny", "init_from": "mine"})["lr"] > FINETUNE_LR
    for contradicting in ({"model": "tiny"}, {"init_from": "other"}, {"tokenizer": "t.json"}):
        (name,) = contradicting
        with pytest.raises(OptionError, match=f"--finetune mine and --{name.replace('_', '-')} "):
            fine_tuning({"finetune": "mine", **contradicting})
    for missing, said in (
        ("tokenizer.json", r"no tokenizer\.json\. Give one with --tokenizer"),
        ("model.safetensors", r"no weights, neither"),
        ("config.json", r"config\.json: is not there"),
    ):
        (folder / missing).rename("aside")
        with pytest.raises(OptionError, match=said):
            fine_tuning({"finetune": "mine"})
        Path("aside").rename(folder / missing)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(OptionError, match=r"from_pretrained\('mine'\)\.save_pretrained\('mine'\)"):
        fine_tuning({"finetune": "mine"})
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    (folder / "tokenizer.json").unlink()
    assert fine_tuning({"finetune": "mine", "tokenizer": "t.json"})["tokenizer"] == "t.json"
    _hugging_face(Path("bytes"), vocab_size=256).joinpath("tokenizer.json").unlink()
    assert "tokenizer" not in fine_tuning({"finetune": "bytes"})
    with pytest.raises(OptionError, match="is a run of fullshard train"):
        fine_tuning({"finetune": str(run)})
    with pytest.raises(OptionError, match="hf download org/name --local-dir name"):
        fine_tuning({"finetune": "org/name"})
    for name in ("config.json", "model.safetensors"):
        with pytest.raises(OptionError, match=r"is a file\. Name its folder: --finetune mine"):
            fine_tuning({"finetune": f"mine/{name}"})


def test_weights_that_are_not_used_are_said(tmp_path: Path) -> None:
    folder = str(_hugging_face(tmp_path / "mine"))
    assert f"--finetune {folder}" in what_it_begins_with(TrainConfig(model=folder))
    used = what_it_begins_with(TrainConfig(model=folder, init_from=folder, lr=3e-5, min_lr=0))
    assert "not used" not in used
    assert "3e-05 (--lr)" in used
    assert not what_it_begins_with(TrainConfig())
    (tmp_path / "mine" / "model.safetensors").unlink()
    assert not what_it_begins_with(TrainConfig(model=folder))


def test_what_is_on_a_hub_is_not_looked_for_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    for options, hint in (
        (("--model", "org/a-1.5"), "`hf download org/a-1.5 --local-dir a-1.5`"),
        (("--finetune", "gpt2-xl"), "`hf download gpt2-xl --local-dir gpt2-xl`"),
        (("--init-from", "gpt2-xl"), "for --finetune gpt2-xl"),
        (("--finetune", "gpt2-xl/"), ""),
        (("--finetune", "model.safetensors"), ""),
        (("--tokenizer", "tokenizer.json"), ""),
        (("--tokenizer", "org/a"), "`hf download org/a --local-dir a`"),
        (("--data", "org/a"), "`hf download org/a --repo-type dataset --local-dir a`"),
        (("--model", "here/gone"), ""),
        (("--model", "../gone/a"), ""),
    ):
        result = _call("train", "--device", "cpu", *options)
        assert result.exit_code == Exit.USAGE
        assert (hint in result.output) if hint else ("hf download" not in result.output)


def test_folders_of_other_libraries_are_told_from_runs(tmp_path: Path) -> None:
    left = tmp_path / "checkpoint-500"
    left.mkdir()
    torch.save(_model(seed=1).state_dict(), left / "pytorch_model.bin")
    (left / "trainer_state.json").write_text("{}")
    for words in (
        ("train", "--resume", tmp_path),
        ("export", tmp_path, "--hf", tmp_path / "out"),
        ("ckpt", "inspect", tmp_path),
        ("ckpt", "verify", tmp_path),
    ):
        result = _call(*words)
        assert result.exit_code not in (None, Exit.OK), result.output
        assert "checkpoint-500/pytorch_model.bin" in result.output, words
        assert "trainer_state" not in result.output
    hub = tmp_path / "hub"
    fullshard.export_hf(_model(seed=1), hub)
    (hub / "config.json").write_text('{"model_type": "llama"}')
    result = _call("train", "--resume", hub)
    assert result.exit_code == Exit.USAGE
    assert "--init-from" in result.output


def test_weights_without_a_configuration_are_begun_with(tmp_path: Path) -> None:
    source, model = _model(seed=1), _model(seed=2)
    fullshard.export_hf(source, tmp_path / "a")  # as Accelerate leaves them
    load_initial_weights(model, tmp_path / "a")
    for name, value in source.state_dict().items():
        assert value.equal(model.state_dict()[name])


def test_configurations_are_compared_as_transformers_reads_them() -> None:
    sizes = SIZES["1b"]
    fields = sizes.config_fields(seq=2048, marks={})
    assert sizes.differences(fields) == []
    old = {**fields, "rope_parameters": None, "head_dim": None}
    assert sizes.differences(old) == []
    assert sizes.differences({**old, "rope_theta": 1e4}) == [
        "rope_theta is 10000.0, and 500000.0 here"
    ]
    scaled = {"rope_type": "llama3", "rope_theta": sizes.rope_theta}
    assert "scaled" in sizes.differences({**fields, "rope_parameters": scaled})[0]
    assert sizes.differences({**fields, "attention_bias": True, "hidden_act": "gelu"}) == [
        "attention_bias is true, and false here",
        "hidden_act is gelu, and silu here",
    ]
    assert len(sizes.differences({"model_type": "llama"})) >= 6


def test_weights_come_from_runs_and_checkpoints_and_exports(run: Path, tmp_path: Path) -> None:
    checkpoints = run / "checkpoints"
    fullshard.export_hf(
        checkpoints, tmp_path / "a", config=SIZES["tiny"].config_fields(seq=32, marks={})
    )
    for source, seed in (
        *((run, 2), (checkpoints, 2), (checkpoints / "step-00000001", 1), (tmp_path / "a", 2)),
    ):
        model, expected = _model(seed=5), _model(seed=seed).state_dict()
        load_initial_weights(model, source)
        assert all(value.equal(expected[name]) for name, value in model.state_dict().items())


def test_a_run_begins_with_an_export_and_becomes_one_for_transformers(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model = _model(seed=2)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # then every byte is as likely
    fullshard.export_hf(model, tmp_path / "a", config=SIZES["tiny"].config_fields(seq=32, marks={}))
    options = (*TINY, *PAGES, "--steps", "2", "--save-every", "0", "--trace-steps", "0")
    first, second = fullshard_on_ranks(
        2, "train", *options, "--init-from", tmp_path / "a", "--out", tmp_path / "new"
    )
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert f"beginning with the weights of {tmp_path / 'a'}" in first.err
    assert losses(tmp_path / "new")[0] == pytest.approx(math.log(256), rel=1e-6)
    result = _call("export", tmp_path / "new", "--hf", tmp_path / "b", "--max-shard-size", "50KB")
    assert result.exit_code == Exit.OK, result.output
    ours = _model()
    load_initial_weights(ours, tmp_path / "new")
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "b").eval()
    tokens = torch.tensor([list(b"def main(argument):")])
    with torch.no_grad():
        logits, expected = theirs(tokens).logits, ours(tokens)
    assert expected.abs().max() > 1e-3, "it has learnt something"
    # The same numbers go through other kernels: of attention, and of the rotation.
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
