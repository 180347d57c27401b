"""The processes of ranks that `fullshard.launch` starts: their start, what they write, their end."""

import codecs
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import IO, Any

END_S = 2.0  # between the request to end and the kill
_READ_NBYTES = 1 << 16

# A Python that knows nothing of the caller's: it runs no `__main__` again, so that a script needs no guard.
_PROGRAM = """
import sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
sys.path[:] = connection.recv()
from fullshard.launching.rank import serve
serve(connection)
"""


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


class Process:
    """A rank's process, in a session of its own, so that it and all it starts can be ended together.

    The Ctrl-C of a terminal and the stop button of a notebook reach the caller alone, who ends it.
    """

    def __init__(self, rank: int, environment: Mapping[str, str]) -> None:
        self.rank = rank
        self.connection, theirs = multiprocessing.Pipe()
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except BaseException:
            self.connection.close()
            raise
        finally:
            theirs.close()
        self.pid = self._popen.pid
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
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
        deadline = time.monotonic() + END_S
        while (code := self.exit_code) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return -signal.SIGKILL if code is None else code

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

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it, and to all that it started and that is in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """End it, and all that it started, however it has ended itself."""
        self.signal(signal.SIGKILL)
        self._popen.wait()

    def close(self) -> None:
        """Show the rest of what it wrote, and close what leads to it."""
        self.connection.close()
        for output in self.outputs:
            while output.forward():
                pass
            output.flush(at_end=True)
            output.pipe.close()


def end_all(processes: list[Process]) -> None:
    """End processes that still run: by request, then by force. Nothing of theirs runs after it."""
    try:
        for process in processes:
            if process.exit_code is None:
                process.signal(signal.SIGTERM)
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline and any(p.exit_code is None for p in processes):
            time.sleep(0.01)
    finally:  # also if a second Ctrl-C comes
        for process in processes:
            process.kill()
