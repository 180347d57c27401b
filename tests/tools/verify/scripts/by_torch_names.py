"""A script that knows PyTorch's names alone, and whose logger never ends."""

from __future__ import annotations

import argparse
import atexit
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    atexit.register(time.sleep, 600)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, args.width), nn.ReLU(), nn.Linear(args.width, 1))
    fully_shard(model)
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        while True:
            model(torch.randn(8, 4)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            print(f"a step, for {args.out} by {sys.argv[0]}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
