"""A lab of hosts on one machine: namespaces of Linux, joined by links that can be slowed down, made to lose frames, and cut.

    network     an interface of its own, with one address; all are plugged into one bridge, which is a host by itself
    PID, IPC    ranks of two hosts see nothing of each other's processes, nor of their memory
    UTS         a name of its own
    mount       /proc of its own processes, and one path under which each host has a folder of its own

Nothing of it has a name on the machine, and all of it goes with the process that made it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.run import Ending
from tests.fresh import in_warm_forks

PORT = 29400
_NAMESPACES = ("--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child")


class LabError(Exception):
    """There can be no such lab here; the message is the reason."""


def _run(*words: object) -> None:
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise LabError(f"{' '.join(map(str, words))}: {done.stderr.strip()}")


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


class Host:
    """Namespaces, and the process that keeps them: it is all processes' first, which end with it.

    prepare: what a shell does before anything else runs there.
    """

    def __init__(self, prepare: str = "true") -> None:
        script = f"{prepare} && echo ready && read _"  # until whoever made it is gone
        self._keeper = subprocess.Popen(
            ["unshare", *_NAMESPACES, "--mount-proc", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._keeper.stdout is not None
        assert self._keeper.stderr is not None
        if self._keeper.stdout.readline() != b"ready\n":
            raise LabError(self._keeper.stderr.read().decode().strip())
        (self.pid,) = _children(self._keeper.pid)

    def command(self, *words: object, only: str = "--all") -> list[str]:
        """Return a command that runs another one there. only: which namespaces it enters."""
        return ["nsenter", "--target", str(self.pid), only, *map(str, words)]

    def end(self) -> None:
        """End all processes of the host, without a word of any."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._keeper.communicate()


@dataclass
class Rank:
    """One rank, as this machine sees it: what it writes, and its exit code in a file beside that."""

    number: int
    output: Path

    @property
    def exit_code(self) -> int | None:
        """How it has ended, negative for a signal; None while it runs."""
        ended = _code_of(self.output)
        return int(ended.read_text()) if ended.exists() else None

    @property
    def text(self) -> str:
        """All that it has said."""
        return self.output.read_text(errors="replace")

    @property
    def num_steps(self) -> int:
        """How many steps it has trained."""
        return len(re.findall(r"^step ", self.text, re.MULTILINE))

    def ending(self) -> Ending:
        """Return how it has ended."""
        noted = re.findall(r"^noted (.*)$", self.text, re.MULTILINE)
        found: dict[str, Any] = json.loads(noted[-1]) if noted else {}
        return Ending(self.number, self.exit_code, stderr=self.text, **found)


def _code_of(output: Path) -> Path:
    return output.with_name(f"{output.name}-ended")


_PROGRAM = """
from pathlib import Path
from tests.hosts.lab import be_rank
be_rank({})
"""


