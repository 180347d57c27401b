"""`fullshard.debug(replay=)` and `fullshard.replay`: a step again, bit for bit, and what differs first."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import sys
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard.compare import recording
from fullshard.compare.record import ReplayRecord
from fullshard.engine.observer import watchers
from fullshard.errors import CheckpointError, MisuseError, StateError
from tests.api import Api
from tests.fresh import Ended, fullshard_in_fork, on_forked_ranks
from tests.fsdp1.models import quiet
from tests.harness import on_ranks, rank
from tests.selection import one_way

pytestmark = [
    pytest.mark.ours("records no steps"),
    one_way("tests/parity, tests/differential: the same forwards and backwards"),
]


class Block(nn.Module):
    """Dropout between two layers, and running statistics. (batch, 8) -> same."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop, self.norm = nn.Dropout(0.3), nn.BatchNorm1d(8)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        """Apply all, the layers perhaps recomputed in backward."""
        layers = (
            checkpoint(self._layers, x, use_reentrant=False) if self.recomputes else self._layers(x)
        )
        return self.norm(x + layers)

    def _layers(self, x: Tensor) -> Tensor:
        return self.down(self.drop(F.gelu(self.up(x))))


class Net(nn.Module):
    """Blocks and a head. (batch, 8) -> (batch, 5)."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(recomputes=recomputes) for _ in range(2))
        self.head = nn.Linear(8, 5)
        self.generator = torch.Generator().manual_seed(3)

    def body(self, x: Tensor) -> Tensor:
        """Run the blocks, after noise from a generator that the module has."""
        x = x + torch.randn(x.shape, generator=self.generator)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        """Run everything in turn."""
        return self.head(self.body(x))


