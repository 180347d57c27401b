"""What programs do with autograd around and inside of sharded modules."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.differential.modules import ZEROS, Residual, mlp, square
from tests.differential.program import ALL_FACES, FACES, FSDP2, ORIG, program
from tests.differential.run import Run

STEPS = 2
FREED = "PyTorch's wrapper has freed what the second backward needs"


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    """Make the plainest optimizer."""
    return torch.optim.SGD(model.parameters(), lr=lr)


@program(faces=ALL_FACES)
def several_forwards_one_backward(run: Run) -> None:
    """The sum of two losses."""
    model = run.shard(mlp(4, 6, 3), "0", "2")
    run.train(model, lambda m: square(m(run.batch(4, 4))) + 2 * square(m(run.batch(4, 4))))


@program(faces=ALL_FACES, differs={"orig/torch": FREED, "flat/torch": FREED})
def forwards_that_wait_for_their_backwards(run: Run) -> None:
    """Two forwards, then their backwards in the order of the forwards."""
    model = run.shard(mlp(4, 6, 3), "0", "2")
    optimizer = sgd(model)
    for _ in range(STEPS):
        losses = [square(model(run.batch(4, 4))) for _ in range(2)]
        for loss in losses:
            run.see("loss", loss)
            loss.backward()
        run.step(optimizer)


@program(differs={"orig/torch": FREED})
def forwards_and_backwards_reversed(run: Run) -> None:
    """Two forwards, then their backwards last first."""
    model = run.shard(mlp(4, 6, 3), "0", "2")
    optimizer = sgd(model)
    for _ in range(STEPS):
        losses = [square(model(run.batch(4, 4))) for _ in range(2)]
        for loss in reversed(losses):
            loss.backward()
        run.step(optimizer)


@program(faces=ALL_FACES)
def backward_after_backward(run: Run) -> None:
    """Micro-batches, each reduced."""
    model = run.shard(mlp(4, 6, 3), "0", "2")
    optimizer = sgd(model)
    for _ in range(STEPS):
        for _ in range(3):
            square(model(run.batch(2, 4))).backward()
        run.step(optimizer)


@program(differs={"orig/torch": FREED})
def two_losses_of_one_graph(run: Run) -> None:
    """`retain_graph`: the same graph is run through twice, with two losses."""
    model = run.shard(mlp(4, 6, 3), "0", "2")
    optimizer = sgd(model)
    for _ in range(STEPS):
        outputs = model(run.batch(4, 4))
        square(outputs[:, :2]).backward(retain_graph=True)
        outputs.abs().mean().backward()
        run.step(optimizer)


@program(differs={"orig/torch": FREED})
def the_same_loss_twice(run: Run) -> None:
    """`retain_graph`: gradients are added up twice."""
    model = run.shard(mlp(4, 6, 3), "0", "2")
    optimizer = sgd(model)
    for _ in range(STEPS):
        loss = square(model(run.batch(4, 4)))
        loss.backward(retain_graph=True)
        loss.backward()
        run.step(optimizer)


@program(
    differs={
        "fsdp2/torch": "PyTorch differentiates twice on parameters that it has freed",
        "orig/torch": "PyTorch differentiates twice on parameters that it has freed",
    }
)
def gradient_penalty(run: Run) -> None:
    """WGAN-GP: the gradient on the inputs is part of the loss."""
    model = run.shard(mlp(4, 6, 3), "0", "2")

    def loss(m: nn.Module) -> Tensor:
        inputs = run.batch(4, 4).requires_grad_()
        scores = m(inputs)
        (slope,) = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
        return square(scores) + (slope.norm(dim=1) - 1).square().mean()

    run.train(model, loss)


@program()
def gradient_on_the_inputs(run: Run) -> None:
    """`autograd.grad` on inputs alone; the parameters get none."""
    model = run.shard(mlp(4, 6, 3), "0", "2")
    for _ in range(STEPS):
        inputs = run.batch(4, 4).requires_grad_()
        (slope,) = torch.autograd.grad(square(model(inputs)), inputs)
        run.see("slope", slope)
        run.see_gradients()
    run.train(model, lambda m: square(m(run.batch(4, 4))))


@program()
def adversarial_inputs(run: Run) -> None:
    """FGSM: a backward to the inputs, then a step on what it made of them."""
    model = run.shard(mlp(4, 6, 3), "0", "2")

    def loss(m: nn.Module) -> Tensor:
        inputs = run.batch(4, 4).requires_grad_()
        (slope,) = torch.autograd.grad(square(m(inputs)), inputs)
        return square(m((inputs + 0.1 * slope.sign()).detach()))

    run.train(model, loss)


@program(faces=ALL_FACES)
def inputs_that_need_gradients(run: Run) -> None:
    """The inputs' own gradients, from backward."""
    model = run.shard(mlp(4, 6, 3), "0", "2")
    optimizer = sgd(model)
    for _ in range(STEPS):
        inputs = run.batch(4, 4).requires_grad_()
        square(model(inputs)).backward()
        run.see("inputs", inputs.grad)
        run.step(optimizer)


