"""Backwards that no output announces, and weights that are frozen for a while.

A gradient that autograd computes has to arrive, whatever a forward returns and whatever was frozen
while the graph waited for its backward.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from tests.differential.autograd import sgd
from tests.differential.modules import ZEROS, mlp, square
from tests.differential.program import ALL_FACES, FLAT, FSDP2, ORIG, program
from tests.differential.run import Run

# What PyTorch does then: its wrapper raises, its `fully_shard` trains nothing, in silence. Not so where another
# unit has an output that it sees.
LOOKS = "PyTorch looks at outputs alone"
UNSEEN = {"*/torch": LOOKS}
SEEN_INSIDE = {"orig/torch": LOOKS, "flat/torch": LOOKS}
DIFFERS = {
    ("root", "slots"): {},
    ("all", "slots"): {},
    ("root", "set"): {"fsdp2/torch": LOOKS},
    ("all", "set"): {},
}


@dataclasses.dataclass
class Held:
    """A result in a slot that nothing looks into."""

    __slots__ = ("loss",)
    loss: Tensor


class Result:
    """A result that is nobody's container."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Kept(nn.Module):
    """Layers whose loss is handed over in some way. ``how`` makes what forward returns."""

    def __init__(self, how: Callable[[Kept, Tensor], Any], depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))
        self.how = how

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.how(self, square(x))


def _as_attribute(model: Kept, loss: Tensor) -> None:
    model.loss = loss


def _beside_logits(model: Kept, loss: Tensor) -> Tensor:
    model.loss = loss
    return loss.detach() * 2


def _backward_inside(model: Kept, loss: Tensor) -> Tensor:
    loss.backward()
    return loss.detach()


WAYS: dict[str, tuple[Callable[[Kept, Tensor], Any], Callable[[Any, Any], Tensor | None]]] = {
    "attribute": (_as_attribute, lambda model, result: model.loss),
    "user_dict": (
        lambda model, loss: collections.UserDict(loss=loss),
        lambda model, result: result["loss"],
    ),
    "object": (lambda model, loss: Result(loss), lambda model, result: result.loss),
    "slots": (lambda model, loss: Held(loss), lambda model, result: result.loss),
    "closure": (lambda model, loss: lambda: loss, lambda model, result: result()),
    "iterator": (lambda model, loss: iter([loss]), lambda model, result: next(result)),
    "set": (lambda model, loss: {loss}, lambda model, result: result.pop()),
    "beside_detached": (_beside_logits, lambda model, result: model.loss),
    "backward_inside": (_backward_inside, lambda model, result: None),
}


def _inner(model: Any) -> Any:
    """Return the module that a wrapper wraps."""
    return getattr(model, "module", model)


@program(
    faces=ALL_FACES,
    cases={
        f"{way}-{units}": {
            "way": way,
            "units": units,
            "differs": DIFFERS.get((units, way), UNSEEN if units == "root" else SEEN_INSIDE),
        }
        for way in WAYS
        for units in ("root", "all")
    },
)
def results_that_nobody_sees(run: Run, way: str, units: str) -> None:
    """The loss comes out of the model in a way that shows no tensor; also summed up over steps."""
    how, get = WAYS[way]
    model = run.shard(Kept(how), *(["layers.*"] if units == "all" else []))
    optimizer = sgd(model)
    for step in range(4):
        result = model(run.batch(3, 4))
        if (loss := get(_inner(model), result)) is not None:
            run.see("loss", loss)
            loss.backward()
        if step != 1:
            run.step(optimizer)


