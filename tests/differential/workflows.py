"""Whole ways to train: several models, several losses, models that change while they train."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from tests.differential.autograd import sgd
from tests.differential.modules import (
    ZEROS,
    Embedded,
    Gpt,
    Residual,
    mlp,
    next_token_loss,
    square,
)
from tests.differential.program import ALL_FACES, FSDP2, ORIG, program
from tests.differential.run import Run

LOW = (torch.bfloat16, torch.float32)
LOW_BITS = "parameters and activations have 8 bits; one process has 24"


@program(faces=ALL_FACES)
def gan(run: Run) -> None:
    """Two models that take turns; the generator learns through the discriminator."""
    generator = run.shard(mlp(3, 6, 4), "0", "2")
    discriminator = run.shard(mlp(4, 6, 1), "0", "2")
    ours, theirs = sgd(generator), sgd(discriminator)
    for _ in range(2):
        fake = generator(run.batch(4, 3))
        real = run.batch(4, 4)
        loss = F.softplus(discriminator(fake.detach())).mean()
        loss = loss + F.softplus(-discriminator(real)).mean()
        run.see("discriminator", loss)
        loss.backward()
        run.step(theirs)
        loss = F.softplus(-discriminator(fake)).mean()
        run.see("generator", loss)
        loss.backward()
        run.see_gradients(generator)
        ours.step()
        ours.zero_grad()
        theirs.zero_grad()


@program()
def gan_with_frozen_critic(run: Run) -> None:
    """The discriminator's parameters need no gradients while the generator learns."""
    generator = run.shard(mlp(3, 6, 4), "0", "2")
    discriminator = run.shard(mlp(4, 6, 1), "0", "2")
    ours, theirs = sgd(generator), sgd(discriminator)
    for _ in range(2):
        with torch.no_grad():
            fake = generator(run.batch(4, 3))
        (discriminator(fake).mean() - discriminator(run.batch(4, 4)).mean()).backward()
        run.see_gradients(discriminator)
        theirs.step()
        theirs.zero_grad()
        discriminator.requires_grad_(False)
        discriminator(generator(run.batch(4, 3))).mean().neg().backward()
        discriminator.requires_grad_(True)
        run.see_gradients(generator)
        ours.step()
        ours.zero_grad()


@program()
def clipped_weights_between_steps(run: Run) -> None:
    """WGAN: weights are clamped after each step, as shards."""
    model = run.shard(mlp(4, 6, 1), "0", "2")
    optimizer = sgd(model, lr=1.0)
    for _ in range(3):
        model(run.batch(4, 4)).mean().backward()
        run.step(optimizer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.1, 0.1)


WRITES = "writes to sharded parameters inside a forward are read too early, or lost"


@program(faces=(FSDP2,))
def weights_clamped_in_the_root_s_forward(run: Run) -> None:
    """An input-convex network: the root clamps its children's sharded weights, then calls them."""

    class Convex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                run.lag(1)
                with torch.no_grad():
                    layer.weight.clamp_(min=0.0)
                x = F.softplus(layer(x))
            return x

    model = run.shard(Convex(), "layers.*")
    run.train(model, lambda m: square(m(run.batch(4, 4))), steps=3, optimizer=sgd(model, 1.0))


@program()
def teacher_and_student(run: Run) -> None:
    """Distillation from a model that does not learn."""
    teacher = run.shard(mlp(4, 6, 3), "0", "2")
    student = run.shard(mlp(4, 5, 3), "0", "2")
    teacher.requires_grad_(False)
    optimizer = sgd(student)
    for _ in range(2):
        x = run.batch(4, 4)
        with torch.no_grad():
            aim = teacher(x).softmax(1)
        loss = F.kl_div(student(x).log_softmax(1), aim, reduction="batchmean")
        run.see("loss", loss)
        loss.backward()
        run.step(optimizer)


