"""The checker itself, on races made by hand: it sees each, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fullshard
from fullshard.comm.calls import all_gather
from fullshard.engine.runtime import Lane
from tests.streams.capturing import HostWaitError
from tests.streams.lab import Lab, fake_world
from tests.streams.lanes import HOST, Event, Lanes
from tests.streams.memory import pieces
from tests.streams.recording import DEVICE, NAMED_STALLS

SIDE = Lane.REDUCE
OTHER = Lane.ALL_GATHER


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Yield a virtual device."""
    with Lab() as lab:
        yield lab


@pytest.fixture
def async_lab() -> Iterator[Lab]:
    """Yield a virtual device whose collectives run on their group's lane, as the only rank of 4."""
    with fake_world(), Lab(is_nccl=False) as lab:
        yield lab


def kinds(lab: Lab) -> list[str]:
    """Return what kinds of problems were found, in order."""
    return [problem.partition(":")[0] for problem in lab.problems]


def new(numel: int = 8) -> Tensor:
    return torch.zeros(numel, device=DEVICE)


# Races


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Tensor.zero_, Tensor.clone),
        (Tensor.clone, Tensor.zero_),
        (Tensor.zero_, Tensor.zero_),
    ],
    ids=["write-read", "read-write", "write-write"],
)
def test_a_write_that_no_event_orders_is_a_race(
    lab: Lab, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]
) -> None:
    tensor = new()
    event = lab.lanes.record()
    with lab.lanes.on(SIDE):
        lab.lanes.wait(event)
        first(tensor)
    assert lab.problems == []
    second(tensor)
    assert kinds(lab) == ["race"]
    assert "REDUCE" in lab.problems[0]
    assert "COMPUTE" in lab.problems[0]


def test_two_reads_are_no_race(lab: Lab) -> None:
    tensor = new()
    event = lab.lanes.record()
    for lane in (SIDE, OTHER):
        with lab.lanes.on(lane):
            lab.lanes.wait(event)
            tensor.sum()
    tensor.sum()
    assert lab.problems == []


def test_an_event_orders_what_came_before_it(lab: Lab) -> None:
    tensor = new()
    event = lab.lanes.record()
    with lab.lanes.on(SIDE):
        lab.lanes.wait(event)
        tensor.add_(1)
        is_added = lab.lanes.record()
    lab.lanes.wait(is_added)
    tensor.add_(1)
    assert lab.problems == []


def test_an_event_does_not_order_what_comes_after_it(lab: Lab) -> None:
    tensor = new()
    event = lab.lanes.record()
    tensor.add_(1)
    with lab.lanes.on(SIDE):
        lab.lanes.wait(event)
        tensor.add_(1)
    assert kinds(lab) == ["race"]


def test_order_goes_on_over_a_third_lane(lab: Lab) -> None:
    tensor = new()
    first = lab.lanes.record()
    with lab.lanes.on(OTHER):
        lab.lanes.wait(first)
        second = lab.lanes.record()
    with lab.lanes.on(SIDE):
        lab.lanes.wait(second)
        tensor.add_(1)
    assert lab.problems == []


def test_host_that_waited_orders_all_that_it_starts_later(lab: Lab) -> None:
    tensor = new()
    lab.lanes.finish(lab.lanes.record())
    with lab.lanes.on(SIDE):
        tensor.add_(1)
    assert lab.problems == []
    assert lab.lanes.num_host_waits == 1


def test_an_event_waited_for_before_it_was_recorded_is_an_error(lab: Lab) -> None:
    with lab.lanes.on(SIDE):
        lab.lanes.wait(Event())
    assert "was not recorded yet" in lab.problems[0]


def test_parts_of_one_tensor_are_apart_and_overlapping_views_are_not(lab: Lab) -> None:
    tensor = new(16)
    event = lab.lanes.record()
    with lab.lanes.on(SIDE):
        lab.lanes.wait(event)
        tensor[:8].add_(1)
        tensor.view(4, 4)[:, 3].sum()
    tensor[8:11].add_(1)
    assert lab.problems == []
    tensor[10:].add_(1)
    assert kinds(lab) == ["race"]


