"""Properties of every planned step: nothing is used before it is there, nothing is left, memory comes to its beginning."""

from __future__ import annotations

import collections
import dataclasses
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.errors import ShardingError
from fullshard.plan.actions import Action, ActionKind, Holding, Lane
from fullshard.plan.layout import ParamSpec
from fullshard.plan.simulator import follow_memory
from fullshard.plan.step import StepSettings, plan_step
from fullshard.plan.unit_plan import Sharding, plan_unit
from fullshard.plan.ways import GLOO, NCCL, PEER_MEMORY, Way
from fullshard.plan.workload import Enter, Event, Leave, Run, Stretch, Workload, WorkloadUnit

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def spec(*shape: int, compute: torch.dtype = torch.float32, trainable: bool = True) -> ParamSpec:
    return ParamSpec("p", shape, torch.float32, compute, trainable=trainable)


def transformer(
    num_blocks: int, width: int, *, compute: torch.dtype = torch.float32, recomputes: bool = False
) -> Workload:
    """Return a root with an embedding and a head around equal blocks; each stretch saves as many bytes as it makes."""
    block = (spec(3 * width, width, compute=compute), spec(width, compute=compute))
    root = (spec(64, width, compute=compute), spec(width, 64, compute=compute))
    units = [WorkloadUnit("", root)]
    units += [WorkloadUnit(f"blocks.{n}", block, recomputes=recomputes) for n in range(num_blocks)]
    events: list[Event] = [Enter(0, is_differentiable=False), Run(0, 0)]
    for number in range(1, num_blocks + 1):
        events += [Enter(number), Run(1, number), Leave(number)]
    events += [Run(2, 0), Leave(0), Run(3, -1)]
    sizes = [
        sum(each.numel for each in params) * compute.itemsize
        for params in (root[:1], block, root[1:])
    ]
    again = {"recomputed_nbytes": 700, "recomputed_peak_nbytes": 800} if recomputes else {}
    stretches = (
        Stretch((), (), saved_nbytes=100, freed_nbytes=100, gradient_nbytes=sizes[0]),
        Stretch((), (), saved_nbytes=200, freed_nbytes=200, gradient_nbytes=sizes[1], **again),
        Stretch((), (), saved_nbytes=300, freed_nbytes=400, gradient_nbytes=sizes[2]),
        Stretch((), (), saved_nbytes=640, freed_nbytes=540),  # the gradient of its input stays
    )
    return Workload(tuple(units), tuple(events), stretches, held_nbytes=17, input_nbytes=40)


@st.composite
def settings(draw: Any) -> StepSettings:
    has_streams = draw(st.booleans())
    ways: list[Way] = [NCCL] if has_streams else [GLOO, PEER_MEMORY]
    shard_size = draw(st.sampled_from([1, 2, 4, 8]))
    sharding = Sharding(
        shard_size,
        draw(st.sampled_from(ways)),
        shard_rank=draw(st.integers(0, shard_size - 1)),
        replicate_size=draw(st.sampled_from([1, 2])),
        is_flat=draw(st.booleans()),
        reduce_dtype=draw(st.none() | DTYPES),
    )
    return StepSettings(
        sharding,
        has_streams=has_streams,
        reshard_after_forward=draw(st.sampled_from([None, True, False, shard_size])),
        forward_prefetch=draw(st.booleans()),
        backward_prefetch=draw(st.sampled_from(["pre", "post", None])),
        num_microbatches=draw(st.integers(1, 3)),
        reduces_each=draw(st.booleans()),
        sums_replicas_last=draw(st.booleans()),
        keeps_between=draw(st.booleans()),
        max_input_buffers=draw(st.integers(1, 3)),
    )


workloads = st.builds(
    transformer,
    st.integers(0, 5),
    st.sampled_from([8, 24, 600]),
    compute=DTYPES,
    recomputes=st.booleans(),
)


@given(workloads, settings())
def test_a_step_ends_with_the_memory_that_it_found(workload: Workload, how: StepSettings) -> None:
    step = plan_step(workload, how)
    level: collections.Counter[tuple[Holding, int]] = collections.Counter()
    for change in step.resident:
        level[change.holding, change.unit] += change.nbytes
    before = dict(level)
    for action in step.actions:
        for change in action.changes:
            level[change.holding, change.unit] += change.nbytes
            assert level[change.holding, change.unit] >= 0
    assert {key: n for key, n in level.items() if n} == before


