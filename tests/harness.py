"""Run test bodies on real ranks: one process each, Gloo between them, one torch thread.

    @on_ranks(2, 4)
    def test_every_rank_sees_the_sum(api):        # the body runs on every rank
        ...

A pool of ranks is started once per world size and serves test after test; functions travel by
module and name, so a body must be importable. The first failing rank's traceback comes back. A
test that exceeds its limit fails with the stack of every rank that hangs; its pool is killed and
the next test gets a new one. A rank that dies is shown with its native stack and with the bodies that
its pool ran before, since a damaged heap is met later than it is damaged. `run_fresh` gives a body processes of its own and reports what became
of each rank, which is what a test that kills ranks needs.

A rank's life, in order: forked from a server that has only imported what all tests need; joins its
own process group, so that it and all it starts can be killed together; joins the Gloo group through a
file in a temporary folder (no ports); says so, and serves until the parent says stop, closes its
end of the lifeline, or dies.

[Note: Faults outside Python] In about one of eight whole runs a rank dies in a thread of Gloo, with a
damaged heap: with either of our communications, with PyTorch's own engine too, on torch 2.13 and 2.15,
never twice in one test. Nothing that was looked for it with was a cause (memcheck, AddressSanitizer, an
allocator that delays frees and checks freed memory and what is behind blocks). A whole run may repeat
one body in new ranks for it, and then shows the death, with its native stack, among its warnings: a
fault that is the test's own comes again, and fails it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DEFAULT_LIMIT_S = 30.0
# Ranks that still run this long after the first failure wait for the failed one.
GRACE_S = 2.0
NUM_BODIES_SHOWN = 5  # of those that a pool ran before the one in which a rank died
# Ranks with more process groups make room for new ones. Each group of Gloo's has threads that wake
# up every few milliseconds: after 80 groups four idle ranks take a third of a processor.
MAX_GROUPS = 24
# Ranks that have had nothing to run for so long end: their groups' threads wake up all the same.
IDLE_S = 20.0
SERVES = b"serves"
FAULT = "A rank died outside Python"
PRELOADED = [
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.debug",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch._dynamo",
    "pytest",
    "fullshard.public",  # which `import fullshard` puts off
]


class Fate(Enum):
    """What became of one rank's run of a body."""

    RETURNED = "returned"
    RAISED = "raised"
    SKIPPED = "skipped"
    DIED = "died"
    HUNG = "hung"


@dataclass(frozen=True)
class Outcome:
    """How the body ended on one rank, and the evidence.

    `value` is what it returned; `error` the names of the exception's class and of its bases;
    `text` the traceback, the reason of a skip, or where a hanging rank stands; `num_groups` how
    many process groups the rank has by then.
    """

    rank: int
    fate: Fate
    seconds: float
    value: Any = None
    error: tuple[str, ...] = ()
    text: str = ""
    num_groups: int = 0


class RankError(AssertionError):
    """A test body failed, hung or died on at least one rank."""


class Task(NamedTuple):
    """A body by name, with what it is called with."""

    module: str
    name: str
    kwargs: dict[str, Any]


@dataclass
class Rank:
    """The parent's end of one rank's process."""

    process: Any
    connection: Connection
    lifeline: Connection
    dump: Path
    stderr: Path

    def kill(self) -> None:
        """Kill the rank and whatever it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)

    def stack(self) -> str:
        """Ask a rank that hangs for the stack of each of its threads."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.2)
        return _main_thread_first(self.dump.read_text())

    def remains(self) -> str:
        """Return how a dead rank ended: its exit code, and what it wrote about it."""
        self.process.join(5)
        parts = [f"exit code {self.process.exitcode}", self.dump.read_text()]
        if parts[1]:  # a fault: what was written before it is no evidence otherwise
            parts.append(self.stderr.read_text(errors="replace")[-8000:])
        return "\n".join(parts).rstrip()