def build(api: Api, face: str = "fully_shard", *, recomputes: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Net(recomputes=recomputes)
    if face == "fully_shard":
        for part in (*model.blocks, model.head, model):
            api.fully_shard(part, **options)
        return model
    with quiet():
        return api.FullyShardedDataParallel(
            model,
            auto_wrap_policy=api.ModuleWrapPolicy({Block}),
            use_orig_params=face == "orig",
            **options,
        )


def plain(model: nn.Module) -> Any:
    """Return the model inside a wrapper, or the model."""
    return getattr(model, "module", model)


def micro_batch(model: nn.Module) -> None:
    x, labels = torch.randn(6, 8), torch.randint(5, (6,))
    F.cross_entropy(model(x), labels).backward()


Step = Callable[[Any], None]


def record(folder: Path, model: Any, step: Step = micro_batch) -> None:
    """Train some steps with other numbers on each rank, and record the last one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(10 + rank())
    for number in range(3):
        if number == 2:
            fullshard.debug(replay=folder)
        step(model)
        optimizer.step()
        optimizer.zero_grad()
    assert not any(type(each).__name__ == "Recording" for each in watchers)  # a step, and no more


@pytest.mark.parametrize("face", ["fully_shard", "orig", "flat"])
@on_ranks(2)
def test_a_step_of_micro_batches_is_equal_and_a_change_is_named(
    api: Api, face: str, tmp_path: Path
) -> None:
    def two_micro_batches(model: Any) -> None:
        if face == "fully_shard":
            model.set_requires_gradient_sync(False)
        with model.no_sync() if face != "fully_shard" else contextlib.nullcontext():
            micro_batch(model)
        if face == "fully_shard":
            model.set_requires_gradient_sync(True)
        micro_batch(model)

    record(tmp_path, build(api, face), two_micro_batches)

    torch.manual_seed(1)
    before = torch.get_rng_state()
    same = build(api, face)
    torch.set_rng_state(before)
    found = fullshard.replay(tmp_path, same)
    assert found.is_equal, found
    assert found.ranks == (0, 1)
    # 2 ranks, 2 forwards: 10 modules in blocks, the head, the model; 14 parameters.
    reduced = {"fully_shard": 14, "orig": 14, "flat": 3}[face]
    assert found.counts["output"] == 2 * 2 * 12
    assert found.counts["gradient"] == 2 * 2 * 14
    assert found.counts["reduced gradient"] >= reduced
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in same.parameters())

    other = build(api, face)
    block = plain(plain(other).blocks[1])
    if rank() == 1:
        block.up.register_forward_hook(lambda _, __, output: output * 1.001)
    found = fullshard.replay(tmp_path, other)
    first = found.first
    assert first is not None
    assert (first.rank, first.event, first.what, first.path) == (
        1,
        "forward 0",
        "output",
        "blocks.1.up",
    )
    assert (first.unit, first.kind) == ("blocks.1", "Linear")
    assert "by 1.0e-03 of its largest value" in str(found)


@on_ranks(4)
def test_the_same_ranks_replay_a_tensor_parallel_model(api: Api, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def built() -> Any:
        torch.manual_seed(0)
        model = Net()
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
            api.fully_shard(block, mesh=mesh["dp"])
        return api.fully_shard(model, mesh=mesh["dp"])

    def a_step(model: Any) -> None:
        torch.manual_seed(20 + rank() // 2)  # ranks of one part of the batch draw alike
        micro_batch(model)

    record(tmp_path, built(), a_step)
    found = fullshard.replay(tmp_path, built())
    assert found.is_equal, found
    assert found.ranks == (0, 1, 2, 3)
    other = built()
    if rank() == 3:
        other.blocks[1].norm.register_forward_hook(lambda _, __, output: output * 1.001)
    first = fullshard.replay(tmp_path, other).first
    assert first is not None
    assert (first.rank, first.what, first.path) == (3, "output", "blocks.1.norm")


@on_ranks(2)
def test_what_is_recomputed_is_compared_too(api: Api, tmp_path: Path) -> None:
    record(tmp_path, build(api, recomputes=True))
    found = fullshard.replay(tmp_path, build(api, recomputes=True))
    assert found.is_equal, found
    # `up` and `drop` of each block once more, in backward; what `down` returns is not needed there
    assert found.counts["output"] == 2 * (12 + 4)


@on_ranks(2)
def test_methods_modules_by_themselves_and_several_backwards(api: Api, tmp_path: Path) -> None:
    def chunks(model: Any) -> None:
        hidden = model.body(torch.randn(6, 8))
        losses = [model.head(part).square().mean() for part in hidden.chunk(2)]
        losses[0].backward(retain_graph=True)
        losses[1].backward()

    def built() -> Any:
        model = build(api)
        api.register_fsdp_forward_method(model, "body")
        return model

    record(tmp_path, built(), chunks)
    found = fullshard.replay(tmp_path, built())
    assert found.is_equal, found
    assert found.counts["output"] == 2 * (11 + 2)


class WithLoss(Net):
    """Returns the loss, and the logits that it is made of."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Run everything in turn."""
        logits = super().forward(x)
        return logits.square().mean(), logits


@on_ranks(2)
def test_an_output_may_be_made_of_another_one(api: Api, tmp_path: Path) -> None:
    def both(model: Any) -> None:
        loss, logits = model(torch.randn(6, 8))
        (loss + logits.abs().mean()).backward()

    def built() -> Any:
        torch.manual_seed(0)
        return api.fully_shard(WithLoss())

    for number, step in enumerate((both, lambda model: model(torch.randn(6, 8))[0].backward())):
        record(tmp_path / str(number), built(), step)
        found = fullshard.replay(tmp_path / str(number), built())
        assert found.is_equal, found
        assert found.counts["gradient"] == 2 * 14


@on_ranks(2)
def test_a_gradient_that_differs_is_named_where_outputs_are_equal(api: Api, tmp_path: Path) -> None:
    record(tmp_path, build(api))
    other = build(api)
    if rank() == 0:
        twice = lambda _, __, output: output.register_hook(lambda grad: grad * 2) and None  # noqa: E731
        other.blocks[0].down.register_forward_hook(twice)
    first = fullshard.replay(tmp_path, other).first
    assert first is not None
    assert (first.rank, first.event, first.what) == (0, "backward 0", "gradient")
    assert first.unit == "blocks.0"


@on_ranks(2)
def test_a_step_that_fails_fails_again_and_says_how_far_it_was_equal(
    api: Api, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no luck")

    model = build(api)
    with contextlib.suppress(ValueError), fullshard.debug(replay=tmp_path):
        micro_batch(model)
        model.head.register_forward_pre_hook(fail)
        micro_batch(model)

    again = build(api)
    calls: list[None] = []
    again.head.register_forward_pre_hook(
        lambda *_: fail() if calls.append(None) or len(calls) == 2 else None
    )
    with pytest.raises(ValueError, match="no luck") as caught:
        fullshard.replay(tmp_path, again)
    if sys.version_info >= (3, 11):
        assert "after 2 passes: all equal" in caught.value.__notes__[0]
    found = fullshard.replay(tmp_path, build(api))
    assert found.is_equal
    assert "forward 1 ended with ValueError: no luck when it was recorded" in str(found)


@on_ranks(2)
def test_gradients_are_not_compared_where_others_were_there(api: Api, tmp_path: Path) -> None:
    model = build(api)
    micro_batch(model)
    with fullshard.debug(replay=tmp_path / "begun"):
        micro_batch(model)
    found = fullshard.replay(tmp_path / "begun", build(api))
    assert found.is_equal, found
    assert [*found.counts] == ["input", "output", "gradient"]
    assert "gradients came from elsewhere, or were changed, so reduced gradients are not" in str(
        found
    )

    def weighted(model: Any) -> None:
        for weight in (3.0, 5.0 + rank()):
            loss = model(torch.randn(6, 8)).square().mean()
            fullshard.weighted_loss(loss, weight, model).backward()

    record(tmp_path / "weighted", build(api), weighted)
    found = fullshard.replay(tmp_path / "weighted", build(api))
    assert found.is_equal, found
    assert found.counts["gradient"] == 2 * found.counts["reduced gradient"]
    assert "gradients came from elsewhere, or were changed" in str(found)


@on_ranks(2)
def test_what_cannot_be_replayed_is_refused(api: Api, tmp_path: Path) -> None:
    model = build(api)
    with pytest.raises(CheckpointError, match=r"no recorded step\. Record one with"):
        fullshard.replay(tmp_path, model)
    with pytest.warns(UserWarning, match="nothing was recorded"), fullshard.debug(replay=tmp_path):
        pass
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    torch.manual_seed(0)
    rounded = nn.Sequential(nn.Linear(8, 8))
    api.fully_shard(rounded, mp_policy=policy)
    with fullshard.debug(replay=tmp_path / "rounded"):
        rounded(torch.randn(4, 8)).sum().backward()
    with pytest.raises(StateError, match="computed in bfloat16 by its mixed precision"):
        fullshard.replay(tmp_path / "rounded", nn.Sequential(nn.Linear(8, 8)))
    with pytest.raises(MisuseError, match="rank=1 is for one process"):
        fullshard.replay(tmp_path / "rounded", rounded, rank=1)
    with pytest.raises(CheckpointError, match="does not fit"):
        fullshard.replay(tmp_path / "rounded", model)
    torch.distributed.barrier()
    if rank() == 0:
        (tmp_path / "others").mkdir()
        (tmp_path / "others" / "thesis.tex").touch()
    torch.distributed.barrier()


@on_ranks(2)
def test_a_step_ends_where_parameters_change(api: Api, tmp_path: Path) -> None:
    def by_hand(model: Any) -> None:
        micro_batch(model)
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)

    def by_hooks(model: Any) -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p: torch.optim.SGD([p], lr=0.1).step()
            )
        micro_batch(model)

    def by_lbfgs(model: Any) -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, lr=0.1)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(6, 8)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    def small() -> Any:  # of even sizes, as LBFGS wants them
        torch.manual_seed(0)
        return api.fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))

    for name, step, built in (
        ("hand", by_hand, lambda: build(api)),
        ("hooks", by_hooks, lambda: build(api)),
        ("lbfgs", by_lbfgs, small),
    ):
        model = built()
        fullshard.debug(replay=tmp_path / name)
        for _ in range(2):
            step(model)
            model.zero_grad()
        found = fullshard.replay(tmp_path / name, built())
        assert found.is_equal, (name, found)
        assert found.counts["output"] == 2 * (3 if name == "lbfgs" else 12), name
        assert not any(type(each).__name__ == "Recording" for each in watchers), name


