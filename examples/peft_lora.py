"""Fine-tune a Hugging Face model with LoRA (PEFT): a frozen base in bfloat16, adapters in float32, all sharded.

    torchrun --nproc-per-node 2 examples/peft_lora.py

What is frozen gets no gradient memory, and frozen and trained parameters of two dtypes share a unit. The
adapter is saved in PEFT's format, as any program of PEFT's reads it. Under PyTorch's FSDP2:

    sed 's/^from fullshard import/from torch.distributed.fsdp import/' examples/peft_lora.py
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fullshard import MixedPrecisionPolicy, fully_shard


def base_model() -> LlamaForCausalLM:
    """Return the model that is adapted; `from_pretrained(...)` would stand here."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16)


def adapted_model() -> PeftModel:
    """Add adapters, then shard: adapters are part of their layer's unit."""
    lora = LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM",
        init_lora_weights=True,
    )  # fmt: skip
    model = get_peft_model(base_model(), lora, autocast_adapter_dtype=True)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, LlamaDecoderLayer):
            fully_shard(module, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def main() -> None:
    """Train the adapters, save them, and put them onto a new base on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("runs/lora"))
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = adapted_model()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for step in range(arguments.steps):
        data = torch.Generator().manual_seed(1000 * step + rank)
        tokens = (torch.randint(1, 100, (4, 1), generator=data) + torch.arange(24)) % 127 + 1
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / size
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step + 1}: loss {mean.item():.6f}", flush=True)

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    adapters = get_model_state_dict(model, options=whole)  # on rank 0; empty on the others
    model.eval()
    tokens = torch.arange(1, 25).unsqueeze(0)
    with torch.no_grad():
        ours = model(input_ids=tokens).logits
    if rank == 0:
        model.save_pretrained(arguments.out, state_dict=adapters)
        again = PeftModel.from_pretrained(base_model(), arguments.out).eval()
        with torch.no_grad():
            theirs = again(input_ids=tokens).logits
        print(
            f"saved {sum(each.numel() for each in adapters.values()):,} parameters in {arguments.out}"
        )
        print(f"the adapter on a new base differs by {(ours - theirs).abs().max().item():.0e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