def test_interleaved_columns_are_apart(lab: Lab) -> None:
    matrix = new(16).view(4, 4)
    event = lab.lanes.record()
    with lab.lanes.on(SIDE):
        lab.lanes.wait(event)
        matrix[:, :2].add_(1)
    matrix[:, 2:].add_(1)
    assert lab.problems == []
    torch._foreach_add_([matrix[:, 2:], matrix[:, 1:2]], 1.0)
    assert kinds(lab) == ["race"]


def test_views_of_a_storage_share_its_memory(lab: Lab) -> None:
    tensor = new()
    again = torch.empty(0).set_(tensor.untyped_storage(), 4, (4,))
    part = torch.empty(0).set_(tensor.untyped_storage()[16:32], 0, (4,))
    event = lab.lanes.record()
    with lab.lanes.on(SIDE):
        lab.lanes.wait(event)
        again.add_(1)
    assert (again.device, part.device) == (DEVICE, DEVICE)
    part.sum()
    assert kinds(lab) == ["race"]


def test_pieces_of_a_tensor_are_exact() -> None:
    matrix = torch.zeros(3, 4)
    base = matrix.data_ptr()

    def offsets(tensor: Tensor) -> list[tuple[int, int]]:
        return [(start - base, stop - base) for start, stop in pieces(tensor)]

    assert offsets(matrix) == [(0, 48)]
    assert offsets(matrix.T) == [(0, 48)]
    assert offsets(matrix[1]) == [(16, 32)]
    assert offsets(matrix[:, 1:3]) == [(4, 12), (20, 28), (36, 44)]
    assert offsets(matrix[:, 0].expand(2, 3)) == [(0, 4), (16, 20), (32, 36)]
    assert offsets(matrix[:0]) == []
    assert offsets(matrix.flatten()[::5]) == [(0, 4), (20, 24), (40, 44)]


# Reuse


def _read_on_the_side(lab: Lab, tensor: Tensor) -> Event:
    """Let another lane read what compute has made; return an event behind the read."""
    event = lab.lanes.record()
    with lab.lanes.on(SIDE):
        lab.lanes.wait(event)
        tensor.sum()
        return lab.lanes.record()


def test_memory_that_another_lane_touches_may_still_be_used_as_what_it_was(lab: Lab) -> None:
    old = new()
    del old  # compute has yet to zero it, and is given the memory again
    memory = torch.empty(8, device=DEVICE)
    with lab.lanes.on(SIDE):
        memory.zero_()
    assert kinds(lab) == ["born"]


def test_memory_that_another_lane_touches_after_its_home_is_its_own(lab: Lab) -> None:
    old = new()
    del old
    memory = torch.empty(8, device=DEVICE)
    event = lab.lanes.record()
    with lab.lanes.on(SIDE):
        lab.lanes.wait(event)
        memory.zero_()
    assert lab.problems == []


def test_memory_that_goes_while_another_lane_reads_it_is_reused_too_early(lab: Lab) -> None:
    tensor = new()
    _read_on_the_side(lab, tensor)
    del tensor
    assert lab.problems == []  # nothing was allocated since
    new()
    assert kinds(lab) == ["reuse"]


def test_memory_may_go_once_its_home_has_waited(lab: Lab) -> None:
    tensor = new()
    is_read = _read_on_the_side(lab, tensor)
    lab.lanes.wait(is_read)
    del tensor
    new()
    assert lab.problems == []


def test_memory_may_go_if_its_home_waits_before_it_allocates(lab: Lab) -> None:
    tensor = new()
    is_read = _read_on_the_side(lab, tensor)
    del tensor
    lab.lanes.wait(is_read)
    new()
    assert lab.problems == []


def test_memory_goes_back_to_the_lane_that_allocated_it(lab: Lab) -> None:
    with lab.lanes.on(SIDE):
        tensor = new()
        event = lab.lanes.record()
    lab.lanes.wait(event)
    tensor.sum()
    del tensor
    new()  # compute gets other memory
    assert lab.problems == []
    with lab.lanes.on(SIDE):
        new()
    assert kinds(lab) == ["reuse"]