class Pool:
    """`world_size` ranks that run one body after another until one of them fails."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.folder = Path(tempfile.mkdtemp(prefix="fullshard-tests-"))
        self.usable = True
        self.last_used_s = time.monotonic()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.ranks = [self._start(context, rank) for rank in range(world_size)]
        self._num_joining = world_size
        self._ran: list[str] = []

    def run(self, task: Task, limit_s: float, *, grace_s: float = GRACE_S) -> list[Outcome]:
        """Run a body on every rank; unless all return, the pool cannot be used again.

        Ranks may run on for `grace_s` after the first one that raises or dies.
        """
        begin = time.monotonic()
        deadline = begin + limit_s
        outcomes: dict[int, Outcome] = {}
        self._wait_until_all_serve(deadline)
        for rank in self.ranks:
            with contextlib.suppress(OSError):  # found dead below
                rank.connection.send_bytes(pickle.dumps(task))
        while len(outcomes) < self.world_size and time.monotonic() < deadline:
            for number, outcome in self._arrived(outcomes, begin, deadline):
                outcomes[number] = outcome
                if outcome.fate not in (Fate.RETURNED, Fate.SKIPPED):
                    self.usable = False
                    deadline = min(deadline, time.monotonic() + grace_s)
        for number in set(range(self.world_size)) - set(outcomes):
            self.usable = False
            seconds = time.monotonic() - begin
            stack = self.ranks[number].stack()
            outcomes[number] = Outcome(number, Fate.HUNG, seconds, text=stack)
        self._ran.append(f"{task.module}.{task.name}")
        self.last_used_s = time.monotonic()
        return [outcomes[number] for number in range(self.world_size)]

    def close(self) -> None:
        """Stop the ranks, by force where they do not stop themselves."""
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                if self.usable:
                    rank.connection.send_bytes(b"")
        for rank in self.ranks:
            if self.usable:
                rank.process.join(5)
            rank.kill()
            rank.connection.close()
            rank.lifeline.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, context: Any, number: int) -> Rank:
        ours, theirs = context.Pipe()
        their_lifeline, our_lifeline = context.Pipe(duplex=False)
        dump, stderr = self.folder / f"stack-{number}", self.folder / f"stderr-{number}"
        process = context.Process(
            target=_serve,
            args=(number, self.world_size, self.folder, theirs, their_lifeline),
            name=f"rank {number} of {self.world_size}",
            daemon=False,
        )
        process.start()
        theirs.close()
        their_lifeline.close()
        return Rank(process, ours, our_lifeline, dump, stderr)

    def _wait_until_all_serve(self, deadline: float) -> None:
        """Wait for ranks that still join: one whose body ends it at once would take them along."""
        while self._num_joining and time.monotonic() < deadline:
            rank = self.ranks[-self._num_joining]
            if rank.connection.poll(max(0.0, deadline - time.monotonic())):
                with contextlib.suppress(EOFError, OSError):  # found dead later
                    assert rank.connection.recv_bytes() == SERVES
                self._num_joining -= 1

    def _arrived(
        self, known: dict[int, Outcome], begin: float, deadline: float
    ) -> Iterator[tuple[int, Outcome]]:
        """Yield the outcomes that come in until the deadline, at least one if there is one."""
        waiting = {n: rank for n, rank in enumerate(self.ranks) if n not in known}
        watched = {rank.connection: n for n, rank in waiting.items()}
        ready = wait(list(watched), timeout=max(0.0, deadline - time.monotonic()))
        for connection in ready:
            number = watched[connection]  # type: ignore[index]
            try:
                yield number, pickle.loads(self.ranks[number].connection.recv_bytes())
            except (EOFError, OSError):
                text, seconds = self.ranks[number].remains(), time.monotonic() - begin
                if self._ran:
                    text += f"\nRan before: {', '.join(self._ran[-NUM_BODIES_SHOWN:])}"
                yield number, Outcome(number, Fate.DIED, seconds, text=text)


class Pools:
    """The pools of one test session, by world size.

    num_repeats: how often in the session a body may run again, in new ranks, because a rank died of a
        fault outside Python. See [Note: Faults outside Python].
    """

    def __init__(self, *, num_repeats: int = 0) -> None:
        self._pools: dict[int, Pool] = {}
        self._num_repeats = num_repeats

    def run(self, world_size: int, task: Task, limit_s: float = DEFAULT_LIMIT_S) -> list[Any]:
        """Run a body on every rank of the pool and return what each returned.

        Raises RankError with the report of the first failing rank.
        """
        outcomes = self._outcomes(world_size, task, limit_s)
        if self._num_repeats and any(map(_is_fault, outcomes)):
            self._num_repeats -= 1
            warnings.warn(f"{FAULT} in {task.name}:\n{_report(outcomes)}", stacklevel=2)
            outcomes = self._outcomes(world_size, task, limit_s)
        if any(outcome.fate is Fate.SKIPPED for outcome in outcomes):
            pytest.skip(next(o.text for o in outcomes if o.fate is Fate.SKIPPED))
        if any(outcome.fate is not Fate.RETURNED for outcome in outcomes):
            raise RankError(_report(outcomes))
        return [outcome.value for outcome in outcomes]

    def _outcomes(self, world_size: int, task: Task, limit_s: float) -> list[Outcome]:
        self._close_idle(but=world_size)
        pool = self._pools.get(world_size) or Pool(world_size)
        self._pools[world_size] = pool
        outcomes = pool.run(task, limit_s)
        if not pool.usable or max(outcome.num_groups for outcome in outcomes) > MAX_GROUPS:
            del self._pools[world_size]
            pool.close()
        return outcomes

    def _close_idle(self, *, but: int) -> None:
        now = time.monotonic()
        for size, pool in list(self._pools.items()):
            if size != but and now - pool.last_used_s > IDLE_S:
                self._pools.pop(size).close()

    def close(self) -> None:
        """Stop every rank."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


