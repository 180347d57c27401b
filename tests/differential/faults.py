"""What goes wrong on all ranks or on one, and what comes after."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from tests.differential.autograd import sgd
from tests.differential.modules import Gpt, mlp, next_token_loss, square
from tests.differential.program import ALL_FACES, FSDP2, ORIG, program
from tests.differential.run import Run
from tests.releases import RELEASE

SOON_S = 5.0
# Before that, PyTorch's engine lacks methods that these programs call.
BEFORE: dict[str, str] = (
    {} if RELEASE >= (2, 13) else {"*/torch": "torch before 2.13 lacks what it needs"}
)


class Failing(nn.Module):
    """Raises when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.when = ""

    def forward(self, x: Tensor) -> Tensor:
        """Fail in forward or in backward."""
        if self.when == "forward":
            raise ValueError("in forward")
        y = self.layer(x)
        if self.when == "backward":
            y.register_hook(self._fail)
        return y

    def _fail(self, gradient: Tensor) -> Tensor:
        raise ValueError("in backward")


FENCE = "a fence waits for ranks that do not evaluate"
LATER = "PyTorch adds up gradients of the backward that failed"


@program(
    faces=ALL_FACES,
    cases={
        "forward": {"when": "forward"},
        "backward": {"when": "backward", "differs": {"orig/torch": LATER, "flat/torch": LATER}},
    },
)
def exception_on_all_ranks(run: Run, when: str) -> None:
    """The step after it works as if it had not been."""
    failing = Failing()
    model = run.shard(nn.Sequential(nn.Linear(4, 4), failing, nn.Linear(4, 2)), "0", "1", "2")
    optimizer = sgd(model)
    run.train(model, lambda m: square(m(run.batch(4, 4))), optimizer=optimizer)
    failing.when = when
    run.attempt(lambda: square(model(run.batch(4, 4))).backward())
    failing.when = ""
    optimizer.zero_grad()
    if run.is_fsdp2 and run.api.is_torch:
        model.reset_iter_state()
    run.train(model, lambda m: square(m(run.batch(4, 4))), optimizer=optimizer)


@program(faces=(FSDP2, ORIG))
def exception_in_the_loss(run: Run) -> None:
    """Forward is over, backward never comes."""
    model = run.shard(mlp(4, 4, 2), "0")
    optimizer = sgd(model)
    for step in range(4):
        try:
            loss = square(model(run.batch(4, 4)))
            if step % 2:
                raise KeyError
            loss.backward()
            run.step(optimizer)
        except KeyError:
            run.see("caught", float(step))


@program(
    faces=(FSDP2, ORIG),
    cases={
        "replicated": {"how": "replicated"},
        "kept": {
            "how": "kept",
            "skips": {"fsdp2/torch": "PyTorch waits for the other ranks"},
            "differs": {"fsdp2/p*": "an optimizer of what stays unsharded is refused, by name"},
        },
    },
)
def evaluation_on_rank_0_alone(run: Run, how: str) -> None:
    """What is whole everywhere needs no other rank."""
    if how == "replicated":
        model = run.shard(
            mlp(4, 4, 2),
            "0",
            mesh=(2, 1) if run.face == FSDP2 else None,
            fsdp1={"sharding_strategy": run.api.ShardingStrategy.NO_SHARD},
        )
    else:
        model = run.shard(mlp(4, 4, 2), "0", reshard=False)
        with torch.no_grad():
            model(run.batch(4, 4))
    optimizer = sgd(model)
    for _ in range(2):
        square(model(run.batch(4, 4))).backward()
        run.step(optimizer)
        if how == "kept":
            with torch.no_grad():
                model(run.batch(4, 4))
        if run.part == 0:
            with torch.no_grad():
                run.see("evaluation", model(run.batch(4, 4)))