def test_a_new_recording_removes_its_own_files_alone(tmp_path: Path) -> None:
    record, folder = ReplayRecord(tmp_path / "a"), tmp_path / "a"
    record.clear()
    record.write_facts(ranks=1, model="m", device="cpu", precision=())
    ours = [folder / "rank-0" / name for name in ("inputs-0.pt", "event-12.pt", "event-13.part")]
    others = [folder / "rank-0" / "notes.pt", folder / "rank-list" / "event-0.pt", folder / "b.txt"]
    for path in (*ours, *others):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    record.clear()
    assert not any(path.exists() for path in ours)
    assert all(path.exists() for path in others)
    # A file of the same name that is no record's.
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "replay.json").write_text('{"moves": []}')
    with pytest.raises(CheckpointError, match="no recorded step"):
        ReplayRecord(tmp_path / "b").clear()
    assert (tmp_path / "b" / "replay.json").exists()


@on_ranks(2)
def test_a_frozen_model_is_not_the_one_and_a_later_recording_takes_over(
    api: Api, tmp_path: Path
) -> None:
    teacher, model = build(api), build(api)
    teacher.requires_grad_(False)

    def teach(model: Any) -> None:
        x = torch.randn(6, 8)
        F.mse_loss(model(x), teacher(x)).backward()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fullshard.debug(replay=tmp_path / "never")
    fullshard.debug(replay=tmp_path / "taught")  # takes its place, as nothing has run
    teach(model)
    optimizer.step()
    assert fullshard.replay(tmp_path / "taught", build(api)).is_equal
    assert not (tmp_path / "never").exists()


