"""Models: what people build from `torch.nn`, and how they divide it into units."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.differential.program import ALL_FACES, FSDP2, program
from tests.differential.run import Run

OURS = "*/p*"  # peer_memory and process_group, on any face
ZEROS = "the wrapper's gradients of what a unit does not use are zeros, as PyTorch's"
VIEW = "warns of a view that nothing changes in place"


def square(outputs: Tensor) -> Tensor:
    """Return a loss."""
    return outputs.float().square().mean()


def mlp(*widths: int) -> nn.Sequential:
    """Build linear layers with tanh between them."""
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


@program(faces=ALL_FACES)
def linear(run: Run) -> None:
    """One layer, which is the root."""
    model = run.shard(nn.Linear(5, 3))
    run.train(model, lambda m: square(m(run.batch(4, 5))))


@program(faces=ALL_FACES)
def layers_as_units(run: Run) -> None:
    """Layers whose sizes no number of ranks divides."""
    model = run.shard(mlp(7, 5, 9, 3), "0", "2", "4")
    run.train(model, lambda m: square(m(run.batch(4, 7))), steps=3)


@program()
def layers_without_bias(run: Run) -> None:
    """A unit of one parameter."""
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.ReLU(), nn.Linear(6, 2, bias=False))
    model = run.shard(model, "0", "2")
    run.train(model, lambda m: square(m(run.batch(4, 6))))


@program()
def fewer_rows_than_ranks(run: Run) -> None:
    """A parameter of which some rank holds nothing."""
    model = run.shard(mlp(4, 1, 1, 4), "0", "2")
    run.train(model, lambda m: square(m(run.batch(4, 4))))


@program()
def only_the_root_owns_parameters(run: Run) -> None:
    """Units without parameters."""
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 4), nn.Dropout(0.0))
    model = run.shard(model, "0", "2")
    run.train(model, lambda m: square(m(run.batch(4, 4))))


@program()
def root_without_parameters_of_its_own(run: Run) -> None:
    """Every parameter is in a unit inside."""
    model = run.shard(mlp(4, 4, 4), "0", "2")
    run.train(model, lambda m: square(m(run.batch(4, 4))))


@program()
def nested_units(run: Run) -> None:
    """A unit in a unit in a unit."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6), mlp(6, 5, 6)))
    model = run.shard(model, "1", "1.1", "1.1.0")
    run.train(model, lambda m: square(m(run.batch(4, 4))))


class Residual(nn.Module):
    """x: (n, width) -> same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the layers make of x."""
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


@program(faces=ALL_FACES)
def residual_blocks(run: Run) -> None:
    """Blocks around which the input goes."""
    model = run.shard(nn.Sequential(*(Residual(6) for _ in range(4))), "*")
    run.train(model, lambda m: square(m(run.batch(4, 6))))


@program()
def residual_blocks_in_pairs(run: Run) -> None:
    """Units of several modules in a row."""
    model = nn.Sequential(
        *(nn.Sequential(Residual(6), Residual(6)) for _ in range(2)), nn.Linear(6, 3)
    )
    run.train(run.shard(model, "0", "1"), lambda m: square(m(run.batch(4, 6))))


