"""PyTorch's optimizers, gradient scaler and clipping on sharded parameters."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

import fullshard
from tests.api import Api
from tests.harness import mesh_of, on_ranks, rank, world_size
from tests.models import UnevenMLP, mlp
from tests.selection import one_way
from tests.training import (
    assert_equal,
    assert_gradients_are_parts_of,
    full,
    full_gradients,
    full_parameters,
    local,
    local_gradients,
    make_batch,
    mean_square,
    my_part,
)

pytestmark = one_way("the other files of this folder; tests/parity; tests/differential")

FP16, FP32 = torch.float16, torch.float32

# With the usual eps of 1e-8, the rounding of a gradient near zero becomes a full step.
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda params, **how: SGD(
        params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, **how
    ),
    "adam": lambda params, **how: Adam(params, lr=1e-2, eps=1e-5, amsgrad=True, **how),
    "adamw": lambda params, **how: AdamW(params, lr=1e-2, eps=1e-5, weight_decay=0.1, **how),
}
LOOPS: dict[str, dict[str, bool]] = {
    "each": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def _sharded(api: Api, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return a model of two units of uneven parameters, and an unwrapped copy."""
    model = UnevenMLP()
    alone = copy.deepcopy(model)
    api.fully_shard(model[0], **options)
    return api.fully_shard(model, **options), alone


def _train(model: nn.Module, optimizer: Optimizer, steps: range, *, whole: bool = False) -> None:
    for step in steps:
        batch = make_batch(7, seed=step)
        mean_square(model(batch if whole else my_part(batch))).backward()
        optimizer.step()
        optimizer.zero_grad()


def _assert_same_parameters(model: nn.Module, alone: nn.Module) -> None:
    torch.testing.assert_close(full_parameters(model), full_parameters(alone), rtol=1e-4, atol=1e-5)


# Steps

# DTensor has no sharding strategy for the fused form of SGD.
FORMS = [(name, loop) for name in OPTIMIZERS for loop in LOOPS if (name, loop) != ("sgd", "fused")]


@pytest.mark.parametrize(("name", "loop"), FORMS)
@on_ranks(2)
def test_every_form_of_an_optimizer_trains_as_on_the_unwrapped_model(
    api: Api, name: str, loop: str
) -> None:
    model, alone = _sharded(api)
    start = full_parameters(alone)
    for net in (model, alone):
        optimizer = OPTIMIZERS[name](net.parameters(), **LOOPS[loop])
        _train(net, optimizer, range(4), whole=net is alone)
    _assert_same_parameters(model, alone)
    assert all((value - start[n]).abs().max() > 1e-3 for n, value in full_parameters(model).items())


@pytest.mark.parametrize("loop", LOOPS)
@on_ranks(4)
def test_every_form_of_an_optimizer_trains_on_two_axes(api: Api, loop: str) -> None:
    model, alone = _sharded(api, mesh=mesh_of(2, 2))
    for net in (model, alone):
        optimizer = OPTIMIZERS["adamw"](net.parameters(), **LOOPS[loop])
        _train(net, optimizer, range(4), whole=net is alone)
    _assert_same_parameters(model, alone)


