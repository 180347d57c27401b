"""`fullshard.trace` records where the time and memory of training steps go.

`Tracer` turns what the engine tells an `Observer` into one timeline (see `plan.trace`). The
timeline shows, at every moment, the innermost activity that has begun and not ended.

On the CPU, moments are read from the clock. On other devices they are events on the streams, whose
times are read when the recording is over, so that recording never makes the host wait. A wait for a
collective is then the time between two events on the compute stream, one before it and one after.

Runs of the garbage collector are noted beside the timeline, by the host's clock: they are within whatever
is open, and hold up all of the process.
"""

import collections
import contextlib
import itertools
import os
import platform
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from fullshard.engine.iteration import Iteration
from fullshard.engine.module_state import state_of
from fullshard.engine.observer import Observer, ProfilerLabels
from fullshard.engine.runtime import Lane, Runtime
from fullshard.engine.unit import Unit
from fullshard.errors import StateError
from fullshard.host import boot_id
from fullshard.optim.shard_step import num_dtensors_of
from fullshard.plan.trace import (
    CATEGORIES,
    NO_UNIT,
    Clock,
    Kind,
    Pause,
    RankTrace,
    Sample,
    Segment,
    TracedStep,
    TracedUnit,
    Transfer,
    trace_files,
)
from fullshard.process_hooks import COLLECTIONS
from fullshard.watch.trace_memory import MemoryMeter

Moment = int | torch.Event

# The CPU cannot tell when a transfer ended; the end of the wait for it stands for that.
_ENDS_WITH = {
    Kind.WAIT_ALL_GATHER: Kind.ALL_GATHER,
    Kind.WAIT_REDUCE_SCATTER: Kind.REDUCE_SCATTER,
}
# An event takes some 10 us on its way to an idle device, and clocks drift during a recording.
_AT_ONCE_NS = 100_000
_LANE = {Kind.ALL_GATHER: Lane.ALL_GATHER, Kind.REDUCE_SCATTER: Lane.REDUCE}


