"""Which ranks are said to be gone after a collective has failed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist

from fullshard import host
from fullshard.peers import liveness
from fullshard.peers.store import StoreInTime


@pytest.fixture
def dead() -> int:
    """Return the number of a process that is gone."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    ("container", "lost"), [("boot pid:[1] 0", [1]), ("boot pid:[2] 0", [])], ids=["same", "other"]
)
def test_a_process_is_looked_for_where_its_number_means_something(
    dead: int, container: str, lost: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers of one node may share its name; process numbers are each one's own."""
    store = dist.HashStore()
    monkeypatch.setattr(liveness, "store_in_time", lambda limit_s: StoreInTime(store, limit_s))
    world = type("World", (), {})()  # in which nobody was announced yet
    monkeypatch.setattr(liveness, "default_group", lambda: world)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    monkeypatch.setattr(liveness, "_GRACE_S", 0.1)
    monkeypatch.setattr(host, "identity", lambda: container)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(liveness.os, "getpid", lambda: dead)
    liveness.announce()
    monkeypatch.setattr(host, "identity", lambda: "boot pid:[1] 0")
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    assert liveness._lost_ranks(None) == lost  # type: ignore[arg-type]
