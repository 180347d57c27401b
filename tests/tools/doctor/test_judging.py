"""From facts to findings: each finding is made where it has to be, says so, and nowhere else."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NamedTuple

import pytest

from fullshard.tools.doctor.checks import judge, verdict_of
from fullshard.tools.doctor.facts import (
    Collective,
    Communication,
    Device,
    Examination,
    Knock,
    Limits,
)
from fullshard.tools.doctor.findings import Severity, at, host_labels, numbered
from fullshard.tools.doctor.printing import as_dict
from tests.tools.doctor.examinations import GB, VERSIONS, exam, gpus, link, machine, results

PROBLEM, WARNING, NOTE, OK = Severity


class Case(NamedTuple):
    """Facts, and the one finding that they have to give besides those that are ok."""

    id: str
    severity: Severity
    exam: Examination
    where: str
    words: tuple[str, ...]


def _torch(version: str) -> dict[str, Any]:
    return {"versions": {**VERSIONS, "torch": version}}


def _on(rank: int, **changes: Any) -> Any:
    """Change one rank's facts."""
    return lambda each: changes if each == rank else {}


def _from(rank: int, **changes: Any) -> Any:
    """Change the facts of a rank and of those after it."""
    return lambda each: changes if each >= rank else {}


def _gpus_of_ranks(rank: int) -> dict[str, Any]:
    return {"devices": gpus(current=rank % 2)}


def _files(soft: int, hard: int) -> dict[str, Any]:
    return {"limits": Limits(soft, hard)}