@program()
def detached_in_the_middle(run: Run) -> None:
    """The first unit runs but gets no gradients."""

    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).detach())

    run.train(run.shard(Cut(), "first", "last"), lambda m: square(m(run.batch(4, 4))))


@program()
def part_without_gradients(run: Run) -> None:
    """A unit that runs under `no_grad` and, later, with gradients."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = self.first(x).abs().mean()
            return self.last(self.first(x) / scale)

    run.train(run.shard(Partly(), "first", "last"), lambda m: square(m(run.batch(4, 4))))


@program(
    faces=ALL_FACES,
    cases={
        "no_grad": {"how": "no_grad"},
        "inference": {
            "how": "inference_mode",
            "differs": {
                "*/torch": "PyTorch gathers into tensors made in inference mode for ever after"
            },
        },
    },
)
def evaluations_between_steps(run: Run, how: str) -> None:
    """Forwards that nobody differentiates, in between."""
    model = run.shard(mlp(4, 6, 3), "0", "2")
    optimizer = sgd(model)
    for _ in range(STEPS):
        with getattr(torch, how)():
            run.see("evaluation", model(run.batch(4, 4)))
        loss = square(model(run.batch(4, 4)))
        with getattr(torch, how)():
            run.see("evaluation", model(run.batch(4, 4)))
        loss.backward()
        run.step(optimizer)


@program()
def forward_without_backward(run: Run) -> None:
    """A forward with gradients whose loss is dropped, as for a skipped batch."""
    model = run.shard(mlp(4, 6, 3), "0", "2")
    optimizer = sgd(model)
    for step in range(3):
        loss = square(model(run.batch(4, 4)))
        if step == 1:
            del loss
            continue
        loss.backward()
        run.step(optimizer)


CHECKPOINTED = {"reentrant": {"reentrant": True}, "not_reentrant": {"reentrant": False}}


@program(faces=ALL_FACES, cases=CHECKPOINTED)
def checkpointed_units(run: Run, reentrant: bool) -> None:
    """Each unit's activations are computed again in backward, around the unit."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(4, 6)
            self.blocks = nn.ModuleList(Residual(6) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    run.train(run.shard(Checkpointed(), "blocks.*"), lambda m: square(m(run.batch(4, 4))))


@program(cases=CHECKPOINTED)
def checkpointed_inside_units(run: Run, reentrant: bool) -> None:
    """Activations are computed again inside of each unit."""

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Residual(6)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant) + x

    model = nn.Sequential(nn.Linear(4, 6), Inside(), Inside())
    run.train(run.shard(model, "1", "2"), lambda m: square(m(run.batch(4, 4))))


@program(cases=CHECKPOINTED)
def checkpointed_over_several_units(run: Run, reentrant: bool) -> None:
    """One checkpoint around two units."""

    class Over(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(4, 6)
            self.pair = nn.Sequential(Residual(6), Residual(6))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.pair, self.stem(x), use_reentrant=reentrant)

    run.train(run.shard(Over(), "pair.*"), lambda m: square(m(run.batch(4, 4))))


