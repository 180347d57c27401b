"""`fullshard.launch`: a function on ranks of this machine, from a notebook's cell, a prompt or a script.

Ranks are new Pythons, not forks: a fork inherits locks that other threads held, a notebook has such
threads, and what OpenMP and CUDA have begun in the parent does not work in its forks.
"""

import contextlib
import itertools
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from fullshard.errors import LaunchError
from fullshard.launching.processes import GRACE_S, FunctionProcess, Meeting, Output, end_all
from fullshard.launching.rank import Raised, Returned, Task
from fullshard.launching.travel import pack, unpack
from fullshard.local_ranks import num_gpus

T = TypeVar("T")

_LOOK_S = 0.1  # how long a death can go unseen
_LEAVE_S = 10.0  # for ranks to leave, after all have returned
# How errors are called that follow from another rank's end.
_FOLLOWING = {"PeerLostError", "DistNetworkError"}


class _Died(NamedTuple):
    """A rank ended without a word."""

    pid: int
    exit_code: int


_Ending = Returned | Raised | _Died


def launch(
    function: Callable[..., T],
    *args: object,
    ranks: int = 2,
    backend: str | None = None,
    threads: int | None = None,
) -> list[T]:
    """Call a function on ranks of this machine, and return what each rank returned, in their order.

        def train(steps):                        # in a cell of a notebook
            model = fullshard.fully_shard(Net())
            ...
            return loss.item()

        losses = fullshard.launch(train, 20, ranks=2)      # [0.31, 0.29]

    Each rank is a new process, and a member of the default process group when the function is called.
    backend: None for NCCL where each rank has a GPU of its own, with Gloo for the CPU, and for Gloo
    elsewhere. threads: of a rank's computations; None for the processors in equal parts, or what
    OMP_NUM_THREADS says.

    The function, its arguments and results are pickled; functions and classes of a notebook, a prompt
    or a script need cloudpickle (`pip install cloudpickle`). Tensors travel as copies, to
    host memory. What ranks write appears here, beginning with `[rank 1]` but for rank 0.

    Raises LaunchError when a rank raises or dies, with its traceback; the others are ended. So are all
    when this call is interrupted, or when this process dies.
    """
    what = getattr(function, "__name__", type(function).__name__)
    _check(function, what, ranks)
    try:
        packed = pack((function, args))
    except LaunchError as error:
        raise LaunchError(
            f"launch({what}) cannot send what it was given: {error}"
        ) from error.__cause__
    uses_gpus = backend != "gloo" and num_gpus() >= ranks
    backend = backend or ("cpu:gloo,cuda:nccl" if uses_gpus else "gloo")
    task = Task(backend, uses_gpus, what)
    return [unpack(result.value) for result in _run(task, packed, Meeting(ranks, threads))]


def _check(function: object, what: str, ranks: int) -> None:
    if not callable(function):
        raise LaunchError(
            f"launch was given a {type(function).__name__}, which cannot be called. Pass the function itself and its "
            "arguments: launch(train, 20), not launch(train(20))."
        )
    if ranks < 1:
        raise LaunchError(
            f"launch({what}, ranks={ranks}): there is no job without ranks. Use 1 or more."
        )
    if dist.is_initialized() or dist.is_torchelastic_launched():
        here = (
            f"rank {dist.get_rank()} of {dist.get_world_size()}"
            if dist.is_initialized()
            else "a rank of torchrun"
        )
        raise LaunchError(
            f"launch({what}) starts ranks of its own, and this process is {here} already. Call it outside of ranks; a "
            "process group that was made here is left by torch.distributed.destroy_process_group()."
        )


def _run(task: Task, packed: bytes, meeting: Meeting) -> list[Returned]:
    """Start the ranks, and see them to their end."""
    processes: list[FunctionProcess] = []
    endings: dict[int, _Ending] = {}
    try:
        for rank in range(meeting.ranks):
            environment = meeting.environment(rank)
            processes.append(FunctionProcess(rank, environment))
        meeting.open()
        for process in processes:
            process.tell(task, packed)
        _follow(processes, endings)
    finally:
        try:
            end_all(processes)
        finally:
            for process in processes:
                process.close()
    failed = [rank for rank, ending in endings.items() if not isinstance(ending, Returned)]
    if failed:
        first = min(failed, key=lambda rank: _place_among_causes(endings[rank]))
        raise _error_of(task, first, endings)
    return [ending for _, ending in sorted(endings.items()) if isinstance(ending, Returned)]


def _follow(processes: list[FunctionProcess], endings: dict[int, _Ending]) -> None:
    """Show what ranks write and note how each ends, until all have, or for a moment after a failure."""
    deadline = float("inf")
    with selectors.DefaultSelector() as selector:
        for process in processes:
            selector.register(process.connection, selectors.EVENT_READ, process)
            for output in process.outputs:
                selector.register(output.pipe, selectors.EVENT_READ, output)
        while time.monotonic() < deadline:
            have_ended = [process for process in processes if process.exit_code is not None]
            ready = [key.data for key, _ in selector.select(_LOOK_S)]
            for output in (each for each in ready if isinstance(each, Output)):
                output.forward()
                if output.has_ended:
                    selector.unregister(output.pipe)
            # What a process has started may hold its connection, so that its end does not show there.
            for process in {
                *have_ended,
                *(each for each in ready if isinstance(each, FunctionProcess)),
            }:
                if process.rank not in endings:
                    endings[process.rank] = process.message() or _Died(process.pid, process.wait())
                    selector.unregister(process.connection)
            if not ready:
                for process in processes:
                    for output in process.outputs:
                        output.flush()
            if len(have_ended) == len(processes):
                break
            if deadline == float("inf"):
                if any(not isinstance(ending, Returned) for ending in endings.values()):
                    deadline = time.monotonic() + GRACE_S
                elif len(endings) == len(processes):
                    deadline = time.monotonic() + _LEAVE_S


def _place_among_causes(ending: _Ending) -> int:
    """Put a death before errors, and errors before those that follow from another rank's end."""
    if isinstance(ending, Raised):
        return 2 if _FOLLOWING & {*ending.classes} else 1
    return 0


def _error_of(task: Task, rank: int, endings: Mapping[int, _Ending]) -> LaunchError:
    ending, cause = endings[rank], None
    if isinstance(ending, Raised) and "LaunchError" in ending.classes:
        # Said by this room itself: where in its code is of no use.
        text = f"rank {rank}: {ending.headline.partition(': ')[2]}"
    elif isinstance(ending, Raised):
        text = f"rank {rank} raised {ending.headline}\n\n{ending.text.rstrip()}"
        before = [str(each) for each in itertools.takewhile(lambda each: each != rank, endings)]
        if before and all(isinstance(endings[int(each)], Returned) for each in before):
            text += f"\n\nBefore that, {task.what} had returned on rank {', '.join(before)}."
        with contextlib.suppress(Exception):  # its class may need what is not here
            cause = unpack(ending.exception)
    else:
        assert isinstance(ending, _Died)
        if ending.exit_code < 0:
            name = signal.Signals(-ending.exit_code).name
            how = f"was killed by {name}"
            if name == "SIGKILL":
                how += ", often by the system, for lack of host memory (dmesg says so)"
        else:
            how = f"ended with exit code {ending.exit_code} before {task.what} returned"
        text = f"rank {rank} (pid {ending.pid}) {how}. What it wrote last is above."
    error = LaunchError(text)
    error.rank = rank
    error.__cause__ = cause
    return error