@program()
def teacher_in_evaluation_mode(run: Run) -> None:
    """The teacher has norms with statistics, and is not called under `no_grad`."""
    teacher = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    teacher = run.shard(teacher.eval().requires_grad_(False), "0", "2")
    student = run.shard(mlp(4, 5, 3), "0")

    def loss(m: nn.Module) -> Tensor:
        x = run.batch(4, 4)
        return (m(x) - teacher(x)).square().mean()

    run.train(student, loss)


@program()
def average_of_weights(run: Run) -> None:
    """EMA after each step, from shards to shards."""
    model, average = mlp(4, 6, 3), mlp(4, 6, 3)
    average.load_state_dict(model.state_dict())
    average.requires_grad_(False)
    model, average = run.shard(model, "0", "2"), run.shard(average, "0", "2")
    optimizer = sgd(model)
    for _ in range(3):
        square(model(run.batch(4, 4))).backward()
        run.step(optimizer)
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            run.see("evaluation", average(run.batch(4, 4)))


@program(faces=(FSDP2,))
def averaged_model_of_torch(run: Run) -> None:
    """`torch.optim.swa_utils` on shards, foreach."""
    from torch.optim.swa_utils import get_ema_multi_avg_fn

    model = run.shard(mlp(4, 6, 3), "0", "2")
    optimizer = sgd(model)
    average = [p.detach().clone() for p in model.parameters()]
    update = get_ema_multi_avg_fn(0.9)
    for _ in range(3):
        square(model(run.batch(4, 4))).backward()
        run.step(optimizer)
        update(average, [p.detach() for p in model.parameters()], torch.tensor(1))
    run.see("average", dict(zip("abcd", average, strict=True)))


class Contrast(nn.Module):
    """MoCo: a key encoder that follows the query encoder inside of forward."""

    def __init__(self, lag: Callable[[int], None], *, updated_last: bool = False) -> None:
        super().__init__()
        self.lag = lag
        self.query, self.key = Residual(4), Residual(4)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.updated_last = updated_last

    @torch.no_grad()
    def update_key(self) -> None:
        """Move the key encoder's shards towards the query encoder's."""
        for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
            slow.lerp_(fast, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Compare what both make of x."""
        query = self.query(x)
        self.lag(1)
        if not self.updated_last:
            self.update_key()
        with torch.no_grad():
            key = self.key(x.flip(0))
            self.lag(0)
        if self.updated_last:
            self.update_key()
        return (query - key).square().mean()


@program(faces=(FSDP2,))
def momentum_encoder(run: Run) -> None:
    """Inside of the root's forward, after the query encoder has run."""
    model = run.shard(Contrast(run.lag), "query", "key")
    optimizer = SGD(model.query.parameters(), lr=1.0)
    run.train(model, lambda m: m(run.batch(4, 4)), steps=3, optimizer=optimizer)


@program(faces=(FSDP2,))
def momentum_encoder_updated_last(run: Run) -> None:
    """The key encoder is written to after it has run."""
    model = run.shard(Contrast(run.lag, updated_last=True), "query", "key")
    optimizer = SGD(model.query.parameters(), lr=1.0)
    run.train(model, lambda m: m(run.batch(4, 4)), steps=3, optimizer=optimizer)


@program()
def momentum_encoder_updated_outside(run: Run) -> None:
    """The same from the training loop, where nothing is gathered."""
    model = run.shard(Outside(run.lag), "query", "key")
    optimizer = SGD(model.query.parameters(), lr=1.0)
    for _ in range(3):
        loss = model(run.batch(4, 4))
        run.see("loss", loss)
        loss.backward()
        run.step(optimizer)
        (model.module if run.is_wrapped else model).update_key()


class Outside(Contrast):
    """`Contrast` that does not update by itself."""

    def forward(self, x: Tensor) -> Tensor:
        """Compare what both make of x."""
        with torch.no_grad():
            key = self.key(x.flip(0))
        return (self.query(x) - key).square().mean()


class LowRank(nn.Module):
    """A frozen layer with a trained difference of low rank."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add both."""
        return self.layer(x) + self.up(self.down(x))


@program(
    cases={"unit": {"units": ("0", "1")}, "inside": {"units": ("0.down", "0.up", "0", "1")}},
)
def lora(run: Run, units: tuple[str, ...]) -> None:
    """Adapters in the unit of what they adapt, or units of their own."""
    model = nn.Sequential(LowRank(nn.Linear(4, 6)), LowRank(nn.Linear(6, 4)))
    model = run.shard(model, *units)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, eps=1e-3)
    run.train(model, lambda m: square(m(run.batch(4, 4))), steps=3, optimizer=optimizer)