def test_storage_that_is_resized_is_freed_and_allocated(lab: Lab) -> None:
    tensor = new()
    _read_on_the_side(lab, tensor)
    tensor.untyped_storage().resize_(0)
    assert tensor.device == DEVICE
    tensor.untyped_storage().resize_(32)
    assert kinds(lab) == ["reuse"]


# The host


def test_copy_from_the_device_races_with_the_host(lab: Lab) -> None:
    source = new()
    target = torch.empty(8, pin_memory=True)
    with lab.step():
        target.copy_(source, non_blocking=True)
    target.sum()
    assert kinds(lab) == ["race"]
    assert "host reads" in lab.problems[0]


def test_copy_is_over_once_the_host_has_waited(lab: Lab) -> None:
    target = torch.empty(8, pin_memory=True)
    target.copy_(new(), non_blocking=True)
    lab.lanes.finish(lab.lanes.record())
    target.sum()
    assert lab.problems == []


def test_copy_to_the_device_reads_what_the_host_wrote_before(lab: Lab) -> None:
    source = torch.ones(8, pin_memory=True)
    source.add_(1)
    source.to(DEVICE, non_blocking=True)
    assert lab.problems == []
    source.add_(1)
    assert kinds(lab) == ["race"]


def test_copy_of_unpinned_memory_lets_the_host_wait(lab: Lab) -> None:
    source = torch.ones(8)
    source.to(DEVICE, non_blocking=True)
    source.add_(1)
    assert lab.problems == []


def test_host_that_reads_a_value_has_waited(lab: Lab) -> None:
    tensor = new()
    event = lab.lanes.record()
    with lab.lanes.on(SIDE):
        lab.lanes.wait(event)
        assert tensor.add_(1).sum().item() == 8.0
    tensor.add_(1)
    assert lab.problems == []


def _of_the_engine(source: str, name: str = "made_up") -> Callable[[Tensor], object]:
    """Return a function of this body that stands in a file of the engine."""
    names: dict[str, Any] = {}
    text = f"def {name}(tensor):\n    return {source}\n"
    exec(
        compile(text, str(Path(fullshard.__file__).parent / "engine" / "made_up.py"), "exec"), names
    )
    return names[name]


@pytest.mark.parametrize(
    "source",
    [
        "tensor.sum().item()",
        "tensor.tolist()",
        "bool(tensor[0])",
        "tensor.cpu()",
        "tensor.to('cpu', non_blocking=True)",
        "tensor.nonzero()",
        "tensor.equal(tensor)",
        "tensor[tensor > 0]",
        "__import__('torch').accelerator.synchronize()",
        "[each.item() for each in tensor]",
    ],
)
def test_wait_of_the_host_is_an_error_in_the_engine_alone(lab: Lab, source: str) -> None:
    tensor = new()
    _of_the_engine(source)(tensor)  # between steps it may wait
    with lab.step():
        assert lab.problems == []
        _of_the_engine(source, name=next(iter(NAMED_STALLS)))(tensor)
        tensor.sum().item()
        assert lab.problems == []
        _of_the_engine(source)(tensor)
    assert kinds(lab) == ["host"]


def test_events_that_the_host_waits_for_in_a_step_are_counted(lab: Lab) -> None:
    lab.lanes.finish(lab.lanes.record())
    with lab.step():
        pass
    assert lab.problems == []
    with lab.step():
        lab.lanes.finish(lab.lanes.record())
    assert kinds(lab) == ["host"]


def test_waits_of_the_host_are_named_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    assert [name for name in NAMED_STALLS if f"`{name}`" not in page] == []


