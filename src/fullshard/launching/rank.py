"""One rank of `fullshard.launch`, from its start to its end. It talks to its launcher over one connection.

    receives where to import from   before anything of the user's is imported
    receives a Task, then the packed function with its arguments
    joins the others, calls the function
    sends Returned and ends, or sends Raised and waits for its end

After an error it does not leave by itself: its sockets would close, and others' errors about that
could come before its own.
"""

import contextlib
import io
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
import torch.distributed as dist

from fullshard.errors import LaunchError, message_of
from fullshard.launching.travel import pack, unpack
from fullshard.local_ranks import LAUNCHER_PID, die_with_launcher


class Task(NamedTuple):
    """How each rank joins the others; its environment says where it stands among them.

    backend: as `init_process_group` takes it. uses_gpu: whether it has one for itself. what: the
    function's name, for messages.
    """

    backend: str
    uses_gpu: bool
    what: str


class Returned(NamedTuple):
    """What the function returned, packed."""

    value: bytes


class Raised(NamedTuple):
    """How the function failed.

    headline: the exception in a line. text: its traceback, as Python prints it, with notes. classes:
    the names of its class and of their bases. exception: pickled, or nothing if it cannot be.
    """

    headline: str
    text: str
    classes: tuple[str, ...]
    exception: bytes


def serve(connection: Connection) -> None:
    """Be one rank."""
    task: Task = connection.recv()
    die_with_launcher(int(os.environ[LAUNCHER_PID]), says_ends=True)
    try:
        call, arguments = _received(connection.recv_bytes())
        _join(task)
        result = call(*arguments)
        try:
            message = Returned(pack(result))
        except LaunchError as error:
            raise LaunchError(
                f"{task.what} returned what cannot travel: {error}"
            ) from error.__cause__
    except BaseException as error:  # SystemExit is one as well
        connection.send(_raised(error))
        with contextlib.suppress(EOFError):
            connection.recv()  # nothing comes: the launcher ends this process
        os._exit(1)
    connection.send(message)
    if dist.is_initialized():  # unless the function has destroyed it
        dist.destroy_process_group()


def _received(packed: bytes) -> tuple[Callable[..., object], tuple[object, ...]]:
    try:
        call, arguments = unpack(packed)
    except Exception as error:
        raise LaunchError(
            f"a rank cannot unpickle what it was sent: {type(error).__name__}: {error}. It imports from the "
            "launching process's sys.path."
        ) from error
    return call, arguments


def _join(task: Task) -> None:
    rank, ranks, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    device = None
    if task.uses_gpu:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        assert accelerator is not None
        torch.accelerator.set_device_index(rank)
        device = torch.device(accelerator.type, rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        task.backend, store=store, rank=rank, world_size=ranks, device_id=device
    )


def _raised(error: BaseException) -> Raised:
    trace = error.__traceback__
    if trace is not None and trace.tb_next is not None:
        trace = trace.tb_next  # from the function on, without this file
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        # As if it ended the program: torch names the rank, fullshard adds what the message lacks.
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    kind, text = type(error).__name__, message_of(error)
    try:
        exception = pack(error)
        unpack(exception)  # a constructor of its own may want other arguments
    except Exception:
        exception = b""
    classes = tuple(each.__name__ for each in type(error).__mro__)
    return Raised(f"{kind}: {text}" if text else kind, printed.getvalue(), classes, exception)