@program()
def lora_below_frozen_embedding(run: Run) -> None:
    """Nothing before the first adapter needs gradients."""
    model = Gpt()
    model.requires_grad_(False)
    for block in model.blocks:
        block.attention.q = LowRank(block.attention.q)
        block.attention.v = LowRank(block.attention.v)
    model = run.shard(model, "blocks.*")
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    run.train(model, lambda m: next_token_loss(run, m, 11), optimizer=optimizer)


FREEZING = "a flat parameter is frozen or trained as a whole"


@program(cases={"units": {"units": ("0", "2", "4")}, "root_alone": {"units": ()}})
def freezing_schedule(run: Run, units: tuple[str, ...]) -> None:
    """Layers are trained one after the other, then together."""
    model = run.shard(mlp(4, 4, 4, 2), *units)
    optimizer = sgd(model)
    named = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in model.named_parameters()}
    for trained in ("4", "24", "024", "2"):
        for name, parameter in named.items():
            parameter.requires_grad_(name[0] in trained)
        square(model(run.batch(4, 4))).backward()
        run.step(optimizer)


@program()
def layer_freed_after_some_steps(run: Run) -> None:
    """A backbone is frozen, then trained with another learning rate."""
    model = mlp(4, 4, 2)
    model[0].requires_grad_(False)
    model = run.shard(model, "0")
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    run.train(model, lambda m: square(m(run.batch(4, 4))), optimizer=optimizer)
    for parameter in model[0].parameters():
        parameter.requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
    run.train(model, lambda m: square(m(run.batch(4, 4))), optimizer=optimizer)


class Experts(nn.Module):
    """Each row goes to one of the experts."""

    def __init__(self, num: int = 4, width: int = 4, *, every: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(width, num)
        self.experts = nn.ModuleList(Residual(width) for _ in range(num))
        self.every = every

    def forward(self, x: Tensor, allowed: list[int] | None = None) -> Tensor:
        """Mix what the chosen ones make of the rows."""
        scores = self.router(x).softmax(1)
        if allowed is not None:
            scores = scores[:, allowed]
        best = scores.argmax(1)
        result = torch.zeros_like(x)
        for place, number in enumerate(allowed or range(len(self.experts))):
            rows = (best == place).nonzero().flatten()
            if self.every or len(rows):
                result = result.index_add(
                    0, rows, self.experts[number](x[rows]) * scores[rows, place, None]
                )
        return result


@program(faces=ALL_FACES)
def experts_that_all_ranks_run(run: Run) -> None:
    """An expert without rows runs on an empty batch."""
    model = run.shard(nn.Sequential(nn.Linear(4, 4), Experts(every=True)), "1.experts.*", "1")
    run.train(model, lambda m: square(m(run.batch(8, 4))))


@program(
    differs={"fsdp2/torch": "PyTorch reduces what a rank has gradients of, and mixes them up"},
    zeros={"orig/*": ZEROS},
)
def experts_in_one_unit(run: Run) -> None:
    """Experts that only some ranks use, in a unit that all ranks run."""
    model = nn.Sequential(nn.Linear(4, 4), Experts())
    model = run.shard(model, "1")
    run.train(model, lambda m: square(m(run.batch(3, 4))))


class Routed(nn.Module):
    """Part 0 runs the first expert, part 1 the second one."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor, number: int) -> Tensor:
        """Run one expert."""
        return self.head(self.experts[number](self.stem(x)).tanh())


UNITS_OF_SOME = "gradients of a unit that only some ranks run are added to another's"


@program(
    faces=(FSDP2,),
    differs={"*/torch": UNITS_OF_SOME},
    cases={
        "plain": {"flag": False, "differs": {"*/*": "an error on every rank"}},
        "flag": {"flag": True},
    },
)
def experts_of_some_ranks(run: Run, flag: bool) -> None:
    """Each rank runs another expert of equal size. With the flag this is right.

    Without it, it is right or an error on every rank.
    """
    # Gathers are collectives, so both are gathered by all ranks, and kept.
    model = run.shard(Routed(), "experts.*", reshard=False)
    optimizer = sgd(model)
    if flag:
        run.tell(model, "set_reduce_scatter_unused_params", True)
    for expert in model.experts:
        run.tell(expert, "unshard")
    run.train(model, lambda m: square(m(run.batch(4, 4), run.part)), steps=1, optimizer=optimizer)


@program()
def layer_drop_that_agrees(run: Run) -> None:
    """Layers that all ranks leave out in some steps."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Residual(4) for _ in range(3))

        def forward(self, x: Tensor, left_out: int) -> Tensor:
            for number, layer in enumerate(self.layers):
                if number != left_out:
                    x = layer(x)
            return x

    model = run.shard(Dropping(), "layers.*")
    left_out = iter((3, 0, 1, 2, 3))
    run.train(model, lambda m: square(m(run.batch(4, 4), next(left_out))), steps=5)


@program()
def layers_in_another_order_each_step(run: Run) -> None:
    """All ranks agree about the order, which changes."""

    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor, order: str) -> Tensor:
            for number in order:
                x = self.layers[int(number)](x).tanh()
            return x

    model = run.shard(Shuffled(), "layers.*")
    orders = iter(("012", "210", "102", "012"))
    run.train(model, lambda m: square(m(run.batch(4, 4), next(orders))), steps=4)


