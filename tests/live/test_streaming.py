"""Whole tensors, a bucket at a time, are those of the unsharded model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fullshard
from fullshard.errors import ShardingError, StateError
from fullshard.state import gathering
from fullshard.state.copies import numbered_and_compared
from fullshard.state.holdings import holdings_of
from tests.api import Api
from tests.fsdp1.models import net
from tests.harness import mesh_of, on_ranks, rank, world_size
from tests.live.ways import FEW, ON_TWO, sharded
from tests.test_transfer import HYBRID
from tests.training import assert_equal

pytestmark = pytest.mark.apis("peer_memory")

SMALL_MB = 100 / (1 << 20)  # less than most tensors of the model


def _assert_is_state(found: list[tuple[str, torch.Tensor]], model: nn.Module) -> None:
    """Assert that these are the model's values in its order, but tied names one after the other."""
    state = model.state_dict()
    assert len(found) == len(state)
    names = [name for name, _ in found]
    if "tied.weight" in state:
        assert names.index("tied.weight") == names.index("head.weight") + 1
    assert [n for n in names if n != "tied.weight"] == [n for n in state if n != "tied.weight"]
    assert_equal({name: dict(found)[name] for name in state}, state)


@pytest.mark.parametrize("bucket_mb", [SMALL_MB, 64])
@pytest.mark.parametrize("way", ON_TWO)
@on_ranks(2)
def test_all_tensors_come_whole_by_their_names(api: Api, way: str, bucket_mb: float) -> None:
    model = sharded(api, way)
    _assert_is_state(list(fullshard.iter_full_state(model, bucket_mb=bucket_mb)), net())


@pytest.mark.parametrize("way", [*HYBRID, "fully_shard"])
@on_ranks(4)
def test_replicas_and_uneven_rows_come_whole(api: Api, way: str) -> None:
    _assert_is_state(list(fullshard.iter_full_state(sharded(api, way), bucket_mb=SMALL_MB)), net())


@pytest.mark.parametrize("way", FEW)
@on_ranks(3)
def test_one_rank_alone_gets_tensors(api: Api, way: str) -> None:
    model = sharded(api, way)
    found = list(fullshard.iter_full_state(model, bucket_mb=SMALL_MB, to_rank=1, offload=True))
    if rank() == 1:
        _assert_is_state(found, net())
    else:
        assert found == []


@on_ranks(4)
def test_tensor_parallel_parameters_come_whole(api: Api) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 7))
    same = copy.deepcopy(model)
    mesh = mesh_of(2, 2)
    parallelize_module(model, mesh["shard"], {"0": ColwiseParallel()})
    api.fully_shard(model, mesh=mesh["replicate"])
    _assert_is_state(list(fullshard.iter_full_state(model, bucket_mb=SMALL_MB)), same)


class _Odd(nn.Module):
    """Tensors of unusual shapes and dtypes, and one that all ranks have too few rows for."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 3))
        self.short = nn.Parameter(torch.randn(5, 3, dtype=torch.bfloat16))
        self.scalar_list = nn.Parameter(torch.randn(1))
        self.register_buffer("number", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("complex", torch.randn(3, dtype=torch.complex128))


@on_ranks(1, 3)
def test_odd_shapes_and_dtypes(api: Api) -> None:
    torch.manual_seed(3)
    model = _Odd()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    api.fully_shard(model, mesh=mesh_of(world_size()))
    found = dict(fullshard.iter_full_state(model, bucket_mb=SMALL_MB / 10))
    assert_equal(found, expected)
    assert {name: value.dtype for name, value in found.items()} == {
        name: value.dtype for name, value in expected.items()
    }


@on_ranks(2)
def test_tensors_are_new_memory_and_tied_names_have_one(api: Api) -> None:
    model = sharded(api, "replicate")
    found = dict(fullshard.iter_full_state(model))
    assert found["tied.weight"] is found["head.weight"]
    for value in found.values():
        assert not value.requires_grad
        value.zero_()
    _assert_is_state(list(fullshard.iter_full_state(model)), net())


@on_ranks(2)
def test_messages_are_no_larger_than_a_bucket(api: Api) -> None:
    torch.manual_seed(1)
    model = nn.Linear(64, 64)  # 16 KiB and a bias
    api.fully_shard(model, mesh=mesh_of(2))
    sizes = []
    original = gathering.all_gather

    def noted(out: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(out.nbytes)
        return original(out, *args, **kwargs)

    gathering.all_gather = noted
    try:
        held = numbered_and_compared(holdings_of(model), None, taken="given to all")
        list(gathering.gathered_wholes(held, None, bucket_nbytes=4096))
    finally:
        gathering.all_gather = original
    assert sizes == [4096] * 4 + [256]


@on_ranks(2)
def test_what_one_rank_cannot_do_all_refuse(api: Api) -> None:
    model = nn.Linear(3, 4 + rank())
    with pytest.raises(StateError, match="hold different tensors"):
        fullshard.iter_full_state(model)
    model = nn.Linear(3, 4, device="meta" if rank() else "cpu")
    with pytest.raises(StateError, match="meta device"):
        fullshard.iter_full_state(model)
    with pytest.raises(StateError, match="to_rank is 2, but ranks 0, 1"):
        fullshard.iter_full_state(net(), to_rank=2)


# Models of some ranks


def _pairs() -> DeviceMesh:
    """Return the mesh of this rank's pair: ranks 0 and 1, or 2 and 3."""
    mesh: DeviceMesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "member"))["member"]
    return mesh