ONE = {"per_host": 1}
MANY_LINKS = [link(i, j) for j in range(4) for i in range(j)]
CASES = [
    # Meeting
    Case(
        "meeting",
        PROBLEM,
        dataclasses.replace(
            exam(2), arrivals=exam(2).arrivals[:3], ranks=exam(2).ranks[:3], results=[]
        ),
        "node1",
        ("3 of 4 ranks came within 60 s", "missing: rank 3", "node0:29500"),
    ),
    Case(
        "meeting",
        PROBLEM,
        dataclasses.replace(
            exam(3), arrivals=exam(3).arrivals[:2], ranks=exam(3).ranks[:2], results=[]
        ),
        "host number 1 (from 0), host number 2 (from 0)",
        ("2 of 6 ranks", "missing: ranks 2-5"),
    ),
    Case(
        "meeting",
        PROBLEM,
        exam(meeting_error="Connection refused"),
        "rank 0",
        ("cannot reach", "node0:29500", "Connection refused", "MASTER_ADDR", "firewall"),
    ),
    Case(
        "start",
        PROBLEM,
        exam(start_error="Too many open files"),
        "node0",
        ("2 ranks cannot be started", "Too many open files"),
    ),
    Case("stuck", PROBLEM, exam(stuck="summing over NCCL"), "node0", ("summing over NCCL",)),
    # Between ranks
    Case(
        "hosts",
        PROBLEM,
        exam(2, results=results({"knocks": (Knock(0, 2, "10.0.0.2:4000", "timed out"),)})),
        "node0 to node1",
        ("10.0.0.2:4000", "timed out", "firewall", "GLOO_SOCKET_IFNAME"),
    ),
    Case(
        "gloo",
        PROBLEM,
        exam(
            results=results(
                {"links": (link(0, 1, error="reset by peer"), link(0, 1, turn=1, error="later"))}
            )
        ),
        "ranks 0-1 of node0",
        ("reset by peer",),
    ),
    Case(
        "gloo",
        PROBLEM,
        exam(results=results({"errors": {"gloo": "connectFullMesh failed"}})),
        "rank 0 of node0",
        ("connectFullMesh failed", "GLOO_SOCKET_IFNAME"),
    ),
    Case(
        "link-speed",
        WARNING,
        exam(
            per_host=4, results=results({"links": (*MANY_LINKS[1:], link(0, 1, bytes_per_s=2e8))})
        ),
        "within hosts",
        ("1 of 6 pairs", "1.0 GB/s", "ranks 0-1 of node0: 200 MB/s"),
    ),
    Case(
        "link-speed",
        WARNING,
        exam(
            2,
            per_host=1,
            results=results({"links": (link(0, 1, bytes_per_s=5e7),)}),
        ),
        "between hosts",
        ("50 MB/s", "gigabit", "NCCL_SOCKET_IFNAME"),
    ),
    Case(
        "clocks",
        WARNING,
        exam(2, per_host=1, results=results({"links": (link(0, 1, clock_offset_s=-3.5),)})),
        "node1",
        ("3.5 s behind node0", "give or take 50 us", "chrony"),
    ),
    Case(
        "clocks",
        NOTE,
        exam(3, per_host=1, results=results({"links": (link(0, 1),)})),
        "node2",
        ("not compared",),
    ),
    Case(
        "nccl",
        PROBLEM,
        exam(
            ranks={"devices": gpus()},
            of_rank=_gpus_of_ranks,
            results=results(
                {"collectives": (Collective((0, 1), 1e-3, 1e9),)},
                {"collectives": (Collective((0, 1), error="no end within 60 s"),)},
            ),
        ),
        "node0",
        ("ranks 0-1", "no end within 60 s", "NCCL_DEBUG=INFO"),
    ),
    Case(
        "nccl",
        NOTE,
        exam(results=results({"errors": {"nccl": "ranks share a GPU"}})),
        "rank 0 of node0",
        ("not tried", "ranks share a GPU"),
    ),
    Case(
        "communication",
        WARNING,
        exam(
            results=results(
                {
                    "communications": (
                        Communication(
                            (0, 1), "cpu", "process group (gloo); no peer memory: no /proc"
                        ),
                    )
                }
            )
        ),
        "node0",
        ("process group (gloo)", "no /proc", "one container"),
    ),
    Case(
        "communication",
        PROBLEM,
        exam(results=results({"communications": (Communication((0, 1), "cpu", error="lost"),)})),
        "node0",
        ("a step of a small model on cpu failed: lost",),
    ),
    # Ranks that differ
    Case(
        "versions",
        PROBLEM,
        exam(2, of_rank=_from(2, **_torch("2.12.1")), results=results({"links": (link(0, 2),)})),
        "between ranks",
        ("torch differs", "2.13.0+cpu on node0", "2.12.1 on node1", "DivergenceError"),
    ),
    Case(
        "versions",
        WARNING,
        exam(of_rank=_on(1, versions={**VERSIONS, "Python": "3.12.1"})),
        "between ranks",
        ("Python differs", "3.12.1 on rank 1 of node0"),
    ),
    Case(
        "packages",
        WARNING,
        exam(of_rank=_on(1, packages={"numpy": "1.26.0", "rich": "14.0"})),
        "between ranks",
        ("numpy: 2.4.6 on rank 0 of node0, 1.26.0 on rank 1 of node0",),
    ),
    Case(
        "packages",
        NOTE,
        exam(of_rank=_on(1, packages={"numpy": "2.4.6"})),
        "between ranks",
        ("rich: 14.0 on rank 0 of node0, none on rank 1 of node0",),
    ),
    Case(
        "environment-differs",
        WARNING,
        exam(of_rank=_on(1, environment={"NCCL_ALGO": "Ring"})),
        "between ranks",
        ("NCCL_ALGO", "(unset) on rank 0 of node0", "Ring on rank 1 of node0"),
    ),
    Case(
        "environment-differs",
        NOTE,
        exam(of_rank=lambda rank: {"environment": {"CUDA_VISIBLE_DEVICES": str(rank)}}),
        "between ranks",
        ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK"),
    ),
    Case(
        "devices",
        WARNING,
        exam(
            2,
            per_host=1,
            ranks={"devices": gpus()},
            of_rank=_on(1, devices=gpus(3)),
            results=results({"links": (link(0, 1),)}),
        ),
        "between ranks",
        ("2 x H100 on node0", "3 x H100 on node1"),
    ),
    # Machines
    Case(
        "torch", PROBLEM, exam(ranks=_torch("2.9.1")), "node0", ("2.9.1", "refuses", "pip install")
    ),
    Case("torch", WARNING, exam(ranks=_torch("2.99.0")), "node0", ("2.99.0", "tested with")),
    Case("torch", WARNING, exam(ranks=_torch("nightly")), "node0", ("nightly",)),
    Case("backends", PROBLEM, exam(ranks={"backends": ("mpi",)}), "node0", ("has mpi", "gloo")),
    Case(
        "backends",
        PROBLEM,
        exam(ranks={"backends": ("gloo",)}, of_rank=_gpus_of_ranks),
        "node0",
        ("nccl",),
    ),
    Case(
        "devices",
        WARNING,
        exam(ranks={"devices": gpus(0, current=None)}),  # type: ignore[arg-type]
        "node0",
        ("driver is loaded", "nvidia-smi", "CUDA_VISIBLE_DEVICES"),
    ),
    Case(
        "devices",
        WARNING,
        exam(ranks={"devices": gpus()}),
        "node0",
        ("2 x H100", "2 ranks", "share one", "CUDA IPC"),
    ),
    Case(
        "devices",
        WARNING,
        exam(
            **ONE,
            ranks={"devices": gpus(found=(*gpus().found, Device("A100", 40 * GB, "8.0", "GPU-9")))},
        ),
        "node0",
        ("3 x H100, A100", "40.0 GB", "slowest"),
    ),
    Case(
        "device-memory",
        WARNING,
        exam(**ONE, ranks={"devices": gpus(free_nbytes=10 * GB)}),
        "node0",
        ("cuda:0 has 10.0 GB of 80.0 GB free", "nvidia-smi"),
    ),
    Case(
        "peer-access",
        NOTE,
        exam(**ONE, ranks={"devices": gpus(no_access=((0, 1), (1, 0)))}),
        "node0",
        ("2 pairs", "0 to 1, 1 to 0", "topo -m"),
    ),
    Case(
        "threads",
        WARNING,
        exam(ranks={"threads": 5}),
        "node0",
        ("8 cores for 2 ranks of 5 threads", "OMP_NUM_THREADS=4"),
    ),
    Case(
        "threads",
        WARNING,
        exam(machines={"core_quota": 3.5}),
        "node0",
        ("3.5 cores (its cgroup's quota; it may run on 8)", "OMP_NUM_THREADS=1"),
    ),
    Case("threads", NOTE, exam(ranks={"threads": 1}), "node0", ("nothing to do", "=4")),
    Case(
        "cores",
        WARNING,
        exam(machines={"cores": 1}, ranks={"threads": 1}),
        "node0",
        ("1 core for 2 ranks", "at most 1 rank "),
    ),
    Case(
        "memory",
        WARNING,
        exam(machines={"memory_free_nbytes": GB}),
        "node0",
        ("1.0 GB of the 64.0 GB are free", "SIGKILL"),
    ),
    Case(
        "memory",
        WARNING,
        exam(machines={"memory_limit_nbytes": 8 * GB, "memory_used_nbytes": 8 * GB - 100}),
        "node0",
        ("100 B of the 8.0 GB that its cgroup allows",),
    ),
    Case("memory", NOTE, exam(machines={"memory_nbytes": None}), "node0", ("cannot be read",)),
    Case("overcommit", WARNING, exam(machines={"overcommit": 2}), "node0", ("sysctl",)),
    Case(
        "shm",
        NOTE,
        exam(machines={"shm_nbytes": 64 << 20, "shm_free_nbytes": 60 << 20}),
        "node0",
        ("63 MB of 67 MB", "fullshard does not use it", "--shm-size"),
    ),
    Case("shm", NOTE, exam(machines={"shm_free_nbytes": None}), "node0", ("there is no /dev/shm",)),
    Case(
        "shm",
        WARNING,
        exam(machines={"shm_free_nbytes": 0}, of_rank=_gpus_of_ranks),
        "node0",
        ("NCCL",),
    ),
    Case(
        "open-files",
        PROBLEM,
        exam(ranks=_files(90, 4096)),
        "node0",
        ("limit 90, 30 in use", "`ulimit -n 1118`"),
    ),
    Case(
        "open-files",
        PROBLEM,
        exam(of_rank=_on(1, **_files(90, 1024))),
        "rank 1 of node0",
        ("limit 90", "hard limit, 1024", "raised to 1118"),
    ),
    Case(
        "memlock",
        WARNING,
        exam(
            machines={"has_infiniband": True},
            ranks={"limits": Limits(65536, 65536, 8 << 20)},
            of_rank=_gpus_of_ranks,
        ),
        "node0",
        ("8 MB may be locked", "InfiniBand", "ulimit -l unlimited"),
    ),
    Case(
        "tasks",
        WARNING,
        exam(machines={"tasks": 90, "max_tasks": 100}),
        "node0",
        ("pids.max", "room for 10 processes", "--pids-limit"),
    ),
    Case(
        "tasks",
        WARNING,
        exam(ranks={"limits": Limits(65536, processes=64)}),
        "node0",
        ("ulimit -u", "room for 64"),
    ),
    Case(
        "host-name",
        PROBLEM,
        exam(
            2,
            per_host=1,
            of_rank=_on(1, machine=machine(1, addresses=("127.0.1.1",))),
            results=results({"links": (link(0, 1),)}),
        ),
        "node1",
        ("node1 is 127.0.1.1", "GLOO_SOCKET_IFNAME", "eth0"),
    ),
    Case(
        "host-name",
        PROBLEM,
        exam(
            2,
            per_host=1,
            of_rank=_on(0, machine=machine(0, addresses=())),
            results=results({"links": (link(0, 1),)}),
        ),
        "node0",
        ("resolves to nothing",),
    ),
    Case(
        "host-name",
        PROBLEM,
        exam(ranks={"environment": {"GLOO_SOCKET_IFNAME": "ib0"}}),
        "node0",
        ("GLOO_SOCKET_IFNAME=ib0", "lo, eth0"),
    ),
    Case("py-spy", NOTE, exam(ranks={"has_py_spy": False}), "node0", ("pip install py-spy",)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.id}-{case.severity.value}")
def test_a_fault_gives_one_finding_that_says_where_what_and_what_to_do(case: Case) -> None:
    (found,) = [each for each in judge(case.exam) if each.severity is not OK]
    assert (found.id, found.severity, found.where) == (case.id, case.severity, case.where)
    said = f"{found.measured} {found.advice}"
    assert not [word for word in case.words if word not in said], said
    assert found.advice or case.severity is NOTE


@pytest.mark.parametrize(
    ("variable", "severity"),
    [
        ("CUDA_LAUNCH_BLOCKING=1", WARNING),
        ("CUDA_DEVICE_MAX_CONNECTIONS=1", WARNING),
        ("NCCL_P2P_DISABLE=1", WARNING),
        ("NCCL_SHM_DISABLE=1", WARNING),
        ("NCCL_IB_DISABLE=1", NOTE),
        ("NCCL_DEBUG=info", NOTE),
        ("TORCH_DISTRIBUTED_DEBUG=DETAIL", WARNING),
        ("TORCH_NCCL_BLOCKING_WAIT=1", WARNING),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING=0", WARNING),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING=1", WARNING),
        ("PYTORCH_ALLOC_CONF=backend:cudaMallocAsync", NOTE),
        ("PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync", NOTE),
        ("FULLSHARD_DEBUG=1", NOTE),
        ("CUDA_LAUNCH_BLOCKING=0", OK),
        ("CUDA_DEVICE_MAX_CONNECTIONS=8", OK),
        ("NCCL_DEBUG=WARN", OK),
        ("TORCH_DISTRIBUTED_DEBUG=OFF", OK),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING=1", OK),
        ("PYTORCH_ALLOC_CONF=expandable_segments:True", OK),
    ],
)
def test_variables_that_hurt_are_named(variable: str, severity: Severity) -> None:
    name, _, value = variable.partition("=")
    found = [
        each
        for each in judge(exam(ranks={"environment": {name: value}}))
        if each.id == "environment"
    ]
    assert [each.severity for each in found] == [severity]
    if severity is not OK:
        assert found[0].measured.startswith(f"{variable}: ")
        assert found[0].advice


