"""What one pass of a model over a micro-batch computes and keeps: the planner's picture of a model.

A forward is a list of events: a unit's forward begins (`Enter`), something is computed (`Run`), it ends
(`Leave`). That of several modules, as ``fully_shard([a, b])`` makes it, begins with the first of them and ends with the
last. What is computed between two such events is a `Stretch`. A root unit with an embedding, two blocks
that are units, and a head:

    Enter(0) Run(0) Enter(1) Run(1) Leave(1) Enter(2) Run(2) Leave(2) Run(3) Leave(0)

What runs after the last `Leave` is the loss; nothing runs between two that leave with one and the same tensor. The
backward runs the stretches from the last to the first. `planning.traced` makes workloads from a module,
`planning.shapes` from the sizes of a transformer; `plan.step` makes the schedule of a step from one.
"""

import dataclasses
import enum
import functools
from typing import NamedTuple

from fullshard.plan.layout import ParamSpec


class WorkKind(enum.Enum):
    """What bounds a kernel, and which measured figures say how long it takes."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    MEMORY = "memory"  # elementwise, norms, softmax, copies, embeddings: bytes alone
    ROWS = "rows"  # copied by an index: bytes that come from no cache, and that no compiler saves
    EXCHANGE = "exchange"  # between ranks that share a layer or its experts, in line with computing


class Work(NamedTuple):
    """One kernel, or several that are alike.

    flops: of one of them; a multiplication and an addition are two. nbytes: that one reads and writes.
    shape: of a matmul (m, n, k), that is (m, k) times (k, n); of attention (batch x heads, sequence, head
    size); of an exchange its ranks and the distance of neighbours among them; of others zeros. dtype: of its inputs, as torch names it ("bfloat16", "float8_e4m3fn").
    count: how many kernels. name: of the operator, for reports.
    """

    kind: WorkKind
    flops: float
    nbytes: float
    shape: tuple[int, int, int] = (0, 0, 0)
    dtype: str = "float32"
    count: int = 1  # type: ignore[assignment]  # tuples have a method of this name
    name: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    """What is computed between two events of a forward, and again or after it in backward.

    Bytes are what the stretch adds to what is in use before it, parameters aside. So they add up over stretches,
    whoever made a tensor and whoever uses it last:

        before a forward        L
        after it                L + saved_nbytes; at most L + forward_peak_nbytes meanwhile
        before its backward     M: the gradients of its outputs are in it
        after a recomputation   M + recomputed_nbytes; at most M + recomputed_peak_nbytes meanwhile
        in its backward         at most M + recomputed_nbytes + backward_peak_nbytes
        after it                M - freed_nbytes, and gradient_nbytes, which its unit has from there on

    forward, recomputed, backward: the kernels of the forward, of those that activation checkpointing runs
        again when its backward begins, and of the backward.
    saved_nbytes, freed_nbytes: all stretches together free what they have saved. Both may be negative.
    backward_peak_nbytes: with the gradients of parameters that this stretch makes, from when they are made.
    gradient_nbytes: of the full gradients of parameters that its backward leaves (0 for those that an earlier
        stretch of the same backward has left already).
    """

    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    recomputed: tuple[Work, ...] = ()
    saved_nbytes: int = 0
    freed_nbytes: int = 0
    forward_peak_nbytes: int = 0
    recomputed_nbytes: int = 0
    recomputed_peak_nbytes: int = 0
    backward_peak_nbytes: int = 0
    gradient_nbytes: int = 0


class Enter(NamedTuple):
    """The forward of a unit's module begins.

    is_differentiable: an input requires a gradient, which tells when the backward of this forward is over.
    """

    unit: int
    is_differentiable: bool = True


class Run(NamedTuple):
    """A stretch is computed. stretch: its index in the workload. unit: the innermost one that runs, -1 for the loss."""

    stretch: int
    unit: int


class Leave(NamedTuple):
    """The forward of a unit's module ends.

    is_differentiable: an output requires a gradient, so the unit takes part in backward.
    """

    unit: int
    is_differentiable: bool = True


Event = Enter | Run | Leave


class WorkloadUnit(NamedTuple):
    """A unit: its name ("" for the root) and its parameters, as `plan.builders` takes them.

    recomputes: activation checkpointing runs its whole forward again in backward, so it is gathered for that.
    """

    name: str
    params: tuple[ParamSpec, ...]
    recomputes: bool = False


@dataclasses.dataclass(frozen=True)
class Workload:
    """A pass of a model over one micro-batch on one rank. Equal stretches may be one object many times.

    units: in the order of ``named_modules``; the root is the first.
    events: of the forward, in order.
    stretches: that events refer to.
    held_nbytes: buffers, parameters that are not sharded and their gradients: there all the time.
    input_nbytes: of the micro-batch.
    model_flops: of forward and backward, for model FLOPs utilization: without what is computed again.
    tokens: of the micro-batch; samples where there are no tokens.
    """

    units: tuple[WorkloadUnit, ...]
    events: tuple[Event, ...]
    stretches: tuple[Stretch, ...]
    held_nbytes: int = 0
    input_nbytes: int = 0
    model_flops: float = 0.0
    tokens: int = 0

    @functools.cached_property
    def running(self) -> frozenset[int]:
        """The units that run. Others are not gathered, and their parameters get neither gradients nor optimizer state."""
        return frozenset(event.unit for event in self.events if isinstance(event, Enter))
