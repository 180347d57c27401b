"""`fullshard train --model config.json`: models of Transformers from start to end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from fullshard.errors import AllocationError
from fullshard.models.blueprints import ConfiguredBlueprint, ModelConfigError, read_model_config
from fullshard.models.built import build
from fullshard.tools import cli
from fullshard.tools.config import OptionError
from fullshard.tools.job import Job, new_job
from fullshard.tools.run_folder import RunFolder
from fullshard.tools.text.corpus import IGNORED
from fullshard.tools.text.opening import open_text
from fullshard.tools.text.tokenizer import open_tokenizer
from fullshard.tools.weights import what_it_begins_with
from tests.fresh import Ended, fullshard_on_ranks
from tests.tools.processes import TINY, losses
from tests.tools.text.conftest import word_tokenizer

SEED = 3
QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 29,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
# Its positions are a table, which ends.
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 29,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 64,
}
MAMBA = {"model_type": "mamba", "vocab_size": 29, "hidden_size": 16, "num_hidden_layers": 1}
WITHOUT_MODEL = TINY[2:]
# What a process that trains such a model imports anyway, for seconds.
_IMPORTED = (
    "tokenizers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
)


def _ranks(num_ranks: int, *words: object) -> list[Ended]:
    return fullshard_on_ranks(num_ranks, *words, imported=_IMPORTED)


class Folder:
    """Text, a tokenizer, configurations, and a run of three steps."""

    def __init__(self, path: Path) -> None:
        self.path, self.run = path, path / "run"
        word_tokenizer().save(str(path / "tokenizer.json"))
        lines = [json.dumps({"text": " ".join("abcdefghij"[: 1 + n % 10])}) for n in range(200)]
        (path / "text.jsonl").write_text("\n".join(lines))
        for name, fields in (("qwen3", QWEN3), ("mamba", MAMBA), ("gpt2", GPT2)):
            (path / f"{name}.json").write_text(json.dumps(fields))
        self.ranks = self.train(2, "--steps", "3", "--out", self.run)

    def train(self, num_ranks: int, *words: object, model: str = "qwen3.json") -> list[Ended]:
        return _ranks(
            num_ranks, "train", *WITHOUT_MODEL, "--model", self.path / model,
            "--tokenizer", self.path / "tokenizer.json", "--data", self.path / "text.jsonl",
            "--seed", SEED, "--cache", self.path / "cache", *words,
        )  # fmt: skip

    def job(self, **options: Any) -> Job:
        """Prepare a run as `train` does, in this process, which starts nothing."""
        given = {
            "model": str(self.path / "qwen3.json"),
            "tokenizer": str(self.path / "tokenizer.json"),
            "data": (str(self.path / "text.jsonl"),),
            "seq": 32,
            "device": "cpu",
            **options,
        }
        return new_job(given, self.path / "new", cache=self.path / "cache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    made = Folder(tmp_path_factory.mktemp("configured"))
    assert [rank.code for rank in made.ranks] == [0, 0], [rank.err for rank in made.ranks]
    return made


@pytest.mark.parametrize("prompt", ["a", "a " * 100])
def test_a_sample_ends_with_the_model_s_positions(
    folder: Folder, tmp_path: Path, prompt: str
) -> None:
    more = ("--steps", "1", "--sample-length", "100", "--prompt", prompt, "--out", tmp_path)
    (run,) = folder.train(1, *more, model="gpt2.json")
    assert run.code == 0, run.err
    summary = RunFolder(tmp_path).read_summary()
    assert summary is not None
    assert len(summary["sample"].split()) <= 64


def _first_entry(run: Path) -> dict[str, Any]:
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[0])


def test_a_step_is_that_of_transformers_in_one_process(folder: Folder) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    run = RunFolder(folder.run)
    config = run.read_config()
    assert (config.vocab_size, read_model_config(run.model_file)) == (29, QWEN3)
    tokenizer = open_tokenizer(run.tokenizer_folder)
    batch = open_text(config, tokenizer, cache=folder.path / "cache").batch(0, range(4))
    assert batch.positions is not None
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**QWEN3))
    logits = model(batch.inputs, position_ids=batch.positions, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])
    first = _first_entry(folder.run)
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert first["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    facts = run.read_facts()
    assert facts["num_parameters"] == sum(param.numel() for param in model.parameters())
    assert "loss" in folder.ranks[0].out


def test_it_goes_on_exactly_with_its_own_configuration_and_dropout(
    folder: Folder, tmp_path: Path
) -> None:
    gpt2 = {"model_type": "gpt2", "vocab_size": 29, "n_embd": 16, "n_layer": 1, "n_head": 2}
    gpt2 |= {"n_positions": 64, "resid_pdrop": 0.5, "eos_token_id": 2, "bos_token_id": 2}
    file, straight = folder.path / "gpt2.json", tmp_path / "straight"
    file.write_text(json.dumps(gpt2))
    ranks = folder.train(
        2, "--val-fraction", "0.2", "--val-every", "1", "--lr", "0.01", "--min-lr", "0.01",
        "--warmup", "0", "--steps", "4", "--save-every", "2", "--out", straight, model="gpt2.json",
    )  # fmt: skip
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].err
    file.unlink()
    stopped = tmp_path / "stopped"
    shutil.copytree(straight, stopped)
    shutil.rmtree(stopped / "checkpoints" / "step-00000004")
    (stopped / "checkpoints" / "latest").write_text("step-00000002\n")
    ranks = _ranks(
        2, "train", "--resume", stopped, "--cache", folder.path / "cache", "--model", file
    )
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].err
    assert losses(stopped) == losses(straight)
    assert len(set(losses(straight))) == 4


def test_what_is_exported_loads_and_begins_another_run(folder: Folder, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "out"
    ended = CliRunner().invoke(cli.app, ["export", str(folder.run), "--hf", str(out)])
    assert ended.exit_code == 0, ended.output
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.eos_token_id == AutoTokenizer.from_pretrained(out).eos_token_id == 2
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert folder.job(model=str(out), init_from=str(out)).model.fields
    options = ("--steps", "1", "--lr", "0", "--min-lr", "0", "--seed", "9")
    begun = ("--init-from", folder.run, "--out", tmp_path / "new")
    (again,) = folder.train(1, *options, *begun, model=str(out))
    assert again.code == 0, again.err
    config = RunFolder(tmp_path / "new").read_config()
    tokenizer = open_tokenizer(tmp_path / "new" / "tokenizer")
    batch = open_text(config, tokenizer, cache=folder.path / "cache").batch(0, range(2))
    logits = model(batch.inputs, position_ids=batch.positions, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)
    assert _first_entry(tmp_path / "new")["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_a_model_that_mixes_documents_is_trained_only_if_they_may_see_each_other(
    folder: Folder, tmp_path: Path
) -> None:
    (refused,) = folder.train(1, "--steps", "1", "--out", tmp_path / "a", model="mamba.json")
    assert refused.code == 2
    assert "documents in one row cannot be kept apart" in refused.err
    assert "or let documents see each other with --across-documents" in refused.err
    (trained,) = folder.train(
        1, "--steps", "1", "--across-documents", "--out", tmp_path / "b", model="mamba.json"
    )
    assert trained.code == 0, trained.err
    config = RunFolder(tmp_path / "b").read_config()
    tokenizer = open_tokenizer(tmp_path / "b" / "tokenizer")
    text = open_text(config, tokenizer, cache=folder.path / "cache")
    batch = text.batch(0, range(2))
    assert batch.positions is None
    assert (batch.targets != IGNORED).all()
    assert text.num_targets(0) == batch.targets.numel()


def test_a_model_that_no_host_can_hold_is_refused_with_its_file_and_bytes(
    folder: Folder, tmp_path: Path
) -> None:
    (folder.path / "huge.json").write_text(json.dumps(QWEN3 | {"hidden_size": 4 * 10**9}))
    (rank,) = folder.train(1, "--steps", "1", "--out", tmp_path / "out", model="huge.json")
    assert rank.code == 2, rank.err
    assert "Traceback" not in rank.err
    assert "huge.json" in rank.err
    assert "MiB of memory" in rank.err
    assert len(rank.err) < 3000


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 4 * 10**30},  # no tensor has so many
        {"model_type": "gpt2", "max_position_embeddings": 10**12},
    ],
)
def test_sizes_that_no_host_can_hold_are_refused_in_few_words(sizes: dict[str, Any]) -> None:
    blueprint = ConfiguredBlueprint(QWEN3 | sizes)
    with pytest.raises((AllocationError, ModelConfigError)) as refused:
        build(blueprint, lambda *_: None, device=torch.device("cpu"), seed=0, recompute=False)
    assert len(str(refused.value)) < 2000


def _saved(path: Path, fields: dict[str, Any], **how: Any) -> Path:
    """Write a model of Transformers, as `save_pretrained` does."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**QWEN3 | fields)
    AutoModelForCausalLM.from_config(config).save_pretrained(path, **how)
    return path


