"""Judge whether ranks are alike, come together, and reach each other. Pure: facts in, findings out."""

import statistics
from collections.abc import Iterable, Iterator, Mapping

from fullshard.tools.doctor.environment import PER_RANK
from fullshard.tools.doctor.facts import Examination, Link
from fullshard.tools.doctor.findings import (
    Finding,
    Severity,
    at,
    counted,
    host_labels,
    numbered,
    sized,
    timed,
)

# Packages that decide what ranks compute or send, beside torch and fullshard themselves.
_DECISIVE = ("numpy", "triton", "transformers", "torchao", "safetensors", "fsspec", "xxhash")
_MOST_NAMED = 8
_CLOCKS_APART_S = 1.0
_SLOW = 0.25  # of the median of like pairs
_SLOW_NETWORK = 100e6  # bytes per second: a gigabit


def judge_meeting(exam: Examination) -> Iterator[Finding]:
    """Say whether every rank came to the place where they meet."""
    came = [each.rank for each in exam.arrivals]
    if exam.start_error:
        yield Finding(
            "start",
            Severity.PROBLEM,
            at(exam, came),
            f"{counted(exam.num_ranks, 'rank')} cannot be started: {exam.start_error}",
            "Look at the findings on limits and memory.",
        )
    elif exam.meeting_error:
        yield Finding(
            "meeting",
            Severity.PROBLEM,
            f"rank {exam.reporter}",
            f"cannot reach the ranks' meeting place {exam.meeting_place}: {exam.meeting_error}",
            "See that rank 0 (or torchrun's first node) runs, that MASTER_ADDR names its host as this one "
            "reaches it, and that no firewall is between (`nc -vz HOST PORT` from here).",
        )
    elif exam.missing:
        yield Finding(
            "meeting",
            Severity.PROBLEM,
            _whereabouts(exam),
            f"{len(came)} of {exam.num_ranks} ranks came within {exam.timeout_s:g} s; missing: "
            f"{numbered(exam.missing)}",
            "Look at the output of their launcher. See that it was started there with the same number of "
            f"ranks, and reaches {exam.meeting_place}; --timeout gives them longer.",
        )
    else:
        yield Finding(
            "meeting",
            Severity.OK,
            exam.meeting_place,
            f"all came: {counted(exam.num_ranks, 'rank')}",
        )
    if exam.stuck:
        yield Finding(
            "stuck",
            Severity.PROBLEM,
            at(exam, came),
            f"no end of it within the time: {exam.stuck}",
            "Run `py-spy dump` on a rank's process meanwhile, or set NCCL_DEBUG=INFO for NCCL.",
        )