def test_tensors_are_where_programs_put_them(lab: Lab) -> None:
    there, here = new(), torch.zeros(8)
    assert (there.device, here.device) == (DEVICE, torch.device("cpu"))
    assert (there.is_cuda, there.is_cpu, here.is_cuda, here.is_cpu) == (True, False, False, True)
    for moved in (here.to(DEVICE), here.to(there), here.cuda(), here.to("cuda", torch.float64)):
        assert moved.device == DEVICE
        assert (moved + 1).view(2, 4)[1].device == DEVICE
    for back in (
        there.cpu(),
        there.to("cpu"),
        there.to(here),
        torch.empty_like(there, device="cpu"),
    ):
        assert back.device.type == "cpu"
    assert there.to(torch.float64).device == DEVICE
    assert there.to(DEVICE) is there
    pinned = torch.zeros(8, pin_memory=True)
    assert (pinned.is_pinned(), here.is_pinned(), pinned[2:].is_pinned()) == (True, False, True)
    assert lab.problems == []


# Collectives


def _gather(target: Tensor, source: Tensor, *, async_op: bool) -> dist.Work | None:
    return all_gather(target, source, async_op=async_op)


def test_collective_is_over_once_it_was_waited_for(async_lab: Lab) -> None:
    source, target = new(2), new(8)
    work = _gather(target, source, async_op=True)
    assert work is not None
    work.wait()
    target.sum()
    source.add_(1)
    assert async_lab.problems == []


def test_collective_that_nobody_waited_for_races(async_lab: Lab) -> None:
    source, target = new(2), new(8)
    work = _gather(target, source, async_op=True)
    assert work is not None
    source.sum()
    assert async_lab.problems == []
    target.sum()
    assert kinds(async_lab) == ["race"]


def test_collective_keeps_its_memory_until_it_was_waited_for(async_lab: Lab) -> None:
    source, target = new(2), new(8)
    work = _gather(target, source, async_op=True)
    del source
    assert kinds(async_lab) == ["keep"]
    assert work is not None
    work.wait()


def test_collective_without_work_runs_on_the_lane_that_calls_it(async_lab: Lab) -> None:
    source, target = new(2), new(8)
    event = async_lab.lanes.record()
    with async_lab.lanes.on(SIDE):
        async_lab.lanes.wait(event)
        _gather(target, source, async_op=False)
        is_gathered = async_lab.lanes.record()
    async_lab.lanes.wait(is_gathered)
    target.sum()
    assert async_lab.problems == []
    with async_lab.lanes.on(OTHER):
        async_lab.lanes.wait(event)
        target.sum()
    assert kinds(async_lab) == ["race"]


# Captures


def test_captured_work_is_done_by_replays_alone(lab: Lab) -> None:
    tensor, number = new(), torch.tensor(2.0)
    with lab.capturing() as graph:
        doubled = tensor.add_(number) * 2
    assert lab.problems == []
    assert tensor.sum() == 0
    assert doubled.isnan().all()
    number.fill_(9.0)  # it went with the launch
    for count in (1, 2, 3):
        graph.replay()
        assert tensor.sum() == 16 * count
        assert doubled.sum() == 32 * count
    assert lab.problems == []


def test_replays_draw_new_random_numbers(lab: Lab) -> None:
    tensor = new()
    with lab.capturing() as graph:
        torch.nn.functional.dropout(tensor.fill_(1.0), inplace=True)
    torch.manual_seed(3)
    seen = []
    for _ in range(4):
        graph.replay()
        seen.append(tensor.tolist())
    assert len(set(map(tuple, seen))) > 1
    torch.manual_seed(3)
    assert seen[0] == torch.nn.functional.dropout(torch.ones(8)).tolist()


def test_memory_of_a_graph_holds_nothing_from_one_replay_to_the_next(lab: Lab) -> None:
    out = new()
    with lab.capturing() as graph:
        left = torch.empty(8, device=DEVICE)
        out.copy_(left)  # what the last replay has left
        left.fill_(1.0)
        kept = torch.ones(8, device=DEVICE)
        del left
    for _ in range(2):
        graph.replay()
        assert out.isnan().all()
        assert kept.sum() == 8
    assert lab.problems == []


