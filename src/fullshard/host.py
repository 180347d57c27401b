"""What tells this host from others, its memory and addresses, and limits of a process: its open files, and what a container
puts on it (control groups of version 2 and 1)."""

import contextlib
import errno
import functools
import importlib
import mmap
import os
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Files of a limit, and of what is used of it: version 2, and 1, which has a number where there is none.
_OF_MEMORY = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
_NO_LIMIT = 1 << 60
_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
_BOOT_ID = "sys/kernel/random/boot_id"
_LISTENS = "0A"  # a state, in the kernel's tables of sockets
_EXIT_CODE = 49  # in /proc/PID/stat, counted from the state
_GET_ADDRESS = 0x8915  # SIOCGIFADDR, from linux/sockios.h


@functools.cache
def identity() -> str:
    """Return a name of this host that those processes have alike which can open each other's files through /proc.

    They have one kernel, pid namespace and user. A host's own name would be the same in containers that cannot
    see each other. Raises OSError where there is no /proc.
    """
    return f"{boot_id()} {pid_namespace()} {os.getuid()}"


def boot_id() -> str:
    """Return what tells this start of the machine from others, also for its clock. Raises OSError as `identity`."""
    return (_PROC / _BOOT_ID).read_text().strip()


def pid_namespace() -> str:
    """Return what tells this container's process numbers from others'. Raises OSError as `identity`."""
    return str(Path("/proc/self/ns/pid").readlink())


class Quotas(NamedTuple):
    """Limits of a process's control groups, and what is used of them; None where there is none."""

    cores: float | None
    memory_nbytes: int | None
    memory_used_nbytes: int | None
    max_tasks: int | None
    tasks: int | None


def read_quotas() -> Quotas:
    """Read the tightest limit of each kind, over the process's groups and those around them."""
    folders = list(_folders())
    memory, used = _tightest(folders, *_OF_MEMORY)
    max_tasks, tasks = _tightest(folders, ("pids.max", "pids.current"))
    if memory is not None and memory >= _NO_LIMIT:
        memory = used = None
    return Quotas(_cores(folders), memory, used, max_tasks, tasks)


def read_addresses() -> dict[str, str]:
    """Return the IPv4 address of each network interface that has one."""
    found = {}
    with contextlib.suppress(OSError, ImportError):
        fcntl: Any = importlib.import_module("fcntl")  # Unix has it
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):
                    request = struct.pack("256s", name.encode()[:15])
                    reply = fcntl.ioctl(asked.fileno(), _GET_ADDRESS, request)
                    found[name] = socket.inet_ntoa(reply[20:24])
    return found


def process_state(pid: int) -> str:
    """Return the letter by which the system says what a process does, such as T if it is stopped; empty if it is gone."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def exit_code(pid: int) -> int | None:
    """Return how a process of this host ended whose parent has not asked yet, negative for a signal; None if that is unknown."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] in "ZX":
            return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE]))
    return None


def is_running(pid: int) -> bool:
    """Return whether a process of this host runs; True if that cannot be found out."""
    if not (state := process_state(pid)):
        # Not asked by opening a file, of which this process may have no more. Without /proc, every process seems to be gone.
        return Path(f"/proc/{pid}").exists() or not Path("/proc/self").exists()
    return state not in "ZX"  # zombie or dead: its parent has not asked for its exit status yet


