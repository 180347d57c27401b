"""A device without a device: engine, lanes, memory and collectives put together.

    with Lab() as lab:
        model = fullshard.fully_shard(...)    # on a mesh of type cuda
        with lab.step():
            ...                               # train it
    lab.problems                              # what no event orders, and where the host waited

`lanes` keeps what is ordered, `memory` what was done to which byte, `recording` sees every operation,
`collectives` every collective. `programs` are the settings that the engine is proven in, `mutations`
the waits that are taken out of it one by one to prove the proof.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard.comm import packing, process_group
from fullshard.engine.checks import writes
from fullshard.engine.runtime import Runtime
from tests.streams.capturing import Capture, Graph
from tests.streams.collectives import Collectives
from tests.streams.lanes import Event, Stream, VirtualRuntime
from tests.streams.recording import DEVICE, Recorder

WORLD_SIZE = 4


class Lab:
    """A virtual device for as long as its context is entered.

    is_nccl: whether collectives are called as NCCL's are: on the lanes, coalesced.
    host_waits: how many events the host has to wait for in a `step`; None for any number.
    may_stall: why the host may wait in other ways too; empty if it may not.
    num_more, captures: how many steps `run` adds to a program's, and whether these are one that it captures
        and replays.
    losses, trained: what `run` has got from steps, and the models and optimizers of programs.
    """

    def __init__(
        self,
        *,
        is_nccl: bool = True,
        host_waits: int | None = 0,
        may_stall: str = "",
        num_more: int = 0,
        captures: bool = False,
    ) -> None:
        self.recorder = Recorder()
        self._num_more, self._captures = num_more, captures
        self.losses: list[Tensor] = []
        self.trained: list[tuple[nn.Module, torch.optim.Optimizer]] = []
        self._host_waits = host_waits
        self._may_stall = bool(may_stall)
        self.collectives = Collectives(self.recorder)
        self.lanes = self.recorder.lanes
        self._is_nccl = is_nccl
        self._runtimes: dict[torch.device, Runtime] = {}
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> Lab:
        patches = [
            mock.patch.object(Runtime, "of", staticmethod(self._runtime_of)),
            # One watched pass instead of two, and none later: watched passes are all alike.
            mock.patch.object(writes, "_WATCHED", frozenset({0})),
            # Pools of the device's memory, without what an earlier device has left there.
            mock.patch.object(packing, "_regions", weakref.WeakValueDictionary()),
            mock.patch.object(packing, "_scratch", weakref.WeakValueDictionary()),
            mock.patch.object(torch.accelerator, "is_available", return_value=True),
            mock.patch.object(
                torch.accelerator, "current_accelerator", return_value=torch.device(DEVICE.type)
            ),
            mock.patch.object(torch.accelerator, "current_device_index", return_value=0),
            mock.patch.object(torch.accelerator, "synchronize", self._synchronize),
            mock.patch.object(torch.cuda, "synchronize", self._synchronize),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", self.is_capturing),
            # Which optimizers of torch ask.
            mock.patch.object(torch.accelerator, "current_stream", return_value=self),
            # Nobody is there to be compared with, or to be outlasted when this process ends.
            mock.patch.object(process_group.ProcessGroupComm, "compare_ranks"),
        ]
        if self._is_nccl:
            patches.append(mock.patch.object(process_group, "backend_name", return_value="nccl"))
        for patch in patches:
            self._entered.enter_context(patch)
        self._entered.enter_context(self.collectives.replaced())
        self._entered.enter_context(self.recorder.recording())
        return self

    def __exit__(self, *exception: object) -> None:
        self._entered.close()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run a step of training, in which the host waits for nothing but what was announced."""
        before = self.lanes.num_host_waits
        self.recorder.refuses_stalls = not self._may_stall
        self.recorder.is_in_step = True
        yield
        self.recorder.is_in_step = self.recorder.refuses_stalls = False
        waits = self.lanes.num_host_waits - before
        if self._host_waits is not None and waits != self._host_waits:
            self.recorder.report(
                f"host: waits for {waits} events in a step instead of {self._host_waits}"
            )

    def run(self, step: Callable[[], Tensor], num_steps: int) -> None:
        """Run steps of training; those that were added to them may be replays of one that is captured."""
        for _ in range(num_steps + self._num_more * (not self._captures)):
            with self.step():
                self.losses.append(step())
        if self._captures:
            with self.capturing() as graph:
                loss = step()
            for _ in range(self._num_more):
                graph.replay()
                self.losses.append(loss.clone())

    @contextlib.contextmanager
    def capturing(self, stream: Stream | None = None) -> Iterator[Capture]:
        """Capture what is done on a stream, and on lanes that follow it: `torch.cuda.graph`."""
        stream = stream or Stream(self.lanes, "the capture's stream")
        self.lanes.finish_all()  # as torch does
        capture = self.lanes.capture = Capture(self.recorder, stream)
        is_whole = False
        try:
            with stream:
                yield capture
            is_whole = True
        finally:
            self.lanes.capture = None
            capture.end(is_whole=is_whole)
            self.lanes.finish_all()  # nothing of it was done

    def is_capturing(self) -> bool:
        """Whether the current stream is part of a capture."""
        return self.lanes.capture_of(self.lanes.current) is not None

    def _synchronize(self, device: object = None) -> None:
        self.recorder.stall("all of the device")

    def _runtime_of(self, device: torch.device) -> Runtime:
        runtime = self._runtimes.get(device)
        if runtime is None:
            is_device = device.type == DEVICE.type
            runtime = Runtime(device)
            if is_device:
                memory = self.recorder.memory
                runtime = VirtualRuntime(
                    device,
                    self.lanes,
                    make_graph=lambda: Graph(self),
                    allocated=lambda: memory.nbytes_on_device,
                )
            self._runtimes[device] = runtime
        return runtime

    @property
    def problems(self) -> list[str]:
        """What is wrong, each once."""
        return list(self.recorder.problems)

    def stream(self) -> Any:
        """Return a new stream of the user's."""
        return Stream(self.lanes)

    def event(self) -> Any:
        """Return an event that the user has recorded on the current stream."""
        return self.lanes.record(Event())


@contextlib.contextmanager
def fake_world(size: int = WORLD_SIZE) -> Iterator[None]:
    """Be rank 0 of a world without other ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
