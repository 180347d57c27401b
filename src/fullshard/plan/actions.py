"""A step as the engine executes it, as data: what each lane does in which order, and whose memory lives when.

`plan.step` makes the list from a workload; `plan.simulator` runs it on clocks. The host issues actions in the
order of the list. An action starts when its lane has done all before it, when the actions that it waits for
are over, and not before the host has issued it. Memory comes and goes when the host issues an action, as with an
allocator whose memory belongs to the order of the host.
"""

import enum
from typing import NamedTuple


class Lane(enum.Enum):
    """Where an action runs. Without streams, COMPUTE is the host itself."""

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
    WAIT = "wait"  # COMPUTE waits for what it is after, and finishes that
    RESHARD = "reshard"
    FENCE = "barrier"


class Holding(enum.Enum):
    """What memory is used for; categories of `memory_report` and of the plan."""

    SHARDS = "sharded parameters"
    UNSHARDED = "unsharded parameters"
    FULL_GRADIENTS = "full gradients"
    GRADIENT_SHARDS = "gradient shards"
    OPTIMIZER = "optimizer state"
    OPTIMIZER_TEMPORARIES = "optimizer's temporaries"  # of a plan alone, while it steps
    COMMUNICATION = "communication"
    ACTIVATIONS = "activations"
    UNMANAGED = "not sharded"


class Change(NamedTuple):
    """Memory that comes (positive) or goes when an action is issued.

    unit: an index; -1 for none, as of activations, which stretches of several units may share.
    """

    holding: Holding
    nbytes: int
    unit: int = -1


class Action(NamedTuple):
    """One thing that the engine starts.

    unit: an index into the workload's units; -1 for none. stretch: of FORWARD, RECOMPUTE and BACKWARD.
    nbytes: of a collective, what one rank sends or receives in all: the bytes of the unit's unsharded parameters
        or full gradients as they travel, padding included.
    after: indices of earlier actions that have to be over before it starts.
    num_ranks: that take part in a collective.
    host_waits: the host goes on only when it is over.
    changes: memory that comes and goes with it; the first ``num_before`` do so before it runs. peak_nbytes: the most
        that is in use from then on until it is over, above what was before it; at least what the changes leave.
    """

    kind: ActionKind
    lane: Lane
    unit: int = -1
    stretch: int = -1
    nbytes: int = 0
    after: tuple[int, ...] = ()
    num_ranks: int = 0
    host_waits: bool = False
    changes: tuple[Change, ...] = ()
    num_before: int = 0
    peak_nbytes: int = 0