@on_ranks(4)
def test_models_of_one_name_on_different_ranks_stay_apart(api: Api) -> None:
    model, own = net(seed=rank() // 2), net(seed=rank() // 2)
    api.fully_shard(model, mesh=_pairs())
    _assert_is_state(list(fullshard.iter_full_state(model)), own)
    (weights,) = fullshard.stream_weights(model)
    _assert_is_state(weights, own)
    other = 2 - rank() // 2 * 2
    with pytest.raises(
        StateError, match=f"to_rank is {other}, but ranks {2 - other}, {3 - other} "
    ):
        fullshard.iter_full_state(model, to_rank=other)


@on_ranks(3)
def test_ranks_without_the_model_do_not_join(api: Api) -> None:
    ranks = [0, 2]
    mesh = DeviceMesh("cpu", ranks)
    torch.manual_seed(3)
    by_hand = nn.Linear(3, 4)
    own = copy.deepcopy(by_hand)
    if rank() in ranks:
        model = net()
        api.fully_shard(model, mesh=mesh)
        found = list(fullshard.iter_full_state(model, to_rank=2))
        if rank() == 2:
            _assert_is_state(found, net())
        else:
            assert not found
        distribute_module(by_hand, mesh)  # no unit, so no group that is known
        _assert_is_state(list(fullshard.iter_full_state(by_hand)), own)


@on_ranks(2)
def test_values_that_nothing_keeps_equal_are_named_where_they_differ(api: Api) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    api.fully_shard(model[0], mesh=mesh_of(2))
    with torch.no_grad():
        model[1].bias.fill_(rank())
    with pytest.warns(UserWarning, match=r"^1.bias: rank 1 has"):
        found = dict(fullshard.iter_full_state(model))
    assert found["1.bias"].eq(0).all()


# For rollout engines


@pytest.mark.parametrize("way", FEW)
@on_ranks(2)
def test_weights_stream_in_lists_under_other_names(api: Api, way: str) -> None:
    model = sharded(api, way)

    def rename(name: str) -> str | None:
        return None if name.startswith("batch_norm") else f"engine.{name}"

    lists = list(
        fullshard.stream_weights(
            model, bucket_mb=100 / (1 << 20), rename=rename, dtype=torch.bfloat16
        )
    )
    assert len(lists) > 3
    for each in lists:
        nbytes = [t.nbytes for t in {id(t): t for _, t in each}.values()]  # tied names have one
        assert len(nbytes) == 1 or sum(nbytes) <= 100
    found = {name: tensor for each in lists for name, tensor in each}
    expected = {
        f"engine.{name}": value.to(torch.bfloat16)
        for name, value in net().state_dict().items()
        if not name.startswith("batch_norm")
    }
    assert_equal({name: found[name] for name in expected}, expected)


@on_ranks(2)
def test_a_list_is_not_overwritten_by_the_next(api: Api) -> None:
    model = sharded(api, "fully_shard")
    kept = [
        each for bucket in fullshard.stream_weights(model, bucket_mb=SMALL_MB) for each in bucket
    ]
    _assert_is_state(kept, net())


@on_ranks(2)
def test_a_dict_renames_and_leaves_others_as_they_are(api: Api) -> None:
    model = sharded(api, "fully_shard")
    lists = list(fullshard.stream_weights(model, rename={"stem.weight": "first"}, to_rank=0))
    if rank() != 0:
        assert lists == []
        return
    names = [name for name, _ in lists[0]]
    assert "first" in names
    assert "stem.weight" not in names
    assert "stem.bias" in names


@on_ranks(2)
def test_names_that_become_the_same_are_refused(api: Api) -> None:
    model = sharded(api, "fully_shard")
    with pytest.raises(ShardingError, match=r"scale and shift .*x"):
        fullshard.stream_weights(model, rename=lambda _: "x")


def test_one_process_needs_no_group() -> None:
    model = nn.Linear(3, 4)
    _assert_is_state(list(fullshard.iter_full_state(model)), model)
    (weights,) = fullshard.stream_weights(model, rename={"bias": "b"})
    assert [name for name, _ in weights] == ["weight", "b"]


@pytest.mark.apis("peer_memory")
@on_ranks(2)
def test_a_rank_that_asks_for_something_else_is_named_on_all(api: Api) -> None:
    model = nn.Linear(3, 4)
    with pytest.raises(StateError, match="to_rank is 0 on rank 0 and 9 on rank 1"):
        list(fullshard.iter_full_state(model, to_rank=9 * rank()))
    with pytest.raises(
        StateError, match="bucket_nbytes is 1048576 on rank 0 and 2097152 on rank 1"
    ):
        list(fullshard.iter_full_state(model, bucket_mb=1 + rank()))