class Embedded(nn.Module):
    """Token numbers (n, t) to scores (n, t, words), by whatever embedding."""

    def __init__(self, embedding: nn.Module, width: int, words: int, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = embedding
        self.block = Residual(width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = embedding.weight  # type: ignore[assignment]

    def forward(self, tokens: Tensor) -> Tensor:
        """Score every token."""
        return self.head(self.block(self.embedding(tokens)))


def next_token_loss(run: Run, model: nn.Module, words: int) -> Tensor:
    """Predict each token from the one before."""
    tokens = run.ints(words, 3, 6)
    scores = model(tokens[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())


@program(faces=ALL_FACES)
def embedding(run: Run) -> None:
    """A language model."""
    model = run.shard(Embedded(nn.Embedding(11, 6), 6, 11), "embedding", "block")
    run.train(model, lambda m: next_token_loss(run, m, 11))


@program(faces=ALL_FACES)
def embedding_with_padding(run: Run) -> None:
    """The row of the padding token gets no gradient."""
    model = Embedded(nn.Embedding(11, 6, padding_idx=1), 6, 11)
    run.train(run.shard(model, "embedding", "block"), lambda m: next_token_loss(run, m, 11))


@program(faces=ALL_FACES)
def embedding_tied(run: Run) -> None:
    """The head has the weight of the embedding, both in the root."""
    model = Embedded(nn.Embedding(11, 6), 6, 11, tied=True)
    run.train(run.shard(model, "block"), lambda m: next_token_loss(run, m, 11))


@program(
    faces=(FSDP2,),
    differs={"*/torch": "PyTorch refuses a weight that is tied across units"},
)
def embedding_tied_across_units(run: Run) -> None:
    """The embedding is a unit of its own, the head is in the root: the weight is both's."""
    model = Embedded(nn.Embedding(11, 6), 6, 11, tied=True)
    run.train(run.shard(model, "embedding", "block"), lambda m: next_token_loss(run, m, 11))


@program()
def embedding_by_frequency(run: Run) -> None:
    """Gradients of tokens are divided by how often a rank has them."""
    model = Embedded(nn.Embedding(7, 6, scale_grad_by_freq=True), 6, 7)
    run.train(run.shard(model, "embedding", "block"), lambda m: next_token_loss(run, m, 7))


@program()
def embedding_bag(run: Run) -> None:
    """Embeddings averaged over bags."""
    model = nn.Sequential(nn.EmbeddingBag(9, 6), nn.Linear(6, 2))
    run.train(run.shard(model, "0"), lambda m: square(m(run.ints(9, 3, 5))))


@program()
def two_embeddings_added(run: Run) -> None:
    """Tokens and positions, both used once."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(9, 4), nn.Embedding(6, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))

    model = nn.Sequential(Positions(), nn.Linear(4, 3))
    run.train(run.shard(model, "0"), lambda m: square(m(run.ints(9, 3, 5))))


CONVOLUTIONS = {
    "1d": (nn.Conv1d, (5,)),
    "2d": (nn.Conv2d, (5, 5)),
    "3d": (nn.Conv3d, (4, 4, 4)),
    "transposed": (nn.ConvTranspose2d, (4, 4)),
}


@program(cases={name: {"kind": name} for name in CONVOLUTIONS})
def convolution(run: Run, kind: str) -> None:
    """Convolutions in every number of dimensions."""
    make, size = CONVOLUTIONS[kind]
    model = nn.Sequential(make(3, 5, 3, padding=1), nn.ReLU(), make(5, 2, 3, padding=1))
    run.train(run.shard(model, "0", "2"), lambda m: square(m(run.batch(2, 3, *size))))


@program()
def grouped_convolution(run: Run) -> None:
    """Depthwise, then pointwise, as in MobileNet."""
    model = nn.Sequential(nn.Conv2d(6, 6, 3, groups=6), nn.ReLU6(), nn.Conv2d(6, 4, 1))
    run.train(run.shard(model, "0", "2"), lambda m: square(m(run.batch(2, 6, 5, 5))))


@program(has_reference=False, reason="what is refused", faces=(FSDP2,))
def convolution_channels_last_is_refused(run: Run) -> None:
    """Weights whose strides are not those of their shape."""
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 2, 3))
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    run.attempt(lambda: run.shard(model, "0"))
    run.models.clear()


NORMS = {
    "layer": lambda: nn.LayerNorm((6, 4)),
    "group": lambda: nn.GroupNorm(3, 6),
    "rms": lambda: nn.RMSNorm(4),
    "batch": lambda: nn.BatchNorm1d(6),
    "batch_without_average": lambda: nn.BatchNorm1d(6, momentum=None),
    "batch_without_statistics": lambda: nn.BatchNorm1d(6, track_running_stats=False),
    "instance": lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
}


@program(
    cases={
        name: {
            "kind": name,
        }
        for name in NORMS
    }
)
def norm(run: Run, kind: str) -> None:
    """Norms, with what they keep in buffers of each rank's own batches."""
    model = nn.Sequential(nn.Conv1d(3, 6, 1), NORMS[kind](), nn.Tanh(), nn.Conv1d(6, 2, 1))
    model = run.shard(model, "1")
    run.train(model, lambda m: square(m(run.batch(5, 3, 4))))
    model.eval()
    with torch.no_grad():
        run.see("evaluation", model(run.batch(5, 3, 4)))


@program()
def norm_units_alone(run: Run) -> None:
    """Each norm is a unit of its own, as are the layers."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    run.train(run.shard(model, "0", "1", "3"), lambda m: square(m(run.batch(6, 4))), steps=3)


@program()
def buffers_of_all_kinds(run: Run) -> None:
    """Buffers of integers, not saved, and changed in forward."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("cache", torch.ones(4), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.mean.lerp_(x.detach().mean(0), 0.1)
            return self.layer(x - self.mean) * self.cache

    model = run.shard(nn.Sequential(Counting(), Counting()), "0", "1")
    run.train(model, lambda m: square(m(run.batch(4, 4))))
    run.see("buffers", dict(run_buffers(model)))


def run_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """List a model's buffers by the names they had before it was wrapped."""
    return [
        (name.replace("_fsdp_wrapped_module.", ""), buffer)
        for name, buffer in model.named_buffers()
    ]


RECURRENT = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


@program(
    cases={
        "rnn": {"kind": "rnn"},
        "gru": {"kind": "gru"},
        "lstm": {"kind": "lstm"},
    }
)
def recurrent(run: Run, kind: str) -> None:
    """Recurrent layers, whose weights torch keeps in a list besides."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = RECURRENT[kind](4, 5, num_layers=2, batch_first=True, bidirectional=True)
            self.head = nn.Linear(10, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cells(x)[0])

    run.train(run.shard(Reader(), "cells"), lambda m: square(m(run.batch(3, 4, 4))))


@program()
def lstm_cell_in_a_loop(run: Run) -> None:
    """One unit called many times before backward."""

    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(4, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            state = None
            for step in x.unbind(1):
                state = self.cell(step, state)
            return self.head(state[0])

    run.train(run.shard(Unrolled(), "cell"), lambda m: square(m(run.batch(3, 4, 4))))


@program()
def recurrent_packed(run: Run) -> None:
    """Sequences of several lengths."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.GRU(4, 5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.tensor([4, 3, 1])
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return self.cells(packed)[0].data

    run.train(run.shard(Packed(), "cells"), lambda m: square(m(run.batch(3, 4, 4))))


@program(cases={"same": {"kdim": None}, "other_keys": {"kdim": 5}})
def multihead_attention(run: Run, kdim: int | None) -> None:
    """torch's attention, which gives its output projection's weight to a function."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True, kdim=kdim, vdim=kdim)

        def forward(self, x: Tensor, keys: Tensor) -> Tensor:
            return self.attention(x, keys, keys, need_weights=True)[0]

    model = run.shard(nn.ModuleDict({"a": Attention()})["a"], "attention")
    run.train(model, lambda m: square(m(run.batch(2, 3, 8), run.batch(2, 4, kdim or 8))))


@program()
def transformer_encoder(run: Run) -> None:
    """torch's encoder, with a mask, and its other path without gradients."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = run.shard(model, "layers.*")
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    run.train(model, lambda m: square(m(run.batch(2, 4, 8), mask=mask, is_causal=True)))
    model.eval()
    with torch.no_grad():
        run.see("evaluation", model(run.batch(2, 4, 8)))


@program(faces=ALL_FACES)
def transformer(run: Run) -> None:
    """Encoder and decoder: the memory is an input of every layer of the decoder."""
    model = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True)
    model = run.shard(model, "encoder.layers.*", "decoder.layers.*")
    run.train(model, lambda m: square(m(run.batch(2, 4, 8), run.batch(2, 3, 8))))


class Attention(nn.Module):
    """Causal attention. x: (n, t, width) -> same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Attend to what came before."""
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in self.projections())
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))

    def projections(self) -> tuple[nn.Module, ...]:
        """Return the layers in front."""
        return self.q, self.k, self.v


