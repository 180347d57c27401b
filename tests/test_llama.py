"""The model that `fullshard train` trains: names, shapes, values, causality, generation."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from fullshard.models.generation import generate
from fullshard.models.llama import KeyValueCache, Llama, continuation, init_weights
from fullshard.models.sizes import SIZES, LlamaConfig

TINY = SIZES["tiny"]


def build(config: LlamaConfig = TINY, *, seed: int = 0) -> Llama:
    model = Llama(config)
    init_weights(model, seed=seed)
    return model


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))


def test_names_and_shapes_are_those_of_hugging_face() -> None:
    shapes = {name: tuple(value.shape) for name, value in build().state_dict().items()}
    layer = {
        "input_layernorm.weight": (64,),
        "mlp.down_proj.weight": (64, 128),
        "mlp.gate_proj.weight": (128, 64),
        "mlp.up_proj.weight": (128, 64),
        "post_attention_layernorm.weight": (64,),
        "self_attn.k_proj.weight": (32, 64),
        "self_attn.o_proj.weight": (64, 64),
        "self_attn.q_proj.weight": (64, 64),
        "self_attn.v_proj.weight": (32, 64),
    }
    expected = {f"model.layers.{i}.{name}": s for i in (0, 1) for name, s in layer.items()}
    expected |= {"model.embed_tokens.weight": (256, 64), "lm_head.weight": (256, 64)}
    expected |= {"model.norm.weight": (64,)}
    assert shapes == expected


@pytest.mark.parametrize("name", [name for name in SIZES if name != "tiny"])
def test_sizes_are_named_by_their_parameters(name: str) -> None:
    with torch.device("meta"):
        model = Llama(SIZES[name])
    count = sum(param.numel() for param in model.parameters())
    unit = {"m": 1e6, "b": 1e9}[name[-1]]
    # The published sizes count a vocabulary of 128k tokens, hence 15 %.
    assert count == pytest.approx(float(name[:-1]) * unit, rel=0.15)


@pytest.mark.parametrize("tie", [False, True])
def test_built_on_meta_it_has_the_bits_of_the_eager_model(tie: bool) -> None:
    config = dataclasses.replace(TINY, tie_embeddings=tie)
    eager = build(config)
    with torch.device("meta"):
        model = Llama(config)
    model.to_empty(device="cpu")
    model.tie_weights()
    init_weights(model, seed=0)
    assert list(eager.state_dict()) == list(model.state_dict())
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    x = tokens(1, 8)
    assert torch.equal(model(x), eager(x)), "the rotary buffers are recomputed as well"


def test_weights_depend_on_seed_and_name_alone() -> None:
    torch.manual_seed(5)
    first = build(seed=3).state_dict()
    torch.manual_seed(6)
    second = build(seed=3).state_dict()
    other = build(seed=4).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    names = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight")
    assert not torch.equal(first[names[0]], first[names[1]])


def test_tied_weights_are_one_parameter() -> None:
    model = build(dataclasses.replace(TINY, tie_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_no_position_sees_a_later_one() -> None:
    model = build()
    x = tokens(1, 12)
    changed = x.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_rotary_positions_make_order_matter() -> None:
    model = build()
    forward = model(torch.tensor([[1, 2, 3, 4]]))[0, -1]
    swapped = model(torch.tensor([[2, 1, 3, 4]]))[0, -1]
    assert not torch.allclose(forward, swapped)


def test_attention_equals_its_definition() -> None:
    """Grouped heads and half-split rotation, written out for one layer in float64."""
    model = build().double()
    attention = model.model.layers[0].self_attn
    x = torch.randn(1, 5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rotation = model.model.rotary_emb(torch.arange(5))
    q, k, v = (
        project(x).view(5, -1, 16).transpose(0, 1)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )

    def rotate(heads: torch.Tensor) -> torch.Tensor:
        out = heads.clone()
        for position in range(5):
            for i in range(8):
                angle = torch.tensor(position * 10_000.0 ** (-i / 8), dtype=torch.float64)
                a, b = heads[:, position, i], heads[:, position, i + 8]
                out[:, position, i] = a * angle.cos() - b * angle.sin()
                out[:, position, i + 8] = b * angle.cos() + a * angle.sin()
        return out

    q, k = rotate(q), rotate(k)
    heads = []
    for head in range(4):
        scores = q[head] @ k[head // 2].T / 4
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        heads.append(scores.softmax(-1) @ v[head // 2])
    expected = attention.o_proj(torch.cat(heads, dim=-1))
    # The model rotates in float32 whatever the dtype is.
    torch.testing.assert_close(attention(x, rotation, None)[0], expected, rtol=1e-5, atol=1e-5)


def test_recomputing_layers_changes_no_gradient() -> None:
    x = tokens(2, 9)
    gradients = []
    for recompute in (False, True):
        model = build()
        model.recompute_layers(recompute)
        F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).backward()
        gradients.append([param.grad for param in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_generation_with_a_cache_equals_generation_without() -> None:
    model = build()
    prompt = tokens(1, 6)
    sequence = prompt
    for token in generate(continuation(model), prompt, length=10, temperature=0):
        assert token.item() == model(sequence)[0, -1].argmax().item()
        sequence = torch.cat((sequence, token), dim=1)
    assert sequence.shape == (1, 16)


def test_generation_repeats_for_a_seed() -> None:
    model = build()

    def sample(seed: int) -> list[int]:
        return [int(t) for t in generate(continuation(model), tokens(1, 4), length=12, seed=seed)]

    assert sample(1) == sample(1) != sample(2)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        next(generate(continuation(build()), torch.empty(1, 0, dtype=torch.long), length=1))


def test_two_tokens_after_a_filled_cache_are_refused() -> None:
    model = build()
    caches = [KeyValueCache() for _ in range(TINY.num_layers)]
    model(tokens(1, 3), caches)
    with pytest.raises(ValueError, match="one token at a time"):
        model(tokens(1, 2), caches)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [({"hidden_size": 65}, "an even head size"), ({"num_kv_heads": 3}, "not a multiple")],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(TINY, **sizes)


class TestPackedDocuments:
    """Rows of several documents, told apart by positions that count from 0 in each."""

    LENGTHS = (5, 1, 7, 3)

    def _positions(self) -> torch.Tensor:
        row = torch.cat([torch.arange(length) for length in self.LENGTHS])
        whole = torch.arange(sum(self.LENGTHS))  # the second row is one document
        return torch.stack((row, whole))

    @pytest.mark.parametrize("recompute", [False, True])
    def test_each_is_as_if_it_were_alone(self, recompute: bool) -> None:
        model = build()
        model.recompute_layers(recompute)
        given = tokens(2, sum(self.LENGTHS))
        packed = model(given, positions=self._positions())
        start = 0
        for length in self.LENGTHS:
            alone = model(given[:1, start : start + length])
            torch.testing.assert_close(packed[:1, start : start + length], alone)
            start += length
        torch.testing.assert_close(packed[1:], model(given[1:]))

    def test_gradients_are_those_of_documents_alone(self) -> None:
        model = build()
        given = tokens(1, sum(self.LENGTHS))
        model(given, positions=self._positions()[:1]).square().sum().backward()
        packed = {name: param.grad.clone() for name, param in model.named_parameters()}
        model.zero_grad()
        for part in given.split(self.LENGTHS, dim=1):
            model(part).square().sum().backward()
        for name, param in model.named_parameters():
            torch.testing.assert_close(packed[name], param.grad, rtol=1e-4, atol=1e-4)
