"""Judge what each machine and each process has. Pure: facts in, findings out."""

import re
from collections.abc import Iterator

from fullshard.tools.doctor.environment import harms_in
from fullshard.tools.doctor.facts import Examination, RankFacts
from fullshard.tools.doctor.findings import (
    Finding,
    Severity,
    at,
    by_host,
    counted,
    grouped,
    host_labels,
    sized,
)
from fullshard.versions import NEWEST, OLDEST, TESTED, WHAT_TO_INSTALL

# What is left of files for a program's own data, logs and checkpoints, and the number of units that
# a large model has (a 70B Llama has 82).
_SPARE_FILES = 64
_MORE_FILES = 1024  # that are advised
# Threads of a process beside those that compute: Gloo's, autograd's, the store's, fullshard's own.
_OTHER_TASKS = 48
_LITTLE_MEMORY = 0.05
_LITTLE_SHM_NBYTES = 256 << 20
_STRICT_OVERCOMMIT = 2


def _ok(id_: str, exam: Examination, measured: str) -> Finding:
    return Finding(id_, Severity.OK, at(exam, [each.rank for each in exam.ranks]), measured)


def judge_torch(exam: Examination) -> Iterator[Finding]:
    """Judge whether fullshard runs with the installed torch."""
    for version, ranks in grouped(exam.ranks, lambda each: each.versions["torch"]).items():
        where = at(exam, [each.rank for each in ranks])
        numbers = re.match(r"(\d+)\.(\d+)", version)
        release = tuple(map(int, numbers.groups())) if numbers else None
        if release is not None and release < OLDEST:
            measured = f"torch {version}, which fullshard refuses: it runs with {TESTED}"
            yield Finding("torch", Severity.PROBLEM, where, measured, f"{WHAT_TO_INSTALL}.")
        elif release is None or release > NEWEST:
            measured = f"torch {version}: fullshard was tested with {TESTED}"
            advice = f"Should something fail: {WHAT_TO_INSTALL}."
            yield Finding("torch", Severity.WARNING, where, measured, advice)
        else:
            yield Finding("torch", Severity.OK, where, f"torch {version}")


def judge_backends(exam: Examination) -> Iterator[Finding]:
    """Judge whether torch has what moves bytes between ranks."""
    for (backends, has_devices), ranks in grouped(
        exam.ranks, lambda each: (each.backends, bool(each.devices.found))
    ).items():
        where = at(exam, [each.rank for each in ranks])
        needed = ("gloo", "nccl") if has_devices else ("gloo",)
        lacking = [name for name in needed if name not in backends]
        measured = f"torch has {', '.join(backends) or 'no backend'}"
        if lacking:
            advice = f"Install a build of torch with {' and '.join(lacking)}."
            yield Finding("backends", Severity.PROBLEM, where, measured, advice)
        else:
            yield Finding("backends", Severity.OK, where, measured)


def judge_devices(exam: Examination) -> Iterator[Finding]:
    """Judge the CUDA devices of each host: there, enough, free, and in reach of each other."""
    for host, ranks in by_host(exam).items():
        first = ranks[0]
        devices = first.devices
        if not devices.found:
            if devices.has_driver:
                yield Finding(
                    "devices",
                    Severity.WARNING,
                    host,
                    f"NVIDIA's driver is loaded, but torch {first.versions['torch']} finds no CUDA device",
                    "See what `nvidia-smi` says, whether CUDA_VISIBLE_DEVICES hides them, and whether "
                    "torch is a build with CUDA that this driver supports.",
                )
            else:
                yield Finding("devices", Severity.OK, host, "no CUDA device: ranks run on the CPU")
            continue
        yield from _judge_number(host, ranks)
        yield from _judge_peer_access(host, first)
        for each in ranks:
            yield from _judge_device_memory(exam, each)


