"""Checkpoints: save in the background, go on with any number of ranks, export for others.

    torchrun --nproc-per-node 2 examples/checkpoint.py                 # steps 1 to 6
    torchrun --nproc-per-node 4 examples/checkpoint.py --steps 12      # goes on with step 7, on four ranks
    torchrun --nproc-per-node 1 examples/checkpoint.py --steps 12 --export runs/exported
    fullshard ckpt ls runs/checkpoint                                  # what is in it

Model, optimizer, schedule, the place in the data and random numbers go on as if nothing had happened: the
losses do not depend on where it was stopped. `--export` writes one safetensors file, as any program reads it.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fullshard


class Data:
    """Batches of 32 sequences for all ranks together, of which each takes its part."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def next(self, rank: int, size: int) -> torch.Tensor:
        start = torch.randint(0, 64, (32, 1), generator=self.generator)
        return ((start + torch.arange(13)) % 64).chunk(size)[rank]

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.generator.set_state(state["generator"])


def make_model() -> nn.Module:
    """Return a sharded model that predicts the next number."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(48, 192), nn.GELU(), nn.Linear(192, 48)) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(64, 48), *blocks, nn.Linear(48, 64))
    for block in blocks:
        fullshard.fully_shard(block)
    return fullshard.fully_shard(model)


def main() -> None:
    """Train to a number of steps, from the newest checkpoint if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=Path("runs/checkpoint"))
    parser.add_argument("--export", type=Path, help="write the model's weights to this folder")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model, data = make_model(), Data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    extra = {"scheduler": scheduler, "data": data}
    with fullshard.CheckpointManager(
        arguments.folder, model, optimizer, extra=extra, every_steps=3
    ) as manager:
        first = manager.resume()
        for step in range(first, arguments.steps):
            tokens = data.next(rank, size)
            loss = nn.functional.cross_entropy(
                model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            mean = loss.detach() / size
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1}: loss {mean.item():.6f}", flush=True)
            manager.step(step + 1)
            if manager.stopping:  # SIGTERM came, to whichever rank
                break
    if arguments.export is not None:
        exported = fullshard.export_hf(model, arguments.export, overwrite=True)
        if rank == 0:
            print(f"wrote {exported.nbytes:,} bytes to {', '.join(exported.files)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
