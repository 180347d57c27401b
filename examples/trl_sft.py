"""Supervised fine-tuning on conversations with TRL's SFTTrainer, sharded by its own option.

    torchrun --nproc-per-node 8 -m fullshard.run examples/trl_sft.py
    torchrun --nproc-per-node 2 -m fullshard.run --cpu examples/trl_sft.py        # without a GPU

A model of two layers learns to answer sums. Nothing here knows of fullshard.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '$' }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
)


class PrintLosses(TrainerCallback):
    """Prints every loss with all its digits, on the first rank."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step}: loss {float(logs['loss']):.6f}", flush=True)


def conversations() -> Dataset:
    """Return questions and answers."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    return Dataset.from_list(
        [
            {
                "messages": [
                    {"role": "user", "content": f"{a}+{b}="},
                    {"role": "assistant", "content": str(a + b)},
                ]
            }
            for a, b in pairs
        ]
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """Return one token a character, with a template that marks what the assistant says."""
    vocabulary = {character: number for number, character in enumerate("_$+=0123456789")}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="_"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="_", eos_token="$")
    fast.chat_template = TEMPLATE
    return fast


def main() -> None:
    """Train, and save for `from_pretrained`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("runs/sft"))
    command = parser.parse_args()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=14, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    arguments = SFTConfig(
        output_dir=str(command.out),
        fsdp=True,
        fsdp_config={
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "FULL_STATE_DICT",
        },
        assistant_only_loss=True,
        max_steps=command.steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        max_length=32,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=conversations(),
        processing_class=tokenizer(),
        callbacks=[PrintLosses()],
    )
    trainer.train()
    trainer.save_model(str(command.out / "final"))
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        again = LlamaForCausalLM.from_pretrained(command.out / "final")
        print(f"saved {sum(p.numel() for p in again.parameters()):,} parameters")


if __name__ == "__main__":
    main()