@program()
def checkpointed_with_dropout(run: Run) -> None:
    """The state of the generator is restored for the second computation."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.block, x, use_reentrant=False))

    model = run.shard(Noisy(), "block")
    torch.manual_seed(50 + run.part)
    run.train(model, lambda m: square(m(run.batch(4, 4))))


class Cube(torch.autograd.Function):
    """x cubed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Keep x."""
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return 3 x x."""
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


class Project(torch.autograd.Function):
    """x times a weight, transposed: a function that saves the parameter itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Keep both."""
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Use the saved weight."""
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


@program(faces=ALL_FACES)
def custom_functions(run: Run) -> None:
    """Functions of one's own on activations, and on parameters."""

    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return Cube.apply(Project.apply(x, self.layer.weight) + self.layer.bias)

    model = run.shard(nn.Sequential(Custom(), Custom()), "0", "1")
    run.train(model, lambda m: square(m(run.batch(4, 4))))


@program()
def straight_through(run: Run) -> None:
    """A rounded activation with the gradient of the one before (VQ-VAE)."""

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(4, 3), nn.Linear(3, 4)
            self.codes = nn.Embedding(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            z = self.encoder(x)
            codes = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
            commitment = (z - codes.detach()).square().mean() + (codes - z.detach()).square().mean()
            return square(self.decoder(z + (codes - z).detach())) + commitment

    run.train(run.shard(Quantised(), "encoder", "decoder"), lambda m: m(run.batch(4, 4)))


class Both(NamedTuple):
    """Two outputs."""

    logits: Tensor
    hidden: Tensor


@dataclasses.dataclass
class Output:
    """As transformers' models return, apart from the order."""

    loss: Tensor
    logits: Tensor
    extra: dict[str, Tensor] | None = None


Legacy = namedtuple("Legacy", ["logits", "hidden"])


class Returning(nn.Module):
    """Returns its outputs in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        """Compute two outputs."""
        hidden = self.layer(x)
        logits = hidden.tanh()
        return {
            "tuple": lambda: (logits, hidden),
            "list": lambda: [logits, hidden],
            "dict": lambda: {"logits": logits, "hidden": hidden},
            "nested": lambda: {"first": [logits, None, 3], "second": ({"hidden": hidden},)},
            "named": lambda: Both(logits, hidden),
            "legacy": lambda: Legacy(logits, hidden),
            "dataclass": lambda: Output(logits.mean(), logits, {"hidden": hidden}),
        }[self.kind]()

    def both(self, outputs: Any) -> tuple[Tensor, Tensor]:
        """Find them again."""
        if self.kind == "dict":
            return outputs["logits"], outputs["hidden"]
        if self.kind == "nested":
            return outputs["first"][0], outputs["second"][0]["hidden"]
        if self.kind == "dataclass":
            return outputs.logits, outputs.extra["hidden"]
        return tuple(outputs)  # type: ignore[return-value]


KINDS = ("tuple", "list", "dict", "nested", "named", "legacy", "dataclass")


@program(cases={kind: {"kind": kind} for kind in KINDS})
def outputs(run: Run, kind: str) -> None:
    """A unit in the middle that returns a structure."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = (
                nn.Linear(4, 4),
                Returning(kind),
                nn.Linear(4, 2),
            )

        def forward(self, x: Tensor) -> Tensor:
            inner = Returning(kind)
            logits, hidden = inner.both(self.middle(self.first(x)))
            return self.last(logits) * hidden.sum(1, keepdim=True)

    run.train(run.shard(Around(), "first", "middle"), lambda m: square(m(run.batch(4, 4))))


@program(cases={kind: {"kind": kind} for kind in ("tuple", "dict", "dataclass")})
def outputs_of_the_root(run: Run, kind: str) -> None:
    """The root returns a structure, of which one output is not used."""
    plain = Returning(kind)
    model = run.shard(nn.Sequential(nn.Linear(4, 4), Returning(kind)), "0", "1")
    run.train(model, lambda m: square(plain.both(m(run.batch(4, 4)))[0]))