def test_storage_of_a_graph_that_is_resized_leaves_its_memory_there(lab: Lab) -> None:
    out, tensor = new(), new()
    with lab.capturing() as graph:
        storage = (tensor + 1).untyped_storage()
        out.copy_(torch.empty(0, device=DEVICE).set_(storage, 0, (8,)))
        storage.resize_(0)
        storage.resize_(32)
    graph.replay()
    assert out.sum() == 8
    assert lab.problems == []


def test_lanes_that_follow_a_capture_are_part_of_it_and_have_to_be_joined(lab: Lab) -> None:
    tensor = new()

    def on_the_side() -> Event:
        event = lab.lanes.record()
        with lab.lanes.on(SIDE):
            lab.lanes.wait(event)
            tensor.add_(1)
            return lab.lanes.record()

    with lab.capturing() as graph:
        lab.lanes.wait(on_the_side())
    graph.replay()
    assert tensor.sum() == 8
    assert lab.problems == []
    with lab.capturing():
        on_the_side()
    assert kinds(lab) == ["capture"]
    assert "REDUCE was forked, and is not joined" in lab.problems[0]


@pytest.mark.parametrize("allocates", [True, False])
def test_work_on_a_lane_outside_of_a_capture_is_an_error(lab: Lab, allocates: bool) -> None:
    tensor = new()
    with lab.capturing(), lab.lanes.on(SIDE):
        new() if allocates else tensor.add_(1)
    assert set(kinds(lab)) == {"capture"}
    assert "on REDUCE, which is not part of the capture" in lab.problems[0]


def test_events_do_not_pass_the_borders_of_a_capture(lab: Lab) -> None:
    before = lab.lanes.record()
    with lab.capturing():
        within = lab.lanes.record()
        lab.lanes.wait(within)
        assert lab.problems == []
        lab.lanes.wait(before)
    assert "from outside of the capture" in lab.problems[0]
    lab.lanes.wait(within)
    assert "of a capture that is over" in lab.problems[1]
    assert len(lab.problems) == 2


@pytest.mark.parametrize(
    "wait",
    [
        lambda lab, tensor: tensor.sum().item(),
        lambda lab, tensor: lab.lanes.finish(lab.lanes.record()),
        lambda lab, tensor: tensor.copy_(torch.ones(8)),
    ],
    ids=["value", "event", "copy"],
)
def test_wait_of_the_host_ends_a_capture_wherever_it_is(
    lab: Lab, wait: Callable[[Lab, Tensor], object]
) -> None:
    tensor = new()
    with pytest.raises(HostWaitError), lab.capturing():
        wait(lab, tensor)
    assert kinds(lab) == ["capture"]
    assert tensor.sum() == 0


@pytest.mark.parametrize("is_within", [True, False])
def test_memory_from_before_a_capture_has_to_stay_as_long_as_the_graph(
    lab: Lab, is_within: bool
) -> None:
    kept, dropped = new(), [new()]
    with lab.capturing() as graph:
        kept.add_(dropped[0])
        if is_within:
            dropped.clear()
    if not is_within:
        graph.replay()
        assert lab.problems == []
        dropped.clear()
    graph.replay()
    assert "lost is memory that a replay uses" in lab.problems[0]


def test_replay_races_as_the_operations_in_it(lab: Lab) -> None:
    read, written = new(), new()
    with lab.capturing() as graph:
        written.add_(read)
    event = lab.lanes.record()
    with lab.lanes.on(SIDE):
        lab.lanes.wait(event)
        read.sum()
        graph.replay()
    assert lab.problems == []
    read.sum()
    assert lab.problems == []
    written.sum()
    assert kinds(lab) == ["race"]


# Clocks


def test_clocks_count_operations_by_lane() -> None:
    problems: list[str] = []
    lanes = Lanes(problems.append)
    first = lanes.run()
    with lanes.on(SIDE):
        lanes.wait(lanes.record())
        second = lanes.run()
    assert (first.number, second.number) == (1, 1)
    assert not second.follows(Lane.COMPUTE, 1)
    lanes.run(HOST)
    third = lanes.run()
    assert third.number == 2
    assert third.follows(HOST, 1)
    assert not third.follows(SIDE, 1)
    assert problems == []
