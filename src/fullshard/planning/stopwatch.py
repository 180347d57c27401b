"""Measure what a model's own kernels take: they run, on real tensors, and each operator is timed.

A kernel takes longer in a step than alone in a loop: its inputs are in no cache, its outputs lie in fresh memory, and
other ranks use the same memory. So it is timed where it runs, in passes of the model. What a pass without a stopwatch
takes beyond its kernels is the host's, shared equally among them.

Times are those of the processor for this thread: what other programs take of it meanwhile is not the machine's
doing, and a kernel's other threads work as long as this one does.
"""

import collections
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import nn

from fullshard.plan.workload import Work
from fullshard.planning.kernels import Kernel
from fullshard.planning.recorder import Recorder
from fullshard.planning.traced import Example, TraceOptions, Units, record_pass

_NUM_WARM_UP = 2
_LEAST_PASSES = 4
LEAST_PASSES = 2 * (_NUM_WARM_UP + _LEAST_PASSES)
"""Passes that are made, with and without a stopwatch, however long they take."""

T = TypeVar("T")
# Returns the largest of all ranks' numbers, when all have come.
Meet = Callable[[float], float]


class PassTimes(NamedTuple):
    """What typical passes took, in seconds. kernels: of each work (of count 1). pass_s: without a stopwatch."""

    kernels: dict[Work, float]
    pass_s: float


class _Plain(Recorder):
    """Sees no operators, but when a pass begins and ends."""

    def __init__(self, meet: Meet) -> None:
        super().__init__()
        self._meet, self._start, self.took_s = meet, 0.0, 0.0

    def __enter__(self) -> "_Plain":
        self._meet(0)
        self._start = time.thread_time()
        return self

    def __exit__(self, *error: object) -> None:
        return

    def _take_gradient(self, parameter: Any) -> None:
        parameter.grad = None

    def end_backward(self) -> None:
        self.took_s = time.thread_time() - self._start


class _Stopwatch(Recorder):
    """Times each operator."""

    def __init__(self, meet: Meet) -> None:
        super().__init__()
        self._meet, self._took_s = meet, 0.0
        self.seconds: dict[Work, list[float]] = collections.defaultdict(list)

    def __enter__(self) -> "_Stopwatch":
        self._meet(0)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        start = time.thread_time()
        result = func(*args, **kwargs)
        self._took_s = time.thread_time() - start
        return result

    def _record(self, kernels: Sequence[Kernel], in_use: int) -> None:  # type: ignore[override]
        super()._record(kernels, in_use)
        flops = sum(kernel.work.flops for kernel in kernels)
        for kernel in kernels:  # a backward of a convolution is two
            share = kernel.work.flops / flops if flops else 1 / len(kernels)
            self.seconds[kernel.work].append(self._took_s * share)


def time_passes(
    model: nn.Module,
    example: Example,
    *,
    units: Units | None,
    options: TraceOptions,
    seconds: float,
    meet: Meet,
) -> PassTimes:
    """Run passes for some seconds, with and without a stopwatch in turn. All ranks call it alike.

    model: with memory, not sharded. options: with `has_values`.
    """
    passes: list[float] = []
    watched: list[dict[Work, list[float]]] = []
    began = time.perf_counter()
    while len(passes) < _NUM_WARM_UP + _LEAST_PASSES or meet(time.perf_counter() - began) < seconds:
        gc.collect()
        plain, watch = _Plain(meet), _Stopwatch(meet)
        record_pass(plain, model, example, units=units, options=options)
        record_pass(watch, model, example, units=units, options=options)
        passes.append(plain.took_s)
        watched.append(watch.seconds)
    found: dict[Work, list[float]] = collections.defaultdict(list)
    for each in typical(watched[_NUM_WARM_UP:], lambda each: sum(map(sum, each.values()))):
        for work, took in each.items():
            found[work] += took
    kernels = {work: statistics.fmean(took) for work, took in found.items()}
    return PassTimes(kernels, statistics.fmean(typical(passes[_NUM_WARM_UP:], float)))


def typical(values: Sequence[T], key: Callable[[T], float]) -> list[T]:
    """Return the half of some values whose keys are in the middle."""
    quarter = len(values) // 4
    return sorted(values, key=key)[quarter : len(values) - quarter]
