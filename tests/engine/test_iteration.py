"""The order of an iteration: prefetch, events, other methods than forward, exceptions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.api import Api
from tests.custom_collectives import custom_gather, custom_reduce
from tests.harness import mesh_of, on_ranks
from tests.models import Transformer, mlp
from tests.selection import one_way
from tests.training import (
    assert_equal,
    assert_gradients_are_parts_of,
    full_gradients,
    gradients_alone,
    make_batch,
    mean_square,
    my_part,
)
from tests.twins import assert_train_alike, run_step, sharded_mlp

pytestmark = one_way("the other files of this folder; tests/parity; tests/differential")

BF16, FP32 = torch.bfloat16, torch.float32


# The order of gathers


class _Tap(torch.autograd.Function):
    """Identity that notes when its gradient has come."""

    @staticmethod
    def forward(ctx: Any, log: list[str], entry: str, x: Tensor) -> Tensor:
        ctx.log, ctx.entry = log, entry
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        ctx.log.append(ctx.entry)
        return None, None, grad


class Noted(nn.Linear):
    """A layer that notes in `log` when it computes: f1 forward, b1 backward."""

    def __init__(self, log: list[str], number: int) -> None:
        super().__init__(16, 16)
        self.log, self.number = log, number

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        self.log.append(f"f{self.number}")
        return _Tap.apply(self.log, f"b{self.number}", super().forward(x))


def _noted(api: Api) -> tuple[nn.Sequential, list[str]]:
    """Return four units and the list in which they note what they do: g1 is a gather."""
    log: list[str] = []
    model = nn.Sequential(*(Noted(log, number) for number in range(4)))
    for number, layer in enumerate(model):
        api.fully_shard(layer, reshard_after_forward=True)
        layer.set_custom_all_gather(custom_gather(api, log, f"g{number}"))
    return api.fully_shard(model), log


def _order_of_a_step(model: nn.Module, log: list[str]) -> tuple[str, str]:
    """Return what was noted in forward and in backward."""
    log.clear()
    loss = mean_square(model(my_part(make_batch(16))))
    forward = " ".join(log)
    log.clear()
    loss.backward()
    return forward, " ".join(log)


@on_ranks(2)
def test_previous_unit_is_gathered_while_a_unit_computes_backward(api: Api) -> None:
    model, log = _noted(api)
    for _ in range(3):
        _, backward = _order_of_a_step(model, log)
        assert backward == "g3 g2 b3 g1 b2 g0 b1 b0"


@pytest.mark.ours("gathers the next unit behind the current one's computation, on a GPU")
@on_ranks(2)
def test_next_unit_is_gathered_while_a_unit_computes_once_the_order_is_known(api: Api) -> None:
    model, log = _noted(api)
    for _ in range(2):  # it might write to what it is about to use
        assert _order_of_a_step(model, log)[0] == "g0 f0 g1 f1 g2 f2 g3 f3"
    for _ in range(2):
        assert _order_of_a_step(model, log)[0] == "g0 g1 f0 g2 f1 g3 f2 f3"


@on_ranks(2)
def test_units_named_for_forward_prefetch_are_gathered_before_the_one_that_names_them(
    api: Api,
) -> None:
    model, log = _noted(api)
    for index in range(3):
        model[index].set_modules_to_forward_prefetch(list(model[index + 1 : index + 3]))
    for _ in range(2):
        assert _order_of_a_step(model, log)[0] == "g0 g1 g2 f0 g3 f1 f2 f3"


@on_ranks(2)
def test_units_named_for_backward_prefetch_are_gathered_before_the_one_that_names_them(
    api: Api,
) -> None:
    model, log = _noted(api)
    for index in range(1, 4):
        earlier = list(reversed(model[:index]))[:2]
        model[index].set_modules_to_backward_prefetch(earlier)
    for _ in range(2):
        assert _order_of_a_step(model, log)[1] == "g3 g2 g1 b3 g0 b2 b1 b0"


@on_ranks(2)
def test_last_prefetch_named_is_the_one_in_effect(api: Api) -> None:
    model, log = _noted(api)
    for index in range(3):
        model[index].set_modules_to_forward_prefetch([model[3]])
        model[index].set_modules_to_forward_prefetch([model[index + 1]])
    model[3].set_modules_to_backward_prefetch([model[0]])
    model[3].set_modules_to_backward_prefetch([])
    forward, backward = _order_of_a_step(model, log)
    assert forward == "g0 g1 f0 g2 f1 g3 f2 f3"
    assert backward == "g3 g2 b3 g1 b2 g0 b1 b0"


@on_ranks(2)
def test_backward_prefetch_of_a_module_that_is_no_unit_is_an_error(api: Api) -> None:
    model = api.fully_shard(mlp())
    with pytest.raises(ValueError, match="FSDPModule"):
        model.set_modules_to_backward_prefetch([nn.Linear(2, 2)])


@on_ranks(2)
def test_embedding_can_do_without_its_parameters_in_backward(api: Api) -> None:
    model = Transformer()
    tokens = (make_batch(8).abs() * 20).long()
    alone = copy.deepcopy(model)
    mean_square(alone(tokens)).backward()
    gather = custom_gather(api)
    for unit in (model.embed, *model.blocks):
        api.fully_shard(unit, reshard_after_forward=True)
    api.fully_shard(model)
    model.embed.set_custom_all_gather(gather)
    for unshard, calls in ((True, 2), (False, 1), (False, 1), (True, 2)):
        model.embed.set_unshard_in_backward(unshard)
        before = len(gather.calls)
        mean_square(model(my_part(tokens))).backward()
        assert len(gather.calls) - before == calls
        assert_gradients_are_parts_of(model, full_gradients(alone))
        model.zero_grad()


# Events and streams


@on_ranks(2)
def test_event_after_the_optimizer_step_is_accepted_every_step(api: Api) -> None:
    model, alone = sharded_mlp(api)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.2) for m in (model, alone)]
    for step in range(3):
        batch = make_batch(16, seed=step)
        mean_square(alone(batch)).backward()
        mean_square(model(my_part(batch))).backward()
        assert_gradients_are_parts_of(model, full_gradients(alone))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        model.set_post_optim_event(torch.Event(device="cpu"))


@on_ranks(2)
def test_roots_that_share_their_streams_train_together(api: Api) -> None:
    (first, first_alone), (second, second_alone) = sharded_mlp(api), sharded_mlp(api)
    api.share_comm_ctx([first, second])
    api.share_comm_ctx([])
    alone, batch = nn.Sequential(first_alone, second_alone), make_batch(16)
    for _ in range(2):
        mean_square(alone(batch)).backward()
        mean_square(second(first(my_part(batch)))).backward()
        assert_gradients_are_parts_of(first, full_gradients(first_alone))
        assert_gradients_are_parts_of(second, full_gradients(second_alone))
        for model in (first, second, alone):
            model.zero_grad()


@on_ranks(2)
def test_only_sharded_modules_can_share_their_streams(api: Api) -> None:
    model, alone = sharded_mlp(api)
    with pytest.raises(ValueError, match="FSDPModule"):
        api.share_comm_ctx([model, alone])
    assert_train_alike(alone, model)


# Other methods as forward


class Autoencoder(nn.Module):
    """Two methods that use parameters, and a forward that calls neither. (n, 16) -> same."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 8)
        self.outer = nn.Linear(8, 16)

    def encode(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Shorten. (n, 16) -> (n, 8)."""
        return self.inner(x).tanh() * scale

    def decode(self, code: Tensor) -> Tensor:
        """Lengthen. (n, 8) -> (n, 16)."""
        return self.outer(code)

    def forward(self, x: Tensor) -> Tensor:
        """Shorten and lengthen."""
        return self.outer(self.inner(x).tanh())


@pytest.mark.parametrize("inner", ["plain", "units"])
@on_ranks(2)
def test_registered_methods_train_as_forward_does(api: Api, inner: str) -> None:
    model, batch = Autoencoder(), make_batch(16)
    alone = copy.deepcopy(model)
    if inner == "units":
        api.fully_shard(model.inner)
        api.fully_shard(model.outer)
    api.fully_shard(model)
    for name in ("encode", "decode"):
        api.register_fsdp_forward_method(model, name)
    for _ in range(2):
        for net, part in ((alone, batch), (model, my_part(batch))):
            mean_square(net.decode(net.encode(part, scale=2.0))).backward()
        assert_gradients_are_parts_of(model, full_gradients(alone))
        mean_square(alone(batch)).backward()
        mean_square(model(my_part(batch))).backward()
        assert_gradients_are_parts_of(model, full_gradients(alone))
        alone.zero_grad()
        model.zero_grad()


@on_ranks(2)
def test_registered_method_leaves_parameters_as_forward_does(api: Api) -> None:
    model = Autoencoder()
    policy = api.MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP32)
    api.fully_shard(model, reshard_after_forward=True, mp_policy=policy)
    api.register_fsdp_forward_method(model, "encode")
    code = model.encode(make_batch(16))
    assert code.dtype == FP32
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert model.encode.__name__ == "encode"


@on_ranks(2)
def test_method_to_register_must_exist_on_a_unit(api: Api) -> None:
    model = Autoencoder()
    api.register_fsdp_forward_method(model, "encode")
    assert "encode" not in vars(model)  # no unit: nothing to gather
    api.fully_shard(model)
    with pytest.raises(ValueError, match="method generate"):
        api.register_fsdp_forward_method(model, "generate")


# Calls within calls


class Generator(nn.Module):
    """Methods that call forward, and a layer that they use after it. (n, 16) -> same."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Apply all but the head."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x).tanh()
        return x

    def generate(self, x: Tensor, *, fails: bool = False) -> Tensor:
        """Apply everything several times."""
        for _ in range(3):
            x = self.head(self(x))
            if fails:
                raise ZeroDivisionError
        return x

    def train_on(self, x: Tensor, optimizer: torch.optim.Optimizer) -> list[float]:
        """Take two steps."""
        losses = []
        for _ in range(2):
            loss = mean_square(self(x))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses


