"""The schedule of one training step, as the engine executes it: `plan_step` makes its actions.

`engine.hooks` and `engine.iteration` tell the same story, where it happens. Here it is told ahead of time, by the
same layouts, the same prediction of what is gathered early (`schedule.Recorder`), and the same rules of what memory
is kept (`ways`, `ledger`). `tests/engine/test_planned_steps.py` compares both.

    begin a pass     barrier, where ranks read each other's shards
    Enter            gather, wait, and gather the next one early
    Run              compute
    Leave            reshard
    ... backward, from the last event to the first
    Leave            gather, wait, and gather the one before early
    Run              recompute, compute
    Enter            reshard, reduce-scatter; finish the reduction of the unit before
    end              what is left of it, barrier; then the optimizer

A step is like the one before it: what the first ones find out and allocate is there. So steps are planned until one
leaves the memory that it found.

Not planned: units that only some ranks run, or of whose modules only some run, parameters that define their own all-gather, one
flat parameter for a unit, communication hooks, gathers that a program orders itself. For optimizer state that is streamed
see `planning.offloading`.
"""

import dataclasses
from typing import Literal, NamedTuple

from fullshard.errors import ShardingError
from fullshard.plan.actions import Action, ActionKind, Change, Holding, Lane
from fullshard.plan.ledger import RegionLedger
from fullshard.plan.mesh import check_reshard_after_forward
from fullshard.plan.schedule import Recorder
from fullshard.plan.step_gathers import Gathers
from fullshard.plan.step_reductions import Reductions
from fullshard.plan.step_state import ActionLog, UnitState
from fullshard.plan.unit_plan import Sharding, UnitPlan, plan_unit
from fullshard.plan.ways import PEER_MEMORY, ring_nbytes
from fullshard.plan.workload import Enter, Leave, Run, Workload

Reshard = bool | int | None
_MOST_STEPS = 5  # until memory is the same at the end of a step as at its beginning


@dataclasses.dataclass(frozen=True)
class OptimizerPlan:
    """What an optimizer keeps, and takes while it steps, in bytes. The defaults are those of Adam, fused.

    nbytes_per_element: of state, for each element of this rank's shards that it trains: 12 for two moments and a copy
        of the parameters in float32; a fraction where others keep the rest. None for two in the dtype of the shards.
    nbytes_per_param: more, for each parameter: its count of steps.
    peak_per_element: of temporary memory while it steps, for each such element: 4 for ``foreach``.
    peak_of_largest: the same, for each element of the largest parameter: 8 where one is stepped after the other.
    """

    nbytes_per_element: float | None = None
    nbytes_per_param: int = 4
    peak_per_element: float = 0
    peak_of_largest: int = 0

    def state_nbytes(self, unit: UnitPlan) -> int:
        """Return the bytes of a unit's state."""
        nbytes = 2 * unit.trained_nbytes
        if self.nbytes_per_element is not None:
            nbytes = round(unit.trained_numel * self.nbytes_per_element)
        return nbytes + unit.num_trained * self.nbytes_per_param


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """How a step is run. Raises ShardingError for settings that exclude each other.

    has_streams: a device works behind the host's back. False for the CPU, whose host computes and waits.
    reshard_after_forward: of each unit, or of all: as in `fully_shard`; None means True except for the root.
    forward_prefetch, backward_prefetch: of `UnitConfig`; without streams, or flat, the former gathers early.
    num_microbatches: backwards before the optimizer. reduces_each: each of them reduces, not the last alone.
    sums_replicas_last: the last alone sums over replicas (``set_requires_all_reduce(False)`` before the others).
    keeps_between: units stay unsharded after a backward that does not reduce, as in ``no_sync`` of SHARD_GRAD_OP.
    max_input_buffers: ``reduce_scatter_max_input_buffers``. optimizer: None for a step without one.
    """

    sharding: Sharding
    has_streams: bool = False
    reshard_after_forward: Reshard | tuple[Reshard, ...] = None
    forward_prefetch: bool = True
    backward_prefetch: Literal["pre", "post"] | None = "pre"
    num_microbatches: int = 1
    reduces_each: bool = False
    sums_replicas_last: bool = False
    keeps_between: bool = False
    max_input_buffers: int = 1
    optimizer: OptimizerPlan | None = OptimizerPlan()

    def __post_init__(self) -> None:
        if self.num_microbatches < 1 or self.max_input_buffers < 1:
            raise ShardingError(
                f"StepSettings(num_microbatches={self.num_microbatches}, max_input_buffers="
                f"{self.max_input_buffers}): both are at least 1."
            )
        if self.sharding.offloads and not self.has_streams:
            raise ShardingError(
                "Sharding(offloads=True) without streams: on the CPU, shards are in host memory anyway. Leave it out."
            )
        if self.has_streams and self.sharding.way is PEER_MEMORY:
            raise ShardingError(
                "StepSettings(has_streams=True) with peer memory of the host: ranks on GPUs exchange bytes by NCCL. "
                "Use way=NCCL."
            )

    def reshards(self, number: int, num_units: int) -> bool | int:
        """Return what becomes of a unit after its forward: True, False, or the size of a smaller group."""
        option = self.reshard_after_forward
        if isinstance(option, tuple):
            if len(option) != num_units:
                raise ShardingError(
                    f"reshard_after_forward has {len(option)} values, and the model {num_units} units."
                )
            option = option[number]
        option = check_reshard_after_forward(option, self.sharding.shard_size)
        return number != 0 if option is None else option