@given(workloads, settings())
def test_a_unit_computes_when_it_is_gathered_alone(workload: Workload, how: StepSettings) -> None:
    is_there: set[int] = set()
    gathering: dict[int, int] = {}
    step = plan_step(workload, how)
    for index, action in enumerate(step.actions):
        match action.kind:
            case ActionKind.ALL_GATHER:
                assert action.unit not in is_there | gathering.keys()
                gathering[action.unit] = index
            case ActionKind.WAIT if step.actions[action.after[0]].kind is ActionKind.ALL_GATHER:
                assert action.after == (gathering.pop(action.unit),)
                is_there.add(action.unit)
            case ActionKind.RESHARD:
                is_there.remove(action.unit)
            case ActionKind.FORWARD | ActionKind.RECOMPUTE | ActionKind.BACKWARD:
                assert action.unit == -1 or action.unit in is_there
            case _:
                pass
    assert not is_there
    assert not gathering


@given(workloads, settings())
def test_every_unit_is_reduced_as_often_as_asked(workload: Workload, how: StepSettings) -> None:
    step = plan_step(workload, how)
    reduced = collections.Counter(
        a.unit for a in step.actions if a.kind is ActionKind.REDUCE_SCATTER
    )
    times = how.num_microbatches if how.reduces_each else 1
    is_handed_over = plan_unit(workload.units[0].params, how.sharding).is_handed_over
    units = () if is_handed_over else range(len(workload.units))
    assert reduced == dict.fromkeys(units, times)
    summed = collections.Counter(a.unit for a in step.actions if a.kind is ActionKind.ALL_REDUCE)
    if how.sums_replicas_last:
        reduced = collections.Counter(dict.fromkeys(reduced, 1))
    assert summed == (reduced if how.sharding.replicate_size > 1 else {})


@given(workloads, settings())
def test_nothing_is_freed_that_a_lane_still_reads(workload: Workload, how: StepSettings) -> None:
    step = plan_step(workload, how)
    for index, action in enumerate(step.actions):
        assert all(0 <= each < index for each in action.after)
        is_compute = action.lane is Lane.COMPUTE
        if not how.has_streams:
            assert action.host_waits or not is_compute
        elif action.kind is ActionKind.REDUCE_SCATTER:
            # Compute goes on behind the host: it has to wait before it may use the gradients' memory again.
            of_gradients = [c.nbytes for c in action.changes if c.holding is Holding.FULL_GRADIENTS]
            assert how.num_microbatches > 1 or min(of_gradients, default=0) >= 0
            assert not is_compute


@given(workloads, settings())
def test_bytes_that_move_are_those_of_the_layout(workload: Workload, how: StepSettings) -> None:
    for action in plan_step(workload, how).actions:
        if action.kind not in (ActionKind.ALL_GATHER, ActionKind.REDUCE_SCATTER):
            continue
        plan = plan_unit(workload.units[action.unit].params, how.sharding)
        assert action.num_ranks == how.sharding.shard_size
        if action.kind is ActionKind.ALL_GATHER and not how.sharding.shard_way.reads_in_place:
            assert action.nbytes == plan.layout.unsharded_nbytes
        elif action.kind is ActionKind.REDUCE_SCATTER:
            trained = [p for p in workload.units[action.unit].params if p.trainable]
            assert action.nbytes >= sum(p.numel for p in trained) * 2


def test_a_rotation_holds_three_units() -> None:
    workload = transformer(7, 600)
    how = StepSettings(Sharding(4, NCCL), has_streams=True)
    memory = follow_memory(plan_step(workload, how))
    root, block = (
        plan_unit(workload.units[n].params, how.sharding).gathered_nbytes for n in (0, 1)
    )
    unsharded = [level[list(Holding).index(Holding.UNSHARDED)] for level in memory.levels]
    assert max(unsharded) == root + 3 * block
    assert unsharded[-1] == 0


