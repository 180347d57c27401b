"""Forward and backward passes of every shape between two optimizer steps."""

from __future__ import annotations

import collections
import copy
import dataclasses
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from fullshard.engine.params.buffers import KEPT_NBYTES
from fullshard.watch.uncaught import explain_early_use
from tests.api import Api
from tests.harness import on_ranks, rank, world_size
from tests.models import Transformer, mlp
from tests.releases import NEWEST, RELEASE
from tests.training import (
    assert_equal,
    assert_gradients_are_parts_of,
    full_gradients,
    full_parameters,
    gradients_alone,
    local,
    local_gradients,
    make_batch,
    mean_square,
    my_part,
)


def _shard(api: Api, model: nn.Sequential, **options: Any) -> nn.Sequential:
    for layer in model:
        api.fully_shard(layer, **options)
    return api.fully_shard(model, **options)


class Branches(nn.Module):
    """Two layers, of which a forward uses those named."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.left = nn.Linear(16, 16)
        self.right = nn.Linear(16, 16)

    def forward(self, x: Tensor, *names: str) -> Tensor:
        x = self.stem(x).tanh()
        return x + sum(getattr(self, name)(x) for name in names)


# Several passes


@pytest.mark.parametrize("num_backwards", [1, 2])
@pytest.mark.parametrize("reshard", [None, True, False])
@on_ranks(2)
def test_several_forwards_before_backward(
    api: Api, reshard: bool | None, num_backwards: int
) -> None:
    model, first, second = mlp(), make_batch(16), make_batch(16, seed=8)
    alone = copy.deepcopy(model)
    (mean_square(alone(first)) + mean_square(alone(second))).backward()
    _shard(api, model, reshard_after_forward=reshard)
    losses = [mean_square(model(my_part(batch))) for batch in (first, second)]
    for loss in losses if num_backwards == 2 else [losses[0] + losses[1]]:
        loss.backward()
    assert_gradients_are_parts_of(model, full_gradients(alone))


@on_ranks(2)
def test_two_backwards_through_one_retained_graph(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    expected = {name: 2 * grad for name, grad in gradients_alone(model, batch).items()}
    _shard(api, model)
    loss = mean_square(model(my_part(batch)))
    loss.backward(retain_graph=True)
    loss.backward()
    assert_gradients_are_parts_of(model, expected)


@on_ranks(2)
def test_two_losses_of_one_forward_are_backpropagated_in_turn(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    alone = copy.deepcopy(model)
    out = alone(batch)
    (mean_square(out[:, :8]) + mean_square(out[:, 8:])).backward()
    _shard(api, model)
    out = model(my_part(batch))
    mean_square(out[:, :8]).backward(retain_graph=True)
    mean_square(out[:, 8:]).backward()
    assert_gradients_are_parts_of(model, full_gradients(alone))


@on_ranks(2)
def test_unit_called_twice_in_one_forward(api: Api) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x).tanh())

    model, batch = Twice(), make_batch(16)
    expected = gradients_alone(model, batch)
    api.fully_shard(model.layer)
    api.fully_shard(model)
    mean_square(model(my_part(batch))).backward()
    assert_gradients_are_parts_of(model, expected)


# Inputs, outputs


@on_ranks(2)
def test_inputs_with_and_without_gradient_give_the_same_gradients(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    alone = copy.deepcopy(model)
    whole = batch.clone().requires_grad_()
    mean_square(alone(whole)).backward()
    _shard(api, model)
    part = my_part(batch).clone().requires_grad_()
    mean_square(model(part)).backward()
    assert_gradients_are_parts_of(model, full_gradients(alone))
    # Each rank's loss is a mean over its part: world_size times its share of the whole mean.
    torch.testing.assert_close(part.grad, my_part(whole.grad) * world_size())
    model.zero_grad()
    mean_square(model(my_part(batch))).backward()
    assert_gradients_are_parts_of(model, full_gradients(alone))


class InPlace(nn.Module):
    """Changes its input, and returns what it changed or what it computed of it."""

    def __init__(self, *, returns_input: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.returns_input = returns_input

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        if not self.returns_input:
            return self.linear(x)
        x += self.linear(x.clone())
        return x


@pytest.mark.ours("raises: its node on the input cannot be overridden")
@pytest.mark.parametrize("returns_input", [False, True])
@on_ranks(2)
def test_unit_may_change_its_input_in_place(api: Api, returns_input: bool) -> None:
    torch.manual_seed(0)
    blocks = (InPlace(returns_input=returns_input) for _ in range(2))
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), *blocks)
    alone = copy.deepcopy(model)
    _shard(api, model)
    # Their backward is over when the gradient of the first layer's output comes.
    units = [unit for block in model[2:] for unit in block._fullshard_hooks.state.units]

    def are_freed(_: Tensor) -> None:
        assert all(unit.is_sharded for unit in units)

    model[0].register_forward_hook(lambda _m, _i, out: out.register_hook(are_freed) and None)
    for seed in range(2):
        batch = make_batch(16, seed=seed)
        gradients = gradients_alone(alone, batch)
        mean_square(model(my_part(batch))).backward()
        assert_gradients_are_parts_of(model, gradients)
        model.zero_grad()
        alone.zero_grad()


class Fallback(nn.Module):
    """Goes on without its second layer if that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.second.register_forward_hook(self._fail_if_asked)
        self.fails = False

    def _fail_if_asked(self, *_: object) -> None:
        if self.fails:
            raise ValueError

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        try:
            return self.second(x)
        except ValueError:
            return x


