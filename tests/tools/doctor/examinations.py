"""Examinations that nobody made: facts of healthy hosts, which tests then change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from fullshard.tools.doctor.facts import (
    Arrival,
    Device,
    Devices,
    Examination,
    Limits,
    Link,
    Machine,
    RankFacts,
    Results,
)
from fullshard.versions import VERSION

GB = 10**9
VERSIONS = {"fullshard": VERSION, "torch": "2.13.0+cpu", "Python": "3.11.7", "NumPy": "2.4.6"}


def machine(host: int, **changes: Any) -> Machine:
    healthy = Machine(
        name=f"node{host}",
        boot_id=f"boot {host}",
        system="Linux 6.8 x86_64",
        cores=8,
        memory_nbytes=64 * GB,
        memory_free_nbytes=60 * GB,
        shm_nbytes=32 * GB,
        shm_free_nbytes=32 * GB,
        overcommit=0,
        tasks=100,
        max_tasks=30000,
        addresses=(f"10.0.0.{host + 1}",),
        interfaces={"lo": "127.0.0.1", "eth0": f"10.0.0.{host + 1}"},
    )
    return dataclasses.replace(healthy, **changes)


def gpus(number: int = 2, *, current: int = 0, **changes: Any) -> Devices:
    found = tuple(Device("H100", 80 * GB, "9.0", f"GPU-{i}") for i in range(number))
    healthy = Devices(found, current, 79 * GB, has_driver=True)
    return dataclasses.replace(healthy, **changes)


def exam(
    hosts: int = 1,
    *,
    per_host: int = 2,
    machines: Mapping[str, Any] | None = None,
    ranks: Mapping[str, Any] | None = None,
    of_rank: Callable[[int], Mapping[str, Any]] = lambda rank: {},
    **changes: Any,
) -> Examination:
    """Make one of healthy CPU ranks: 4 threads each, on 8 cores.

    machines, ranks: changes of every machine, and of every rank; of_rank: of one.
    """
    facts = [
        RankFacts(
            rank=rank,
            local_rank=rank % per_host,
            num_local_ranks=per_host,
            pid=1000 + rank,
            machine=machine(rank // per_host, **(machines or {})),
            versions=VERSIONS,
            packages={"numpy": "2.4.6", "rich": "14.0"},
            backends=("gloo", "nccl"),
            limits=Limits(65536, 65536, 8 << 20),
            threads=8 // per_host,
        )
        for rank in range(hosts * per_host)
    ]
    facts = [dataclasses.replace(each, **{**(ranks or {}), **of_rank(each.rank)}) for each in facts]
    arrivals = [
        Arrival(f.rank, f.machine.name, f.machine.boot_id, f.pid, f.versions["fullshard"])
        for f in facts
    ]
    healthy = Examination(
        num_ranks=len(facts),
        timeout_s=60.0,
        reporter=0,
        arrivals=arrivals,
        ranks=facts,
        results=[Results(f.rank, open_files=30) for f in facts],
        num_local_ranks=per_host,
        meeting_place="node0:29500",
    )
    return dataclasses.replace(healthy, **changes)


def results(*of_ranks: Mapping[str, Any]) -> list[Results]:
    """Make what ranks found, one after the other."""
    return [Results(rank, **{"open_files": 30, **each}) for rank, each in enumerate(of_ranks)]


def link(first: int, second: int, **changes: Any) -> Link:
    return dataclasses.replace(Link(first, second, 0, 50e-6, 1e9, 1e-4, 50e-6), **changes)
