"""Every program of `programs` on a virtual device: all that moves between lanes is ordered.

Nothing here computes on a GPU, or compares values: other tests do. What is tested is what no result
shows, unless by chance: that no two lanes touch one byte without an event between them, that no lane
is given memory that another one uses, and that the host waits for nothing it need not wait for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast
from unittest import mock

import pytest

from fullshard.engine.gradients.queue import ReductionQueue
from fullshard.engine.params.buffers import UnitBuffers
from fullshard.engine.runtime import Lane, Runtime
from tests.models import PROBLEMS
from tests.releases import RELEASE
from tests.selection import repeats
from tests.streams.lab import fake_world
from tests.streams.lanes import VirtualRuntime
from tests.streams.programs import PROGRAMS, SMALL, run_program
from tests.streams.programs.common import NUM_STEPS
from tests.streams.recording import DEVICE

# Beside the models that train like one process in tests/parity.
MODELS = (*PROBLEMS, "tied_transformer", "partly_frozen", "two_dtypes", "deep")
# One flat parameter has one dtype, and is trained or not.
NOT_FLAT = {"partly_frozen", "two_dtypes"}
MATRIX = [
    pytest.param(name, model, id=f"{name}-{model}")
    for name in PROGRAMS
    for model in MODELS
    if not (name.startswith("flat") and model in NOT_FLAT)
]


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    """Be one rank of four; the others answer at once."""
    with fake_world():
        yield


def _has_twin(name: str) -> bool:
    """Whether the program trains a flat parameter, and another does the same with its pieces."""
    return name.startswith("flat-") and name.replace("flat", "pieces", 1) in PROGRAMS


def _is_again(name: str) -> bool:
    """Whether another program does nearly the same: over another backend, in another dtype, or (25 s long) in one pass."""
    program, _, how = name.rpartition("-")
    is_long = how == "accumulate" and program.startswith("state-on-host")
    return (how in ("async", "bf16") or is_long) and program in {*PROGRAMS} - {"plain", "pieces"}


@repeats(lambda settings: _has_twin(settings["name"]) or _is_again(settings["name"]))
@pytest.mark.parametrize("name", PROGRAMS)
def test_everything_is_ordered(name: str) -> None:
    assert run_program(name, SMALL).problems == []


@pytest.mark.long
@pytest.mark.parametrize(("name", "model"), MATRIX)
def test_everything_is_ordered_with_every_model(name: str, model: str) -> None:
    assert run_program(name, model).problems == []


def test_nothing_is_compared_with_shards_between_micro_batches() -> None:
    with mock.patch.object(UnitBuffers, "holds_shards", side_effect=AssertionError):
        assert run_program("kept-between-micro-batches", SMALL).problems == []


@pytest.mark.parametrize("name", ["hsdp", "reduced-twice-hsdp"])
def test_compute_waits_for_sums_over_replicas_at_the_end_of_backward_alone(name: str) -> None:
    release, waited = ReductionQueue.release, []

    def releasing(queue: ReductionQueue) -> None:
        lanes = cast(VirtualRuntime, Runtime.of(DEVICE)).lanes
        before, own = (dict(lanes.clock(each)) for each in (Lane.COMPUTE, Lane.ALL_REDUCE))
        release(queue)
        waited.append((before.get(Lane.ALL_REDUCE, 0), own[Lane.ALL_REDUCE]))
        assert lanes.clock(Lane.COMPUTE)[Lane.ALL_REDUCE] == own[Lane.ALL_REDUCE]

    with mock.patch.object(ReductionQueue, "release", releasing):
        assert run_program(name, "deep").problems == []
    assert len(waited) == NUM_STEPS
    # What it knew before the end of a backward is the end of the one before.
    assert [before for before, _ in waited] == [0, *(end for _, end in waited[:-1])]


def test_a_unit_of_two_dtypes_is_gathered_by_one_call() -> None:
    lab = run_program("plain", "two_dtypes")
    assert lab.problems == []
    # Two units, gathered in forward and in backward. Sums are apart, as each has one dtype.
    num_calls = lab.collectives.num_calls
    assert num_calls["all_gather"] == 4 * NUM_STEPS
    assert num_calls["reduce_scatter"] == 4 * NUM_STEPS


@pytest.mark.parametrize(("name", "others"), [("plain", set()), ("hsdp", {"ALL_REDUCE"})])
def test_lanes_run_what_they_are_for(name: str, others: set[str]) -> None:
    lab = run_program(name, SMALL)
    lanes = {str(lane).rpartition(".")[2] for lane in lab.recorder.num_operations}
    # torch 2.11 does not hand on the options of coalesced all-gathers, which then run, and are
    # waited for, on their group's lane.
    if RELEASE < (2, 12):
        lanes = {lane for lane in lanes if not lane.startswith("group")}
    assert lanes == {"COMPUTE", "ALL_GATHER", "REDUCE", "host", *others}
