"""`fullshard train --tokenizer` from start to end: as one process would, continued, held out, exported."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from fullshard.models.llama import Llama, init_weights
from fullshard.tools import cli
from fullshard.tools.config import OptionError
from fullshard.tools.job import new_job
from fullshard.tools.run_folder import RunFolder
from fullshard.tools.text.corpus import IGNORED
from fullshard.tools.text.opening import open_text
from fullshard.tools.text.tokenizer import open_tokenizer
from fullshard.tools.weights import model_config
from tests.fresh import Ended, fullshard_on_ranks
from tests.tools.processes import TINY, losses
from tests.tools.text.conftest import word_tokenizer

SEED = 5


class Run:
    """Twelve steps on two ranks, with a checkpoint after six; documents of 1 to 60 words."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"
        self.cache = folder / "cache"
        (folder / "words").mkdir()
        word_tokenizer(template="<s> $A").save(str(folder / "words" / "tokenizer.json"))
        generator = torch.Generator().manual_seed(SEED)
        lines = []
        for _ in range(80):
            length = int(torch.randint(1, 60, (1,), generator=generator))
            letters = torch.randint(26, (length,), generator=generator).sort().values.tolist()
            text = " ".join(chr(ord("a") + letter) for letter in letters)
            lines.append(json.dumps({"text": text}) + "\n")
        (folder / "train.jsonl").write_text("".join(lines))
        self.ranks = self.train(
            2,
            *("--data", folder / "train.jsonl", "--tokenizer", folder / "words"),
            *("--val-fraction", "0.2", "--val-every", "6", "--val-sequences", "5"),
            *("--steps", "12", "--save-every", "6", "--grad-accum", "2", "--seed", SEED),
            *("--sample-length", "8", "--prompt", "a b", "--out", self.folder),
        )

    def train(self, num_ranks: int, *words: object) -> list[Ended]:
        return fullshard_on_ranks(num_ranks, "train", *TINY, *words, "--cache", self.cache)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    made = Run(tmp_path_factory.mktemp("tokens"))
    assert [rank.code for rank in made.ranks] == [0, 0], made.ranks[0].err
    return made


def _metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _interrupted(run: Run, folder: Path) -> Path:
    """Copy the run as if it had been killed after its checkpoint of step 6."""
    shutil.copytree(run.folder, folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000012")
    (folder / "checkpoints" / "latest").write_text("step-00000006\n")
    return folder


def test_a_step_is_that_of_one_process_with_the_whole_batch(run: Run) -> None:
    """Loss and gradient norm: each token that is predicted counts the same, on whichever rank it is."""
    folder = RunFolder(run.folder)
    config = folder.read_config()
    text = open_text(config, open_tokenizer(folder.tokenizer_folder), cache=run.cache)
    assert (config.vocab_size, config.global_batch) == (29, 8)
    batch = text.batch(0, range(8))
    assert batch.positions is not None
    counts = (batch.targets != IGNORED).sum(1)
    assert len(counts.unique()) > 1, "else means of means would do"
    assert counts.sum() == text.num_targets(0)
    model = Llama(model_config(config))
    init_weights(model, seed=SEED)
    logits = model(batch.inputs, positions=batch.positions)
    loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)
    loss.backward()
    grads = [param.grad for param in model.parameters()]
    first = _metrics(run.folder)[0]
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert first["grad_norm"] == pytest.approx(
        torch.nn.utils.get_total_norm(grads).item(), rel=1e-5
    )


def test_it_says_what_the_text_is_and_counts_in_tokens(run: Run) -> None:
    said = run.ranks[0].err
    assert "tokens of 29 kinds in 80 documents, 1 file" in said
    assert "documents end with </s>" in said
    assert re.search(r"held out: \d+ tokens, \d+ sequences, of which 5 are measured", said)
    assert "256 tokens a step" in said
    out = run.ranks[0].out
    assert "--- sample ---\na b" in out
    assert re.search(r"nats per token .*, perplexity \d", out)
    assert not run.ranks[1].out
    metrics = _metrics(run.folder)
    assert [entry["step"] for entry in metrics if "val_loss" in entry] == [6, 12]
    num_sequences = 8 / metrics[0]["epoch"]
    assert metrics[11]["epoch"] == pytest.approx(96 / num_sequences, rel=1e-3)
    assert metrics[-1]["loss"] < metrics[0]["loss"]


def test_it_goes_on_exactly_where_it_stopped_with_its_own_tokenizer(
    run: Run, tmp_path: Path
) -> None:
    folder = _interrupted(run, tmp_path / "run")
    words = run.folder.parent / "words"
    words.rename(tmp_path / "away")
    try:
        ranks = fullshard_on_ranks(2, "train", "--resume", folder, "--cache", tmp_path / "other")
    finally:
        (tmp_path / "away").rename(words)
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].err
    assert "resuming after step 6" in ranks[0].err
    assert losses(folder) == losses(run.folder)
    assert _metrics(folder)[-1]["val_loss"] == _metrics(run.folder)[-1]["val_loss"]


def test_one_rank_goes_on_with_the_same_sequences(run: Run, tmp_path: Path) -> None:
    folder = _interrupted(run, tmp_path / "run")
    (rank,) = fullshard_on_ranks(
        1, "train", "--resume", folder, "--batch", "4", "--cache", run.cache
    )
    assert rank.code == 0, rank.err
    assert losses(folder) == pytest.approx(losses(run.folder), rel=1e-5)
    val_losses = [_metrics(each)[-1]["val_loss"] for each in (folder, run.folder)]
    assert val_losses[0] == pytest.approx(val_losses[1], rel=1e-5)


def test_transformers_loads_model_and_tokenizer_together(run: Run, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = ["export", str(run.folder), "--hf", str(tmp_path / "out")]
    ended = CliRunner().invoke(cli.app, words)
    assert ended.exit_code == 0, ended.output
    assert "with its tokenizer" in ended.stdout
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert tokenizer("a b z")["input_ids"] == [1, 3, 4, 28]
    assert (model.config.vocab_size, model.config.bos_token_id) == (29, 1)
    assert model.config.eos_token_id == tokenizer.eos_token_id == 2
    config = RunFolder(run.folder).read_config()
    text = open_text(config, open_tokenizer(run.folder / "tokenizer"), cache=run.cache)
    held = text.held_out(range(5))
    assert held.positions is not None
    logits = model(held.inputs, position_ids=held.positions, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), held.targets.flatten(), ignore_index=IGNORED)
    assert _metrics(run.folder)[-1]["val_loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    options = ("--tokenizer", "nowhere.json", "--out", tmp_path / "run")
    (rank,) = fullshard_on_ranks(1, "train", *options)
    assert rank.code == 2
    assert "--tokenizer nowhere.json: no such file" in rank.err
    assert not (tmp_path / "run").exists()
    for given, said in (
        ({"end_token": "</s>"}, "--end-token </s>: is of a --tokenizer, and there is none."),
        ({"vocab_size": 20}, "--vocab-size 20: bytes have 256 kinds"),
        ({"val_data": ("x",), "val_fraction": 0.1}, "both hold text out; leave one away"),
    ):
        with pytest.raises(OptionError) as refused:
            new_job({"device": "cpu", **given}, tmp_path / "run")
        assert said in str(refused.value)
