"""What users may choose, watch and replace in how units communicate."""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.api import Api
from tests.collectives import record_traffic
from tests.custom_collectives import Watched, custom_gather, custom_reduce, public
from tests.harness import mesh_of, on_ranks, rank, world_size
from tests.models import MixedDtypes, UnevenMLP, mlp
from tests.training import (
    assert_gradients_are_parts_of,
    full_gradients,
    full_parameters,
    gradients_alone,
    local,
    make_batch,
    mean_square,
    my_part,
)
from tests.twins import assert_train_alike, run_step, shard_layers, sharded_mlp

BF16, FP32 = torch.bfloat16, torch.float32
# Either the test chooses how units communicate itself, or it counts collectives.
on_process_groups = pytest.mark.apis("process_group", "torch")


# The choice "collectives"


def _use_collectives(api: Api) -> None:
    """Make the calls that PyTorch's FSDP makes, until the end of the test."""
    if not api.is_torch:
        api.set_default_comm("collectives")


def _partly_empty() -> nn.Module:
    """With a bucket that has no elements."""
    model = mlp()
    model[0].register_parameter("nothing", nn.Parameter(torch.zeros(0, 4, dtype=torch.float64)))
    return model


def _large() -> nn.Sequential:
    """Two layers of a weight that could travel alone and three vectors. (n, 512) -> same."""
    layers = [nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512)) for _ in range(2)]
    return nn.Sequential(*layers)


LARGE_NBYTES = 2 * (512 * 512 + 3 * 512) * 4


@on_process_groups
@on_ranks(2)
def test_collectives_make_one_call_a_unit_however_large_its_parameters(api: Api) -> None:
    _use_collectives(api)
    model, _ = shard_layers(api, _large(), reshard_after_forward=True)
    for _ in range(2):
        traffic = run_step(model, 512)
        assert traffic.calls == {"all_gather": 4, "reduce_scatter": 2}
        assert traffic.nbytes == {"all_gather": LARGE_NBYTES, "reduce_scatter": LARGE_NBYTES}


@on_process_groups
@on_ranks(4)
def test_collectives_on_two_axes_add_one_all_reduce_of_a_shard_a_unit(api: Api) -> None:
    _use_collectives(api)
    model, _ = shard_layers(api, _large(), mesh=mesh_of(2, 2), reshard_after_forward=True)
    traffic = run_step(model, 512)
    assert traffic.calls == {"all_gather": 4, "reduce_scatter": 2, "all_reduce": 2}
    assert traffic.nbytes["all_gather"] == LARGE_NBYTES
    assert traffic.nbytes["reduce_scatter"] == LARGE_NBYTES
    assert traffic.nbytes["all_reduce"] == LARGE_NBYTES // 2


@on_process_groups
@on_ranks(4)
def test_collectives_over_a_smaller_world_make_one_call_a_unit(api: Api) -> None:
    _use_collectives(api)
    model, _ = shard_layers(api, _large(), reshard_after_forward=2)
    traffic = run_step(model, 512)
    assert traffic.calls == {"all_gather": 4, "reduce_scatter": 2}
    # A quarter of everything in forward, a half in backward.
    assert traffic.nbytes["all_gather"] == LARGE_NBYTES // 4 + LARGE_NBYTES // 2


@pytest.mark.ours("gathers bytes, and reduces gradients of one dtype only")
@on_process_groups
@on_ranks(2)
def test_collectives_make_one_call_a_dtype(api: Api) -> None:
    _use_collectives(api)
    model = MixedDtypes()
    expected = gradients_alone(model, make_batch(8))
    api.fully_shard(model, reshard_after_forward=True)
    assert run_step(model, 8).calls == {"all_gather": 6, "reduce_scatter": 3}
    assert_gradients_are_parts_of(model, expected, rtol=2e-2, atol=2e-3)