def _cut(source: Path) -> None:
    file = max(source.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])


def _describe(source: Path, **fields: Any) -> None:
    file = source / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "layer_types": None, **fields}))


@pytest.mark.parametrize("size", ["5GB", "10KB"], ids=["one file", "several files"])
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_cut, "may have been cut short"),
        (lambda source: _describe(source, vocab_size=50), "(40, 32) there, and (50, 32) in"),
        (
            lambda source: _describe(source, num_hidden_layers=3, tie_word_embeddings=False),
            "lack 12 of its tensors (model.layers.2.",
        ),
        (lambda source: _describe(source, num_hidden_layers=1), "have 11 that it has not"),
        (lambda source: _describe(source, hidden_size=4 * 10**30), "Transformers cannot build"),
    ],
    ids=["cut", "sizes", "missing", "unexpected", "impossible"],
)
def test_weights_that_are_not_of_their_config_are_refused_before_the_text_is_read(
    folder: Folder, tmp_path: Path, size: str, spoil: Callable[[Path], None], said: str
) -> None:
    source = _saved(tmp_path / "source", {"vocab_size": 40}, max_shard_size=size)
    word_tokenizer().save(str(source / "tokenizer.json"))
    options = {"model": "", "tokenizer": "", "finetune": str(source), "data": ("nowhere",)}
    with pytest.raises(OptionError, match="nowhere: no such file"):
        folder.job(**options)
    spoil(source)
    with pytest.raises(OptionError) as error:
        folder.job(**options)
    assert f"--finetune {source}" in str(error.value)
    assert said in str(error.value)
    assert not {"allow=", "rename="} & {*str(error.value).split()}