def _healthy() -> list[Examination]:
    cpu_links = tuple(MANY_LINKS)
    step = Communication((0, 1), "cpu", "peer memory (one host)")
    good = {"links": cpu_links, "communications": (step,), "knocks": (Knock(0, 2, "b:1"),)}
    summed = {"collectives": (Collective((0, 1), 1e-3, 1e9),)}
    across = Communication((0, 1), "cpu", "process group (gloo); no peer memory: different hosts")
    return [
        exam(),
        exam(**ONE),
        exam(2, results=results(good, {}, {}, {})),
        exam(of_rank=_gpus_of_ranks, results=results(summed, summed)),
        exam(ranks={"limits": Limits()}),
        exam(ranks={"limits": Limits(1024)}),
        exam(machines={"addresses": ("127.0.0.1",)}),
        exam(2, results=results(good), ranks={"environment": {"GLOO_SOCKET_IFNAME": "eth0"}}),
        exam(2, per_host=1, results=results({"links": (link(0, 1),), "communications": (across,)})),
    ]


@pytest.mark.parametrize("healthy", _healthy())
def test_healthy_hosts_give_no_finding_but_ok(healthy: Examination) -> None:
    found = judge(healthy)
    assert not [each for each in found if each.severity is not OK]
    assert verdict_of(found) is OK
    assert {"meeting", "torch", "open-files", "memory", "threads"} <= {each.id for each in found}


