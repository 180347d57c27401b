"""What users may do to a wrapped model between steps, and what is said of it."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.func import functional_call

import fullshard.engine.whole as engine_whole
from fullshard import StateError
from tests.api import Api
from tests.fsdp1.models import (
    averaged_gradients,
    batch,
    net,
    orig_params,
    parameters,
    quiet,
    run_step,
    summon,
    train,
    whole,
    whole_gradients,
    wrap,
)
from tests.harness import on_ranks, rank
from tests.training import mean_square, my_part


@orig_params
@on_ranks(2)
def test_parameters_may_change_their_dtype_under_an_optimizer(
    api: Api, use_orig_params: bool
) -> None:
    model, alone = wrap(api, net(), use_orig_params=use_orig_params), net().double()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    model.double()
    for seed in range(3):
        x = batch(seed).double()
        mean_square(model(x)).backward()
        mean_square(alone(x)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in whole(api, model).items():
        torch.testing.assert_close(parameter, alone.get_parameter(name))


@orig_params
@on_ranks(2)
def test_writes_after_a_change_of_dtype_are_what_forward_uses(
    api: Api, use_orig_params: bool
) -> None:
    model, alone = wrap(api, net(), use_orig_params=use_orig_params), net()
    for each in (model, alone):
        each(batch(0))
        each.double()
        with torch.no_grad():
            for parameter in each.parameters():
                parameter.mul_(3)
    x = batch(0).double()
    torch.testing.assert_close(model(x), alone(x))
    for name, parameter in whole(api, model).items():
        torch.testing.assert_close(parameter, alone.get_parameter(name))


@pytest.mark.parametrize(
    "use_orig_params",
    [False, pytest.param(True, marks=pytest.mark.long)],  # tracing anew takes 8 seconds
    ids=["flat", "orig"],
)
@on_ranks(2, limit_s=120)  # the first of them imports the compiler
def test_a_compiled_wrapper_computes_the_same(api: Api, use_orig_params: bool) -> None:
    torch._dynamo.reset()
    model = wrap(api, net(), use_orig_params=use_orig_params)
    other = wrap(api, net(), use_orig_params=use_orig_params)
    with quiet():
        compiled = torch.compile(other, backend="aot_eager")
        losses = [
            train(each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in (model, compiled)
        ]
    assert losses[0] == losses[1]


@orig_params
@pytest.mark.ours("not part of the API")
@on_ranks(2)
def test_description_says_that_a_unit_is_flat(api: Api, use_orig_params: bool) -> None:
    model = wrap(api, net(), use_orig_params=use_orig_params)
    text = str(api.describe(model))
    assert "3 units" in text
    assert "blocks.1\n" in text
    assert "5 in one flat buffer" in text  # of a block


@orig_params
@on_ranks(2)
def test_what_was_gathered_ahead_is_what_forward_uses(api: Api, use_orig_params: bool) -> None:
    model = wrap(api, net(), use_orig_params=use_orig_params)
    model.check_is_root()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    handle = model.blocks[0]._unshard(async_op=True)
    if handle is not None:
        handle.wait()
    alone = net()
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter.mul_(1.5)
    torch.testing.assert_close(model(batch()), alone(batch()))


def _linears(*sizes: tuple[int, int]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes))


@pytest.mark.ours("values are lost")
@pytest.mark.parametrize(
    ("use_orig_params", "in_units"), [(True, False), (True, True), (False, True)]
)
@on_ranks(2)
def test_parameters_that_exchange_their_memory_exchange_their_values(
    api: Api, use_orig_params: bool, in_units: bool
) -> None:
    # In one unit the first rank has the whole of the first two, the second rank the third.
    sizes = [(4, 4), (4, 4), (4, 8)]
    alone, inner = _linears(*sizes), _linears(*sizes)
    policy = ModuleWrapPolicy({nn.Linear}) if in_units else None
    model = wrap(api, inner, use_orig_params=use_orig_params, auto_wrap_policy=policy)
    own, its = list(alone.parameters()), list(model.parameters())
    for _ in range(3):
        x = torch.randn(2, 4)
        out = model(x)
        torch.testing.assert_close(out, alone(x))
        out.sum().backward()
        model.zero_grad()
        for first, second, *_ in (own, its):
            first.data, second.data = second.data, first.data


@pytest.mark.ours("other words")
@pytest.mark.parametrize("keeps_address", [False, True])
@on_ranks(2)
def test_piece_of_another_shape_is_refused_by_name(api: Api, keeps_address: bool) -> None:
    model = wrap(api, _linears((4, 4), (4, 4)), use_orig_params=True, auto_wrap_policy=None)
    model(torch.randn(2, 4)).sum().backward()
    model.zero_grad()
    first, second = model.parameters()  # each rank has the whole of one, nothing of the other
    if keeps_address:
        first.data = first.data.view(2, -1)
    else:
        first.data, second.data = second.data, first.data
    with pytest.raises(StateError, match=r"0\.weight"):
        model(torch.randn(2, 4))


@pytest.mark.ours("values are ignored, or stay")
@orig_params
@on_ranks(2)
def test_values_for_one_call_do_not_stay(api: Api, use_orig_params: bool) -> None:
    model, x = wrap(api, net(), use_orig_params=use_orig_params), batch()
    with torch.no_grad():
        before = model(x)
        halves = {name: p.detach() * 0.5 for name, p in model.named_parameters()}
        with pytest.raises(StateError, match=r"no nn\.Parameter"):
            functional_call(model, halves, (x,))
        torch.testing.assert_close(model(x), before)


@orig_params
@on_ranks(2)
def test_an_instance_that_ran_inside_one_model_may_move_to_another(
    api: Api, use_orig_params: bool
) -> None:
    model = wrap(api, net(), use_orig_params=use_orig_params)
    run_step(model)
    inner: Any = model.module
    again = wrap(api, nn.Sequential(inner.blocks[0]), nested=False)
    x = torch.ones(3, 6)
    torch.testing.assert_close(again(x), inner.blocks[0](x)) if api.is_torch else again(x)
    mean_square(again(x)).backward()


@on_ranks(2)
def test_the_flat_parameter_of_pieces_shares_their_memory(api: Api) -> None:
    model = wrap(api, net(), nested=False, use_orig_params=True)
    run_step(model)
    (flat,) = model.params
    with torch.no_grad():
        flat.fill_(2.0 + rank())
        flat.grad.fill_(3.0)
    for parameter in model.parameters():
        assert (parameter == 2.0 + rank()).all()
        assert parameter.grad is None or (parameter.grad == 3.0).all()


@pytest.mark.ours("PyTorch fails on its process groups")
@on_ranks(2)
def test_a_wrapper_cannot_be_copied(api: Api) -> None:
    with pytest.raises(AssertionError, match="cannot be deep-copied"):
        copy.deepcopy(wrap(api, net()))


strategies = pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])


@strategies
@pytest.mark.ours("with SHARD_GRAD_OP, zeroes tensors that are no leaves")
@on_ranks(2)
def test_zero_grad_between_forward_and_backward_reaches_what_is_trained(
    api: Api, strategy: str
) -> None:
    model, alone = wrap(api, net(), strategy, use_orig_params=True), net()
    for each in (model, alone):
        run_step(each, seed=0)
        loss = mean_square(each(my_part(batch(1))))
        each.zero_grad()
        loss.backward()
    expected = averaged_gradients(alone)
    gradients = whole_gradients(api, model)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, msg=name)


@pytest.mark.parametrize("is_evaluation", [False, True], ids=["dry run", "evaluation"])
@strategies
@pytest.mark.ours("refuses an optimizer after a forward with SHARD_GRAD_OP")
@on_ranks(2)
def test_parameters_are_the_same_objects_after_a_forward(
    api: Api, strategy: str, is_evaluation: bool
) -> None:
    model, alone = wrap(api, net(), strategy, use_orig_params=True), net()
    before = dict(model.named_parameters())
    for each in (model, alone):  # both have seen the batch, for their statistics
        with torch.set_grad_enabled(not is_evaluation):
            each(my_part(batch(3)))
    now = dict(model.named_parameters())
    assert [n for n in before if now[n] is not before[n]] == []
    assert now.keys() == before.keys()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    assert all(p.grad is None for p in before.values())
    moved = whole(api, model)
    assert [n for n, p in alone.named_parameters() if torch.equal(moved[n], p)] == []


@strategies
@pytest.mark.ours("with FULL_SHARD, shows pieces")
@on_ranks(2)
def test_a_weight_used_between_forward_and_backward_is_whole_and_trained(
    api: Api, strategy: str
) -> None:
    model, alone = wrap(api, net(), strategy, use_orig_params=True), net()
    for each in (model, alone):
        hidden = each(my_part(batch()))
        mean_square(nn.functional.linear(hidden, each.head.weight)).backward()
        assert each.head.weight in set(each.parameters())
    expected = averaged_gradients(alone)
    for name, gradient in whole_gradients(api, model).items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.bfloat16])
@orig_params
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(2)
def test_unreduced_gradients_have_the_dtype_they_were_computed_in(
    api: Api, strategy: str, use_orig_params: bool, reduce_dtype: torch.dtype | None
) -> None:
    precision = api.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model = wrap(api, net(), strategy, mixed_precision=precision, use_orig_params=use_orig_params)
    own = [p for name, p in parameters(model).items() if not name.startswith("batch_norm")]
    with model.no_sync():
        for seed in range(2):
            run_step(model, seed)
            dtypes = {p.grad.dtype for p in own if p.grad is not None}
            # Batch norms are wrapped apart, in full precision.
            assert torch.bfloat16 in dtypes
            assert use_orig_params <= (dtypes == {torch.bfloat16})
    run_step(model, 2)
    assert {p.grad.dtype for p in own if p.grad is not None} == {torch.float32}


@orig_params
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.ours("fails, or leaves gradients unreduced")
@on_ranks(2)
def test_freezing_keeps_what_no_sync_accumulated_before(
    api: Api, strategy: str, use_orig_params: bool
) -> None:
    alone = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
    model = copy.deepcopy(alone)
    for number, layer in enumerate(model):
        model[number] = wrap(api, layer, strategy, use_orig_params=use_orig_params, nested=False)
    model = wrap(api, model, strategy, use_orig_params=use_orig_params, nested=False)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
    for step in range(3):
        mean_square(alone(batch(2 * step))).backward()
        with model.no_sync():
            run_step(model, 2 * step)
        for each in (alone[1], model.module[1]):
            frozen = list(each.parameters())
            for parameter in frozen[:1] if use_orig_params else frozen:  # one flat one is all
                parameter.requires_grad_(False)
        mean_square(alone(batch(2 * step + 1))).backward()
        run_step(model, 2 * step + 1)
        for each in (alone, model):
            each.requires_grad_(True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in whole(api, model).items():
        torch.testing.assert_close(parameter, alone.get_parameter(name))


@orig_params
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.ours("no such method")
@on_ranks(2)
def test_what_is_written_to_a_parameter_unsharded_by_hand_is_dropped(
    api: Api, strategy: str, use_orig_params: bool
) -> None:
    model = wrap(api, net(), strategy, use_orig_params=use_orig_params)
    before = whole(api, model)
    model(batch())
    model._unshard()
    weight = model.stem.weight
    with torch.no_grad():
        weight.fill_(7.0)
    model._state.reset()
    for name, value in whole(api, model).items():
        torch.testing.assert_close(value, before[name], msg=name)


@orig_params
@pytest.mark.ours("fails at another place")
@on_ranks(2)
def test_a_failure_while_parameters_are_summoned_leaves_none_of_them_whole(
    api: Api, use_orig_params: bool
) -> None:
    model = wrap(api, net(), use_orig_params=use_orig_params)
    shapes = [p.shape for p in model.parameters()]
    real = engine_whole.gather_whole
    calls = []

    def fail_at_the_second(unit: Any) -> Any:
        calls.append(unit)
        if len(calls) == 2:
            raise RuntimeError("lost")
        return real(unit)

    with (
        mock.patch.object(engine_whole, "gather_whole", fail_at_the_second),
        pytest.raises(RuntimeError, match="lost"),
        summon(api, model),
    ):
        pass
    assert [p.shape for p in model.parameters()] == shapes
    assert len(whole(api, model)) == len(list(net().parameters()))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.ours("writes to the shards what does not fit")
@on_ranks(2)
def test_a_summoned_parameter_of_another_shape_leaves_the_others_sharded(api: Api) -> None:
    model = wrap(api, net(), use_orig_params=True)
    shapes = [p.shape for p in model.parameters()]
    with (
        pytest.raises(AssertionError, match="weight: its shape was changed"),
        summon(api, model),
    ):
        model.blocks[0].wide.weight.data = torch.zeros(3)
    assert [p.shape for p in model.parameters()] == shapes
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
