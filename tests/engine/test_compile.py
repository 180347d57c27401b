"""`torch.compile` of what is inside a unit.

`aot_eager` traces forward and backward as any backend would and then runs the graphs with PyTorch's
own kernels, so results are those of eager execution bit by bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.api import Api
from tests.harness import on_ranks
from tests.selection import one_way, repeats
from tests.training import (
    assert_equal,
    assert_gradients_are_parts_of,
    gradients_alone,
    local_gradients,
    make_batch,
    mean_square,
    my_part,
)

pytestmark = one_way("the other files of this folder; tests/parity; tests/differential")

STEPS = 3
LIMIT_S = 120.0  # the first of them imports the compiler


class Block(nn.Module):
    """Two layers around a residual connection. (n, 16) -> same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Add the layers' output."""
        return x + self.down(self.up(self.norm(x)).relu())


class Stack(nn.Sequential):
    """A sequence whose forward is not the library's, so that the compiler looks at it. (n, 16) -> (n, 4)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply one layer after the other."""
        for layer in self:
            x = layer(x)
        return x


def _model() -> Stack:
    torch.manual_seed(0)
    return Stack(Block(), Block(), nn.Linear(16, 4))


def _shard(api: Api, model: nn.Sequential, **options: Any) -> nn.Sequential:
    for block in model[:2]:
        api.fully_shard(block, **options)
    return api.fully_shard(model, **options)


def _plain(api: Api, model: nn.Sequential, compiled: dict[str, Any], **options: Any) -> None:
    _shard(api, model, **options)


def _wrapped_before(
    api: Api, model: nn.Sequential, compiled: dict[str, Any], **options: Any
) -> None:
    for index in range(2):
        model[index] = torch.compile(model[index], **compiled)
    _shard(api, model, **options)


def _wrapped_after(
    api: Api, model: nn.Sequential, compiled: dict[str, Any], **options: Any
) -> None:
    _shard(api, model, **options)
    for index in range(2):
        model[index] = torch.compile(model[index], **compiled)


def _checkpointed(api: Api, model: nn.Sequential, compiled: dict[str, Any], **options: Any) -> None:
    for index in range(2):
        model[index] = checkpoint_wrapper(model[index])
    _in_place_after(api, model, compiled, **options)


def _in_place_before(
    api: Api, model: nn.Sequential, compiled: dict[str, Any], **options: Any
) -> None:
    for block in model[:2]:
        block.compile(**compiled)
    _shard(api, model, **options)


def _in_place_after(
    api: Api, model: nn.Sequential, compiled: dict[str, Any], **options: Any
) -> None:
    _shard(api, model, **options)
    for block in model[:2]:
        block.compile(**compiled)


def _forward_after(
    api: Api, model: nn.Sequential, compiled: dict[str, Any], **options: Any
) -> None:
    _shard(api, model, **options)
    for block in model[:2]:
        block.forward = torch.compile(block.forward, **compiled)


def _whole_after(api: Api, model: nn.Sequential, compiled: dict[str, Any], **options: Any) -> None:
    _shard(api, model, **options).compile(**compiled)


def _whole_before(api: Api, model: nn.Sequential, compiled: dict[str, Any], **options: Any) -> None:
    model.compile(**compiled)
    _shard(api, model, **options)


WAYS: dict[str, Callable[..., None]] = {
    "wrapped before": _wrapped_before,
    "wrapped after": _wrapped_after,
    "in place before": _in_place_before,
    "in place after": _in_place_after,
    "forward after": _forward_after,
    "checkpointed": _checkpointed,
}
WHOLE = {"before": _whole_before, "after": _whole_after}


def _forget_compiled() -> None:
    dynamo.reset()
    counters.clear()
    warnings.simplefilter("ignore")  # Dynamo looks at what warns; for the rest of the test


@dataclass
class Run:
    """Each step's loss, gradients and number of graphs until then; the graphs' numbers of layers.

    num_frames: how many Python functions the compiler had looked at by the end of each step.
    is_whole: whether nothing interrupted a graph.
    """

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    num_graphs: list[int] = field(default_factory=list)
    num_frames: list[int] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    is_whole: bool = False