@on_process_groups
@on_ranks(2)
def test_collectives_send_the_dtypes_of_the_policy(api: Api) -> None:
    _use_collectives(api)
    policy = api.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    model, _ = shard_layers(api, _large(), reshard_after_forward=True, mp_policy=policy)
    traffic = run_step(model, 512)
    assert traffic.calls == {"all_gather": 4, "reduce_scatter": 2}
    assert traffic.nbytes == {"all_gather": LARGE_NBYTES // 2, "reduce_scatter": LARGE_NBYTES}


@on_process_groups
@on_ranks(2, 3)
def test_collectives_train_as_the_unwrapped_model_does(api: Api) -> None:
    _use_collectives(api)
    for net, features in ((mlp(), 16), (UnevenMLP(), 7)):
        model, alone = shard_layers(api, net)
        assert_train_alike(alone, model, features)


@pytest.mark.ours("has no choice")
@on_ranks(2)
def test_unknown_choice_of_communication_is_refused(api: Api) -> None:
    with pytest.raises(ValueError, match=r"'ring'.*'process_group'.*'collectives'"):
        api.set_default_comm("ring")


# Collectives written by users


@pytest.mark.parametrize("returns_work", [True, False])
@on_ranks(2, 3)
def test_custom_collectives_carry_their_own_unit_alone(api: Api, returns_work: bool) -> None:
    model, alone = sharded_mlp(api)
    gather, reduce = custom_gather(api), custom_reduce(api)
    gather.returns_work = reduce.returns_work = returns_work
    model[1].set_custom_all_gather(gather)
    model[1].set_custom_reduce_scatter(reduce)
    assert_train_alike(alone, model)
    assert len(gather.calls) == 3 * 2
    assert len(reduce.calls) == 3
    rows = -(-16 // world_size())
    for call in (*gather.calls, *reduce.calls):
        small, large = sorted((call["input"], call["output"]), key=Tensor.numel)
        assert small.ndim == large.ndim == 1
        assert large.numel() == world_size() * small.numel() >= world_size() * rows * 17


@on_ranks(2)
def test_each_unit_may_have_collectives_of_its_own(api: Api) -> None:
    model, alone = sharded_mlp(api)
    log: list[str] = []
    for number, layer in enumerate(model):
        layer.set_custom_all_gather(custom_gather(api, log, f"gather {number}"))
        if number != 1:
            layer.set_custom_reduce_scatter(custom_reduce(api, log, f"reduce {number}"))
    assert_train_alike(alone, model)
    assert {name: log.count(name) for name in log} == {
        **{f"gather {number}": 6 for number in range(3)},
        **{f"reduce {number}": 3 for number in (0, 2)},
    }


@on_ranks(2)
def test_custom_collectives_of_the_root_leave_the_units_inside_alone(api: Api) -> None:
    model = mlp()
    alone = copy.deepcopy(model)
    api.fully_shard(model[1])
    api.fully_shard(model)
    gather, reduce = custom_gather(api), custom_reduce(api)
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(reduce)
    assert_train_alike(alone, model)
    assert len(gather.calls) == len(reduce.calls) == 3
    assert all(call["output"].numel() == 2 * 272 for call in gather.calls)


class Frugal(Watched):
    """Returns the same memory each time it is asked for a size."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        for tensor in self.memory:
            if tensor.shape == tuple(size) and tensor.dtype == dtype:
                return tensor
        return super().allocate(size, dtype=dtype, device=device)


@on_ranks(2)
def test_custom_collectives_may_use_the_same_memory_every_time(api: Api) -> None:
    model, alone = sharded_mlp(api)
    for layer in model:
        layer.set_custom_all_gather(custom_gather(api, memory=Frugal))
        layer.set_custom_reduce_scatter(custom_reduce(api, memory=Frugal))
    assert_train_alike(alone, model)


@on_ranks(2)
def test_custom_collectives_may_be_set_and_changed_between_steps(api: Api) -> None:
    model, alone = sharded_mlp(api)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-5) for m in (model, alone)]
    for step in range(4):
        gather, reduce = custom_gather(api), custom_reduce(api)
        if step in (1, 2):
            model[1].set_custom_all_gather(gather)
            model[1].set_custom_reduce_scatter(reduce)
        if step == 3:
            model[1].set_custom_all_gather(public(api, "DefaultAllGather")())
            model[1].set_custom_reduce_scatter(public(api, "DefaultReduceScatter")())
        batch = make_batch(16, seed=step)
        mean_square(alone(batch)).backward()
        mean_square(model(my_part(batch))).backward()
        assert (len(gather.calls), len(reduce.calls)) == ((2, 1) if step in (1, 2) else (0, 0))
        assert_gradients_are_parts_of(model, full_gradients(alone))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(full_parameters(model), full_parameters(alone), rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_custom_collectives_are_given_the_dtypes_of_the_policy(api: Api) -> None:
    policy = api.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    model = api.fully_shard(mlp(), mp_policy=policy)
    gather, reduce = custom_gather(api), custom_reduce(api)
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(reduce)
    run_step(model)
    assert {tensor.dtype for tensor in gather.memory} == {BF16}
    assert {tensor.dtype for tensor in reduce.memory} == {FP32}
    assert all(local(p.grad).dtype == FP32 for p in model.parameters())


@on_ranks(4)
def test_custom_collectives_are_given_the_group_of_the_shard_axis(api: Api) -> None:
    model, alone = sharded_mlp(api, mesh=mesh_of(2, 2))
    gather, reduce = custom_gather(api), custom_reduce(api)
    model[1].set_custom_all_gather(gather)
    model[1].set_custom_reduce_scatter(reduce)
    assert_train_alike(alone, model)
    own = [0, 1] if rank() < 2 else [2, 3]
    for call in (*gather.calls, *reduce.calls):
        assert dist.get_process_group_ranks(call["group"]) == own


@on_ranks(1)
def test_custom_collectives_are_not_called_for_one_rank(api: Api) -> None:
    model, alone = sharded_mlp(api)
    gather, reduce = custom_gather(api), custom_reduce(api)
    model[1].set_custom_all_gather(gather)
    model[1].set_custom_reduce_scatter(reduce)
    assert_train_alike(alone, model)
    assert not gather.calls
    assert not reduce.calls


@on_ranks(2)
def test_custom_reduce_scatter_is_called_only_where_gradients_are_reduced(api: Api) -> None:
    model, alone = sharded_mlp(api)
    reduce = custom_reduce(api)
    model[1].set_custom_reduce_scatter(reduce)
    for index in range(3):
        batch = make_batch(16, seed=index)
        mean_square(alone(batch)).backward()
        model.set_requires_gradient_sync(requires_gradient_sync=index == 2)
        mean_square(model(my_part(batch))).backward()
        assert len(reduce.calls) == index // 2
    assert_gradients_are_parts_of(model, full_gradients(alone))


@on_process_groups
@on_ranks(2)
def test_default_collectives_may_be_given_as_objects(api: Api) -> None:
    model, alone = shard_layers(api, _large(), reshard_after_forward=True)
    for layer in model:
        layer.set_custom_all_gather(public(api, "DefaultAllGather")())
        layer.set_custom_reduce_scatter(public(api, "DefaultReduceScatter")())
    traffic = run_step(model, 512)
    assert traffic.calls == {"all_gather": 4, "reduce_scatter": 2}
    assert traffic.nbytes == {"all_gather": LARGE_NBYTES, "reduce_scatter": LARGE_NBYTES}
    assert_gradients_are_parts_of(model, gradients_alone(alone, make_batch(512)))


@pytest.mark.parametrize("order", ["custom first", "group first"])
@on_process_groups
@on_ranks(2)
def test_custom_reduce_scatter_is_given_the_separate_group(api: Api, order: str) -> None:
    model, alone = sharded_mlp(api)
    gather, reduce = custom_gather(api), custom_reduce(api)
    if order == "group first":
        model.set_separate_reduce_scatter_group()
    model[1].set_custom_all_gather(gather)
    model[1].set_custom_reduce_scatter(reduce)
    if order == "custom first":
        model.set_separate_reduce_scatter_group()
    assert_train_alike(alone, model)
    (gather_group,) = {call["group"].group_name for call in gather.calls}
    (reduce_group,) = {call["group"].group_name for call in reduce.calls}
    assert gather_group != reduce_group


# A group of its own for reductions

_GROUPED = {
    "all_gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor", "all_to_all_single"),
    "all_reduce": ("all_reduce",),
}


@contextlib.contextmanager
def _record_groups() -> Iterator[dict[str, set[str]]]:
    """Record the names of the groups that each kind of collective is called on."""
    names: dict[str, set[str]] = defaultdict(set)

    def watch(kind: str, original: Any) -> Any:
        def call(*args: Any, group: dist.ProcessGroup, **kwargs: Any) -> Any:
            names[kind].add(group.group_name)
            return original(*args, group=group, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for kind, functions in _GROUPED.items():
            for function in functions:
                if original := getattr(dist, function, None):
                    patch = mock.patch.object(dist, function, watch(kind, original))
                    stack.enter_context(patch)
        yield names


def _groups_of_a_step(model: nn.Module) -> dict[str, set[str]]:
    with _record_groups() as names:
        mean_square(model(my_part(make_batch(16)))).backward()
    model.zero_grad()
    return names


@on_process_groups
@on_ranks(2)
def test_separate_group_is_one_for_all_units_and_for_reductions_alone(api: Api) -> None:
    model, alone = sharded_mlp(api)
    (shared,) = _groups_of_a_step(model)["reduce_scatter"]
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        model.set_separate_reduce_scatter_group()
    assert new_group.call_count == 1
    groups = _groups_of_a_step(model)
    (own,) = groups["reduce_scatter"]
    assert groups["all_gather"] == {shared} != {own}
    assert_train_alike(alone, model)
    model.set_separate_reduce_scatter_group(enable=False)
    assert _groups_of_a_step(model) == {"all_gather": {shared}, "reduce_scatter": {shared}}
    assert_train_alike(alone, model)


@on_process_groups
@on_ranks(2)
def test_separate_group_changes_no_count(api: Api) -> None:
    model, _ = sharded_mlp(api, reshard_after_forward=True)
    before = run_step(model)
    model.set_separate_reduce_scatter_group()
    after = run_step(model)
    assert (after.calls, after.nbytes) == (before.calls, before.nbytes)


@on_process_groups
@on_ranks(2)
def test_separate_group_can_be_for_one_unit_alone(api: Api) -> None:
    model, alone = sharded_mlp(api)
    model.set_separate_reduce_scatter_group(recurse=False)  # it owns no parameters
    assert len(_groups_of_a_step(model)["reduce_scatter"]) == 1
    model[1].set_separate_reduce_scatter_group(recurse=False)
    assert len(_groups_of_a_step(model)["reduce_scatter"]) == 2
    assert_train_alike(alone, model)


@on_process_groups
@on_ranks(2)
def test_separate_group_is_made_once_however_often_it_is_asked_for(api: Api) -> None:
    model, _ = sharded_mlp(api)
    model.set_separate_reduce_scatter_group()
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        model.set_separate_reduce_scatter_group()
    assert not new_group.called


@on_process_groups
@on_ranks(4)
def test_separate_group_on_two_axes_has_the_ranks_of_the_shard_axis(api: Api) -> None:
    model, alone = sharded_mlp(api, mesh=mesh_of(2, 2))
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        model.set_separate_reduce_scatter_group()
    assert [call.args[0] for call in new_group.mock_calls] == [[0, 1] if rank() < 2 else [2, 3]]
    groups = _groups_of_a_step(model)
    assert len(groups["reduce_scatter"] | groups["all_gather"] | groups["all_reduce"]) == 3
    assert_train_alike(alone, model)


@pytest.mark.apis("peer_memory")
@on_ranks(2)
def test_ranks_that_read_each_others_memory_need_no_separate_group(api: Api) -> None:
    model, alone = sharded_mlp(api)
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        model.set_separate_reduce_scatter_group()
        model.set_separate_reduce_scatter_group(enable=False)
    assert not new_group.called
    assert_train_alike(alone, model)


# Memory of the process group's allocator, symmetric memory


@pytest.mark.ours("takes the usual memory silently")
@on_ranks(2)
def test_allocator_of_a_group_that_has_none_is_refused(api: Api) -> None:
    model, alone = sharded_mlp(api)
    with pytest.raises(RuntimeError, match=r"1 \(rank \d\).*gloo.*cpu.*NCCL on CUDA"):
        _train_once_then(model).set_allocate_memory_from_process_group_for_comm(enable=True)
    assert_train_alike(alone, model)


@on_ranks(2)
def test_allocator_of_the_group_may_be_declined_anywhere(api: Api) -> None:
    model, alone = sharded_mlp(api)
    for layer in model:
        layer.set_allocate_memory_from_process_group_for_comm(enable=False)
    assert_train_alike(alone, model)


@on_ranks(2)
def test_symmetric_memory_on_the_cpu_is_refused(api: Api) -> None:
    model, alone = sharded_mlp(api)
    says = None if api.is_torch else r"1 \(rank \d\).*CUDA.*NCCL.*cpu.*gloo"
    with pytest.raises(RuntimeError, match=says):
        _train_once_then(model).set_symm_mem_for_comm()
    assert_train_alike(alone, model)


def _train_once_then(model: nn.Sequential) -> Any:
    """Run a step, by which units get their names, and return the unit named 1."""
    run_step(model)
    model.zero_grad()
    return model[1]


@pytest.mark.parametrize("custom", ["gather", "reduce", "both"])
@on_ranks(2)
def test_custom_collectives_allocate_for_themselves(api: Api, custom: str) -> None:
    model, alone = sharded_mlp(api)
    if custom != "reduce":
        model[1].set_custom_all_gather(custom_gather(api))
    if custom != "gather":
        model[1].set_custom_reduce_scatter(custom_reduce(api))
    unit, other = model[1], model[0]
    for enable in (True, False):
        with pytest.raises(AssertionError, match=r"custom.*(Gather|Reduce)"):
            unit.set_allocate_memory_from_process_group_for_comm(enable=enable)
    if not (api.is_torch and custom == "reduce"):  # PyTorch asks NCCL first
        with pytest.raises(AssertionError, match=r"custom.*(Gather|Reduce)"):
            unit.set_symm_mem_for_comm()
    other.set_allocate_memory_from_process_group_for_comm(enable=False)
    assert_train_alike(alone, model)


# How each way of communicating saves work


@pytest.mark.apis("process_group")
@pytest.mark.parametrize(
    ("build", "features"),
    [(mlp, 16), (UnevenMLP, 7), (_large, 512), (_partly_empty, 16)],
    ids=["small", "uneven", "direct", "partly_empty"],
)
@on_ranks(2)
def test_sums_of_the_backend_itself_train_alike(api: Api, build: Any, features: int) -> None:
    """Gloo gets another form of reduce-scatter; NCCL's and all others' works over it as well."""
    model = build()
    alone = copy.deepcopy(model)
    for unit in api.fully_shard(model)._fullshard_hooks.state.units:
        unit.comm.sums_natively = True
    # `record_traffic` counts either form as a reduce-scatter.
    exchange = mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single)
    with exchange as exchanged, record_traffic() as traffic:
        assert_train_alike(alone, model, features)
    assert traffic.calls["reduce_scatter"] >= 3
    assert not exchanged.called


@pytest.mark.apis("process_group")
@pytest.mark.parametrize("is_forced", [False, True])
@on_ranks(2)
def test_backend_that_averages_does_so_unless_sums_are_forced(api: Api, is_forced: bool) -> None:
    """As NCCL does; Gloo can as well."""
    model = mlp()
    alone = copy.deepcopy(model)
    for layer in model:
        api.fully_shard(layer)
    for unit in [each for m in model for each in m._fullshard_hooks.state.units]:
        unit.comm.sums_natively = unit.comm._averages = True
    api.fully_shard(model)
    for layer in model:
        layer.set_force_sum_reduction_for_comms(is_forced)
    name = (
        "reduce_scatter_single"
        if hasattr(dist, "reduce_scatter_single")
        else "reduce_scatter_tensor"
    )
    with mock.patch.object(dist, name, wraps=getattr(dist, name)) as reduce:
        assert_train_alike(alone, model)
    expected = dist.ReduceOp.SUM if is_forced else dist.ReduceOp.AVG
    assert {str(call.kwargs["op"]) for call in reduce.mock_calls} == {str(expected)}


@pytest.mark.apis("peer_memory")
@on_ranks(1)
def test_one_rank_keeps_the_gradients_that_autograd_made(api: Api) -> None:
    model = nn.Linear(4, 3)
    model.bias.requires_grad_(False)
    made: list[int] = []

    def note(module: nn.Module, _: object) -> None:
        module.weight.register_post_accumulate_grad_hook(
            lambda whole: made.append(whole.grad.data_ptr())
        )

    api.fully_shard(model)
    model.register_forward_pre_hook(note)  # after the engine's: sees the unsharded parameter
    model(torch.ones(2, 4)).sum().backward()
    first = local(model.weight.grad)
    assert first.data_ptr() == made[0]
    kept = first.clone()
    model(torch.ones(2, 4)).sum().backward()  # added to, not replaced
    torch.testing.assert_close(local(model.weight.grad), 2 * kept)
    assert model.bias.grad is None


@pytest.mark.apis("process_group")
@on_ranks(2)
def test_memory_of_sums_is_used_again_where_nothing_is_packed(api: Api) -> None:
    model = nn.Linear(512, 512, bias=False)
    (unit,) = api.fully_shard(model)._fullshard_hooks.state.units
    assert unit.plan_layout().buckets[0].packed_numel == 0
    lent: list[int] = []

    class Counting(type(unit.comm._scratch)):
        def take(self, *args: Any) -> torch.Tensor:
            memory = super().take(*args)
            lent.append(memory.untyped_storage().data_ptr())
            return memory

        def give(self, tensor: torch.Tensor) -> None:
            if tensor.numel():
                lent.remove(tensor.untyped_storage().data_ptr())
            super().give(tensor)

    unit.comm._scratch = Counting(unit.device)
    for _ in range(2):
        model(torch.ones(2, 512)).sum().backward()
        assert len(unit.comm._scratch.free) > 0
        assert lent == []