@program(zeros={"orig/*": ZEROS})
def unused_outputs(run: Run) -> None:
    """One of a unit's two branches does not get into the loss."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.used(x), self.unused(x)

    model = run.shard(nn.Sequential(nn.Linear(4, 4), Branches()), "0", "1")
    run.train(model, lambda m: square(m(run.batch(4, 4))[0]))


@program()
def unused_unit(run: Run) -> None:
    """A unit that no rank runs."""

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    run.train(run.shard(Idle(), "used", "idle"), lambda m: square(m(run.batch(4, 4))))


@program(skips={"fsdp2/torch": "Gloo ends the process: ranks reduce different sizes"})
def unused_parameters_on_one_rank(run: Run) -> None:
    """Inside of one unit, only one rank uses a parameter."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, extra: bool) -> Tensor:
            x = self.always(x)
            return self.sometimes(x) if extra else x

    model = run.shard(Sometimes())
    run.train(model, lambda m: square(m(run.batch(4, 4), run.part == 0)))


@program()
def keyword_arguments(run: Run) -> None:
    """Inputs by keyword, in structures, and not tensors."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, *, batch: dict[str, Tensor], scale: float, flags: list[bool]) -> Tensor:
            y = self.layer(batch["x"]) * scale
            return y + batch["y"] if flags[0] else y

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Named(), Named()

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(batch={"x": x, "y": x}, scale=2.0, flags=[True])
            return self.last(batch={"x": y, "y": x}, scale=0.5, flags=[False])

    run.train(run.shard(Outer(), "first", "last"), lambda m: square(m(run.batch(4, 4))))


@program()
def inputs_without_a_batch(run: Run) -> None:
    """The model computes its input itself."""

    class Free(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.code = nn.Parameter(torch.randn(3, 4))
            self.layer = nn.Linear(4, 4)

        def forward(self) -> Tensor:
            return self.layer(self.code)

    run.train(run.shard(Free(), "layer"), lambda m: (square(m()) - run.batch(1)).square().mean())


@program()
def hooks_on_activations(run: Run) -> None:
    """Tensor hooks that change a gradient on its way."""

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
            return self.last(x)

    run.train(run.shard(Hooked(), "first", "last"), lambda m: square(m(run.batch(4, 4))))


@program(cases={"before": {"before": True}, "after": {"before": False}})
def hooks_on_modules(run: Run, before: bool) -> None:
    """Forward hooks and pre-hooks that change what goes through, set before and after sharding."""
    model = mlp(4, 4, 2)

    def add_hooks(module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        module.register_forward_hook(lambda _, args, output: output + args[0].mean())

    if before:
        add_hooks(model[0])
    model = run.shard(model, "0")
    if not before:
        add_hooks(model[0])
    run.train(model, lambda m: square(m(run.batch(4, 4))))


@program()
def backward_hooks_on_modules(run: Run) -> None:
    """Full backward hooks see gradients, and may change them."""
    model = mlp(4, 4, 4, 2)
    seen: list[float] = []

    def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        seen.append(grad_output[0].abs().sum().item())
        return tuple(None if g is None else g * 0.5 for g in grad_input)

    model[2].register_full_backward_hook(hook)
    model = run.shard(model, "0", "2", "4")
    run.train(model, lambda m: square(m(run.batch(4, 4))))
    run.see("seen", torch.tensor(seen))


@program(faces=(FSDP2,))
def hooks_on_sharded_gradients(run: Run) -> None:
    """Post-accumulate hooks set after sharding run once per backward, on reduced gradients."""
    model = run.shard(mlp(4, 4, 2), "0")
    norms: list[Tensor] = []

    def hook(parameter: nn.Parameter) -> None:
        run.average(parameter)
        gradient = parameter.grad
        norms.append(gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient)  # type: ignore[arg-type,operator,union-attr]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    run.train(model, lambda m: square(m(run.batch(4, 4))))
    run.see("calls", float(len(norms)))
    run.see("norms", torch.stack(sorted((n.norm() for n in norms), key=float)))


@program(differs={"*/torch": "hooks set before sharding never fire"})
def hooks_on_parameters_before_sharding(run: Run) -> None:
    """A tensor hook set before sharding: it fires, or sharding says that it will not."""
    model = mlp(4, 4, 2)
    seen: list[int] = []
    model[0].weight.register_hook(lambda _: seen.append(1))
    model = run.shard(model, "0")
    run.train(model, lambda m: square(m(run.batch(4, 4))))
    run.see("calls", float(len(seen)))


@program(
    differs={"*/*": "none, or unreduced: said in a warning where the engine can know of it"},
)
def gradient_on_the_parameters(run: Run) -> None:
    """`autograd.grad` on parameters is right or an error."""
    model = run.shard(mlp(4, 4, 2), "0")
    parameters = list(model.parameters())
    loss = square(model(run.batch(4, 4)))
    gradients = torch.autograd.grad(loss, parameters)
    if run.is_alone:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        run.reduce()
        gradients = tuple(p.grad for p in parameters)  # type: ignore[misc]
    run.see("gradients", dict(zip("abcd", gradients, strict=True)))


@program()
def outputs_changed_in_place(run: Run) -> None:
    """What a unit returns is changed in place by what follows."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            y += 1
            return self.last(y.relu_())

    run.train(run.shard(InPlace(), "first", "last"), lambda m: square(m(run.batch(4, 4))))