class Block(nn.Module):
    """A layer of a transformer. x: (n, t, width) -> same."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.mlp = Residual(width)
        self.norm = nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then think."""
        return self.mlp(x + self.attention(self.norm(x)))


class Gpt(nn.Module):
    """A language model. (n, t) -> (n, t, words)."""

    def __init__(self, width: int = 8, depth: int = 2, words: int = 11) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Score every token."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@program(faces=ALL_FACES)
def gpt(run: Run) -> None:
    """What most people train."""
    model = run.shard(Gpt(), "blocks.*")
    run.train(model, lambda m: next_token_loss(run, m, 11), steps=3, clip=0.1)


@program()
def units_inside_and_around_blocks(run: Run) -> None:
    """Attention is a unit in a block that is a unit."""
    model = run.shard(Gpt(), "blocks.*", "blocks.*.attention", "head")
    run.train(model, lambda m: next_token_loss(run, m, 11))


@program()
def module_dict_by_key(run: Run) -> None:
    """A module of a dictionary, another one in each step on all ranks."""

    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)})
            self.stem = nn.Linear(4, 4)

        def forward(self, x: Tensor, key: str) -> Tensor:
            return self.heads[key](self.stem(x))

    model = run.shard(Choice(), "heads.a", "heads.b")
    keys = iter("abba")
    run.train(model, lambda m: square(m(run.batch(4, 4), next(keys))), steps=4)


