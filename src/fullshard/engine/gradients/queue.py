"""The reductions of one model that are under way, in the order in which they were started."""

import collections
from collections.abc import Callable, Sequence

from fullshard.engine.gradients.in_flight import InFlight
from fullshard.engine.observer import Observer
from fullshard.plan.trace import Kind


class ReductionQueue:
    """Finishes and releases reductions, oldest first.

    A reduction is *started* (its collective runs), then *finished* (gradients are in ``.grad``),
    then *released* (compute has waited for its lane, and what the lane read may be freed).

    max_held: how many finished ones may hold memory.
    """

    def __init__(self) -> None:
        self.max_held = 1
        self.observer: Observer | None = None
        self._held: collections.deque[InFlight] = collections.deque()  # not released
        self._unfinished: collections.deque[InFlight] = collections.deque()  # the last of them
        self._for_host: InFlight | None = None  # the last one that copies to host memory

    @property
    def held(self) -> Sequence[InFlight]:
        """Reductions that hold memory."""
        return self._held

    def add(self, in_flight: InFlight, *, keep: int) -> None:
        """Take over a reduction that was started; finish all but the last ``keep``."""
        self._held.append(in_flight)
        self._unfinished.append(in_flight)
        self.finish(keep=keep)

    def finish(self, *, keep: int = 0) -> None:
        """Finish all but the last ``keep`` reductions."""
        while len(self._unfinished) > keep:
            # It leaves the queue only then: if it raises, `discard` still finds it.
            self._wait_for(self._unfinished[0], self._unfinished[0].finish)
            self._unfinished.popleft()
        # A finished one still holds tensors that its lane reads; compute waits before they go.
        while len(self._held) > self.max_held and self._held[0].is_finished:
            self._release_first()

    def release(self) -> None:
        """Release all. Gradients that are offloaded are in host memory when this returns."""
        while self._held:
            self._release_first()
        if self._for_host is not None:
            runtime, event = self._for_host.gradients.runtime, self._for_host.event
            runtime.finish(event)  # the lane's last one covers those before it
            self._for_host = None

    def _release_first(self) -> None:
        in_flight = self._held.popleft()
        self._wait_for(in_flight, in_flight.release)
        if in_flight.is_for_host:
            self._for_host = in_flight

    def discard(self) -> None:
        """Forget all of them, after an exception."""
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