def _judge_number(host: str, ranks: list[RankFacts]) -> Iterator[Finding]:
    devices = ranks[0].devices.found
    names = ", ".join(dict.fromkeys(device.name for device in devices))
    smallest = min(device.nbytes for device in devices)
    measured = f"{len(devices)} x {names} ({sized(smallest)} or more)"
    used = [each.devices.found[each.devices.current or 0].uuid for each in ranks]
    if len(set(used)) < len(used):
        yield Finding(
            "devices",
            Severity.WARNING,
            host,
            f"{measured}, and {len(ranks)} ranks, some of which share one",
            "Start one rank per GPU. Ranks that share one communicate through CUDA IPC, since NCCL "
            "refuses them.",
        )
    elif len({device.name for device in devices}) > 1:
        advice = (
            "Sharded training goes at the pace of the slowest, and fits where the smallest does."
        )
        yield Finding("devices", Severity.WARNING, host, measured, advice)
    else:
        yield Finding("devices", Severity.OK, host, measured)


def _judge_peer_access(host: str, rank: RankFacts) -> Iterator[Finding]:
    without = rank.devices.no_access
    if len(rank.devices.found) < 2:
        return
    if not without:
        yield Finding("peer-access", Severity.OK, host, "every device reaches every other's memory")
        return
    shown = ", ".join(f"{i} to {j}" for i, j in without[:6]) + (", ..." if without[6:] else "")
    yield Finding(
        "peer-access",
        Severity.NOTE,
        host,
        f"{counted(len(without), 'pair')} of devices without access to the other's memory: {shown}",
        "NCCL then goes through host memory. See `nvidia-smi topo -m`; on PCIe, access control (ACS) "
        "and virtual machines prevent it. set_default_comm('peer_memory') is refused there.",
    )


def _judge_device_memory(exam: Examination, rank: RankFacts) -> Iterator[Finding]:
    devices = rank.devices
    if devices.current is None or devices.free_nbytes is None:
        return
    total = devices.found[devices.current].nbytes
    if devices.free_nbytes < total / 2:
        yield Finding(
            "device-memory",
            Severity.WARNING,
            at(exam, [rank.rank]),
            f"cuda:{devices.current} has {sized(devices.free_nbytes)} of {sized(total)} free",
            "See with `nvidia-smi` which processes use it, and end those of earlier runs.",
        )


