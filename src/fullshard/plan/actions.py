"""A step as the engine executes it, as data: what each lane does in which order, and whose memory lives when.

`plan.step` makes the list from a workload; `plan.simulator` runs it on clocks. The host issues actions in the
order of the list. An action starts when its lane has done all before it, when the actions that it waits for
are over, and not before the host has issued it. Memory comes and goes when the host issues an action, as with an
allocator whose memory belongs to the order of the host.
"""

import dataclasses
import enum
from typing import NamedTuple


class Lane(enum.Enum):
    """Where an action runs. On the CPU all computing and waiting is HOST's own; see `plan.step`."""

    COMPUTE = "compute"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    COPY = "copy"  # to and from the host


class ActionKind(enum.Enum):
    """What an action does; the values are the names in reports, tests and files."""

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    COPY = "copy"
    WAIT = "wait"  # the host waits until what it names is over
    RESHARD = "reshard"
    FENCE = "barrier"


class Holding(enum.Enum):
    """What memory is used for; categories of `memory_report` and of the plan."""

    SHARDS = "sharded parameters"
    UNSHARDED = "unsharded parameters"
    FULL_GRADIENTS = "full gradients"
    GRADIENT_SHARDS = "gradient shards"
    OPTIMIZER = "optimizer state"
    COMMUNICATION = "communication"
    ACTIVATIONS = "activations"
    UNMANAGED = "not sharded"


class Change(NamedTuple):
    """Memory that comes (positive) or goes when an action is issued. unit: an index, -1 for none."""

    holding: Holding
    nbytes: int
    unit: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """One thing that the engine starts.

    unit: an index into the workload's units; -1 for none. stretch: of FORWARD, RECOMPUTE and BACKWARD.
    nbytes: of a collective, what one rank sends or receives in all: the bytes of the unit's unsharded parameters
        or full gradients as they travel, padding included.
    after: indices of earlier actions that have to be over before it starts.
    host_waits: the host goes on only when it is over.
    changes: memory that comes before it runs, and goes. peak_nbytes: above that, while it runs, and gone after it.
    """

    kind: ActionKind
    lane: Lane
    unit: int = -1
    stretch: int = -1
    nbytes: int = 0
    after: tuple[int, ...] = ()
    host_waits: bool = False
    changes: tuple[Change, ...] = ()
    peak_nbytes: int = 0