class _Moments:
    """Takes moments during the recording, and gives their times afterwards.

    Times are in nanoseconds after ``origin_ns`` on this host's clock. error_ns: how far the ranks'
    clocks may be apart. Construction is collective: ranks leave a barrier together.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.error_ns = self._meet()
        self._anchor = self.take() if runtime.has_streams else None
        self.origin_ns = time.perf_counter_ns()

    def take(self, lane: Lane = Lane.COMPUTE) -> Moment:
        if not self._runtime.has_streams:
            return time.perf_counter_ns()
        with self._runtime.on(lane):
            event = torch.Event(self._runtime.device.type, enable_timing=True)
            event.record(torch.accelerator.current_stream(self._runtime.device))
        return event

    def finish(self) -> None:
        """Wait until every moment taken so far has passed on the device."""
        if self._runtime.has_streams:
            torch.accelerator.synchronize(self._runtime.device)

    def resolve(self, moment: Moment) -> int:
        if isinstance(moment, int):
            return moment - self.origin_ns
        assert isinstance(self._anchor, torch.Event)
        return round(self._anchor.elapsed_time(moment) * 1e6)

    def _meet(self) -> int:
        """Leave a barrier together; return how long a second one took, when all ranks were near."""
        if dist.get_world_size() == 1:
            self.finish()
            return 0
        dist.barrier()
        self.finish()
        entered = time.perf_counter_ns()
        dist.barrier()
        self.finish()
        return time.perf_counter_ns() - entered


class Tracer(Observer):
    """Records one rank from its construction until `result`. Construction is collective."""

    def __init__(self, units: Sequence[Unit], runtime: Runtime, meter: MemoryMeter) -> None:
        self._units = list(units)
        self._number = {id(unit): number for number, unit in enumerate(self._units)}
        self._meter = meter
        self._labels = ProfilerLabels()
        self._stack: list[tuple[Kind, int]] = []
        # Each moment at which the innermost activity changed, and the activity from then on.
        self._turns: list[tuple[Moment, Kind, int]] = []
        self._queued_at: list[
            int
        ] = []  # when the host came to each of them, where there are streams
        self._samples: list[tuple[Moment, tuple[int, ...]]] = []
        self._open: dict[tuple[Kind, int], collections.deque[tuple[Moment, Moment]]]
        self._open = collections.defaultdict(collections.deque)
        self._transfers: list[tuple[Kind, int, tuple[Moment, Moment], Moment]] = []
        self._steps: list[tuple[Moment, Moment]] = []
        self._optimizer_ends: list[Moment] = []
        self._gradient_nbytes = [
            unit.gradients.buckets.layout().unsharded_nbytes for unit in self._units
        ]
        self._runtime = runtime
        self._moments = _Moments(runtime)
        self._num_retries = runtime.num_alloc_retries
        self._collected_since: int | None = None
        self._pauses: list[Pause] = []
        self._step_start = self._turn()

    # Called by the engine (`Observer`)

    def begin(self, kind: Kind, of: Any = None) -> None:
        unit = self._number.get(id(of), NO_UNIT)
        self._stack.append((kind, unit))
        now = self._turn()
        self._labels.begin(kind, of)
        if kind in _ENDS_WITH.values():
            # The collective runs on its lane, and not before what compute has done by now.
            lane_now = self._moments.take(_LANE[kind]) if self._runtime.has_streams else now
            self._open[kind, unit].append((now, lane_now))

    def end(self) -> None:
        if not self._stack:
            return  # `forget` was called in between, because of an exception
        kind, unit = self._stack.pop()
        self._labels.end()
        if kind is Kind.ALL_GATHER:
            self._meter.count_unsharded(self._units[unit])
            # The pass that began has freed what nobody used.
            self._meter.count_gradient_shards(self._units[unit])
        elif kind in (Kind.REDUCE_SCATTER, Kind.WAIT_REDUCE_SCATTER):
            self._meter.count_full_gradients(self._units[unit])
            self._meter.count_gradient_shards(self._units[unit])
        now = self._turn()
        if kind is Kind.ALL_GATHER and self._runtime.has_streams:
            self._close(kind, unit, self._moments.take(Lane.ALL_GATHER))
        elif kind in _ENDS_WITH:
            carried = _ENDS_WITH[kind]
            self._close(
                carried,
                unit,
                self._moments.take(_LANE[carried]) if self._runtime.has_streams else now,
            )

    def enter(self, kind: Kind, units: Sequence[Any]) -> None:
        for unit in units:
            entry = (kind, self._number.get(id(unit), NO_UNIT))
            if entry not in self._stack:
                self._stack.append(entry)
                self._turn()

    def leave(self, kind: Kind, units: Sequence[Any]) -> None:
        for open_kind, number in self._stack:
            if open_kind is Kind.BACKWARD:  # any unit in backward may have got gradients
                self._meter.count_full_gradients(self._units[number])
        for unit in units:
            entry = (kind, self._number.get(id(unit), NO_UNIT))
            if entry in self._stack:
                self._stack.remove(entry)
                self._turn()

    def changed(self, unit: Any) -> None:
        self._meter.count_unsharded(unit)
        self._sample(None)

    def forget(self) -> None:
        self._stack.clear()
        self._open.clear()
        self._labels.forget()
        self._turn()

    # Called by Python's garbage collector

    def note_collection(self, phase: str, _: dict[str, int]) -> None:
        """Note when the garbage collector starts and stops."""
        now = time.perf_counter_ns() - self._moments.origin_ns
        if phase == "start":
            self._collected_since = now
        elif self._collected_since is not None:
            self._pauses.append(Pause(self._collected_since, now))
            self._collected_since = None

    # Called by the user, or by hooks of the user's optimizer

    def begin_optimizer(self, *_: Any) -> None:
        self.begin(Kind.OPTIMIZER)

    def end_optimizer(self, *_: Any) -> None:
        self._meter.count_optimizer()
        self.end()
        self._optimizer_ends.append(self._turns[-1][0])

    def end_step(self) -> None:
        self._steps.append((self._step_start, self._turn()))
        self.start_step()

    def start_step(self) -> None:
        self._meter.count_all()
        self._step_start = self._turn()

    def result(
        self, *, recording: str, first_step: int, optimizer: torch.optim.Optimizer | None = None
    ) -> RankTrace:
        """Return the recording until now. Waits for the device."""
        end = self._turn()
        retries, before = self._runtime.num_alloc_retries, self._num_retries
        self._moments.finish()
        resolve = self._moments.resolve
        # A user may compute on several streams, so events can be slightly out of order.
        times = list(itertools.accumulate((resolve(turn[0]) for turn in self._turns), max))
        bounds = [self._turns[0][0], *(self._optimizer_ends or [end])]
        steps = [
            TracedStep(first_step + number, max(times[0], resolve(start)), resolve(stop))
            for number, (start, stop) in enumerate(self._steps or itertools.pairwise(bounds))
        ]
        over = steps[-1].end
        timeline = [
            Segment(kind, unit, start, stop)
            for (_, kind, unit), (start, stop) in zip(
                self._turns, itertools.pairwise(times), strict=False
            )
            if start < stop <= over
        ]
        transfers = [
            Transfer(kind, unit, begun, max(begun, resolve(stop)), self._nbytes(kind, unit))
            for kind, unit, start, stop in self._transfers
            if (begun := max(map(resolve, start))) < over
        ]
        samples = [Sample(resolve(moment), nbytes) for moment, nbytes in self._samples]
        return RankTrace(
            recording=recording,
            rank=dist.get_rank(),
            num_ranks=dist.get_world_size(),
            device=str(self._units[0].device),
            clock=Clock(self._moments.origin_ns, self._moments.error_ns, _host_id()),
            units=tuple(
                TracedUnit(unit.name, unit.gathered_nbytes, unit.shard_nbytes, unit.comm.name)
                for unit in self._units
            ),
            steps=tuple(steps),
            timeline=tuple(timeline),
            transfers=tuple(sorted(transfers, key=lambda each: (each.start, each.end))),
            categories=CATEGORIES,
            samples=tuple(sample for sample in samples if sample.time <= over),
            pauses=tuple(pause for pause in self._pauses if pause.start <= over),
            num_alloc_retries=None if retries is None else retries - (before or 0),
            starved=tuple(starved(self._queued_at, times)),
            num_dtensors=None if optimizer is None else num_dtensors_of(optimizer),
        )

    # Inside

    def _turn(self) -> Moment:
        """Note the moment, and that the innermost open activity goes on from here; return it."""
        now = self._moments.take()
        if self._runtime.has_streams:
            self._queued_at.append(time.perf_counter_ns() - self._moments.origin_ns)
        self._turns.append((now, *(self._stack[-1] if self._stack else (Kind.OTHER, NO_UNIT))))
        self._sample(now)
        return now

    def _sample(self, now: Moment | None) -> None:
        nbytes = self._meter.read()
        between = self._meter.highest_since(self._samples[-1][1]) if self._samples else None
        if between or not self._samples or self._samples[-1][1] != nbytes:
            moment = self._moments.take() if now is None else now
            self._samples += [(moment, each) for each in (between, nbytes) if each is not None]

    def _close(self, kind: Kind, unit: int, now: Moment) -> None:
        if started := self._open[kind, unit]:
            self._transfers.append((kind, unit, started.popleft(), now))

    def _nbytes(self, kind: Kind, unit: int) -> int:
        if kind is Kind.ALL_GATHER:
            return self._units[unit].gathered_nbytes
        return self._gradient_nbytes[unit]


def starved(queued_at: Sequence[int], reached_at: Sequence[int]) -> Iterator[Pause]:
    """Give the spans in which a device waits for its host, in nanoseconds.

    queued_at, reached_at: when the host queued each of some moments, and when the device came to it. Where it
    came at once to two that follow each other, what lies between them took as long as the host did:

        queued    0   1000   2000   3000 us
        reached   0   1005   2010   3900 us        the device waits from 0 to 2010
    """
    is_idle = [there - put < _AT_ONCE_NS for put, there in zip(queued_at, reached_at, strict=False)]
    for idle, numbers in itertools.groupby(range(len(is_idle)), key=is_idle.__getitem__):
        each = [*numbers]
        if idle and reached_at[each[0]] < reached_at[each[-1]]:
            yield Pause(reached_at[each[0]], reached_at[each[-1]])


class Tracing:
    """Handle that a ``with trace(...)`` block gets, to say where steps end."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def step(self) -> None:
        """End the current step and begin the next one."""
        self._tracer.end_step()

    def skip(self) -> None:
        """Begin the next step here: what came since the last one, say a checkpoint, is left out."""
        self._tracer.start_step()


