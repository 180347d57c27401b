"""Train with Transformers' Trainer, sharded by its own option, resume, and save for `from_pretrained`.

    torchrun --nproc-per-node 8 -m fullshard.run examples/trainer.py
    torchrun --nproc-per-node 2 -m fullshard.run --cpu examples/trainer.py        # without a GPU

A Llama of two layers learns the text of Python's own help, byte by byte. Nothing here knows of fullshard.
"""

import argparse
import inspect
import pydoc_data.topics
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

STEPS, LENGTH = 10, 64


class HelpTexts(Dataset):
    """Pieces of Python's help, as bytes."""

    def __init__(self) -> None:
        text = inspect.getsource(pydoc_data.topics).encode()
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.tokens) // LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.tokens[index * LENGTH : (index + 1) * LENGTH]
        return {"input_ids": piece, "labels": piece}


class PrintLosses(TrainerCallback):
    """Prints every loss with all its digits, on the first rank."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step}: loss {float(logs['loss']):.6f}", flush=True)


def make_trainer(out: Path) -> Trainer:
    """Build the model and its trainer anew."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(out),
        fsdp=True,
        fsdp_config={
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "activation_checkpointing": True,
            "state_dict_type": "SHARDED_STATE_DICT",
        },
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=STEPS // 2,
        report_to=[],
        disable_tqdm=True,
    )
    return Trainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=HelpTexts(),
        callbacks=[PrintLosses()],
    )


def main() -> None:
    """Train, then train the second half once more from the checkpoint, and save whole weights."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/trainer"))
    out = parser.parse_args().out
    make_trainer(out).train()
    trainer = make_trainer(out)
    if trainer.is_world_process_zero():
        print("again from the checkpoint:")
    trainer.train(resume_from_checkpoint=str(out / f"checkpoint-{STEPS // 2}"))
    trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(out / "final"))
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        again = LlamaForCausalLM.from_pretrained(out / "final")
        print(f"saved {sum(p.numel() for p in again.parameters()):,} parameters in {out / 'final'}")


if __name__ == "__main__":
    main()
