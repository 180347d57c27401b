"""Train under Ray: a function of your own, or `fullshard train`; one worker is killed, and the run goes on.

    pip install ".[train]" "ray[train]"      # in a clone of the repository
    python examples/ray_train.py function --kill-once    # your function, in Ray's workers
    python examples/ray_train.py train --kill-once       # `fullshard train`, a rank beside each worker

Ray starts all workers again when one fails (FailureConfig). They go on from the newest complete checkpoint
of the folder, which is fullshard's own: every host of the cluster has to see it under one path.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

import fullshard

TINY = ["--model", "tiny", "--device", "cpu", "--seq", "32", "--batch", "2", "--sample-length", "0"]


def train_function(config: dict) -> None:
    """Train a small model; Ray has made the process group."""
    folder = Path(config["folder"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    fullshard.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # signals=(): Ray calls this in a thread, where Python takes no signals.
    manager = fullshard.CheckpointManager(
        folder / "checkpoints", model, optimizer, every_steps=5, keep_last=2, signals=()
    )
    first = manager.resume()
    print(f"rank {dist.get_rank()}: begins after step {first}", flush=True)
    for step in range(first, config["steps"]):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        batch = torch.randn(32, 16, generator=generator)
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.step(step + 1)
        if config["kill_once"] and step + 1 == 12 and first == 0 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    manager.close()
    print(f"rank {dist.get_rank()}: {config['steps']} steps, loss {loss.item():.4f}", flush=True)


def train_command(config: dict) -> None:
    """Be one rank of `fullshard train`, in a process of its own that has the main thread and its signals."""
    port = [_free_port()]
    dist.broadcast_object_list(port)  # Ray's own group has MASTER_PORT
    folder = Path(config["folder"])
    words = ["train", *TINY, "--steps", str(config["steps"]), "--save-every", "5"]
    rank = subprocess.Popen(
        [sys.executable, "-m", "fullshard", *words, "--out", str(folder), "--auto-resume"],
        env={**os.environ, "MASTER_PORT": str(port[0]), "OMP_NUM_THREADS": "1"},
    )
    latest = folder / "checkpoints" / "latest"
    if config["kill_once"] and get_context().get_world_rank() == 1 and not latest.exists():
        while not latest.exists() and rank.poll() is None:
            time.sleep(0.01)
        rank.kill()
    if rank.wait():
        raise RuntimeError(f"the rank ended with {rank.returncode}")


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def main() -> None:
    """Run one of them on two CPU workers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["function", "train"])
    parser.add_argument("--out", type=Path, default=Path("runs/ray"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--kill-once", action="store_true", help="kill a worker, to see what follows"
    )
    arguments = parser.parse_args()
    folder = (arguments.out / arguments.what).resolve()
    trainer = TorchTrainer(
        train_function if arguments.what == "function" else train_command,
        train_loop_config={
            "folder": str(folder),
            "steps": arguments.steps,
            "kill_once": arguments.kill_once,
        },
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=arguments.workers),
        run_config=RunConfig(
            name=arguments.what,
            storage_path=str(folder / "ray"),
            failure_config=FailureConfig(max_failures=1),
        ),
    )
    trainer.fit()
    print(f"finished: {fullshard.latest_checkpoint(folder / 'checkpoints').path}")


if __name__ == "__main__":
    main()
