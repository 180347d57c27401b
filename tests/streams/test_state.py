"""`stream_state` on a virtual device: bits, bytes on the device, and what moves beside what."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import fullshard
from fullshard.engine.runtime import Lane, Runtime
from fullshard.errors import ShardingError
from tests.models import Problem
from tests.streams.lab import Lab, fake_world
from tests.streams.programs.common import shard, train, wrap
from tests.streams.recording import DEVICE
from tests.training import local

HOST = fullshard.PlacementPolicy(optimizer="host")
NUM_BLOCKS, WIDTH = 6, 64
NBYTES = 2 * (
    4 * WIDTH * WIDTH // 4 + 256
)  # of a unit's state on one of four ranks: the bias takes 64, and 256


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    """Be one rank of four; the others answer at once."""
    with fake_world():
        yield


@pytest.fixture
def lab(world: None) -> Iterator[Lab]:
    """Return a virtual device on which nothing may go wrong."""
    with Lab() as entered:
        yield entered
        assert entered.problems == []


def _problem(rows: int = 8) -> Problem:
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_BLOCKS)]
    data = torch.randn(rows, WIDTH)
    return Problem(nn.Sequential(*blocks), data, data.roll(1), [*blocks])


def _adamw(model: Any, **options: Any) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=1e-2, **options)


def _values(model: nn.Module, optimizer: optim.Optimizer) -> list[Tensor]:
    states = [own[key] for own in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return [local(each).detach().clone() for each in (*model.parameters(), *states)]


def _on_device(lab: Lab) -> int:
    return lab.recorder.memory.nbytes_on_device


def _num_state(lab: Lab) -> tuple[int, int]:
    counts = lab.recorder.num_operations
    return counts.get(Lane.STATE_IN, 0), counts.get(Lane.STATE_OUT, 0)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    "face",
    [
        shard,
        lambda problem: wrap(problem, use_orig_params=True),
        lambda problem: wrap(problem, use_orig_params=False),
    ],
    ids=["fully_shard", "pieces", "flat"],
)
def test_bits_are_those_of_state_on_the_device(
    lab: Lab, face: Callable[[Problem], Any], foreach: bool
) -> None:
    found = []
    for policy in (None, HOST, fullshard.PlacementPolicy(optimizer="host", device_nbytes=40_000)):
        problem = _problem()
        model = face(problem)
        optimizer = _adamw(model, foreach=foreach)
        if policy is not None:
            optimizer = fullshard.stream_state(optimizer, policy)
        train(lab, problem, model, optimizer=optimizer)
        found.append(_values(model, optimizer))
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


def _trained(streams: bool) -> tuple[int, int]:
    """Return the bytes on a device of its own after three steps, and those of the state."""
    with Lab() as lab:
        problem = _problem()
        model = shard(problem)
        optimizer = _adamw(model)
        if streams:
            optimizer = fullshard.stream_state(optimizer, HOST)
            assert {unit.state_nbytes for unit in fullshard.describe(model).units} == {NBYTES}
        train(lab, problem, model, optimizer=optimizer)
        gc.collect()  # of steps, what refers to itself
        level = _on_device(lab)
        states = [
            local(own[key]) for own in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")
        ]
        assert {each.device.type for each in states} == {"cpu" if streams else "cuda"}
        assert {each.is_pinned() for each in states} == {streams}
    return level, sum(each.nbytes for each in states)


def test_the_device_has_two_units_state_and_the_host_all() -> None:
    streamed, _ = _trained(True)
    whole, nbytes = _trained(False)
    assert whole - streamed == nbytes - 2 * NBYTES


@pytest.mark.parametrize("num_stay", [0, 1, NUM_BLOCKS - 3, NUM_BLOCKS])
def test_a_budget_keeps_as_many_units_as_fit(lab: Lab, num_stay: int) -> None:
    problem = _problem()
    model = shard(problem)
    budget = (num_stay + 2 * (num_stay < NUM_BLOCKS)) * NBYTES
    policy = fullshard.PlacementPolicy(optimizer="host", device_nbytes=budget)
    optimizer = fullshard.stream_state(_adamw(model), policy)
    places = [unit.state_place for unit in fullshard.describe(model).units if unit.state_place]
    assert (places.count("device"), places.count("host")) == (num_stay, NUM_BLOCKS - num_stay)
    train(lab, problem, model, optimizer=optimizer)
    kinds = [local(own["exp_avg"]).device.type for own in optimizer.state.values()]
    assert kinds.count("cuda") == 2 * num_stay  # a weight and a bias


def test_a_budget_below_what_a_unit_takes_is_refused_by_number(lab: Lab) -> None:
    model = shard(_problem())
    optimizer = _adamw(model)
    with pytest.raises(ShardingError, match=f"{2 * NBYTES:,}"):
        fullshard.stream_state(
            optimizer, fullshard.PlacementPolicy(optimizer="host", device_nbytes=2 * NBYTES - 1)
        )
    assert type(optimizer) is optim.AdamW
    fullshard.stream_state(
        optimizer, fullshard.PlacementPolicy(optimizer="host", device_nbytes=2 * NBYTES)
    )


def test_parameters_that_a_policy_cannot_move_are_refused(lab: Lab) -> None:
    optimizer = _adamw(shard(_problem()))
    with pytest.raises(ShardingError, match="offload_policy"):
        fullshard.stream_state(
            optimizer, fullshard.PlacementPolicy(parameters="host", optimizer="host")
        )
    assert type(optimizer) is optim.AdamW


def test_units_say_where_their_state_is(lab: Lab) -> None:
    problem = _problem()
    for number, block in enumerate(problem.units):
        policy = HOST if number % 2 else fullshard.OffloadPolicy()
        fullshard.fully_shard(block, offload_policy=policy)
    model: Any = fullshard.fully_shard(problem.model)
    optimizer = fullshard.stream_state(_adamw(model))
    train(lab, problem, model, optimizer=optimizer)
    kinds = [local(own["exp_avg"]).device.type for own in optimizer.state.values()]
    assert kinds == ["cuda", "cuda", "cpu", "cpu"] * (NUM_BLOCKS // 2)


class _Seen:
    """What had moved, and the most bytes on the device, at points of a step."""

    def __init__(self, lab: Lab, model: Any, optimizer: Any) -> None:
        self.lab, self.model, self.optimizer = lab, model, optimizer

    def step(self, problem: Problem) -> list[tuple[int, int]]:
        """Run a step; return what had arrived and left after forward, backward and the step."""
        inputs, targets = problem.inputs.to(DEVICE), problem.targets.to(DEVICE)
        start, found = _num_state(self.lab), []
        with self.lab.step():
            loss = problem.loss(self.model(inputs), targets)
            found.append(_num_state(self.lab))
            loss.backward()
            found.append(_num_state(self.lab))
            self.optimizer.step()
            found.append(_num_state(self.lab))
            self.optimizer.zero_grad()
        return [(arrived - start[0], left - start[1]) for arrived, left in found]


def test_states_arrive_beside_backward_as_far_as_it_frees_memory(lab: Lab) -> None:
    for rows, num_early in ((8, 2), (4096, NUM_BLOCKS)):
        problem = _problem(rows)
        model = shard(problem)
        optimizer = fullshard.stream_state(_adamw(model), HOST)
        seen = _Seen(lab, model, optimizer)
        for _ in range(3):
            seen.step(problem)
        assert seen.step(problem) == [(0, 0), (num_early, 0), (NUM_BLOCKS, NUM_BLOCKS)]


def test_memory_that_backward_has_freed_is_back_when_forward_ends(lab: Lab) -> None:
    problem = _problem(4096)
    model = shard(problem)
    inputs = problem.inputs.to(DEVICE)
    optimizer = fullshard.stream_state(_adamw(model), HOST)
    levels = []
    for _ in range(4):
        output = model(inputs)
        levels.append(_on_device(lab))
        output.square().mean().backward()
        del output
        optimizer.step()
        optimizer.zero_grad()
    assert levels[3] == levels[2]
    assert levels[3] - levels[1] <= 2 * NBYTES  # the slots that stay


def test_a_state_that_is_read_or_loaded_between_steps_is_the_one_that_is_stepped_on(
    lab: Lab,
) -> None:
    found = []
    for streams in (False, True):
        problem = _problem(4096)
        model = shard(problem)
        optimizer = _adamw(model)
        if streams:
            fullshard.stream_state(optimizer, HOST)
        inputs, targets = problem.inputs.to(DEVICE), problem.targets.to(DEVICE)
        held: Any = None
        for number in range(8):
            problem.loss(model(inputs), targets).backward()
            if number == 1:  # when some have come early
                local(optimizer.state[next(model.parameters())]["exp_avg"]).mul_(0.5)
            if number == 2:
                optimizer.load_state_dict(optimizer.state_dict())
                saved = copy.deepcopy(optimizer.state_dict())
            if number == 4:  # nothing reads the state that has come early
                optimizer.load_state_dict(saved)
                held = None
            if number == 5:
                held = local(optimizer.state[next(model.parameters())]["exp_avg_sq"])
            if number == 7:
                held.mul_(0.5)
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            optimizer.step()
            optimizer.zero_grad()
        found.append(_values(model, optimizer))
    assert all(map(torch.equal, *found))


def test_an_optimizer_that_counts_its_steps_in_its_group_counts_each_once(lab: Lab) -> None:
    class Counting(optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        own = self.state[parameter]
                        own.setdefault("sum", torch.zeros_like(parameter)).add_(parameter.grad)
                        parameter.add_(own["sum"], alpha=-group["lr"] / group["count"])

    found = []
    for streams in (False, True):
        problem = _problem()
        model = shard(problem)
        optimizer: Any = Counting(model.parameters(), lr=0.1)
        step = fullshard.stream_state if streams else fullshard.step_on_shards
        policy = (HOST,) if streams else ()
        optimizer = step(optimizer, *policy, elementwise=True)
        train(lab, problem, model, optimizer=optimizer)
        assert optimizer.param_groups[0]["count"] == 3
        found.append([local(each).detach().clone() for each in model.parameters()])
    assert all(map(torch.equal, *found))


def test_a_step_that_never_comes_and_a_model_that_goes_leave_nothing(lab: Lab) -> None:
    problem = _problem(4096)
    model = shard(problem)
    optimizer = fullshard.stream_state(_adamw(model), HOST)
    seen = _Seen(lab, model, optimizer)
    seen.step(problem)
    inputs = problem.inputs.to(DEVICE)
    for _ in range(2):  # states arrive, and no step uses them
        model(inputs).sum().backward()
        optimizer.zero_grad()
    with torch.no_grad():
        model(inputs)
    seen.step(problem)
    del seen, optimizer, model, problem, inputs
    torch.empty(1 << 20, device=DEVICE).fill_(1.0)  # gets the memory of what has gone
    assert Runtime.of(DEVICE) is not None


def test_a_report_counts_all_of_it_and_waits_for_nothing(lab: Lab) -> None:
    problem = _problem()
    model = shard(problem)
    optimizer = fullshard.stream_state(_adamw(model), HOST)
    train(lab, problem, model, optimizer=optimizer)
    waits = lab.lanes.num_host_waits
    report = fullshard.memory_report(model, optimizer)
    at_home = (
        NUM_BLOCKS * 2 * (4 * (WIDTH + 1) * WIDTH // 4 + 4)
    )  # two moments and two counters a unit
    assert report.total(fullshard.MemoryCategory.OPTIMIZER) == at_home + 2 * NBYTES
    assert lab.lanes.num_host_waits == waits


def test_state_that_a_program_keeps_is_where_it_was_after_a_step_that_raises(lab: Lab) -> None:
    problem = _problem()
    model = shard(problem)
    optimizer: Any = fullshard.stream_state(_adamw(model), HOST)
    train(lab, problem, model, optimizer=optimizer)
    own = optimizer.state[next(model.parameters())]
    own["exp_avg"] = mine = own["exp_avg"].clone()  # on the host, and nobody's home
    problem.loss(model(problem.inputs.to(DEVICE)), problem.targets.to(DEVICE)).backward()
    (group,) = optimizer.param_groups
    for betas, is_right in ((None, False), (group["betas"], True)):
        before, group["betas"] = local(mine).clone(), betas
        if is_right:
            optimizer.step()
        else:
            with pytest.raises(TypeError):
                optimizer.step()
        now = optimizer.state[next(model.parameters())]["exp_avg"]
        assert now is mine
        assert now.device.type == "cpu"
        assert torch.equal(local(now), before) != is_right
