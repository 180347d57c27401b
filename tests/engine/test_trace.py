"""`fullshard.trace` records what happens, and changes nothing by it."""

from __future__ import annotations

import collections
import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard.engine.runtime import Runtime
from fullshard.optim.shard_step import num_dtensors_of
from fullshard.plan.trace import Kind, Pause, RankTrace, read_traces
from fullshard.watch.trace import starved
from tests.api import Api
from tests.harness import on_ranks
from tests.training import make_batch

pytestmark = pytest.mark.ours("not part of the API")

STEPS = 3
COMPUTE = (Kind.FORWARD, Kind.BACKWARD)


class Training:
    """A small model, sharded with one API or the other, that takes the same steps every time."""

    def __init__(self, api: Api, style: str) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        if style == "wrapper":
            policy = api.ModuleWrapPolicy({nn.Linear})
            self.model = api.FullyShardedDataParallel(self.model, auto_wrap_policy=policy)
        else:
            for layer in self.model:
                if isinstance(layer, nn.Linear):
                    api.fully_shard(layer)
            api.fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> float:
        """Train on the same batch again and return the loss."""
        loss = self.model(make_batch(16)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def read(folder: Path) -> RankTrace:
    """Return what this rank has recorded."""
    dist.barrier()
    traces = read_traces(folder)
    assert [trace.rank for trace in traces] == list(range(dist.get_world_size()))
    assert len({trace.recording for trace in traces}) == 1
    return traces[dist.get_rank()]


@on_ranks(2)
@pytest.mark.parametrize("style", ["fully_shard", "wrapper"])
def test_every_unit_is_gathered_and_reduced_as_often_as_it_should_be(
    api: Api, tmp_path: Path, style: str
) -> None:
    training = Training(api, style)
    training.step()
    with api.trace(training.model, tmp_path, optimizer=training.optimizer):
        for _ in range(STEPS):
            training.step()
    trace = read(tmp_path)
    counts = collections.Counter(
        (moved.kind, trace.unit_name(moved.unit)) for moved in trace.transfers
    )
    units = [name for name in ("0", "2") if name in {unit.name for unit in trace.units}]
    assert len(units) == len(trace.units) == 2
    for unit in units:
        assert counts.pop((Kind.ALL_GATHER, unit)) == 2 * STEPS  # for forward and for backward
        assert counts.pop((Kind.REDUCE_SCATTER, unit)) == STEPS
    assert not counts
    assert bool(trace.num_dtensors) == (style == "fully_shard")
    if style == "fully_shard":
        assert num_dtensors_of(fullshard.step_on_shards(training.optimizer)) == 0
    assert {moved.nbytes for moved in trace.transfers} == {
        unit.unsharded_nbytes for unit in trace.units
    }


@on_ranks(2)
def test_the_timeline_covers_every_step_without_gaps(api: Api, tmp_path: Path) -> None:
    training = Training(api, "fully_shard")
    training.step()
    with api.trace(training.model, tmp_path, optimizer=training.optimizer, first_step=7):
        for _ in range(STEPS):
            training.step()
    trace = read(tmp_path)
    assert [step.number for step in trace.steps] == [7, 8, 9]
    assert trace.timeline[0].start == trace.steps[0].start
    assert trace.timeline[-1].end == trace.steps[-1].end
    for before, after in itertools.pairwise(trace.timeline):
        assert before.end == after.start
    for step in trace.steps:
        inside = [each for each in trace.timeline if step.start <= each.start < step.end]
        assert sum(each.end - each.start for each in inside) == step.end - step.start
        done = collections.Counter((e.kind, trace.unit_name(e.unit)) for e in inside)
        for unit in ("0", "2"):
            assert done[Kind.FORWARD, unit] > 0
            assert done[Kind.BACKWARD, unit] > 0
        assert done[Kind.OPTIMIZER, ""] > 0
        assert done[Kind.FENCE, ""] > 0
    for transfer in trace.transfers:
        assert any(s.start <= transfer.start <= transfer.end <= s.end for s in trace.steps)


@on_ranks(2)
@pytest.mark.parametrize("style", ["fully_shard", "wrapper"])
def test_tracing_changes_no_loss_and_ends(api: Api, tmp_path: Path, style: str) -> None:
    expected_of, training = Training(api, style), Training(api, style)
    expected = [expected_of.step() for _ in range(5)]
    losses = [training.step()]
    with api.trace(training.model, tmp_path, optimizer=training.optimizer):
        losses += [training.step(), training.step()]
    own = tmp_path / f"rank{dist.get_rank():05d}.json"
    written = own.stat().st_mtime_ns
    losses += [training.step(), training.step()]
    assert losses == expected
    assert own.stat().st_mtime_ns == written
    hooks = (
        training.optimizer._optimizer_step_pre_hooks,
        training.optimizer._optimizer_step_post_hooks,
    )
    assert not any(hooks)


@on_ranks(2)
def test_memory_is_what_the_tensors_take(api: Api, tmp_path: Path) -> None:
    training = Training(api, "fully_shard")
    for _ in range(3):  # shards are read in place once it is known that nobody writes there
        training.step()
    with api.trace(training.model, tmp_path, optimizer=training.optimizer):
        training.step()
    trace = read(tmp_path)
    shards = sum(p.to_local().nbytes for p in training.model.parameters())
    whole = sum(p.numel() * 4 for p in training.model.parameters())
    most = {
        category: max(sample.nbytes[index] for sample in trace.samples)
        for index, category in enumerate(trace.categories)
    }
    last = dict(zip(trace.categories, trace.samples[-1].nbytes, strict=True))
    steps = 4 * 4  # one number for each parameter
    assert most["sharded parameters"] == most["gradient shards"] == shards
    assert most["optimizer state"] == 2 * shards + steps
    # Weight and bias of one layer at a time.
    assert 16 * 24 * 4 <= most["full gradients"] < whole
    # What ranks read in place takes none; small buffers are kept.
    is_in_place = api.name == "peer_memory"
    assert most["unsharded parameters"] == 0 if is_in_place else most["unsharded parameters"] > 0
    assert most["unsharded parameters"] <= whole
    # Input, first layer's result and activation; the loss needs the output, and drops it before a unit's backward.
    rows = make_batch(16).size(0)
    assert most["saved for backward"] == rows * (16 + 24 + 24 + 16) * 4
    assert last["saved for backward"] == last["full gradients"] == 0


@on_ranks(2)
@pytest.mark.parametrize("style", ["fully_shard", "wrapper"])
def test_memory_between_steps_is_what_memory_report_counts(
    api: Api, tmp_path: Path, style: str
) -> None:
    training = Training(api, style)
    training.step()  # allocates
    with api.trace(training.model, tmp_path, optimizer=training.optimizer) as tracing:
        training.step()
        tracing.step()
        report = api.memory_report(training.model, training.optimizer).to_dict()["categories"]
    traced = dict(zip(read(tmp_path).categories, read(tmp_path).samples[-1].nbytes, strict=True))
    for category in ("sharded parameters", "optimizer state", "unsharded parameters"):
        assert traced[category] == report[category]
    assert traced["gradient shards"] == report["gradient shards"] + report["kept for gradients"]
    assert traced["communication"] == report["communication"]


@on_ranks(2)
def test_steps_end_where_the_script_says_so(api: Api, tmp_path: Path) -> None:
    training = Training(api, "fully_shard")
    with api.trace(training.model, tmp_path, optimizer=training.optimizer) as tracing:
        training.step()
        training.step()  # one step of two updates
        tracing.step()
        torch.randn(300, 300).mm(torch.randn(300, 300))
        tracing.skip()
        training.step()
        tracing.step()
    first, second = read(tmp_path).steps
    assert first.end < second.start


@on_ranks(2)
def test_runs_of_the_garbage_collector_are_recorded(api: Api, tmp_path: Path) -> None:
    training = Training(api, "fully_shard")
    before = list(gc.callbacks)
    with api.trace(training.model, tmp_path, optimizer=training.optimizer):
        training.step()
        if dist.get_rank() == 0:
            gc.collect()
        training.step()
    assert gc.callbacks == before
    trace = read(tmp_path)
    step = trace.steps[1]
    collected = [p for p in trace.pauses if step.start < p.start < p.end < step.end]
    assert max((p.end - p.start for p in collected), default=0) > 1e5 or dist.get_rank() == 1
    assert trace.num_alloc_retries is None  # the CPU has no such allocator


@on_ranks(2)
def test_retries_of_the_allocator_are_those_of_the_recording(api: Api, tmp_path: Path) -> None:
    training = Training(api, "fully_shard")
    counted = iter([5, 8])  # before and after
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runtime, "num_alloc_retries", property(lambda _: next(counted)))
        with api.trace(training.model, tmp_path, optimizer=training.optimizer):
            training.step()
    assert read(tmp_path).num_alloc_retries == 3