@program(faces=ALL_FACES)
def generate_then_learn(run: Run) -> None:
    """RL: generate token by token without gradients, then learn from what came out."""
    model = run.shard(Gpt(), "blocks.*")
    optimizer = sgd(model)
    for _ in range(2):
        tokens = run.ints(11, 2, 2)
        with torch.no_grad():
            for _ in range(3):
                tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
        run.see("tokens", tokens)
        scores = model(tokens[:, :-1]).log_softmax(-1)
        chosen = scores.gather(-1, tokens[:, 1:, None]).squeeze(-1)
        loss = -(chosen * run.batch(2, 1)).mean()
        run.see("loss", loss)
        loss.backward()
        run.step(optimizer)


@program(faces=(FSDP2,))
def generate_as_a_forward_method(run: Run) -> None:
    """`register_fsdp_forward_method` on a method that calls the model, then a layer of the root."""

    class Generating(Gpt):
        def generate(self, tokens: Tensor) -> Tensor:
            with torch.no_grad():
                scores = self(tokens)
            return self.norm(self.embedding(scores.argmax(-1)))

    model = run.shard(Generating(), "blocks.*")
    if run.is_fsdp2:
        run.api.register_fsdp_forward_method(model, "generate")
    for _ in range(2):
        with torch.no_grad():
            run.see("generated", model.generate(run.ints(11, 2, 3)))
    run.train(model, lambda m: next_token_loss(run, m, 11))


@program(faces=(FSDP2,))
def forward_methods_besides_forward(run: Run) -> None:
    """A model with `encode` and `decode` only."""

    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = mlp(4, 3), mlp(3, 4)

        def encode(self, x: Tensor) -> Tensor:
            return self.encoder(x)

        def decode(self, z: Tensor) -> Tensor:
            return self.decoder(z)

    model = run.shard(Coder(), "decoder")
    if run.is_fsdp2:
        for name in ("encode", "decode"):
            run.api.register_fsdp_forward_method(model, name)
    run.train(model, lambda m: square(m.decode(m.encode(run.batch(4, 4)).tanh())))


