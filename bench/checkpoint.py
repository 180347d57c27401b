"""How long a checkpoint takes: ours, `torch.distributed.checkpoint` (DCP), and the plainest way.

    python -m bench.checkpoint --world-sizes 2 4 --megabytes 1024 --rounds 3 --folder /data

Model and AdamW state of a given size, float32, sharded by `fully_shard`, ours and PyTorch's. In one run, in
turn, on the same ranks:

    plain      every rank writes the bytes that it owns to one file, and waits for the disk (fsync)
    copy       every rank copies these bytes to memory that it keeps from one round to the next, as a save
               in the background does
    save       ours and DCP, both with fsync
    load       into a model and optimizer state of the same ranks
    others     of what another number of ranks has saved: 4 for 2, and half as many for more
    hybrid     of what these ranks have saved, into two replicas over half of the ranks each
    stall      how long `async_save_checkpoint` keeps the program

Host memory: the most that a rank held beyond what it held before, as the kernel counts it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fullshard

WIDTH = 1024


def build(shard: Callable[..., Any], mesh: Any, nbytes: int) -> tuple[nn.Module, Any]:
    """Return a stack of matrices that takes a third of the bytes, and AdamW with the rest."""
    num_layers = max(1, round(nbytes / 3 / (WIDTH * WIDTH * 4)))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
    for layer in model:
        shard(layer, mesh=mesh)
    shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_()
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class Peak:
    """The most resident memory of this process in the body, beyond that before it, in MB."""

    def __enter__(self) -> Peak:
        self.before = self.most = _resident()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    @property
    def grown(self) -> float:
        return (self.most - self.before) / 2**20

    def _watch(self) -> None:
        while not self._ends.wait(0.005):
            self.most = max(self.most, _resident())


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def timed(body: Callable[[], object]) -> tuple[float, float]:
    """Run a body on all ranks together; return the slowest rank's seconds and largest growth."""
    dist.barrier()
    begun = time.perf_counter()
    with Peak() as peak:
        body()
        mine = time.perf_counter() - begun
    result = torch.tensor([mine, peak.grown], dtype=torch.float64)
    dist.all_reduce(result, op=dist.ReduceOp.MAX)
    return float(result[0]), float(result[1])


def plain_write(path: Path, tensors: list[torch.Tensor]) -> None:
    """Write tensors one after the other to one file, and wait for the disk."""
    with path.open("wb", buffering=0) as file:
        for tensor in tensors:
            file.write(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
        os.fsync(file.fileno())


def _locals(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        values = (parameter, state["exp_avg"], state["exp_avg_sq"])
        found += [value.detach().to_local() for value in values]
    return found


def dcp_save(path: Path, model: nn.Module, optimizer: Any) -> None:
    model_state, optim_state = get_state_dict(model, optimizer)
    writer = dcp.FileSystemWriter(path, sync_files=True, thread_count=4)
    dcp.save({"model": model_state, "optimizer": optim_state}, storage_writer=writer)


def dcp_load(path: Path, model: nn.Module, optimizer: Any) -> None:
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optim_state}, checkpoint_id=path)


def start(rank: int, size: int, store: Path) -> Any:
    """Join the job; return its mesh."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    return init_device_mesh("cpu", (size,))


def save_for_others(rank: int, size: int, nbytes: int, folder: Path) -> None:
    """Save what another number of ranks will load, in both formats."""
    mesh = start(rank, size, folder / "store of others")
    ours, theirs = (build(s, mesh, nbytes) for s in (fullshard.fully_shard, torch_fully_shard))
    fullshard.save_checkpoint(folder / "others", *ours, rng=False)
    dcp_save(folder / "dcp others", *theirs)
    dist.destroy_process_group()


def run_rank(rank: int, size: int, options: argparse.Namespace, folder: Path) -> None:
    """Measure everything on one rank; rank 0 writes the results."""
    mesh = start(rank, size, folder / "store")
    nbytes = options.megabytes * 2**20
    ours, theirs = (build(s, mesh, nbytes) for s in (fullshard.fully_shard, torch_fully_shard))
    results: dict[str, list[tuple[float, float]]] = {}

    def measure(name: str, body: Callable[[], object]) -> None:
        results.setdefault(name, []).append(timed(body))

    local = _locals(*ours)
    copies = [torch.empty_like(tensor).fill_(0) for tensor in local]

    def run_round(here: Path) -> None:
        measure("plain", lambda: plain_write(here / f"plain{rank}", local))
        measure("save", lambda: fullshard.save_checkpoint(here / "ours", *ours, rng=False))
        measure("dcp save", lambda: dcp_save(here / "dcp", *theirs))
        stalls: list[Any] = []
        measure("copy", lambda: torch._foreach_copy_(copies, local))
        measure(
            "stall",
            lambda: stalls.append(
                fullshard.async_save_checkpoint(here / "later", *ours, rng=False)
            ),
        )
        stalls[0].wait()
        measure("load", lambda: fullshard.load_checkpoint(here / "ours", *ours, rng=False))
        measure("dcp load", lambda: dcp_load(here / "dcp", *theirs))
        measure("others", lambda: fullshard.load_checkpoint(folder / "others", *ours, rng=False))
        measure("dcp others", lambda: dcp_load(folder / "dcp others", *theirs))
        halves = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
        hybrid = [build(s, halves, nbytes) for s in (fullshard.fully_shard, torch_fully_shard)]
        measure("hybrid", lambda: fullshard.load_checkpoint(here / "ours", *hybrid[0], rng=False))
        measure("dcp hybrid", lambda: dcp_load(here / "dcp", *hybrid[1]))

    for number in range(options.rounds):
        here = folder / f"round{number}"
        if rank == 0:
            here.mkdir()
        dist.barrier()
        run_round(here)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(here)
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


RATIOS = {
    "save": ("plain", "dcp save"),
    "load": ("dcp load",),
    "others": ("dcp others",),
    "hybrid": ("dcp hybrid",),
    "stall": ("copy",),
}


def main() -> None:
    """Measure on each number of ranks, and print medians, ratios and memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes", type=int, default=1024, help="of the whole state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="where to write (default: the temporary folder)"
    )
    options = parser.parse_args()
    for size in options.world_sizes:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            folder = Path(name)
            others = 4 if size == 2 else max(1, size // 2)
            for_others = (others, options.megabytes * 2**20, folder)
            torch.multiprocessing.spawn(save_for_others, for_others, nprocs=others)
            torch.multiprocessing.spawn(run_rank, (size, options, folder), nprocs=size)
            results = json.loads((folder / "results.json").read_text())
        print(f"\n{size} ranks, {options.megabytes} MB of state, {options.rounds} rounds")
        for what, found in results.items():
            seconds = statistics.median(each[0] for each in found)
            grown = max(each[1] for each in found)
            line = f"  {what:14} {seconds:7.3f} s   {grown:7.0f} MB a rank"
            for other in RATIOS.get(what, ()):
                ratios = [a[0] / b[0] for a, b in zip(found, results[other], strict=True)]
                line += f"   {statistics.median(ratios):.2f} of {other}"
            print(line)


if __name__ == "__main__":
    main()