@program()
def parameters_in_lists_and_dicts(run: Run) -> None:
    """Containers of parameters, which are modules that are never called."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.ParameterList(nn.Parameter(torch.randn(3, 3)) for _ in range(2))
            self.named = nn.ParameterDict({"shift": torch.randn(3)})

        def forward(self, x: Tensor) -> Tensor:
            for row in self.rows:
                x = (x @ row).tanh()
            return x + self.named["shift"]

    model = run.shard(nn.Sequential(Sums(), Sums()), "0", "1")
    run.train(model, lambda m: square(m(run.batch(4, 3))))


@program()
def shared_module_in_the_root(run: Run) -> None:
    """One layer in two places."""
    layer = nn.Linear(4, 4)
    model = run.shard(nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 2)))
    run.train(model, lambda m: square(m(run.batch(4, 4))))


@program()
def shared_module_as_a_unit(run: Run) -> None:
    """One unit in two places, so it runs twice in a forward."""
    layer = nn.Linear(4, 4)
    model = run.shard(nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 2)), "0")
    run.train(model, lambda m: square(m(run.batch(4, 4))))


@program()
def shared_block_run_three_times(run: Run) -> None:
    """ALBERT: every layer is the same block."""

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = Residual(6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.block(x)
            return self.head(x)

    run.train(run.shard(Repeated(), "block"), lambda m: square(m(run.batch(4, 6))))


@program(differs={"orig/torch": "PyTorch's wrapper saves a tied weight after its unit's others"})
def tied_within_a_unit(run: Run) -> None:
    """Two layers of one unit share a weight but not a bias."""
    model = mlp(4, 4, 4, 4)
    model[2].weight = model[0].weight
    run.train(run.shard(model), lambda m: square(m(run.batch(4, 4))))


@program(faces=(FSDP2,))
def weight_norm(run: Run) -> None:
    """A weight computed from direction and length, by parametrization."""
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Linear(5, 2))
    run.train(run.shard(model, "0"), lambda m: square(m(run.batch(4, 4))))


@program(faces=(FSDP2,))
def symmetric_parametrization(run: Run) -> None:
    """A parametrization of one's own."""

    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).T

    model = mlp(4, 4, 4)
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    run.train(run.shard(model, "0"), lambda m: square(m(run.batch(4, 4))))


@program(faces=(FSDP2,))
def orthogonal_parametrization(run: Run) -> None:
    """torch's orthogonal weights."""
    model = nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 2))
    run.train(run.shard(model, "0"), lambda m: square(m(run.batch(4, 4))))


@program()
def spectral_norm_parametrization(run: Run) -> None:
    """Power iteration in forward, on buffers; the weight itself stays."""
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Linear(5, 2))
    run.train(run.shard(model), lambda m: square(m(run.batch(4, 4))))


@program()
def one_parameter_of_one_element(run: Run) -> None:
    """A temperature, as a vector of one."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.temperature = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.temperature.exp()

    run.train(run.shard(Scaled(), "layer"), lambda m: square(m(run.batch(4, 4))))


@program(has_reference=False, reason="what is refused", faces=(FSDP2,))
def scalar_parameter_is_refused(run: Run) -> None:
    """A parameter without dimensions."""
    model = nn.Linear(4, 3)
    model.temperature = nn.Parameter(torch.ones(()))
    run.attempt(lambda: run.api.fully_shard(model))


@program()
def mixture_of_dtypes_in_units(run: Run) -> None:
    """One unit in float64 beside others in float32."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(4, 4).double(), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.narrow(self.wide(x.double()).float())

    run.train(run.shard(Mixed(), "wide"), lambda m: square(m(run.batch(4, 4))))


