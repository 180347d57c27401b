"""The model's sizes in the words of Transformers' ``LlamaConfig``, and back. Read without torch."""

from collections.abc import Mapping
from typing import Any

from fullshard.models.sizes import LlamaConfig


def config_fields(config: LlamaConfig, *, num_positions: int) -> dict[str, Any]:
    """Return the fields of ``config.json`` with which ``LlamaForCausalLM`` is the same model.

    num_positions: that it was trained on. No token marks a beginning or an end, as where a byte is a token.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_sizes(config),
        "rope_theta": config.rope_theta,  # where Transformers before 5 looks for it
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": num_positions,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": "float32",
    }


def differences(config: LlamaConfig, fields: Mapping[str, Any]) -> list[str]:
    """Say where the model of a ``config.json`` is another one than that of these sizes."""
    if fields.get("model_type") != "llama":
        return [f"model_type is {fields.get('model_type')!r}, and only 'llama' is known"]
    # What a file may leave out, as Transformers has it.
    given: dict[str, Any] = {
        "num_key_value_heads": fields.get("num_attention_heads"),
        "rms_norm_eps": 1e-6,
    }
    given |= {"tie_word_embeddings": False, "head_dim": config.head_dim}
    given |= {key: value for key, value in fields.items() if value is not None}
    rope = given.get("rope_parameters") or {"rope_theta": given.get("rope_theta", 10_000.0)}
    scaled = rope.get("rope_type", "default") != "default" or fields.get("rope_scaling")
    wanted = _sizes(config)
    found = [
        f"{key} is {given.get(key)}, and {value} here"
        for key, value in wanted.items()
        if given.get(key) != value
    ]
    if rope.get("rope_theta", 10_000.0) != config.rope_theta:
        found.append(f"rope_theta is {rope.get('rope_theta')}, and {config.rope_theta} here")
    if scaled:
        found.append("its rotary positions are scaled, and not here")
    found += [
        f"{key} is true, and false here" for key in ("attention_bias", "mlp_bias") if given.get(key)
    ]
    if given.get("hidden_act", "silu") != "silu":
        found.append(f"hidden_act is {given['hidden_act']}, and silu here")
    return found


def _sizes(config: LlamaConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
    }