REFUSED: dict[str, Any] = {
    "twice": lambda run: run.api.fully_shard(run.api.fully_shard(nn.Linear(2, 2))),
    "list": lambda run: run.api.fully_shard(nn.ModuleList([nn.Linear(2, 2)])),
    "mesh_3d": lambda run: run.api.fully_shard(nn.Linear(2, 2), mesh=run.mesh(1, 2, 1)),
    "reshard_3": lambda run: run.api.fully_shard(nn.Linear(2, 2), reshard_after_forward=3),
    "dim_5": lambda run: run.api.fully_shard(
        nn.Linear(2, 2), shard_placement_fn=lambda p: torch.distributed.tensor.Shard(5)
    ),
    "uneven": lambda run: run.api.fully_shard(
        nn.Linear(3, 4, bias=False), shard_placement_fn=lambda p: torch.distributed.tensor.Shard(1)
    ),
    "factor": lambda run: run.api.fully_shard(nn.Linear(2, 2)).set_reduce_scatter_max_input_buffers(
        0
    ),
    "meta": lambda run: run.api.fully_shard(nn.Linear(2, 2, device="meta"))(torch.ones(2, 2)),
    "copied": lambda run: __import__("copy").deepcopy(_trained(run)),
}


def _trained(run: Run) -> nn.Module:
    model = run.api.fully_shard(nn.Linear(2, 2))
    model(torch.ones(2, 2)).sum().backward()
    return model


@program(
    faces=(FSDP2,),
    has_reference=False,
    reason="what is refused",
    cases={name: {"case": name, "skips": BEFORE if name == "factor" else {}} for name in REFUSED},
)
def refused(run: Run, case: str) -> None:
    """Both engines raise, errors that the same `except` catches, soon."""
    begin = time.monotonic()
    run.attempt(lambda: REFUSED[case](run))
    run.see("soon", str(time.monotonic() - begin < SOON_S))


@program(faces=ALL_FACES, skips=BEFORE)
def wrong_input_then_right(run: Run) -> None:
    """A shape that does not fit, on all ranks, in the first forward ever."""
    model = run.shard(mlp(4, 4, 2), "0", "2")
    optimizer = sgd(model)
    run.attempt(lambda: model(run.batch(4, 5)))
    if run.is_fsdp2 and run.api.is_torch:
        model.reset_iter_state()
    run.train(model, lambda m: square(m(run.batch(4, 4))), optimizer=optimizer)


@program(
    faces=(FSDP2, ORIG),
    differs={
        f"{FSDP2}/p*": "an optimizer of what an exception left unsharded is refused at its step, by name",
        "orig/torch": "PyTorch shows tensors that cannot be optimised",
    },
    skips=BEFORE,
)
def optimizer_made_after_an_exception(run: Run) -> None:
    """The model was tried out with an input that does not fit before there is an optimizer."""
    model = run.shard(mlp(4, 4, 2), "0", "2")
    run.attempt(lambda: model(run.batch(4, 5)))
    if run.is_fsdp2 and run.api.is_torch:
        model.reset_iter_state()
    run.train(model, lambda m: square(m(run.batch(4, 4))))


@program(faces=(FSDP2, ORIG))
def backward_twice_is_an_error(run: Run) -> None:
    """The second backward of one graph without `retain_graph`, and the step after it."""
    model = run.shard(mlp(4, 4, 2), "0")
    optimizer = sgd(model)
    loss = square(model(run.batch(4, 4)))
    loss.backward()
    run.attempt(loss.backward)
    optimizer.zero_grad()
    run.train(model, lambda m: square(m(run.batch(4, 4))), optimizer=optimizer)


@program(faces=(FSDP2, ORIG))
def keyboard_interrupt_in_forward(run: Run) -> None:
    """Exceptions that are no `Exception`."""
    model = run.shard(Gpt(), "blocks.*")
    optimizer = sgd(model)
    handle = model.blocks[1].register_forward_pre_hook(_interrupt)
    try:
        model(run.ints(11, 2, 3))
    except KeyboardInterrupt:
        run.see("interrupted", 1.0)
    handle.remove()
    if run.is_fsdp2 and run.api.is_torch:
        model.reset_iter_state()
    run.train(model, lambda m: next_token_loss(run, m, 11), optimizer=optimizer)


def _interrupt(module: nn.Module, args: Any) -> None:
    raise KeyboardInterrupt
