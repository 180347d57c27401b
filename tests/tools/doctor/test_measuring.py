"""What is read from the system and from torch, where a test can say what is there."""

from __future__ import annotations

import shutil
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard import host
from fullshard.host import Pool, Quotas, memory_pools, read_quotas
from fullshard.tools.doctor.machine import look_at_devices, relevant
from fullshard.tools.doctor.together import plan_pairs


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a machine's files: what the kernel says in proc, control groups in sys."""
    monkeypatch.setattr(host, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(host, "_GROUPS", tmp_path / "sys")
    return tmp_path


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def test_limits_of_version_2_are_the_tightest_on_the_way_up(here: Path) -> None:
    _write(
        here,
        {
            "proc/self/cgroup": "0::/jobs/mine",
            "sys/jobs/mine/cpu.max": "max 100000",
            "sys/jobs/mine/memory.max": "9000",
            "sys/jobs/mine/memory.current": "100",
            "sys/jobs/mine/pids.max": "max",
            "sys/jobs/cpu.max": "250000 100000",
            "sys/jobs/memory.max": "12000",
            "sys/jobs/memory.current": "11000",
            "sys/pids.max": "500",
            "sys/pids.current": "20",
        },
    )
    assert read_quotas() == Quotas(2.5, 12000, 11000, 500, 20)


def test_limits_of_version_1_are_read_in_a_container(here: Path) -> None:
    # The path is the host's; inside, the group is what is mounted.
    _write(
        here,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n2:pids:/docker/abc",
            "sys/memory/memory.limit_in_bytes": "4096",
            "sys/memory/memory.usage_in_bytes": "96",
            "sys/cpu,cpuacct/cpu.cfs_quota_us": "150000",
            "sys/cpu,cpuacct/cpu.cfs_period_us": "100000",
            "sys/pids/pids.max": "77",
        },
    )
    assert read_quotas() == Quotas(1.5, 4096, 96, 77, None)


def test_no_limit_is_none(here: Path) -> None:
    _write(
        here,
        {
            "proc/self/cgroup": "4:memory:/\n3:cpu:/",
            "sys/memory/memory.limit_in_bytes": str((1 << 63) - 4096),
            "sys/cpu/cpu.cfs_quota_us": "-1",
            "sys/cpu/cpu.cfs_period_us": "100000",
        },
    )
    nothing = Quotas(None, None, None, None, None)
    assert read_quotas() == nothing
    shutil.rmtree(here / "proc")
    assert read_quotas() == nothing


def test_memory_that_can_be_had_is_of_the_host_and_of_the_container(here: Path) -> None:
    _write(
        here,
        {
            "proc/meminfo": "MemTotal: 99 kB\nMemAvailable: 40 kB\nSwapFree: 3 kB",
            "proc/sys/kernel/random/boot_id": "boot",
            "proc/self/cgroup": "0::/jobs/mine",
            "sys/jobs/mine/memory.max": "9000",
            "sys/jobs/mine/memory.current": "8000",
            "sys/jobs/mine/memory.stat": "anon 10\ninactive_file 500\nactive_file 20\nshmem 70",
            "sys/jobs/memory.max": "max",
            "sys/jobs/memory.current": "8000",
        },
    )
    machine, container = memory_pools().values()
    assert machine == Pool("this host", 40 * 1024, 3 * 1024)
    assert container == Pool("this container, which may have 0.0 GiB", 1520, 3 * 1024)
    shutil.rmtree(here / "proc")
    assert memory_pools() == {}


@pytest.mark.parametrize("hosts", [[[0]], [[0, 1]], [[0, 1], [2]], [[0], [1], [2], [3, 4]]])
def test_few_ranks_meet_each_other_once(hosts: Sequence[Sequence[int]]) -> None:
    everybody = range(sum(map(len, hosts)))
    assert sorted(plan_pairs(hosts)) == [(i, j) for i in everybody for j in everybody if i < j]


def test_many_ranks_meet_on_their_host_and_hosts_meet_by_their_first_ranks() -> None:
    hosts = [range(first, min(first + 8, 125)) for first in range(0, 125, 8)]
    pairs = plan_pairs(hosts)
    within = {(i, j) for ranks in hosts for i in ranks for j in ranks if i < j}
    between = {(i, j) for i in range(0, 125, 8) for j in range(i + 8, 125, 8)}
    assert set(pairs) == within | between
    assert len(pairs) == len(within | between)


def test_pairs_exchange_at_the_same_time() -> None:
    """When each rank goes through its pairs in order, and a pair takes a moment."""
    free = dict.fromkeys(range(32), 0)
    for first, second in plan_pairs([range(32)]):
        free[first] = free[second] = 1 + max(free[first], free[second])
    assert max(free.values()) < 2 * 32


def test_variables_that_matter_are_chosen_and_others_stay_private() -> None:
    environment = {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "2", "HF_TOKEN": "x", "HOME": "/root"}
    environment["FULLSHARD_LAUNCHER_PID"] = "7"
    assert relevant(environment) == {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "2"}


def test_cuda_devices_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch.cuda's functions replaced."""

    def properties(index: int) -> Any:
        return types.SimpleNamespace(
            name="H100", total_memory=80, major=9, minor=0, uuid=f"GPU-{index}"
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (70 + index, 80))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: abs(i - j) == 1)
    found = look_at_devices(4)
    assert (found.current, found.free_nbytes) == (1, 71)
    assert [device.uuid for device in found.found] == ["GPU-0", "GPU-1", "GPU-2"]
    assert found.found[0].capability == "9.0"
    assert found.no_access == ((0, 2), (2, 0))


def test_a_filesystem_is_that_of_the_deepest_mount_that_covers_others(here: Path) -> None:
    mounts = [
        "21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw",
        f"22 21 0:5 / {here}/data rw - nfs4 store:/data rw",
        f"23 22 0:6 / {here}/data/my\\040disk rw - xfs /dev/vdb rw",
        f"24 21 0:7 / {here}/over rw - ext4 /dev/vdc rw",
        f"25 24 0:8 / {here}/over rw - tmpfs tmpfs rw",
    ]
    _write(here, {"proc/self/mountinfo": "\n".join(mounts)})
    (here / "link").symlink_to(here / "over")
    found = {
        name: host.filesystem(here / name) for name in ("data2", "data/a", "data/my disk", "link")
    }
    assert found == {"data2": "ext4", "data/a": "nfs4", "data/my disk": "xfs", "link": "tmpfs"}
    (here / "proc/self/mountinfo").unlink()
    assert host.filesystem(here) == ""