class Tree(nn.Module):
    """A module that calls itself between two layers. (n, 16) -> same."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(16, 16)
        self.up = nn.Linear(16, 16)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        """Add what the branches make of x."""
        x = self.down(x).tanh()
        if depth:
            x = x + self(x, depth - 1) + self(x.sin(), depth - 1)
        return self.up(x)


def _generators(api: Api, reshard: bool | None) -> tuple[Generator, Generator]:
    model = Generator()
    alone = copy.deepcopy(model)
    for block in model.blocks:
        api.fully_shard(block, reshard_after_forward=reshard)
    api.fully_shard(model, reshard_after_forward=reshard)
    for name in ("generate", "train_on"):
        api.register_fsdp_forward_method(model, name)
    return model, alone


@pytest.mark.ours("parameters are freed when the inner call is over")
@pytest.mark.parametrize("reshard", [None, True, False])
@on_ranks(2)
def test_method_uses_layers_after_it_called_forward(api: Api, reshard: bool | None) -> None:
    model, alone = _generators(api, reshard)
    batch = make_batch(16)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(model.generate(batch), alone.generate(batch))
        is_sharded = [isinstance(p, DTensor) for p in model.blocks.parameters()]
        assert all(is_sharded) or reshard is False
        for net in (model, alone):
            mean_square(net.generate(batch)).backward()
            mean_square(net(batch)).backward()
        assert_equal(full_gradients(model), full_gradients(alone))


@pytest.mark.parametrize("reshard", [None, True])
@on_ranks(2)
def test_method_may_train(api: Api, reshard: bool | None) -> None:
    model, alone = _generators(api, reshard)
    losses = []
    for net in (model, alone):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        losses.append([net.train_on(make_batch(16, seed=seed), optimizer) for seed in range(2)])
    torch.testing.assert_close(losses[0], losses[1])


@pytest.mark.ours("parameters are freed when the inner call is over")
@on_ranks(2)
def test_method_that_raised_after_it_called_forward_may_be_called_again(api: Api) -> None:
    model, alone = _generators(api, True)
    batch = make_batch(16)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            model.generate(batch, fails=True)
        for net in (model, alone):
            mean_square(net.generate(batch)).backward()
        assert_equal(full_gradients(model), full_gradients(alone))


@pytest.mark.ours("parameters are freed when the innermost call is over")
@pytest.mark.parametrize("is_root", [True, False])
@pytest.mark.parametrize("reshard", [None, True, False])
@on_ranks(2)
def test_module_that_calls_itself_trains_as_alone(
    api: Api, is_root: bool, reshard: bool | None
) -> None:
    model: nn.Module = Tree() if is_root else nn.Sequential(nn.Linear(16, 16), Tree())
    alone = copy.deepcopy(model)
    if not is_root:
        api.fully_shard(model[1], reshard_after_forward=reshard)
    api.fully_shard(model, reshard_after_forward=reshard)
    for seed in range(2):
        batch = make_batch(16, seed=seed)
        for net in (model, alone):
            mean_square(net(batch)).backward()
        assert_equal(full_gradients(model), full_gradients(alone))
        with torch.no_grad():
            torch.testing.assert_close(model(batch), alone(batch))


# After an exception


def _explode(model: nn.Sequential, moment: str) -> None:
    """Let the model raise in forward or in backward, and reset it."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    def light(module: nn.Module, args: Any, out: Tensor) -> None:
        fail() if moment == "forward" else out.register_hook(fail)

    hook = model[1][1].register_forward_hook(light)
    with pytest.raises(ZeroDivisionError):
        run_step(model)
    hook.remove()
    model.reset_iter_state()
    model.zero_grad()