@on_ranks(2)
def test_only_an_earlier_trace_is_removed(api: Api, tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        (tmp_path / "ranking.json").write_text("[]")
        (tmp_path / "rank00007.json").write_text("{}")
    training = Training(api, "fully_shard")
    dist.barrier()
    with api.trace(training.model, tmp_path):
        training.step()
    dist.barrier()
    assert [trace.num_ranks for trace in read_traces(tmp_path)] == [2, 2]
    assert (tmp_path / "ranking.json").read_text() == "[]"
    assert not (tmp_path / "rank00007.json").exists()


@on_ranks(2)
def test_without_optimizer_and_marks_the_block_is_one_step(api: Api, tmp_path: Path) -> None:
    training = Training(api, "fully_shard")
    with api.trace(training.model, tmp_path):
        training.step()
        training.step()
    trace = read(tmp_path)
    assert len(trace.steps) == 1
    assert trace.steps[0].end == trace.timeline[-1].end
    assert Kind.OPTIMIZER not in {segment.kind for segment in trace.timeline}


@on_ranks(2)
def test_an_exception_in_a_step_leaves_the_rest_traced(api: Api, tmp_path: Path) -> None:
    training = Training(api, "fully_shard")
    training.step()
    with api.trace(training.model, tmp_path) as tracing:
        handle = training.model[2].register_forward_pre_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            training.step()
        handle.remove()
        tracing.skip()
        training.step()
        tracing.step()
    trace = read(tmp_path)
    (step,) = trace.steps
    inside = [moved for moved in trace.transfers if moved.start >= step.start]
    assert collections.Counter(moved.kind for moved in inside) == {
        Kind.ALL_GATHER: 4,
        Kind.REDUCE_SCATTER: 2,
    }
    assert dict(zip(trace.categories, trace.samples[-1].nbytes, strict=True))["full gradients"] == 0


@on_ranks(2)
def test_an_exception_that_leaves_the_block_detaches_and_writes_nothing(
    api: Api, tmp_path: Path
) -> None:
    training = Training(api, "fully_shard")
    with pytest.raises(ZeroDivisionError), api.trace(training.model, tmp_path):
        _fail()
    assert not list(tmp_path.iterdir())
    with api.trace(training.model, tmp_path):
        training.step()
    assert read(tmp_path).transfers


@on_ranks(2)
def test_recomputation_belongs_to_backward(api: Api, tmp_path: Path) -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Recomputed())
    api.fully_shard(model[0])
    api.fully_shard(model[1].inner)
    api.fully_shard(model)
    with api.trace(model, tmp_path):
        model(make_batch(16)).sum().backward()
    trace = read(tmp_path)
    counts = collections.Counter(moved.kind for moved in trace.transfers)
    assert counts == {Kind.ALL_GATHER: 4, Kind.REDUCE_SCATTER: 2}
    kinds = [segment.kind for segment in trace.timeline if segment.kind in COMPUTE]
    assert kinds == sorted(kinds, key=COMPUTE.index), "no forward after a backward"


