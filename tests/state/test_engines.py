"""State that one engine saves through torch's distributed state dicts, and another one loads.

Nothing is installed: torch's functions recognise the wrapper, and PyTorch's own beside it.
With tensor parallel both axes may cut one dim. Either `fully_shard` then says `_StridedShard`, and
either wrapper `(Shard(0), Shard(0))`; whatever a value says, its full tensor is what has to arrive.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim import AdamW, Optimizer

from tests.api import Api
from tests.fsdp1.models import CPU, full_value, quiet
from tests.harness import on_ranks
from tests.selection import one_way, repeats
from tests.training import assert_equal, make_batch, mean_square

pytestmark = one_way("tests/engine and tests/parity: what is saved comes from the same tensors")

WHOLE = StateDictOptions(full_state_dict=True)
# ours: both faces, the wrapper in both forms and over a slice of the mesh, all of it (of which it
# shards over the first axis) or a bare process group.
OURS = ("orig", "flat", "group_orig", "group_flat", "fully_shard", "whole_flat")
FACES = (*OURS, "torch_wrapper", "torch_fully_shard")


class _Trained(NamedTuple):
    face: str
    model: nn.Module
    optimizer: Optimizer


@functools.cache
def _mesh(tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (4 // tp, tp), mesh_dim_names=("dp", "tp"))


def _layers() -> nn.Sequential:
    linear = nn.Linear
    columns = nn.Sequential(linear(8, 12), nn.Tanh())
    return nn.Sequential(linear(7, 8), columns, linear(12, 7), linear(7, 7), nn.LayerNorm(7))


def _make(api: Api, face: str, *, tp: int, seed: int) -> _Trained:
    """Shard a model whose sizes do not all divide, with tensor parallel if tp is not 1.

    What both axes cut divides: torch's own functions refuse to distribute uneven parts of parts.
    Every rank has a row of everything: torch's planner drops a ShardedTensor of which a rank has
    none, and then takes the checkpoint for one of before its version 2.4.
    """
    mesh = _mesh(tp)
    torch.manual_seed(seed)
    model: Any = _layers()
    if tp > 1:
        plan = {"1.0": ColwiseParallel(), "2": RowwiseParallel()}
        model = parallelize_module(model, mesh["tp"], plan)
    api = Api("torch") if face.startswith("torch") else api
    if face.endswith("fully_shard"):
        api.fully_shard(model[1], mesh=mesh["dp"])
        api.fully_shard(model, mesh=mesh["dp"])
    else:
        options: dict[str, Any] = {"use_orig_params": not face.endswith("flat"), "device_id": CPU}
        if face.startswith("group"):
            options["process_group"] = mesh.get_group("dp")
        else:
            options["device_mesh"] = mesh if face.startswith("whole") else mesh["dp"]
        with quiet():
            model[1] = api.FullyShardedDataParallel(model[1], **options)
            model = api.FullyShardedDataParallel(model, **options)
    return _Trained(face, model, AdamW(model.parameters(), lr=0.01))


def _train(trained: _Trained, *, tp: int) -> None:
    dp = _mesh(tp)["dp"]
    for seed in range(2):
        part = make_batch(7, seed=seed).chunk(dp.size())[dp.get_local_rank()]
        mean_square(trained.model(part)).backward()
        trained.optimizer.step()
        trained.optimizer.zero_grad()


def _state(trained: _Trained, options: StateDictOptions | None = None) -> dict[str, Any]:
    with quiet():
        model, optimizer = get_state_dict(trained.model, trained.optimizer, options=options)
    return {"model": model, "optimizer": optimizer}


def _set(trained: _Trained, state: dict[str, Any], options: StateDictOptions | None = None) -> None:
    with quiet():
        set_state_dict(
            trained.model,
            trained.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=options,
        )


def _named(state: dict[str, Any], *, moments: bool = True) -> dict[str, Tensor]:
    named = dict(state["model"])
    for name, own in state["optimizer"]["state"].items() if moments else ():
        named |= {f"{name}/{key}": value for key, value in own.items()}
    with quiet():  # ShardedTensors are deprecated
        return {name: full_value(named[name]).clone() for name in sorted(named)}


def _shared_folder() -> Path:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


# PyTorch's wrapper does not get optimizer state right under tensor parallel, not even its own.
def _loads_moments(face: str, tp: int) -> bool:
    return face != "torch_wrapper" or tp == 1


both_degrees = pytest.mark.parametrize("tp", [1, 2])


# Each of ours into each engine's and back; the rest takes too long for every change.
SOME = [("torch_wrapper", "flat"), ("torch_fully_shard", "group_orig")]
SOME += [("fully_shard", "torch_fully_shard"), ("whole_flat", "torch_wrapper")]
PAIRS = [pair for pair in itertools.product(FACES, FACES) if not all("torch" in f for f in pair)]
some_pairs = pytest.mark.parametrize(
    ("writer", "reader"),
    [pair if pair in SOME else pytest.param(*pair, marks=pytest.mark.long) for pair in PAIRS],
)


@pytest.mark.apis("peer_memory", "process_group")
@some_pairs
@both_degrees
@on_ranks(4)
def test_checkpoints_of_every_engine_load_into_every_other(
    api: Api, writer: str, reader: str, tp: int
) -> None:
    written = _make(api, writer, tp=tp, seed=1)
    _train(written, tp=tp)
    expected = _named(_state(written, WHOLE))
    folder = _shared_folder()
    state = _state(written)
    assert_equal(_named(state), expected)
    with quiet():
        dcp.save(state, checkpoint_id=folder)
    read = _make(api, reader, tp=tp, seed=5)
    target = _state(read)
    with quiet():
        dcp.load(target, checkpoint_id=folder)
    _set(read, target)
    actual = _named(_state(read, WHOLE), moments=_loads_moments(reader, tp))
    assert_equal(actual, {name: expected[name] for name in actual})


@pytest.mark.apis("peer_memory", "process_group")
@both_degrees
@on_ranks(4)
def test_either_wrapper_takes_the_others_sharded_values_as_they_are(api: Api, tp: int) -> None:
    ours, theirs = (_make(api, face, tp=tp, seed=1) for face in ("orig", "torch_wrapper"))
    expected = []
    for trained in (ours, theirs):
        _train(trained, tp=tp)
        expected.append(_state(trained))
    for name, value in expected[0]["model"].items():
        assert value._spec == expected[1]["model"][name]._spec, name
        for key, moment in expected[0]["optimizer"]["state"][name].items():
            other = expected[1]["optimizer"]["state"][name][key]
            assert getattr(moment, "_spec", None) == getattr(other, "_spec", None), (name, key)
    for trained, state in ((ours, expected[1]), (theirs, expected[0])):
        _set(trained, state)
        actual = _named(_state(trained), moments=_loads_moments(trained.face, tp))
        expected_values = _named(state)
        assert_equal(actual, {name: expected_values[name] for name in actual})


@pytest.mark.apis("peer_memory", "process_group")
@pytest.mark.parametrize("writer", ["orig", "torch_fully_shard"])
@pytest.mark.parametrize("reader", OURS)
@both_degrees
@on_ranks(4)
def test_full_state_dicts_of_either_engine_load_into_ours(
    api: Api, writer: str, reader: str, tp: int
) -> None:
    written = _make(api, writer, tp=tp, seed=1)
    _train(written, tp=tp)
    state = _state(written, WHOLE)
    expected = _named(state)
    read = _make(api, reader, tp=tp, seed=5)
    _set(read, state, WHOLE)
    assert_equal(_named(_state(read, WHOLE)), expected)


@pytest.mark.apis("peer_memory", "process_group")
@pytest.mark.parametrize("face", ["orig", "flat"])
@both_degrees
@repeats(lambda s: (s["face"] == "orig") == (s["tp"] == 1))
@on_ranks(4)
def test_first_rank_alone_has_the_full_state_and_spreads_it(api: Api, face: str, tp: int) -> None:
    written = _make(api, face, tp=tp, seed=1)
    _train(written, tp=tp)
    expected = _named(_state(written, WHOLE))
    offloaded = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = _state(written, offloaded)
    if dist.get_rank() == 0:
        assert_equal(_named(state), expected)
    else:
        assert not any(state.values())
    read = _make(api, face, tp=tp, seed=5)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(read.model, state["model"], options=spread)
    assert_equal(_state(read, WHOLE)["model"], _state(written, WHOLE)["model"])


@pytest.mark.apis("peer_memory", "process_group")
@pytest.mark.parametrize("writer", ["orig", "group_flat", "torch_fully_shard"])
@pytest.mark.parametrize("reader", ["flat", "fully_shard"])
@pytest.mark.parametrize("degrees", [(1, 2), (2, 1), (2, 4)], ids=str)
@on_ranks(4)
def test_sharded_values_of_other_degrees_of_parallelism_load_into_ours(
    api: Api, writer: str, reader: str, degrees: tuple[int, int]
) -> None:
    before, after = degrees
    written = _make(api, writer, tp=before, seed=1)
    _train(written, tp=before)
    expected = _named(_state(written, WHOLE))
    read = _make(api, reader, tp=after, seed=5)
    with quiet():
        api.load_sharded_state(_state(written), read.model, read.optimizer)
    assert_equal(_named(_state(read, WHOLE)), expected)
