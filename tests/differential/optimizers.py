"""Optimizers on sharded parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from tests.differential.autograd import sgd
from tests.differential.modules import Gpt, mlp, next_token_loss, square
from tests.differential.program import ALL_FACES, FACES, FSDP2, program
from tests.differential.run import Run

# With the usual eps, Adam turns the rounding of a gradient near zero into a full step.
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd_foreach": lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd_fused": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4, weight_decay=0.1),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, eps=1e-4),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-3, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, eps=1e-4),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, eps=1e-4),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5, eps=1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
}
ROUNDING = "a gradient's rounding is divided by its own root mean square"
SHOWN = "stand-ins are shown in place of parameters that stay unsharded"
REFUSED = "an optimizer of what stays unsharded is refused at its step, by name"
FUSED = "torch has no fused SGD for DTensors; `step_on_shards` has"


@program(
    tolerance=1e-4,
    reason=ROUNDING,
    cases={
        name: {
            "name": name,
            "faces": ALL_FACES if name in ("momentum", "adamw") else FACES,
            "skips": {"fsdp2/*": FUSED} if name == "sgd_fused" else {},
        }
        for name in OPTIMIZERS
        if name != "name"
    },
)
def optimizer(run: Run, **arguments: str) -> None:
    """Each optimizer of torch that works element by element."""
    model = run.shard(Gpt(), "blocks.*")
    optimizer = OPTIMIZERS[arguments["name"]](model.parameters())
    run.train(model, lambda m: next_token_loss(run, m, 11), steps=3, optimizer=optimizer)


@program(faces=(FSDP2,), tolerance=1e-4, reason=ROUNDING, cases={"sgd": {}, "adamw": {}})
def stepping_on_shards(run: Run) -> None:
    """`step_on_shards`, which steps on plain tensors."""
    model = run.shard(Gpt(), "blocks.*")
    kind = "adamw_foreach" if "adamw" in run.program.name else "momentum"
    optimizer = OPTIMIZERS[kind](model.parameters())
    if run.is_ours:
        optimizer = run.api.step_on_shards(optimizer)
    run.train(model, lambda m: next_token_loss(run, m, 11), steps=3, optimizer=optimizer)


@program(tolerance=1e-4, reason=ROUNDING)
def parameter_groups(run: Run) -> None:
    """No decay for vectors, another learning rate for the head."""
    model = Gpt()
    decayed = {name for name, p in model.named_parameters() if p.ndim > 1}
    model = run.shard(model, "blocks.*")
    named = {n.replace("_fsdp_wrapped_module.", ""): p for n, p in model.named_parameters()}
    groups = [
        {"params": [p for n, p in named.items() if n in decayed], "weight_decay": 0.1},
        {"params": [p for n, p in named.items() if n not in decayed], "lr": 0.001},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0, eps=1e-4)
    run.train(model, lambda m: next_token_loss(run, m, 11), steps=3, optimizer=optimizer)


@program(cases={"none": {"to_none": True}, "zeros": {"to_none": False}})
def gradients_cleared(run: Run, to_none: bool) -> None:
    """Both ways to clear gradients, with a unit that is not used in every step."""

    class Alternating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
            return self.head(self.layers[number](x))

    model = run.shard(Alternating(), "layers.*")
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in (0, 1, 1, 0):
        square(model(run.batch(4, 4), number)).backward()
        run.step(optimizer, set_to_none=to_none)


@program()
def learning_rate_schedule(run: Run) -> None:
    """Warm-up, then a cosine."""
    model = run.shard(mlp(4, 6, 2), "0")
    optimizer = SGD(model.parameters(), lr=0.1)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [2])
    for _ in range(4):
        square(model(run.batch(4, 4))).backward()
        run.step(optimizer)
        schedule.step()
        run.see("rate", float(schedule.get_last_lr()[0]))


@program(faces=(FSDP2,))
def optimizer_in_backward(run: Run) -> None:
    """Each parameter is stepped by a post-accumulate hook, and its gradient dropped."""
    model = run.shard(mlp(4, 6, 2), "0", "2")
    optimizers = {parameter: SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def hook(parameter: nn.Parameter) -> None:
        run.average(parameter)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(hook)
    for _ in range(3):
        loss = square(model(run.batch(4, 4)))
        run.see("loss", loss)
        loss.backward()


@program(faces=ALL_FACES, cases={"two": {"p": 2.0}, "one": {"p": 1.0}, "inf": {"p": float("inf")}})
def clipping(run: Run, p: float) -> None:
    """The norm, of every kind, and what it makes of the gradients."""
    model = run.shard(Gpt(), "blocks.*")
    optimizer = sgd(model)
    for _ in range(2):
        next_token_loss(run, model, 11).backward()
        run.see("norm", run.clip(model, 0.05, p))
        run.step(optimizer)


@program(faces=(FSDP2,))
def clipping_by_torch(run: Run) -> None:
    """torch's own `clip_grad_norm_`, and `clip_grad_value_`, on DTensors."""
    model = run.shard(Gpt(), "blocks.*")
    optimizer = sgd(model)
    for _ in range(2):
        next_token_loss(run, model, 11).backward()
        run.reduce()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        run.see("norm", norm)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        run.step(optimizer)