@program(faces=(FSDP2,), differs=UNSEEN)
def result_of_a_block_that_nobody_sees(run: Run) -> None:
    """Blocks hand over objects, so nothing gathers a block again before its own backward."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, state: Result) -> Result:
            return Result(state.loss + self.down(torch.tanh(self.up(state.loss))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Result:
            state = Result(x)
            for block in self.blocks:
                state = block(state)
            return Result(self.head(state.loss))

    model = run.shard(Model(), "blocks.*")
    run.train(model, lambda m: square(m(run.batch(3, 4)).loss), steps=3)


@program(
    faces=ALL_FACES,
    cases={
        "root": {"units": (), "differs": UNSEEN},
        "all": {"units": ("0", "2", "4"), "differs": SEEN_INSIDE},
    },
    zeros={"orig/*": ZEROS},
)
def feature_of_a_layer(run: Run, units: tuple[str, ...]) -> None:
    """A forward hook catches what an inner layer returns; the model's output is not used."""
    layers, caught = mlp(4, 6, 6, 3), {}
    layers[2].register_forward_hook(lambda module, args, output: caught.update(feature=output))
    model = run.shard(layers, *units)
    optimizer = sgd(model)
    for _ in range(3):
        model(run.batch(3, 4))
        loss = square(caught["feature"])
        run.see("loss", loss)
        loss.backward()
        run.step(optimizer)


@program(faces=ALL_FACES, differs=UNSEEN)
def detached_output_and_a_kept_loss(run: Run) -> None:
    """Without synchronisation first; then both are reduced."""
    model = run.shard(Kept(_beside_logits))
    optimizer = sgd(model)
    for _ in range(2):
        with run.no_sync(model):
            model(run.batch(3, 4))
            _inner(model).loss.backward()
        model(run.batch(3, 4))
        _inner(model).loss.backward()
        run.step(optimizer)


def _nothing(run: Run, model: Any, x: Tensor) -> None:
    """Touch nothing."""


