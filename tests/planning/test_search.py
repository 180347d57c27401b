"""The search finds what looking at every way finds, says what it refuses, and prints programs that do what it planned."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fullshard
from fullshard.models.llama import Llama, init_weights
from fullshard.models.sizes import LlamaConfig
from fullshard.plan.amounts import nbytes, seconds
from fullshard.plan.step import StepSettings, plan_step
from fullshard.plan.unit_plan import Sharding, plan_unit
from fullshard.plan.ways import PEER_MEMORY
from fullshard.plan.workload import Enter, Leave
from fullshard.planning.calibration import (
    SCHEMA,
    EngineFigures,
    KernelTime,
    MachineFigures,
    Point,
    engine_key,
    machine_of,
    optimizer_key,
)
from fullshard.planning.choices import (
    WHOLE,
    Choice,
    NothingFitsError,
    SearchError,
    SearchSpace,
    default_space,
    group_units,
)
from fullshard.planning.machines import Machine, machine_named
from fullshard.planning.search import Candidate, SearchResult, _Search, search_training
from fullshard.planning.setup import TrainingSetup
from fullshard.planning.shapes import TransformerShape
from fullshard.planning.subject import Subject
from fullshard.planning.training import planned
from tests import planned as executed
from tests.api import Api
from tests.harness import mesh_of, on_ranks, rank
from tests.models import Transformer

H100 = machine_named("H100-80GB-SXM")
ON_8 = TrainingSetup(H100, 8)
SMALL = TransformerShape(6, 1024, 8, 8, 2816, 8192, 128)
LARGE = TransformerShape(80, 8192, 64, 8, 28672, 128256, 128)
_GIB = 1 << 30


def every(source: Subject, setup: TrainingSetup, space: SearchSpace) -> list[Candidate]:
    """Plan every way, the fastest first."""
    search = _Search(source, setup)
    choices = [*space.choices(setup.ranks, setup.batch * setup.accumulation)]
    found = {each.choice: each for each in map(search.plan, choices)}
    order = lambda each: (each.step_s, each.memory.needed_nbytes, each.choice)  # noqa: E731
    return sorted((found[choice] for choice in choices if choice in found), key=order)


def with_memory(machine: Machine, nbytes: float) -> Machine:
    gpu = dataclasses.replace(machine.gpu, memory_nbytes=nbytes)
    return dataclasses.replace(machine, gpu=gpu)


# What is searched


def test_choices_are_all_that_is_possible_and_nothing_else() -> None:
    space = SearchSpace((1, 4, 8), (1, 2, 3), (1, WHOLE), (True, False, 4), offload=("none",))
    choices = [*space.choices(16, 4)]
    assert len(set(choices)) == len(choices)
    for choice in choices:
        assert choice.shard_size * choice.replicate_size == 16
        assert choice.sequences * choice.num_microbatches == 4
        assert choice.num_microbatches > 1 or not choice.reduces_each
        assert not choice.fills or choice.reshard_after_forward is not False
    groups = {(c.shard_size, c.reshard_after_forward) for c in choices if c.layers_per_unit == 1}
    # 4 of 4 is all of them, and nobody gathers what one rank has.
    assert groups == {(1, False), (4, True), (4, False), (8, True), (8, False), (8, 4)}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: [*SearchSpace((3,), (1,)).choices(8, 1)], "3 shards"),
        (lambda: [*SearchSpace((2,), (3,)).choices(8, 4)], "none of them divides the 4"),
        (lambda: SearchSpace((), (1,)), "shard_sizes"),
        (lambda: SearchSpace((2,), (1,), checkpointing=("some",)), "none, selective, full"),
        (lambda: SearchSpace(8, (1,)), "shard_sizes=8"),
        (lambda: SearchSpace((8,), ("1",)), "sequences=('1',)"),
        (lambda: SearchSpace((8,), (1,), (-1,)), "layers_per_unit=(-1,)"),
        (lambda: [*SearchSpace((8,), (1,), (1,), (5,)).choices(8, 1)], "divides one of (8,)"),
        *(
            (lambda limit=limit: search_training(SMALL, ON_8, limit_nbytes=limit), "limit_nbytes")
            for limit in ("80GiB", 0, -1)
        ),
    ],
)
def test_what_is_no_space_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(SearchError, match=re.escape(said)):
        make()


def test_units_of_several_layers_are_entered_once_and_keep_all_parameters() -> None:
    single = Subject(SMALL).workload(TrainingSetup(H100, 8, checkpointing="full"))
    joined = group_units(single, 4)
    assert [unit.name for unit in joined.units] == [
        "",
        "layers.0, layers.1, layers.2, layers.3",
        "layers.4, layers.5",
    ]
    entered = [event.unit for event in joined.events if isinstance(event, Enter)]
    left = [event.unit for event in joined.events if isinstance(event, Leave)]
    assert (entered, left) == ([0, 1, 2], [1, 2, 0])
    params = lambda workload: [p for unit in workload.units for p in unit.params]  # noqa: E731
    assert params(joined) == params(single) == params(group_units(single, WHOLE))


def test_units_within_units_are_not_joined() -> None:
    model = functools.partial(Llama, LlamaConfig(512, 64, 160, 4, 4, 2))
    units = [f"model.layers.{n}{part}" for n in range(4) for part in ("", ".mlp")]
    workload = Subject(model, units=units).workload(TrainingSetup(H100, 8, seq=64))
    with pytest.raises(SearchError, match="within each other"):
        group_units(workload, 2)
    assert Subject(model, units=[["model.layers.0"]]).units == ["model.layers.0"]  # alone
    assert len(group_units(workload, WHOLE).units) == 1


# What is found


@given(
    hidden=st.sampled_from((256, 1024, 2048)),
    num_layers=st.integers(2, 4),
    ranks=st.sampled_from((8, 16, 32)),
    sequences=st.sampled_from((1, 2, 4)),
    network_rate=st.sampled_from((1e9, 10e9, 50e9)),
    share=st.floats(0.1, 1.0),
    offload=st.sampled_from((("none",), ("none", "optimizer"), ("params",))),
)
@settings(max_examples=4, deadline=None, derandomize=True)
def test_search_finds_what_planning_every_way_finds(
    hidden: int,
    num_layers: int,
    ranks: int,
    sequences: int,
    network_rate: float,
    share: float,
    offload: tuple[str, ...],
) -> None:
    source = Subject(TransformerShape(num_layers, hidden, 8, 8, 3 * hidden, 8192, hidden // 8))
    space = SearchSpace(
        *((ranks, 4), tuple({1, sequences}), (1, 2), (True, False, 4)),
        checkpointing=("none", "full"),
        offload=offload,
    )
    machine = dataclasses.replace(H100, network_rate=network_rate)
    unlimited = every(source, TrainingSetup(machine, ranks, batch=sequences), space)
    sizes = sorted(each.memory.needed_nbytes for each in unlimited)
    limit = sizes[math.ceil(share * len(sizes)) - 1]
    setup = TrainingSetup(with_memory(machine, limit), ranks, batch=sequences)
    all_ways = [
        each
        for each in every(source, setup, space)
        if each.memory.needed_nbytes <= limit and (not each.choice.fills or each.unsharded)
    ]
    result = search_training(source, setup, space=space)
    assert [*result.best] == all_ways[:10]
    front = [
        one
        for place, one in enumerate(all_ways)
        if not any(
            other.step_s <= one.step_s
            and other.memory.needed_nbytes <= one.memory.needed_nbytes
            and (other.step_s, other.memory.needed_nbytes) != (one.step_s, one.memory.needed_nbytes)
            for other in all_ways
        )
        and (one.step_s, one.memory.needed_nbytes)
        not in {(each.step_s, each.memory.needed_nbytes) for each in all_ways[:place]}
    ]
    assert [*result.front] == front
    for each in result.excluded:
        assert each.memory.needed_nbytes > limit
        assert each.step_s < result.best[0].step_s


@pytest.mark.parametrize("offload", ["none", "optimizer", "params"])
def test_no_way_takes_less_than_its_bound(offload: str) -> None:
    setup = TrainingSetup(dataclasses.replace(H100, network_rate=2e9), 16)
    space = SearchSpace((16, 8), (1, 3), (1, 2, WHOLE), (True, False, 4), offload=(offload,))
    less = dataclasses.replace(setup, machine=with_memory(setup.machine, 3 * _GIB))
    search = _Search(Subject(dataclasses.replace(SMALL, num_layers=3)), less)
    for choice in space.choices(16, 3):
        bound, found = search.bound(choice), search.plan(choice)
        assert bound.step_s <= found.step_s, choice
        assert bound.nbytes <= found.memory.tensors_nbytes, choice


@pytest.mark.parametrize("reduces_each", [True, False])
@pytest.mark.parametrize("shard_size", [16, 4])
@pytest.mark.parametrize("network_rate", [1e9, 50e9])
def test_more_microbatches_are_linear(
    reduces_each: bool, shard_size: int, network_rate: float
) -> None:
    setup = TrainingSetup(dataclasses.replace(H100, network_rate=network_rate), 16)
    search = _Search(Subject(SMALL), setup)
    for reshard, checkpointing in itertools.product((True, False), ("none", "full")):
        choice = Choice(
            *(shard_size, 16 // shard_size, 1, reshard, False, checkpointing, "none"),
            *(1, 9, reduces_each),
        )
        found = search.plan(choice)
        exact = planned(Subject(SMALL), search._setup_of(choice))
        assert found.step_s == pytest.approx(exact.time.step_s, rel=1e-9)
        assert found.memory.needed_nbytes == exact.memory.needed_nbytes
        assert dict(found.memory.parts) == dict(exact.memory.parts)


def test_units_that_stay_whole_save_time_and_fit() -> None:
    machine = dataclasses.replace(H100, network_rate=2e9)
    setup = TrainingSetup(machine, 32)
    search = _Search(Subject(SMALL), setup)
    bare = Choice(32, 1, 1, True, False, "full", "none", 1, 1, False)
    base, whole = search.plan(bare), search.plan(bare._replace(reshard_after_forward=False))
    limit = (base.memory.needed_nbytes + whole.memory.needed_nbytes) // 2
    less = dataclasses.replace(setup, machine=with_memory(machine, limit))
    filled = _Search(Subject(SMALL), less).plan(bare._replace(fills=True))
    assert 0 < len(filled.unsharded) < SMALL.num_layers
    assert filled.memory.needed_nbytes <= limit
    assert whole.step_s < filled.step_s < base.step_s
    space = SearchSpace((32,), (1,), (1,), (True,), checkpointing=("full",), offload=("none",))
    found = search_training(SMALL, less, space=space)  # which plans the whole one as well, unasked
    assert found.num_planned == found.num_choices == 2


def rows(batch: int) -> Tensor:
    return torch.empty(batch, 32, device="meta")


def measured_setup(source: Subject, way: str) -> TrainingSetup:
    """Return 2 ranks of a machine on which a way to communicate was measured, and the kernels of a model."""
    setup = TrainingSetup(H100, 2, batch=4, precision=fullshard.MixedPrecisionPolicy())
    stretches = source.workload(setup).stretches
    works = {w._replace(count=1) for s in stretches for w in (*s.forward, *s.backward)}
    kernels = tuple(
        KernelTime(
            w.kind.value, w.name, w.dtype, w.shape, w.flops, w.nbytes, 1e-6 + 1e-9 * w.nbytes
        )
        for w in works
    )
    points = (Point(0, 1e-6), Point(1 << 20, 1e-3))
    engine = {
        engine_key(way, torch.float32, torch.float32): EngineFigures(
            points, points, 1e-5, 1e-5, 1e-6
        )
    }
    named = (SCHEMA, "here", "cpu", "2.13", "2026-01-01T00:00:00+00:00", 2, 1, 1e-6)
    figures = MachineFigures(
        *named, kernels, engine, {optimizer_key("adamw", torch.float32): points}
    )
    return dataclasses.replace(setup, machine=machine_of(figures, 1 << 30))


@pytest.mark.parametrize("way", ["peer memory", "gloo"])
def test_what_was_measured_is_searched_and_the_rest_is_counted(way: str) -> None:
    source = Subject(lambda: nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))), inputs=rows)
    setup = measured_setup(source, way)
    found = search_training(source, setup)
    reasons = dict(found.left_out)
    assert sorted(reason.split(":")[0] for reason in reasons) == ["Offloading", "Replicas"]
    assert sum(reasons.values()) > found.num_choices > 10
    assert all(f"{num} others left out. {reason}" in str(found) for reason, num in reasons.items())
    assert found.as_dict()["left_out"] == reasons
    assert 'device="cpu"' in found.program
    workload = source.workload(setup)
    space = default_space(setup, workload, takes_batch=True)
    space = dataclasses.replace(space, shard_sizes=(2,), offload=("none",))
    search = _Search(source, setup)
    for choice in space.choices(2, 4):
        bound, planned_way = search.bound(choice), search.plan(choice)
        assert bound.step_s <= planned_way.step_s, choice
        assert bound.nbytes <= planned_way.memory.tensors_nbytes, choice
    ways = [e for e in every(source, setup, space) if not e.choice.fills or e.unsharded]
    assert [*found.best] == ways[:10]
    for changes, reason in (({"shard_sizes": (1,)}, "Replicas"), ({"offload": ("params",)}, "Off")):
        with pytest.raises(SearchError, match=f"None of .* ways was measured. {reason}"):
            search_training(source, setup, space=dataclasses.replace(space, **changes))


@pytest.mark.parametrize("offload", ["optimizer", "params"])
def test_a_search_says_what_is_in_host_memory(offload: str) -> None:
    space = SearchSpace((16,), (1,), (1,), (True,), offload=(offload,))
    (first, *_) = search_training(SMALL, TrainingSetup(H100, 16), space=space).best
    setup = TrainingSetup(H100, 16, offload=offload, checkpointing=first.choice.checkpointing)
    plan = planned(Subject(SMALL), setup)
    shown, kept = first.as_dict(), plan.as_dict()["memory"]
    for name in ("in_host_memory_nbytes", "in_host_memory_per_host_nbytes"):
        assert shown[name] == kept[name] > 0
    assert shown["in_host_memory_per_host_nbytes"] == 8 * shown["in_host_memory_nbytes"]
    texts = [nbytes(shown[f"in_host_memory_{name}nbytes"]) for name in ("", "per_host_")]
    assert f"{texts[0]} of host memory, {texts[1]} on a host" in str(first)


def test_reasons_and_parts_add_up() -> None:
    setup = TrainingSetup(with_memory(H100, 4 * _GIB), 16, batch=2, accumulation=2)
    space = SearchSpace((8, 16), (1, 2), (1, 2), checkpointing=("none", "full"))
    result = search_training(SMALL, setup, space=space)
    assert len(result.best) == len(result.reasons) == 10
    for each in (*result.best, *result.front):
        assert sum(s for _, s in each.time) == pytest.approx(each.step_s)
        assert sum(n for _, n in each.memory.parts) == each.memory.total_nbytes
        assert each.memory.needed_nbytes <= 4 * _GIB
    first = dict(result.best[0].time)
    for each, reason in zip(result.best[1:], result.reasons[1:], strict=True):
        slower = each.step_s - result.best[0].step_s
        assert f"{seconds(slower)} slower" in reason or slower < 1e-9
        units = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
        for name, paid, unit in re.findall(r"([a-z -]+) ([+-][0-9.]+) (\w+)", reason):
            more = dict(each.time)[name.strip()] - first[name.strip()]
            assert more == pytest.approx(float(paid) * units[unit], rel=0.01)
    made = result.as_dict()
    assert made["best"][0]["step_s"] == result.best[0].step_s
    assert " 0.00" not in str(result)
    assert search_training(SMALL, setup, space=space).as_dict() == made


def test_where_nothing_fits_the_error_says_what_would() -> None:
    space = SearchSpace((16,), (1,), checkpointing=("full",))
    setup = TrainingSetup(H100, 16)
    smallest = min(each.memory.needed_nbytes for each in every(Subject(SMALL), setup, space))
    limit = smallest - (30 << 20)
    with pytest.raises(NothingFitsError) as caught:
        search_training(SMALL, setup, space=space, limit_nbytes=limit)
    said = str(caught.value)
    assert nbytes(smallest) in said
    ranks, seq = (int(re.search(pattern, said)[1]) for pattern in (r"(\d+) ranks", r"of (\d+) tok"))
    more = dataclasses.replace(setup, ranks=ranks)
    wider = dataclasses.replace(space, shard_sizes=(ranks,))
    shorter = dataclasses.replace(setup, seq=seq)
    for other, their in ((more, wider), (shorter, space)):
        assert search_training(
            *(SMALL, other),
            space=their,
            limit_nbytes=limit,
        ).best


@pytest.mark.long
def test_200_ways_of_70b_on_1024_gpus_take_less_than_a_minute() -> None:
    started = time.process_time()
    result = search_training(LARGE, TrainingSetup(H100, 1024))
    assert result.num_choices >= 200
    assert time.process_time() - started < 60


# What is printed

CONFIG = LlamaConfig(512, 64, 160, 4, 4, 2)
SEQ = 32


def small_llama() -> Llama:
    return Llama(CONFIG)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, -2).float(), tokens.flatten())


@dataclasses.dataclass(frozen=True)
class Printed:
    """A way to train, in which the search has no choice."""

    shard_size: int
    layers: int = 1
    reshard: bool | int = True
    checkpointing: str = "none"
    batch: int = 1
    sequences: int = 1
    offload: str = "none"
    keeps_half: bool = False

    def result(self, ranks: int) -> SearchResult:
        """Search. batch: sequences of a rank."""
        machine = dataclasses.replace(H100, per_host=2)
        setup = TrainingSetup(machine, ranks, batch=self.batch, seq=SEQ)
        space = SearchSpace(
            *((self.shard_size,), (self.sequences,), (self.layers,), (self.reshard,)),
            *(self.keeps_half, (self.checkpointing,), (self.offload,)),
        )
        source, limit = Subject(small_llama), None
        if self.keeps_half:  # there is memory for half of the units
            both = dataclasses.replace(space, reshard_after_forward=(True, False), fills=False)
            sizes = [each.memory.needed_nbytes for each in every(source, setup, both)]
            limit = sum(sizes) // 2
        return search_training(source, setup, space=space, limit_nbytes=limit)


PRINTED = [
    Printed(2, layers=2, checkpointing="full", batch=4, sequences=2, offload="optimizer"),
    Printed(2, layers=3, reshard=False, checkpointing="selective"),
    Printed(1, layers=WHOLE, checkpointing="full", batch=2),
    Printed(2, offload="params"),
    Printed(2, keeps_half=True),
]


def _shard_as_printed(program: str) -> tuple[dict[str, Any], Any]:
    assert "fullshard." not in program  # public names alone
    names: dict[str, Any] = {}
    exec(compile(program, "printed", "exec"), names)
    model = small_llama()
    init_weights(model, seed=0)
    return names, names["shard"](model, device="cpu")


def _run_as_printed(case: Printed, num_ranks: int, way: Any) -> None:
    result = case.result(num_ranks)
    names, model = _shard_as_printed(result.program)
    choice = result.best[0].choice
    single = Subject(small_llama).workload(
        TrainingSetup(H100, num_ranks, seq=SEQ, checkpointing=case.checkpointing)
    )
    workload = group_units(single, case.layers)
    described = fullshard.describe(model).units
    assert len(described) == len(workload.units)
    assert bool(result.best[0].unsharded) is case.keeps_half
    by_numel = {unit.name: unit for unit in described}
    for number, unit in enumerate(workload.units):
        shown = by_numel[unit.name]
        sharding = Sharding(
            choice.shard_size,
            way,
            shard_rank=rank() % choice.shard_size,
            replicate_size=choice.replicate_size,
            reduce_dtype=torch.float32,
        )
        plan = plan_unit(unit.params, sharding)
        assert shown.shard_size == choice.shard_size
        assert shown.replicate_size == choice.replicate_size
        assert shown.shard_nbytes == plan.layout.shard_nbytes
        assert shown.unsharded_nbytes == plan.layout.unsharded_nbytes
        is_whole = number == 0 or unit.name in result.best[0].unsharded
        wanted = False if is_whole else choice.reshard_after_forward
        assert shown.reshard_after_forward == wanted
        assert shown.offload == (case.offload == "params")
    optimizer = torch.optim.AdamW(model.parameters())
    if case.offload == "optimizer":
        optimizer = names["with_state_on_host"](optimizer)
    batches = torch.randint(512, (choice.num_microbatches, choice.sequences, SEQ))
    before = [value.clone() for _, value in fullshard.iter_full_state(model)]
    names["backward"](model, batches, loss_of)
    optimizer.step()
    after = [value for _, value in fullshard.iter_full_state(model)]
    assert sum(not torch.equal(*each) for each in zip(before, after, strict=True)) > 20


@pytest.mark.ours("not part of the API")
@pytest.mark.parametrize("case", PRINTED, ids=str)
@on_ranks(2)
def test_the_printed_program_is_what_was_planned(api: Api, case: Printed) -> None:
    way = PEER_MEMORY if api.name == "peer_memory" else executed.process_group.GLOO
    _run_as_printed(case, 2, way)


@pytest.mark.ours("not part of the API")
@pytest.mark.parametrize("case", [Printed(2, layers=2), Printed(4, reshard=2)], ids=str)
@on_ranks(4)
def test_printed_programs_with_replicas_and_smaller_groups(api: Api, case: Printed) -> None:
    way = PEER_MEMORY if api.name == "peer_memory" else executed.process_group.GLOO
    _run_as_printed(case, 4, way)


@pytest.mark.ours("not part of the API")
@on_ranks(2)
def test_units_of_several_layers_execute_what_was_planned(api: Api) -> None:
    """The workload of single layers, joined, is what the engine does with lists of layers."""
    torch.manual_seed(0)
    tokens = torch.randint(Transformer.vocab, (2, 8))
    with executed.fresh_pools(), executed.small_limits():
        joined = Transformer(num_blocks=4)
        for number in (0, 3):
            api.fully_shard([*joined.blocks[number : number + 3]], mesh=mesh_of(2))
        api.fully_shard(joined, mesh=mesh_of(2))
        optimizer = torch.optim.AdamW(joined.parameters())

        def step() -> None:
            loss_of(joined, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(6):
            step()
        seen = executed.Executed(joined, optimizer)
        with seen.watching():
            step()
        single = Transformer(num_blocks=4)  # later: ranks keep memory for collectives of all models
        for module in (*single.blocks, single):
            api.fully_shard(module, mesh=mesh_of(2))
        for _ in range(4):
            loss_of(single, tokens).backward()
        workload = executed.observe(single, lambda: loss_of(single, tokens).backward())
        way = PEER_MEMORY if api.name == "peer_memory" else executed.process_group.GLOO
        steps = StepSettings(Sharding(2, way, shard_rank=rank()))
        expected = executed.told(plan_step(group_units(workload, 3), steps))
    both = itertools.zip_longest(map(str, seen.moments), map(str, expected))
    differences = [f"{one}\n   {two}" for one, two in both if one != two]
    assert not differences, "\n".join(differences[:4])
