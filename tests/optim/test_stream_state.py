"""`stream_state` on real ranks, with state on disk; tests/streams has that of the host, and its order."""

from __future__ import annotations

import copy
import pickle
import resource
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import fullshard
from fullshard.errors import AllocationError, ShardingError
from tests.harness import on_ranks
from tests.models import UnevenMLP
from tests.training import local, make_batch, mean_square, my_part

Policy = fullshard.PlacementPolicy


def _on_disk() -> fullshard.PlacementPolicy:
    return Policy(optimizer="disk", folder=tempfile.gettempdir())


def _sharded() -> Any:
    torch.manual_seed(3)
    model = UnevenMLP()
    fullshard.fully_shard(model[0])
    return fullshard.fully_shard(model)


def _train(model: nn.Module, optimizer: optim.Optimizer, steps: range) -> None:
    for step in steps:
        mean_square(model(my_part(make_batch(7, seed=step)))).backward()
        optimizer.step()
        optimizer.zero_grad()


def _values(model: nn.Module, optimizer: optim.Optimizer) -> list[Tensor]:
    states = [own[key] for own in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return [local(each).detach().clone() for each in (*model.parameters(), *states)]


@on_ranks(2)
def test_checkpoints_go_from_disk_to_memory_and_back(tmp_path: Path) -> None:
    def make(streams: bool) -> tuple[Any, optim.Optimizer]:
        model = _sharded()
        optimizer: Any = optim.AdamW(model.parameters(), lr=0.01)
        return model, fullshard.stream_state(optimizer, _on_disk()) if streams else optimizer

    model, optimizer = make(True)
    _train(model, optimizer, range(3))
    fullshard.save_checkpoint(tmp_path / "saved", model, optimizer)
    _train(model, optimizer, range(3, 5))
    expected = _values(model, optimizer)
    for streams, has_stepped in ((True, False), (True, True), (False, False)):
        model, optimizer = make(streams)
        if has_stepped:
            _train(model, optimizer, range(7, 9))
        fullshard.load_checkpoint(tmp_path / "saved", model, optimizer)
        _train(model, optimizer, range(3, 5))
        assert all(map(torch.equal, _values(model, optimizer), expected))


@on_ranks(2)
def test_copies_stream_as_well() -> None:
    model = _sharded()
    optimizer = fullshard.stream_state(optim.AdamW(model.parameters(), lr=0.01), _on_disk())
    _train(model, optimizer, range(2))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        own = [p for group in other.param_groups for p in group["params"]]
        for parameter, mine in zip(own, model.parameters(), strict=True):
            parameter.grad = mine.detach().clone()
        other.step()
        assert len(other.state) == len(own)
        assert type(other._local_step) is type(optimizer._local_step)  # type: ignore[attr-defined]


@on_ranks(2)
def test_units_are_described_with_where_their_state_is() -> None:
    model = _sharded()
    fullshard.stream_state(optim.SGD(model.parameters(), lr=0.1, momentum=0.9), _on_disk())
    found = fullshard.describe(model).units
    assert {unit.state_place.split()[0] for unit in found} == {"disk"}
    assert all(unit.state_nbytes >= unit.shard_nbytes for unit in found)
    assert {unit.state_asked for unit in found} == {""}
    assert "of optimizer state on disk" in str(fullshard.describe(model))


@on_ranks(1)
def test_a_policy_that_nobody_has_put_into_effect_is_described() -> None:
    model = fullshard.fully_shard(UnevenMLP(), offload_policy=_on_disk())
    optimizer = optim.AdamW(model.parameters())
    (found,) = fullshard.describe(model).units
    assert (found.state_place, found.state_asked) == ("", "disk")
    assert "stream_state" in str(found)
    fullshard.stream_state(optimizer)
    (found,) = fullshard.describe(model).units
    assert (found.state_place.split()[0], found.state_asked) == ("disk", "")


@on_ranks(1)
def test_without_a_device_the_hosts_state_is_where_it_is() -> None:
    model = _sharded()
    optimizer = fullshard.stream_state(optim.AdamW(model.parameters()), Policy(optimizer="host"))
    _train(model, optimizer, range(2))
    assert {unit.state_place for unit in fullshard.describe(model).units} == {"device"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"parameters": "disk"},
        {"optimizer": "cpu"},
        {"optimizer": "disk"},
        {"optimizer": "host", "folder": "/tmp"},
        {"device_nbytes": 10},
        {"optimizer": "host", "device_nbytes": -1},
        {"optimizer": "host", "device_nbytes": 1e9},
        {"optimizer": "disk", "folder": 3},
        {"optimizer": "disk", "folder": ""},
        {"optimizer": "host", "pin_memory": "no"},
    ],
)
def test_wrong_policies_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ShardingError, match=list(wrong)[-1]):
        Policy(**wrong)