class WritesASlice(nn.Module):
    """Replaces half of what it gets, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x[:, :2] = self.layer(x.clone())[:, :2]
        return x


@program(
    differs={"fsdp2/torch": "PyTorch refuses a unit that changes its input in place"},
    cases={
        "activation": {"make": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))},
        "slice": {"make": WritesASlice},
    },
)
def inputs_changed_in_place(run: Run, make: Callable[[], nn.Module]) -> None:
    """A unit changes its input: first of all, or as its output."""
    model = nn.Sequential(nn.Linear(4, 4), make(), nn.Linear(4, 2))
    run.train(run.shard(model, "0", "1"), lambda m: square(m(run.batch(4, 4))))


@program()
def view_returned(run: Run) -> None:
    """A unit returns a view; nothing changes it."""

    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).view(2, -1)

    run.train(
        run.shard(nn.Sequential(nn.Linear(4, 4), Viewing()), "1"),
        lambda m: square(m(run.batch(4, 4))),
    )


@program()
def input_returned(run: Run) -> None:
    """A unit that passes its input through beside its output."""

    class Through(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            x, skip = pair
            return self.layer(x), skip

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Through() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            pair = (x, x * 2)
            for layer in self.layers:
                pair = layer(pair)
            return pair[0] * pair[1]

    run.train(run.shard(Pairs(), "layers.*"), lambda m: square(m(run.batch(4, 4))))


@program()
def parameter_returned(run: Run) -> None:
    """The loss uses a weight that the model returns as a copy."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), self.layer.weight.square()

    model = run.shard(Weighted())

    def loss(m: nn.Module) -> Tensor:
        y, squares = m(run.batch(4, 4))
        return square(y) + squares.sum()

    run.train(model, loss)


