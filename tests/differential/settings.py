"""Every spelling of every setting. None of them changes what is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.differential.autograd import sgd
from tests.differential.modules import Gpt, mlp, next_token_loss, square
from tests.differential.program import ALL_FACES, FSDP2, ORIG, program
from tests.differential.run import Run


def train_gpt(run: Run, model: Any, steps: int = 2) -> None:
    """Train with and without an evaluation in between."""
    optimizer = sgd(model)
    for clip in (None, 0.1):
        run.train(
            model,
            lambda m: next_token_loss(run, m, 11),
            steps=steps,
            optimizer=optimizer,
            clip=clip,
        )
        with torch.no_grad():
            run.see("evaluation", next_token_loss(run, model, 11))


@program(
    faces=(FSDP2,),
    cases={
        "true": {"value": True},
        "false": {"value": False},
        "none": {"value": None},
        "all": {"value": 2},
    },
)
def reshard_after_forward(run: Run, value: bool | int | None) -> None:
    """All that the argument may be, where it may."""
    train_gpt(run, run.shard(Gpt(), "blocks.*", reshard=value))


METHODS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "reshard": ("set_reshard_after_forward", (False,), {}),
    "reshard_here": ("set_reshard_after_forward", (True,), {"recurse": False}),
    "backward": ("set_reshard_after_backward", (False,), {}),
    "sum": ("set_force_sum_reduction_for_comms", (True,), {}),
    "unused": ("set_reduce_scatter_unused_params", (True,), {}),
    "buffers": ("set_reduce_scatter_max_input_buffers", (3,), {}),
    "group": ("set_separate_reduce_scatter_group", (), {}),
    "async": ("_set_unshard_async_op", (True,), {}),
    "last": ("set_is_last_backward", (True,), {}),
}


@program(
    faces=(FSDP2,),
    cases={
        name: {
            "case": name,
            "differs": {"*/torch": "clipping and steps do not reach what stays unsharded"}
            if name == "backward"
            else {},
        }
        for name in METHODS
    },
)
def method(run: Run, case: str) -> None:
    """Each method that sets something, on the root."""
    name, args, kwargs = METHODS[case]
    model = run.shard(Gpt(), "blocks.*")
    run.tell(model, name, *args, **kwargs)
    train_gpt(run, model)


@program(faces=(FSDP2,), cases={"root": {"on": "root"}, "blocks": {"on": "blocks"}})
def reshard_changed_between_steps(run: Run, on: str) -> None:
    """`set_reshard_after_forward` back and forth."""
    model = run.shard(Gpt(), "blocks.*")
    optimizer = sgd(model)
    for step in range(4):
        for module in [model] if on == "root" else model.blocks:
            run.tell(module, "set_reshard_after_forward", step % 2 == 0)
        next_token_loss(run, model, 11).backward()
        run.step(optimizer)


@program(faces=(FSDP2,), cases={"forward": {"way": "forward"}, "backward": {"way": "backward"}})
def prefetch_lists(run: Run, way: str) -> None:
    """Lists of what to gather early: the right ones, all, and wrong ones."""
    model = run.shard(Gpt(depth=3), "blocks.*")
    blocks = list(model.blocks)
    for block, others in zip(blocks, (blocks[1:], [blocks[0]], []), strict=True):
        run.tell(block, f"set_modules_to_{way}_prefetch", others)
    train_gpt(run, model)


@program(faces=(FSDP2,), differs={"*/torch": "PyTorch asks Gloo for a sum that it does not offer"})
def factor_of_gradients(run: Run) -> None:
    """`set_gradient_divide_factor` of one block."""
    model = run.shard(Gpt(), "blocks.*")
    for module in (model.blocks[0], model.blocks[1], model):
        run.tell(module, "set_gradient_divide_factor", 4.0)
    optimizer = sgd(model)
    for _ in range(2):
        next_token_loss(run, model, 11).backward()
        run.reduce()
        for parameter in model.parameters():
            if run.is_alone and parameter.grad is not None:
                parameter.grad /= 2
        run.step(optimizer)


@program(faces=(FSDP2,))
def hook_on_reduced_sums(run: Run) -> None:
    """`set_all_reduce_hook`, which halves."""
    model = run.shard(mlp(4, 6, 2), "0", "2", root=True)
    for layer in (model[0], model[2]):
        run.tell(layer, "set_all_reduce_hook", lambda sums: sums.mul_(0.5))
    optimizer = sgd(model)
    for _ in range(2):
        square(model(run.batch(4, 4))).backward()
        run.reduce()
        for parameter in model.parameters():
            if run.is_alone and parameter.grad is not None:
                parameter.grad /= 2
        run.step(optimizer)


@program(faces=(FSDP2,))
def unsharded_by_hand(run: Run) -> None:
    """`unshard` and `reshard` around a step, waiting and not."""
    model = run.shard(Gpt(), "blocks.*")
    optimizer = sgd(model)
    for step in range(3):
        if run.is_fsdp2:
            handle = model.blocks[0].unshard(async_op=step == 1)
            model.blocks[1].unshard()
            if handle is not None:
                handle.wait()
        if step == 2:
            run.tell(model.blocks[0], "reshard")
        next_token_loss(run, model, 11).backward()
        run.step(optimizer)


@program(faces=(FSDP2,))
def not_gathered_in_backward(run: Run) -> None:
    """`set_unshard_in_backward(False)` of an embedding."""
    model = run.shard(Gpt(), "embedding", "blocks.*")
    run.tell(model.embedding, "set_unshard_in_backward", False)
    train_gpt(run, model)


@program(faces=(FSDP2,))
def offloaded(run: Run) -> None:
    """Shards in host memory."""
    policy = run.api.CPUOffloadPolicy(pin_memory=False)
    train_gpt(run, run.shard(Gpt(), "blocks.*", fsdp2={"offload_policy": policy}))


WRAPPER: dict[str, dict[str, Any]] = {
    "prefetch_post": {"backward_prefetch": "BACKWARD_POST"},
    "prefetch_none": {"backward_prefetch": None},
    "forward_prefetch": {"forward_prefetch": True},
    "no_limit": {"limit_all_gathers": False},
    "synchronised": {"sync_module_states": True},
}


NO_DEVICE = "PyTorch needs an accelerator for it"


@program(
    faces=(ORIG, "flat"),
    cases={
        name: {
            "case": name,
            "differs": {"*/torch": NO_DEVICE} if name == "synchronised" else {},
        }
        for name in WRAPPER
    },
)
def option(run: Run, case: str) -> None:
    """Each option of the wrapper that changes no number."""
    options = dict(WRAPPER[case])
    if isinstance(options.get("backward_prefetch"), str):
        options["backward_prefetch"] = run.api.BackwardPrefetch[options["backward_prefetch"]]
    train_gpt(run, run.shard(Gpt(), "blocks.*", fsdp1=options))


@program(faces=(ORIG, "flat"), differs={"*/torch": NO_DEVICE})
def wrapper_offloaded(run: Run) -> None:
    """`CPUOffload` of the wrapper."""
    options = {"cpu_offload": run.api.CPUOffload(offload_params=True)}
    train_gpt(run, run.shard(Gpt(), "blocks.*", fsdp1=options))


@program(
    faces=(ORIG, "flat"),
    cases={"modules": {"what": "ignored_modules"}, "states": {"what": "ignored_states"}},
)
def wrapper_ignores(run: Run, what: str) -> None:
    """A module or parameters that the wrapper leaves alone, and nobody trains."""
    model = Gpt()
    model.head.requires_grad_(False)
    value = [model.head] if what == "ignored_modules" else list(model.head.parameters())
    train_gpt(run, run.shard(model, fsdp1={what: value}))


@program(
    faces=(FSDP2,),
    cases={
        "evaluated_first": {
            "first": True,
            "differs": {"*/torch": "PyTorch leaves the root unsharded after an evaluation"},
        },
        "described": {"first": False},
    },
)
def asked_before_the_first_forward(run: Run, first: bool) -> None:
    """Queries and settings on a block before the root's first forward."""
    model = run.shard(Gpt(), "blocks.*")
    if first:
        model.eval()
        with torch.no_grad():
            run.see("evaluation", next_token_loss(run, model, 11))
        model.train()
    else:
        if run.is_ours:
            run.api.describe(model)
        dict(model.state_dict())
        list(model.named_parameters())
        repr(model)
    train_gpt(run, model)


@program(
    faces=(FSDP2,),
)
def last_backward_said_on_a_block(run: Run) -> None:
    """`set_is_last_backward` on a block before the root's first forward does not make it a root."""
    model = run.shard(Gpt(), "blocks.*")
    run.tell(model.blocks[0], "set_is_last_backward", True)
    train_gpt(run, model)


@program(faces=ALL_FACES)
def block_run_alone_first(run: Run) -> None:
    """A block whose output is looked at before the model runs, which no engine allows."""
    model = run.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "0", "1")
    with torch.no_grad():
        run.see("block", model(run.batch(2, 4)))
        run.see("block", model[0](run.batch(2, 4)))
    run.train(model, lambda m: square(m(run.batch(4, 4))))


@program(faces=(FSDP2,))
def collectives_as_torch_makes_them(run: Run) -> None:
    """`set_default_comm("collectives")`."""
    before = run.api.set_default_comm("collectives") if run.is_ours else None
    try:
        train_gpt(run, run.shard(Gpt(), "blocks.*"))
    finally:
        if run.is_ours:
            run.api.set_default_comm(before)