class _WithRows(optim.SGD):
    """Keeps something that is no element's own: one value for the whole tensor, and twice its size."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["both"] = torch.zeros(2, parameter.numel())


@on_ranks(1)
def test_what_cannot_be_served_is_refused_before_anything_changes() -> None:
    model = _sharded()
    for make, policy, elementwise in (
        (optim.AdamW, Policy(optimizer="disk", folder="/nowhere"), False),
        (_WithRows, _on_disk(), True),
        (_WithRows, _on_disk(), False),
        (optim.AdamW, "host", False),
        (optim.AdamW, None, False),  # and no unit has a policy
    ):
        optimizer = make(model.parameters(), lr=0.1)
        with pytest.raises(ShardingError):
            fullshard.stream_state(optimizer, policy, elementwise=elementwise)  # type: ignore[arg-type]
        assert type(optimizer) is make
        assert not optimizer.state


@on_ranks(2)
def test_a_budget_is_refused_on_all_ranks_if_it_is_too_small_on_one() -> None:
    def flat(module: nn.Module) -> Any:
        return fullshard.FullyShardedDataParallel(module, use_orig_params=True)

    # Of 3 x 256 elements the ranks have two rows and one; of a flat buffer, half and half.
    for shard, most in ((fullshard.fully_shard, 2), (flat, 1.5)):
        model: Any = shard(nn.Linear(256, 3, bias=False))
        least = round(most * 256 * 4)  # the momentum of the only unit, which stays
        for budget in (least - 1, least):
            optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            policy = Policy(optimizer="disk", folder=tempfile.gettempdir(), device_nbytes=budget)
            if budget == least:
                fullshard.stream_state(optimizer, policy)
            else:
                with pytest.raises(ShardingError, match=f"device_nbytes={least:,} or more"):
                    fullshard.stream_state(optimizer, policy)


@on_ranks(1)
def test_a_disk_that_is_too_small_is_found_before_anything_is_stepped() -> None:
    model = fullshard.fully_shard(nn.Linear(64, 64))
    optimizer = optim.AdamW(model.parameters())
    whole = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, whole[1]))
    try:
        with pytest.raises(AllocationError, match="the file of"):
            fullshard.stream_state(optimizer, _on_disk())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, whole)
    assert type(optimizer) is optim.AdamW


class _Counting(optim.Optimizer):
    """Adam that counts steps for itself: in a number, a tensor, an attribute of its first step, and its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "step": 0, "drawn": torch.zeros(())})
        self.count, self.total = 0, torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        self.total += 1
        self.first = getattr(self, "first", self.count)
        for group in self.param_groups:
            group["step"] += 1
            group["drawn"] += 2
            scale = self.count * self.total / self.first + group["step"] * group["drawn"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    own = self.state[parameter]
                    own.setdefault("exp_avg", torch.zeros_like(parameter)).lerp_(
                        parameter.grad, 0.1
                    )
                    own.setdefault("exp_avg_sq", torch.zeros_like(parameter)).add_(1)
                    parameter.sub_(group["lr"] / scale * own["exp_avg"])


@on_ranks(1)
def test_what_an_optimizer_counts_on_itself_counts_steps_and_not_units() -> None:
    found = []
    for streams in (True, False):
        model = _sharded()
        alone = nn.Parameter(torch.zeros(1))
        alone.grad = torch.ones(1)
        optimizer: Any = _Counting([alone, *model.parameters()])
        optimizer.alone = alone  # of one element, and no counter
        if streams:
            fullshard.stream_state(optimizer, _on_disk(), elementwise=True)
        _train(model, optimizer, range(3))
        (group,) = optimizer.param_groups
        counted = (
            optimizer.count,
            optimizer.total.item(),
            optimizer.first,
            group["step"],
            group["drawn"].item(),
        )
        assert counted == (3, 3.0, 1, 3, 6.0)
        assert alone.item() != 0
        found.append([*_values(model, optimizer), alone.detach()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@on_ranks(2)
def test_parameters_on_the_host_are_as_with_cpu_offload() -> None:
    found = []
    for policy in (Policy(parameters="host"), fullshard.CPUOffloadPolicy()):
        torch.manual_seed(3)
        model: Any = fullshard.fully_shard(UnevenMLP(), offload_policy=policy)
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        _train(model, optimizer, range(2))
        assert fullshard.describe(model).units[0].offload
        found.append(_values(model, optimizer))
    assert all(map(torch.equal, *found))


KEY = "momentum_buffer"


def _swap(model: Any, optimizer: Any, step: Any) -> Tensor:
    step()
    later = copy.deepcopy(optimizer.state_dict())
    former = optimizer.state_dict()
    optimizer.load_state_dict(later)
    step()
    optimizer.load_state_dict(former)  # nobody has written to it since
    step()
    return optimizer.state[model[0].weight][KEY]


def _write_after_load(model: Any, optimizer: Any, step: Any) -> Tensor:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    value = optimizer.state[model[0].weight][KEY]
    step()
    value.mul_(0.5)
    step()
    return optimizer.state[model[0].weight][KEY]


def _write_after_other_state_went(model: Any, optimizer: Any, step: Any) -> Tensor:
    value = optimizer.state[model[0].weight][KEY]
    del optimizer.state[model[0].bias]
    step()
    value.mul_(0.5)
    step()
    return optimizer.state[model[0].weight][KEY]


def _replaced(model: Any, optimizer: Any, step: Any) -> Tensor:
    value = optimizer.state[model[0].weight][KEY]
    optimizer.state[model[0].weight][KEY] = value.clone()
    step()
    return value


def _let_go_of(model: Any, optimizer: Any, step: Any) -> Tensor:
    value = optimizer.state[model[0].weight][KEY]
    optimizer.state[model[0].weight][KEY] = mine = value.clone()
    step()
    mine.mul_(0.5)
    step()
    del value, mine
    step()
    step()
    return optimizer.state[model[0].weight][KEY]


@on_ranks(2)
def test_what_a_program_keeps_of_a_state_is_the_state_as_long_as_it_was() -> None:
    for play in (_swap, _write_after_load, _write_after_other_state_went, _replaced, _let_go_of):
        found = []
        for streams in (False, True):
            model = _sharded()
            optimizer: Any = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            if streams:
                fullshard.stream_state(optimizer, _on_disk())
            steps = iter(range(20))

            def step(model: Any = model, optimizer: Any = optimizer, steps: Any = steps) -> None:
                number = next(steps)
                _train(model, optimizer, range(number, number + 1))

            step()
            found.append(local(play(model, optimizer, step)).detach().clone())
            if streams and play is _let_go_of:
                assert all(piece.home is not None for piece in optimizer._local_step.pieces)
        assert torch.equal(*found), play.__name__


@on_ranks(2)
def test_each_rank_may_have_a_disk_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / str(torch.distributed.get_rank())
    folder.mkdir()
    policy = Policy(optimizer="disk", folder=folder)
    model: Any = fullshard.fully_shard(UnevenMLP(), offload_policy=policy)
    optimizer = fullshard.stream_state(optim.AdamW(model.parameters(), lr=0.01))
    _train(model, optimizer, range(2))
    (unit,) = fullshard.describe(model).units
    assert str(folder) in unit.state_place


@on_ranks(1)
def test_a_compiled_function_may_call_the_step() -> None:
    found = []
    for compiles in (False, True):
        model = _sharded()
        optimizer = fullshard.stream_state(optim.AdamW(model.parameters(), lr=0.01), _on_disk())
        step = torch.compile(optimizer.step, backend="eager") if compiles else optimizer.step
        for number in range(2):
            mean_square(model(my_part(make_batch(7, seed=number)))).backward()
            step()
            optimizer.zero_grad()
        found.append(_values(model, optimizer))
    assert all(map(torch.equal, *found))
