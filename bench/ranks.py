"""Processes of one implementation: started fresh, one per rank, blocked on a pipe between calls.

Several groups of ranks can be alive at once while one of them works, so a benchmark alternates
between implementations within seconds and slow drifts of the machine cancel in the ratios.
"""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_SECONDS_TO_IMPORT = 300.0
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


class RankError(RuntimeError):
    """A rank raised, died or did not answer in time."""


@dataclass(frozen=True)
class Rank:
    """Who a process is, and where its group's store listens on 127.0.0.1."""

    index: int
    count: int
    store_port: int

    def init_gloo(self) -> None:
        """Make the default process group out of this rank's group."""
        store = dist.TCPStore("127.0.0.1", self.store_port, is_master=False)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=self.index,
            world_size=self.count,
            timeout=timedelta(seconds=120),
        )


class Answer(NamedTuple):
    """What a call returned on each rank, and the wall time until the last rank answered."""

    values: list[Any]
    seconds: float


class _Failure(NamedTuple):
    text: str


class RankGroup:
    """Start `num_ranks` processes and call methods of the service that each of them builds.

    `build` must be picklable; it runs in each process on the first `call("build")`, so memory
    can be measured between import and build. Use as a context manager: leaving it ends the ranks.
    """

    def __init__(self, name: str, build: Callable[[Rank], object], *, num_ranks: int) -> None:
        self.name = name
        # The store lives in this process, which gives a free port without a race for it.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self._processes = []
        self._pipes: list[Connection] = []
        with _environment(_ENVIRONMENT):
            for index in range(num_ranks):
                here, there = context.Pipe()
                rank = Rank(index, num_ranks, self._store.port)
                process = context.Process(
                    target=_serve, args=(there, rank, build), name=f"{name}-{index}", daemon=True
                )
                process.start()
                there.close()  # so that a rank's death reads as end of file here
                self._processes.append(process)
                self._pipes.append(here)

    def __enter__(self) -> "RankGroup":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def process_ids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def wait_imported(self) -> None:
        """Return once every rank has imported its modules and waits for `build`."""
        self._collect(time.perf_counter() + _SECONDS_TO_IMPORT)

    def call(self, method: str, *args: object, timeout_seconds: float = 300.0) -> Answer:
        """Run one method of the service on all ranks at once; `build` makes the service."""
        start = time.perf_counter()
        for pipe in self._pipes:
            pipe.send((method, args))
        values = self._collect(start + timeout_seconds)
        return Answer(values, time.perf_counter() - start)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5.0)
            if process.is_alive():
                process.kill()
                process.join()

    def _collect(self, deadline: float) -> list[Any]:
        values: dict[int, Any] = {}
        while len(values) < len(self._pipes):
            waiting = {pipe: i for i, pipe in enumerate(self._pipes) if i not in values}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.perf_counter()))
            if not ready:
                raise RankError(f"{self.name}: no answer from ranks {sorted(waiting.values())}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                values[waiting[pipe]] = self._receive(pipe, waiting[pipe])
        return [values[i] for i in range(len(values))]

    def _receive(self, pipe: Connection, index: int) -> Any:
        try:
            value = pipe.recv()
        except (EOFError, ConnectionResetError):
            raise RankError(f"{self.name}: rank {index} ended without an answer") from None
        if isinstance(value, _Failure):
            raise RankError(f"{self.name}: rank {index} raised\n{value.text}")
        return value


def _serve(pipe: Connection, rank: Rank, build: Callable[[Rank], object]) -> None:
    torch.set_num_threads(1)
    service: object = None
    pipe.send(None)
    while True:
        try:
            method, args = pipe.recv()
            if method == "build":
                service = _attempt(build, rank)
                pipe.send(service if isinstance(service, _Failure) else None)
            else:
                pipe.send(_attempt(getattr(service, method), *args))
        except (EOFError, BrokenPipeError):
            # The other end is closed. Skips interpreter shutdown, since destroying a process group
            # waits for its peers.
            os._exit(0)


def _attempt(work: Callable[..., Any], *args: object) -> Any:
    try:
        return work(*args)
    except Exception:
        return _Failure(traceback.format_exc())


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables for processes started inside: thread pools read them on import."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