@pytest.mark.parametrize("loop", LOOPS)
@on_ranks(2)
def test_parameter_groups_keep_their_own_options(api: Api, loop: str) -> None:
    model, alone = _sharded(api)
    for net in (model, alone):
        groups = [
            {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": 0.5},
            {"params": [p for p in net.parameters() if p.ndim == 1], "lr": 3e-2},
        ]
        _train(net, OPTIMIZERS["adamw"](groups, **LOOPS[loop]), range(3), whole=net is alone)
    _assert_same_parameters(model, alone)


@on_ranks(2)
def test_optimizer_state_is_sharded_as_its_parameters_are(api: Api) -> None:
    model, _ = _sharded(api)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    _train(model, optimizer, range(1))
    for parameter in model.parameters():
        for name in ("exp_avg", "exp_avg_sq"):
            moment = optimizer.state[parameter][name]
            assert isinstance(moment, DTensor)
            assert moment.placements == parameter.placements
            assert local(moment).shape == local(parameter).shape


@pytest.mark.parametrize("loop", LOOPS)
@on_ranks(2)
def test_parameter_without_gradient_is_not_stepped(api: Api, loop: str) -> None:
    model, _ = _sharded(api)
    model[4].requires_grad_(requires_grad=False)
    before = full_parameters(model)
    optimizer = OPTIMIZERS["adamw"](model.parameters(), **LOOPS[loop])
    _train(model, optimizer, range(2))
    after = full_parameters(model)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {"0.weight", "0.bias", "2.weight", "2.bias"}


# Optimizer state


@pytest.mark.parametrize(("name", "loop"), FORMS[::2])
@on_ranks(2)
def test_optimizer_state_is_restored_bit_by_bit(api: Api, name: str, loop: str) -> None:
    (model, _), (other, _) = _sharded(api), _sharded(api)
    optimizer = OPTIMIZERS[name](model.parameters(), **LOOPS[loop])
    _train(model, optimizer, range(2))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    _train(model, optimizer, range(2, 4))

    resumed = OPTIMIZERS[name](other.parameters(), **LOOPS[loop])
    _train(other, resumed, range(7, 8))  # what was there is replaced
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    _train(other, resumed, range(2, 4))
    assert_equal(
        {n: local(p).detach() for n, p in other.named_parameters()},
        {n: local(p).detach() for n, p in model.named_parameters()},
    )


@on_ranks(2)
def test_state_that_a_policy_wants_elsewhere_and_nobody_streams_is_named(
    api: Api, tmp_path: Path
) -> None:
    policy = fullshard.PlacementPolicy(optimizer="disk", folder=str(tmp_path))
    for streams in (True, False):
        model = api.fully_shard(mlp(), offload_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters())
        if streams:
            fullshard.stream_state(optimizer)
        for named in (not streams, False):
            mean_square(model(my_part(make_batch(16)))).backward()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                optimizer.step()
            assert any("stream_state" in str(each.message) for each in said) is named


@on_ranks(2)
def test_optimizer_state_survives_its_file(api: Api) -> None:
    model, _ = _sharded(api)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    _train(model, optimizer, range(2))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = OPTIMIZERS["adamw"](model.parameters())
    resumed.load_state_dict(torch.load(file, weights_only=False))
    for parameter in model.parameters():
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(local(resumed.state[parameter][key]), local(value))


# Clipping


def _after_backward(api: Api, **options: Any) -> tuple[nn.Module, nn.Module]:
    model, alone = _sharded(api, **options)
    batch = 10 * make_batch(7)
    mean_square(alone(batch)).backward()
    mean_square(model(my_part(batch))).backward()
    return model, alone


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@on_ranks(2)
def test_clipping_of_torch_takes_every_norm(api: Api, norm_type: float, foreach: bool) -> None:
    for max_norm in (1e-2, 1e4):
        model, alone = _after_backward(api)
        options = {"max_norm": max_norm, "norm_type": norm_type, "foreach": foreach}
        expected = nn.utils.clip_grad_norm_(alone.parameters(), **options)
        norm = nn.utils.clip_grad_norm_(model.parameters(), **options)
        torch.testing.assert_close(full(norm), expected, rtol=1e-5, atol=0)
        assert_gradients_are_parts_of(model, full_gradients(alone))


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@on_ranks(4)
def test_clipping_of_torch_counts_replicas_once(api: Api, norm_type: float) -> None:
    model, alone = _after_backward(api, mesh=mesh_of(2, 2))
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 1e-2, norm_type)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-2, norm_type)
    torch.testing.assert_close(full(norm), expected, rtol=1e-5, atol=0)
    assert_gradients_are_parts_of(model, full_gradients(alone))


@on_ranks(2)
def test_norm_and_clipping_of_torch_may_be_called_apart(api: Api) -> None:
    model, alone = _after_backward(api)
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 1e-2)
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    nn.utils.clip_grads_with_norm_(model.parameters(), 1e-2, norm)
    torch.testing.assert_close(full(norm), expected, rtol=1e-5, atol=0)
    assert_gradients_are_parts_of(model, full_gradients(alone))