@program()
def regularised_in_forward(run: Run) -> None:
    """A penalty on weights, computed in the root's forward from its own parameters."""

    class Regular(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return square(self.other(self.layer(x))) + 0.1 * sum(
                p.square().sum() for p in (self.layer.weight, self.layer.bias)
            )

    run.train(run.shard(Regular(), "other"), lambda m: m(run.batch(4, 4)))


@program(faces=(FSDP2, ORIG))
def frozen_input_gradients(run: Run) -> None:
    """A frozen unit between trained ones still passes gradients on."""
    model = mlp(4, 4, 4, 2)
    model[2].requires_grad_(False)
    run.train(run.shard(model, "0", "2", "4"), lambda m: square(m(run.batch(4, 4))))


@program(faces=FACES)
def anomaly_detection(run: Run) -> None:
    """Autograd's own checks see nothing wrong."""
    model = run.shard(mlp(4, 4, 2), "0")
    for _ in range(STEPS):
        with torch.autograd.set_detect_anomaly(True, check_nan=True):
            square(model(run.batch(4, 4))).backward()
        run.step(sgd(model))


@program()
def saved_tensor_hooks(run: Run) -> None:
    """Activations packed for the time between forward and backward."""
    model = run.shard(mlp(4, 4, 4, 2), "0", "2")
    optimizer = sgd(model)
    for _ in range(STEPS):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            loss = square(model(run.batch(4, 4)))
        loss.backward()
        run.step(optimizer)


@program()
def activations_saved_on_cpu(run: Run) -> None:
    """`save_on_cpu` copies what is saved, parameters included."""
    model = run.shard(mlp(4, 4, 4, 2), "0", "2")
    optimizer = sgd(model)
    for _ in range(STEPS):
        with torch.autograd.graph.save_on_cpu():
            loss = square(model(run.batch(4, 4)))
        loss.backward()
        run.step(optimizer)


@program()
def several_roots(run: Run) -> None:
    """Two models, each its own root, one after the other."""
    first, last = run.shard(mlp(4, 4, 4), "0"), run.shard(mlp(4, 4, 2), "0")
    optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.1)
    for _ in range(STEPS):
        loss = square(last(F.relu(first(run.batch(4, 4)))))
        run.see("loss", loss)
        loss.backward()
        run.step(optimizer)


@program()
def loss_of_one_rank_is_zero(run: Run) -> None:
    """One rank has nothing to learn from its batch, but runs backward."""
    model = run.shard(mlp(4, 4, 2), "0")
    run.train(model, lambda m: square(m(run.batch(4, 4))) * float(run.part == 0))


@program()
def empty_batch_on_one_rank(run: Run) -> None:
    """One rank's batch is empty."""
    model = run.shard(mlp(4, 4, 2), "0")
    run.train(model, lambda m: m(run.batch(4 if run.part == 0 else 0, 4)).square().sum())


@program()
def not_a_number(run: Run) -> None:
    """A loss that overflows on one rank makes gradients that are no numbers on all."""
    model = run.shard(mlp(4, 4, 2), "0")
    big = 1e30 if run.part == 0 else 1.0
    loss = (model(run.batch(4, 4)) * big).square().mean()
    loss.backward()
    run.see_gradients()


@program()
def set_gradients_by_hand(run: Run) -> None:
    """Gradients are scaled in place between backward and step."""
    model = run.shard(mlp(4, 4, 2), "0")
    optimizer = sgd(model)
    for _ in range(STEPS):
        square(model(run.batch(4, 4))).backward()
        run.reduce()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        run.step(optimizer)


@program(cases={"none": {"to_none": True}, "zeros": {"to_none": False}})
def zero_grad_of_the_model(run: Run, to_none: bool) -> None:
    """`model.zero_grad` in place of the optimizer's, before forward."""
    model = run.shard(mlp(4, 4, 2), "0")
    optimizer = sgd(model)
    for _ in range(3):
        model.zero_grad(set_to_none=to_none)
        square(model(run.batch(4, 4))).backward()
        run.see_gradients()
        optimizer.step()
    run.see_gradients()


STAND_INS = "what stays unsharded shows stand-ins between forward and backward"


@program(
    cases={
        "default": {"differs": {"fsdp2/torch": STAND_INS}},
        "kept": {"reshard": False, "differs": {"*/torch": STAND_INS}},
    },
)
def zero_grad_between_forward_and_backward(run: Run, reshard: bool | None = None) -> None:
    """`model.zero_grad` after forward, as many loops have it."""
    model = run.shard(mlp(4, 4, 2), "0", reshard=reshard)
    optimizer = sgd(model)
    for _ in range(3):
        loss = square(model(run.batch(4, 4)))
        model.zero_grad()
        loss.backward()
        run.see_gradients()
        optimizer.step()
