"""Workloads of models: FLOPs, bytes and events, against what real runs of the same models compute and allocate."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from bench.tensor_bytes import LiveTensors
from fullshard.errors import FullshardError
from fullshard.models.configured import build_from_config, recompute_layers
from fullshard.models.llama import Llama
from fullshard.models.sizes import SIZES, LlamaConfig
from fullshard.plan.workload import Enter, Event, Run, Stretch, Work, WorkKind, Workload
from fullshard.planning.traced import (
    Example,
    TraceError,
    TraceOptions,
    build_without_memory,
    default_units,
    token_example,
    trace_workload,
)
from fullshard.policies import MixedPrecisionPolicy
from tests.models import ConvNet, PartlyFrozen, Transformer, mlp

CONFIG = LlamaConfig(512, 64, 160, 4, 4, 2, 10_000.0)
BF16 = MixedPrecisionPolicy(torch.bfloat16)


def runs(workload: Workload) -> list[Stretch]:
    return [workload.stretches[e.stretch] for e in workload.events if isinstance(e, Run)]


def works(workload: Workload) -> Iterator[Work]:
    for stretch in runs(workload):
        yield from stretch.forward + stretch.recomputed + stretch.backward


def peak_nbytes(workload: Workload) -> int:
    """The most that a pass has in use beside parameters, if gradients stay until it is over."""
    level = peak = 0
    for stretch in runs(workload):
        peak = max(peak, level + stretch.forward_peak_nbytes)
        level += stretch.saved_nbytes
    for stretch in reversed(runs(workload)):
        peak = max(peak, level + stretch.recomputed_peak_nbytes)
        within = stretch.recomputed_nbytes + stretch.backward_peak_nbytes
        peak = max(peak, level + within)
        level += stretch.gradient_nbytes - stretch.freed_nbytes
    return peak


class Real(NamedTuple):
    saved_nbytes: int
    peak_nbytes: int


def real_run(model: nn.Module, inputs: Tensor) -> Real:
    """What a run on real tensors has in use after forward, and at most, by somebody else's counting."""
    aside = [inputs, *model.parameters(), *model.buffers()]
    dtype = next(model.parameters()).dtype
    for path in ("", *default_units(model)):  # what the engine's hooks do
        model.get_submodule(path).register_forward_pre_hook(
            lambda _, given: tree_map_only(
                Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, given
            )
        )
    aside_nbytes = sum(each.nbytes for each in aside)
    tensors = LiveTensors(less_nbytes=lambda: aside_nbytes)
    with tensors:
        for _ in range(2):  # what was there before is known from the first on
            tensors.reset_peak()
            loss = _loss(model(inputs))
            saved_nbytes = tensors.live_nbytes() - aside_nbytes
            loss.backward()
            del loss
            inputs.grad = None
            model.zero_grad()
    return Real(saved_nbytes, tensors.peak_nbytes)