def be_rank(host: int, output: Path, module: str, words: list[str]) -> None:
    """Run a module as a program on a host, in a fork; this process waits for its end and notes it.

    host: of the process that keeps its namespaces.
    """
    set_namespace = ctypes.CDLL(None, use_errno=True).setns
    folder = Path.cwd()
    for name in ("net", "uts", "ipc", "pid", "mnt"):
        with Path(f"/proc/{host}/ns/{name}").open() as file:
            assert set_namespace(file.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
    os.chdir(folder)
    if child := os.fork():  # which is the first that is in the namespace of processes
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        partial = output.with_name(f"{output.name}-partial")
        partial.write_text(str(code))
        partial.rename(_code_of(output))
        os._exit(0)
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv[1:] = words
    runpy.run_module(module, run_name="__main__")


@dataclass
class Lab:
    """So many hosts, numbered from 0. folder: where ranks write. per_host: number of ranks. rate: of each link."""

    folder: Path
    num_hosts: int = 2
    per_host: int = 1
    rate: str = "1gbit"
    hosts: list[Host] = field(default_factory=list)
    ranks: list[Rank] = field(default_factory=list)
    _running: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Lab:
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.end()
        self._wait_for_forks()

    def _build(self) -> None:
        if missing := [
            name for name in ("ip", "tc", "unshare", "nsenter") if not shutil.which(name)
        ]:
            raise LabError(f"{missing[0]} is not installed")
        self.own_folder.mkdir()
        for number in range(self.num_hosts):
            own = self.folder / f"of-host-{number}"
            own.mkdir()
            bind = f"hostname host{number} && mount --bind '{own}' '{self.own_folder}'"
            self.hosts.append(Host(bind))
        self.hosts.append(Host())
        self._set_up("link", "add", "bridge", "type", "bridge")
        self._set_up("link", "set", "bridge", "up")
        for number, host in enumerate(self.hosts[:-1]):
            pair = ("type", "veth", "peer", "name", "eth0", "netns", host.pid)
            self._set_up("link", "add", f"plug{number}", *pair)
            self._set_up("link", "set", f"plug{number}", "up", "master", "bridge")
            self._set_up("addr", "add", f"{self.address(number)}/24", "dev", "eth0", at=number)
            for link in ("lo", "eth0"):
                self._set_up("link", "set", link, "up", at=number)
            self.shape(number, "tbf", "rate", self.rate, "burst", "2mb", "latency", "100ms")

    def _set_up(self, *words: object, at: int = -1) -> None:
        _run(*self.hosts[at].command("ip", *words, only="--net"))

    @property
    def own_folder(self) -> Path:
        """A path under which each host has another folder; all else is shared."""
        return self.folder / "own"

    @staticmethod
    def address(host: int) -> str:
        """Return a host's address."""
        return f"10.83.77.{host + 1}"

    def shape(self, host: int, *how: str) -> None:
        """Change what a host's link does to what the host sends: an algorithm of `tc`, with its settings."""
        words = ("tc", "qdisc", "replace", "dev", "eth0", "root", *how)
        _run(*self.hosts[host].command(*words, only="--net"))

    def cut(self, host: int) -> None:
        """Lose all that a host sends and is sent, from now on. No host is told."""
        self._set_up("link", "set", f"plug{host}", "nomaster")

    def mend(self, host: int) -> None:
        """Plug a host in again."""
        self._set_up("link", "set", f"plug{host}", "master", "bridge")

    def open_to_all(self, host: int) -> set[int]:
        """Return the ports of a host that listen on all of its interfaces."""
        found = set()
        for table in ("tcp", "tcp6"):
            for line in (
                Path(f"/proc/{self.hosts[host].pid}/net/{table}").read_text().splitlines()[1:]
            ):
                _, local, _, state, *_ = line.split()
                address, port = local.split(":")
                if state == "0A" and not int(address, 16):
                    found.add(int(port, 16))
        return found

    def start(self, *words: object, variables: Mapping[str, str] | None = None) -> list[Rank]:
        """Start the ranks of a module of this package, as a launcher would: forks of a Python that has torch."""
        self._wait_for_forks()
        module, *options = map(str, words)
        size = self.num_hosts * self.per_host
        programs, environments = [], []
        for number in range(size):
            host, local = divmod(number, self.per_host)
            own = {
                "RANK": number,
                "LOCAL_RANK": local,
                "WORLD_SIZE": size,
                "LOCAL_WORLD_SIZE": self.per_host,
                "MASTER_ADDR": self.address(0),
                "MASTER_PORT": PORT,
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": 1,
                **(variables or {}),
            }
            environments.append({name: str(value) for name, value in own.items()})
            rank = Rank(number, self.folder / f"rank-{number}")
            rank.output.write_bytes(b"")
            _code_of(rank.output).unlink(missing_ok=True)
            pid, output = self.hosts[host].pid, str(rank.output)
            programs.append(_PROGRAM.format(f"{pid}, Path({output!r}), {module!r}, {options}"))
            self.ranks.append(rank)
        running = threading.Thread(
            target=in_warm_forks, args=programs, kwargs={"variables": environments}
        )
        running.start()
        self._running.append(running)
        return self.ranks

    def _wait_for_forks(self) -> None:
        for thread in self._running:
            thread.join()

    def wait_until(self, condition: Callable[[Rank], bool], limit_s: float = 200.0) -> None:
        """Return once this is true of all ranks; fails with what they have said."""
        deadline = time.monotonic() + limit_s
        while not all(condition(rank) for rank in self.ranks):
            assert time.monotonic() < deadline, self.report()
            time.sleep(0.1)

    def wait_for_step(self, number: int) -> None:
        """Return once all ranks have trained so many steps."""
        self.wait_until(lambda rank: rank.num_steps >= number or rank.exit_code is not None)
        assert all(rank.exit_code is None for rank in self.ranks), self.report()

    def endings(self, limit_s: float, *, but: int | None = None) -> list[Ending]:
        """Wait for all ranks to end, except perhaps for one that never does."""
        self.wait_until(lambda rank: rank.number == but or rank.exit_code is not None, limit_s)
        return [rank.ending() for rank in self.ranks]

    def report(self) -> str:
        """Return all that ranks have said."""
        return "\n".join(
            f"rank {rank.number}, exit code {rank.exit_code}:\n{rank.text}" for rank in self.ranks
        )
