"""Processes of ranks of this machine, for whoever starts some: their start, what they write, their end.

Each is in a session of its own, so that it and all it starts can be ended together. The Ctrl-C of a terminal and the
stop button of a notebook reach the caller alone, who ends it. None outlives the caller: `die_with_launcher`.
"""

import codecs
import contextlib
import datetime
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import IO, Any

import torch.distributed as dist

from fullshard.local_ranks import LAUNCHER_PID, threads_for

GRACE_S = 1.0  # for others' errors and output, after the first failure
END_S = 2.0  # between the request to end and the kill
_DIE_S = 30.0  # after the kill
_READ_NBYTES = 1 << 16
_CONNECT = datetime.timedelta(
    seconds=10
)  # to a store of this process, and no longer: it may have no files left

# A Python that knows nothing of the caller's: it runs no `__main__` again, so that a script needs no guard.
_PROGRAM = """
import sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
sys.path[:] = connection.recv()
from fullshard.launching.rank import serve
serve(connection)
"""


class Meeting:
    """Where ranks of this machine meet: a store of the caller's, which lives as long as this does.

    threads: of a rank's computations; None for the processors in equal parts, or what OMP_NUM_THREADS says.
    """

    def __init__(self, ranks: int, threads: int | None = None) -> None:
        self.ranks = ranks
        self._threads = threads or threads_for(ranks, os.environ)
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._port = self._socket.getsockname()[1]
        self._store: dist.TCPStore | None = None

    def open(self) -> None:
        """Answer ranks. To be called once they are forked: it takes threads, which forks do not have."""
        self._store = dist.TCPStore(
            "127.0.0.1",
            self._port,
            is_master=True,
            wait_for_workers=False,
            timeout=_CONNECT,
            master_listen_fd=self._socket.detach(),
        )

    def knows(self, key: str) -> bool:
        """Return whether a rank has set a key in the store."""
        return self._store is not None and self._store.check([key])

    def environment(self, rank: int) -> dict[str, str]:
        """Return what a rank finds in its environment, in the words of torchrun."""
        place: dict[str, object] = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": self.ranks,
            "LOCAL_WORLD_SIZE": self.ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self._port,
            "OMP_NUM_THREADS": self._threads,
            LAUNCHER_PID: os.getpid(),
        }
        return {**os.environ, **{name: str(value) for name, value in place.items()}}


class Process:
    """A rank's process."""

    def __init__(
        self, rank: int, command: Sequence[str], environment: Mapping[str, str], **options: Any
    ) -> None:
        self.rank = rank
        self._popen = self._started(command, environment, options)
        self.pid = self._popen.pid

    def _started(
        self, command: Sequence[str], environment: Mapping[str, str], options: dict[str, Any]
    ) -> Any:
        return subprocess.Popen(command, env=dict(environment), start_new_session=True, **options)

    @property
    def exit_code(self) -> int | None:
        """Return how it ended, negative for a signal; None while it runs.

        The system goes on counting it among its processes, so that its number stays taken and `signal`
        reaches no stranger.
        """
        if self._popen.returncode is not None:
            return self._popen.returncode
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def signal(self, number: int) -> None:
        """Send a signal to it, and to all that it started and that is in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """End it, and all that it started, however it has ended itself."""
        self.signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that its kernel does not let go
            self._popen.wait(_DIE_S)


def wait_for_end(
    processes: Collection[Process], within_s: float, unless: Callable[[], bool] = lambda: False
) -> bool:
    """Wait until all have ended, or the condition holds; return whether they have ended."""
    deadline = time.monotonic() + within_s
    while any(process.exit_code is None for process in processes):
        if time.monotonic() >= deadline or unless():
            return False
        time.sleep(0.01)
    return True


def end_all(processes: Collection[Process]) -> None:
    """End processes that still run: by request, then by force. Nothing of theirs runs after it."""
    try:
        for process in processes:
            if process.exit_code is None:
                process.signal(signal.SIGTERM)
        wait_for_end(processes, END_S)
    finally:  # also if a second Ctrl-C comes
        kill_all(processes)


def kill_all(processes: Collection[Process]) -> None:
    """End processes at once, and all at the same time: none lives to tell of the end of another."""
    for process in processes:
        process.signal(signal.SIGKILL)
    for process in processes:
        process.kill()


class FunctionProcess(Process):
    """A process that gets a function to call, sends what came of it, and whose output is shown by the caller."""

    def __init__(self, rank: int, environment: Mapping[str, str]) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        try:
            super().__init__(
                rank,
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
                {**environment, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=[theirs.fileno()],
            )
        except BaseException:
            self.connection.close()
            raise
        finally:
            theirs.close()
        prefix = f"[rank {rank}] " if rank else ""
        self.outputs = [
            Output(self._popen.stdout, "stdout", prefix),
            Output(self._popen.stderr, "stderr", prefix),
        ]

    def tell(self, task: object, packed: bytes) -> None:
        """Send what it is to do. It reads that once it has imported torch."""
        with contextlib.suppress(OSError):  # its death is found later
            self.connection.send(sys.path)
            self.connection.send(task)
            self.connection.send_bytes(packed)

    def message(self) -> Any:
        """Return what it has sent, or None if it ended without."""
        try:
            return self.connection.recv() if self.connection.poll() else None
        except (EOFError, OSError):
            return None

    def wait(self) -> int:
        """Return how a process ended that has closed its connection, and ends as well at any moment."""
        wait_for_end([self], END_S)
        code = self.exit_code
        return -signal.SIGKILL if code is None else code

    def close(self) -> None:
        """Show the rest of what it wrote, and close what leads to it."""
        self.connection.close()
        for output in self.outputs:
            while output.forward():
                pass
            output.flush(at_end=True)
            output.pipe.close()


class Output:
    """What a rank writes into one pipe, shown in the caller's stream (a notebook's cell) in whole lines.

    prefix: what each line begins with. Without one, a line that is not complete is shown when
    nothing follows: a progress bar.
    """

    def __init__(self, pipe: IO[bytes], stream: str, prefix: str) -> None:
        self.pipe = pipe
        os.set_blocking(pipe.fileno(), False)
        self._stream = stream
        self._prefix = prefix
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rest = ""
        self.has_ended = False

    def forward(self) -> bool:
        """Show the whole lines of what there is by now; return whether there was anything."""
        data = self.pipe.read(_READ_NBYTES)  # None if nothing is there, empty if nothing will be
        text = self._rest + self._decode(data or b"", final=data == b"")
        end = max(text.rfind("\n"), text.rfind("\r")) + 1
        whole, self._rest = text[:end], text[end:]
        self._show(whole)
        self.has_ended = data == b""
        return bool(data)

    def flush(self, *, at_end: bool = False) -> None:
        """Show what is not a whole line yet, if it has no prefix or nothing will follow."""
        if self._rest and (at_end or not self._prefix):
            rest, self._rest = self._rest, ""
            self._show(rest + "\n" if at_end and self._prefix else rest)

    def _show(self, text: str) -> None:
        if not text:
            return
        if self._prefix:
            text = "".join(self._prefix + line for line in text.splitlines(keepends=True))
        stream = getattr(sys, self._stream)  # looked up now: a notebook has one for each cell
        stream.write(text)
        stream.flush()