def _reference(run: Run, model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


def _with_gradients(run: Run, model: Any, x: Tensor) -> Tensor:
    return model(x.clone().requires_grad_())


def _state_dict(run: Run, model: Any, x: Tensor) -> None:
    run.see_state(model)


def _unshard(run: Run, model: Any, x: Tensor) -> None:
    run.tell(model, "unshard")
    run.tell(model, "reshard")


def _whole(run: Run, model: Any, x: Tensor) -> None:
    with run.whole(model, writeback=False):
        list(model.parameters())


TOUCHES = {
    "nothing": _nothing,
    "reference": _reference,
    "with_gradients": _with_gradients,
    "state_dict": _state_dict,
    "unshard": _unshard,
    "whole": _whole,
}
FROZEN = "PyTorch reduces what was frozen since"
LATER = "PyTorch's wrapper has freed, or shows otherwise, what the backward needs"


@program(
    faces=ALL_FACES,
    cases={
        f"{touch}-{'freed' if reshard is None else 'stays'}": {
            "touch": touch,
            "reshard": reshard,
            "differs": {} if reshard is None else {"orig/torch": LATER},
        }
        for touch in TOUCHES
        for reshard in (None, False)
    },
)
def frozen_between_forward_and_backward(run: Run, touch: str, reshard: bool | None) -> None:
    """DPO with adapters: the policy's graph waits, its weights are frozen, the reference runs."""
    model = run.shard(mlp(4, 6, 3), "0", "2", reshard=reshard)
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        x = run.batch(3, 4)
        policy = model(x)
        model.requires_grad_(False)
        reference = TOUCHES[touch](run, model, x)
        model.requires_grad_(True)
        loss = (
            square(policy) if reference is None else F.mse_loss(policy, reference) + square(policy)
        )
        run.see("loss", loss)
        loss.backward()
        run.step(optimizer)


@program(
    faces=ALL_FACES,
    cases={
        f"{units}-{'freed' if reshard is None else 'stays'}": {
            "units": units,
            "reshard": reshard,
            "differs": UNSEEN if units == "root" else SEEN_INSIDE,
        }
        for units in ("root", "all")
        for reshard in (None, False)
    },
)
def frozen_while_a_loss_that_nobody_sees_waits(run: Run, units: str, reshard: bool | None) -> None:
    """Nothing comes before the gradients, and users freeze and unfreeze what an optimizer has."""
    kept = Kept(_as_attribute)
    model = run.shard(kept, *(["layers.*"] if units == "all" else []), reshard=reshard)
    optimizer = SGD(parameters := [*model.parameters()], lr=0.1)
    for _ in range(3):
        x = run.batch(3, 4)
        model(x)
        loss = _inner(model).loss
        for parameter in parameters:
            parameter.requires_grad_(False)
        with torch.no_grad():
            model(x)
        for parameter in parameters:
            parameter.requires_grad_(True)
        loss.backward()
        run.step(optimizer)


@program(
    faces=(FSDP2,),
    cases={
        f"{'' if reentrant else 'not_'}reentrant": {"reentrant": reentrant}
        for reentrant in (True, False)
    },
)
def frozen_before_a_forward_is_computed_again(run: Run, reentrant: bool) -> None:
    """Checkpointed layers that stay whole record in backward what they would have in forward."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.scale = mlp(4, 6, 4), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in (*self.layers, lambda x: x * self.scale.tanh()):
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    model = run.shard(Checkpointed(), "layers.0", "layers.2", reshard=False)
    optimizer = SGD(parameters := [*model.parameters()], lr=0.1)
    for _ in range(3):
        x = run.batch(3, 4).requires_grad_()
        policy = model(x)
        for parameter in parameters:
            parameter.requires_grad_(False)
        with torch.no_grad():
            reference = model(x)
        for parameter in parameters:
            parameter.requires_grad_(True)
        F.mse_loss(policy, reference + 1).backward()
        run.step(optimizer)


@program(faces=(FSDP2,))
def frozen_through_the_whole_parameters(run: Run) -> None:
    """Users keep what they saw after forward, whole, and unfreeze it while modules show shards."""
    model = run.shard(mlp(4, 6, 3), "0", "2", reshard=False)
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = square(model(run.batch(3, 4)))
        seen = [*model.parameters()]
        for parameter in seen:
            parameter.requires_grad_(False)
        run.see_state(model)
        for parameter in seen:
            parameter.requires_grad_(True)
        loss.backward()
        run.step(optimizer)


@program(faces=(FSDP2,), differs=UNSEEN)
def trained_in_turn(run: Run) -> None:
    """A hook of the user's, called after the unit was gathered, says which layer this step trains."""
    model = run.shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
    optimizer = SGD(model.parameters(), lr=0.1)
    step = 0

    def choose(module: nn.Module, args: Any) -> None:
        for number, layer in enumerate(module):  # type: ignore[arg-type]
            layer.requires_grad_(number == step % 3)

    model.register_forward_pre_hook(choose)
    for step in range(4):  # noqa: B007  (the hook reads it)
        square(model(run.batch(3, 4).requires_grad_())).backward()
        run.step(optimizer)


@program(faces=ALL_FACES, differs={"orig/torch": FROZEN, "flat/torch": FROZEN})
def frozen_until_after_the_backward(run: Run) -> None:
    """What is frozen when its gradient comes gets none, as a leaf in one process."""
    model = run.shard(mlp(4, 6, 3))
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x = run.batch(3, 4)
        loss = square(model(x))
        model.requires_grad_(False)
        with torch.no_grad():
            run.see("reference", model(x))
        loss.backward()
        model.requires_grad_(True)
        run.see_gradients()
        run.train(model, lambda m: square(m(run.batch(3, 4))), steps=1, optimizer=optimizer)


@program(faces=(FSDP2,))
def adapters_disabled_for_the_reference(run: Run) -> None:
    """PEFT's `disable_adapter`: adapters are frozen for the reference's forward, the base always."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(4, 4)
            self.base.requires_grad_(False)
            self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
            self.is_on = True

        def forward(self, x: Tensor) -> Tensor:
            out = self.base(x)
            return torch.tanh(out + self.up(self.down(x)) if self.is_on else out)

    def switch(model: nn.Module, on: bool) -> None:
        for module in model.modules():
            if isinstance(module, Adapted):
                module.is_on = on
                module.down.requires_grad_(on)
                module.up.requires_grad_(on)

    model = run.shard(nn.Sequential(*(Adapted() for _ in range(3))), "0", "1", "2")
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        x = run.batch(3, 4)
        chosen, rejected = model(x), model(x.flip(0))
        switch(model, False)
        with torch.no_grad():
            reference = model(x)
        switch(model, True)
        margin = (chosen - rejected).mean() - reference.mean()
        loss = -F.logsigmoid(margin) + F.mse_loss(chosen, reference)
        run.see("loss", loss)
        loss.backward()
        run.step(optimizer)


@program(faces=ALL_FACES, differs=UNSEEN)
def frozen_for_a_while_and_kept_loss(run: Run) -> None:
    """Both at once: no output announces the backward, and the weights were frozen since."""
    model = run.shard(Kept(_as_attribute))
    optimizer = sgd(model)
    for _ in range(3):
        x = run.batch(3, 4)
        model(x)
        loss = _inner(model).loss
        model.requires_grad_(False)
        with torch.no_grad():
            model(x)
        model.requires_grad_(True)
        loss.backward()
        run.see("loss", loss)
        run.step(optimizer)


@program(faces=ALL_FACES)
def frozen_by_a_list_of_parameters(run: Run) -> None:
    """Frozen through a list that was made before, not through the model."""
    model = run.shard(mlp(4, 6, 3), "0")
    known = list(model.parameters())
    optimizer = SGD(known, lr=0.1)
    for _ in range(3):
        x = run.batch(3, 4)
        policy = model(x)
        for parameter in known:
            parameter.requires_grad_(False)
        with torch.no_grad():
            reference = model(x)
        for parameter in known:
            parameter.requires_grad_(True)
        loss = F.mse_loss(policy, reference) + square(policy)
        run.see("loss", loss)
        loss.backward()
        run.step(optimizer)


@program(
    faces=ALL_FACES,
    cases={"first": {"when": 0}, "later": {"when": 1}},
    differs={"*/torch": "PyTorch gathers in the mode, and goes on with what that leaves"},
)
def forward_under_fake_tensor_mode(run: Run, when: int) -> None:
    """Shapes are computed with a model whose parameters are real; nothing is left of it."""
    model = run.shard(mlp(4, 6, 3), "0")
    optimizer = sgd(model)
    for step in range(3):
        if step == when:
            with FakeTensorMode(allow_non_fake_inputs=True):
                run.see("shape", str(tuple(model(torch.ones(2, 4)).shape)))
        run.train(model, lambda m: square(m(run.batch(3, 4))), steps=1, optimizer=optimizer)


@program(faces=ALL_FACES)
def penalty_over_the_modules_own_parameters(run: Run) -> None:
    """A forward goes through ``self.parameters()``, which are whole then, whatever is registered."""

    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x) * sum(p.square().sum() for p in self.parameters())

    run.train(run.shard(Penalised()), lambda m: square(m(run.batch(3, 4))))


@program(
    faces=(ORIG, FLAT),
    differs={"*/torch": "PyTorch does not reduce it, or fails, unless another backward follows"},
    zeros={"*": ZEROS},
)
def weight_differentiated_alone(run: Run) -> None:
    """Without division a weight is whole all the time, and any gradient of it is reduced."""
    model = run.shard(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)),
        "0",
        fsdp1={"sharding_strategy": run.api.ShardingStrategy.NO_SHARD},
    )
    optimizer = sgd(model)
    for step in range(4):
        loss = square(model(run.batch(3, 4)))
        weight = _inner(_inner(model)[0]).weight
        (square(weight) * (run.part + 1)).backward()
        if step % 2:
            loss.backward()
        run.step(optimizer)


@program(faces=(ORIG, FLAT))
def weight_as_a_units_output(run: Run) -> None:
    """A soft prompt, without division: nothing is freed under it."""

    class Prompt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.randn(3, 4))

        def forward(self) -> Tensor:
            return self.rows

    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt, self.layer = Prompt(), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + self.prompt())

    no_shard = {"sharding_strategy": run.api.ShardingStrategy.NO_SHARD}
    model = run.shard(Prompted(), "prompt", fsdp1=no_shard)
    run.train(model, lambda m: square(m(run.batch(3, 4))))


@program(faces=(ORIG, FLAT), differs={"*/torch": "PyTorch refuses it, or loses it"})
def weight_written_to_without_division(run: Run) -> None:
    """A module clamps its own weight in its forward: all of it is here, and nobody else reads it."""

    class Clamped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    no_shard = {"sharding_strategy": run.api.ShardingStrategy.NO_SHARD}
    model = run.shard(nn.Sequential(Clamped(4, 4), nn.Linear(4, 2)), "0", fsdp1=no_shard)
    run.train(model, lambda m: square(m(run.batch(3, 4))), steps=4)
