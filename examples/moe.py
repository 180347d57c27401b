"""A mixture of experts: experts divided over a mesh of their own, everything else over all ranks.

    torchrun --nproc-per-node 4 examples/moe.py        # 2 groups of experts, each sharded over 2 ranks
    torchrun --nproc-per-node 2 examples/moe.py        # 2 groups of experts, each on one rank

            expert axis 0   expert axis 1
    data 0  rank 0          rank 1            dense parts: sharded over ranks 0 to 3
    data 1  rank 2          rank 3            experts 0 to 3: over ranks 0 and 2, experts 4 to 7: over 1 and 3

Tokens travel to their experts and back by all-to-all. Every rank has data of its own, so an expert's gradient
is already the sum over both columns when it is reduced over its column: it is divided by all ranks, as the
dense ones are (`set_gradient_divide_factor`). Under PyTorch's FSDP2 (on GPUs, where it can divide so):

    sed 's/^from fullshard import/from torch.distributed.fsdp import/' examples/moe.py
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard import fully_shard

DIM, NUM_EXPERTS, VOCABULARY = 32, 8, 64


class Experts(nn.Module):
    """This rank's experts. tokens: (tokens, dim), sorted by expert; counts: tokens of each."""

    def __init__(self, up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(up.clone()), nn.Parameter(down.clone())

    def forward(self, tokens: torch.Tensor, counts: list[int]) -> torch.Tensor:
        parts = zip(tokens.split(counts), self.up, self.down, strict=True)
        return torch.cat([F.gelu(part @ up) @ down for part, up, down in parts])


class MoE(nn.Module):
    """Sends each token to its best expert, on whichever rank that is. x: (tokens, dim) -> same."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group, self.size = mesh.get_group(), mesh.size()
        self.router = nn.Linear(DIM, NUM_EXPERTS, bias=False)
        # All ranks draw all experts, and keep theirs: the model does not depend on the mesh.
        up = torch.randn(NUM_EXPERTS, DIM, 2 * DIM) / DIM**0.5
        down = torch.randn(NUM_EXPERTS, 2 * DIM, DIM) / (2 * DIM) ** 0.5
        mine = mesh.get_local_rank()
        self.experts = Experts(up.chunk(self.size)[mine], down.chunk(self.size)[mine])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=NUM_EXPERTS)
        theirs = torch.empty_like(
            counts
        )  # (ranks, experts here): what each rank sends to each of mine
        dist.all_to_all_single(theirs, counts, group=self.group)
        sent = counts.view(self.size, -1).sum(1).tolist()
        received = theirs.view(self.size, -1).sum(1).tolist()
        arrived = all_to_all_single_autograd(x[order], received, sent, self.group)
        # They come by rank, and are computed by expert.
        expert = torch.arange(len(theirs)).remainder(len(theirs) // self.size)
        by_expert = expert.repeat_interleave(theirs).argsort(stable=True)
        own_counts = theirs.view(self.size, -1).sum(0).tolist()
        done = self.experts(arrived[by_expert], own_counts)[by_expert.argsort()]
        back = all_to_all_single_autograd(done, sent, received, self.group)
        return x + weights[:, None] * back[order.argsort()]


def main() -> None:
    """Train, and say what is divided over what."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    experts = min(size, 2)  # ranks that share the experts among them
    mesh = init_device_mesh("cpu", (size // experts, experts), mesh_dim_names=("data", "expert"))
    torch.manual_seed(0)
    layers = [MoE(mesh["expert"]) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, DIM), *layers, nn.Linear(DIM, VOCABULARY))
    for layer in layers:
        fully_shard(layer.experts, mesh=mesh["data"])
        layer.experts.set_gradient_divide_factor(size)
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for step in range(arguments.steps):
        data = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCABULARY, (256,), generator=data).chunk(size)[rank]
        loss = F.cross_entropy(model(tokens), (tokens * 7 + 3) % VOCABULARY)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / size
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step + 1}: loss {mean.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
