"""Models of a config.json of Transformers: read, built, sharded, run, compared, refused."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import fullshard
from fullshard.models import blueprints
from fullshard.models.blueprints import (
    ModelConfigError,
    check_trainable,
    config_differences,
    read_model_config,
)
from fullshard.models.configured import (
    ConfiguredModel,
    build_from_config,
    recompute_layers,
    sharding_units,
)
from fullshard.models.sizes import LlamaConfig
from tests.fsdp1.models import quiet
from tests.harness import mesh_of, on_ranks, rank

VOCAB = 64
CPU = torch.device("cpu")


def _sizes(kind: str, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    no_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return {"model_type": kind, "vocab_size": VOCAB, **sizes, **heads, **no_tokens, **more}


def _old_sizes(kind: str, **more: Any) -> dict[str, Any]:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return {"model_type": kind, "vocab_size": VOCAB, **sizes, **more}


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
_DEEPSEEK = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DEEPSEEK |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
_DEEPSEEK |= {"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8}
_DEEPSEEK |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
_SCALED = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
_SCALED |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_MAMBA = {"mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1}
_LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
_LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
_GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}

# Families that keep documents apart, in several ways: grouped heads, learned positions, windows, experts.
APART: dict[str, dict[str, Any]] = {
    "llama": _sizes("llama"),
    "llama, tied": _sizes("llama", tie_word_embeddings=True),
    "qwen3": _sizes("qwen3", head_dim=8),
    "gpt2": _old_sizes("gpt2", **_GPT2),
    "gemma3_text": _sizes("gemma3_text", head_dim=8, **_SLIDING),
    "qwen3_moe": _sizes("qwen3_moe", **_EXPERTS),
}
MORE_APART: dict[str, dict[str, Any]] = {
    "llama, scaled": _sizes("llama", rope_parameters=_SCALED),
    "mistral": _sizes("mistral", sliding_window=8),
    "mixtral": _sizes("mixtral", num_local_experts=4),
    "deepseek_v3": _sizes("deepseek_v3", **_DEEPSEEK),
    "gpt_neox": _sizes("gpt_neox", hidden_dropout=0.0, attention_dropout=0.0),
    "gptj": _old_sizes("gptj", rotary_dim=4, **_GPT2),
    **{
        kind: _sizes(kind)
        for kind in ("qwen2", "phi", "phi3", "olmo2", "granite", "cohere", "smollm3", "stablelm")
    },
    **{kind: _sizes(kind, head_dim=8) for kind in ("gemma", "gemma2", "glm4", "ernie4_5")},
    "starcoder2": _sizes("starcoder2", residual_dropout=0.0, embedding_dropout=0.0),
}
# Families that do not: states, convolutions, or positions that are taken and not looked at.
MIXED: dict[str, dict[str, Any]] = {
    "opt": _sizes("opt", ffn_dim=48, word_embed_proj_dim=32, pad_token_id=1, dropout=0.0),
    "lfm2": _sizes("lfm2", layer_types=["conv", "full_attention"]),
    "jamba": _sizes("jamba", num_experts=2, use_mamba_kernels=False, **_MAMBA),
}
MORE_MIXED: dict[str, dict[str, Any]] = {
    "lfm2_moe": _sizes(
        "lfm2_moe", layer_types=["conv", "full_attention"], num_dense_layers=1, **_EXPERTS
    ),
    "falcon": _sizes("falcon", new_decoder_architecture=False, multi_query=True),
    "gpt_oss": _sizes("gpt_oss", num_local_experts=4, head_dim=8, **_SLIDING),
    "qwen3_next": _sizes(
        "qwen3_next",
        layer_types=["linear_attention", "full_attention"],
        shared_expert_intermediate_size=16,
        **_EXPERTS,
        **_LINEAR,
    ),
}
# Those that take no positions at all.
WITHOUT_POSITIONS: dict[str, dict[str, Any]] = {
    "mamba": _sizes("mamba", state_size=8),
    "bloom": _sizes("bloom", n_layer=2, n_head=4),
}
ALL = {**APART, **MORE_APART, **MIXED, **MORE_MIXED, **WITHOUT_POSITIONS}


def _reference(fields: dict[str, Any], *, seed: int = 3) -> Any:
    """Return the model as anybody builds it in one process."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(**fields)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _built(fields: dict[str, Any], *, seed: int = 3) -> nn.Module:
    return fullshard.materialize(build_from_config(fields, seed=seed))


