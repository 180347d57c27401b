"""Train with Hugging Face Accelerate, sharded by its FSDP plugin, and go on from its checkpoint.

    accelerate launch --use_fsdp --fsdp_version 2 --num_processes 8 -m fullshard.run examples/accelerate_loop.py
    torchrun --nproc-per-node 2 -m fullshard.run --cpu examples/accelerate_loop.py        # without a GPU

The loop is what Accelerate's guide has: nothing in it knows of fullshard.
"""

import argparse
import tempfile

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import broadcast_object_list, set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = 8


def batches() -> DataLoader:
    """Return sequences that count up from a random number: the next token is the last one plus 1."""
    starts = torch.randint(0, 64, (16 * STEPS, 1), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset((starts + torch.arange(32)) % 64), batch_size=4)


def build(accelerator: Accelerator) -> tuple:
    """Return model, optimizer, scheduler and data, as Accelerate has prepared them."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
    return accelerator.prepare(model, optimizer, scheduler, batches())


def train(accelerator: Accelerator, parts: tuple, first: int, last: int) -> list[float]:
    """Train optimizer steps ``first`` to ``last``, of two micro-batches each; return their losses."""
    model, optimizer, scheduler, data = parts
    losses, total = [], 0.0
    data = accelerator.skip_first_batches(data, 2 * first)
    for number, (tokens,) in enumerate(data, 2 * first):
        if number == 2 * last:
            break
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        total += accelerator.reduce(loss.detach(), reduction="mean").item() / 2
        if accelerator.sync_gradients:
            accelerator.print(f"step {number // 2 + 1}: loss {total:.6f}")
            losses, total = [*losses, total], 0.0
    return losses


def main() -> None:
    """Train, save in the middle, and train on from there with new objects."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.parse_args()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=2)
    accelerator.print(f"{accelerator.distributed_type}, {accelerator.num_processes} processes")
    (folder,) = broadcast_object_list([tempfile.mkdtemp()])
    parts = build(accelerator)
    train(accelerator, parts, 0, STEPS // 2)
    accelerator.save_state(folder)
    losses = train(accelerator, parts, STEPS // 2, STEPS)

    accelerator.print("again from the checkpoint:")
    accelerator.free_memory()  # it forgets the first model
    parts = build(accelerator)
    accelerator.load_state(folder)
    again = train(accelerator, parts, STEPS // 2, STEPS)
    accelerator.print(f"resumed with the same losses: {again == losses}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
