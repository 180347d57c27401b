"""Make workloads from the sizes of a transformer alone, without building it.

For what has no module: a shape on the command line, the rows of a table of published runs. Counts are those of one
rank, which may hold a part of each matrix (tensor parallel), of each sequence (context parallel) or of the layers
(pipeline parallel). `planning.traced` does the same from a module, and a test compares the two.

What a layer moves and keeps depends on how it is written, so that is a value: `Kernels`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import torch

from fullshard.errors import FullshardError
from fullshard.plan.layout import ParamSpec
from fullshard.plan.workload import (
    Enter,
    Event,
    Leave,
    Run,
    Stretch,
    Work,
    WorkKind,
    Workload,
    WorkloadUnit,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Experts:
    """The experts that take the place of a layer's MLP.

    num: of them, of which each token visits `top_k` and all `num_shared`. ffn_hidden: width of one.
    num_dense_layers: how many layers have an MLP as before.
    """

    num: int
    top_k: int
    ffn_hidden: int
    num_shared: int = 0
    num_dense_layers: int = 0


_MOST_LAYERS = 10_000  # a plan goes through all of them, many times


class ShapeError(FullshardError, ValueError):
    """Sizes of which no plan is made."""


@dataclasses.dataclass(frozen=True, slots=True)
class TransformerShape:
    """Sizes of a decoder. Raises ShapeError for too many layers.

    gated_mlp: three matrices in the MLP (SwiGLU); else two (GELU). kv_lora_rank: of multi-head latent attention, 0
    without it; its heads then have 64 dims more for rotary positions, which all of them share in keys.
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    ffn_hidden: int
    vocab: int
    head_dim: int
    tied_embeddings: bool = False
    gated_mlp: bool = True
    kv_lora_rank: int = 0
    experts: Experts | None = None

    def __post_init__(self) -> None:
        if self.num_layers > _MOST_LAYERS:
            raise ShapeError(f"{self.num_layers} layers: plans are of at most {_MOST_LAYERS:,}.")

    @property
    def num_params(self) -> int:
        """Elements of all parameters."""
        blocks = sum(_numel(_matrices(self, layer)) for layer in range(self.num_layers))
        norms = (2 * self.num_layers + 1) * self.hidden
        return blocks + norms + self.hidden * self.vocab * (1 if self.tied_embeddings else 2)

    @property
    def num_active_params(self) -> int:
        """Weights that a token is multiplied with, the output embedding among them."""
        blocks = sum(
            m.rows * m.columns * m.visits
            for layer in range(self.num_layers)
            for m in _matrices(self, layer)
        )
        return blocks + self.hidden * self.vocab

    def model_flops(self, tokens: int, seq: int) -> float:
        """Return the operations of forward and backward: six a weight and token, and attention.

        Attention counts 12 x layers x heads x head size x sequence a token, as published figures do, which do not
        halve it for its mask. Source: arXiv 2204.02311, appendix B.
        """
        attention = 12 * self.num_layers * self.num_heads * self.head_dim * seq
        return tokens * (6.0 * self.num_active_params + attention)


class Matrix(NamedTuple):
    """Weights (rows, columns) of a linear layer.

    visits: how many of them a token is multiplied with. num: how many there are. is_output: its input is what
    tensor parallelism divides.
    """

    name: str
    rows: int
    columns: int
    visits: int = 1
    num: int = 1
    is_output: bool = False


def _numel(matrices: tuple[Matrix, ...]) -> int:
    return sum(m.rows * m.columns * m.num for m in matrices)


@functools.cache
def _matrices(shape: TransformerShape, layer: int) -> tuple[Matrix, ...]:
    hidden, queries, keys = (
        shape.hidden,
        shape.num_heads * shape.head_dim,
        shape.num_kv_heads * shape.head_dim,
    )
    if shape.kv_lora_rank:
        attention = (
            Matrix("q", queries + shape.num_heads * _ROTARY, hidden),
            Matrix("kv_down", shape.kv_lora_rank + _ROTARY, hidden),
            Matrix("kv_up", 2 * queries, shape.kv_lora_rank),
            Matrix("o", hidden, queries, is_output=True),
        )
    else:
        attention = (
            Matrix("q", queries, hidden),
            Matrix("k", keys, hidden),
            Matrix("v", keys, hidden),
            Matrix("o", hidden, queries, is_output=True),
        )
    experts = shape.experts
    num_in = 2 if shape.gated_mlp else 1
    if experts is None or layer < experts.num_dense_layers:
        return (
            *attention,
            *(Matrix(f"in{n}", shape.ffn_hidden, hidden) for n in range(num_in)),
            Matrix("out", hidden, shape.ffn_hidden, is_output=True),
        )
    width, visits = experts.ffn_hidden, experts.top_k + experts.num_shared
    num = experts.num + experts.num_shared
    return (
        *attention,
        Matrix("router", experts.num, hidden),
        *(Matrix(f"experts.in{n}", width, hidden, visits, num) for n in range(num_in)),
        Matrix("experts.out", hidden, width, visits, num, is_output=True),
    )