@on_ranks(2)
def test_clipping_by_value_works_on_sharded_gradients(api: Api) -> None:
    model, alone = _after_backward(api)
    largest = max(g.abs().max().item() for g in full_gradients(alone).values())
    for net in (model, alone):
        nn.utils.clip_grad_value_(net.parameters(), largest / 3)
    assert_gradients_are_parts_of(model, full_gradients(alone))


@on_ranks(2)
def test_gradient_that_is_not_finite_on_one_rank_is_reported_on_all(api: Api) -> None:
    model, _ = _after_backward(api)
    if rank() == 0:
        local(model[0].weight.grad)[0, 0] = torch.inf
    with pytest.raises(RuntimeError, match="non-finite"):
        full(nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True))


# Loss scaling


def _fp16(api: Api) -> Any:
    return api.MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=FP32)


@on_ranks(2)
def test_scaled_and_clipped_training_equals_the_unwrapped_model(api: Api) -> None:
    model, alone = _sharded(api)  # float32, so that the unwrapped model computes alike
    scalers = [GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
    optimizers = [OPTIMIZERS["sgd"](net.parameters()) for net in (model, alone)]
    for step in range(4):
        batch = 10 * make_batch(7, seed=step)
        norms = []
        for net, part, scaler, optimizer in zip(
            (model, alone), (my_part(batch), batch), scalers, optimizers, strict=True
        ):
            scaler.scale(mean_square(net(part))).backward()
            scaler.unscale_(optimizer)
            norms.append(full(nn.utils.clip_grad_norm_(net.parameters(), 0.05)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-4, atol=0)
        assert norms[1] > 0.05
    _assert_same_parameters(model, alone)


@pytest.mark.parametrize("loop", LOOPS)
@on_ranks(2)
def test_overflow_on_one_rank_skips_the_step_on_all(api: Api, loop: str) -> None:
    model, _ = _sharded(api, mp_policy=_fp16(api))
    optimizer = OPTIMIZERS["adamw"](model.parameters(), **LOOPS[loop])
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=2)
    scales = [4.0, 2.0, 2.0, 4.0, 4.0]  # halved by the overflow, doubled after two good steps
    for step, scale in enumerate(scales):
        before = full_parameters(model)
        assert scaler.get_scale() == scale
        factor = 1e30 if step == 0 and rank() == 1 else 1.0
        scaler.scale(mean_square(model(my_part(make_batch(7, seed=step)))) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = full_parameters(model)
        unchanged = [torch.equal(after[name], before[name]) for name in after]
        assert all(unchanged) if step == 0 else not any(unchanged)


@on_ranks(2)
def test_overflow_that_one_rank_alone_can_see_is_counted_on_all(api: Api) -> None:
    model, _ = _sharded(api, mp_policy=_fp16(api))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(mean_square(model(my_part(make_batch(7))))).backward()
    if rank() == world_size() - 1:
        local(model[2].bias.grad)[-1] = torch.nan  # in this rank's shard only
    before = {n: local(p).detach().clone() for n, p in model.named_parameters()}
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert_equal({n: local(p).detach() for n, p in model.named_parameters()}, before)


@on_ranks(2)
def test_unscaled_gradients_are_those_of_an_unscaled_loss(api: Api) -> None:
    model, _ = _sharded(api, mp_policy=_fp16(api))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = GradScaler("cpu", init_scale=2.0**6)
    gradients: list[dict[str, Tensor]] = []
    for scale in (False, True):
        loss = mean_square(model(my_part(make_batch(7))))
        (scaler.scale(loss) if scale else loss).backward()
        if scale:
            scaler.unscale_(optimizer)
        gradients.append(local_gradients(model))
        optimizer.zero_grad()
    assert_equal(gradients[1], gradients[0], rtol=1e-2, atol=1e-5)


@on_ranks(2)
def test_scaler_resumes_from_its_state(api: Api) -> None:
    model, _ = _sharded(api, mp_policy=_fp16(api))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=2)
    for step in range(5):
        if step == 1:
            state = scaler.state_dict()
            scaler = GradScaler("cpu", init_scale=1024.0)
            scaler.load_state_dict(state)
        assert scaler.get_scale() == 4.0 * 2 ** (step // 2)
        scaler.scale(mean_square(model(my_part(make_batch(7, seed=step))))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