@pytest.mark.parametrize("is_training", [True, False])
@on_ranks(2)
def test_unit_whose_exception_is_caught_is_sharded_again(api: Api, is_training: bool) -> None:
    model = Fallback()
    api.fully_shard(model.second)
    api.fully_shard(model)
    batch = make_batch(16)
    model(batch)
    model.fails = True
    with torch.set_grad_enabled(is_training):
        model(batch)
    assert isinstance(model.second.weight, DTensor)
    model.fails = False
    model.reshard()  # a root that expects a backward is whole, and loses what is written
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
        expected = (batch.sum(1, keepdim=True) / 2 + 0.5) * 8 + 0.5
        torch.testing.assert_close(model(batch), expected.expand(-1, 16))


@on_ranks(2)
def test_input_made_in_inference_mode_may_have_a_gradient(api: Api) -> None:
    class Shift(nn.Module):
        """Saves nothing for backward, which an inference tensor must not be."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(16))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.weight

    model = api.fully_shard(Shift())
    with torch.inference_mode():
        x = torch.ones(4, 16, requires_grad=True)
    model(x).sum().backward()
    assert local(model.weight.grad).tolist() == [4.0] * 8


@on_ranks(2)
def test_outputs_may_be_nested_in_containers(api: Api) -> None:
    class Nested(nn.Linear):
        def forward(self, x: Tensor, *, options: dict[str, Any]) -> dict[str, Any]:
            out = super().forward(x * options["scale"])
            return {"logits": out, "parts": (out[:, :8].clone(), [out[:, 8:].clone()]), "n": 3}

    model, batch = Nested(16, 16), make_batch(16)
    options = {"scale": torch.tensor(2.0)}
    alone = copy.deepcopy(model)
    mean_square(alone(batch, options=options)["parts"][1][0]).backward()
    api.fully_shard(model)
    out = model(my_part(batch), options=options)
    assert out["n"] == 3
    mean_square(out["parts"][1][0]).backward()
    assert_gradients_are_parts_of(model, full_gradients(alone))


class _Notes(nn.Linear):
    """Writes to all kinds of containers that it is given, and reads what is there."""

    def forward(self, x: Tensor, notes: dict[str, Any], *, cache: _Cache) -> Tensor:
        out = super().forward(x)
        cache.kept.append(out.mean())
        notes["same"] = notes["twice"][0] is notes["twice"][1]
        out = out * cache.kept[0] * len(cache.kept)
        notes["all"].append(out.mean())
        notes["sum"] = notes.get("sum", 0) + sum(notes["all"]) + notes["last"][0].of
        notes["last"].append(_Note(out.amax()))
        notes["last"][1].of = notes["last"][1].of * 2
        if len(notes["all"]) == 4:
            raise RuntimeError("enough")
        return out


@dataclasses.dataclass
class _Note:
    of: Tensor


class _Cache:
    """Is known to pytree, as caches of keys and values may be."""

    def __init__(self, kept: Sequence[Tensor] = ()) -> None:
        self.kept = [*kept]


pytree.register_pytree_node(_Cache, lambda cache: (cache.kept, None), lambda kept, _: _Cache(kept))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@on_ranks(2)
def test_unit_may_write_to_containers_that_it_is_given(api: Api, dtype: torch.dtype | None) -> None:
    def run(model: nn.Sequential, batch: Tensor, notes: dict[str, Any]) -> Tensor:
        cache = _Cache()
        for layer in model:
            batch = layer(batch, notes, cache=cache)
        return batch.mean() + notes["sum"] + notes["last"][-1].of

    def fresh_notes() -> dict[str, Any]:
        first = _Note(torch.ones((), requires_grad=True))
        last = collections.deque([first, copy.copy(first)])
        return {"all": [], "last": last, "twice": [first.of] * 2}

    model, batch = nn.Sequential(*(_Notes(16, 16) for _ in range(3))), make_batch(16)
    alone, expected, notes = copy.deepcopy(model), fresh_notes(), fresh_notes()
    loss = run(alone, batch, expected)
    loss.backward()
    for layer in model:
        api.fully_shard(layer, mp_policy=api.MixedPrecisionPolicy(param_dtype=dtype))
    api.fully_shard(model)
    first, tolerance = notes["last"][0].of, 0.0 if dtype is None else 0.1
    assert run(model, batch, notes).item() == pytest.approx(loss.item(), abs=tolerance, rel=1e-5)
    run(model, batch, fresh_notes()).backward()
    if dtype is None:
        assert_gradients_are_parts_of(model, full_gradients(alone))
        assert notes["same"]
    assert notes["last"][0].of is first
    assert len(notes["all"]) == len(notes["last"]) - 2 == 3
    with pytest.raises(RuntimeError, match="enough"):
        model[0](batch, notes, cache=_Cache())
    assert notes["last"][0].of is first, "put back"
    assert len(notes["all"]) == 4


@on_ranks(2)
def test_output_without_gradient_is_returned_as_it_is(api: Api) -> None:
    class Flag(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
            return super().forward(x), x.argmax(-1), None

    model, batch = api.fully_shard(Flag(16, 16)), make_batch(16)
    out, winner, nothing = model(batch)
    assert out.requires_grad
    torch.testing.assert_close(winner, batch.argmax(-1))
    assert nothing is None
    mean_square(out).backward()
    assert model.weight.grad is not None


# Unused units and parameters


@on_ranks(2)
def test_unit_unused_on_every_rank_has_no_gradient(api: Api) -> None:
    model, batch = Branches(), make_batch(16)
    alone = copy.deepcopy(model)
    mean_square(alone(batch, "left")).backward()
    for layer in (model.left, model.right):
        api.fully_shard(layer)
    api.fully_shard(model)
    for _ in range(2):
        mean_square(model(my_part(batch), "left")).backward()
        assert model.right.weight.grad is None
        assert_gradients_are_parts_of(model, full_gradients(alone))
        model.zero_grad()


@on_ranks(2)
def test_unused_parameter_of_a_used_unit_has_no_gradient(api: Api) -> None:
    model, batch = Branches(), make_batch(16)
    alone = copy.deepcopy(model)
    mean_square(alone(batch, "left")).backward()
    api.fully_shard(model)
    mean_square(model(my_part(batch), "left")).backward()
    assert model.right.weight.grad is None
    assert_gradients_are_parts_of(model, full_gradients(alone))


@on_ranks(2)
def test_branch_taken_every_second_step(api: Api) -> None:
    model, batch = Branches(), make_batch(16)
    alone = copy.deepcopy(model)
    for layer in (model.left, model.right):
        api.fully_shard(layer)
    api.fully_shard(model)
    for step in range(4):
        names = ("left", "right") if step % 2 else ("right",)
        mean_square(alone(batch, *names)).backward()
        mean_square(model(my_part(batch), *names)).backward()
        assert_gradients_are_parts_of(model, full_gradients(alone))
        alone.zero_grad()
        model.zero_grad()


@pytest.mark.ours("collectives of different sizes meet")
@on_ranks(2, 3)
def test_parameters_unused_on_one_rank_get_the_sum_of_the_others(api: Api) -> None:
    model, batch = Branches(), make_batch(16)
    alone = copy.deepcopy(model)
    for number, part in enumerate(batch.chunk(world_size())):
        names = ("left",) if number == 0 else ("left", "right")
        (mean_square(alone(part, *names)) / world_size()).backward()
    api.fully_shard(model)
    for _ in range(2):
        names = ("left",) if rank() == 0 else ("left", "right")
        mean_square(model(my_part(batch), *names)).backward()
        assert_gradients_are_parts_of(model, full_gradients(alone))
        model.zero_grad()


@on_ranks(2)
def test_zero_gradients_stand_in_for_unused_parameters_on_request(api: Api) -> None:
    model, batch = Branches(), make_batch(16)
    api.fully_shard(model)
    model.set_reduce_scatter_unused_params(reduce_scatter_unused_params=True)
    names = ("left",) if rank() == 0 else ("left", "right")
    mean_square(model(my_part(batch), *names)).backward()
    assert all(p.grad is not None for p in model.parameters())
    mean_square(model(my_part(batch), "left")).backward()
    assert all(p.grad is not None for p in model.parameters())


# Activation checkpointing


def _reentrant(layer: nn.Module) -> nn.Module:
    return _Recomputed(layer, use_reentrant=True)


def _not_reentrant(layer: nn.Module) -> nn.Module:
    return _Recomputed(layer, use_reentrant=False)


class _Recomputed(nn.Module):
    def __init__(self, inner: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


WRAPPERS = {
    "checkpoint_wrapper": checkpoint_wrapper,
    "reentrant": _reentrant,
    "not_reentrant": _not_reentrant,
}


def _assert_recomputation_is_invisible(
    api: Api, wrap: Callable[[nn.Module], nn.Module], *, outside: bool, reshard: bool | None
) -> None:
    model, batch = mlp(4), make_batch(16)
    expected = gradients_alone(model, batch)
    inners = list(model)
    for index, layer in enumerate(inners):
        wrapped = wrap(layer)
        api.fully_shard(layer if outside else wrapped, reshard_after_forward=reshard)
        model[index] = wrapped
    api.fully_shard(model)
    for _ in range(2):
        part = my_part(batch).clone().requires_grad_()  # reentrant checkpoints need one
        mean_square(model(part)).backward()
        own = [p for layer in inners for p in layer.parameters()]
        for parameter, whole in zip(own, expected.values(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), whole, rtol=1e-5, atol=1e-6)
        assert all(isinstance(p, DTensor) for p in own)
        model.zero_grad()


@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(2)
def test_checkpoint_around_a_unit(api: Api, wrapper: str, reshard: bool | None) -> None:
    _assert_recomputation_is_invisible(api, WRAPPERS[wrapper], outside=True, reshard=reshard)


@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(2)
def test_unit_around_a_checkpoint(api: Api, wrapper: str, reshard: bool | None) -> None:
    _assert_recomputation_is_invisible(api, WRAPPERS[wrapper], outside=False, reshard=reshard)


@on_ranks(2)
def test_checkpoint_around_several_units(api: Api) -> None:
    model, batch = nn.Sequential(mlp(2), mlp(2)), make_batch(16)
    expected = list(gradients_alone(model, batch).values())
    for half in model:
        for layer in half:
            api.fully_shard(layer)
    for index in range(2):
        model[index] = _not_reentrant(model[index])
    api.fully_shard(model)
    for _ in range(2):
        mean_square(model(my_part(batch))).backward()
        for parameter, whole in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), whole, rtol=1e-5, atol=1e-6)
        model.zero_grad()


# Exceptions


class Bomb(nn.Module):
    """Raises in forward or in backward while it is armed."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.armed == "forward":
            raise ZeroDivisionError
        x = x * 1.0
        if self.armed == "backward":
            x.register_hook(self._raise)
        return x

    def _raise(self, _: Tensor) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize("moment", ["forward", "backward"])