@program()
def reference_policy(run: Run) -> None:
    """DPO: a policy and a frozen reference, chosen and rejected in one batch."""
    policy, reference = Embedded(nn.Embedding(7, 4), 4, 7), Embedded(nn.Embedding(7, 4), 4, 7)
    policy = run.shard(policy, "block")
    reference = run.shard(reference.requires_grad_(False), "block")

    def log_probability(model: nn.Module, tokens: Tensor) -> Tensor:
        scores = model(tokens[:, :-1]).log_softmax(-1)
        return scores.gather(-1, tokens[:, 1:, None]).sum((1, 2))

    def loss(m: nn.Module) -> Tensor:
        chosen, rejected = run.ints(7, 2, 4), run.ints(7, 2, 4)
        both = torch.cat([chosen, rejected])
        with torch.no_grad():
            expected = log_probability(reference, both)
        better, worse = (log_probability(m, both) - expected).chunk(2)
        return -F.logsigmoid(better - worse).mean()

    run.train(policy, loss)


@program()
def chunked_loss(run: Run) -> None:
    """The head is called on parts of the sequence; hidden states get their gradients by hand."""

    class Chunked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Residual(4), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    model = run.shard(Chunked(), "body", "head")
    optimizer = sgd(model)
    for _ in range(2):
        hidden = model(run.batch(6, 4))
        detached = hidden.detach().requires_grad_()
        for chunk in detached.chunk(3):
            square(model.head(chunk)).backward()
        hidden.backward(detached.grad)
        run.step(optimizer)