@contextlib.contextmanager
def trace(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    first_step: int = 1,
    activations: bool = True,
) -> Iterator[Tracing]:
    """Record the steps inside the block, and write one file per rank for `fullshard report FOLDER`.

        with fullshard.trace(model, "runs/a/trace", optimizer=optimizer):
            for _ in range(3):
                train_step()

    All ranks have to enter; they wait for each other once. A step ends where the block calls
    ``Tracing.step()``. If it never does, a step ends where ``optimizer.step()`` returns; without an
    optimizer either, the block is one step. An earlier recording in the folder is replaced.

    model: the outermost sharded module, of either API. If it has not run yet, this makes it the
        root, as its first forward would.
    optimizer: given, its time and the memory of its state are recorded too.
    first_step: the number of the first step, for the report.
    activations: whether to count what autograd saves; torch.func transforms do not allow it.

    Raises StateError, before anything is recorded, if the model is not sharded or is being traced.
    """
    iteration = _iteration_of(model)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    recordings = [uuid.uuid4().hex]
    dist.broadcast_object_list(recordings, src=0)
    if dist.get_rank() == 0:
        for old in trace_files(path):
            old.unlink()
    units = [unit for unit in iteration.units if unit.managed]
    meter = MemoryMeter(model, units, optimizer)
    with contextlib.ExitStack() as stack:
        if activations:
            stack.enter_context(saved_tensors_hooks(meter.saved.pack, meter.saved.unpack))
        tracer = Tracer(units, units[0].runtime, meter)
        if optimizer is not None:
            before = optimizer.register_step_pre_hook(tracer.begin_optimizer)
            stack.callback(before.remove)
            after = optimizer.register_step_post_hook(tracer.end_optimizer)
            stack.callback(after.remove)
        stack.enter_context(COLLECTIONS.calling(tracer.note_collection, "they are in the trace"))
        iteration.observe(tracer)
        stack.callback(iteration.observe, None)
        yield Tracing(tracer)
    recorded = tracer.result(recording=recordings[0], first_step=first_step, optimizer=optimizer)
    recorded.write(path)


def _iteration_of(model: nn.Module) -> Iteration:
    state = state_of(model)
    if state is None:
        raise StateError(
            f"{type(model).__name__} is not sharded, so there is nothing to trace. Pass the module "
            "given to fully_shard last, or the outermost FullyShardedDataParallel."
        )
    iteration = state.iteration_or_initialise()
    if isinstance(iteration.observer, Tracer):
        raise StateError(f"{type(model).__name__} is being traced already. Leave that block first.")
    if not any(unit.managed for unit in iteration.units):
        raise StateError(f"{type(model).__name__} has no sharded parameters to trace.")
    return iteration


def _host_id() -> str:
    """Return a name of this machine's boot, from which its clock counts."""
    with contextlib.suppress(OSError):
        return boot_id()
    return platform.node()