def test_what_was_measured_is_in_the_finding_of_what_is_well() -> None:
    two = exam(2, results=results({"links": tuple(MANY_LINKS)}))
    said = {(each.id, each.where): each.measured for each in judge(two)}
    assert said["gloo", "within hosts"] == "2 pairs, median 50 us one way and 1.0 GB/s"
    assert said["gloo", "between hosts"] == "4 pairs, median 50 us one way and 1.0 GB/s"
    assert said["clocks", "node1"] == "100 us ahead of node0, give or take 50 us"


def test_findings_come_worst_first_and_the_worst_is_the_verdict() -> None:
    bad = exam(ranks={"has_py_spy": False, "threads": 9}, meeting_error="refused")
    found = judge(bad)
    order = [each.severity for each in found if each.severity is not OK]
    assert order == [PROBLEM, WARNING, NOTE]
    assert found[-1].severity is OK
    assert verdict_of(found) is PROBLEM
    assert verdict_of(found[1:]) is WARNING


def test_the_json_form_has_verdict_findings_and_facts() -> None:
    written = json.loads(json.dumps(as_dict(exam(2), judge(exam(2)))))
    assert written["verdict"] == "ok"
    assert {each["id"] for each in written["findings"]} >= {"torch", "meeting"}
    assert written["facts"]["ranks"][3]["machine"]["name"] == "node1"


def test_hosts_of_one_name_are_told_apart() -> None:
    same = exam(2, per_host=1, of_rank=lambda rank: {"machine": machine(rank, name="box")})
    assert host_labels(same.arrivals) == {0: "box", 1: "box (2)"}
    assert at(same, [1]) == "box (2)"


def test_ranks_and_hosts_are_named_briefly() -> None:
    assert numbered([3]) == "rank 3"
    assert numbered([7, 0, 1, 2]) == "ranks 0-2, 7"
    assert at(exam(2), [0, 1]) == "node0"
    assert at(exam(2), [1, 2, 3]) == "rank 1 of node0, node1"
    assert at(exam(2), range(4)) == "all 2 hosts"