@pytest.mark.parametrize("moment", ["forward", "backward"])
@pytest.mark.parametrize("custom", [False, True])
@on_ranks(2)
def test_training_goes_on_after_a_reset(api: Api, moment: str, custom: bool) -> None:
    model, alone = sharded_mlp(api)
    if custom:
        for layer in model:
            layer.set_custom_all_gather(custom_gather(api))
            layer.set_custom_reduce_scatter(custom_reduce(api))
    for _ in range(2):
        _explode(model, moment)
        assert_train_alike(alone, model)
    _explode(model, moment)
    assert all(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.ours("keeps them, whatever its documentation says")
@pytest.mark.parametrize("moment", ["forward", "backward"])
@on_ranks(2)
def test_reset_drops_gradients_that_were_not_synchronised(api: Api, moment: str) -> None:
    model, alone = sharded_mlp(api)
    expected = gradients_alone(alone, make_batch(16))
    for num_kept in (1, 0, 1):
        model.set_requires_gradient_sync(requires_gradient_sync=False)
        run_step(model)
        _explode(model, moment)
        for _ in range(num_kept):
            run_step(model)
        model.set_requires_gradient_sync(requires_gradient_sync=True)
        run_step(model)
        assert_gradients_are_parts_of(model, {n: (num_kept + 1) * g for n, g in expected.items()})
        model.zero_grad()


@pytest.mark.parametrize("moment", ["forward", "backward"])
@on_ranks(4)
def test_reset_drops_sums_that_were_not_all_reduced(api: Api, moment: str) -> None:
    model, alone = sharded_mlp(api, mesh=mesh_of(2, 2))
    assert_train_alike(alone, model)
    model.set_requires_all_reduce(requires_all_reduce=False)
    run_step(model)
    _explode(model, moment)
    model.set_requires_all_reduce(requires_all_reduce=True)
    assert_train_alike(alone, model)


@on_ranks(2)
def test_reset_is_for_the_root(api: Api) -> None:
    model, alone = sharded_mlp(api)
    assert_train_alike(alone, model)
    with pytest.raises(RuntimeError, match=r"reset_iter_state .*root"):
        model[1].reset_iter_state()
    assert_train_alike(alone, model)