@program()
def clipping_with_frozen_parameters(run: Run) -> None:
    """Parameters without gradients count for nothing."""
    model = mlp(4, 4, 4, 2)
    model[2].requires_grad_(False)
    model = run.shard(model, "0", "2")
    run.train(model, lambda m: square(m(run.batch(4, 4))), clip=0.01)


@program()
def clipping_of_what_is_missing(run: Run) -> None:
    """No gradient is there at all."""
    model = run.shard(mlp(4, 4, 2), "0")
    run.see("norm", run.clip(model, 1.0))


@program(tolerance=1e-4, reason=ROUNDING, faces=(FSDP2,))
def optimizer_state_carried_over(run: Run) -> None:
    """An optimizer's own state dict, loaded into another one of the same model."""
    model = run.shard(mlp(4, 6, 2), "0")
    first = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    run.train(model, lambda m: square(m(run.batch(4, 4))), optimizer=first)
    second = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    second.load_state_dict(first.state_dict())
    run.train(model, lambda m: square(m(run.batch(4, 4))), optimizer=second)


@program(
    tolerance=1e-4,
    reason=ROUNDING,
    differs={"fsdp2/torch": SHOWN, "fsdp2/p*": REFUSED},
)
def optimizer_made_after_a_forward(run: Run) -> None:
    """A dry run without gradients, then the optimizer."""
    model = run.shard(mlp(4, 6, 2), "0", reshard=False)
    with torch.no_grad():
        model(run.batch(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    run.train(model, lambda m: square(m(run.batch(4, 4))), optimizer=optimizer)


@program(differs={"fsdp2/torch": SHOWN, "fsdp2/p*": REFUSED})
def optimizer_made_between_forward_and_backward(run: Run) -> None:
    """It gets the parameters that are there then."""
    model = run.shard(mlp(4, 6, 2), "0")
    loss = square(model(run.batch(4, 4)))
    optimizer = sgd(model)
    loss.backward()
    run.step(optimizer)
    run.train(model, lambda m: square(m(run.batch(4, 4))), optimizer=optimizer)


@program(
    differs={
        "fsdp2/*": "DTensors do not have what it needs",
        "orig/*": "each rank multiplies what it has, in PyTorch as well",
    }
)
def lbfgs(run: Run) -> None:
    """Needs a closure, dot products over all ranks: refused or right, never per rank."""
    model = run.shard(mlp(4, 3, 1), "0")
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    x = run.batch(4, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = square(model(x))
        loss.backward()
        run.reduce()
        return loss

    run.attempt(lambda: optimizer.step(closure))


@program(
    faces=(FSDP2,), tolerance=1e-4, reason=ROUNDING, differs={"*/*": "DTensors lack an operator"}
)
def adafactor(run: Run) -> None:
    """Factored moments need means over rows and columns of whole matrices."""
    model = run.shard(mlp(4, 6, 2), "0")
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.05)
    run.train(model, lambda m: square(m(run.batch(4, 4))), optimizer=optimizer)


@program(faces=(FSDP2,), tolerance=1e-4, reason=ROUNDING)
def muon_by_hand(run: Run) -> None:
    """Newton-Schulz on whole gradients, as Muon for DTensors does."""
    model = run.shard(mlp(4, 4, 4), "0")
    for _ in range(2):
        square(model(run.batch(4, 4))).backward()
        run.see_gradients()
        with torch.no_grad():
            for parameter in model.parameters():
                gradient: Any = parameter.grad
                whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                update = whole / (whole.norm() + 1e-3)
                if hasattr(parameter, "device_mesh"):
                    update = torch.distributed.tensor.distribute_tensor(
                        update, parameter.device_mesh, parameter.placements
                    )
                parameter.sub_(update, alpha=0.1)
        model.zero_grad()