_SOUGHT = """
import logging, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "torchao":
            print("looked for")
            logging.getLogger(name).warning("cannot load")
sys.meta_path.insert(0, Finder)
from fullshard.models.configured import build_from_config
build_from_config({fields}, seed=0)
"""


@pytest.mark.long
def test_what_packages_log_while_transformers_looks_for_them_is_not_shown() -> None:
    words = [sys.executable, "-c", _SOUGHT.replace("{fields}", repr(ALL["llama"]))]
    ended = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    assert "looked for" in ended.stdout
    assert "cannot load" not in ended.stderr


def _sharded(
    fields: dict[str, Any], *, recompute: bool = False, dtype: torch.dtype | None = None
) -> nn.Module:
    model = build_from_config(fields, seed=3)
    policy = fullshard.MixedPrecisionPolicy(param_dtype=dtype)
    if recompute:
        recompute_layers(model)
    for layer in sharding_units(model):
        fullshard.fully_shard(layer, mesh=mesh_of(2), mp_policy=policy)
    fullshard.fully_shard(model, mesh=mesh_of(2), mp_policy=policy)
    return fullshard.materialize(model)


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randint(2, VOCAB, shape, generator=torch.Generator().manual_seed(1))


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers, whole; collective for a sharded model."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in named}


def _gradients(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    model.train()
    logits = ConfiguredModel(model).logits(tokens[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    found = {}
    for name, param in model.named_parameters():
        if param.grad is not None:  # else an expert that no token was sent to
            grad = param.grad
            found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    model.zero_grad()
    return found


# Built and sharded


def _count_forwards(model: nn.Module) -> list[None]:
    """Return a list that grows with each forward of the first norm in the last layer."""
    found: list[None] = []
    norm = next(
        m for name, m in sharding_units(model)[-1].named_modules() if "norm" in name or "ln" in name
    )
    norm.register_forward_hook(lambda *_: found.append(None))
    return found


def _check_sharded(fields: dict[str, Any]) -> None:
    """Compare a model on two ranks with that of one process: values, gradients, what it predicts."""
    reference = _reference(fields)
    after = torch.get_rng_state()
    models = [_sharded(fields, recompute=recompute) for recompute in (False, True)]
    assert torch.equal(torch.get_rng_state(), after)
    expected = _tensors(reference)
    tokens = _tokens(2, 17)
    gradients = _gradients(reference, tokens)
    counts = [_count_forwards(model) for model in models]
    for model in models:
        values = _tensors(model)
        assert list(values) == list(expected), "ties included, which have one name"
        for name, value in expected.items():
            assert values[name].dtype == value.dtype
            assert values[name].equal(value), name
        found = _gradients(model, tokens[rank() :][:1])  # a row each
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=2e-5, atol=1e-7, msg=name)
    assert [len(each) for each in counts] == [1, 2], "a layer ran again for its backward"
    found, again = (_gradients(model, tokens) for model in models)
    assert all(found[name].equal(again[name]) for name in found), (
        "recomputed, the same in every bit"
    )


@on_ranks(2, limit_s=120)
def test_sharded_it_has_the_values_and_gradients_of_one_process() -> None:
    with quiet():
        for fields in APART.values():
            _check_sharded(fields)


@pytest.mark.long
@on_ranks(2, limit_s=300)
def test_most_families_have_the_values_and_gradients_of_one_process() -> None:
    with quiet():
        for fields in (*MORE_APART.values(), *MIXED.values(), *MORE_MIXED.values()):
            _check_sharded(fields)


@on_ranks(2, limit_s=120)
def test_sharded_it_is_checked_continued_and_exported(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    with quiet():
        for kind in ("llama, tied", "qwen3_moe"):
            model = _sharded(APART[kind])
            ConfiguredModel(model).check_documents_apart(vocab_size=VOCAB, device=CPU)
            ConfiguredModel(model).check_causal(vocab_size=VOCAB, device=CPU)
            tokens = _tokens(1, 12)
            with torch.no_grad():
                expected = ConfiguredModel(model.eval()).logits(tokens)
            _check_continued(model, tokens, expected)
            fullshard.export_hf(model, tmp_path / kind, config=APART[kind])
            again = AutoModelForCausalLM.from_pretrained(tmp_path / kind).eval()
            with torch.no_grad():
                assert ConfiguredModel(again).logits(tokens).equal(expected)
            assert config_differences(APART[kind], read_model_config(tmp_path / kind)) == []
            half = _sharded(APART[kind], dtype=torch.bfloat16)
            ConfiguredModel(half).check_documents_apart(vocab_size=VOCAB, device=CPU)
        for dtype in (None, torch.bfloat16):
            mixing = _sharded(MIXED["opt"], dtype=dtype)
            with pytest.raises(ModelConfigError, match="'opt': documents in one row"):
                ConfiguredModel(mixing).check_documents_apart(vocab_size=VOCAB, device=CPU)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe", "jamba"])
def test_units_are_the_layers(kind: str) -> None:
    model = build_from_config(ALL[kind], seed=0)
    assert all(param.is_meta for param in model.parameters()), "no memory"
    units = sharding_units(model)
    inner = model.transformer.h if kind == "gpt2" else model.model.layers  # type: ignore[union-attr]
    assert units == list(inner)  # type: ignore[arg-type]
    assert len(units) == 2


@pytest.mark.long
def test_units_of_all_families_are_two_layers() -> None:
    for kind, fields in ALL.items():
        units = sharding_units(build_from_config(fields, seed=0))
        names = {type(unit).__name__ for unit in units}
        assert len(units) == 2, kind
        assert all(name.endswith(("Layer", "Block")) for name in names), (kind, names)


def test_a_model_without_a_list_has_no_units() -> None:
    assert sharding_units(nn.Sequential(nn.Linear(2, 2))) == []


def test_a_family_that_cannot_recompute_is_refused() -> None:
    model = build_from_config(_old_sizes("ctrl", dff=48), seed=0)
    with pytest.raises(ModelConfigError, match=r"'ctrl'.*without activation checkpointing"):
        recompute_layers(model)


# Documents in one row


def _check_packed(fields: dict[str, Any]) -> None:
    model = _built(fields).eval()
    tokens = _tokens(2, 20)
    lengths = [7, 1, 12]
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    with torch.no_grad():
        packed = ConfiguredModel(model).logits(tokens, positions)
        alone = [ConfiguredModel(model).logits(part) for part in tokens.split(lengths, dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-5, atol=1e-6)
    ConfiguredModel(model).check_documents_apart(vocab_size=VOCAB, device=CPU)
    ConfiguredModel(model).check_causal(vocab_size=VOCAB, device=CPU)


@pytest.mark.parametrize("kind", APART)
def test_a_packed_row_is_its_documents_alone(kind: str) -> None:
    _check_packed(APART[kind])


@pytest.mark.long
@pytest.mark.parametrize("kind", MORE_APART)
def test_a_packed_row_is_its_documents_alone_in_more_families(kind: str) -> None:
    with quiet():
        _check_packed(MORE_APART[kind])


def _check_mixed(kind: str, said: str) -> None:
    with quiet():
        model = _built(ALL[kind])
    with pytest.raises(ModelConfigError, match=f"model_type '{kind}': {said}"):
        ConfiguredModel(model).check_documents_apart(vocab_size=VOCAB, device=CPU)
    ConfiguredModel(model).check_causal(vocab_size=VOCAB, device=CPU)


@pytest.mark.parametrize("kind", MIXED)
def test_a_family_that_mixes_documents_is_refused(kind: str) -> None:
    _check_mixed(kind, "documents in one row are not kept apart")


@pytest.mark.long
@pytest.mark.parametrize("kind", MORE_MIXED)
def test_more_families_that_mix_documents_are_refused(kind: str) -> None:
    _check_mixed(kind, "documents in one row are not kept apart")


@pytest.mark.parametrize("kind", WITHOUT_POSITIONS)
def test_a_family_that_takes_no_positions_is_refused(kind: str) -> None:
    _check_mixed(kind, "takes no positions")


def test_in_low_precision_experts_are_no_reason_to_refuse() -> None:
    for kind in ("qwen3_moe", "llama"):
        model = _built(APART[kind]).to(torch.bfloat16)
        ConfiguredModel(model).check_documents_apart(vocab_size=VOCAB, device=CPU)
    with pytest.raises(ModelConfigError, match="opt"):
        ConfiguredModel(_built(MIXED["opt"]).bfloat16()).check_documents_apart(
            vocab_size=VOCAB, device=CPU
        )


def test_a_model_that_sees_later_tokens_is_refused() -> None:
    fields = {"model_type": "xlnet", "vocab_size": VOCAB, "d_model": 32, "n_layer": 2}
    model = _built({**fields, "n_head": 4, "d_inner": 48})
    with pytest.raises(ModelConfigError, match="'xlnet': tokens see later ones"):
        ConfiguredModel(model).check_causal(vocab_size=VOCAB, device=CPU)


def test_checks_leave_no_trace() -> None:
    model = _built(_old_sizes("gpt2"))  # with dropout
    model.train()
    model.lm_head.eval()  # type: ignore[operator, union-attr]
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    ConfiguredModel(model).check_documents_apart(vocab_size=VOCAB, device=CPU)
    ConfiguredModel(model).check_causal(vocab_size=VOCAB, device=CPU)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(param.grad is None for param in model.parameters())


def test_rows_of_one_token_cannot_be_checked() -> None:
    with pytest.raises(ModelConfigError, match="vocab_size 1"):
        ConfiguredModel(_built(APART["llama"])).check_documents_apart(vocab_size=1, device=CPU)


# Continued


def _check_continued(model: nn.Module, tokens: torch.Tensor, expected: torch.Tensor) -> None:
    step = ConfiguredModel(model).continuation()
    parts = [step(part) for part in tokens.split([5, 1, 1, 3, 2], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["gpt2", "gemma3_text", "qwen3_moe", "mamba", "bloom"])
def test_a_continued_sequence_has_the_logits_of_the_whole(kind: str) -> None:
    with quiet():
        model = _built(ALL[kind])
        recompute_layers(model)
    tokens = _tokens(2, 12)
    with torch.no_grad():
        expected = ConfiguredModel(model.eval()).logits(tokens)
    model.train()  # and still as in evaluation
    _check_continued(model, tokens, expected)
    assert model.training


@pytest.mark.long
def test_a_continued_sequence_has_the_logits_of_the_whole_in_all_families() -> None:
    tokens = _tokens(2, 12)
    with quiet(), torch.no_grad():
        for fields in ALL.values():
            model = _built(fields).eval()
            _check_continued(model, tokens, ConfiguredModel(model).logits(tokens))


# Operations


def test_operations_of_a_llama_are_those_of_ours() -> None:
    for tied in (False, True):
        sizes = LlamaConfig(
            VOCAB, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, tie_embeddings=tied
        )
        model = build_from_config(APART["llama, tied" if tied else "llama"], seed=0)
        assert ConfiguredModel(model).flops_per_token(seq=50) == sizes.flops_per_token(seq=50)


def test_operations_of_gpt2_are_those_of_its_matrices() -> None:
    model = build_from_config(APART["gpt2"], seed=0)
    weights = 2 * (32 * 96 + 32 * 32 + 2 * 32 * 128) + 32 * VOCAB
    assert ConfiguredModel(model).flops_per_token(seq=10) == 6 * weights + 12 * 2 * 32 * 10


def test_windows_bound_what_is_attended_to() -> None:
    model = build_from_config(APART["gemma3_text"], seed=0)
    short, long = (ConfiguredModel(model).flops_per_token(seq=seq) for seq in (8, 20))
    assert short is not None
    assert long == short + 12 * 32 * 12  # one layer of two sees more than eight tokens


@pytest.mark.parametrize("kind", ["qwen3_moe", "mamba", "lfm2", "jamba", "deepseek_v3"])
def test_operations_that_are_not_known_are_none(kind: str) -> None:
    assert ConfiguredModel(build_from_config(ALL[kind], seed=0)).flops_per_token(seq=8) is None


# Configurations


def test_a_configuration_is_read_from_a_file_or_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(APART["llama"]))
    for path in (tmp_path, tmp_path / "config.json"):
        assert read_model_config(path) == APART["llama"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, r"config\.json: is not there\. Give"),
        ("{", r"is no JSON \(Expecting"),
        ("[]", "model_type|not an object"),
        ('{"hidden_size": 3}', "model_type|not an object"),
        ('{"options": {}, "corpus": {}}', "fullshard train.*--init-from"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelConfigError, match=said):
        read_model_config(tmp_path)


_IMAGES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
REFUSED = {
    "unknown": ({"model_type": "mine", "auto_map": {}}, "'mine': is not known"),
    "encoder": (_sizes("bert"), "'bert': is an encoder.*is_decoder"),
    "both": ({"model_type": "t5"}, "'t5': has an encoder beside"),
    "images": ({"model_type": "vit"}, "'vit': .*no causal language model"),
    "text and images": (
        {"model_type": "gemma3", "text_config": APART["gemma3_text"], "vision_config": _IMAGES},
        "'gemma3': .*more than text.*text_config",
    ),
    "quantised": (
        _sizes("llama", quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}),
        "'llama': .*quantised",
    ),
    "wrong type": (_sizes("llama", hidden_size="wide"), "llama is not one"),
    "wrong name": (
        _sizes("llama", hidden_act="mine"),
        "'llama': Transformers cannot build.*'mine'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_refused(case: str) -> None:
    fields, said = REFUSED[case]
    with quiet(), pytest.raises(ModelConfigError, match=said):
        build_from_config(fields, seed=0)


@pytest.mark.parametrize("kind", ["gemma3", "llava", "mllama", "qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_what_a_refusal_advises_is_taken(kind: str) -> None:
    """Where the part that is text has no model of its own, it is not advised."""
    from transformers import CONFIG_MAPPING

    with quiet():
        fields = json.loads(CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
        with pytest.raises(ModelConfigError, match="more than text") as refused:
            check_trainable(fields)
        if advised := re.search(r"under (\w+) as a config", str(refused.value)):
            check_trainable(fields[advised[1]])


def test_code_that_comes_with_a_model_and_other_ways_to_attend_are_left_out() -> None:
    remote = {"AutoModelForCausalLM": "modeling_mine.Mine", "AutoConfig": "modeling_mine.Config"}
    fields = {**APART["llama"], "auto_map": remote, "attn_implementation": "flash_attention_2"}
    model = _built(fields)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config._attn_implementation == "sdpa"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "counts",
    [
        {"model_type": "llama", "num_hidden_layers": 10**9},
        {"model_type": "llama", "num_hidden_layers": -1},
        {"model_type": "gpt2", "n_layer": 10**6},
        {"model_type": "mixtral", "num_hidden_layers": 5000, "num_local_experts": 5000},
        {"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**9}},
    ],
)
def test_numbers_of_layers_that_no_model_has_are_not_built(counts: dict[str, Any]) -> None:
    with pytest.raises(ModelConfigError, match="layers"):
        build_from_config(counts, seed=0)


def test_without_transformers_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with _no_transformers(monkeypatch):
        with pytest.raises(ModelConfigError, match=r"pip install .*\[huggingface\]"):
            build_from_config(APART["llama"], seed=0)
        assert config_differences({"model_type": "a", "x": 1}, {"model_type": "a"}) == [
            "x is 1, and None in the other"
        ]


@contextlib.contextmanager
def _no_transformers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    with monkeypatch.context() as patch:
        patch.setattr(blueprints.importlib, "import_module", absent)
        yield


def test_configurations_are_compared_by_what_is_computed() -> None:
    fields = APART["llama"]
    stored = {"dtype": "bfloat16", "torch_dtype": "bfloat16", "transformers_version": "4.1"}
    trained = {"eos_token_id": 3, "attention_dropout": 0.1, "initializer_range": 0.1}
    written_out = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "hidden_act": "silu"}
    same = {
        **fields,
        **stored,
        **trained,
        **written_out,
        "architectures": ["X"],
        "use_cache": False,
    }
    assert config_differences(fields, same) == []
    assert config_differences(fields, {**fields, "hidden_act": "gelu", "head_dim": 8}) == [
        "hidden_act is 'silu', and 'gelu' in the other"
    ]
    new_names = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    assert config_differences(
        _old_sizes("gpt2"),
        {"model_type": "gpt2", "vocab_size": VOCAB, "n_positions": 64, **new_names},
    ) == ["n_embd is 32, and 64 in the other"]
    (found,) = config_differences(fields, {**fields, "rope_theta": 500.0})
    assert found.startswith("rope_parameters is")
    assert "'rope_theta': 500.0" in found
    assert config_differences(fields, {**fields, "model_type": "mistral"}) == [
        "model_type is 'llama', and 'mistral' in the other"
    ]