@program()
def loss_inside_of_forward(run: Run) -> None:
    """As transformers: the model computes its loss, in chunks that are checkpointed."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Residual(4), nn.Linear(4, 5)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            hidden = self.body(x)
            total = torch.zeros(())
            for h, y in zip(hidden.chunk(3), labels.chunk(3), strict=True):
                total = total + torch.utils.checkpoint.checkpoint(
                    lambda a, b: F.cross_entropy(self.head(a), b, reduction="sum"),
                    h,
                    y,
                    use_reentrant=False,
                )
            return total / len(x)

    model = run.shard(WithLoss(), "body")
    run.train(model, lambda m: m(run.batch(6, 4), run.ints(5, 6)))


@program(cases={"ours": {}, "three": {"ranks": 3}})
def tokens_counted_over_all_ranks(run: Run) -> None:
    """Sums of losses divided by the number of tokens of all ranks."""
    model = run.shard(mlp(4, 6, 3), "0")
    optimizer = sgd(model)
    for _ in range(2):
        rows = 2 + run.part
        loss = model(run.batch(rows, 4)).square().sum()
        count = run.all_reduce(torch.tensor(float(rows)))
        (loss * run.num_parts / count).backward()
        run.step(optimizer)


@program(
    faces=ALL_FACES,
    cases={"reduced": {"sync": True}, "unreduced": {"sync": False}},
)
def micro_batches(run: Run, sync: bool) -> None:
    """Accumulation, reduced in every backward or in the last one."""
    model = run.shard(Gpt(), "blocks.*")
    optimizer = sgd(model)
    for _ in range(2):
        for number in range(3):
            if sync or number == 2:
                (next_token_loss(run, model, 11) / 3).backward()
                continue
            with run.no_sync(model):
                (next_token_loss(run, model, 11) / 3).backward()
        run.step(optimizer, clip=0.5)


@program(faces=(FSDP2,), cases={"kept": {"kept": True}, "freed": {"kept": False}})
def micro_batches_without_reshard(run: Run, kept: bool) -> None:
    """`set_reshard_after_backward(False)` until the last micro-batch."""
    model = run.shard(Gpt(), "blocks.*")
    optimizer = sgd(model)
    for _ in range(2):
        for number in range(3):
            last = number == 2
            run.tell(model, "set_requires_gradient_sync", last)
            run.tell(model, "set_is_last_backward", last)
            run.tell(model, "set_reshard_after_backward", last or not kept)
            (next_token_loss(run, model, 11) / 3).backward()
        run.step(optimizer)


@program()
def accumulation_over_frozen_layers(run: Run) -> None:
    """Unreduced gradients in units of which a part is frozen, and which changes between."""
    model = mlp(4, 4, 4, 2)
    model[0].weight.requires_grad_(False)
    model = run.shard(model, "0", "2")
    optimizer = sgd(model)
    for _ in range(2):
        with run.no_sync(model):
            square(model(run.batch(4, 4))).backward()
        square(model(run.batch(4, 4))).backward()
        run.step(optimizer)


@program(
    faces=ALL_FACES,
    reference_tolerance=0.05,
    reason=LOW_BITS,
    cases={
        "bf16": {"mp": (torch.bfloat16, torch.float32)},
        "bf16_reduced_in_bf16": {"mp": (torch.bfloat16, None)},
        "reduced_in_bf16": {"mp": (None, torch.bfloat16)},
        "fp16": {"mp": (torch.float16, torch.float32)},
    },
)
def mixed_precision(run: Run, mp: tuple[torch.dtype | None, torch.dtype | None]) -> None:
    """Every pair of dtypes."""
    model = run.shard(nn.Sequential(*(Residual(6) for _ in range(3))), "*", mp=mp)
    run.train(model, lambda m: square(m(run.batch(4, 6))))


@program(
    reference_tolerance=0.05,
    reason=LOW_BITS,
    cases={
        "reduced": {"sync": True},
        "unreduced": {
            "sync": False,
        },
    },
)
def mixed_precision_and_micro_batches(run: Run, sync: bool) -> None:
    """What is accumulated in which dtype."""
    model = run.shard(nn.Sequential(*(Residual(6) for _ in range(2))), "*", mp=LOW)
    optimizer = sgd(model)
    for _ in range(2):
        if sync:
            square(model(run.batch(4, 6))).backward()
        else:
            with run.no_sync(model):
                square(model(run.batch(4, 6))).backward()
        square(model(run.batch(4, 6))).backward()
        run.step(optimizer)


@program(
    faces=(FSDP2,),
    reference_tolerance=0.05,
    reason=LOW_BITS,
    cases={
        "inputs": {"policy": {"cast_forward_inputs": False}},
        "outputs": {"policy": {"output_dtype": torch.float32}},
    },
)
def casts_at_the_boundary(run: Run, policy: dict[str, Any]) -> None:
    """Inputs that stay as they are, outputs of another dtype."""

    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            run.see("dtype", str(x.dtype) if not run.is_alone else "any")
            return self.inner(x.to(self.inner.weight.dtype))

    options = {"mp_policy": run.api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, **policy)}
    model = run.shard(nn.Sequential(Casting(), Casting()), "0", "1", fsdp2=options)
    optimizer = sgd(model)
    for _ in range(2):
        y = model(run.batch(4, 4))
        run.see("output", y.float())
        square(y).backward()
        run.step(optimizer)
    run.record.seen = [(n, v) for n, v in run.record.seen if n != "dtype"]


@program(reference_tolerance=0.05, reason=LOW_BITS)
def autocast(run: Run) -> None:
    """Activations in bfloat16 by autocast, parameters in float32."""
    model = run.shard(nn.Sequential(*(Residual(6) for _ in range(2))), "*")
    optimizer = sgd(model)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = square(model(run.batch(4, 6)))
        run.see("loss", loss)
        loss.backward()
        run.step(optimizer)


@program(reference_tolerance=0.05, reason=LOW_BITS)
def norms_in_full_precision(run: Run) -> None:
    """bfloat16 all over, but for a norm, which is a unit of its own."""
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    if run.is_fsdp2:
        policy = run.api.MixedPrecisionPolicy(
            param_dtype=torch.float32, output_dtype=torch.bfloat16
        )
        run.api.fully_shard(model[1], mp_policy=policy)
        model = run.shard(model, "0", "2", mp=LOW)
    else:
        mixed = run.api.MixedPrecision(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            _module_classes_to_ignore=[nn.LayerNorm],
        )
        model = run.shard(model, "0", "2", fsdp1={"mixed_precision": mixed})
    run.train(model, lambda m: square(m(run.batch(4, 4))))


@program()
def loss_scaling(run: Run) -> None:
    """A gradient scaler that finds what overflowed on one rank."""
    model = run.shard(mlp(4, 4, 2), "0")
    optimizer = sgd(model)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=8.0)
    if not run.is_alone and run.is_wrapped:
        scaler = run.api.ShardedGradScaler("cpu", init_scale=8.0) if run.is_ours else None
        if scaler is None:
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            scaler = ShardedGradScaler("cpu", init_scale=8.0)
    for step in range(3):
        loss = square(model(run.batch(4, 4)))
        if step == 1 and run.part == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        run.reduce()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        run.see("scale", float(scaler.get_scale()))
        optimizer.zero_grad()


@program()
def state_saved_and_loaded(run: Run) -> None:
    """A model's own state dict, loaded into another model."""
    model, other = run.shard(mlp(4, 6, 2), "0"), run.shard(mlp(4, 6, 2), "0")
    run.train(model, lambda m: square(m(run.batch(4, 4))))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    other.load_state_dict(state)
    run.train(other, lambda m: square(m(run.batch(4, 4))))