def _train(api: Api, way: Callable[..., None], *, fullgraph: bool = False, **options: Any) -> Run:
    _forget_compiled()
    counter = CompileCounterWithBackend("aot_eager")
    model, run = _model(), Run()
    way(api, model, {"backend": counter, "fullgraph": fullgraph}, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = mean_square(model(my_part(make_batch(16, seed=step))))
        loss.backward()
        run.losses.append(loss.detach())
        gradients = local_gradients(model)
        run.gradients.append({_clean(name): grad for name, grad in gradients.items()})
        run.num_graphs.append(counter.frame_count)
        run.num_frames.append(counters["frames"]["total"])
        optimizer.step()
        optimizer.zero_grad()
    run.layers = [
        sum(
            node.op == "call_function" and "linear" in str(node.target)
            for node in graph.graph.nodes
        )
        for graph in counter.graphs
    ]
    run.is_whole = not counters["graph_break"]
    return run


def _clean(name: str) -> str:
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _assert_same(run: Run, eager: Run, *, rtol: float = 1e-6, atol: float = 1e-7) -> None:
    assert run.num_graphs[0] >= 1
    assert not any(eager.num_graphs)
    torch.testing.assert_close(run.losses, eager.losses, rtol=rtol, atol=atol)
    for compiled, expected in zip(run.gradients, eager.gradients, strict=True):
        assert_equal(compiled, expected, rtol=rtol, atol=atol)


# Two more tests compile in the other two ways.
@repeats(lambda s: s["way"] in ("wrapped before", "forward after"))
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2, limit_s=LIMIT_S)
def test_compiled_blocks_train_as_eager_ones_in_one_graph_each(api: Api, way: str) -> None:
    run = _train(api, WAYS[way])
    _assert_same(run, _train(api, _plain))
    # Nothing is compiled again after the first step, and nothing but what the user wrote.
    assert run.num_graphs == [run.num_graphs[0]] * STEPS
    assert run.num_frames == [run.num_frames[0]] * STEPS
    assert api.is_torch or run.num_frames[0] == run.num_graphs[0]
    assert set(run.layers) == {2} or way == "checkpointed"  # whose graphs are within one
    assert run.is_whole


# The others are compiled in the test above, which counts their graphs.
@repeats(lambda s: s["way"] != "checkpointed")
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2, limit_s=LIMIT_S)
def test_blocks_that_must_be_full_graphs_are(api: Api, way: str) -> None:
    run = _train(api, WAYS[way], fullgraph=True)
    _assert_same(run, _train(api, _plain))
    assert run.num_graphs == [run.num_graphs[0]] * STEPS


@on_ranks(2, limit_s=LIMIT_S)
def test_compiled_blocks_that_stay_whole_train_as_eager_ones(api: Api) -> None:
    run = _train(api, _wrapped_before, reshard_after_forward=False)
    _assert_same(run, _train(api, _plain, reshard_after_forward=False))
    assert run.num_graphs[1:] == [run.num_graphs[1]] * (STEPS - 1)


@on_ranks(2, limit_s=LIMIT_S)
def test_compiled_blocks_compute_in_the_dtype_of_the_policy(api: Api) -> None:
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    run = _train(api, _forward_after, mp_policy=policy)
    _assert_same(run, _train(api, _plain, mp_policy=policy), rtol=5e-2, atol=5e-3)


@pytest.mark.parametrize("when", WHOLE)
@on_ranks(2, limit_s=LIMIT_S)
def test_whole_model_compiles_to_a_graph_per_block(api: Api, when: str) -> None:
    """What is between blocks calls their hooks, and is not compiled."""
    run = _train(api, WHOLE[when])
    _assert_same(run, _train(api, _plain))
    assert run.num_graphs == [run.num_graphs[0]] * STEPS
    assert run.num_frames == [run.num_frames[0]] * STEPS
    assert api.is_torch or run.num_frames[0] == run.num_graphs[0] + 1  # the model's forward
    assert set(run.layers) == {2}
    assert run.is_whole


@on_ranks(2, limit_s=LIMIT_S)
def test_compiled_function_around_a_sharded_model_trains_it(api: Api) -> None:
    expected = _train(api, _plain)
    _forget_compiled()
    counter = CompileCounterWithBackend("aot_eager")
    model = _shard(api, _model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    num_frames = []

    @torch.compile(backend=counter)
    def step(x: Tensor) -> Tensor:
        loss = mean_square(model(x))
        loss.backward()
        return loss.detach()

    for seed in range(STEPS):
        loss = step(my_part(make_batch(16, seed=seed)))
        torch.testing.assert_close(loss, expected.losses[seed], rtol=1e-6, atol=1e-7)
        assert_equal(local_gradients(model), expected.gradients[seed], rtol=1e-6, atol=1e-7)
        optimizer.step()
        optimizer.zero_grad()
        num_frames.append(counters["frames"]["total"])
    assert num_frames[1:] == [num_frames[1]] * (STEPS - 1)


@on_ranks(2, limit_s=LIMIT_S)
def test_compiled_block_evaluates_and_trains_by_turns(api: Api) -> None:
    _forget_compiled()
    model, batch = _model(), make_batch(16)
    expected = gradients_alone(model, batch)
    with torch.no_grad():
        answers = model(my_part(batch))
    _in_place_after(api, model, {"backend": "aot_eager"})
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(model(my_part(batch)), answers)
        mean_square(model(my_part(batch))).backward()
        assert_gradients_are_parts_of(model, expected)
        model.zero_grad()