class LoRA(nn.Module):
    """A frozen linear layer beside a trained one of low rank."""

    def __init__(self, dim: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(dim, dim, bias=False).requires_grad_(requires_grad=False)
        self.down = nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(rank, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.base(x) + self.up(self.down(x)))


class DenseMoE(nn.Module):
    """Experts that all see all tokens, weighted by a router."""

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
            for _ in range(num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return x + sum(
            w[..., None] * e(x) for w, e in zip(weights.unbind(-1), self.experts, strict=True)
        )


class Stack(nn.Module):
    """Layers one after another, each recomputed in backward if asked for."""

    def __init__(self, layers: list[nn.Module], use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.use_reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.use_reentrant, preserve_rng_state=False)
        return x


def _llama(recompute: bool = False) -> Llama:
    model = Llama(CONFIG)
    model.recompute_layers(recompute)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model


def _tokens() -> Tensor:
    return torch.randint(0, 61, (4, 64))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "llama": (_llama, _tokens),
    "llama recomputed": (lambda: _llama(recompute=True), _tokens),
    "transformer": (lambda: Transformer(dim=64, num_blocks=3, max_seq=64), _tokens),
    "transformer tied": (lambda: Transformer(dim=64, num_blocks=3, max_seq=64, tied=True), _tokens),
    "conv": (ConvNet, lambda: torch.randn(16, 3, 8, 8)),
    "moe": (lambda: Stack([DenseMoE(32, 4) for _ in range(4)]), lambda: torch.randn(64, 32)),
    "lora": (lambda: Stack([LoRA(64, 4) for _ in range(4)]), lambda: torch.randn(32, 64)),
    "partly frozen": (PartlyFrozen, lambda: torch.randn(32, 8)),
    "checkpoint": (
        lambda: Stack([DenseMoE(32, 4) for _ in range(4)], use_reentrant=False),
        lambda: torch.randn(64, 32),
    ),
    "reentrant": (
        lambda: Stack([DenseMoE(32, 4) for _ in range(4)], use_reentrant=True),
        lambda: torch.randn(64, 32, requires_grad=True),
    ),
}


def _loss(outputs: Tensor) -> Tensor:
    return outputs.float().square().mean()


def check_bytes(workload: Workload, model: nn.Module, x: Tensor) -> None:
    real = real_run(model, x)
    assert peak_nbytes(workload) == pytest.approx(real.peak_nbytes, rel=0.01)
    saved_nbytes = sum(s.saved_nbytes for s in runs(workload))
    assert saved_nbytes == pytest.approx(real.saved_nbytes, rel=0.01)
    assert saved_nbytes == sum(s.freed_nbytes for s in runs(workload))
    assert sum(s.gradient_nbytes for s in runs(workload)) == sum(
        p.nbytes for p in model.parameters() if p.requires_grad
    )


@pytest.mark.parametrize("name", CASES)
def test_a_trace_is_like_a_real_run(name: str) -> None:
    make, inputs = CASES[name]
    torch.manual_seed(0)
    model, x = make(), inputs()
    example, options = Example((x,)), TraceOptions(loss=_loss)
    workload = trace_workload(model, example, options=options)
    with_values = dataclasses.replace(options, has_values=True)
    assert trace_workload(model, example, options=with_values) == workload
    assert all(p.device.type == "cpu" and p.grad is None for p in model.parameters())

    with FlopCounterMode(display=False) as counter:
        _loss(model(x)).backward()
    matmuls = [work for work in works(workload) if work.kind is WorkKind.MATMUL]
    # The counter knows the CPU's attention from torch 2.15 on.
    counted = counter.get_flop_counts()["Global"].items()
    others = sum(flops for operator, flops in counted if "attention" not in str(operator))
    assert sum(work.flops * work.count for work in matmuls) == others
    assert all(min(work.shape) > 0 for work in matmuls)

    model.zero_grad()
    x.grad = None
    check_bytes(workload, model, x)


@pytest.mark.parametrize("name", CASES)
def test_bytes_in_bfloat16_are_those_of_a_real_run(name: str) -> None:
    make, inputs = CASES[name]
    torch.manual_seed(0)
    model, x = make(), inputs()
    workload = trace_workload(model, Example((x,)), options=TraceOptions(BF16, loss=_loss))
    check_bytes(workload, model.bfloat16(), x)


class Autocast(Transformer):
    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(tokens)


def test_autocasts_copies_are_activations() -> None:
    model, tokens = Autocast(dim=64, num_blocks=3, max_seq=64), _tokens()
    workload = trace_workload(model, Example((tokens,)), options=TraceOptions(loss=_loss))
    assert peak_nbytes(workload) == pytest.approx(real_run(model, tokens).peak_nbytes, rel=0.01)


def test_a_loop_over_tokens_is_refused_before_it_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Loop(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([super(Loop, self).forward(each) for each in x])

    model, inputs = nn.Sequential(Loop(4, 4)), torch.empty(8, 4)
    trace_workload(model, Example((inputs,)))
    monkeypatch.setattr("fullshard.planning.recorder._MOST_OPERATORS", 4)
    with pytest.raises(TraceError, match=r"^0 \(Loop.*--seq"):
        trace_workload(model, Example((inputs,)))


def test_experts_that_see_what_is_sent_to_them_run_with_values() -> None:
    torch.manual_seed(0)
    model, tokens = Transformer(dim=32, num_blocks=2, max_seq=64, routed=True), _tokens()
    example = Example((tokens,))
    with pytest.raises(TraceError, match=r"blocks\.0\.feed_forward \(MoE,.*--example-input"):
        trace_workload(model, example)
    options = TraceOptions(loss=_loss, has_values=True)
    measured = real_run(model, tokens).peak_nbytes
    assert peak_nbytes(trace_workload(model, example, options=options)) == pytest.approx(
        measured, rel=0.01
    )


# FLOPs


@pytest.mark.parametrize("recompute", [False, True])
def test_model_flops_are_those_of_the_closed_form(recompute: bool) -> None:
    model = build_without_memory(lambda: Llama(SIZES["125m"]))
    model.recompute_layers(recompute)
    workload = trace_workload(model, token_example(model, batch=2, seq=256))
    assert workload.tokens == 512
    assert workload.model_flops == 512 * SIZES["125m"].flops_per_token(seq=256)


def test_causal_attention_computes_half_of_the_scores() -> None:
    model = build_without_memory(lambda: Llama(CONFIG))
    workload = trace_workload(model, token_example(model, batch=2, seq=32))
    forward = [w for s in runs(workload) for w in s.forward if w.kind is WorkKind.ATTENTION]
    backward = [w for s in runs(workload) for w in s.backward if w.kind is WorkKind.ATTENTION]
    assert [w.shape for w in forward] == [(2 * 4, 32, 16)] * CONFIG.num_layers
    product = 2 * 2 * 4 * 32 * 32 * 16  # two matmuls forward, five backward; half of each
    assert {w.flops for w in forward} == {2 * product / 2}
    assert {w.flops for w in backward} == {5 * product / 2}


def test_bytes_are_what_a_kernel_reads_and_writes() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(1000, 8)
            self.linear = nn.Linear(8, 16, bias=False)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.linear(self.embedding(tokens).view(-1, 8)).relu()

    tokens = torch.zeros(2, 5, dtype=torch.int64)
    workload = trace_workload(Model(), Example((tokens,)), options=TraceOptions(loss=_loss))
    seen = {work.name: work for work in runs(workload)[0].forward}
    assert seen["embedding"].nbytes == 10 * 8 + 2 * 10 * 8 * 4  # not the whole table
    assert seen["mm"].nbytes == 4 * (10 * 8 + 8 * 16 + 10 * 16)
    assert seen["mm"].shape == (10, 16, 8)
    assert seen["relu"].nbytes == 2 * 4 * 10 * 16
    assert "view" not in seen
    assert "t" not in seen


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.query, self.key, self.value = (
            nn.Linear(64, 64 // n) for n in (1, options.pop("shared", 1), 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            each(x).unflatten(-1, (-1, 16)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        return F.scaled_dot_product_attention(query, key, value, **self.options)


@pytest.mark.parametrize(
    ("options", "dtype", "kernel"),
    [
        ({"is_causal": True}, torch.bfloat16, "flash"),
        ({"is_causal": True, "dropout_p": 0.1}, torch.bfloat16, "flash"),
        ({"is_causal": True}, None, "efficient"),
        ({"attn_mask": torch.ones(32, 32, dtype=torch.bool)}, torch.bfloat16, "efficient"),
    ],
)
def test_attention_is_in_one_kernel_on_a_gpu(
    options: dict[str, Any], dtype: torch.dtype | None, kernel: str
) -> None:
    trace = TraceOptions(MixedPrecisionPolicy(dtype), loss=_loss, attends_as_gpu=True)
    example = Example((torch.empty(2, 32, 64, device="meta"),))
    workload = trace_workload(Stack([Attention(**options)], False), example, options=trace)
    attention = [work for work in works(workload) if work.kind is WorkKind.ATTENTION]
    assert [kernel in work.name for work in attention] == [True, True, True]
    assert {work.shape for work in attention} == {(2 * 4, 32, 16)}
    scores_nbytes = 2 * 4 * 32 * 32 * 2
    if "attn_mask" not in options:
        assert (
            sum(s.saved_nbytes for s in runs(workload))
            < 6 * 2 * 32 * 64 * 4
            < 6 * scores_nbytes * 2
        )


@pytest.mark.parametrize("options", [{}, {"enable_gqa": True}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_heads_that_do_not_fit_are_refused(
    options: dict[str, Any], dtype: torch.dtype | None
) -> None:
    attention = Attention(**options)
    attention.key = attention.value = nn.Linear(64, 48)
    trace = TraceOptions(MixedPrecisionPolicy(dtype), loss=_loss, attends_as_gpu=True)
    with pytest.raises(TraceError, match="Attention"):
        trace_workload(
            Stack([attention], False),
            Example((torch.empty(2, 32, 64, device="meta"),)),
            options=trace,
        )


# Units


def unit_events(workload: Workload) -> list[tuple[str, str]]:
    names = [unit.name for unit in workload.units]
    return [
        (type(event).__name__, names[event.unit])
        for event in workload.events
        if not isinstance(event, Run)
    ]


def test_units_are_the_repeated_layers_and_tied_weights_are_the_roots() -> None:
    model = Transformer(dim=16, num_blocks=3, tied=True)
    workload = trace_workload(
        model, token_example(model, batch=2, seq=8), options=TraceOptions(BF16)
    )
    assert [unit.name for unit in workload.units] == ["", "blocks.0", "blocks.1", "blocks.2"]
    root = workload.units[0].params
    assert {spec.name for spec in root} == {"position", "embed.weight", "norm.weight", "norm.bias"}
    assert {(spec.dtype, spec.compute_dtype) for spec in root} == {(torch.float32, torch.bfloat16)}
    first, *_, last = workload.events
    assert first == Enter(0, is_differentiable=False)  # numbers of tokens
    assert last == Run(len(workload.stretches) - 1, -1)  # the loss
    assert unit_events(workload)[1:3] == [("Enter", "blocks.0"), ("Leave", "blocks.0")]
    assert sum(len(unit.params) for unit in workload.units) == len(list(model.parameters()))


def _conv(before: int, after: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(before, after, 3), nn.BatchNorm2d(after), nn.ReLU())


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(mlp(1, 8) for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        return x


ROWS: dict[str, tuple[nn.Module, list[str]]] = {
    "linear": (nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), ["0", "1", "2"]),
    "encoder layers": (
        nn.Sequential(*(nn.TransformerEncoderLayer(8, 2) for _ in range(3))),
        ["0", "1", "2"],
    ),
    "within a model": (nn.Sequential(nn.Embedding(9, 8), mlp(2, 8)), ["1.0", "1.1"]),
    "blocks of blocks": (
        nn.Sequential(
            nn.Embedding(9, 8),
            *(nn.Sequential(LoRA(8, 2), nn.GELU(), LoRA(8, 2)) for _ in range(3)),
            nn.Linear(8, 8),
        ),
        ["1", "2", "3"],
    ),
    "growing convolutions": (
        nn.Sequential(_conv(3, 8), _conv(8, 16), nn.Flatten(), nn.Linear(16, 2)),
        ["0", "1"],
    ),
    "two stages": (
        nn.Sequential(mlp(9, 8), mlp(9, 8)),
        [f"{stage}.{layer}" for stage in range(2) for layer in range(9)],
    ),
    "an encoder and a decoder": (
        nn.Sequential(Stack([LoRA(8, 2), LoRA(8, 2)]), Stack([DenseMoE(8, 2), DenseMoE(8, 2)])),
        ["0.layers.0", "0.layers.1", "1.layers.0", "1.layers.1"],
    ),
    "of experts": (nn.Sequential(Experts(), Experts(), Experts(), Experts()), ["0", "1", "2", "3"]),
    "a small list beside": (
        nn.Sequential(mlp(4, 32), Stack([nn.Linear(32, 2), nn.Linear(32, 2)])),
        ["0.0", "0.1", "0.2", "0.3"],
    ),
    "nothing repeated": (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8)), []),
}


@pytest.mark.parametrize("name", ROWS)
def test_units_are_found_in_rows_of_any_modules(name: str) -> None:
    model, units = ROWS[name]
    assert default_units(model) == units


class Nested(nn.Module):
    """A layer that is a unit with a unit inside, called twice, and one that is not called. Returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
        self.unused = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"out": (self.outer(self.outer(x)), "said")}


def test_layers_behind_inputs_that_need_no_gradient_may_be_frozen() -> None:
    model = Stack([mlp(1, 8) for _ in range(4)])
    model.layers[:2].requires_grad_(False)
    layers = runs(trace_workload(model, EXAMPLE))[:4]
    assert [bool(each.forward) for each in layers] == [True] * 4
    assert [bool(each.backward) for each in layers] == [False, False, True, True]


def test_units_may_be_nested_called_twice_or_not_at_all() -> None:
    units = ["outer.1", "outer", "unused"]
    example = Example((torch.zeros(4, 8),))
    workload = trace_workload(Nested(), example, units=units)
    assert [unit.name for unit in workload.units] == ["", "outer", "outer.1", "unused"]
    call = [("Enter", "outer"), ("Enter", "outer.1"), ("Leave", "outer.1"), ("Leave", "outer")]
    assert unit_events(workload) == [("Enter", ""), *call, *call, ("Leave", "")]
    entered = [event.is_differentiable for event in workload.events if isinstance(event, Enter)]
    assert entered == [False, False, True, True, True]
    linear = 4 * (8 * 8 + 8)
    # Autograd leaves a gradient once it is whole: in the backward of the first call.
    assert [stretch.gradient_nbytes for stretch in runs(workload)] == [linear, linear, 0, 0, 0]
    assert workload.input_nbytes == 4 * 8 * 4


class Parts(Stack):
    """Layers with something of the root's between them; the last is read, and not called."""

    def __init__(self, num: int, *, reads: bool = False) -> None:
        super().__init__([nn.Linear(8, 8) for _ in range(num)])
        self.scale = nn.Parameter(torch.ones(8))
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x * self.scale)
        last = self.layers[-1]
        return x @ last.weight if self.reads else x


def test_a_unit_of_several_modules_runs_from_the_first_to_the_last() -> None:
    layers = [f"layers.{n}" for n in range(4)]
    units = [[layers[2], layers[0]], [*layers[1:2]], layers[3]]
    workload = trace_workload(Parts(4), Example((torch.zeros(4, 8),)), units=units)
    ends = "layers.0, layers.2"
    assert [unit.name for unit in workload.units] == ["", ends, "layers.1", "layers.3"]
    assert [len(unit.params) for unit in workload.units] == [1, 4, 2, 2]
    middle = [("Enter", "layers.1"), ("Leave", "layers.1")]
    assert unit_events(workload)[1:-1] == [("Enter", ends), *middle, ("Leave", ends)]
    assert [e.unit for e in workload.events if isinstance(e, Run)][:5] == [0, 1, 0, 2, 0]
    assert workload.running == {0, 1, 2}


def test_what_gets_no_gradient_is_not_used() -> None:
    example, units = Example((torch.zeros(4, 8),)), ["layers.0", "layers.1"]
    workload = trace_workload(Parts(3), example, units=units)  # the last layer is the root's
    unused = [spec.name for unit in workload.units for spec in unit.params if not spec.is_used]
    assert unused == ["layers.2.weight", "layers.2.bias"]
    with_values = trace_workload(
        Parts(3), example, units=units, options=TraceOptions(has_values=True)
    )
    assert all(spec.is_used for unit in with_values.units for spec in unit.params)


def unrolled(workload: Workload) -> list[Event | Stretch]:
    return [workload.stretches[e.stretch] if isinstance(e, Run) else e for e in workload.events]


FAMILY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 6},
    "gpt_oss": {
        "num_hidden_layers": 8,
        "head_dim": 8,
        "num_local_experts": 4,
    },  # two kinds of layers
    "qwen3_moe": {
        "num_hidden_layers": 6,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_layers_are_traced_once_and_counted_each_time(family: str, recompute: bool) -> None:
    fields = {"model_type": family, **FAMILY, **FAMILIES[family]}
    model = build_from_config(fields, seed=0).train()
    if recompute:
        recompute_layers(model)
    example = token_example(model, batch=2, seq=16)
    one = trace_workload(model, example)
    whole = trace_workload(model, example, options=TraceOptions(reuses_equal=False))
    assert len(one.stretches) < len(whole.stretches)
    assert unrolled(one) == unrolled(whole)
    assert one.model_flops == whole.model_flops


class Wide(nn.Module):
    """Keeps a copy of its input for the backward, and not the input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x.double()).float()


class Remembering(Stack):
    """Adds what all layers have returned: none of it may be left out."""

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for layer in self.layers:
            x = layer(x)
            seen.append(x)
        return torch.stack(seen)


class Twice(Stack):
    """Calls its layers once more: autograd adds up both gradients of each."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class InTurn(Stack):
    """Every second layer is recomputed in backward."""

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if number % 2 else layer(x)
        return x


def _nested() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)))