class PlannedStep(NamedTuple):
    """A step: its actions in the order of the host, and the memory that is there when it begins."""

    actions: tuple[Action, ...]
    resident: tuple[Change, ...]


def plan_step(workload: Workload, settings: StepSettings) -> PlannedStep:
    """Return one step of training of many that are alike."""
    story = _Step(workload, settings)
    for _ in range(_MOST_STEPS):
        found, resident = story.state, story.resident
        story.run()
        if story.state == found:
            break
    changes = (Change(holding, n, unit) for (holding, unit), n in resident.items())
    return PlannedStep(tuple(story.log.actions), tuple(changes))


class _Step:
    """Tells the story of steps, one after another, on one rank."""

    def __init__(self, workload: Workload, settings: StepSettings) -> None:
        self._workload, self._settings = workload, settings
        sharding, num_units = settings.sharding, len(workload.units)
        self._units = [
            UnitState(
                number,
                plan_unit(unit.params, sharding),
                settings.reshards(number, num_units),
                keeps_small=not settings.has_streams,
            )
            for number, unit in enumerate(workload.units)
        ]
        self.log = ActionLog(has_streams=settings.has_streams)
        regions = RegionLedger()
        self._recorder = Recorder()
        self._gathers = Gathers(self.log, regions, sharding)
        self._reductions = Reductions(
            self.log, regions, sharding, self._units, max_under_way=settings.max_input_buffers
        )
        self._prefetch_after: dict[int, UnitState] = {}
        self._reduces = True  # the backward that runs
        self._is_fenced = True  # the pass that runs
        self._spans = _recomputed_spans(workload)
        self._backward_order = _backward_order(workload)
        self._running = workload.running
        self._recomputed: set[int] = set()  # places of events
        self._allocate_residents()

    @property
    def resident(self) -> dict[tuple[Holding, int], int]:
        """The memory that is there between two steps."""
        return {key: nbytes for key, nbytes in self.log.level.items() if nbytes}

    @property
    def state(self) -> object:
        """All on which the next step depends."""
        return self.resident, self._reductions.ring.begin

    def _allocate_residents(self) -> None:
        optimizer, level = self._settings.optimizer, self.log.level
        samples = sum(unit.plan.sample_nbytes for unit in self._units)
        level[Holding.UNMANAGED, -1] = self._workload.held_nbytes + samples
        level[Holding.ACTIVATIONS, -1] = self._workload.input_nbytes
        for unit in self._units:
            plan = unit.plan
            level[Holding.UNSHARDED, unit.number] = unit.stays_nbytes
            if self._settings.sharding.offloads:
                continue
            level[Holding.SHARDS, unit.number] = plan.shard_nbytes
            if optimizer is not None and unit.number in self._running:
                level[Holding.OPTIMIZER, unit.number] = optimizer.state_nbytes(plan)
        level[Holding.COMMUNICATION, -1] = self._reductions.ring.nbytes
        if self._settings.sharding.all_reduce_way is PEER_MEMORY:
            summed = [nbytes for unit in self._units for nbytes in unit.plan.all_reduced]
            level[Holding.COMMUNICATION, -1] += ring_nbytes(summed)

    # A step

    def run(self) -> None:
        """Plan the next step, in place of the last one."""
        self.log.begin()
        self._gathers.begin_step()
        num = self._settings.num_microbatches
        for number in range(num):
            is_last = number == num - 1
            self._reduces = self._settings.reduces_each or is_last
            self._reductions.puts_off = self._settings.sums_replicas_last and not is_last
            self._gathers.is_left_alone = self._reduces or not self._settings.keeps_between
            self._forward()
            self._backward()
        optimizer = self._settings.optimizer
        if optimizer is not None:
            trained = [self._units[number].plan for number in self._running]
            numel = sum(plan.trained_numel for plan in trained)
            largest = max(plan.largest_numel for plan in trained)
            temporary = round(numel * optimizer.peak_per_element)
            temporary += largest * optimizer.peak_of_largest
            offloads = self._settings.sharding.offloads
            step = Action(
                ActionKind.OPTIMIZER,
                Lane.COMPUTE,
                peak_nbytes=0 if offloads else temporary,
                host_waits=offloads,
            )
            self.log.issue(step, [c for unit in self._units for c in self._reductions.zero(unit)])

    def _fence(self) -> None:
        sharding = self._settings.sharding
        if self._is_fenced and sharding.shard_way is PEER_MEMORY:
            self.log.issue(Action(ActionKind.FENCE, Lane.COMPUTE, num_ranks=sharding.shard_size))

    # Forward

    def _forward(self) -> None:
        self._recorder.start_pass()
        for unit in self._units:
            if unit.kept_nbytes:  # of a unit without a backward
                self._gathers.reshard(unit)
            self._reductions.free_unused(unit)
        # Ranks to whom nothing is to come do not meet.
        self._is_fenced = not all(map(self._gathers.is_whole, self._units))
        self._fence()
        self._gathers.begun = self.log.last
        for event in self._workload.events:
            match event:
                case Enter():
                    self._enter(self._units[event.unit])
                case Run():
                    self._compute_forward(event)
                case Leave():
                    self._leave(event)

    def _enter(self, unit: UnitState) -> None:
        self._gathers.unshard(unit)
        self._gathers.wait(unit)
        if not unit.plan.gathers:
            return  # such as a root whose parameters are all in other units
        number = self._recorder.next_unit(unit.number)
        if number is None:
            return
        following, settings = self._units[number], self._settings
        is_early = settings.forward_prefetch
        # With streams the host runs ahead, so a gather starts early enough by itself if it waits for little.
        if settings.has_streams and not (is_early and settings.sharding.is_flat):
            has_readers = settings.sharding.shard_size > 1  # else it is not known to be left alone
            is_early = has_readers and self._gathers.waits_for_compute(following)
        if is_early and self._gathers.gains_from_prefetch(following):
            self._gathers.unshard(following)

    def _compute_forward(self, run: Run) -> None:
        stretch = self._workload.stretches[run.stretch]
        peak = stretch.forward_peak_nbytes
        self.log.issue(
            Action(ActionKind.FORWARD, Lane.COMPUTE, run.unit, run.stretch, peak_nbytes=peak),
            [Change(Holding.ACTIVATIONS, stretch.saved_nbytes)],
        )

    def _leave(self, event: Leave) -> None:
        unit = self._units[event.unit]
        if event.is_differentiable and unit.plan.gathers:
            self._recorder.expect_backward(unit.number)
        if unit.reshards is not False:
            self._gathers.reshard(unit, after_forward=True)
        if unit.number == 0:
            self._gathers.end_rotation()
            self._fence()

    # Backward

    def _backward(self) -> None:
        for unit in self._units:
            unit.is_in_backward = unit.has_ended_backward = False
        self._recomputed.clear()
        if not self._is_fenced:
            self._is_fenced = True
            self._fence()
        self._gathers.begun = self.log.last
        events = self._workload.events
        span: range | None = None  # to be computed again, before the first backward in it
        for place in self._backward_order:
            match event := events[place]:
                case Leave() if event.is_differentiable:
                    self._before_backward(self._units[event.unit])
                    span = span or self._spans.get(place)
                case Run():
                    if span is not None:
                        self._recompute_span(span)
                        span = None
                    self._recompute(place, event)
                    self._compute_backward(event)
                case Enter() if event.is_differentiable:
                    if self._units[event.unit].is_in_backward:
                        self._after_backward(self._units[event.unit])
                case _:
                    pass
        for unit in reversed(self._units):  # inputs tell nothing of the others
            if not unit.has_ended_backward:
                self._after_backward(unit)
        self._reductions.finish()
        self._reductions.release()
        self._gathers.end_rotation()
        self._recorder.end_iteration()
        for unit in self._units:  # gathered early, but never used
            if unit.is_gathering:
                self._gathers.wait(unit)
                self._gathers.reshard(unit)
        self._fence()

    def _before_backward(self, unit: UnitState) -> None:
        if unit.is_in_backward:
            return
        unit.is_in_backward, unit.has_ended_backward = True, False
        self._gathers.unshard(unit)
        self._gathers.wait(unit)
        if not unit.plan.gathers:
            return
        number = self._recorder.start_backward(unit.number)
        if number is None or not self._gathers.gains_from_prefetch(self._units[number]):
            return
        if self._settings.backward_prefetch == "pre":
            self._gathers.unshard(self._units[number])
        elif self._settings.backward_prefetch == "post":
            self._prefetch_after[unit.number] = self._units[number]

    def _recompute_span(self, span: range) -> None:
        """Run the forwards of a checkpointed module again, with what is gathered for that."""
        for place in span:
            match event := self._workload.events[place]:
                case Enter():
                    self._gathers.unshard(self._units[event.unit])
                    self._gathers.wait(self._units[event.unit])
                case Run():
                    self._recompute(place, event)
                case Leave():
                    pass

    def _recompute(self, place: int, run: Run) -> None:
        stretch = self._workload.stretches[run.stretch]
        is_kept = not (stretch.recomputed or stretch.recomputed_nbytes)
        if is_kept or place in self._recomputed:
            return
        self._recomputed.add(place)
        peak = stretch.recomputed_peak_nbytes
        self.log.issue(
            Action(ActionKind.RECOMPUTE, Lane.COMPUTE, run.unit, run.stretch, peak_nbytes=peak),
            [Change(Holding.ACTIVATIONS, stretch.recomputed_nbytes)],
        )

    def _compute_backward(self, run: Run) -> None:
        """Run the backward of a stretch."""
        stretch = self._workload.stretches[run.stretch]
        unit = self._units[run.unit]
        full = 0 if run.unit < 0 else stretch.gradient_nbytes
        if unit.is_holding:
            full = self._unlent(unit, full)
        unit.full_nbytes += full
        used = stretch.freed_nbytes + stretch.recomputed_nbytes
        peak = stretch.backward_peak_nbytes
        self.log.issue(
            Action(ActionKind.BACKWARD, Lane.COMPUTE, run.unit, run.stretch, peak_nbytes=peak),
            [
                Change(Holding.ACTIVATIONS, -used),
                Change(Holding.FULL_GRADIENTS, full, run.unit),
            ],
        )

    def _unlent(self, unit: UnitState, full_nbytes: int) -> int:
        """Return the bytes of full gradients beside sums that wait, to which autograd adds in place where it can."""
        of_unit, unlent = unit.plan.full_nbytes, unit.plan.unlent_nbytes
        if unlent == of_unit or not unlent:
            return min(full_nbytes, unlent)
        if full_nbytes % of_unit == 0:
            return unlent * full_nbytes // of_unit
        name = self._workload.units[unit.number].name or "the root"
        raise ShardingError(
            f"{name}: gradients of several dtypes, of which only some add up in place, come one after the other in "
            f"{self._settings.num_microbatches} micro-batches. Such a step is not planned: reduce in each "
            "micro-batch (reduces_each=True), or make units of one dtype."
        )

    def _after_backward(self, unit: UnitState) -> None:
        unit.is_in_backward, unit.has_ended_backward = False, True
        if self._reduces or not self._settings.keeps_between:
            self._gathers.reshard(unit)
        if self._reduces:
            self._reductions.reduce(unit)
        else:
            self._reductions.accumulate(unit)
        following = self._prefetch_after.pop(unit.number, None)
        if following is not None and self._recorder.expects_backward(following.number):
            self._gathers.unshard(following)


def _backward_order(workload: Workload) -> list[int]:
    """Return the places of events in the order in which backward comes to them: from the last to the first.

    Modules that return one tensor are told of its gradient in the order of their forwards, the inner one first.
    """
    order: list[int] = []
    leaves: list[int] = []
    for place in range(len(workload.events) - 1, -1, -1):
        if isinstance(workload.events[place], Leave):
            leaves.append(place)
            continue
        order += [*reversed(leaves), place]
        leaves = []
    return order


def _recomputed_spans(workload: Workload) -> dict[int, range]:
    """Return the events that are run again when a backward comes to a place: that of a `Leave`."""
    spans, entered = {}, {}
    for place, event in enumerate(workload.events):
        if isinstance(event, Enter):
            entered[event.unit] = place
        elif isinstance(event, Leave) and workload.units[event.unit].recomputes:
            spans[place] = range(entered[event.unit], place)
    return spans