def test_a_step_of_eighty_blocks_is_planned_in_a_moment() -> None:
    workload, how = transformer(80, 600), StepSettings(Sharding(8, NCCL), has_streams=True)
    plan_step(workload, how)
    times = []
    for _ in range(3):
        begun = time.process_time()
        plan_step(workload, how)
        times.append(time.process_time() - begun)
    assert min(times) < 0.1


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Sharding(0, NCCL), "at least 1"),
        (lambda: Sharding(2, NCCL, shard_rank=2), "0 to 1"),
        (lambda: StepSettings(Sharding(2, NCCL), num_microbatches=0), "num_microbatches=0"),
        (lambda: StepSettings(Sharding(2, PEER_MEMORY), has_streams=True), "way=NCCL"),
        (
            lambda: plan_step(
                transformer(2, 8), StepSettings(Sharding(2, GLOO), reshard_after_forward=(True,))
            ),
            "3 units",
        ),
        (
            lambda: plan_step(
                transformer(2, 8), StepSettings(Sharding(4, GLOO), reshard_after_forward=3)
            ),
            "factor of 4",
        ),
    ],
)
def test_impossible_settings_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ShardingError, match=said):
        make()


def test_frozen_units_are_gathered_for_backward_and_not_reduced() -> None:
    workload = transformer(2, 8)
    frozen = tuple(dataclasses.replace(each, trainable=False) for each in workload.units[1].params)
    units = (workload.units[0], workload.units[1]._replace(params=frozen), workload.units[2])
    stretches = (
        workload.stretches[0],
        dataclasses.replace(workload.stretches[1], gradient_nbytes=0),
    )
    events = tuple(
        e._replace(stretch=4) if isinstance(e, Run) and e.unit == 1 else e for e in workload.events
    )
    workload = dataclasses.replace(
        workload, units=units, events=events, stretches=(*workload.stretches, stretches[1])
    )
    step = plan_step(workload, StepSettings(Sharding(2, GLOO)))

    def units_of(kind: ActionKind) -> list[int]:
        return [action.unit for action in step.actions if action.kind is kind]

    assert units_of(ActionKind.ALL_GATHER) == [0, 1, 2, 2, 1]
    assert units_of(ActionKind.REDUCE_SCATTER) == [2, 0]


def test_prefetch_is_what_the_recorder_predicts() -> None:
    """With streams the host runs ahead in forward; in backward the gather before comes early."""

    def order(how: StepSettings) -> list[tuple[str, int]]:
        kinds = (ActionKind.ALL_GATHER, ActionKind.FORWARD, ActionKind.BACKWARD)
        actions: list[Action] = [
            a for a in plan_step(transformer(2, 600), how).actions if a.kind in kinds
        ]
        return [(a.kind.value, a.unit) for a in actions if a.unit > 0]

    forward = [("all-gather", 1), ("forward", 1), ("all-gather", 2), ("forward", 2)]
    early = [("all-gather", 2), ("all-gather", 1), ("backward", 2), ("backward", 1)]
    late = [("all-gather", 2), ("backward", 2), ("all-gather", 1), ("backward", 1)]
    on_device = StepSettings(Sharding(4, NCCL), has_streams=True)
    assert order(on_device) == [*forward, *early]
    assert order(dataclasses.replace(on_device, backward_prefetch=None)) == [*forward, *late]
    ahead = [("all-gather", 1), ("all-gather", 2), ("forward", 1), ("forward", 2)]
    kept = dataclasses.replace(on_device, reshard_after_forward=False)  # which waits for compute
    assert order(kept) == [*ahead, ("backward", 2), ("backward", 1)]
    assert order(StepSettings(Sharding(4, GLOO))) == [*ahead, *early]


def test_a_unit_of_whose_gradients_some_add_up_in_place_is_refused_by_name() -> None:
    wide = ParamSpec("q", (8, 8), torch.float64, torch.float64, trainable=True)
    stretches = tuple(Stretch((), (), gradient_nbytes=n) for n in (256, 512, 256 + 512))
    parts = [(Enter(0), Run(0, 0), Run(1, 0), Leave(0)), (Enter(0), Run(2, 0), Leave(0))]
    apart, at_once = (
        Workload((WorkloadUnit("", (spec(8, 8), wide)),), events, stretches) for events in parts
    )
    settings = StepSettings(Sharding(2, GLOO, reduce_dtype=torch.float32), num_microbatches=2)
    with pytest.raises(ShardingError, match=r"root.*2 micro-batches"):
        plan_step(apart, settings)
    plan_step(apart, dataclasses.replace(settings, reduces_each=True))
    plan_step(at_once, settings)
