"""Virtual lanes: what a device's streams and events would order, kept in vector clocks.

Every lane counts the operations that it was given. Its clock says, for each lane, how many of that
lane's operations are over before its own next one begins:

    an operation on lane L      counts one more in L, and begins after all that the host knows of
    an event is recorded on L   it holds a copy of L's clock
    L waits for the event       L's clock becomes the larger of both, lane by lane
    the host waits for it       the same for the host's clock, and so for all that it starts later

So operation number n of lane A is over before an operation whose clock has at least n for A.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fullshard.engine.runtime import Lane, Runtime

if TYPE_CHECKING:
    from tests.streams.capturing import Capture

Clock = dict[Hashable, int]

HOST = "host"  # the lane of what the host computes itself


class GroupLane:
    """The lane of a process group, where collectives run that are waited for."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"group {self.name}"


class Moment(NamedTuple):
    """One operation: the lane that it ran on, its number there, and what was over before it."""

    lane: Hashable
    number: int
    clock: Clock

    def follows(self, lane: Hashable, number: int) -> bool:
        """Whether operation ``number`` of a lane was over before this one began."""
        return self.clock.get(lane, 0) >= number


class Event:
    """An event of a virtual lane.

    clock: what it covers; None until it is recorded. capture: the one that it was recorded in, if any.
    """

    def __init__(self) -> None:
        self.clock: Clock | None = None
        self.capture: Capture | None = None

    def synchronize(self) -> None:
        """Refuse what the engine must leave to `Runtime.finish`."""
        raise AssertionError("events are waited for by the runtime alone")


class Lanes:
    """The lanes of one virtual device, and the host.

    current: the lane that operations run on, as a current stream.
    report: called with what is wrong.
    num_host_waits: how often the host has waited for an event.
    capture: the one that is under way, if any.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self.current: Hashable = Lane.COMPUTE
        self.report = report
        self.num_host_waits = 0
        self.capture: Capture | None = None
        self._clocks: dict[Hashable, Clock] = {}

    def clock(self, lane: Hashable) -> Clock:
        """Return what is over before a lane's next operation begins."""
        return self._clocks.setdefault(lane, {})

    def capture_of(self, lane: Hashable) -> Capture | None:
        """Return the capture that a lane is part of."""
        return self.capture if self.capture and lane in self.capture.lanes else None

    def run(self, lane: Hashable | None = None) -> Moment:
        """Start one operation: on the current lane unless another is named."""
        lane = self.current if lane is None else lane
        clock = self.clock(lane)
        _join(clock, self.clock(HOST))
        before = dict(clock)
        clock[lane] = clock.get(lane, 0) + 1
        return Moment(lane, clock[lane], before)

    @contextlib.contextmanager
    def on(self, lane: Hashable) -> Iterator[None]:
        """Make a lane the current one."""
        before, self.current = self.current, lane
        try:
            yield
        finally:
            self.current = before

    def record(self, event: Event | None = None) -> Event:
        """Record an event on the current lane, a new one unless it is given."""
        event = event or Event()
        event.clock = {**self.clock(HOST)}
        event.capture = self.capture_of(self.current)
        _join(event.clock, self.clock(self.current))
        return event

    def wait(self, event: Event) -> None:
        """Let the current lane wait for an event."""
        self._wait(self.current, event)

    def finish(self, event: Event) -> None:
        """Let the host wait for an event."""
        self.num_host_waits += 1
        self._wait(HOST, event)

    def stall(self) -> None:
        """Let the host wait for all that the current lane was given."""
        _join(self.clock(HOST), self.clock(self.current))

    def follow(self, lane: Hashable, other: Hashable) -> None:
        """Let one lane wait for all that another was given."""
        if (capture := self.capture_of(other)) is not None:
            capture.lanes.add(lane)
        _join(self.clock(lane), self.clock(other))

    def finish_all(self) -> None:
        """Let the host wait for everything that the device was given, and so all that comes later."""
        for lane in list(self._clocks):
            _join(self.clock(HOST), self.clock(lane))
        for clock in self._clocks.values():
            _join(clock, self.clock(HOST))

    def _wait(self, lane: Hashable, event: Event) -> None:
        if event.clock is None:
            # A stream does not wait for such an event: the program goes on as if it had.
            self.report(f"{lane} waits for an event that was not recorded yet")
            return
        if lane == HOST:
            if self.capture is not None:
                self.capture.refuse_wait("an event")
        elif event.capture is not None and event.capture is self.capture:
            event.capture.lanes.add(lane)
        elif event.capture is not None:
            self.report(f"capture: {lane} waits for an event of a capture that is over")
        elif self.capture_of(lane) is not None:
            self.report(f"capture: {lane} waits for an event from outside of the capture")
        _join(self.clock(lane), event.clock)


class Stream:
    """A stream of the user's own; entered, it is the current lane."""

    def __init__(self, lanes: Lanes, name: str = "the user's stream") -> None:
        self._lanes = lanes
        self._name = name
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> Stream:
        self._entered.enter_context(self._lanes.on(self))
        return self

    def __exit__(self, *exception: object) -> None:
        self._entered.close()

    def __repr__(self) -> str:
        return self._name


class VirtualRuntime(Runtime):
    """A runtime whose streams are virtual lanes. `Runtime.following` is the engine's own.

    allocated: returns the bytes that tensors occupy.
    """

    def __init__(
        self,
        device: torch.device,
        lanes: Lanes,
        *,
        make_graph: Callable[[], Any],
        allocated: Callable[[], int | None],
    ) -> None:
        super().__init__(device)
        self.lanes = lanes
        self.make_graph = make_graph  # type: ignore[method-assign]
        self._allocated = allocated

    @property
    def allocated_nbytes(self) -> int | None:
        return self._allocated()

    def on(self, lane: Lane) -> contextlib.AbstractContextManager[Any]:
        # As the real one: COMPUTE is whatever the user has made current.
        return contextlib.nullcontext() if lane is Lane.COMPUTE else self.lanes.on(lane)

    def record(self) -> Any:
        return self.lanes.record()

    def wait(self, event: Any) -> None:
        if event is not None:
            self.lanes.wait(event)

    def finish(self, event: Any) -> None:
        if event is not None:
            self.lanes.finish(event)


def _join(clock: Clock, other: Clock) -> None:
    for lane, number in other.items():
        if clock.get(lane, 0) < number:
            clock[lane] = number
