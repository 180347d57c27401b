"""The reductions of one model that are under way, in the order in which they were started.

All ranks start them in the same order, which is the order in which collectives pair; so they are
also finished in that order.
"""

import collections
from collections.abc import Callable, Sequence

from fullshard.engine.gradients.in_flight import InFlight
from fullshard.engine.observer import Observer
from fullshard.plan.trace import Kind


class ReductionQueue:
    """Finishes and releases reductions, oldest first.

    A reduction is *started* (its collective runs), then *finished* (gradients are in ``.grad``; on a
    device, the lane has been given the work that puts them there), then *released* (compute waits
    for the lane, and what the lane reads may be freed).

    max_held: how many reductions may hold memory, as long as the oldest of them is finished.
    """

    def __init__(self) -> None:
        self.max_held = 1
        self.observer: Observer | None = None
        self._held: collections.deque[InFlight] = collections.deque()  # not released yet
        self._unfinished: collections.deque[InFlight] = collections.deque()  # the newest of `_held`
        # The last released one that copies gradients to host memory: `release` waits for it.
        self._for_host: InFlight | None = None

    @property
    def held(self) -> Sequence[InFlight]:
        """The reductions that hold memory: not released yet, oldest first."""
        return self._held

    def add(self, in_flight: InFlight, *, keep: int) -> None:
        """Take over a reduction that was started; finish all but the last ``keep``."""
        self._held.append(in_flight)
        self._unfinished.append(in_flight)
        self.finish(keep=keep)

    def finish(self, *, keep: int = 0) -> None:
        """Finish all but the last ``keep`` reductions."""
        while len(self._unfinished) > keep:
            # It leaves the queue only afterwards: if finishing raises, `discard` still finds it.
            self._wait_for(self._unfinished[0], self._unfinished[0].finish)
            self._unfinished.popleft()
        # A finished one still holds full gradients that its lane reads. Releasing it makes compute
        # wait for the lane, since the allocator gives freed memory to compute at once. Later is
        # better for time, earlier for memory: `max_held` chooses.
        while len(self._held) > self.max_held and self._held[0].is_finished:
            self._release_first()

    def release(self) -> None:
        """Release all reductions. They have to be finished.

        When this returns, compute waits for all of them, and offloaded gradients are in host memory.
        """
        while self._held:
            self._release_first()
        if self._for_host is not None:
            runtime, event = self._for_host.gradients.runtime, self._for_host.event
            # The host waits once: a lane works in order, so its last event covers those before.
            runtime.finish(event)
            self._for_host = None

    def _release_first(self) -> None:
        in_flight = self._held.popleft()
        self._wait_for(in_flight, in_flight.release)
        if in_flight.is_for_host:
            self._for_host = in_flight

    def discard(self) -> None:
        """Forget all reductions, after an exception ended the iteration. Their results are lost."""
        for in_flight in self._held:
            in_flight.discard()
        self._held.clear()
        self._unfinished.clear()

    def _wait_for(self, in_flight: InFlight, wait: Callable[[], None]) -> None:
        if self.observer is not None:
            self.observer.begin(Kind.WAIT_REDUCE_SCATTER, in_flight.gradients)
        wait()
        if self.observer is not None:
            self.observer.end()