@program(faces=(FSDP2,))
def copied_before_training(run: Run) -> None:
    """`deepcopy` of the whole model before it is sharded."""
    model = mlp(4, 6, 2)
    other = copy.deepcopy(model)
    model, other = run.shard(model, "0"), run.shard(other, "0", "2")
    run.train(model, lambda m: square(m(run.batch(4, 4))))
    run.train(other, lambda m: square(m(run.batch(4, 4))))


@program(faces=(FSDP2,))
def weights_set_between_steps(run: Run) -> None:
    """Shards are written to by hand: reinitialised, scaled, copied."""
    model = run.shard(mlp(4, 4, 2), "0")
    optimizer = sgd(model)
    for step in range(3):
        square(model(run.batch(4, 4))).backward()
        run.step(optimizer)
        with torch.no_grad():
            if step == 0:
                nn.init.constant_(model[0].bias, 0.5)
            elif step == 1:
                model[0].weight.mul_(0.5)
                model[2].weight.copy_(model[2].weight * 2)
            run.see("evaluation", model(run.batch(4, 4)))


@program(faces=(ORIG,))
def weights_set_while_whole(run: Run) -> None:
    """`summon_full_params`: what is written there reaches all ranks."""
    model = run.shard(mlp(4, 4, 2), "0")
    optimizer = sgd(model)
    for _ in range(2):
        square(model(run.batch(4, 4))).backward()
        run.step(optimizer)
        with run.whole(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.mean())
        with torch.no_grad():
            run.see("evaluation", model(run.batch(4, 4)))


@program(
    faces=(FSDP2,),
    differs={"*/*": "parameters added after sharding train unsynchronised; ours are warned of"},
)
def adapters_added_after_sharding(run: Run) -> None:
    """LoRA put into a sharded model: refused, warned of, or trained on all ranks."""
    model = run.shard(mlp(4, 4, 2), "0")
    torch.manual_seed(5)
    model[0].extra = nn.Parameter(torch.randn(4))
    model[0].register_forward_hook(lambda module, _, y: y + module.extra)
    run.train(model, lambda m: square(m(run.batch(4, 4))))


@program(
    faces=(FSDP2,),
    differs={
        "*/*": "an optimizer made before sharding trains nothing; ours is refused at its step"
    },
)
def optimizer_made_before_sharding(run: Run) -> None:
    """It trains, or there is an error or a warning."""
    model = mlp(4, 4, 2)
    optimizer = sgd(model)
    model = run.shard(model, "0")
    run.train(model, lambda m: square(m(run.batch(4, 4))), optimizer=optimizer)


@program(
    faces=(FSDP2,),
    skips={"*/torch": "freed memory is read, which ends the process"},
    differs={"*/p*": "a weight may be used while its module is unsharded; ours raises, by name"},
)
def weight_kept_across_reshard(run: Run) -> None:
    """A whole weight that a forward put aside is used after backward."""

    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.kept: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.kept[:] = [self.layer.weight.detach()]
            return self.layer(x)

    model = run.shard(nn.Sequential(Keeping(), nn.Linear(4, 2)), "0")
    square(model(run.batch(4, 4))).backward()
    run.see("kept", model[0].kept[0].sum())