def _whereabouts(exam: Examination) -> str:
    """Say where missing ranks would be, as launchers number ranks: host by host."""
    per_host = exam.num_local_ranks
    labels = host_labels(exam.arrivals)
    known = {rank // per_host: label for rank, label in labels.items()}
    places = dict.fromkeys(rank // per_host for rank in exam.missing)
    return ", ".join(known.get(place, f"host number {place} (from 0)") for place in places)


def judge_versions(exam: Examination) -> Iterator[Finding]:
    """Compare versions and packages of all ranks."""
    if exam.num_ranks == 1:
        return
    decisive = {"fullshard": {each.rank: each.fullshard for each in exam.arrivals}}
    for name in sorted({name for each in exam.ranks for name in each.versions} - {"fullshard"}):
        decisive[name] = {each.rank: each.versions.get(name, "none") for each in exam.ranks}
    differing = {name: values for name, values in decisive.items() if len({*values.values()}) > 1}
    for name, values in differing.items():
        is_refused = name in ("fullshard", "torch")
        yield Finding(
            "versions",
            Severity.PROBLEM if is_refused else Severity.WARNING,
            "between ranks",
            f"{name} differs: {_by_value(exam, values)}",
            "Install one version everywhere"
            + ("; fullshard refuses such ranks (DivergenceError)." if is_refused else "."),
        )
    if not differing:
        yield Finding("versions", Severity.OK, "between ranks", f"alike: {', '.join(decisive)}")


def judge_packages(exam: Examination) -> Iterator[Finding]:
    """Compare the packages that are installed where the ranks run."""
    if exam.num_ranks == 1:
        return
    reported = {"fullshard", "torch"}  # by judge_versions
    names = sorted({name for each in exam.ranks for name in each.packages} - reported)
    differing = {}
    for name in names:
        values = {each.rank: each.packages.get(name, "none") for each in exam.ranks}
        if len({*values.values()}) > 1:
            differing[name] = values
    for is_decisive in (True, False):
        chosen = {
            name: values
            for name, values in differing.items()
            if (name in _DECISIVE or name.startswith("nvidia-")) == is_decisive
        }
        if chosen:
            said = [f"{n}: {_by_value(exam, v)}" for n, v in list(chosen.items())[:_MOST_NAMED]]
            more = len(chosen) - len(said)
            yield Finding(
                "packages",
                Severity.WARNING if is_decisive else Severity.NOTE,
                "between ranks",
                "; ".join(said) + (f"; and {more} more (--json has all)" if more else ""),
                "Install from one list of pinned versions everywhere, or use one container image.",
            )
    if not differing:
        measured = f"{len(names)} packages, alike"
        yield Finding("packages", Severity.OK, "between ranks", measured)


def judge_variables(exam: Examination) -> Iterator[Finding]:
    """Compare the environment variables that matter."""
    names = sorted({name for each in exam.ranks for name in each.environment})
    for name in names:
        values = {each.rank: each.environment.get(name, "(unset)") for each in exam.ranks}
        if len({*values.values()}) == 1:
            continue
        if name in PER_RANK:
            advice = (
                "Ranks of a host can only share a GPU's memory if each sees the GPUs of all: let the "
                "launcher leave it alone, and each rank take the GPU of its LOCAL_RANK."
            )
        else:
            advice = "Export it alike on every host, or nowhere."
        severity = Severity.NOTE if name in PER_RANK else Severity.WARNING
        measured = f"{name} differs: {_by_value(exam, values)}"
        yield Finding("environment-differs", severity, "between ranks", measured, advice)


def judge_alike(exam: Examination) -> Iterator[Finding]:
    """Compare the devices of hosts."""
    devices = {
        each.rank: " + ".join(
            f"{number} x {name}" for name, number in _tally(d.name for d in each.devices.found)
        )
        or "none"
        for each in exam.ranks
    }
    if len({*devices.values()}) > 1:
        yield Finding(
            "devices",
            Severity.WARNING,
            "between ranks",
            f"devices differ: {_by_value(exam, devices)}",
            "Ranks have to be alike: all with a GPU or none, and the slowest sets the pace.",
        )


def _tally(names: Iterable[str]) -> Iterable[tuple[str, int]]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts.items()


def judge_knocks(exam: Examination) -> Iterator[Finding]:
    """Judge connections from host to host, at the addresses that Gloo tells."""
    labels = host_labels(exam.arrivals)
    knocks = [knock for each in exam.results for knock in each.knocks]
    failed = [knock for knock in knocks if knock.error]
    for knock in failed:
        yield Finding(
            "hosts",
            Severity.PROBLEM,
            f"{labels[knock.source]} to {labels[knock.target]}",
            f"no connection to {knock.address}: {knock.error}",
            "Open the hosts' firewalls to each other on all ports above 1023, or choose another interface "
            "by GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
        )
    if knocks and not failed:
        measured = f"{counted(len(knocks), 'connection')}, each host to each other one"
        yield Finding("hosts", Severity.OK, "between hosts", measured)


def judge_links(exam: Examination) -> Iterator[Finding]:
    """Judge messages between pairs of ranks over Gloo."""
    links = _links(exam)
    failed = [link for link in links if link.error]
    first_turn = min((link.turn for link in failed), default=0)
    for link in failed:
        if link.turn == first_turn:  # later ones may have failed because of these
            yield Finding(
                "gloo",
                Severity.PROBLEM,
                _pair(exam, link),
                f"no message got through: {link.error}",
                "Look for a rank that ended, a firewall, or an interface that only one of them has "
                "(GLOO_SOCKET_IFNAME).",
            )
    for each in exam.results:
        if error := each.errors.get("gloo"):
            yield Finding(
                "gloo",
                Severity.PROBLEM,
                at(exam, [each.rank]),
                f"the ranks cannot connect over Gloo: {error}",
                "Look at the findings `hosts` and `host-name`; set GLOO_SOCKET_IFNAME to the interface "
                "that all hosts reach.",
            )
    labels = host_labels(exam.arrivals)
    by_kind: dict[str, list[Link]] = {"within hosts": [], "between hosts": []}
    for link in links:
        if not link.error:
            by_kind["within hosts" if _is_local(labels, link) else "between hosts"].append(link)
    for kind, good in by_kind.items():
        yield from _judge_speeds(exam, good, kind)


def _judge_speeds(exam: Examination, links: list[Link], kind: str) -> Iterator[Finding]:
    if not links:
        return
    latency = statistics.median(link.latency_s for link in links)
    speed = statistics.median(link.bytes_per_s for link in links)
    slow = sorted(
        (link for link in links if link.bytes_per_s < _SLOW * speed), key=lambda k: k.bytes_per_s
    )
    if slow:
        said = [f"{_pair(exam, k)}: {sized(k.bytes_per_s)}/s" for k in slow[:_MOST_NAMED]]
        yield Finding(
            "link-speed",
            Severity.WARNING,
            kind,
            f"{len(slow)} of {len(links)} pairs are below a quarter of the median ({sized(speed)}/s): "
            + ", ".join(said),
            "Look at the cable, the switch port and other load of the host that they share. Every step "
            "waits for the slowest.",
        )
    elif kind == "between hosts" and speed < _SLOW_NETWORK:
        yield Finding(
            "link-speed",
            Severity.WARNING,
            kind,
            f"{sized(speed)}/s, about a gigabit or less",
            "Sharded parameters cross the network three times a step. Choose the fast interface "
            "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), or shard within hosts and replicate between them.",
        )
    measured = (
        f"{counted(len(links), 'pair')}, median {timed(latency)} one way and {sized(speed)}/s"
    )
    yield Finding("gloo", Severity.OK, kind, measured)


def judge_clocks(exam: Examination) -> Iterator[Finding]:
    """Compare the hosts' clocks with that of the first rank's host."""
    labels = host_labels(exam.arrivals)
    links = _links(exam)
    best: dict[str, Link] = {}
    for link in links:
        if link.first == 0 and not link.error and not _is_local(labels, link):
            label = labels[link.second]
            if label not in best or link.clock_error_s < best[label].clock_error_s:
                best[label] = link
    # Without any message, that is the finding.
    for label in dict.fromkeys(labels.values()) if links else ():
        origin = labels[0]
        if label == origin:
            continue
        if label not in best:
            measured = "its clock was not compared, since no message got through"
            yield Finding("clocks", Severity.NOTE, label, measured)
            continue
        ahead, error = best[label].clock_offset_s, best[label].clock_error_s
        direction = "ahead of" if ahead > 0 else "behind"
        measured = f"{timed(abs(ahead))} {direction} {origin}, give or take {timed(error)}"
        if abs(ahead) - error > _CLOCKS_APART_S:
            advice = (
                "Let a time service run there (chrony, systemd-timesyncd). Otherwise logs cannot be "
                "merged, certificates are refused, and files of different hosts seem out of order."
            )
            yield Finding("clocks", Severity.WARNING, label, measured, advice)
        else:
            yield Finding("clocks", Severity.OK, label, measured)


def judge_nccl(exam: Examination) -> Iterator[Finding]:
    """Judge all-reduces over NCCL, of each host's ranks and of all."""
    for each in exam.results:
        if why_not := each.errors.get("nccl"):
            where = at(exam, [each.rank])
            yield Finding("nccl", Severity.NOTE, where, f"NCCL was not tried: {why_not}")
    by_ranks = {}
    for collective in (one for each in exam.results for one in each.collectives):
        if collective.error or collective.ranks not in by_ranks:
            by_ranks[collective.ranks] = collective
    for ranks, collective in by_ranks.items():
        if collective.error:
            advice = (
                "Run again with NCCL_DEBUG=INFO. If the ranks of one host succeed and all do not: "
                "NCCL_SOCKET_IFNAME, firewall, NCCL_IB_DISABLE=1 to try without InfiniBand. If those of one "
                "host fail: room in /dev/shm, NCCL_P2P_DISABLE=1 to try without peer access."
            )
            measured = f"all-reduce of {numbered(ranks)} failed: {collective.error}"
            yield Finding("nccl", Severity.PROBLEM, at(exam, ranks), measured, advice)
        else:
            measured = (
                f"all-reduce of {numbered(ranks)}: {timed(collective.seconds)}, "
                f"{sized(collective.bytes_per_s)}/s"
            )
            yield Finding("nccl", Severity.OK, at(exam, ranks), measured)


def judge_communication(exam: Examination) -> Iterator[Finding]:
    """Judge what fullshard chose for a small model, which was trained for a step."""
    labels = host_labels(exam.arrivals)
    seen = set()
    for tried in (one for each in exam.results for one in each.communications):
        if tried in seen:
            continue
        seen.add(tried)
        where = at(exam, tried.ranks)
        chosen = f"on {tried.device} fullshard takes: {tried.chosen}"
        is_one_host = len({labels[rank] for rank in tried.ranks}) == 1
        if tried.error:
            measured = f"a step of a small model on {tried.device} failed: {tried.error}"
            advice = "Look at the findings above first. If there are none, this is one to report."
            yield Finding("communication", Severity.PROBLEM, where, measured, advice)
        elif is_one_host and tried.device == "cpu" and "no peer memory" in tried.chosen:
            advice = (
                "Ranks of a host that read each other's memory need no copies of parameters. They have to be "
                "in one container, of one user, on Linux, with memory and open files left."
            )
            yield Finding("communication", Severity.WARNING, where, chosen, advice)
        else:
            yield Finding("communication", Severity.OK, where, chosen)


def _links(exam: Examination) -> list[Link]:
    return sorted(
        (link for each in exam.results for link in each.links),
        key=lambda link: (link.first, link.second),
    )


def _is_local(labels: Mapping[int, str], link: Link) -> bool:
    return labels[link.first] == labels[link.second]


def _pair(exam: Examination, link: Link) -> str:
    labels = host_labels(exam.arrivals)
    first, second = labels[link.first], labels[link.second]
    if first == second:
        return f"{numbered([link.first, link.second])} of {first}"
    return f"rank {link.first} of {first} and rank {link.second} of {second}"


def _by_value(exam: Examination, values: Mapping[int, str]) -> str:
    """Say which ranks have which value: "2.13.0 on a, 2.12.1 on b"."""
    ranks_with: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_with.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {at(exam, ranks)}" for value, ranks in ranks_with.items())