# A model, which modules inside its layers are units too, and whether any of them need no trace.
LAYERS: dict[str, tuple[Callable[[], nn.Module], str, bool]] = {
    "alike": (lambda: Stack([Wide() for _ in range(5)]), "", True),
    "whose outputs are kept": (lambda: Remembering([Wide() for _ in range(5)]), "", False),
    "called twice": (lambda: Twice([Wide() for _ in range(5)]), "", False),
    "with units inside": (lambda: Stack([_nested() for _ in range(5)]), r"\d\.1", True),
    "with a unit inside one": (lambda: Stack([_nested() for _ in range(6)]), r"4\.1", True),
    "recomputed in turn": (lambda: InTurn([mlp(2, 8) for _ in range(8)]), "", False),
    "of two sizes in turn": (
        lambda: Stack([nn.Linear(8 + 8 * (n % 2), 16 - 8 * (n % 2)) for n in range(8)]),
        "",
        False,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_left_out_where_that_changes_nothing(name: str) -> None:
    make, inside, is_left_out = LAYERS[name]
    torch.manual_seed(0)
    model, example = make(), Example((torch.zeros(4, 8),))
    pattern = rf"layers\.(\d|{inside})"
    units = [path for path, _ in model.named_modules() if re.fullmatch(pattern, path)]
    one, whole = (
        trace_workload(model, example, units=units, options=TraceOptions(reuses_equal=reuses))
        for reuses in (True, False)
    )
    assert (len(one.stretches) < len(whole.stretches)) is is_left_out
    assert unrolled(one) == unrolled(whole)
    assert one.units == whole.units
    assert all(spec.is_used for unit in one.units for spec in unit.params)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_units_are_entered_again(use_reentrant: bool) -> None:
    layers: list[nn.Module] = [DenseMoE(32, 2) for _ in range(5)]
    x = torch.randn(64, 32, requires_grad=True)
    units = [f"layers.{i}" for i in range(5)]
    options = TraceOptions(loss=_loss)
    kept = trace_workload(Stack(layers), Example((x,)), units=units, options=options)
    again = trace_workload(
        Stack(layers, use_reentrant), Example((x,)), units=units, options=options
    )
    assert [unit.recomputes for unit in again.units] == [False] + 5 * [True]
    assert not any(unit.recomputes for unit in kept.units)
    whole = dataclasses.replace(options, reuses_equal=False)
    traced = trace_workload(Stack(layers, use_reentrant), Example((x,)), units=units, options=whole)
    assert unrolled(again) == unrolled(traced)
    matmuls = [
        sum(w.count for w in works_ if w.kind is WorkKind.MATMUL)
        for stretch in runs(again)
        for works_ in (stretch.forward, stretch.recomputed)
    ]
    # All but the last matmul's output is needed: without a reentrant checkpoint it is not computed again.
    assert matmuls[:2] == [5, 5]
    assert again.model_flops == kept.model_flops
    assert sum(s.saved_nbytes for s in runs(again)) < sum(s.saved_nbytes for s in runs(kept)) / 4


def test_a_model_of_80_layers_is_traced_on_the_meta_device() -> None:
    config = LlamaConfig(128_256, 8192, 28_672, 80, 64, 8, 500_000.0)
    model = build_without_memory(lambda: Llama(config))
    options = TraceOptions(BF16)
    workload = trace_workload(model, token_example(model, batch=1, seq=4096), options=options)
    assert len(workload.units) == 81
    assert workload.model_flops == 4096 * config.flops_per_token(seq=4096)
    assert len(workload.stretches) <= 5
    assert workload.running is workload.running  # it is asked for each parameter


# What cannot be traced


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else x


class ReadsInConstructor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8))
        self.inner.append(Reader())


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(3).tolist()


