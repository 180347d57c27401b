"""A lab of hosts on one machine: namespaces of Linux, joined by links that can be slowed down, made to lose frames, and cut.

    network     an interface of its own, with one address; all are plugged into one bridge, which is a host by itself
    PID, IPC    ranks of two hosts see nothing of each other's processes, nor of their memory
    UTS         a name of its own
    mount       /proc of its own processes, and one path under which each host has a folder of its own

Nothing of it has a name on the machine, and all of it goes with the process that made it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.run import Ending

ROOT = Path(__file__).parent.parent.parent
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
    """One rank's process, as this machine sees it."""

    number: int
    process: subprocess.Popen[bytes]
    output: Path

    @property
    def text(self) -> str:
        """All that it has said."""
        return self.output.read_text(errors="replace")

    @property
    def num_steps(self) -> int:
        """How many steps it has trained."""
        return len(re.findall(r"^step ", self.text, re.MULTILINE))

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal."""
        os.kill(_children(self.process.pid)[0], number)  # `nsenter` stands before it

    def ending(self) -> Ending:
        """Return how it has ended."""
        noted = re.findall(r"^noted (.*)$", self.text, re.MULTILINE)
        found: dict[str, Any] = json.loads(noted[-1]) if noted else {}
        return Ending(self.number, self.process.poll(), stderr=self.text, **found)


@dataclass
class Lab:
    """So many hosts, numbered from 0. folder: where ranks write. per_host: number of ranks. rate: of each link."""

    folder: Path
    num_hosts: int = 2
    per_host: int = 1
    rate: str = "1gbit"
    hosts: list[Host] = field(default_factory=list)
    ranks: list[Rank] = field(default_factory=list)

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
        for rank in self.ranks:
            rank.process.wait()

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
        """Start the ranks of a module of this package, as a launcher would."""
        size = self.num_hosts * self.per_host
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
                "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
                **(variables or {}),
            }
            output = self.folder / f"rank-{number}"
            with output.open("wb") as file:
                process = subprocess.Popen(
                    self.hosts[host].command(sys.executable, "-m", *words),
                    env={**os.environ, **{name: str(value) for name, value in own.items()}},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            self.ranks.append(Rank(number, process, output))
        return self.ranks

    def wait_until(self, condition: Callable[[Rank], bool], limit_s: float = 200.0) -> None:
        """Return once this is true of all ranks; fails with what they have said."""
        deadline = time.monotonic() + limit_s
        while not all(condition(rank) for rank in self.ranks):
            assert time.monotonic() < deadline, self.report()
            time.sleep(0.1)

    def wait_for_step(self, number: int) -> None:
        """Return once all ranks have trained so many steps."""
        self.wait_until(lambda rank: rank.num_steps >= number or rank.process.poll() is not None)
        assert all(rank.process.poll() is None for rank in self.ranks), self.report()

    def endings(self, limit_s: float, *, but: int | None = None) -> list[Ending]:
        """Wait for all ranks to end, except perhaps for one that never does."""
        self.wait_until(lambda rank: rank.number == but or rank.process.poll() is not None, limit_s)
        return [rank.ending() for rank in self.ranks]

    def report(self) -> str:
        """Return all that ranks have said."""
        return "\n".join(
            f"rank {rank.number}, exit code {rank.process.poll()}:\n{rank.text}"
            for rank in self.ranks
        )
