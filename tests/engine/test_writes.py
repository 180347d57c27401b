"""Writes to parameters while the model runs: right on every path, or refused by name."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.engine.module_state import state_of
from tests.api import Api
from tests.harness import on_ranks, rank
from tests.models import mlp
from tests.selection import repeats
from tests.training import (
    assert_gradients_are_parts_of,
    full_gradients,
    local,
    make_batch,
    mean_over_ranks,
    mean_square,
    my_part,
)

Write = Callable[[Sequence[nn.Parameter], Sequence[nn.Parameter]], None]


def _data(keys: Sequence[nn.Parameter], queries: Sequence[nn.Parameter]) -> None:
    for key, query in zip(keys, queries, strict=True):
        key.data.mul_(0.5).add_(query.data, alpha=0.5)


def _in_place(keys: Sequence[nn.Parameter], queries: Sequence[nn.Parameter]) -> None:
    with torch.no_grad():
        for key, query in zip(keys, queries, strict=True):
            key.lerp_(query, 0.5)


def _foreach(keys: Sequence[nn.Parameter], queries: Sequence[nn.Parameter]) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(keys), 0.5)


def _local(keys: Sequence[nn.Parameter], queries: Sequence[nn.Parameter]) -> None:
    with torch.no_grad():
        for key in keys:
            (key.to_local() if isinstance(key, DTensor) else key).clamp_(-0.05, 0.05)


WRITES: dict[str, Write] = {
    "data": _data,
    "in_place": _in_place,
    "foreach": _foreach,
    "local": _local,
}


class Momentum(nn.Module):
    """Two encoders; the second follows the first by writes inside forward, from ``first`` on."""

    def __init__(self, write: Write, moment: str, first: int = 0) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.key = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.head = nn.Linear(16, 4)
        self.write, self.moment, self.first, self.num_calls = write, moment, first, 0

    def forward(self, x: Tensor) -> Tensor:
        self._follow("first")
        x = self.query(x)
        self._follow("between")
        x = self.key(x)
        self._follow("last")
        return self.head(x)

    def _follow(self, moment: str) -> None:
        if moment != self.moment:
            return
        self.num_calls += 1
        if self.num_calls > self.first:
            self.write([*self.key.parameters()], [*self.query.parameters()])


def _sharded(api: Api, alone: nn.Module, face: str) -> nn.Module:
    model = copy.deepcopy(alone)
    if face == "fully_shard":
        for child in (model.query, model.key):
            api.fully_shard(child)
        return api.fully_shard(model)
    options = {"use_orig_params": True, "device_id": torch.device("cpu")}
    for name in ("query", "key"):
        setattr(model, name, api.FullyShardedDataParallel(getattr(model, name), **options))
    return api.FullyShardedDataParallel(model, **options)


def _gradients(model: nn.Module, api: Api, face: str) -> list[Tensor]:
    if face == "fully_shard":
        return [*full_gradients(model).values()]
    with api.FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        return [parameter.grad.clone() for parameter in model.parameters()]


def _train_both(model: nn.Module, alone: nn.Module, api: Api, face: str, steps: int = 5) -> None:
    """Compare gradients before each step of the optimizer."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    for step in range(steps):
        batch = make_batch(16, seed=step)
        mean_square(alone(batch)).backward()
        mean_square(model(my_part(batch))).backward()
        torch.testing.assert_close(
            _gradients(model, api, face), [p.grad for p in alone.parameters()]
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@repeats(lambda s: s["world_size"] == 3 and s["moment"] == "first")
@on_ranks(2, 3)
@pytest.mark.parametrize("face", ["fully_shard", "wrapper"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("moment", ["first", "between"])
def test_write_inside_forward_is_seen_by_all_from_then_on(
    api: Api, write: str, moment: str, face: str
) -> None:
    if face == "wrapper" and write == "foreach":
        moment = "between"  # pieces are plain tensors
    alone = Momentum(WRITES[write], moment)
    _train_both(_sharded(api, alone, face), alone, api, face)


@on_ranks(2)
def test_evaluation_first_does_not_hide_writes_of_training(api: Api) -> None:
    alone = Momentum(_data, "between", first=1)
    model = _sharded(api, alone, "fully_shard")
    for each in (alone, model):
        with torch.no_grad():
            each.eval()(make_batch(16))
        each.train()
    _train_both(model, alone, api, "fully_shard")


@on_ranks(2)
@pytest.mark.parametrize("write", ["data", "in_place", "foreach"])
def test_write_that_begins_late_is_right_or_refused_by_name(api: Api, write: str) -> None:
    alone = Momentum(WRITES[write], "between", first=3)
    model = _sharded(api, alone, "fully_shard")
    if api.name != "peer_memory":
        _train_both(model, alone, api, "fully_shard", steps=6)
        return
    with pytest.raises(RuntimeError, match=rf"key \(rank {rank()}\).* written to"):
        _train_both(model, alone, api, "fully_shard", steps=6)


class Sparse(nn.Module):
    """Adds to one element of each rank's part of a large weight before it is used, through ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4096, bias=False)
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.writes:
            weight = self.second.weight
            own = [weight.to_local()] if isinstance(weight, DTensor) else weight.chunk(2)
            for part in own:
                part.data[3, 5] += 1
        return self.second(x)


@on_ranks(2)
def test_late_write_to_one_element_is_right_or_refused_by_name(api: Api) -> None:
    alone = Sparse()
    model = copy.deepcopy(alone)
    for layer in (model.first, model.second):
        api.fully_shard(layer)
    api.fully_shard(model)
    for step in range(5):
        batch = make_batch(16, seed=step)
        alone.writes = model.writes = step > 2
        expected = my_part(alone(batch))
        if model.writes and api.name == "peer_memory":
            with pytest.raises(RuntimeError, match=rf"second \(rank {rank()}\).* written to"):
                model(my_part(batch))
            return
        out = model(my_part(batch))
        torch.testing.assert_close(out, expected)
        mean_square(out).backward()


def _late_write(how: str, parameters: Sequence[nn.Parameter]) -> None:
    with torch.no_grad():
        if how == "foreach":
            torch._foreach_mul_(list(parameters), 0.5)
        for parameter in parameters if how == "data" else ():
            parameter.data.mul_(0.5)


@on_ranks(2)
@pytest.mark.parametrize("face", ["fully_shard", "wrapper"])
@pytest.mark.parametrize("moment", ["between", "backward"])
@pytest.mark.parametrize("how", ["data", "foreach"])
def test_late_write_after_forward_is_right_or_refused_by_name(
    api: Api, how: str, moment: str, face: str
) -> None:
    alone = Momentum(_data, "never")
    model = _sharded(api, alone, face)
    is_fast = api.name == "peer_memory"

    def step(each: nn.Module, x: Tensor, number: int) -> None:
        inner = each.module if isinstance(each, api.FullyShardedDataParallel) else each
        keys = list(inner.key.parameters())
        each.zero_grad()
        out = each(x)
        if number < 4:
            mean_square(out).backward()
            return
        if moment == "between":
            _late_write(how, keys)
        else:
            out.register_hook(lambda _: _late_write(how, keys))
        mean_square(out).backward()

    for number in range(6):
        batch = make_batch(16, seed=number)
        if is_fast and number == 4:
            with pytest.raises(RuntimeError, match=rf"key \(rank {rank()}\).* written to"):
                step(model, my_part(batch), number)
            return
        if number >= 4 and (how == "foreach" or moment == "backward"):
            return  # one process refuses it; the unit was gathered already, as in PyTorch
        step(alone, batch, number)
        step(model, my_part(batch), number)
        torch.testing.assert_close(
            _gradients(model, api, face), [p.grad for p in alone.parameters()]
        )


def _first_shard(keys: Sequence[nn.Parameter], _: Sequence[nn.Parameter]) -> None:
    """Write to what the first of two ranks owns, so that contents change there alone."""
    with torch.no_grad():
        for key in keys:
            if not isinstance(key, DTensor):
                key[: len(key) // 2].mul_(0.5)
            elif rank() == 0:
                key.to_local().mul_(0.5)


@pytest.mark.apis("process_group", "torch")  # peers may have read: see the tests above
@on_ranks(2)
def test_late_write_that_shows_on_one_rank_is_no_reason_to_gather_twice(api: Api) -> None:
    alone = Momentum(_first_shard, "first", first=4)
    _train_both(_sharded(api, alone, "fully_shard"), alone, api, "fully_shard", steps=8)


class Writing(nn.Module):
    """Three layers, of which the last two are clamped, or the second alone, at one moment of a step.

    low: values below it become it; at -10 none changes.
    """

    def __init__(self, moment: str, low: float) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.moment, self.low = moment, low

    def at(self, moment: str) -> None:
        if moment == self.moment:
            with torch.no_grad():
                for parameter in self.second.parameters():
                    parameter.clamp_(min=self.low)
                if self.low == -10:  # it is in the root, where a write that changes values is lost
                    self.last.bias.clamp_(min=self.low)

    def forward(self, x: Tensor) -> Tensor:
        self.at("before use")
        x = self.first(x)
        if x.requires_grad:
            x.register_hook(lambda _: self.at("after the second's backward"))
        x = self.last(self.second(x))
        self.at("after use")
        if x.requires_grad:
            x.register_hook(lambda _: self.at("in backward"))
        return x


_MOMENTS = ["before use", "after use", "after forward", "in backward"]
_LAST_MOMENT = "after the second's backward"


@on_ranks(2)
@pytest.mark.parametrize(
    ("moment", "low", "is_training"),
    [
        *((moment, -10, True) for moment in (*_MOMENTS, _LAST_MOMENT)),
        *((moment, -10, False) for moment in _MOMENTS[:2]),
        (_LAST_MOMENT, -0.05, True),
    ],
)
def test_write_of_each_step_is_an_error_in_none(
    api: Api, moment: str, low: float, is_training: bool
) -> None:
    alone = Writing(moment if low == -0.05 else "never", low)
    model = copy.deepcopy(alone)
    for layer in (model.first, model.second):
        api.fully_shard(layer)
    api.fully_shard(model)
    model.moment = moment
    for step in range(4):
        batch = make_batch(16, seed=step)
        with torch.set_grad_enabled(is_training), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out, expected = model(my_part(batch)), alone(batch)
            torch.testing.assert_close(out, my_part(expected))
            if not is_training:
                continue
            model.at("after forward")
            for each in (out, expected):
                mean_square(each).backward()
            assert_gradients_are_parts_of(model, full_gradients(alone))


class Counting(nn.Module):
    """Four layers with a collective of the program's own in between. A moment before it, `write` runs."""

    def __init__(self, write: Callable[[Sequence[nn.Parameter]], None]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        self.write = write
        self.total = torch.zeros(5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        self.write([*self.layers[1].parameters()])
        self.total = torch.ones(5)
        if isinstance(self.layers[1].weight, DTensor):
            dist.all_reduce(self.total)
        return self.layers[1:](x)


def _row_of_the_first(parameters: Sequence[nn.Parameter]) -> None:
    """Write to one row, which the first rank has; other ranks do nothing."""
    with torch.no_grad():
        for parameter in parameters:
            if not isinstance(parameter, DTensor) or rank() == 0:
                own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                own.data[:1].mul_(0.5)


@on_ranks(2)
@pytest.mark.parametrize("comm", ["auto", "collectives"])
def test_what_one_rank_has_written_to_is_gathered_in_one_order_on_all(api: Api, comm: str) -> None:
    if comm == "collectives":  # in the program's own process group
        api.set_default_comm(comm)
    alone = Counting(_row_of_the_first)
    model = copy.deepcopy(alone)
    for layer in model.layers:
        api.fully_shard(layer)
    api.fully_shard(model)
    for step in range(5):
        batch = make_batch(16, seed=step)
        for each, part in ((alone, batch), (model, my_part(batch))):
            each.zero_grad()
            mean_square(each(part)).backward()
        assert_gradients_are_parts_of(model, full_gradients(alone))
        assert model.total.tolist() == [2.0] * 5
    if not api.is_torch:
        units = [unit for layer in model.layers for unit in state_of(layer).units]
        assert [unit.is_written for unit in units] == [False, True, False, False]
        assert [unit.is_ordered for unit in units] == [False, True, False, False]


class Stack(nn.Module):
    """Layers of which the last ones may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.depth = 4

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: self.depth]:
            x = layer(x).tanh()
        return x


@on_ranks(2)
@pytest.mark.parametrize("face", ["fully_shard", "wrapper"])
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("how", ["data", "foreach", "step"])
def test_what_a_pass_gathered_early_and_left_out_is_gathered_again_in_the_next(
    api: Api, how: str, is_training: bool, face: str
) -> None:
    alone = Stack()
    model = copy.deepcopy(alone)
    if face == "fully_shard":
        for layer in model.layers:
            api.fully_shard(layer)
        api.fully_shard(model)
    else:
        options = {"use_orig_params": True, "device_id": torch.device("cpu")}
        for number, layer in enumerate(model.layers):
            model.layers[number] = api.FullyShardedDataParallel(
                layer, forward_prefetch=True, **options
            )
        model = api.FullyShardedDataParallel(model, forward_prefetch=True, **options)
    stacks = {alone: alone, model: model if face == "fully_shard" else model.module}
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, foreach=True) for each in stacks]
    for number in range(5):
        batch = make_batch(16, seed=number)
        outputs = {each: each(part) for each, part in ((alone, batch), (model, my_part(batch)))}
        torch.testing.assert_close(outputs[model], my_part(outputs[alone]))
        for output in outputs.values():
            mean_square(output).backward()
        for each, optimizer in zip(stacks, optimizers, strict=True):
            stacks[each].depth = 2
            with torch.set_grad_enabled(is_training):
                each(batch)
            stacks[each].depth = 4
            if how == "step":
                optimizer.step()
            else:
                _late_write(how, list(each.parameters()))
            optimizer.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("first", [0, 4])
def test_data_assigned_inside_forward_reaches_a_wrapper_that_has_yet_to_run(
    api: Api, first: int
) -> None:
    def assign(keys: Sequence[nn.Parameter], queries: Sequence[nn.Parameter]) -> None:
        for key, query in zip(keys, queries, strict=True):
            key.data = key.data * 0.5 + query.data * 0.5

    alone = Momentum(assign, "between", first)
    model = _sharded(api, alone, "wrapper")
    if first == 0 or api.name != "peer_memory":
        _train_both(model, alone, api, "wrapper", steps=6)
        return
    with pytest.raises(RuntimeError, match=rf"key \(rank {rank()}\).* written to"):
        _train_both(model, alone, api, "wrapper", steps=6)


@on_ranks(2)
def test_write_between_forward_and_backward_is_seen_by_backward(api: Api) -> None:
    alone = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model = copy.deepcopy(alone)
    for layer in model:
        api.fully_shard(layer, reshard_after_forward=True)
    api.fully_shard(model, reshard_after_forward=True)
    for step in range(4):
        batch = make_batch(16, seed=step)
        for each, part in ((alone, batch), (model, my_part(batch))):
            each.zero_grad()
            loss = mean_square(each(part))
            for parameter in each[1].parameters():
                parameter.data.mul_(0.9)
            loss.backward()
        assert_gradients_are_parts_of(model, full_gradients(alone))


class Rescaling(nn.Module):
    """Divides its own weight by its norm, in place, whenever it runs."""

    def __init__(self, through: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 16))
        self.through = through

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            own = self.weight.data if self.through == "data" else self.weight
            own.div_(own.norm())
        return x @ self.weight.T


@on_ranks(2, 3)
@pytest.mark.parametrize("through", ["data", "parameter"])
@pytest.mark.ours("loses the write without a word")
def test_module_that_writes_to_its_own_weight_uses_it_once_and_says_that_it_is_lost(
    api: Api, through: str
) -> None:
    alone = nn.Sequential(Rescaling(through), nn.Linear(64, 4))
    model = copy.deepcopy(alone)
    api.fully_shard(model[0])
    api.fully_shard(model)
    before = model[0].weight.full_tensor()
    for step in range(4):
        batch = make_batch(16, seed=step)
        expected = alone(batch)
        if step == 0:
            with pytest.warns(UserWarning, match=r"0\.weight .*written to"):
                out = model(my_part(batch))
        else:
            out = model(my_part(batch))
        torch.testing.assert_close(out, my_part(expected))
    torch.testing.assert_close(model[0].weight.full_tensor(), before, rtol=0, atol=0)


@on_ranks(2)
def test_parameters_kept_over_a_write_that_leaves_no_trace_are_gathered_again(api: Api) -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 4))
    alone = copy.deepcopy(model)
    for layer in model:
        api.fully_shard(layer, reshard_after_forward=False)
    api.fully_shard(model, reshard_after_forward=False)
    batch = make_batch(16)
    with torch.no_grad():
        model(batch)
        sharded = [module._parameters["weight"] for module in model]
        for layer in model:
            layer.reshard()
            sharded.append(layer.weight)
        model(batch)
        for each in (sharded[-2:], [layer.weight for layer in alone]):
            torch._foreach_mul_(each, 0.5)
        torch.testing.assert_close(model(batch), alone(batch))


# A module's own unsharded weight, written to for the first time after the watched passes


class Late(nn.Module):
    """Writes to its own weight in forward, after ``first`` calls. x: (n, 16) -> (n, 4)."""

    def __init__(self, way: str, first: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 16)
        self.head = nn.Linear(16, 4)
        self.way, self.first, self.num_calls = way, first, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        writes = self.num_calls > self.first
        self.table.max_norm = 0.5 if writes and self.way == "renorm" else None
        with torch.no_grad():
            if writes and self.way == "clamp":
                self.table.weight.clamp_(-0.01, 0.01)
            if writes and self.way == "detach":
                self.table.weight.detach().mul_(0.5)
        return self.head(x + self.table(torch.arange(6)).mean(0))


@on_ranks(2, 3)
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("face", ["fully_shard", "wrapper"])
@pytest.mark.parametrize("way", ["renorm", "clamp", "detach"])
@pytest.mark.ours("loses the write without a word")
def test_write_to_own_weight_that_begins_late_is_named_once_or_refused(
    api: Api, way: str, face: str, is_training: bool
) -> None:
    model = nn.Sequential(Late(way), nn.Linear(4, 4))
    if face == "fully_shard":
        api.fully_shard(model[0])
        api.fully_shard(model)
    else:
        options = {"use_orig_params": True, "device_id": torch.device("cpu")}
        model[0] = api.FullyShardedDataParallel(model[0], **options)
        model = api.FullyShardedDataParallel(model, **options)

    def run(step: int) -> None:
        with torch.set_grad_enabled(is_training):
            out = model(my_part(make_batch(16, seed=step)))
        if is_training:
            mean_square(out).backward()

    for step in range(6):
        if step == 3 and api.name == "peer_memory":
            with pytest.raises(RuntimeError, match=rf"0 \(rank {rank()}\).* written to"):
                run(step)
            return
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            run(step)
        texts = [str(each.message) for each in said]
        assert len(texts) == (step == 3), texts
        assert all(
            re.search(r"0\.table\.weight .*written to while the module ran", t) for t in texts
        )


@on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.ours("loses the write without a word")
def test_late_write_in_private_memory_of_a_host_is_named(api: Api, reshard: bool) -> None:
    """Parameters of other storage and compute dtypes are never read in place."""
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = nn.Sequential(Late("clamp"), nn.Linear(4, 4))
    options = {"reshard_after_forward": reshard, "mp_policy": policy}
    api.fully_shard(model[0], **options)
    api.fully_shard(model, **options)
    sharded = dict(model.named_parameters())["0.table.weight"]
    expected = sharded.full_tensor()
    for step in range(6):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            mean_square(model(my_part(make_batch(16, seed=step)))).backward()
        assert len(said) == (step == 3)
        torch.testing.assert_close(sharded.full_tensor(), expected, rtol=0, atol=0)


@on_ranks(2)
def test_write_to_what_a_user_unsharded_is_no_cause_for_complaint(api: Api) -> None:
    model = api.fully_shard(nn.Sequential(nn.Linear(16, 13), nn.Linear(13, 4)))
    for _ in range(3):
        mean_square(model(my_part(make_batch(16)))).backward()
    model.unshard()
    with torch.no_grad():
        model[0].weight.mul_(2)
    model.reshard()
    mean_square(model(my_part(make_batch(16)))).backward()


@pytest.mark.ours("its wrapper loses steps, with use_orig_params=True")
@pytest.mark.parametrize("face", ["fully_shard", "orig", "flat"])
@on_ranks(1, 2)
def test_memory_that_torch_moves_to_share_it_with_a_process_goes_on_training(
    api: Api, face: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sending a tensor through a queue of torch.multiprocessing does, at any place in a step."""
    wrap = partial(
        api.FullyShardedDataParallel, use_orig_params=face == "orig", device_id=torch.device("cpu")
    )
    whole = api.full_parameters
    if face != "fully_shard":  # the shards themselves, where one rank has them all
        whole = api.FullyShardedDataParallel.summon_full_params

    def share(tensors: Iterable[Tensor | None]) -> None:
        for tensor in tensors:
            if tensor is not None:
                local(tensor).detach().share_memory_()

    warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
    moments = ["begin", "loss", "whole", "backward", "gradients", "full"]
    for moment in [*moments, "forward hook", "backward hook", "forward hook, torch 2.11"]:
        model, alone, batch = mlp(), mlp(), make_batch(16)
        alone.load_state_dict(model.state_dict())
        if face == "fully_shard":
            api.fully_shard(model[0])
        model = api.fully_shard(model) if face == "fully_shard" else wrap(model)
        if "torch 2.11" in moment:
            monkeypatch.setattr("fullshard.engine.params.buffers.swap_memory", None)
        shards, losses = [*model.parameters()], []
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, alone)]
        now, last = "", [*model.modules()][-1]
        add_hook = {"f": last.register_forward_hook, "b": last.register_full_backward_hook}
        if "hook" in moment:
            add_hook[moment[0]](lambda *_: share(model.parameters()) if now else None)  # noqa: B023
        for step in range(6):
            now = moment if step == 3 else ""  # by then whole parameters are read in place
            if now == "begin":
                share(shards)
            loss = mean_square(model(my_part(batch)))
            if now == "loss":
                share(shards)
            if now == "whole":
                share(model.parameters())  # the root's are whole
            loss.backward()
            if now == "gradients":
                share(shard.grad for shard in shards)
            if now == "backward":
                share(shards)
            without = mean_square(alone(batch))
            without.backward()
            if now == "full":
                with whole(model), torch.no_grad():
                    share(model.parameters())
                    torch._foreach_mul_([*model.parameters(), *alone.parameters()], 0.5)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append((loss.item(), without.item()))
        mine, theirs = zip(*losses, strict=True)
        torch.testing.assert_close(mean_over_ranks(list(mine)), list(theirs))
        assert len(set(theirs)) == 6
        monkeypatch.undo()
