"""Saves in the background that use the plan of the save before, whatever changed in between."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fullshard
from fullshard.checkpoint import kept_plan, saving
from fullshard.errors import FullshardError
from tests.api import Api
from tests.harness import mesh_of, on_ranks, rank, world_size

alone = pytest.mark.apis("peer_memory")


class Net(nn.Module):
    """Modules and tensors of which several have the same shape, so that nothing tells them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.second.weight
        self.norm = nn.LayerNorm(6)
        self.free = nn.Linear(6, 6)
        self.register_buffer("one", torch.ones(4))
        self.register_buffer("two", torch.full((4,), 2.0))
        self.register_buffer("passing", torch.zeros(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.free(self.norm(self.tied(self.second(self.first(x))))) * self.one.sum()


class Program:
    """A model that is trained and saved, and what happens to it."""

    def __init__(self, api: Api, way: str) -> None:
        torch.manual_seed(0)
        self.api, self.way = api, way
        self.model: nn.Module = Net()
        mesh = mesh_of(world_size())
        if way == "rows":
            api.fully_shard(self.model.first, mesh=mesh)
            api.fully_shard(self.model, mesh=mesh, ignored_params={*self.model.free.parameters()})
        elif way == "mixed":
            policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            api.fully_shard(self.model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        elif way == "flat":
            self.model = api.FullyShardedDataParallel(self.model, use_orig_params=True)
        elif way == "ddp":
            self.model = nn.parallel.DistributedDataParallel(self.model)
        self.optimizer: torch.optim.Optimizer = self.new_optimizer()
        self.steps = 0
        self.train()
        self.train()

    @property
    def net(self) -> Any:
        return getattr(self.model, "module", self.model)

    def new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def train(self) -> None:
        generator = torch.Generator().manual_seed(self.steps)  # the same on all ranks
        self.steps += 1
        loss = self.model(torch.randn(4, 6, generator=generator)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def states(self) -> list[dict[str, Any]]:
        return [self.optimizer.state[p] for p in self.parameters() if p in self.optimizer.state]

    def parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


# What happens between two saves. Only values: the plan of the one before is used.


def nothing(program: Program) -> None: ...


def training(program: Program) -> None:
    program.train()


def all_values(program: Program) -> None:
    with torch.no_grad():
        for tensor in (*program.model.parameters(), *program.model.buffers()):
            tensor.add_(1)
        for state in program.states():
            for value in state.values():
                value.mul_(3)


def options(program: Program) -> None:
    group = program.optimizer.param_groups[0]
    group["lr"], group["betas"], group["new"] = 0.5, (0.5, 0.5), [1, {"a": 2}]


def swapped_states(program: Program) -> None:
    state, (one, two) = program.optimizer.state, _pair(program)
    state[one], state[two] = state[two], state[one]


def swapped_moments(program: Program) -> None:
    for state in program.states():
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


def swapped_memory_of_states(program: Program) -> None:
    one, two = (_plain(program.optimizer.state[p]["exp_avg"]) for p in _pair(program))
    one.data, two.data = two.data, one.data


def swapped_memory_of_parameters(program: Program) -> None:
    one, two = (_plain(p) for p in _pair(program))
    one.data, two.data = two.data, one.data


def whole_parameters_written(program: Program) -> None:
    with fullshard.full_parameters(program.model), torch.no_grad():
        for parameter in program.model.parameters():
            parameter.add_(1)


def loaded_state(program: Program) -> None:
    """Loading gives DTensors new specs, which say the same."""
    for state in program.states():
        for key, value in state.items():
            if isinstance(value, DTensor):
                local, mesh = value.to_local() + 1, value.device_mesh
                shape, stride = value.shape, value.stride()
                state[key] = DTensor.from_local(
                    local, mesh, value.placements, shape=shape, stride=stride
                )


# More than values: what was planned is not right any more.


def renamed_module(program: Program) -> None:
    modules = program.net._modules
    modules["renamed"] = modules.pop("norm")


def swapped_modules(program: Program) -> None:
    modules = program.net._modules
    modules["first"], modules["second"] = modules["second"], modules["first"]


def replaced_module(program: Program) -> None:
    program.net.norm = copy.deepcopy(program.net.norm)


def shared_module(program: Program) -> None:
    program.net._modules["again"] = program.net._modules["norm"]


def other_class(program: Program) -> None:
    program.net.norm.__class__ = type("Other", (type(program.net.norm),), {})


def new_parameter(program: Program) -> None:
    program.net.added = nn.Parameter(torch.full((3,), float(program.steps)), requires_grad=False)


def new_buffer(program: Program) -> None:
    program.net.register_buffer("added", torch.full((3,), 5.0))


def no_buffer(program: Program) -> None:
    program.net.one = None


def swapped_buffers(program: Program) -> None:
    buffers = program.net._buffers
    buffers["one"], buffers["two"] = buffers["two"], buffers["one"]


def tied_buffers(program: Program) -> None:
    program.net._buffers["two"] = program.net._buffers["one"]


def replaced_buffers(program: Program) -> None:
    for module in program.net.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer.clone() + 1


def buffer_of_another_shape(program: Program) -> None:
    program.net._buffers["one"].data = torch.ones(9)


def persistence(program: Program) -> None:
    program.net._non_persistent_buffers_set ^= {"one", "passing"}


def tied(program: Program) -> None:
    program.net.free.bias = program.net.norm.bias


def untied(program: Program) -> None:
    old = program.net.tied.weight
    program.net.tied.weight = nn.Parameter(_plain(old.detach()).new_ones(6, 6))


def replaced_parameter(program: Program) -> None:
    program.net.first.bias = nn.Parameter(torch.ones(6))


def swapped_parameters(program: Program) -> None:
    one, two = program.net.norm._parameters, program.net.norm._parameters
    one["weight"], two["bias"] = two["bias"], one["weight"]


def loaded_by_assignment(program: Program) -> None:
    values = {name: value.clone() for name, value in program.model.state_dict().items()}
    program.model.load_state_dict(values, assign=True)


def other_dtype(program: Program) -> None:
    program.model.to(torch.float64)


def new_optimizer(program: Program) -> None:
    state = program.optimizer.state_dict()
    program.optimizer = program.new_optimizer()
    program.optimizer.load_state_dict(state)


def other_optimizer(program: Program) -> None:
    program.optimizer = torch.optim.SGD(program.model.parameters(), lr=0.1, momentum=0.9)
    program.train()


def loaded_optimizer(program: Program) -> None:
    program.optimizer.load_state_dict(copy.deepcopy(program.optimizer.state_dict()))


def cleared_states(program: Program) -> None:
    program.optimizer.state.clear()


def one_state_less(program: Program) -> None:
    # Of a parameter that ranks do not share.
    del program.optimizer.state[program.parameters()[-1]]


def renamed_moments(program: Program) -> None:
    for state in program.states():
        state["first"] = state.pop("exp_avg")


def more_states(program: Program) -> None:
    for state in program.states():
        state["more"], state["text"] = state["exp_avg"].clone(), "a"


def values_in_place_of_tensors(program: Program) -> None:
    for state in program.states():
        state["exp_avg"], state["step"] = 1.5, 7


def moments_of_another_dtype(program: Program) -> None:
    for state in program.states():
        if not isinstance(state["exp_avg"], DTensor):
            state["exp_avg"] = state["exp_avg"].double()


def new_moments(program: Program) -> None:
    for state in program.states():
        state["exp_avg"] = state["exp_avg"] + 1


def shared_moments(program: Program) -> None:
    for state in program.states():
        state["exp_avg_sq"] = state["exp_avg"]


def reversed_group(program: Program) -> None:
    program.optimizer.param_groups[0]["params"].reverse()


def more_groups(program: Program) -> None:
    groups = program.optimizer.param_groups
    groups.append({**groups[0], "params": [groups[0]["params"].pop()], "lr": 0.5})


def another_program(program: Program) -> None:
    """One of the same shapes: all is equal but the objects, whose identities are free again."""
    steps = program.steps
    api, way = program.api, program.way
    program.model = program.optimizer = None  # type: ignore[assignment]
    gc.collect()
    program.__init__(api, way)  # type: ignore[misc]
    for _ in range(steps % 3):
        program.train()


OF_VALUES = (
    nothing,
    training,
    all_values,
    options,
    swapped_states,
    swapped_moments,
    swapped_memory_of_states,
    whole_parameters_written,
    loaded_state,
)
OTHERS = (
    swapped_memory_of_parameters,
    renamed_module,
    swapped_modules,
    replaced_module,
    shared_module,
    other_class,
    new_parameter,
    new_buffer,
    no_buffer,
    swapped_buffers,
    tied_buffers,
    replaced_buffers,
    buffer_of_another_shape,
    persistence,
    tied,
    untied,
    replaced_parameter,
    swapped_parameters,
    loaded_by_assignment,
    other_dtype,
    new_optimizer,
    other_optimizer,
    loaded_optimizer,
    cleared_states,
    one_state_less,
    renamed_moments,
    more_states,
    values_in_place_of_tensors,
    moments_of_another_dtype,
    new_moments,
    shared_moments,
    reversed_group,
    more_groups,
    another_program,
)
CHANGES: dict[str, Callable[[Program], None]] = {c.__name__: c for c in (*OF_VALUES, *OTHERS)}


def _pair(program: Program) -> tuple[nn.Parameter, nn.Parameter]:
    """Return two parameters of the same shape with optimizer state."""
    by_kind: dict[Any, nn.Parameter] = {}
    for parameter in program.parameters():
        kind = (type(parameter), parameter.shape, parameter.dtype)
        if parameter.numel() and parameter in program.optimizer.state:
            if kind in by_kind:
                return by_kind[kind], parameter
            by_kind[kind] = parameter
    raise AssertionError("no two parameters are alike")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


# Of what cannot be done to a flat parameter, or after other changes.
FAULTS = (FullshardError, RuntimeError, ValueError, AssertionError, AttributeError, KeyError)


class Saves:
    """Pairs of saves, in the background and not, of which both have to be the same.

    num_plans: how often the background has planned, in all.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.num_pairs, self.num_plans = folder, 0, 0
        plan = kept_plan.content_of

        def counting(*given: Any) -> Any:
            self.num_plans += 1
            return plan(*given)

        patch.setattr(kept_plan, "content_of", counting)
        patch.setattr(saving, "kept_plan", kept_plan.KeptPlan())

    def in_background(self, program: Program, name: str) -> None:
        given = (self.folder / name, program.model, program.optimizer)
        with warnings.catch_warnings(action="ignore"):
            fullshard.async_save_checkpoint(*given, rng=False).wait()

    def compare(self, program: Program) -> str:
        """Save twice; return the error, which has to be the same, or ""."""
        self.num_pairs += 1
        now, later = (self.folder / f"{self.num_pairs} {kind}" for kind in ("now", "later"))
        model, optimizer = program.model, program.optimizer
        said = []
        for save in (
            lambda: self.in_background(program, later.name),
            lambda: fullshard.save_checkpoint(now, model, optimizer, rng=False),
        ):
            try:
                with warnings.catch_warnings(
                    action="ignore"
                ):  # weights were tied, or not kept equal
                    save()
                said.append("")
            except FullshardError as error:
                said.append(str(error))
        assert said[0] == said[1]
        if rank() == 0 and not said[0]:
            assert fullshard.diff_checkpoints(now, later) == []
        return said[0]


@alone
@pytest.mark.parametrize(
    "way",
    ["rows", "ddp", *(pytest.param(way, marks=pytest.mark.long) for way in ("mixed", "flat"))],
)
@on_ranks(2, limit_s=60)
def test_a_plan_is_right_after_every_change(api: Api, way: str, tmp_path: Path) -> None:
    for number, change in enumerate(CHANGES.values()):
        with pytest.MonkeyPatch.context() as patch:
            saves = Saves(tmp_path / str(number), patch)
            program = Program(api, way)
            saves.in_background(program, "before")
            before = saves.num_plans
            try:
                change(program)
            except FAULTS:
                assert way != "rows", change
            saves.compare(program)
            if way == "rows" and change in OF_VALUES:
                assert saves.num_plans == before, change


@pytest.mark.long
@alone
@pytest.mark.parametrize("seed", range(20))
@on_ranks(2)
def test_a_plan_is_right_after_changes_in_any_order(api: Api, seed: int, tmp_path: Path) -> None:
    chosen = random.Random(seed)
    for number in range(8):
        program = Program(api, chosen.choice(["rows", "mixed", "flat", "ddp"]))
        with pytest.MonkeyPatch.context() as patch:
            saves = Saves(tmp_path / str(number), patch)
            for _ in range(6):
                for name in chosen.sample(sorted(CHANGES), chosen.choice([0, 1, 1, 2])):
                    with contextlib.suppress(*FAULTS), warnings.catch_warnings(action="ignore"):
                        CHANGES[name](program)
                if saves.compare(program):
                    break  # such as an optimizer of other parameters


@alone
@on_ranks(2)
def test_a_plan_keeps_no_memory(api: Api, tmp_path: Path) -> None:
    program = Program(api, "rows")
    for number in range(3):
        fullshard.async_save_checkpoint(
            tmp_path / str(number), program.model, program.optimizer
        ).wait()
    tensors = [_plain(tensor) for state in program.states() for tensor in state.values()]
    kept = [weakref.ref(each) for each in (*tensors, program.model, program.optimizer)]
    del tensors, program
    gc.collect()
    assert [reference() for reference in kept if reference() is not None] == []