def on_ranks(*world_sizes: int, limit_s: float = DEFAULT_LIMIT_S) -> Callable[[Any], Any]:
    """Make a function a test whose body runs on every rank of each world size.

    What pytest passes to the test (fixtures and parameters) reaches the body by pickle.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        task = functools.partial(Task, body.__module__, body.__qualname__)

        @functools.wraps(body)
        def test(*, pools: Pools, world_size: int, **kwargs: Any) -> None:
            pools.run(world_size, task(kwargs), limit_s)

        own = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
            for name in ("pools", "world_size")
        ]
        theirs = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(body).parameters.values()
        ]
        test.__signature__ = inspect.Signature(theirs + own)  # type: ignore[attr-defined]
        ids = [f"{size}ranks" for size in world_sizes]
        return pytest.mark.parametrize("world_size", world_sizes, ids=ids)(test)

    return decorate


def run_fresh(
    world_size: int,
    body: Callable[..., Any],
    *,
    limit_s: float = DEFAULT_LIMIT_S,
    **kwargs: Any,
) -> list[Outcome]:
    """Run a body in processes of its own and return what became of every rank.

    Asserts that nothing a rank has started outlives it.
    """
    pool = Pool(world_size)
    try:
        task = Task(body.__module__, body.__qualname__, kwargs)
        outcomes = pool.run(task, limit_s, grace_s=limit_s)
        orphans = [
            f"{pid} (started by rank {number})"
            for number, rank in enumerate(pool.ranks)
            if not rank.process.is_alive()
            for pid in processes_of_group(rank.process.pid)
        ]
        assert not orphans, f"processes outlive their rank: {', '.join(orphans)}"
        return outcomes
    finally:
        pool.close()


@functools.cache
def mesh_of(*shape: int) -> DeviceMesh:
    """Return the mesh of this shape over all ranks, made once per process.

    Two axes are (replicate, shard), as `fully_shard` reads them.
    """
    names = ("replicate", "shard")[-len(shape) :] if len(shape) <= 2 else None
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def rank() -> int:
    """Return this process's rank."""
    return dist.get_rank()


def world_size() -> int:
    """Return the number of ranks."""
    return dist.get_world_size()


# Everything below runs in the ranks.