@on_ranks(2)
def test_a_model_that_cannot_be_traced_is_refused(api: Api, tmp_path: Path) -> None:
    with pytest.raises(api.StateError, match="nothing to trace"):
        api.trace(nn.Linear(2, 2), tmp_path / "a").__enter__()
    training = Training(api, "fully_shard")
    with (
        api.trace(training.model, tmp_path / "b"),
        pytest.raises(api.StateError, match="being traced already"),
        api.trace(training.model, tmp_path / "c"),
    ):
        pass
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "c").exists()


@on_ranks(2)
def test_what_autograd_saves_is_not_kept_alive(api: Api, tmp_path: Path) -> None:
    training = Training(api, "fully_shard")
    with api.trace(training.model, tmp_path, optimizer=training.optimizer) as tracing:
        training.step()
        output = training.model(make_batch(16))
        saved = tracing._tracer._meter.saved
        assert saved.nbytes > 0
        del output
        gc.collect()
        assert saved.nbytes == 0


@on_ranks(2)
def test_profilers_see_labels_only_while_they_run(api: Api) -> None:
    training = Training(api, "fully_shard")
    training.step()
    # Without `acc_events`, torch before 2.13 warns that events of one cycle are all there are.
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as profile:
        training.step()
    names = collections.Counter(event.name for event in profile.events())
    for unit in ("0", "2"):
        assert names[f"FSDP::all_gather ({unit})"] == 2
        assert names[f"FSDP::reduce_scatter ({unit})"] == 1
    training.step()
    assert training.model[0]._fullshard_hooks.state.units[0].observer is None


def test_a_device_that_comes_at_once_to_what_is_queued_waits_for_its_host() -> None:
    queued = [1000 * n for n in (0, 1000, 2000, 3000, 4000, 5000)]
    late = [1000 * n for n in (0, 5, 10, 900, 10, 900)]
    reached = [put + by for put, by in zip(queued, late, strict=True)]
    assert [*starved(queued, reached)] == [Pause(0, 2_010_000)]
    assert [*starved([], reached)] == []  # on the CPU


def _fail(*_: Any) -> None:
    raise ZeroDivisionError
