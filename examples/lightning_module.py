"""Train a Lightning module under its ModelParallelStrategy, and go on from its checkpoint.

    torchrun --nproc-per-node 8 -m fullshard.run examples/lightning_module.py
    torchrun --nproc-per-node 2 -m fullshard.run examples/lightning_module.py     # CPUs need nothing else

`configure_model` is where Lightning wants modules to be sharded. Nothing here knows of fullshard.
"""

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, Dataset


class Counting(Dataset):
    """Sequences that count up from a random number."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        start = torch.randint(0, 32, (1,), generator=torch.Generator().manual_seed(index))
        return (start + torch.arange(17)) % 32


class Recognizer(lightning.LightningModule):
    """A small transformer that predicts the next number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, 64)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(64, 32)

    def configure_model(self) -> None:
        """Shard each block, then what is left."""
        if isinstance(self.head, FSDPModule):
            return  # Lightning may call it again
        mesh = self.device_mesh["data_parallel"]
        for part in (*self.blocks, self.embedding, self.head):
            fully_shard(part, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], self.device)
        states = self.embedding(tokens)
        for block in self.blocks:
            states = block(states, src_mask=mask, is_causal=True)
        return self.head(states)

    def training_step(self, tokens: torch.Tensor, _: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(
            self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        mean = self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")
        self.print(f"step {self.global_step + 1}: loss {mean.item():.6f}")
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(epochs: int, checkpoint: Path | None = None) -> lightning.Trainer:
    """Train for some epochs in all, from a checkpoint if there is one."""
    trainer = lightning.Trainer(
        accelerator="auto",
        devices="auto" if torch.accelerator.is_available() else torch.distributed.get_world_size(),
        strategy=ModelParallelStrategy(
            data_parallel_size=torch.distributed.get_world_size(), tensor_parallel_size=1
        ),
        max_epochs=epochs,
        gradient_clip_val=None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(Counting(), batch_size=8)
    trainer.fit(Recognizer(), data, ckpt_path=str(checkpoint) if checkpoint else None)
    return trainer


def main() -> None:
    """Train two epochs, save, and train the third from there."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/lightning"))
    out = parser.parse_args().out
    torch.distributed.init_process_group()
    trainer = fit(2)
    trainer.save_checkpoint(out / "two-epochs.ckpt")
    fit(3, out / "two-epochs.ckpt")


if __name__ == "__main__":
    main()