@on_ranks(2)
def test_backwards_that_leave_no_gradients_are_passed_over(api: Api, tmp_path: Path) -> None:
    def penalised(model: Any) -> None:
        x = torch.randn(6, 8, requires_grad=True)
        loss = model(x).square().mean()
        torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()

    def twice(model: Any) -> None:
        x = torch.randn(6, 8, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        slope.square().mean().backward()

    record(tmp_path / "grad", build(api), penalised)
    found = fullshard.replay(tmp_path / "grad", build(api))
    assert found.is_equal, found
    assert "backward 0 left no gradients of parameters" in str(found)
    assert found.counts["gradient"] == 2 * 14
    keeps = {"reshard_after_forward": False}
    record(tmp_path / "twice", build(api, **keeps), twice)
    found = fullshard.replay(tmp_path / "twice", build(api, **keeps))
    assert found.is_equal, found
    assert "gradient" not in found.counts


@on_ranks(2)
def test_a_backward_that_ends_the_program_is_recorded(api: Api, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no luck")

    model = build(api)
    model.blocks[0].register_full_backward_pre_hook(fail)
    fullshard.debug(replay=tmp_path)
    with pytest.raises(ValueError, match="no luck"):
        micro_batch(model)
    recording._end()  # as Python does when the program ends
    again = build(api)
    again.blocks[0].register_full_backward_pre_hook(fail)
    with pytest.raises(ValueError, match="no luck"):
        fullshard.replay(tmp_path, again)
    assert "backward 0 ended with" in str(fullshard.replay(tmp_path, build(api)))


@on_ranks(2)
def test_a_backward_that_fails_after_an_optimizer_stepped_in_it_is_recorded(
    api: Api, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no luck")

    model = build(api)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.head.register_full_backward_hook(lambda *_: optimizer.step())
    model.blocks[0].register_full_backward_pre_hook(fail)
    with pytest.raises(ValueError, match="no luck"), fullshard.debug(replay=tmp_path):
        micro_batch(model)
    assert not any(type(each).__name__ == "Recording" for each in watchers)
    assert "backward 0 ended with" in str(fullshard.replay(tmp_path, build(api)))


@on_ranks(2)
def test_a_replay_keeps_nothing_and_a_recording_gives_up_alone(api: Api, tmp_path: Path) -> None:
    record(tmp_path / "a", build(api))
    model = build(api)
    assert fullshard.replay(tmp_path / "a", model).is_equal
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
            return function(self.layer(x))

    called = api.fully_shard(Called())
    fullshard.debug(replay=tmp_path / "b")
    with pytest.warns(UserWarning, match=r"given up on rank \d, as an argument of \w*Called"):
        loss = called(torch.randn(4, 8), lambda x: x.square()).sum()
    loss.backward()
    with pytest.raises(StateError, match="has nothing of rank"):
        fullshard.replay(tmp_path / "b", called)


class Drawing(nn.Module):
    """Scales by numbers of Python's and NumPy's generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.own, self.numpy = random.Random(1), np.random.default_rng(2)

    def forward(self, x: Tensor) -> Tensor:
        """Draw twice, once of each."""
        return self.layer(x) * (self.own.random() + float(self.numpy.random()))


@on_ranks(2)
def test_generators_of_modules_and_inputs_made_between_modules(api: Api, tmp_path: Path) -> None:
    def step(model: Any) -> None:
        model(torch.randn(6, 8)).square().mean().backward()

    record(tmp_path / "own", api.fully_shard(Drawing()), step)
    assert fullshard.replay(tmp_path / "own", api.fully_shard(Drawing())).is_equal

    record(tmp_path / "input", build(api))
    other = build(api)
    other.blocks[1].down.register_forward_pre_hook(lambda _, args: (args[0] + 1e-3,))
    first = fullshard.replay(tmp_path / "input", other).first
    assert first is not None
    assert (first.what, first.path) == ("input", "blocks.1.down")


PROGRAM = """
    import sys, torch, torch.distributed as dist, fullshard
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    def plain():
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2)) for _ in range(2)])

    def build():
        model = plain()
        for part in (*model, model):
            fully_shard(part)
        return model

    def broken():
        model = build()
        model[1][0].register_forward_hook(lambda _, __, output: output + 1e-3)
        return model

    if __name__ == "__main__":
        dist.init_process_group("gloo")
        model = build()
        torch.manual_seed(dist.get_rank())
        with fullshard.debug(replay="replays/a"):
            model(torch.randn(4, 8)).square().sum().backward()
        dist.destroy_process_group()
"""


def test_one_process_replays_all_ranks_sharded_or_not(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(textwrap.dedent(PROGRAM))
    run = "import sys; sys.argv = ['run', 'mine.py']; import fullshard.run; fullshard.run.main()"
    for recorded in on_forked_ranks(2, run, folder=tmp_path):
        assert recorded.code == 0, recorded.err

    def replay(*words: str) -> Ended:
        return fullshard_in_fork("replay", "replays/a", *words, folder=tmp_path)

    for function in ("build", "plain"):
        done = replay(f"mine:{function}")
        assert done.code == 0, done.err
        assert (
            "all 2 ranks in replays/a: 12 inputs, 14 outputs, 8 gradients.\nEqual in every bit."
            in done.out
        )
    done = replay("mine:broken", "--rank", "1", "--json")
    assert done.code == 1, done.err
    found = json.loads(done.out)
    assert (found["ranks"], found["is_equal"], found["first"]["path"]) == ([1], False, "1.0")
    done = replay("mine:build", "--rank", "2")
    assert done.code == 2
    assert "fullshard replay: rank=2: 2 ranks were recorded. Give one of these.\n" in done.err
    for target in ("mine:nothing", "./mine.py:build"):
        assert replay(target).code == 2