_ROTARY = 64


class Loss(NamedTuple):
    """Bytes for each element of the logits: kept from forward to backward, and the most at once, in backward."""

    kept: float
    peak: float

    def of(self, dtype: torch.dtype) -> "Loss":
        """Return the same of logits in a dtype: in float32, what is kept in 16 bits takes twice as much."""
        is_wide = dtype == torch.float32 and self.kept < _FLOAT_NBYTES
        return Loss(2 * self.kept, 2 * self.peak) if is_wide else self


_FLOAT_NBYTES = 4


# By single operators: the log-softmax in float32; in backward its gradient and that of its input.
WHOLE_LOSS = Loss(4.0, 12.0)
# The same where the model returns its logits in float32, which stay.
RETURNED_LOSS = Loss(8.0, 16.0)
# The same of logits that tensor parallelism divides: more operators make their gradient, and in 16 bits they stay.
PARALLEL_LOSS = Loss(4.0, 18.0)
# By a compiler: the logits in 16 bits, and their gradient.
COMPILED_LOSS = Loss(2.0, 4.0)
# Of programs that install FlashAttention, which brings one in place (8) that many leave (12); a GPT's logits are in 16
# bits. Of programs with kernels in Triton, in place.
FLASH_LOSS, FLASH_GPT_LOSS, TRITON_LOSS = Loss(4.0, 9.5), Loss(2.0, 7.5), Loss(2.0, 4.0)
# In parts, each with the last layer: a few of all logits at once.
CHUNKED_LOSS = Loss(0.0, 1.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Kernels:
    """How the part of a layer that is no matrix product is written: bytes an element, in bfloat16.

    moved: read and written by a forward; a backward moves twice as much. kept: for backward.
    norm, residual: of the hidden size. rotary: of queries and keys. gate: of the width of the MLP.
    loss_moved: an element of the logits, in forward and backward together. loss: what it holds.
    num_launched: kernels of a layer's forward that are no matrix product.
    keeps_unread: recomputation that keeps a product keeps it though no backward reads it, as the last one of a layer.
    """

    norm_moved: float
    norm_kept: float
    residual_moved: float
    rotary_moved: float
    gate_moved: float
    gate_kept: float
    loss_moved: float
    loss: Loss
    num_launched: int
    keeps_unread: bool = True


# Every operator of its own, norms and the loss in float32.
EAGER = Kernels(
    norm_moved=30.0,
    norm_kept=6.0,
    residual_moved=6.0,
    rotary_moved=20.0,
    gate_moved=10.0,
    gate_kept=6.0,
    loss_moved=40.0,
    loss=WHOLE_LOSS,
    num_launched=30,
)
# The same with layer norms, which are one kernel, no rotary positions, and a GELU.
EAGER_GELU = Kernels(
    norm_moved=8.0,
    norm_kept=2.0,
    residual_moved=6.0,
    rotary_moved=4.0,
    gate_moved=4.0,
    gate_kept=2.0,
    loss_moved=40.0,
    loss=WHOLE_LOSS,
    num_launched=12,
)
# Neighbours in one kernel, as a compiler makes them, but not in the loss: the bytes that TorchInductor counts of a layer.
FUSED = Kernels(
    norm_moved=9.0,
    norm_kept=2.0,
    residual_moved=4.0,
    rotary_moved=4.0,
    gate_moved=6.0,
    gate_kept=4.0,
    loss_moved=16.0,
    loss=WHOLE_LOSS,
    num_launched=8,
    keeps_unread=False,
)
FUSED_GELU = dataclasses.replace(
    FUSED, norm_moved=5.0, rotary_moved=0.0, gate_moved=4.0, gate_kept=2.0, num_launched=4
)


# Single operators in float32: norms, rotary positions and the loss are so anyway, and nothing is cast.
EAGER_FLOAT = dataclasses.replace(
    EAGER,
    norm_kept=8.0,
    residual_moved=12.0,
    rotary_moved=16.0,
    gate_moved=20.0,
    gate_kept=12.0,
    loss_moved=32.0,
)


def kernels_of(
    shape: TransformerShape, *, is_compiled: bool, dtype: torch.dtype = torch.bfloat16
) -> Kernels:
    """Return how the layers of a shape are usually written. dtype: that they compute in, of 16 bits or float32."""
    if not is_compiled and shape.gated_mlp:
        return EAGER_FLOAT if dtype == torch.float32 else EAGER
    fused = FUSED if shape.gated_mlp else FUSED_GELU
    kernels = fused if is_compiled else EAGER_GELU
    if dtype != torch.float32:
        return kernels
    kinds = ("norm", "residual", "rotary", "gate")
    names = [*(f"{kind}_moved" for kind in kinds), "norm_kept", "gate_kept"]
    wide: dict[str, Any] = {name: 2 * getattr(kernels, name) for name in names}
    return dataclasses.replace(kernels, **wide)


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """Into how many parts other kinds of parallelism divide a rank's work.

    tensor: of matrices, with activations between them divided along the sequence. context: of each sequence.
    pipeline: of the layers. expert: of the experts. expert_owners: ranks over which the weights of experts are
    divided in all, those of `expert` among them; such weights are no part of a unit.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_owners: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class MicroBatch:
    """What a rank computes in one forward and backward, and how.

    sequences: in it. checkpointing: "none", "selective" (every second matrix product and attention are kept) or
    "full" (a layer keeps its input alone). is_fp8: products of linear layers in blocks are of 8 bits. compute_dtype:
    of everything else. param_dtype: of the stored parameters. lora_rank: of adapters on attention's projections; 0 trains all
    weights. has_mask: attention computes half of its square. has_outer_units: embedding and head are units, and not
    the root's, unless they share a matrix. has_two_recomputed: while a layer's backward runs, the one before is
    computed again. writes_scores: attention is single operators, which write what they have of each pair of tokens.
    autocasts: parameters are gathered in float32, and layers pass that on. keeps_cache: keys and values
    stay until the loss is there, as of a decoder that returns them.
    """

    sequences: int
    seq: int
    checkpointing: str = "none"
    kernels: Kernels = EAGER
    is_fp8: bool = False
    compute_dtype: torch.dtype = torch.bfloat16
    param_dtype: torch.dtype = torch.float32
    lora_rank: int = 0
    has_mask: bool = True
    has_outer_units: bool = False
    has_two_recomputed: bool = False
    writes_scores: bool = False
    autocasts: bool = False
    keeps_cache: bool = False
    parts: Parts = Parts()

    @property
    def tokens(self) -> float:
        """Tokens of a rank; with context parallelism its part of them."""
        return self.sequences * self.seq / self.parts.context

    @property
    def gathered_dtype(self) -> torch.dtype:
        """Of the unsharded parameters, and of what one layer passes to the next."""
        return torch.float32 if self.autocasts else self.compute_dtype

    @property
    def size(self) -> int:
        """Bytes of an element of what is computed."""
        return self.compute_dtype.itemsize


def shape_workload(shape: TransformerShape, batch: MicroBatch) -> Workload:
    """Return the workload of a decoder whose layers are units.

    Units: the root, the layers, and with ``has_outer_units`` the embedding and the head.
    """
    num_layers = max(1, round(shape.num_layers / batch.parts.pipeline))
    num_dense = 0 if shape.experts is None else min(shape.experts.num_dense_layers, num_layers)
    stretches = (
        _embedding(shape, batch),
        _block(shape, batch, 0),
        _block(shape, batch, num_layers - 1),
        _head(shape, batch),
    )
    recomputes = batch.checkpointing != "none"
    units = [
        WorkloadUnit(f"layers.{layer}", _block_params(shape, batch, layer), recomputes)
        for layer in range(num_layers)
    ]
    outer = _root_params(shape, batch)
    embedding = head = 0
    if batch.has_outer_units and len(outer) == 3:
        embedding, head = num_layers + 1, num_layers + 2
        units += [WorkloadUnit("embedding", outer[:1]), WorkloadUnit("head", outer[1:])]
        outer = ()
    events: list[Event] = [Enter(0)]
    events += _visit(embedding, 0)
    for layer in range(num_layers):
        events += _visit(layer + 1, 1 if layer < num_dense else 2)
    events += [*_visit(head, 3), Leave(0)]
    tokens, divided = round(batch.tokens), batch.parts.tensor * batch.parts.pipeline
    return Workload(
        units=(WorkloadUnit("", outer), *units),
        events=tuple(events),
        stretches=stretches,
        held_nbytes=_held_experts(shape, batch, num_layers - num_dense),
        input_nbytes=16 * tokens,
        model_flops=shape.model_flops(tokens, batch.seq) / divided,
        tokens=tokens,
    )


def _visit(unit: int, stretch: int) -> list[Event]:
    """Return the events of a unit with one stretch; the root has entered already."""
    run = Run(stretch, unit)
    return [Enter(unit), run, Leave(unit)] if unit else [run]


def _held_experts(shape: TransformerShape, batch: MicroBatch, num_layers: int) -> int:
    """Return what a rank keeps of experts that are divided by expert parallelism: weights, gradients, Adam's state.

    Where more ranks own them than share their work, one layer's are whole for a while, with their gradients.
    """
    if batch.parts.expert == 1 or shape.experts is None:
        return 0
    layer = shape.num_layers - 1
    numel = sum(m.rows * m.columns * m.num for m in _matrices(shape, layer) if m.num > 1)
    itemsize = batch.param_dtype.itemsize if not batch.lora_rank else 0.5
    is_whole = batch.parts.expert_owners > batch.parts.expert
    gathered = 2 * batch.size * numel / batch.parts.expert if is_whole else 0
    return round(num_layers * numel / batch.parts.expert_owners * 4 * itemsize + gathered)


def _param(name: str, rows: int, columns: int, batch: MicroBatch, *, trains: bool) -> ParamSpec:
    gathered = batch.gathered_dtype
    dtype = batch.param_dtype if trains or batch.autocasts else gathered
    return ParamSpec(name, (max(1, rows), columns), dtype, gathered, 0, trains)


@functools.lru_cache(maxsize=4096)
def _block_params(shape: TransformerShape, batch: MicroBatch, layer: int) -> tuple[ParamSpec, ...]:
    trains, parts = not batch.lora_rank, batch.parts
    made = [
        _param(m.name, m.rows * m.num // parts.tensor, m.columns, batch, trains=trains)
        for m in _matrices(shape, layer)
        if m.num == 1 or parts.expert == 1
    ]
    made += [_param(f"norm{n}", shape.hidden, 1, batch, trains=trains) for n in range(2)]
    if batch.lora_rank:
        for m in _adapted(shape, layer):
            made.append(_param(f"{m.name}.a", batch.lora_rank, m.columns, batch, trains=True))
            made.append(_param(f"{m.name}.b", m.rows, batch.lora_rank, batch, trains=True))
    return tuple(made)


def _adapted(shape: TransformerShape, layer: int) -> tuple[Matrix, ...]:
    return _matrices(shape, layer)[:4]


def _root_params(shape: TransformerShape, batch: MicroBatch) -> tuple[ParamSpec, ...]:
    trains, rows = not batch.lora_rank, shape.vocab // batch.parts.tensor
    names = ["embedding"] if shape.tied_embeddings else ["embedding", "head"]
    if batch.parts.pipeline > 1:
        names = ["head"]  # the first or the last part has one of them
    return (
        *(_param(name, rows, shape.hidden, batch, trains=trains) for name in names),
        _param("norm", shape.hidden, 1, batch, trains=trains),
    )


def _memory(nbytes: float, name: str, count: int = 1) -> Work:
    return Work(WorkKind.MEMORY, 0.0, nbytes / count, count=count, name=name)


def _product(
    m: float,
    n: float,
    k: float,
    *,
    batch: MicroBatch,
    name: str,
    count: int = 1,
    may_round: bool = False,
) -> Work:
    """Return (m, k) times (k, n). may_round: in 8 bits where the batch is."""
    m, n, k = (max(1, round(each)) for each in (m, n, k))
    rounds = may_round and batch.is_fp8
    dtype = "float8_e4m3fn" if rounds else _name(batch)
    nbytes = (1 if rounds else batch.size) * (m * k + k * n) + batch.size * m * n
    return Work(WorkKind.MATMUL, 2.0 * m * n * k * count, nbytes * count, (m, n, k), dtype, 1, name)


def _name(batch: MicroBatch) -> str:
    """Return the name of the dtype that a batch is computed in, as a `Work` has it."""
    return str(batch.compute_dtype).removeprefix("torch.")


class _Product(NamedTuple):
    """A linear layer as a rank has it: tokens that it sees, and its weights (rows, columns)."""

    name: str
    tokens: float
    rows: float
    columns: float
    num: int


def _products(shape: TransformerShape, batch: MicroBatch, layer: int) -> list[_Product]:
    tensor, found = batch.parts.tensor, []
    for m in _matrices(shape, layer):
        num = max(1, m.num // batch.parts.expert) if m.num > 1 else 1
        rows, columns = (
            (m.rows, m.columns / tensor) if m.is_output else (m.rows / tensor, m.columns)
        )
        found.append(_Product(m.name, batch.tokens * m.visits / num, rows, columns, num))
    return found


@functools.lru_cache(maxsize=4096)
def _block(shape: TransformerShape, batch: MicroBatch, layer: int) -> Stretch:
    """Return what one layer computes and keeps; see `MicroBatch` for what recomputation leaves."""
    tokens, tensor = batch.tokens, batch.parts.tensor
    products = _products(shape, batch, layer)
    trains = not batch.lora_rank
    multiply = [
        _product(p.tokens, p.rows, p.columns, batch=batch, name=p.name, count=p.num, may_round=True)
        for p in products
    ]
    into_inputs = [
        _product(p.tokens, p.columns, p.rows, batch=batch, name=p.name, count=p.num, may_round=True)
        for p in products
    ]
    into_weights = [
        _product(p.rows, p.columns, p.tokens, batch=batch, name=p.name, count=p.num, may_round=True)
        for p in products
        if trains
    ]
    adapters, adapters_back = _adapter_work(shape, batch, layer)
    attention = _attention(shape, batch)
    moved, kept = _elementwise(shape, batch, layer)
    moved_back = [each._replace(count=2 * each.count) for each in moved]
    exchanged = _exchanges(shape, batch, layer)
    hidden_nbytes = batch.gathered_dtype.itemsize * tokens * shape.hidden / tensor
    forward = (*multiply, *adapters, attention, *moved, *exchanged)
    backward = (
        *exchanged,
        *into_inputs,
        *into_weights,
        *adapters_back,
        attention._replace(flops=2.5 * attention.flops, nbytes=2 * attention.nbytes),
        *moved_back,
    )
    recomputed: tuple[Work, ...] = ()
    saved, brought_back = kept, 0.0
    if batch.checkpointing == "full":
        recomputed, saved, brought_back = forward, hidden_nbytes, kept
    elif batch.checkpointing == "selective":
        recomputed = (*multiply[1::2], *adapters, *moved, *exchanged)
        kept_products = [
            p for p in products[::2] if batch.kernels.keeps_unread or p != products[-1]
        ]
        saved = hidden_nbytes + batch.size * sum(p.tokens * p.rows * p.num for p in kept_products)
        saved += 2 * hidden_nbytes if tensor > 1 else 0  # what reduce-scatters return
        saved += _attention_kept(shape, batch)
        if batch.parts.expert > 1 and shape.experts is not None:
            saved += 2 * hidden_nbytes * shape.experts.top_k  # tokens that came, and came back
        brought_back = max(0.0, kept - saved)
    if batch.keeps_cache:
        saved += 2 * batch.size * tokens * shape.num_kv_heads * shape.head_dim / tensor
    beside = brought_back if batch.has_two_recomputed else 0.0
    gradients = sum(
        s.numel * s.compute_dtype.itemsize
        for s in _block_params(shape, batch, layer)
        if s.trainable
    )
    if tensor > 1:  # the inputs of products, whole again
        brought_back += 2 * batch.size * tokens * shape.hidden
    return Stretch(
        forward=forward,
        backward=backward,
        recomputed=recomputed,
        saved_nbytes=round(saved),
        freed_nbytes=round(saved),
        forward_peak_nbytes=round(max(kept * 0.6, saved) + 2 * hidden_nbytes),
        recomputed_nbytes=round(brought_back),
        recomputed_peak_nbytes=round(brought_back + hidden_nbytes),
        # Gradients of activations take the place of what is freed meanwhile, but for two.
        backward_peak_nbytes=round(2 * hidden_nbytes + beside + gradients),
        gradient_nbytes=gradients,
    )


def _adapter_work(
    shape: TransformerShape, batch: MicroBatch, layer: int
) -> tuple[list[Work], list[Work]]:
    """Return the kernels of adapters in forward and backward: two thin products and an addition each."""
    forward, backward = [], []
    rank, tokens, moved = batch.lora_rank, batch.tokens, 4 * batch.size
    for m in _adapted(shape, layer) if rank else ():
        down = _product(tokens, rank, m.columns, batch=batch, name="adapter")
        up = _product(tokens, m.rows, rank, batch=batch, name="adapter")
        forward += [down, up, _memory(tokens * moved * (m.columns + m.rows), "adapter", 4)]
        backward += [
            down,
            up,
            down,
            up,
            _memory(tokens * moved * (m.columns + m.rows), "adapter", 6),
        ]
    return forward, backward


def _exchanges(shape: TransformerShape, batch: MicroBatch, layer: int) -> tuple[Work, ...]:
    """Return what ranks that share a layer, a sequence or its experts exchange in a forward, as in a backward.

    Tensor parallel ranks gather the sequence before attention and before the MLP, and reduce-scatter after each.
    Context parallel ranks pass keys and values round. Expert parallel ones send tokens there and back.
    """
    parts, found = batch.parts, []
    hidden_nbytes = batch.size * batch.tokens * shape.hidden
    if parts.tensor > 1:
        found.append(_exchange(hidden_nbytes, parts.tensor, 1, 4))
    if parts.context > 1:
        keys = 2 * batch.size * batch.sequences * batch.seq * shape.num_kv_heads * shape.head_dim
        found.append(_exchange(keys / parts.tensor, parts.context, parts.tensor, 1))
    experts = shape.experts
    if parts.expert > 1 and experts is not None and layer >= experts.num_dense_layers:
        found.append(_exchange(hidden_nbytes * experts.top_k, parts.expert, parts.tensor, 2))
    return tuple(found)


def _exchange(nbytes: float, ranks: int, stride: int, count: int) -> Work:
    return Work(WorkKind.EXCHANGE, 0.0, nbytes, (ranks, stride, 0), "bfloat16", count, "exchange")


def _attention(shape: TransformerShape, batch: MicroBatch) -> Work:
    heads, dims = shape.num_heads / batch.parts.tensor, shape.head_dim
    key_dims = dims + (_ROTARY if shape.kv_lora_rank else 0)
    tokens = batch.tokens  # queries of this rank; keys are those of all of the sequence
    flops = 2.0 * tokens * batch.seq * heads * (dims + key_dims) * (0.5 if batch.has_mask else 1.0)
    nbytes = batch.size * tokens * 4 * heads * dims
    size = (round(batch.sequences * heads), batch.seq, dims)
    return Work(WorkKind.ATTENTION, flops, nbytes, size, _name(batch), 1, "attention")


# Elements of a pair of tokens and head, without dropout. Moved by a forward: written by the product, read and
# written by the softmax, read by the other product. Kept: what the softmax made.
_SCORES_MOVED, _SCORES_KEPT = 4, 1


def _attention_kept(shape: TransformerShape, batch: MicroBatch) -> float:
    heads = shape.num_heads / batch.parts.tensor
    return batch.tokens * heads * (batch.size * shape.head_dim + 4)


def _elementwise(
    shape: TransformerShape, batch: MicroBatch, layer: int
) -> tuple[list[Work], float]:
    """Return what moves bytes alone, and the bytes that a forward keeps without recomputation."""
    kernels, tensor, tokens = batch.kernels, batch.parts.tensor, batch.tokens
    products = _products(shape, batch, layer)
    hidden = tokens * shape.hidden / tensor
    is_attention = ("q", "k", "v", "kv_down", "kv_up")
    heads = sum(p.tokens * p.rows for p in products if p.name in is_attention)
    inner = sum(p.tokens * p.rows * p.num for p in products if p.name.endswith("in0"))
    nbytes = hidden * 2 * (kernels.norm_moved + kernels.residual_moved)
    nbytes += heads * kernels.rotary_moved + inner * kernels.gate_moved
    moved = [_memory(nbytes, "elementwise", kernels.num_launched)]
    kept = hidden * 2 * (kernels.norm_kept + batch.size) + batch.size * heads
    kept += inner * (kernels.gate_kept + batch.size) + _attention_kept(shape, batch)
    if batch.writes_scores:
        scores = batch.size * tokens * batch.seq * shape.num_heads / tensor
        moved.append(_memory(_SCORES_MOVED * scores, "scores", 3))
        kept += _SCORES_KEPT * scores
    if batch.autocasts:  # each product casts its input and its weights, and keeps them
        kept += 2 * tokens * shape.hidden * (0 if batch.lora_rank else 3)
        kept += 2 * _numel(_matrices(shape, layer)) / tensor
    if batch.lora_rank:  # the inputs of adapters, dropped out, and where
        kept += (batch.size + 1) * sum(tokens * m.columns / tensor for m in _adapted(shape, layer))
    if shape.experts is not None and layer >= shape.experts.num_dense_layers:
        visited = batch.size * hidden * shape.experts.top_k
        # Sorted by expert, sent there, sent back, added up.
        moved.append(Work(WorkKind.ROWS, 0.0, visited * 12, name="sorting"))
        # Each of them, and as they are sorted and weighed on both sides.
        kept += visited * (8 if batch.parts.expert > 1 else 2)
        kept -= (
            batch.size * inner + visited if batch.lora_rank else 0
        )  # frozen experts need no inputs
    return moved, kept


def _embedding(shape: TransformerShape, batch: MicroBatch) -> Stretch:
    size = batch.gathered_dtype.itemsize
    nbytes = size * batch.tokens * shape.hidden / batch.parts.tensor
    trains = not batch.lora_rank and not shape.tied_embeddings and batch.parts.pipeline == 1
    gradient = size * shape.vocab * shape.hidden // batch.parts.tensor if trains else 0
    return Stretch(
        forward=(_memory(2 * nbytes, "embedding"),),
        backward=(_memory(2 * nbytes + 2 * gradient, "embedding"),) if not batch.lora_rank else (),
        saved_nbytes=round(nbytes),
        freed_nbytes=round(2 * nbytes),
        forward_peak_nbytes=round(nbytes),
        backward_peak_nbytes=gradient,
        gradient_nbytes=gradient,
    )


def _head(shape: TransformerShape, batch: MicroBatch) -> Stretch:
    """Return the last norm, the logits and their loss; all of it is computed at once."""
    kernels, tensor = batch.kernels, batch.parts.tensor * batch.parts.pipeline
    tokens, hidden = batch.tokens, shape.hidden
    logits = tokens * shape.vocab / tensor
    vocab, inputs = shape.vocab / tensor, tokens * hidden / batch.parts.tensor
    trains = not batch.lora_rank
    size, gathered = batch.size, batch.gathered_dtype.itemsize
    gradient = round(gathered * vocab * hidden) if trains else 0
    norm = _memory(tokens * hidden / batch.parts.tensor * kernels.norm_moved, "norm")
    multiply = _product(tokens, vocab, hidden, batch=batch, name="head")
    backward = [
        _memory(logits * kernels.loss_moved * 0.6, "loss", 4),
        _product(tokens, hidden, vocab, batch=batch, name="head"),
        norm._replace(nbytes=2 * norm.nbytes),
    ]
    if trains:
        backward.append(_product(vocab, hidden, tokens, batch=batch, name="head"))
    loss = kernels.loss
    kept = round(logits * loss.kept)
    if batch.autocasts:  # the product's input and weights, as in layers
        kept += round(2 * inputs + 2 * vocab * hidden)
    return Stretch(
        forward=(norm, multiply, _memory(logits * kernels.loss_moved * 0.4, "loss", 4)),
        backward=tuple(backward),
        saved_nbytes=kept,
        freed_nbytes=kept - round(gathered * inputs),
        forward_peak_nbytes=round(logits * max(loss.kept, loss.peak - size) + 2 * size * inputs),
        # The gradient of the weights comes when of the logits theirs alone is left, as it is computed.
        backward_peak_nbytes=max(
            round(logits * (loss.peak - loss.kept)),
            round(logits * (size - loss.kept)) + gradient,
            gradient,
        ),
        gradient_nbytes=gradient,
    )