@pytest.mark.parametrize("place", [0, 1, 2])
@on_ranks(2)
def test_step_after_an_exception_is_like_any_other(
    api: Api, moment: str, place: int, reshard: bool | None
) -> None:
    model, batch = mlp(), make_batch(16)
    bomb = Bomb()
    model[place].append(bomb)
    expected = gradients_alone(model, batch)
    _shard(api, model, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for armed in ("", moment, "", moment, moment, ""):
        bomb.armed = armed
        if armed:
            with pytest.raises(ZeroDivisionError):
                mean_square(model(my_part(batch))).backward()
            if api.is_torch:
                model.reset_iter_state()
        else:
            mean_square(model(my_part(batch))).backward()
            assert_gradients_are_parts_of(model, expected)
            optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_reset_iter_state_is_accepted_at_any_time(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    expected = gradients_alone(model, batch)
    _shard(api, model)
    for _ in range(2):
        model(my_part(batch))
        model.reset_iter_state()
        mean_square(model(my_part(batch))).backward()
        assert_gradients_are_parts_of(model, expected)
        model.reset_iter_state()
        if RELEASE < NEWEST:
            assert_gradients_are_parts_of(model, expected)
        else:
            assert all(parameter.grad is None for parameter in model.parameters())
        model.zero_grad()


# Evaluation


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("before_training", [True, False])
@on_ranks(2)
def test_evaluation_between_steps_changes_nothing(
    api: Api, mode: Callable[[], Any], before_training: bool
) -> None:
    if api.is_torch and before_training and mode is torch.inference_mode:
        pytest.skip("PyTorch: buffers made in inference mode cannot be used for training")
    model, batch = mlp(), make_batch(16)
    expected, answers = gradients_alone(model, batch), model(batch).detach()
    _shard(api, model)
    for step in range(3):
        if step or before_training:
            with mode():
                torch.testing.assert_close(model(batch), answers)
                torch.testing.assert_close(model(batch), answers)
        mean_square(model(my_part(batch))).backward()
        assert_gradients_are_parts_of(model, expected)
        model.zero_grad()


@on_ranks(2)
def test_evaluation_sees_the_optimizer_step(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    alone = copy.deepcopy(model)
    _shard(api, model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, alone)]
    for _ in range(3):
        mean_square(model(my_part(batch))).backward()
        mean_square(alone(batch)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(model(batch), alone(batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("besides", ["evaluation before backward", "dropped loss", "eval mode"])
@on_ranks(2)
def test_what_runs_besides_a_step_leaves_its_gradients(api: Api, besides: str) -> None:
    model, batch = mlp(), make_batch(16)
    expected = gradients_alone(model, batch)
    _shard(api, model)
    model.train(besides != "eval mode")
    for _ in range(3):
        if besides == "dropped loss":
            model(my_part(batch))
        loss = mean_square(model(my_part(batch)))
        if besides == "evaluation before backward":
            with torch.no_grad():
                model(make_batch(16, seed=9))
        loss.backward()
        assert_gradients_are_parts_of(model, expected)
        model.zero_grad()


@on_ranks(2)
def test_generation_token_by_token_equals_the_unwrapped_model(api: Api) -> None:
    model = Transformer()
    tokens = torch.zeros(1, 1, dtype=torch.long)
    alone = copy.deepcopy(model)
    for block in model.blocks:
        api.fully_shard(block)
    api.fully_shard(model)
    with torch.inference_mode():
        for _ in range(6):
            logits = model(tokens)
            torch.testing.assert_close(logits, alone(tokens))
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)


# Several models


@on_ranks(2)
def test_two_models_take_turns_in_one_step(api: Api) -> None:
    student, teacher, batch = mlp(), mlp(), make_batch(16)
    alone = copy.deepcopy(student)
    with torch.no_grad():
        answers = teacher(batch)
    mean_square(alone(batch) - answers).backward()
    _shard(api, student)
    _shard(api, teacher)
    for _ in range(2):
        out = student(my_part(batch))
        with torch.no_grad():
            answers = teacher(my_part(batch))
        mean_square(out - answers).backward()
        assert_gradients_are_parts_of(student, full_gradients(alone))
        assert not local_gradients(teacher)
        student.zero_grad()


@on_ranks(2)
def test_gradient_flows_through_one_model_into_another(api: Api) -> None:
    first, second, batch = mlp(), mlp(), make_batch(16)
    alone = copy.deepcopy(nn.ModuleList([first, second]))
    mean_square(alone[1](alone[0](batch))).backward()
    _shard(api, first)
    _shard(api, second)
    for _ in range(2):
        mean_square(second(first(my_part(batch)))).backward()
        assert_gradients_are_parts_of(first, full_gradients(alone[0]))
        assert_gradients_are_parts_of(second, full_gradients(alone[1]))
        first.zero_grad()
        second.zero_grad()


# Gradients


@on_ranks(2)
def test_gradients_add_up_until_they_are_cleared(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    expected = gradients_alone(model, batch)
    _shard(api, model)
    for times in (1, 2, 3):
        mean_square(model(my_part(batch))).backward()
        assert_gradients_are_parts_of(model, {n: times * g for n, g in expected.items()})


@on_ranks(2)
def test_gradient_is_none_before_backward_and_after_zero_grad(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    _shard(api, model)
    assert not local_gradients(model)
    loss = mean_square(model(my_part(batch)))
    loss.backward()
    assert all(isinstance(p.grad, DTensor) for p in model.parameters())
    assert all(p.grad.placements == p.placements for p in model.parameters())
    model.zero_grad()
    assert not local_gradients(model)


@on_ranks(2)
def test_zeroed_gradients_are_added_to_in_place(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    expected = gradients_alone(model, batch)
    _shard(api, model)
    for _ in range(3):
        mean_square(model(my_part(batch))).backward()
        assert_gradients_are_parts_of(model, expected)
        model.zero_grad(set_to_none=False)
        assert all(g.count_nonzero() == 0 for g in local_gradients(model).values())
        assert len(local_gradients(model)) == len(expected)


KEPT: dict[str, Callable[[Tensor], Any]] = {
    "gradient": lambda gradient: gradient,
    "local": lambda gradient: gradient.to_local(),
    "view": lambda gradient: gradient.to_local().view(-1)[:5],
    "detached": lambda gradient: gradient.detach(),
    "array": lambda gradient: gradient.to_local().numpy(),
    "storage": lambda gradient: gradient.to_local().untyped_storage(),
}


@pytest.mark.parametrize("how", KEPT)
@on_ranks(2)
def test_gradient_that_the_user_keeps_is_not_overwritten(api: Api, how: str) -> None:
    model, batch = mlp(), make_batch(16)
    _shard(api, model)
    mean_square(model(my_part(batch))).backward()
    kept = [KEPT[how](parameter.grad) for parameter in model.parameters()]
    copies = copy.deepcopy([local(k) if isinstance(k, Tensor) else k for k in kept])
    for _ in range(3):
        model.zero_grad()
        mean_square(model(3 * my_part(batch))).backward()
    for thing, copied in zip(kept, copies, strict=True):
        now = local(thing) if isinstance(thing, Tensor) else thing
        assert list(now.flatten() if hasattr(now, "flatten") else now) == list(
            copied.flatten() if hasattr(copied, "flatten") else copied
        )


@on_ranks(2)
def test_output_that_the_user_keeps_is_not_overwritten(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    _shard(api, model)
    out = model(my_part(batch))
    copied = out.detach().clone()
    mean_square(out).backward()
    mean_square(model(3 * my_part(batch))).backward()
    torch.testing.assert_close(out.detach(), copied, rtol=0, atol=0)


@on_ranks(2)
def test_gradient_assigned_by_the_user_is_what_the_optimizer_uses(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    _shard(api, model)
    mean_square(model(my_part(batch))).backward()
    before = full_parameters(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    after = full_parameters(model)
    assert_equal(after, {name: value - 0.5 for name, value in before.items()})


@on_ranks(2)
def test_post_accumulate_hook_runs_once_per_step_with_the_reduced_gradient(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    expected = gradients_alone(model, batch)
    _shard(api, model)
    names = {id(p): n for n, p in model.named_parameters()}
    seen: dict[str, Tensor] = {}

    def take(parameter: Tensor) -> None:
        assert names[id(parameter)] not in seen
        seen[names[id(parameter)]] = parameter.grad.full_tensor()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(take)
    for _ in range(2):
        seen.clear()
        mean_square(model(my_part(batch))).backward()
        assert_equal(
            dict(sorted(seen.items())), dict(sorted(expected.items())), rtol=1e-5, atol=1e-6
        )
        assert not local_gradients(model)


@on_ranks(2)
def test_gradient_of_a_gradient(api: Api) -> None:
    model, batch = mlp(1), make_batch(16)
    alone = copy.deepcopy(model)

    def penalty(net: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(mean_square(net(x)) * len(x), x, create_graph=True)
        return slope.square().sum(-1).mean()

    penalty(alone, batch).backward()
    api.fully_shard(model, reshard_after_forward=False)
    # The inner backward must leave the parameters whole for the outer one.
    model.set_reshard_after_backward(reshard_after_backward=False)
    penalty(model, my_part(batch)).backward()
    model.reshard()
    assert_gradients_are_parts_of(model, full_gradients(alone))


@pytest.mark.ours("parameters that stay unsharded go stale")
@pytest.mark.parametrize("reshard", [False, None])
@on_ranks(2)
def test_evaluation_after_a_write_to_the_shards_sees_it(api: Api, reshard: bool | None) -> None:
    model = api.fully_shard(mlp(2), reshard_after_forward=reshard)
    shards = list(model.parameters())
    batch = torch.ones(2, 16)
    with torch.no_grad():
        before = model(batch)
        for shard in shards:
            shard.zero_()
        after = model(batch)
    assert not torch.equal(before, after)
    assert torch.equal(after, torch.zeros_like(after))


@on_ranks(2)
def test_what_is_written_between_unshard_and_reshard_lasts_as_long(api: Api) -> None:
    model = api.fully_shard(mlp(2))
    batch = torch.ones(2, 16)
    with torch.no_grad():
        original = model(batch)
        model.unshard()
        for parameter in model.parameters():
            parameter.zero_()
        assert not model(batch).any()
        assert not model(batch).any()
        model.reshard()
        assert torch.equal(model(batch), original)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.left(x), None if y is None else self.right(y)


@pytest.mark.parametrize("others", [False, True])
@on_ranks(2)
def test_inputs_may_be_nested_tensors(api: Api, others: bool) -> None:
    model = nn.ModuleList(Pair() for _ in range(2))
    alone, batch = copy.deepcopy(model), make_batch(16)
    for pair in model:
        api.fully_shard(pair)
    for pairs in (alone, model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls it a prototype
            x = torch.nested.as_nested_tensor([batch[:1], batch[1:]])
        y = batch if others else None
        for pair in pairs:
            x, y = pair(x, y)
        loss = mean_square(torch.nested.to_padded_tensor(x, 0.0))
        (loss if y is None else loss + mean_square(y)).backward()
    expected = {
        name: grad for name, grad in full_gradients(alone).items() if others or "left" in name
    }
    assert_gradients_are_parts_of(model, expected)


class Exit(nn.Module):
    """A layer, and a head whose result is not returned: of the two, it comes last, unless ``form`` begins with "early"."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.layer, self.form = nn.Linear(16, 16), form
        self.head = nn.Linear(16, 1 + KEPT_NBYTES // 64)  # larger than what stays allocated on CPUs
        self.left: Any = {}

    def forward(self, x: Tensor, *, exits: Any) -> Tensor:
        x = self.layer(x).tanh()
        if self.form == "one rank" and rank() > 0:
            return x
        left = self.head(x).sin()
        if self.form == "object":
            exits.left = [*exits.left, left]
        elif self.form in ("attribute", "early attribute"):
            self.left = left
        elif self.form == "attribute's dict":
            self.left["exit"] = left
        else:
            exits.append(left)
        return x.sin() if self.form.startswith("early") else x


class Exits(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Exit(form) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        exits: Any = types.SimpleNamespace(left=[]) if "obj" in self.layers[0].form else []
        for layer in self.layers:
            x = layer(x, exits=exits)
            if isinstance(layer, Exit):
                assert isinstance(layer.head.weight, DTensor) is hasattr(layer, "unshard")
        if "attribute" in self.layers[0].form:
            exits = [getattr(layer, "module", layer).left for layer in self.layers]
            exits = [each["exit"] if isinstance(each, dict) else each for each in exits]
        left = getattr(exits, "left", exits)
        return left if self.layers[0].form.startswith("early") else [x, *left]


@pytest.mark.parametrize("face", ["fully_shard", "flat", "original"])
@pytest.mark.parametrize(
    "form",
    [
        "list",
        "object",
        "attribute",
        "attribute's dict",
        "one rank",
        "early list",
        "early attribute",
    ],
)
@on_ranks(2)
def test_what_a_unit_leaves_elsewhere_than_in_its_outputs_is_trained(
    api: Api, form: str, face: str
) -> None:
    model: nn.Module = Exits(form)
    alone, batch = copy.deepcopy(model), my_part(make_batch(16))
    if face == "fully_shard":
        for layer in model.layers:
            api.fully_shard(layer)
        api.fully_shard(model)
    else:
        model = api.FullyShardedDataParallel(
            model, auto_wrap_policy=api.ModuleWrapPolicy({Exit}), use_orig_params=face != "flat"
        )
    for _ in range(3):
        losses = []
        for each in (alone, model):
            each.zero_grad()
            losses.append(sum(map(mean_square, each(batch)), torch.zeros(())))
            losses[-1].backward()
        torch.testing.assert_close(*losses)
        for parameter in alone.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        if face == "fully_shard":
            assert_gradients_are_parts_of(model, full_gradients(alone))
        for each in (alone, model):
            torch.optim.SGD(each.parameters(), lr=0.5).step()


@pytest.mark.parametrize("face", ["fully_shard", "flat"])
@on_ranks(2)
def test_a_weight_that_backward_needs_before_it_is_gathered_is_named(api: Api, face: str) -> None:
    model, kept = Exits("list"), []
    model.layers[1].head.register_forward_hook(lambda *call: kept.append(call[-1]))
    if face == "fully_shard":
        for layer in model.layers:
            api.fully_shard(layer)
        api.fully_shard(model)
    else:
        model = api.FullyShardedDataParallel(model, auto_wrap_policy=api.ModuleWrapPolicy({Exit}))
    model(my_part(make_batch(16)))
    with pytest.raises(RuntimeError) as caught:
        kept[0].sum().backward()  # through what the layer has not left anywhere
    said = explain_early_use(caught.value)
    assert said is not None
    assert "layers.1.head.weight" in said


class Taught(torch.autograd.Function):
    """Identity. Its backward adds what a teacher says of the input, as it is at that moment."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, teacher: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.teacher = teacher
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad + ctx.teacher(*ctx.saved_tensors) / world_size(), None


@on_ranks(2)
def test_model_may_run_inside_the_backward_of_another(api: Api) -> None:
    alone = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    student, teacher = copy.deepcopy(alone)
    api.fully_shard(student)
    _shard(api, teacher)
    for step in range(4):
        batch = make_batch(16, seed=step)
        for pupil, other, part in ((*alone, batch), (student, teacher, my_part(batch))):
            pupil.zero_grad()
            Taught.apply(pupil(part), other).sum().backward()
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.data.mul_(0.5)  # follows something, before its next forward
        for layer in teacher:
            assert isinstance(layer.weight, DTensor)
        # The sharded ones are means over ranks, and the other's are sums over the batch.
        expected = {name: gradient / 2 for name, gradient in full_gradients(alone[0]).items()}
        assert_gradients_are_parts_of(student, expected)