def _serve(
    number: int, size: int, folder: Path, connection: Connection, lifeline: Connection
) -> None:
    from fullshard.comm import shared_memory

    os.setpgid(0, 0)
    # Of a fault in a thread of Gloo, `faulthandler` does not show the stack. This one goes to stderr,
    # as do the words with which the C library or C++ ends a process.
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    with (folder / f"stderr-{number}").open("w") as stderr:
        os.dup2(stderr.fileno(), 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    dump = (folder / f"stack-{number}").open("w")
    faulthandler.enable(dump)
    faulthandler.register(signal.SIGUSR1, file=dump, all_threads=True)
    threading.Thread(target=_exit_with_parent, args=(lifeline,), daemon=True).start()
    torch.set_num_threads(1)
    # Other pools' ranks want the processor that a rank would spin on: a sixth of all that tests compute.
    shared_memory._SPIN_S = shared_memory._YIELD_S = 0.0
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(
        "gloo", store=store, rank=number, world_size=size, timeout=timedelta(seconds=60)
    )
    gc.freeze()
    connection.send_bytes(SERVES)
    num_bodies = 0
    while message := _receive(connection):
        outcome = _perform(number, pickle.loads(message))
        num_bodies += 1
        _collect(also_frozen=num_bodies % 100 == 0)
        connection.send_bytes(outcome)
    dist.destroy_process_group()


def _receive(connection: Connection) -> bytes:
    try:
        return connection.recv_bytes()
    except EOFError:
        return b""


def _exit_with_parent(lifeline: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os._exit(1)


def _perform(number: int, task: Task) -> bytes:
    begin = time.monotonic()

    def outcome(fate: Fate, **evidence: Any) -> bytes:
        seconds, num_groups = time.monotonic() - begin, len(dist.distributed_c10d._world.pg_map)
        return pickle.dumps(Outcome(number, fate, seconds, num_groups=num_groups, **evidence))

    try:
        value = _call(task)
        return outcome(Fate.RETURNED, value=value)
    except pytest.skip.Exception as skip:
        return outcome(Fate.SKIPPED, text=str(skip))
    except BaseException as error:
        names = tuple(kind.__name__ for kind in type(error).__mro__)
        return outcome(Fate.RAISED, error=names, text=_describe(error))


def _call(task: Task) -> Any:
    body: Any = importlib.import_module(task.module)
    for part in task.name.split("."):
        body = getattr(body, part)
    body = inspect.unwrap(body)
    kwargs = dict(task.kwargs)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("error")
        if isinstance(kwargs.get("api"), str):
            from tests.api import use_api

            kwargs["api"] = stack.enter_context(use_api(kwargs["api"]))
        torch.manual_seed(0)
        value = body(**kwargs)
        # Ranks that disagree about the number of collectives are caught here, in the guilty test.
        dist.barrier()
    return value


def _collect(*, also_frozen: bool) -> None:
    """Free what a body left in cycles.

    What is left after that, modules and caches, is frozen: later collections pass it over, which
    else would take longer than most bodies once the compiler is imported.
    """
    if also_frozen:
        gc.unfreeze()
    gc.collect()
    gc.freeze()


def _describe(error: BaseException) -> str:
    """Format a traceback, with the values of the frame that a plain assert failed in."""
    lines = traceback.format_exception(error)
    if isinstance(error, AssertionError):
        frame, _ = list(traceback.walk_tb(error.__traceback__))[-1]
        lines += [f"    {name} = {_short(value)}\n" for name, value in frame.f_locals.items()]
    return "".join(lines)


def _short(value: Any) -> str:
    """Write a value in one line."""
    try:
        if isinstance(value, torch.nn.Module):
            return f"{type(value).__name__}(...)"
        if isinstance(value, torch.Tensor) and value.numel() > 16:
            return f"{type(value).__name__} of {tuple(value.shape)}, {value.dtype}"
        text = " ".join(repr(value).split())
    except Exception as error:  # a repr must not hide the failure it is to explain
        return f"<repr raised {type(error).__name__}>"
    return text if len(text) <= 200 else text[:200] + "..."


# Everything below runs in the parent.


def _is_fault(outcome: Outcome) -> bool:
    """Whether a rank died of a signal that says of a fault, outside Python's own code."""
    return outcome.fate is Fate.DIED and outcome.text.partition("\n")[0] in _FAULTS


_FAULTS = {f"exit code -{number:d}" for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)}


def _report(outcomes: list[Outcome]) -> str:
    order = (Fate.DIED, Fate.RAISED, Fate.HUNG)  # others raise because one died
    failed = [o for o in outcomes if o.fate in order]
    first = min(failed, key=lambda o: (order.index(o.fate), o.seconds))
    summary = ", ".join(f"rank {o.rank} {o.fate.value}" for o in outcomes)
    parts = [f"{summary}\nrank {first.rank} after {first.seconds:.1f} s:\n{first.text}"]
    parts += [
        f"rank {o.rank} hangs:\n{o.text}" for o in failed if o is not first and o.fate is Fate.HUNG
    ]
    return "\n".join(parts)


def _main_thread_first(dump: str) -> str:
    """Cut a faulthandler dump down to the main thread, which it writes last."""
    threads = dump.strip().split("\n\n")
    return threads[-1] if threads else dump


def processes_of_group(group: int) -> list[int]:
    """List the live processes of a process group (Linux; elsewhere none are found)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state != "Z":
                found.append(int(stat.parent.name))
    return found
