"""What `fullshard doctor` checks: a table. Pure: facts in, findings out; nothing is measured here.

Each `Check` splits an examination into what it looks at one by one (hosts, ranks that are alike, all of them), and says
what it finds of each. A finding that is `ok` says what was measured.
"""

import collections
import dataclasses
import functools
import re
import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fullshard.tools.doctor.facts import Communication, Examination, Link, RankFacts
from fullshard.tools.doctor.findings import (
    Finding,
    Severity,
    at,
    by_host,
    counted,
    grouped,
    host_labels,
    numbered,
    sized,
    timed,
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
# Packages that decide what ranks compute or send, beside torch and fullshard themselves.
_DECISIVE = ("numpy", "triton", "transformers", "torchao", "safetensors", "fsspec", "xxhash")
_MOST_NAMED = 8
_CLOCKS_APART_S = 1.0
_SLOW = 0.25  # of the median of like pairs
_SLOW_NETWORK = 100e6  # bytes per second: a gigabit
_PER_RANK = ("CUDA_VISIBLE_DEVICES",)  # that launchers give each rank on purpose


def _said(severity: Severity, measured: str, advice: str = "", where: str = "") -> Finding:
    """Say what a check finds of one thing that it has looked at. where: unless it is the thing itself."""
    return Finding("", severity, where, measured, advice)


_problem, _warning, _note, _ok = (functools.partial(_said, severity) for severity in Severity)


class Check(NamedTuple):
    """One row of the table.

    name: of its findings. look: returns what is looked at, each with where that is. says: gets the examination and one
    of these.
    """

    name: str
    look: Callable[[Examination], Iterable[tuple[str, Any]]]
    says: Callable[[Examination, Any], Iterable[Finding]]


def judge(exam: Examination) -> list[Finding]:
    """Return every finding, worst first; among equals, what ranks do together comes first."""
    found = [
        dataclasses.replace(said, id=check.name, where=said.where or where)
        for check in CHECKS
        for where, looked_at in check.look(exam)
        for said in check.says(exam, looked_at)
    ]
    order = list(Severity)
    return sorted(found, key=lambda finding: order.index(finding.severity))


def verdict_of(findings: Iterable[Finding]) -> Severity:
    found = {each.severity for each in findings}
    return next((severity for severity in Severity if severity in found), Severity.OK)


# What is looked at


def _hosts(exam: Examination) -> Iterable[tuple[str, list[RankFacts]]]:
    return by_host(exam).items()


def _each_rank(exam: Examination) -> Iterable[tuple[str, RankFacts]]:
    return [(at(exam, [each.rank]), each) for each in exam.ranks]


def _alike(
    key: Callable[[RankFacts], Hashable],
) -> Callable[[Examination], Iterable[tuple[str, list[RankFacts]]]]:
    """Look at ranks that have a value in common."""
    return lambda exam: [
        (at(exam, [each.rank for each in ranks]), ranks)
        for ranks in grouped(exam.ranks, key).values()
    ]


def _all(exam: Examination) -> Iterable[tuple[str, list[RankFacts]]]:
    return [(at(exam, [each.rank for each in exam.ranks]), list(exam.ranks))] if exam.ranks else []


def _between_ranks(exam: Examination) -> Iterable[tuple[str, None]]:
    return [("between ranks", None)] if exam.num_ranks > 1 else []


def _results(_: Examination) -> Iterable[tuple[str, None]]:
    return [("", None)]  # each says where


# Coming together


def _start(exam: Examination, _: None) -> Iterator[Finding]:
    if exam.start_error:
        yield _problem(
            f"{counted(exam.num_ranks, 'rank')} cannot be started: {exam.start_error}",
            "Look at the findings on limits and memory.",
            at(exam, _came(exam)),
        )


def _came(exam: Examination) -> list[int]:
    return [each.rank for each in exam.arrivals]


def _meeting(exam: Examination, _: None) -> Iterator[Finding]:
    if exam.start_error:
        return
    if exam.meeting_error:
        yield _problem(
            f"cannot reach the ranks' meeting place {exam.meeting_place}: {exam.meeting_error}",
            "See that rank 0 (or torchrun's first node) runs, that MASTER_ADDR names its host as this one "
            "reaches it, and that no firewall is between (`nc -vz HOST PORT` from here).",
            f"rank {exam.reporter}",
        )
    elif exam.missing:
        # Launchers number ranks host by host.
        labels = host_labels(exam.arrivals)
        known = {rank // exam.num_local_ranks: label for rank, label in labels.items()}
        places = dict.fromkeys(rank // exam.num_local_ranks for rank in exam.missing)
        yield _problem(
            f"{len(exam.arrivals)} of {exam.num_ranks} ranks came within {exam.timeout_s:g} s; missing: "
            f"{numbered(exam.missing)}",
            "Look at the output of their launcher. See that it was started there with the same number of "
            f"ranks, and reaches {exam.meeting_place}; --timeout gives them longer.",
            ", ".join(known.get(place, f"host number {place} (from 0)") for place in places),
        )
    else:
        yield _ok(f"all came: {counted(exam.num_ranks, 'rank')}", where=exam.meeting_place)


def _stuck(exam: Examination, _: None) -> Iterator[Finding]:
    if exam.stuck:
        yield _problem(
            f"no end of it within the time: {exam.stuck}",
            "Run `py-spy dump` on a rank's process meanwhile, or set NCCL_DEBUG=INFO for NCCL.",
            at(exam, _came(exam)),
        )


# What ranks do together


def _reached_hosts(exam: Examination, _: None) -> Iterator[Finding]:
    labels = host_labels(exam.arrivals)
    knocks = [knock for each in exam.results for knock in each.knocks]
    failed = [knock for knock in knocks if knock.error]
    for knock in failed:
        yield _problem(
            f"no connection to {knock.address}: {knock.error}",
            "Open the hosts' firewalls to each other on all ports above 1023, or choose another interface "
            "by GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
            f"{labels[knock.source]} to {labels[knock.target]}",
        )
    if knocks and not failed:
        connections = counted(len(knocks), "connection")
        yield _ok(f"{connections}, each host to each other one", where="between hosts")


def _gloo(exam: Examination, _: None) -> Iterator[Finding]:
    failed = [link for link in _links(exam) if link.error]
    ended: set[int] = set()
    for link in sorted(failed, key=lambda link: link.turn):
        # Else it may have failed because of an earlier one.
        if not ended & {link.first, link.second}:
            yield _problem(
                f"no message got through: {link.error}",
                "Look for a rank that ended, a firewall, or an interface that only one of them has "
                "(GLOO_SOCKET_IFNAME).",
                _pair(exam, link),
            )
        ended |= {link.first, link.second}
    for each in exam.results:
        if error := each.errors.get("gloo"):
            yield _problem(
                f"the ranks cannot connect over Gloo: {error}",
                "Look at the findings `hosts` and `host-name`; set GLOO_SOCKET_IFNAME to the interface "
                "that all hosts reach.",
                at(exam, [each.rank]),
            )
    for kind, links in _links_by_kind(exam).items():
        latency = statistics.median(link.latency_s for link in links)
        speed = statistics.median(link.bytes_per_s for link in links)
        pairs = counted(len(links), "pair")
        yield _ok(f"{pairs}, median {timed(latency)} one way and {sized(speed)}/s", where=kind)


def _link_speed(exam: Examination, _: None) -> Iterator[Finding]:
    for kind, links in _links_by_kind(exam).items():
        speed = statistics.median(link.bytes_per_s for link in links)
        slow = [link for link in links if link.bytes_per_s < _SLOW * speed]
        slow.sort(key=lambda link: link.bytes_per_s)
        if slow:
            said = [f"{_pair(exam, k)}: {sized(k.bytes_per_s)}/s" for k in slow[:_MOST_NAMED]]
            yield _warning(
                f"{len(slow)} of {len(links)} pairs are below a quarter of the median ({sized(speed)}/s): "
                + ", ".join(said),
                "Look at the cable, the switch port and other load of the host that they share. Every step "
                "waits for the slowest.",
                kind,
            )
        elif kind == "between hosts" and speed < _SLOW_NETWORK:
            yield _warning(
                f"{sized(speed)}/s, about a gigabit or less",
                "Sharded parameters cross the network three times a step. Choose the fast interface "
                "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), or shard within hosts and replicate between them.",
                kind,
            )


def _links(exam: Examination) -> list[Link]:
    links = (link for each in exam.results for link in each.links)
    return sorted(links, key=lambda link: (link.first, link.second))


def _links_by_kind(exam: Examination) -> dict[str, list[Link]]:
    """Return the pairs that exchanged messages: those within hosts, and those between them."""
    labels = host_labels(exam.arrivals)
    found: dict[str, list[Link]] = {"within hosts": [], "between hosts": []}
    for link in _links(exam):
        if not link.error:
            is_local = labels[link.first] == labels[link.second]
            found["within hosts" if is_local else "between hosts"].append(link)
    return {kind: links for kind, links in found.items() if links}


def _pair(exam: Examination, link: Link) -> str:
    labels = host_labels(exam.arrivals)
    first, second = labels[link.first], labels[link.second]
    if first == second:
        return f"{numbered([link.first, link.second])} of {first}"
    return f"rank {link.first} of {first} and rank {link.second} of {second}"


def _clocks(exam: Examination, _: None) -> Iterator[Finding]:
    """Compare the hosts' clocks with that of the first rank's host."""
    if not _links(exam):  # without any message, that is the finding
        return
    labels = host_labels(exam.arrivals)
    compared: dict[str, list[Link]] = {label: [] for label in labels.values()}
    origin = labels[0]
    for link in _links_by_kind(exam).get("between hosts", ()):
        if link.first == 0:
            compared[labels[link.second]].append(link)
    for label, links in compared.items():
        if label == origin:
            continue
        if not links:
            yield _note("its clock was not compared, since no message got through", where=label)
            continue
        best = min(links, key=lambda link: link.clock_error_s)
        ahead, error = best.clock_offset_s, best.clock_error_s
        direction = "ahead of" if ahead > 0 else "behind"
        measured = f"{timed(abs(ahead))} {direction} {origin}, give or take {timed(error)}"
        if abs(ahead) - error > _CLOCKS_APART_S:
            yield _warning(
                measured,
                "Let a time service run there (chrony, systemd-timesyncd). Otherwise logs cannot be "
                "merged, certificates are refused, and files of different hosts seem out of order.",
                label,
            )
        else:
            yield _ok(measured, where=label)


def _nccl(exam: Examination, _: None) -> Iterator[Finding]:
    for each in exam.results:
        if why_not := each.errors.get("nccl"):
            yield _note(f"NCCL was not tried: {why_not}", where=at(exam, [each.rank]))
    by_ranks = {}
    for collective in (one for each in exam.results for one in each.collectives):
        if collective.error or collective.ranks not in by_ranks:
            by_ranks[collective.ranks] = collective
    for ranks, one in by_ranks.items():
        who = f"all-reduce of {numbered(ranks)}"
        if one.error:
            yield _problem(
                f"{who} failed: {one.error}",
                "Run again with NCCL_DEBUG=INFO. If the ranks of one host succeed and all do not: "
                "NCCL_SOCKET_IFNAME, firewall, NCCL_IB_DISABLE=1 to try without InfiniBand. If those of one "
                "host fail: room in /dev/shm, NCCL_P2P_DISABLE=1 to try without peer access.",
                at(exam, ranks),
            )
        else:
            measured = f"{who}: {timed(one.seconds)}, {sized(one.bytes_per_s)}/s"
            yield _ok(measured, where=at(exam, ranks))


def _steps(exam: Examination) -> Iterable[tuple[str, Communication]]:
    """Look at each step of a small model that ranks have trained."""
    tried = dict.fromkeys(one for each in exam.results for one in each.communications)
    return [(at(exam, one.ranks), one) for one in tried]


def _communication(exam: Examination, tried: Communication) -> Iterator[Finding]:
    """Judge what fullshard chose for a small model, which was trained for a step."""
    labels = host_labels(exam.arrivals)
    chosen = f"on {tried.device} fullshard takes: {tried.chosen}"
    is_one_host = len({labels[rank] for rank in tried.ranks}) == 1
    if tried.error:
        yield _problem(
            f"a step of a small model on {tried.device} failed: {tried.error}",
            "Look at the findings above first. If there are none, this is one to report.",
        )
    elif is_one_host and tried.device == "cpu" and "no peer memory" in tried.chosen:
        yield _warning(
            chosen,
            "Ranks of a host that read each other's memory need no copies of parameters. They have to be "
            "in one container, of one user, on Linux, with memory and open files left.",
        )
    else:
        yield _ok(chosen)


# Whether ranks are alike


def _versions(exam: Examination, _: None) -> Iterator[Finding]:
    of_all = {"fullshard": {each.rank: each.fullshard for each in exam.arrivals}}
    compared = of_all | _by_name(exam, lambda each: each.versions, "none") | of_all
    differing = _differing(compared)
    for name, values in differing.items():
        measured = f"{name} differs: {_by_value(exam, values)}"
        if name in ("fullshard", "torch"):
            advice = (
                "Install one version everywhere; fullshard refuses such ranks (DivergenceError)."
            )
            yield _problem(measured, advice)
        else:
            yield _warning(measured, "Install one version everywhere.")
    if not differing:
        yield _ok(f"alike: {', '.join(compared)}")


def _packages(exam: Examination, _: None) -> Iterator[Finding]:
    compared = _by_name(exam, lambda each: each.packages, "none")
    for reported in ("fullshard", "torch"):  # by _versions
        compared.pop(reported, None)
    differing = _differing(compared)
    decisive = [name for name in differing if name in _DECISIVE or name.startswith("nvidia-")]
    others = [name for name in differing if name not in decisive]
    for severity, chosen in ((Severity.WARNING, decisive), (Severity.NOTE, others)):
        if chosen:
            said = [f"{n}: {_by_value(exam, differing[n])}" for n in chosen[:_MOST_NAMED]]
            more = len(chosen) - len(said)
            yield _said(
                severity,
                "; ".join(said) + (f"; and {more} more (--json has all)" if more else ""),
                "Install from one list of pinned versions everywhere, or use one container image.",
            )
    if not differing:
        yield _ok(f"{len(compared)} packages, alike")


def _variables(exam: Examination, _: None) -> Iterator[Finding]:
    compared = _by_name(exam, lambda each: each.environment, "(unset)")
    for name, values in _differing(compared).items():
        measured = f"{name} differs: {_by_value(exam, values)}"
        if name in _PER_RANK:
            yield _note(
                measured,
                "Ranks of a host can only share a GPU's memory if each sees the GPUs of all: let the "
                "launcher leave it alone, and each rank take the GPU of its LOCAL_RANK.",
            )
        else:
            yield _warning(measured, "Export it alike on every host, or nowhere.")


def _devices_alike(exam: Examination, _: None) -> Iterator[Finding]:
    devices = {}
    for each in exam.ranks:
        counts = collections.Counter(device.name for device in each.devices.found)
        said = " + ".join(f"{number} x {name}" for name, number in counts.items())
        devices[each.rank] = said or "none"
    if _differing({"devices": devices}):
        yield _warning(
            f"devices differ: {_by_value(exam, devices)}",
            "Ranks have to be alike: all with a GPU or none, and the slowest sets the pace.",
        )


def _by_name(
    exam: Examination, values_of: Callable[[RankFacts], Mapping[str, str]], lacking: str
) -> dict[str, Mapping[int, str]]:
    """Return each rank's value of each name that a rank has. lacking: in place of one that is not there."""
    names = sorted({name for each in exam.ranks for name in values_of(each)})
    return {
        name: {each.rank: values_of(each).get(name, lacking) for each in exam.ranks}
        for name in names
    }


def _differing(compared: Mapping[str, Mapping[int, str]]) -> dict[str, Mapping[int, str]]:
    """Return what is not one value on all ranks. compared: value by rank, by name."""
    return {name: values for name, values in compared.items() if len({*values.values()}) > 1}


def _by_value(exam: Examination, values: Mapping[int, str]) -> str:
    """Say which ranks have which value: "2.13.0 on a, 2.12.1 on b"."""
    ranks_with: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_with.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {at(exam, ranks)}" for value, ranks in ranks_with.items())


# What each process and each machine has


def _torch(_: Examination, ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    version = ranks[0].versions["torch"]
    numbers = re.match(r"(\d+)\.(\d+)", version)
    release = tuple(map(int, numbers.groups())) if numbers else None
    if release is not None and release < OLDEST:
        measured = f"torch {version}, which fullshard refuses: it runs with {TESTED}"
        yield _problem(measured, f"{WHAT_TO_INSTALL}.")
    elif release is None or release > NEWEST:
        measured = f"torch {version}: fullshard was tested with {TESTED}"
        yield _warning(measured, f"Should something fail: {WHAT_TO_INSTALL}.")
    else:
        yield _ok(f"torch {version}")


def _backends(_: Examination, ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    backends = ranks[0].backends
    needed = ("gloo", "nccl") if ranks[0].devices.found else ("gloo",)
    lacking = [name for name in needed if name not in backends]
    measured = f"torch has {', '.join(backends) or 'no backend'}"
    if lacking:
        yield _problem(measured, f"Install a build of torch with {' and '.join(lacking)}.")
    else:
        yield _ok(measured)


def _devices(_: Examination, ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    first = ranks[0]
    devices = first.devices.found
    if not devices and first.devices.has_driver:
        yield _warning(
            f"NVIDIA's driver is loaded, but torch {first.versions['torch']} finds no CUDA device",
            "See what `nvidia-smi` says, whether CUDA_VISIBLE_DEVICES hides them, and whether "
            "torch is a build with CUDA that this driver supports.",
        )
    if not devices:
        if not first.devices.has_driver:
            yield _ok("no CUDA device: ranks run on the CPU")
        return
    names = dict.fromkeys(device.name for device in devices)
    smallest = min(device.nbytes for device in devices)
    measured = f"{len(devices)} x {', '.join(names)} ({sized(smallest)} or more)"
    used = {each.devices.found[each.devices.current or 0].uuid for each in ranks}
    if len(used) < len(ranks):
        yield _warning(
            f"{measured}, and {len(ranks)} ranks, some of which share one",
            "Start one rank per GPU. Ranks that share one communicate through CUDA IPC, since NCCL "
            "refuses them.",
        )
    elif len(names) > 1:
        yield _warning(
            measured,
            "Sharded training goes at the pace of the slowest, and fits where the smallest does.",
        )
    else:
        yield _ok(measured)


def _peer_access(_: Examination, ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    devices = ranks[0].devices
    without = devices.no_access
    if without:
        shown = ", ".join(f"{i} to {j}" for i, j in without[:6]) + (", ..." if without[6:] else "")
        yield _note(
            f"{counted(len(without), 'pair')} of devices without access to the other's memory: {shown}",
            "NCCL then goes through host memory. See `nvidia-smi topo -m`; on PCIe, access control (ACS) "
            "and virtual machines prevent it. set_default_comm('peer_memory') is refused there.",
        )
    elif len(devices.found) > 1:
        yield _ok("every device reaches every other's memory")


def _device_memory(_: Examination, rank: RankFacts) -> Iterator[Finding]:
    devices = rank.devices
    if devices.current is None or devices.free_nbytes is None:
        return
    total = devices.found[devices.current].nbytes
    if devices.free_nbytes < total / 2:
        yield _warning(
            f"cuda:{devices.current} has {sized(devices.free_nbytes)} of {sized(total)} free",
            "See with `nvidia-smi` which processes use it, and end those of earlier runs.",
        )


class _Cores(NamedTuple):
    """Cores of a host, said, and the number of its ranks."""

    number: float
    said: str
    num_ranks: int


def _cores_of(ranks: Sequence[RankFacts]) -> _Cores:
    machine = ranks[0].machine
    cores = min(machine.cores, machine.core_quota or machine.cores)
    said = "1 core" if cores == 1 else f"{cores:g} cores"
    if cores < machine.cores:
        said += f" (its cgroup's quota; it may run on {machine.cores})"
    return _Cores(cores, said, max(ranks[0].num_local_ranks, len(ranks)))


def _threads(_: Examination, ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    cores = _cores_of(ranks)
    threads = max(each.threads for each in ranks)
    measured = (
        f"{cores.said} for {counted(cores.num_ranks, 'rank')} of {counted(threads, 'thread')}"
    )
    fitting = max(1, int(cores.number // cores.num_ranks))
    advice = f"Set OMP_NUM_THREADS={fitting} for every rank."
    if threads > fitting:
        yield _warning(measured, advice)
    elif threads * 2 <= fitting and not ranks[0].devices.found:
        yield _note(f"{measured}: most cores have nothing to do", advice)
    else:
        yield _ok(measured)


def _cores(_: Examination, ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    cores = _cores_of(ranks)
    if cores.num_ranks > cores.number:
        yield _warning(
            f"{cores.said} for {counted(cores.num_ranks, 'rank')}, so they wait for each other's turns",
            f"Start at most {counted(max(1, int(cores.number)), 'rank')} there.",
        )


def _memory(_: Examination, ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    machine = ranks[0].machine
    total, free = machine.memory_nbytes, machine.memory_free_nbytes
    if total is None or free is None:
        yield _note("the memory that is left cannot be read")
        return
    limit = machine.memory_limit_nbytes
    by_whom = ""
    if limit is not None and limit < total:
        total, free = limit, min(free, limit - (machine.memory_used_nbytes or 0))
        by_whom = " that its cgroup allows"
    measured = f"{sized(free)} of the {sized(total)}{by_whom} are free"
    if free < _LITTLE_MEMORY * total:
        advice = "End what uses it: a rank that runs out is killed (SIGKILL) without a word."
        yield _warning(measured, advice)
    else:
        yield _ok(measured)


def _overcommit(_: Examination, ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Judge whether the system promises more memory than it has, which programs count on."""
    if ranks[0].machine.overcommit == _STRICT_OVERCOMMIT:
        yield _warning(
            "vm.overcommit_memory is 2: memory that is only reserved counts as used",
            "Set it to 0 (`sysctl vm.overcommit_memory=0`); torch and CUDA reserve much more than "
            "they use.",
        )


def _shm(_: Examination, ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Judge /dev/shm, which NCCL and data loaders use, and fullshard does not."""
    machine = ranks[0].machine
    if machine.shm_nbytes is None or machine.shm_free_nbytes is None:
        had = "there is no /dev/shm"
    else:
        had = f"/dev/shm has {sized(machine.shm_free_nbytes)} of {sized(machine.shm_nbytes)} free"
    if (machine.shm_free_nbytes or 0) >= _LITTLE_SHM_NBYTES:
        yield _ok(had)
        return
    say = _warning if ranks[0].devices.found else _note
    yield say(
        f"{had}; fullshard does not use it (its shared memory has no name in any file system), but "
        "NCCL and the workers of a DataLoader do",
        "Give containers more: `docker run --shm-size=1g`, or a memory volume at /dev/shm.",
    )


def _open_files(exam: Examination, ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    limits = ranks[0].limits
    if limits.open_files is None:
        yield _ok("no limit on open files")
        return
    used = {each.rank: each.open_files for each in exam.results}
    # A rank that was not counted has connections to the others in two groups, at least.
    in_use = max(used.get(each.rank) or 16 + 4 * exam.num_ranks for each in ranks)
    measured = f"limit {limits.open_files}, {in_use} in use after connecting"
    if limits.open_files - in_use >= _SPARE_FILES:
        yield _ok(measured)
        return
    hard = limits.open_files_hard
    wanted = in_use + _SPARE_FILES + _MORE_FILES
    advice = f"`ulimit -n {wanted}` before the start. "
    if hard is not None and hard < wanted:
        advice = (
            f"Have the hard limit, {hard}, raised to {wanted} or more (limits.conf, LimitNOFILE=, "
            "docker --ulimit nofile=). "
        )
    yield _problem(measured, f"{advice}Otherwise ranks cannot share memory, or cannot connect.")


def _locks_for_infiniband(rank: RankFacts) -> bool:
    return rank.machine.has_infiniband and bool(rank.devices.found)


def _memlock(_: Examination, ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Judge the limit on locked memory, which only InfiniBand and RoCE need."""
    limit = ranks[0].limits.locked_nbytes
    if limit is None:
        yield _ok("no limit on locked memory")
    elif not _locks_for_infiniband(ranks[0]):
        yield _ok(f"{sized(limit)} may be locked; only NCCL over InfiniBand or RoCE needs more")
    else:
        yield _warning(
            f"{sized(limit)} may be locked, and NCCL locks its buffers for InfiniBand",
            "`ulimit -l unlimited` before the start (limits.conf, LimitMEMLOCK=infinity, docker --ulimit "
            "memlock=-1).",
        )


def _tasks(_: Examination, ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    machine = ranks[0].machine
    num_ranks = max(ranks[0].num_local_ranks, len(ranks))
    needed = num_ranks * (max(each.threads for each in ranks) + _OTHER_TASKS)
    lefts = {}
    if machine.max_tasks is not None:
        # The ranks' own tasks are among those that run by now.
        lefts["its cgroup (pids.max)"] = machine.max_tasks - (machine.tasks or 0)
    if (limit := ranks[0].limits.processes) is not None:
        lefts["the user's limit (ulimit -u)"] = limit
    name, left = min(lefts.items(), key=lambda each: each[1], default=("", needed))
    if left < needed:
        yield _warning(
            f"{name} has room for {left} processes and threads; its ranks take about {needed}",
            "Raise it (`ulimit -u`, TasksMax=, docker --pids-limit), or start fewer ranks or threads.",
        )
    else:
        measured = f"room for {left}" if lefts else "no limit on processes and threads"
        yield _ok(f"{measured}; ranks take about {needed}")


def _host_name(exam: Examination, ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Judge the address that Gloo would tell other hosts: it asks for the one of the host's own name."""
    machine = ranks[0].machine
    chosen = ranks[0].environment.get("GLOO_SOCKET_IFNAME")
    address = machine.addresses[0] if machine.addresses else None
    others = [name for name, ip in machine.interfaces.items() if not _is_loopback(ip)]
    advice = (
        f"Set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the interface that other hosts reach: "
        f"{' or '.join(others) or 'none is up'}. Or let {machine.name} resolve to its address."
    )
    what = f"{machine.name} is {address}" if address else f"{machine.name} resolves to nothing"
    if chosen:
        names = chosen.split(",")
        if all(name in machine.interfaces for name in names):
            yield _ok(f"GLOO_SOCKET_IFNAME={chosen}: {machine.interfaces[names[0]]}")
        else:
            had = ", ".join(machine.interfaces) or "none"
            measured = f"GLOO_SOCKET_IFNAME={chosen}, but the interfaces with an address are {had}"
            yield _problem(measured, advice)
    elif address and not _is_loopback(address):
        yield _ok(what)
    elif exam.num_ranks <= ranks[0].num_local_ranks and len(by_host(exam)) == 1:
        yield _ok(f"{what}; that does within one host")
    else:
        yield _problem(f"{what}, which is what Gloo tells other hosts", advice)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _environment(exam: Examination, ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    ranks_with: dict[tuple[_Harm, str], list[int]] = {}
    for each in ranks:
        for harm in _HARMS:
            value = each.environment.get(harm.name)
            if value is not None and harm.is_harmful(value):
                ranks_with.setdefault((harm, value), []).append(each.rank)
    for (harm, value), harmed in ranks_with.items():
        measured = f"{harm.name}={value}: {harm.effect}"
        yield _said(harm.severity, measured, harm.advice, at(exam, harmed))
    if not ranks_with:
        yield _ok("no variable that is known to hurt")


def _is_on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "n", "no", "false", "off")


class _Harm(NamedTuple):
    """A value of a variable that hurts, how, and what to do instead."""

    name: str
    effect: str
    advice: str = "Unset it."
    is_harmful: Callable[[str], bool] = _is_on
    severity: Severity = Severity.WARNING


def _is(*values: str) -> Callable[[str], bool]:
    return lambda value: value.strip().upper() in values


_HARMS = (
    _Harm(
        "CUDA_LAUNCH_BLOCKING",
        "the host waits for every kernel, so nothing overlaps",
        "Unset it; it is for finding the kernel that fails.",
    ),
    _Harm(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "one queue for all streams keeps communication from overlapping with compute",
        "Unset it; it is meant for tensor parallelism without sharded parameters.",
        _is("1"),
    ),
    _Harm(
        "NCCL_P2P_DISABLE",
        "GPUs of a host exchange data through host memory",
        "Unset it, unless GPUs of this host hang without it.",
    ),
    _Harm(
        "NCCL_SHM_DISABLE",
        "GPUs of a host that cannot reach each other exchange data through the network",
        "Unset it, and give /dev/shm room (docker: --shm-size=1g).",
    ),
    _Harm(
        "NCCL_IB_DISABLE",
        "hosts exchange data over TCP, also where there is InfiniBand or RoCE",
        "Unset it where there is such a network.",
        severity=Severity.NOTE,
    ),
    _Harm(
        "NCCL_DEBUG",
        "every rank logs what NCCL does",
        "Set it to WARN once NCCL works.",
        _is("INFO", "TRACE"),
        Severity.NOTE,
    ),
    _Harm(
        "TORCH_DISTRIBUTED_DEBUG",
        "torch compares every collective on all ranks before it runs, over Gloo",
        "Unset it; fullshard compares ranks by itself at a fraction of the cost.",
        _is("DETAIL"),
    ),
    _Harm(
        "TORCH_NCCL_BLOCKING_WAIT",
        "the host waits for each collective of NCCL, so nothing overlaps",
    ),
    _Harm(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "ranks wait for ever in a collective of NCCL whose peer has failed",
        is_harmful=_is("0"),
    ),
    _Harm(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "every allocation on a GPU waits for it",
        "Unset it; it is for memory checkers.",
    ),
    *(
        _Harm(
            name,
            "ranks that share a GPU cannot share its memory with this allocator",
            is_harmful=lambda value: "cudaMallocAsync" in value,
            severity=Severity.NOTE,
        )
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    ),
    _Harm(
        "FULLSHARD_DEBUG",
        "ranks compare what they do at every unit, which costs a small collective each",
        "Unset it once the place where ranks part is found.",
        severity=Severity.NOTE,
    ),
)


def _py_spy(exam: Examination, ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Say where stacks of stopped ranks cannot be had."""
    lacking = [each.rank for each in ranks if not each.has_py_spy]
    if lacking:
        yield _note(
            "py-spy is not on the PATH, so reports of a rank that is stopped lack its stack",
            "`pip install py-spy`. Ranks that merely wait are reported with their stack without it.",
            at(exam, lacking),
        )
    else:
        yield _ok("py-spy is on the PATH")


CHECKS = (
    Check("start", _results, _start),
    Check("meeting", _results, _meeting),
    Check("stuck", _results, _stuck),
    Check("hosts", _results, _reached_hosts),
    Check("gloo", _results, _gloo),
    Check("link-speed", _results, _link_speed),
    Check("nccl", _results, _nccl),
    Check("communication", _steps, _communication),
    Check("versions", _between_ranks, _versions),
    Check("packages", _between_ranks, _packages),
    Check("environment-differs", _between_ranks, _variables),
    Check("devices", _between_ranks, _devices_alike),
    Check("clocks", _results, _clocks),
    Check("torch", _alike(lambda rank: rank.versions["torch"]), _torch),
    Check("backends", _alike(lambda rank: (rank.backends, bool(rank.devices.found))), _backends),
    Check("devices", _hosts, _devices),
    Check("peer-access", _hosts, _peer_access),
    Check("device-memory", _each_rank, _device_memory),
    Check("threads", _hosts, _threads),
    Check("cores", _hosts, _cores),
    Check("memory", _hosts, _memory),
    Check("overcommit", _hosts, _overcommit),
    Check("shm", _hosts, _shm),
    Check("open-files", _alike(lambda rank: rank.limits), _open_files),
    Check(
        "memlock",
        _alike(lambda rank: (rank.limits.locked_nbytes, _locks_for_infiniband(rank))),
        _memlock,
    ),
    Check("tasks", _hosts, _tasks),
    Check("host-name", _hosts, _host_name),
    Check("environment", _all, _environment),
    Check("py-spy", _all, _py_spy),
)
"""Every check, in the order in which findings of one severity are shown."""