EXAMPLE = Example((torch.zeros(4, 8),))


def breaks(output: Tensor) -> Tensor:
    raise KeyError("mask")


class CutOff(Stack):
    """Layers that reentrant checkpoints compute, of inputs without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


class Scaled(Stack):
    def __init__(self) -> None:
        super().__init__([nn.Linear(8, 8)])
        self.scale = nn.Parameter(torch.tensor(1.0))


def _quantized() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8))
    weight = TwoTensor(torch.zeros(8, 8), torch.zeros(8, 8))
    model[0].weight = nn.Parameter(weight)
    return model


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: trace_workload(Stack([mlp(1, 8), Branches()]), EXAMPLE),
            r"layers\.1 \(Branches,",
        ),
        (lambda: trace_workload(Stack([nn.Linear(9, 8)]), EXAMPLE), r"layers\.0 \(Linear,"),
        (lambda: trace_workload(mlp(3, 8), EXAMPLE, units=["5", "0"]), r"no module 5"),
        (lambda: trace_workload(Stack([]), EXAMPLE, units=["layers"]), r"layers \(ModuleList\)"),
        (lambda: trace_workload(mlp(1, 8).requires_grad_(False), EXAMPLE), "unfreeze"),
        (lambda: trace_workload(CutOff([mlp(1, 8)]), EXAMPLE), "use_reentrant=False"),
        (lambda: trace_workload(Scaled(), EXAMPLE), "^scale has no dimensions"),
        (
            lambda: trace_workload(
                Stack([nn.Embedding(4, 8, sparse=True)]),
                Example((torch.zeros(4, dtype=torch.int64),)),
            ),
            r"sparse_coo.*sparse=False",
        ),
        (lambda: trace_workload(mlp(1, 8), Example()), "no tensors"),
        (lambda: trace_workload(mlp(3, 8), EXAMPLE, units=[["0", "2"], "2"]), "2 is in two units"),
        (lambda: trace_workload(mlp(3, 8), EXAMPLE, units=["2", "2"]), "2 is in two units"),
        (lambda: trace_workload(mlp(3, 8), EXAMPLE, units=[[]]), "no modules"),
        (
            lambda: trace_workload(Parts(2), EXAMPLE, units=[["layers.0", "layers.1"]]),
            r"layers\.1 did not run",
        ),
        (
            lambda: trace_workload(Parts(2, reads=True), EXAMPLE, units=["layers.0", "layers.1"]),
            r"layers\.1\.weight is used",
        ),
        (lambda: trace_workload(_quantized(), EXAMPLE), "0.weight is a TwoTensor"),
        (
            lambda: trace_workload(mlp(1, 8), EXAMPLE, options=TraceOptions(loss=lambda x: x)),
            r"given as the loss, returned a tensor of shape \(",
        ),
        (
            lambda: trace_workload(mlp(1, 8), EXAMPLE, options=TraceOptions(loss=breaks)),
            r"^breaks \(test_traced.*given as the loss, raised KeyError: 'mask'",
        ),
        (
            lambda: trace_workload(
                mlp(1, 8), EXAMPLE, options=TraceOptions(loss=lambda x: x.detach().sum())
            ),
            "The loss depends on no parameter that is trained",
        ),
        (lambda: token_example(mlp(1, 8), batch=0, seq=4), "batch=0"),
        (lambda: build_without_memory(ReadsInConstructor), r"ReadsInConstructor > Reader"),
        (
            lambda: trace_workload(
                build_without_memory(lambda: mlp(1, 8)),
                EXAMPLE,
                options=TraceOptions(has_values=True),
            ),
            "on the meta device",
        ),
    ],
)
def test_what_cannot_be_traced_is_named(call: Callable[[], object], said: str) -> None:
    with pytest.raises(FullshardError, match=said):
        call()


def test_a_model_is_left_as_it_was() -> None:
    model = Transformer(tied=True)
    before = {name: id(value) for name, value in model.named_parameters()}
    with pytest.raises(TraceError):
        trace_workload(model, Example((torch.zeros(2, 99, dtype=torch.int64),)))
    trace_workload(model, Example((torch.zeros(2, 8, dtype=torch.int64),)))
    assert {name: id(value) for name, value in model.named_parameters()} == before
    assert model.head.weight is model.embed.weight
    assert all("forward" not in vars(module) for module in model.modules())
    model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
    assert type(model.position.grad) is Tensor
