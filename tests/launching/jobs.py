"""What ranks run in these tests. They import it by name, so it imports little."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fullshard


class OddError(Exception):
    """An exception that cannot be made anew from its message alone."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def facts(steps: int) -> dict[str, Any]:
    """Train for some steps, write to both streams, and return what a rank sees of its place."""
    torch.manual_seed(0)
    model = fullshard.fully_shard(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("rank", dist.get_rank(), "to stdout")
    print("rank", dist.get_rank(), "to stderr", file=sys.stderr)
    big = torch.arange(1 << 20)
    return {
        "rank": dist.get_rank(),
        "ranks": dist.get_world_size(),
        "backend": dist.get_backend(),
        "environment": {
            name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        },
        "threads": torch.get_num_threads(),
        "loss": loss,
        "weight": model.weight.full_tensor(),
        "row": big[:2],
        "pids": (os.getppid(), os.getpid()),
    }


def one_raises(folder: Path) -> None:
    """Raise on rank 1, while rank 0 waits for it in a collective, with a process that it has started."""
    child = subprocess.Popen(["sleep", "1000"])
    (folder / str(dist.get_rank())).write_text(f"{os.getpid()} {child.pid}")
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("a bad batch")
    dist.barrier()


def fails(how: str) -> Any:
    """End rank 1 otherwise than by returning what can travel."""
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "leaves":
            os._exit(7)
        if how == "exits":
            sys.exit(3)
        if how == "odd":
            raise OddError("this", "that")
        if how == "lock":
            return threading.Lock()
        if how == "returns":
            return None
    dist.barrier()
    return None


def waits(folder: Path) -> None:
    """Say who runs, and never end."""
    (folder / f"{dist.get_rank()}.partial").write_text(str(os.getpid()))
    (folder / f"{dist.get_rank()}.partial").rename(folder / str(dist.get_rank()))
    time.sleep(1000)
