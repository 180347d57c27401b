"""What an examination has measured: values without any judgement.

Every rank makes its own `RankFacts`; ranks together find `Link`, `Knock`, `Collective` and
`Communication`. The rank that reports puts all of them into one `Examination`.
"""

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """A CUDA device that a process sees."""

    name: str
    nbytes: int
    capability: str
    uuid: str


@dataclasses.dataclass(frozen=True, slots=True)
class Devices:
    """The CUDA devices that a process sees; none where torch cannot use one.

    current: number of the one that the rank would take; None without devices.
    free_nbytes: of its memory; None if that was not to be found out.
    no_access: pairs (i, j) where device i cannot reach the memory of device j.
    has_driver: whether the machine has NVIDIA's driver loaded, seen by torch or not.
    """

    found: tuple[Device, ...] = ()
    current: int | None = None
    free_nbytes: int | None = None
    no_access: tuple[tuple[int, int], ...] = ()
    has_driver: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """The host that a rank runs on, as its container shows it. None is what could not be read.

    boot_id: differs between two machines of one name, or two containers that cannot see each other.
    cores: that the process may run on (affinity); core_quota: processor time that its cgroup grants.
    memory_limit_nbytes: of its cgroup; what it has used of that is `memory_used_nbytes`.
    shm_nbytes: size of /dev/shm.
    overcommit: `vm.overcommit_memory`.
    tasks, max_tasks: processes and threads of its cgroup.
    addresses: what the host's own name resolves to.
    interfaces: IPv4 address by network interface.
    """

    name: str
    boot_id: str
    system: str
    cores: int
    core_quota: float | None = None
    memory_nbytes: int | None = None
    memory_free_nbytes: int | None = None
    memory_limit_nbytes: int | None = None
    memory_used_nbytes: int | None = None
    shm_nbytes: int | None = None
    shm_free_nbytes: int | None = None
    overcommit: int | None = None
    tasks: int | None = None
    max_tasks: int | None = None
    has_infiniband: bool = False
    addresses: tuple[str, ...] = ()
    interfaces: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a process; None is no limit, or one that could not be read.

    open_files_hard: up to which `ulimit -n` may raise open_files.
    """

    open_files: int | None = None
    open_files_hard: int | None = None
    locked_nbytes: int | None = None
    processes: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank's process.

    versions: of fullshard, torch, Python and what torch was built with, by name.
    packages: version of every installed package, by name.
    threads: that torch computes with.
    environment: the variables that matter, as `environment.relevant` chooses them.
    """

    rank: int
    local_rank: int
    num_local_ranks: int
    pid: int
    machine: Machine
    versions: Mapping[str, str]
    packages: Mapping[str, str] = dataclasses.field(default_factory=dict)
    backends: tuple[str, ...] = ()
    devices: Devices = Devices()
    limits: Limits = Limits()
    threads: int = 1
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    has_py_spy: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """What a rank says when it comes, before anything else: plain, for any version to read.

    gpu: UUID of the GPU that it would take; empty without one.
    """

    rank: int
    host: str
    boot_id: str
    pid: int
    fullshard: str
    gpu: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """Two ranks that sent each other messages over Gloo.

    turn: in the order of all pairs; after one that fails, later ones of its ranks may fail for that alone.
    clock_offset_s: by how much the second one's clock is ahead, give or take clock_error_s.
    error: why they could not; the measurements are 0 then.
    """

    first: int
    second: int
    turn: int
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    clock_offset_s: float = 0.0
    clock_error_s: float = 0.0
    error: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Knock:
    """A connection from one host to another, at the address that Gloo would use; made by two ranks."""

    source: int
    target: int
    address: str
    error: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """An all-reduce over NCCL. bytes_per_s: of the buffer, as each rank sees it."""

    ranks: tuple[int, ...]
    seconds: float = 0.0
    bytes_per_s: float = 0.0
    error: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Communication:
    """What fullshard chose for ranks and a device, and said about it, after one step of training."""

    ranks: tuple[int, ...]
    device: str
    chosen: str = ""
    error: str = ""


@dataclasses.dataclass(slots=True)
class Results:
    """What one rank found together with others. open_files: of its process, at the end."""

    rank: int
    links: tuple[Link, ...] = ()
    knocks: Sequence[Knock] = ()
    collectives: tuple[Collective, ...] = ()
    communications: tuple[Communication, ...] = ()
    open_files: int | None = None
    errors: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class Examination:
    """Everything that is known when the report is written.

    arrivals: of the ranks that came; ranks: facts of those whose facts could be read.
    start_error: why no ranks could be started; what is known is then the launcher's.
    meeting_place: address of the store; meeting_error: why a rank could not reach it.
    stuck: what did not end in time.
    """

    num_ranks: int
    timeout_s: float
    reporter: int
    arrivals: Sequence[Arrival] = ()
    ranks: Sequence[RankFacts] = ()
    results: Sequence[Results] = ()
    num_local_ranks: int = 1
    start_error: str = ""
    meeting_place: str = ""
    meeting_error: str = ""
    stuck: str = ""
    seconds: float = 0.0

    @property
    def missing(self) -> list[int]:
        """The ranks that did not come."""
        came = {arrival.rank for arrival in self.arrivals}
        return [rank for rank in range(self.num_ranks) if rank not in came]