def judge_cores(exam: Examination) -> Iterator[Finding]:
    """Judge whether the threads of a host's ranks fit its cores."""
    for host, ranks in by_host(exam).items():
        machine = ranks[0].machine
        cores = min(machine.cores, machine.core_quota or machine.cores)
        had = "1 core" if cores == 1 else f"{cores:g} cores"
        if cores < machine.cores:
            had += f" (its cgroup's quota; it may run on {machine.cores})"
        local = max(ranks[0].num_local_ranks, len(ranks))
        threads = max(each.threads for each in ranks)
        measured = f"{had} for {counted(local, 'rank')} of {counted(threads, 'thread')}"
        fitting = max(1, int(cores // local))
        advice = f"Set OMP_NUM_THREADS={fitting} for every rank."
        has_devices = bool(ranks[0].devices.found)
        if threads > fitting:
            yield Finding("threads", Severity.WARNING, host, measured, advice)
        elif threads * 2 <= fitting and not has_devices:
            measured += ": most cores have nothing to do"
            yield Finding("threads", Severity.NOTE, host, measured, advice)
        else:
            yield Finding("threads", Severity.OK, host, measured)
        if local > cores:
            yield Finding(
                "cores",
                Severity.WARNING,
                host,
                f"{had} for {counted(local, 'rank')}, so they wait for each other's turns",
                f"Start at most {counted(max(1, int(cores)), 'rank')} there.",
            )


def judge_memory(exam: Examination) -> Iterator[Finding]:
    """Judge how much host memory is left, and whether the system promises more than it has."""
    for host, ranks in by_host(exam).items():
        machine = ranks[0].machine
        if machine.memory_nbytes is None or machine.memory_free_nbytes is None:
            yield Finding("memory", Severity.NOTE, host, "the memory that is left cannot be read")
            continue
        total, free = machine.memory_nbytes, machine.memory_free_nbytes
        limit = machine.memory_limit_nbytes
        by_whom = ""
        if limit is not None and limit < total:
            total, free = limit, min(free, limit - (machine.memory_used_nbytes or 0))
            by_whom = " that its cgroup allows"
        measured = f"{sized(free)} of the {sized(total)}{by_whom} are free"
        if free < _LITTLE_MEMORY * total:
            advice = "End what uses it: a rank that runs out is killed (SIGKILL) without a word."
            yield Finding("memory", Severity.WARNING, host, measured, advice)
        else:
            yield Finding("memory", Severity.OK, host, measured)
        if machine.overcommit == _STRICT_OVERCOMMIT:
            yield Finding(
                "overcommit",
                Severity.WARNING,
                host,
                "vm.overcommit_memory is 2: memory that is only reserved counts as used",
                "Set it to 0 (`sysctl vm.overcommit_memory=0`); torch and CUDA reserve much more than "
                "they use.",
            )


def judge_shared_memory(exam: Examination) -> Iterator[Finding]:
    """Judge /dev/shm, which NCCL and data loaders use, and fullshard does not."""
    for host, ranks in by_host(exam).items():
        machine = ranks[0].machine
        if machine.shm_nbytes is None or machine.shm_free_nbytes is None:
            had = "there is no /dev/shm"
        else:
            had = (
                f"/dev/shm has {sized(machine.shm_free_nbytes)} of {sized(machine.shm_nbytes)} free"
            )
        if (machine.shm_free_nbytes or 0) >= _LITTLE_SHM_NBYTES:
            yield Finding("shm", Severity.OK, host, had)
            continue
        yield Finding(
            "shm",
            Severity.WARNING if ranks[0].devices.found else Severity.NOTE,
            host,
            f"{had}; fullshard does not use it (its shared memory has no name in any file system), but "
            "NCCL and the workers of a DataLoader do",
            "Give containers more: `docker run --shm-size=1g`, or a memory volume at /dev/shm.",
        )


def judge_open_files(exam: Examination) -> Iterator[Finding]:
    """Judge whether a rank may open the files that its connections take."""
    used = {each.rank: each.open_files for each in exam.results}
    for limits, ranks in grouped(exam.ranks, lambda each: each.limits).items():
        where = at(exam, [each.rank for each in ranks])
        if limits.open_files is None:
            yield Finding("open-files", Severity.OK, where, "no limit on open files")
            continue
        # A rank that was not counted has connections to the others in two groups, at least.
        in_use = max(used.get(each.rank) or 16 + 4 * exam.num_ranks for each in ranks)
        left = limits.open_files - in_use - _SPARE_FILES
        measured = f"limit {limits.open_files}, {in_use} in use after connecting"
        if left >= 0:
            yield Finding("open-files", Severity.OK, where, measured)
            continue
        hard = limits.open_files_hard
        wanted = in_use + _SPARE_FILES + _MORE_FILES
        advice = f"`ulimit -n {wanted}` before the start. "
        if hard is not None and hard < wanted:
            advice = (
                f"Have the hard limit, {hard}, raised to {wanted} or more (limits.conf, LimitNOFILE=, "
                "docker --ulimit nofile=). "
            )
        advice += "Otherwise ranks cannot share memory, or cannot connect."
        yield Finding("open-files", Severity.PROBLEM, where, measured, advice)


def judge_locked_memory(exam: Examination) -> Iterator[Finding]:
    """Judge the limit on locked memory, which only InfiniBand and RoCE need."""
    for (limit, matters), ranks in grouped(
        exam.ranks,
        lambda each: (
            each.limits.locked_nbytes,
            each.machine.has_infiniband and bool(each.devices.found),
        ),
    ).items():
        where = at(exam, [each.rank for each in ranks])
        said = "no limit on locked memory" if limit is None else f"{sized(limit)} may be locked"
        if limit is None or not matters:
            why = "" if limit is None else "; only NCCL over InfiniBand or RoCE needs more"
            yield Finding("memlock", Severity.OK, where, said + why)
            continue
        yield Finding(
            "memlock",
            Severity.WARNING,
            where,
            f"{said}, and NCCL locks its buffers for InfiniBand",
            "`ulimit -l unlimited` before the start (limits.conf, LimitMEMLOCK=infinity, docker --ulimit "
            "memlock=-1).",
        )


def judge_tasks(exam: Examination) -> Iterator[Finding]:
    """Judge whether a host's ranks may start their threads."""
    for host, ranks in by_host(exam).items():
        machine = ranks[0].machine
        local = max(ranks[0].num_local_ranks, len(ranks))
        needed = local * (max(each.threads for each in ranks) + _OTHER_TASKS)
        lefts = {}
        if machine.max_tasks is not None:
            # The ranks' own tasks are among those that run by now.
            lefts["its cgroup (pids.max)"] = machine.max_tasks - (machine.tasks or 0)
        if (limit := ranks[0].limits.processes) is not None:
            lefts["the user's limit (ulimit -u)"] = limit
        name, left = min(lefts.items(), key=lambda each: each[1], default=("", needed))
        if left < needed:
            yield Finding(
                "tasks",
                Severity.WARNING,
                host,
                f"{name} has room for {left} processes and threads; its ranks take about {needed}",
                "Raise it (`ulimit -u`, TasksMax=, docker --pids-limit), or start fewer ranks or threads.",
            )
        else:
            measured = f"room for {left}" if lefts else "no limit on processes and threads"
            yield Finding("tasks", Severity.OK, host, f"{measured}; ranks take about {needed}")


def judge_host_names(exam: Examination) -> Iterator[Finding]:
    """Judge the address that Gloo would tell other hosts: it asks for the one of the host's own name."""
    hosts = by_host(exam)
    for host, ranks in hosts.items():
        first = ranks[0]
        machine = first.machine
        chosen = first.environment.get("GLOO_SOCKET_IFNAME")
        is_alone = exam.num_ranks <= first.num_local_ranks and len(hosts) == 1
        others = [name for name, address in machine.interfaces.items() if not _is_loopback(address)]
        advice = (
            f"Set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the interface that other hosts reach: "
            f"{' or '.join(others) or 'none is up'}. Or let {machine.name} resolve to its address."
        )
        if chosen:
            missing = [name for name in chosen.split(",") if name not in machine.interfaces]
            if missing:
                had = ", ".join(machine.interfaces) or "none"
                measured = (
                    f"GLOO_SOCKET_IFNAME={chosen}, but the interfaces with an address are {had}"
                )
                yield Finding("host-name", Severity.PROBLEM, host, measured, advice)
                continue
            measured = f"GLOO_SOCKET_IFNAME={chosen}: {machine.interfaces[chosen.split(',')[0]]}"
            yield Finding("host-name", Severity.OK, host, measured)
        elif machine.addresses and not _is_loopback(machine.addresses[0]):
            measured = f"{machine.name} is {machine.addresses[0]}"
            yield Finding("host-name", Severity.OK, host, measured)
        else:
            what = f"is {machine.addresses[0]}" if machine.addresses else "resolves to nothing"
            measured = f"{machine.name} {what}, which is what Gloo tells other hosts"
            if is_alone:
                measured = f"{machine.name} {what}; that does within one host"
                yield Finding("host-name", Severity.OK, host, measured)
            else:
                yield Finding("host-name", Severity.PROBLEM, host, measured, advice)


def judge_environment(exam: Examination) -> Iterator[Finding]:
    """Name variables whose values are known to hurt."""
    labels = host_labels(exam.arrivals)
    harmed: dict[tuple[str, str], list[int]] = {}
    harms = {}
    for each in exam.ranks:
        for harm in harms_in(each.environment):
            key = (harm.name, each.environment[harm.name])
            harms[key] = harm
            harmed.setdefault(key, []).append(each.rank)
    for (name, value), ranks in harmed.items():
        harm = harms[name, value]
        measured = f"{name}={value}: {harm.effect}"
        yield Finding("environment", harm.severity, at(exam, ranks), measured, harm.advice)
    if not harmed and labels:
        yield _ok("environment", exam, "no variable that is known to hurt")


def judge_py_spy(exam: Examination) -> Iterator[Finding]:
    """Say where stacks of stopped ranks cannot be had."""
    lacking = [each.rank for each in exam.ranks if not each.has_py_spy]
    if lacking:
        yield Finding(
            "py-spy",
            Severity.NOTE,
            at(exam, lacking),
            "py-spy is not on the PATH, so reports of a rank that is stopped lack its stack",
            "`pip install py-spy`. Ranks that merely wait are reported with their stack without it.",
        )
    elif exam.ranks:
        yield _ok("py-spy", exam, "py-spy is on the PATH")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