def test_fine_tuning_goes_three_times_through_data_with_the_tokenizer_of_its_weights(
    folder: Folder, tmp_path: Path
) -> None:
    source = _saved(tmp_path / "source", {"vocab_size": 40})
    own = source / "tokenizer.json"
    word_tokenizer(template="<s> $A").save(str(own))  # other bytes, the same words
    given = {"model": "", "init_from": "", "tokenizer": "", "finetune": str(source)}

    def job(**options: Any) -> Job:
        return folder.job(**given | options)

    three = job()
    assert three.config.steps == three.text.num_steps(3)
    assert job(steps=7).config.steps == 7

    def warned(**options: Any) -> bool:
        prepared = folder.job(model=str(source), init_from=str(source), **options)
        return "warning" in what_it_begins_with(prepared.config, prepared.tokenizer)

    assert not warned(tokenizer=str(source))
    assert not warned()
    own.unlink()
    assert warned()  # of 29 kinds, and the model has 40
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"b": 0}, unk_token="b")).save(str(own))
    assert warned()
    with pytest.raises(OptionError, match=f"--tokenizer {source}, .* --finetune {source}"):
        folder.job(model=str(source), tokenizer="")


def test_models_and_options_that_do_not_fit_are_refused(folder: Folder, tmp_path: Path) -> None:
    def refused(fields: dict[str, Any] | None = None, **options: Any) -> str:
        """Return what is said of such a model, before anything is started."""
        if fields is not None:
            (tmp_path / "other.json").write_text(json.dumps(fields))
            options["model"] = str(tmp_path / "other.json")
        with pytest.raises(OptionError) as error:
            folder.job(**options)
        return str(error.value)

    assert "--seq 65: --model" in refused(seq=65)
    assert "has 29 kinds. Leave --vocab-size out" in refused(vocab_size=64)
    assert "without --tokenizer there are 256, of bytes" in refused(tokenizer="")
    assert "qwen3.json says counts (tie_word_embeddings)" in refused(tie_embeddings=True)
    assert "nowhere.json: is not there" in refused(model=str(tmp_path / "nowhere.json"))
    assert "has 20 kinds of tokens, and the tokenizer 29" in refused(QWEN3 | {"vocab_size": 20})
    encoder = {"model_type": "t5", "vocab_size": 29}
    assert "has an encoder beside its decoder" in refused(encoder)
    for kind, said in (("vit", "no causal language model for it"), ("gemma3", "more than text")):
        assert said in refused({"model_type": kind})
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"rope_theta": 5.0}))
    said = refused(init_from=str(tmp_path))
    assert "rope" in said
    assert "is another model than --model" in said