@program(
    faces=(FSDP2,),
    differs={"*/torch": "PyTorch refuses parameters of two dtypes in a unit"},
)
def mixture_of_dtypes_in_one_unit(run: Run) -> None:
    """A norm in float64 between layers in float32, all in the root."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = (
                nn.Linear(4, 4),
                nn.LayerNorm(4).double(),
                nn.Linear(4, 2),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.first(x).double()).float())

    run.train(run.shard(Mixed()), lambda m: square(m(run.batch(4, 4))))


@program(faces=ALL_FACES)
def dropout(run: Run) -> None:
    """Each rank draws its own masks, in the order of one process."""
    model = run.shard(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)), "0")
    torch.manual_seed(100 + run.part)
    run.train(model, lambda m: square(m(run.batch(4, 4))))


@program()
def bilinear_and_prelu(run: Run) -> None:
    """Layers with parameters of other shapes."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair, self.slope = nn.Bilinear(3, 4, 5), nn.PReLU(5)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.slope(self.pair(x, y))

    run.train(run.shard(Pairs(), "pair"), lambda m: square(m(run.batch(4, 3), run.batch(4, 4))))


@program(faces=(FSDP2,), differs={"*/torch": "PyTorch refuses parameters of two dtypes in a unit"})
def complex_valued(run: Run) -> None:
    """Parameters of complex numbers."""

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.view_as_real(x @ self.filter).square().sum(-1))

    run.train(run.shard(Spectral()), lambda m: square(m(run.batch(5, 4).to(torch.complex64))))


@program(faces=(FSDP2,))
def several_modules_as_one_unit(run: Run) -> None:
    """`fully_shard` of a list: norm and head are gathered together."""
    model = Gpt()
    if run.is_fsdp2:
        run.api.fully_shard([model.norm, model.head])
    run.train(run.shard(model, "blocks.*"), lambda m: next_token_loss(run, m, 11))


@program(faces=(FSDP2,))
def built_on_meta(run: Run) -> None:
    """Sharded before it has memory."""
    with torch.device("cpu" if run.is_alone else "meta"):
        model = mlp(4, 6, 2)
    model = run.shard(model, "0", "2")
    if not run.is_alone:
        model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.25)
    run.train(model, lambda m: square(m(run.batch(4, 4))))


@program(faces=(FSDP2,))
def ignored_parameters(run: Run) -> None:
    """A parameter that the program reduces itself."""
    model = mlp(4, 4, 2)
    bias = model[0].bias
    model = run.shard(model, fsdp2={"ignored_params": {bias}})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        square(model(run.batch(4, 4))).backward()
        run.average(bias)
        if not run.is_alone:
            bias.grad = run.all_reduce(bias.grad) / run.num_parts  # type: ignore[arg-type]
        run.step(optimizer)


ONCE = {"*/torch": "PyTorch shards a module's parameters once, for one of its places"}


@program(
    faces=(FSDP2,),
    cases={
        "in_two_units": {"units": ("0", "1"), "differs": ONCE},
        "in_a_unit_and_the_root": {"units": ("0",), "differs": ONCE},
        "itself_a_unit": {"units": ("0.shared", "0", "1")},
    },
)
def module_in_several_places(run: Run, units: tuple[str, ...]) -> None:
    """One module object that several blocks call, as tied layers of ALBERT's kind."""

    class Block(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.shared, self.own = shared, nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.own(self.shared(x)))

    shared = nn.Linear(4, 4)
    model = run.shard(nn.Sequential(Block(shared), Block(shared), nn.Linear(4, 2)), *units)
    run.train(model, lambda m: square(m(run.batch(3, 4))), steps=3)


@program(faces=(FSDP2,))
def identity_written_into_shards(run: Run) -> None:
    """`nn.init.eye_` of a sharded parameter whose rows no number of ranks divides: mended in torch's DTensor too."""
    model = run.shard(mlp(5, 5, 3), "0")
    nn.init.eye_(model[0].weight)
    nn.init.eye_(model[2].weight)
    run.train(model, lambda m: square(m(run.batch(3, 5))))
