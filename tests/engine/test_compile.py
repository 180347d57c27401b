"""`torch.compile` of what is inside a unit: the programs of `tests.compiled`.

`aot_eager` traces forward and backward as any backend would and then runs the graphs with PyTorch's
own kernels, so results are those of eager execution bit by bit. Inductor's are those of PyTorch's engine
bit by bit, compiled by it too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics
from torch.distributed import fsdp

import fullshard
from fullshard import step_on_shards
from fullshard.errors import StateError
from tests.api import Api
from tests.compiled import (
    BLOCKS,
    EAGER,
    PROGRAMS,
    Block,
    Program,
    assert_same,
    batch_of,
    compare,
    eagerly,
    forget_compiled,
    gradients_of,
    loss_of,
    make_model,
    train,
)
from tests.harness import on_ranks
from tests.selection import one_way, repeats

pytestmark = one_way("the other files of this folder; tests/parity; tests/differential")

AOT = "aot_eager"
OURS = Path(fullshard.__file__).parent
LIMIT_S = 120.0  # the first of them imports the compiler
CPP_LIMIT_S = 600.0  # each graph takes the C++ compiler seconds


# Two more tests compile in the other two ways.
@repeats(lambda s: s["way"] in ("wrapped before", "forward after"))
@pytest.mark.parametrize("way", BLOCKS)
@on_ranks(2, limit_s=LIMIT_S)
def test_compiled_blocks_train_as_eager_ones_in_one_graph_each(api: Api, way: str) -> None:
    run = train(api, Program(way), backend=AOT)
    assert_same(run, train(api, Program(EAGER), backend=AOT))
    # Nothing is compiled again after the first step, and nothing but what the user wrote.
    assert run.num_graphs == [run.num_graphs[0]] * 3
    assert run.num_frames == [run.num_frames[0]] * 3
    assert api.is_torch or run.num_frames[0] == run.num_graphs[0]
    assert set(run.layers) == {2} or way == "checkpointed"  # whose graphs are within one
    assert run.is_whole


# The others are compiled in the test above, which counts their graphs.
@repeats(lambda s: s["way"] != "checkpointed")
@pytest.mark.parametrize("way", BLOCKS)
@on_ranks(2, limit_s=LIMIT_S)
def test_blocks_that_must_be_full_graphs_are(api: Api, way: str) -> None:
    run = train(api, Program(way, compiler={"fullgraph": True}), backend=AOT)
    assert_same(run, train(api, Program(EAGER), backend=AOT))
    assert run.num_graphs == [run.num_graphs[0]] * 3


@pytest.mark.parametrize(
    "name",
    [
        "whole-before",
        "whole-after",
        "wrapper-whole",
        pytest.param("flat-whole", marks=pytest.mark.long),
    ],
)
@on_ranks(2, limit_s=LIMIT_S)
def test_whole_model_compiles_to_a_graph_per_block(api: Api, name: str) -> None:
    """What is between blocks calls their hooks, and is not compiled."""
    run = train(api, PROGRAMS[name], backend=AOT)
    assert_same(run, train(api, eagerly(PROGRAMS[name]), backend=AOT))
    assert run.num_graphs == [run.num_graphs[0]] * 3
    assert run.num_frames == [run.num_frames[0]] * 3
    if api.is_torch:
        return
    assert run.num_frames[0] == run.num_graphs[0] + 1  # the model's forward
    assert set(run.layers) == {2}
    assert run.is_whole


@pytest.mark.parametrize(
    "name", ["wrapper", "flat", pytest.param("flat-freezing", marks=pytest.mark.long)]
)
@on_ranks(2, limit_s=LIMIT_S)
def test_wrapped_blocks_are_full_graphs(api: Api, name: str) -> None:
    if api.is_torch and PROGRAMS[name].face == "flat":
        pytest.skip("PyTorch: refuses full graphs of flat parameters")
    run = train(api, PROGRAMS[name], backend=AOT)
    assert_same(run, train(api, eagerly(PROGRAMS[name]), backend=AOT))
    assert set(run.layers) == {2}
    assert run.num_graphs[2:] == [run.num_graphs[1]] * (len(run.num_graphs) - 2)
    with pytest.raises(ValueError, match="its own"):  # and nothing of the compiler's or ours
        _compile_what_raises(api, PROGRAMS[name].face)


def _compile_what_raises(api: Api, face: str) -> None:
    class Raising(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("its own")

    model = api.FullyShardedDataParallel(
        Raising(4, 4), use_orig_params=face == "wrapper", device_id=torch.device("cpu")
    )
    torch.compile(model, backend=AOT)(torch.ones(2, 4))


@pytest.mark.apis("process_group")  # with memory of its own; the programs below share it
@pytest.mark.parametrize("name", ["regions", "branches"])
@on_ranks(2, limit_s=LIMIT_S)
def test_operators_that_take_functions_may_read_several_parameters_of_a_unit(
    api: Api, name: str
) -> None:
    """Of tensors that share a storage the compiler would refuse all but one, and all parameters of a unit do."""
    run = train(api, PROGRAMS[name], backend=AOT)
    assert_same(run, train(api, eagerly(PROGRAMS[name]), backend=AOT))
    assert run.num_graphs == [run.num_graphs[0]] * 3


@pytest.mark.apis("peer_memory")  # compiled code does not communicate
@repeats(lambda s: s["world_size"] == 1 or (s["name"] != "full-graph" and s["backend"] != AOT))
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "inductor") for name in PROGRAMS),
        *((name, AOT) for name in ("stays-whole", "mixed-precision", "evaluation")),
    ],
)
@on_ranks(2, 1, limit_s=CPP_LIMIT_S)
def test_programs_have_the_bits_of_torch_s_engine_from_no_more_graphs(
    api: Api, name: str, backend: str
) -> None:
    assert compare(api, fsdp, name, backend=backend)


@pytest.mark.parametrize("on_shards", [False, True])
@on_ranks(2, limit_s=LIMIT_S)
def test_compiled_function_around_a_sharded_model_trains_it(api: Api, on_shards: bool) -> None:
    expected = train(api, Program(EAGER), backend=AOT)
    forget_compiled()
    model = _shard(api)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if on_shards:
        step_on_shards(optimizer)
    optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
    num_frames = []
    clear_compilation_metrics()

    @torch.compile(backend=CompileCounterWithBackend(AOT))
    def step(x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        loss.backward()
        return loss.detach()

    for seed in range(3):
        loss = step(batch_of(seed, 6))
        torch.testing.assert_close(loss, expected.losses[seed], rtol=1e-6, atol=1e-7)
        gradients = gradients_of(model)
        torch.testing.assert_close(gradients, expected.gradients[seed], rtol=1e-6, atol=1e-7)
        optimizer.step()
        optimizer.zero_grad()
        num_frames.append(counters["frames"]["total"])
    assert num_frames[1:] == [num_frames[1]] * 2
    compiled = {str(each.co_filename) for each in get_compilation_metrics()}
    assert __file__ in compiled
    assert not [path for path in compiled if Path(path).is_relative_to(OURS)]


@pytest.mark.ours("trains with wrong gradients")
@pytest.mark.parametrize("backend", ["eager", AOT])
@on_ranks(1, 2, limit_s=LIMIT_S)
def test_compiled_autograd_is_refused(api: Api, backend: str) -> None:
    forget_compiled()
    model = _shard(api)
    with compiled_autograd._enable(torch.compile(backend=backend)):
        loss = loss_of(model, batch_of(0, 6))
        # Dynamo wraps it if it meets a freed parameter first.
        with pytest.raises(Exception, match="compiled autograd") as caught:
            loss.backward()
    assert any(isinstance(e, StateError) for e in (caught.value, caught.value.__cause__))
    loss_of(model, batch_of(0, 6)).backward()  # without it, it trains
    model.zero_grad()


def _shard(api: Api) -> torch.nn.Sequential:
    model = make_model()
    for module in (*(each for each in model if isinstance(each, Block)), model):
        api.fully_shard(module)
    return model
