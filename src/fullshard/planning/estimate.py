"""Put a plan together: what a step does, how long it takes, and what it holds."""

import dataclasses
import functools

from fullshard.plan.actions import ActionKind
from fullshard.plan.simulator import Simulated, StepMemory, follow_memory, simulate
from fullshard.plan.step import PlannedStep, StepSettings, plan_step
from fullshard.plan.unit_plan import plan_unit
from fullshard.plan.workload import Workload
from fullshard.planning.calibration import CalibratedCosts
from fullshard.planning.costs import Costs
from fullshard.planning.offloading import host_nbytes, offloaded

_COMPUTING = (ActionKind.FORWARD, ActionKind.RECOMPUTE, ActionKind.BACKWARD)
_COLLECTIVES = (ActionKind.ALL_GATHER, ActionKind.REDUCE_SCATTER, ActionKind.ALL_REDUCE)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A step that did not run, and what it was estimated from.

    contention_s: by which computing takes longer for communication beside it; part of `step_s`.
    host_nbytes: that a rank keeps in host memory.
    """

    step: PlannedStep
    simulated: Simulated
    optimizer_s: float
    contention_s: float
    workload: Workload = dataclasses.field(repr=False)
    settings: StepSettings
    costs: Costs | CalibratedCosts = dataclasses.field(repr=False)
    offload: str = "none"
    host_nbytes: int = 0

    @property
    def step_s(self) -> float:
        return self.simulated.step_s + self.contention_s

    @property
    def computing_s(self) -> float:
        """How long kernels of the model run."""
        pairs = zip(self.step.actions, self.simulated.spans, strict=True)
        return sum(span.end_s - span.start_s for action, span in pairs if action.kind in _COMPUTING)

    @property
    def first_pass_s(self) -> float:
        """When the second of two micro-batches begins."""
        pairs = zip(self.step.actions, self.simulated.spans, strict=True)
        forwards = [span for action, span in pairs if action.kind is ActionKind.FORWARD]
        return forwards[len(forwards) // 2].start_s

    @functools.cached_property
    def memory(self) -> StepMemory:
        """What the step holds."""
        return follow_memory(self.step)


def estimate_step(
    workload: Workload,
    settings: StepSettings,
    costs: Costs | CalibratedCosts,
    *,
    offload: str = "none",
) -> Estimate:
    """Plan a step of a workload, and run it on the clocks of a machine. offload: see `planning.offloading`."""
    return time_step(plan_step(workload, settings), workload, settings, costs, offload)


def time_step(
    step: PlannedStep,
    workload: Workload,
    settings: StepSettings,
    costs: Costs | CalibratedCosts,
    offload: str = "none",
) -> Estimate:
    """Run a planned step on the clocks of a machine. offload: see `planning.offloading`."""
    trained = sum(
        plan_unit(workload.units[number].params, settings.sharding).trained_numel
        for number in workload.running
    )
    seconds, host_s = costs.durations(step, workload, trained)
    on_host = host_nbytes(step, offload, is_pinned=costs.machine.figures is None)
    if offload != "none":
        step, seconds = offloaded(step, seconds, offload, costs.machine.gpu)
    simulated = simulate(step.actions, seconds, host_s)
    moving = optimizer = 0.0
    for action, took in zip(step.actions, seconds, strict=True):
        if action.kind in _COLLECTIVES:
            moving += took
        elif action.kind is ActionKind.OPTIMIZER:
            optimizer += took
    exposed = sum(simulated.exposed(kind) for kind in _COLLECTIVES)
    return Estimate(
        step,
        simulated,
        optimizer,
        costs.constants.contention * max(0.0, moving - exposed),
        workload,
        settings,
        costs,
        offload,
        on_host,
    )
