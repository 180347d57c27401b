"""Two models and two optimizers: one's step comes while a graph through the other is still to be gone back through."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from fullshard import fully_shard


def main() -> None:
    torch.manual_seed(0)
    makes, judges = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, n)) for n in (4, 1))
    for model in (makes, judges):
        fully_shard(model)
    optimizers = [torch.optim.Adam(model.parameters(), 1e-3) for model in (makes, judges)]
    ones, zeros = torch.ones(8, 1), torch.zeros(8, 1)
    torch.manual_seed(dist.get_rank())
    while True:
        made = makes(torch.randn(8, 4))
        loss = binary_cross_entropy_with_logits(judges(torch.randn(8, 4)), ones)
        loss = loss + binary_cross_entropy_with_logits(judges(made.detach()), zeros)
        loss.backward()
        optimizers[1].step()
        for model in (makes, judges):
            model.zero_grad()
        binary_cross_entropy_with_logits(judges(made), ones).backward()
        optimizers[0].step()


if __name__ == "__main__":
    main()