def read_memory() -> dict[str, int]:
    """Return the fields of /proc/meminfo, in bytes."""
    found = {}
    for line in (_read(_PROC / "meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        number, _, unit = rest.strip().partition(" ")
        if unit == "kB" and number.isdigit():
            found[name] = int(number) * 1024
    return found


class Pool(NamedTuple):
    """Memory that processes share: that of a host, or what a container may have of it.

    name: for messages. free_nbytes: what they can still get, with what the system would give up of its
    caches. swap_nbytes: what could be moved out for them.
    """

    name: str
    free_nbytes: int
    swap_nbytes: int


def memory_pools() -> dict[str, Pool]:
    """Return what this process can still get, by keys that all processes of a pool have alike.

    Empty where the system does not tell.
    """
    memory = read_memory()
    if "MemAvailable" not in memory:
        return {}
    swap = memory.get("SwapFree", 0)
    boot = _read(_PROC / _BOOT_ID) or ""
    pools = {boot: Pool("this host", memory["MemAvailable"], swap)}
    # Containers may have paths of the same names.
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = str((_PROC / "self/ns/cgroup").readlink())
    container = f"{boot} {namespace} {_read(_PROC / 'self/cgroup')}"
    for folder in _folders():
        for names in _OF_MEMORY:
            limit, used = (_number(folder / name) for name in names)
            if limit is not None and used is not None and limit < _NO_LIMIT:
                free = limit - used + _reclaimable(folder)
                name = f"this container, which may have {limit / 2**30:,.1f} GiB"
                pools[f"{container} {folder}"] = Pool(name, max(free, 0), swap)
    return pools


def _reclaimable(folder: Path) -> int:
    """Return how much of a group's memory is cached files, which count as used."""
    found = {}
    for line in (_read(folder / "memory.stat") or "").splitlines():
        name, _, number = line.partition(" ")
        found[name.removeprefix("total_")] = int(number)  # version 1: with groups inside
    return sum(found.get(name, 0) for name in ("active_file", "inactive_file", "slab_reclaimable"))


def filesystem(path: Path) -> str:
    """Return the type of the filesystem that a path is on, such as ext4; empty where the system does not tell."""
    found, depth = "", 0
    for line in (_read(_PROC / "self/mountinfo") or "").splitlines():
        about, _, type_and_source = line.partition(" - ")
        # A space in a path is \040.
        mount = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), about.split()[4]))
        if path.resolve().is_relative_to(mount) and len(mount.parts) >= depth:
            found, depth = type_and_source.split()[0], len(mount.parts)  # the last covers others
    return found


def resident_nbytes() -> int | None:
    """Return how much memory this process occupies, shared memory that it uses included."""
    with contextlib.suppress(AttributeError, IndexError, ValueError):
        return int((_read(Path("/proc/self/statm")) or "").split()[1]) * mmap.PAGESIZE
    return None


def files_left() -> int | None:
    """Return how many more files this process may open; None where the system does not tell."""
    try:
        resource: Any = importlib.import_module("resource")  # Unix has it
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        num_open = len(os.listdir("/proc/self/fd")) - 1  # noqa: PTH208  (one is of the listing)
    except (OSError, ImportError) as error:
        return 0 if isinstance(error, OSError) and error.errno == errno.EMFILE else None
    return None if limit == resource.RLIM_INFINITY else max(limit - num_open, 0)


def is_listening(port: int) -> bool:
    """Whether this process itself waits for connections at a TCP port. Raises OSError where it may open no file."""
    own = set()
    for each in (_PROC / "self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            own.add(str(each.readlink()))
    tables = [_PROC / "self/net" / name for name in ("tcp", "tcp6")]
    texts = (table.read_text() for table in tables if table.exists())
    rows = (line.split() for text in texts for line in text.splitlines())
    at = f":{port:04X}"
    return any(
        row[1].endswith(at) and row[3] == _LISTENS and f"socket:[{row[9]}]" in own for row in rows
    )


def _folders() -> Iterator[Path]:
    """Yield the folders of the process's groups, each followed by those around it."""
    for line in (_read(_PROC / "self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        base = _GROUPS / controllers if controllers else _GROUPS
        # Inside a container the path may be one that only its host has; the base is there.
        for folder in (base / path.lstrip("/"), *(base / path.lstrip("/")).parents):
            yield folder
            if folder == base:
                break


def _tightest(folders: list[Path], *names: tuple[str, str]) -> tuple[int | None, int | None]:
    """Return the limit that leaves least, and what is used of it. names: (limit, used) of files."""
    found = [
        (limit, _number(folder / used_name))
        for folder in folders
        for limit_name, used_name in names
        if (limit := _number(folder / limit_name)) is not None
    ]
    return min(found, key=lambda each: each[0] - (each[1] or 0), default=(None, None))


def _cores(folders: list[Path]) -> float | None:
    quotas = []
    for folder in folders:
        quota, _, period = (_read(folder / "cpu.max") or "").partition(" ")
        if not quota:
            quota = _read(folder / "cpu.cfs_quota_us") or ""
            period = _read(folder / "cpu.cfs_period_us") or ""
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _number(path: Path) -> int | None:
    text = _read(path) or ""
    return int(text) if text.isdigit() else None  # "max" is no limit


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
