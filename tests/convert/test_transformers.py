"""What goes in and out fits Transformers: equal outputs, and a pretrained model that is fine-tuned."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fullshard
from fullshard.errors import CheckpointError
from tests.api import Api
from tests.fsdp1.models import quiet
from tests.harness import mesh_of, on_ranks, rank
from tests.tools.processes import environment

pytestmark = pytest.mark.apis("peer_memory")
ROOT = Path(__file__).parents[2]


def _config(*, tied: bool) -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 101}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(20)[None]).logits


@on_ranks(2, limit_s=120)
def test_a_sharded_llama_gives_the_logits_of_transformers(api: Api, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    for tied in (True, False):
        torch.manual_seed(1)
        source, reference = tmp_path / f"{tied}", LlamaForCausalLM(_config(tied=tied))
        if rank() == 0:
            reference.save_pretrained(source, max_shard_size="20KB")
        torch.distributed.barrier()

        # Built without memory, sharded, and filled with this rank's slices.
        with torch.device("meta"):
            model = LlamaForCausalLM(_config(tied=tied))
        for layer in model.model.layers:
            api.fully_shard(layer, mesh=mesh_of(2))
        api.fully_shard(model, mesh=mesh_of(2))
        model.to_empty(device="cpu")
        model.tie_weights()
        with quiet():  # random numbers of DTensors on the CPU
            model.init_weights()
        loaded = fullshard.load_hf(model, source)
        assert loaded.missing == loaded.unexpected == ()
        assert _logits(model).equal(_logits(reference))

        # Wrapped, with flat parameters.
        with quiet():
            wrapped = api.FullyShardedDataParallel(
                LlamaForCausalLM(_config(tied=tied)),
                device_mesh=mesh_of(2),
                device_id=torch.device("cpu"),
            )
        fullshard.load_hf(wrapped, source)
        assert _logits(wrapped).equal(_logits(reference))

        for number, sharded in enumerate((model, wrapped)):
            sharded(torch.arange(20)[None]).logits.square().mean().backward()
            torch.optim.SGD(sharded.parameters(), lr=0.1).step()
            expected = _logits(sharded)
            for dtype in (None, torch.bfloat16):
                out = tmp_path / f"{tied}-{number}-{dtype}"
                fullshard.export_hf(sharded, out, dtype=dtype, max_shard_size="20KB")
                again = LlamaForCausalLM.from_pretrained(out)
                assert not expected.equal(_logits(reference))
                if dtype is None:
                    assert _logits(again).equal(expected)
                assert {p.dtype for p in again.parameters()} == {dtype or torch.float32}
                assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
                fields = json.loads((out / "config.json").read_text())
                assert fields["architectures"] == ["LlamaForCausalLM"]
                assert (out / "generation_config.json").is_file()


@pytest.mark.long
@pytest.mark.parametrize("family", ["GPT2", "Qwen2", "Gemma2", "Bert", "T5", "Mixtral"])
def test_many_kinds_of_models_come_in_and_go_out(family: str, tmp_path: Path) -> None:
    import transformers

    names = {
        "Bert": "BertForMaskedLM",
        "T5": "T5ForConditionalGeneration",
        "GPT2": "GPT2LMHeadModel",
    }
    kind = getattr(transformers, names.get(family, f"{family}ForCausalLM"))
    small: dict[str, dict[str, Any]] = {
        "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
        "T5": {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8},
    }
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    tokens = {"vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{family}Config")(**small.get(family, sizes), **tokens)

    def outputs(model: Any) -> torch.Tensor:
        numbers = torch.arange(9)[None]
        more = {"decoder_input_ids": numbers} if family == "T5" else {}
        with torch.no_grad():
            return model.eval()(input_ids=numbers, **more).logits

    model = kind(config)
    expected = outputs(model)
    model.save_pretrained(tmp_path / "theirs")
    fullshard.export_hf(model, tmp_path / "ours")
    assert outputs(kind.from_pretrained(tmp_path / "ours")).equal(expected)
    for folder in ("theirs", "ours"):
        other = kind(config)
        if (family, folder) == ("Mixtral", "theirs"):  # a tensor for each expert
            with pytest.raises(CheckpointError, match="gate_up_proj"):
                fullshard.load_hf(other, tmp_path / folder)
            continue
        fullshard.load_hf(other, tmp_path / folder)
        assert outputs(other).equal(expected)


@pytest.mark.long
def test_a_pretrained_encoder_is_fine_tuned_offline(tmp_path: Path) -> None:
    example = ROOT / "examples" / "finetune_minilm.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, example, "--steps", "4", "--out", tmp_path / "out"],
        env=environment() | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # 91 MB of weights: each rank has read its half, and not the position numbers, which no file needs.
    assert re.findall(r"read ([\d,]+) bytes, 103 tensors", done.stdout) == ["45,426,432"] * 2
    losses = [float(loss) for loss in re.findall(r"step \d: loss (\S+)", done.stdout)]
    assert len(losses) == 4
    assert losses[0] > 1
    assert losses[-1] < losses[0] / 4
    assert "90,852,864 bytes of weights" in done.stdout
    assert "same output in Transformers: True" in done.stdout
    assert (tmp_path / "out" / "1_Pooling" / "config.json").is_file()


def test_ties_that_the_configuration_does_not_have_are_refused(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    for tied in (True, False):
        model = LlamaForCausalLM(_config(tied=tied))
        weight = model.model.embed_tokens.weight
        model.lm_head.weight = torch.nn.Parameter(weight.detach().clone()) if tied else weight
        with pytest.raises(CheckpointError, match=f"says tie_word_embeddings={tied}"):
            fullshard.export_hf(model, tmp_path / "a")
        model.config.tie_word_embeddings = not tied
        fullshard.export_hf(model, tmp_path / "a", overwrite=True)
        again = LlamaForCausalLM.from_pretrained(tmp_path / "a")
        assert _logits(again).equal(_logits(model))
