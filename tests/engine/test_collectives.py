"""Exact numbers of collectives and of bytes.

A unit of `mlp(3)` has 16 x 16 + 16 float32 parameters: 1,088 bytes, 544 a rank on 2 ranks, all of
it packed into one call.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from tests.api import Api
from tests.collectives import Traffic, record_traffic
from tests.harness import mesh_of, on_ranks
from tests.models import PartlyFrozen, mlp
from tests.training import make_batch, mean_square, my_part

UNIT_NBYTES = 1088
on_process_groups = pytest.mark.apis("process_group", "torch")


def _sharded(api: Api, **options: Any) -> nn.Sequential:
    model = mlp()
    for layer in model:
        api.fully_shard(layer, **options)
    api.fully_shard(model, **options)
    _step(model)  # the first step sets things up
    model.zero_grad()
    return model


def _step(model: nn.Module, features: int = 16) -> Traffic:
    with record_traffic() as traffic:
        mean_square(model(my_part(make_batch(features)))).backward()
    return traffic


def _flags_nbytes(api: Api, *, num_params: int, itemsize: int = 4, num_ranks: int = 2) -> int:
    """Our exchange tells each rank whether anybody had a gradient, an element a parameter."""
    return 0 if api.is_torch else num_params * itemsize * num_ranks


@on_process_groups
@on_ranks(2)
def test_step_gathers_each_unit_twice_and_reduces_it_once(api: Api) -> None:
    traffic = _step(_sharded(api, reshard_after_forward=True))
    assert traffic.calls == {"all_gather": 6, "reduce_scatter": 3}
    assert traffic.nbytes["all_gather"] == 6 * UNIT_NBYTES // 2
    assert traffic.nbytes["reduce_scatter"] == 3 * UNIT_NBYTES + _flags_nbytes(api, num_params=6)


@on_process_groups
@on_ranks(2)
def test_dispatcher_sees_the_same_collectives(api: Api) -> None:
    model = _sharded(api, reshard_after_forward=True)
    with warnings.catch_warnings(), CommDebugMode() as mode:
        warnings.simplefilter("ignore")  # under the mode, PyTorch's engine takes outputs for views
        mean_square(model(my_part(make_batch(16)))).backward()
    assert mode.get_total_counts() == 9


@pytest.mark.apis("peer_memory")
@on_ranks(2)
def test_peer_memory_uses_no_collective_at_all(api: Api) -> None:
    model = _sharded(api, reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record_traffic() as traffic:
        for _ in range(2):
            mean_square(model(my_part(make_batch(16)))).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not traffic.calls


@on_process_groups
@on_ranks(2)
def test_unit_that_stays_whole_is_gathered_once(api: Api) -> None:
    traffic = _step(_sharded(api, reshard_after_forward=False))
    assert traffic.calls == {"all_gather": 3, "reduce_scatter": 3}


@on_process_groups
@on_ranks(2)
def test_root_is_gathered_once_by_default(api: Api) -> None:
    model = mlp()
    api.fully_shard(model[1])
    api.fully_shard(model)
    _step(model)
    traffic = _step(model)
    assert traffic.calls == {"all_gather": 3, "reduce_scatter": 2}


@on_process_groups
@on_ranks(2)
def test_param_dtype_halves_the_bytes_gathered_and_reduced(api: Api) -> None:
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    traffic = _step(_sharded(api, reshard_after_forward=True, mp_policy=policy))
    assert traffic.nbytes["all_gather"] == 3 * UNIT_NBYTES // 2
    flags = _flags_nbytes(api, num_params=6, itemsize=2)
    assert traffic.nbytes["reduce_scatter"] == 3 * UNIT_NBYTES // 2 + flags


@on_process_groups
@on_ranks(2)
def test_wide_reduce_dtype_costs_no_bytes_where_we_add_ourselves(api: Api) -> None:
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = _sharded(api, mp_policy=policy)
    flags = _flags_nbytes(api, num_params=6, itemsize=2)
    itemsize = 4 if api.is_torch else 2  # what travels; the sum is float32 in both
    assert _step(model).nbytes["reduce_scatter"] == 3 * UNIT_NBYTES * itemsize // 4 + flags
    # The sum of several microbatches has more bits than bfloat16 and travels whole.
    model.zero_grad()
    model.set_requires_gradient_sync(requires_gradient_sync=False)
    _step(model)
    model.set_requires_gradient_sync(requires_gradient_sync=True)
    flags = _flags_nbytes(api, num_params=6)
    assert _step(model).nbytes["reduce_scatter"] == 3 * UNIT_NBYTES + flags


@on_process_groups
@on_ranks(2)
def test_evaluation_gathers_each_unit_once_and_reduces_nothing(api: Api) -> None:
    model = _sharded(api, reshard_after_forward=True)
    with record_traffic() as traffic, torch.no_grad():
        model(make_batch(16))
    assert traffic.calls == {"all_gather": 3}


@on_process_groups
@on_ranks(2)
def test_unsynchronised_microbatch_reduces_nothing(api: Api) -> None:
    model = _sharded(api, reshard_after_forward=True)
    model.set_requires_gradient_sync(requires_gradient_sync=False)
    assert _step(model).calls == {"all_gather": 6}
    model.set_requires_gradient_sync(requires_gradient_sync=True)
    traffic = _step(model)
    assert traffic.calls == {"all_gather": 6, "reduce_scatter": 3}
    assert traffic.nbytes["reduce_scatter"] == 3 * UNIT_NBYTES + _flags_nbytes(api, num_params=6)


@on_process_groups
@on_ranks(2)
def test_parameters_kept_whole_between_microbatches_are_not_gathered_again(api: Api) -> None:
    model = _sharded(api, reshard_after_forward=False)
    model.set_reshard_after_backward(reshard_after_backward=False)
    assert _step(model).calls == {"all_gather": 3, "reduce_scatter": 3}
    # Ours agrees on whether anybody wrote to its shards.
    assert _step(model).calls == {"reduce_scatter": 3}


@on_process_groups
@on_ranks(2)
def test_frozen_unit_is_never_reduced(api: Api) -> None:
    model = PartlyFrozen()
    for layer in list(model.children()):
        api.fully_shard(layer, reshard_after_forward=True)
    api.fully_shard(model)
    _step(model, 8)
    model.zero_grad()
    traffic = _step(model, 8)
    # 8 biases of `mixed`, and 8 x 8 weights and 8 biases of `trained`.
    assert traffic.calls["reduce_scatter"] == 2
    flags = 0 if api.is_torch else traffic.nbytes["reduce_scatter"] - (8 + 72) * 4
    assert traffic.nbytes["reduce_scatter"] == (8 + 72) * 4 + flags
    assert flags <= _flags_nbytes(api, num_params=4)


@pytest.mark.ours("prefetches the unit for a backward it has no part in")
@on_process_groups
@on_ranks(2)
def test_frozen_unit_at_the_start_is_gathered_for_forward_only(api: Api) -> None:
    model = PartlyFrozen()
    api.fully_shard(model.frozen, reshard_after_forward=True)
    api.fully_shard(model.mixed, reshard_after_forward=True)
    api.fully_shard(model.trained, reshard_after_forward=True)
    api.fully_shard(model)
    _step(model, 8)
    assert _step(model, 8).calls["all_gather"] == 5


@on_process_groups
@on_ranks(2)
def test_unit_unused_in_a_step_is_neither_gathered_nor_reduced(api: Api) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    owner = Holder()
    api.fully_shard(owner.used, reshard_after_forward=True)
    api.fully_shard(owner.spare, reshard_after_forward=True)
    api.fully_shard(owner)
    _step(owner)
    assert _step(owner).calls == {"all_gather": 2, "reduce_scatter": 1}


@on_process_groups
@on_ranks(4)
def test_two_axes_add_one_all_reduce_of_a_shard_per_unit(api: Api) -> None:
    traffic = _step(_sharded(api, mesh=mesh_of(2, 2), reshard_after_forward=True))
    num_reduced = 3 if api.is_torch else 6  # beside each, which parameters had a gradient
    assert traffic.calls == {"all_gather": 6, "reduce_scatter": 3, "all_reduce": num_reduced}
    assert traffic.nbytes["all_gather"] == 6 * UNIT_NBYTES // 2
    assert traffic.nbytes["all_reduce"] >= 3 * UNIT_NBYTES // 2
    assert traffic.nbytes["all_reduce"] <= 3 * UNIT_NBYTES // 2 + 3 * 2 * 4


@pytest.mark.apis("process_group")
@on_ranks(2)
def test_large_parameters_travel_alone_and_the_rest_together(api: Api) -> None:
    model = nn.Sequential(
        nn.Linear(512, 512), nn.LayerNorm(512), nn.Linear(512, 512), nn.LayerNorm(512)
    )
    api.fully_shard(model)
    _step(model, 512)
    traffic = _step(model, 512)
    nbytes = sum(p.numel() for p in model.parameters()) * 4
    # Two weights of 1 MiB, and one bucket of the six small vectors.
    assert traffic.calls == {"all_gather": 3, "reduce_scatter": 3}
    assert traffic.nbytes["all_gather"] == nbytes // 2
    assert traffic.nbytes["reduce_scatter"] == nbytes + _flags_nbytes(api, num_params=8)


@pytest.mark.apis("process_group")
@on_ranks(3)
def test_padding_costs_less_than_sixteen_bytes_a_parameter_and_rank(api: Api) -> None:
    model = nn.Linear(7, 13)
    api.fully_shard(model)
    _step(model, 7)
    traffic = _step(model, 7)
    # 13 rows on 3 ranks: 5 rows are reserved on each, of 7 weights and of 1 bias.
    rows_nbytes = 5 * (7 + 1) * 4
    assert rows_nbytes <= traffic.nbytes["all_gather"] < rows_nbytes + 2 * 16


@pytest.mark.apis("process_group", "peer_memory", "torch")
@on_ranks(1)
def test_one_rank_communicates_nothing(api: Api) -> None:
    model = _sharded(api)
    assert not _step(model).calls
