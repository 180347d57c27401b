"""Reinforcement learning as GRPO does it: sample groups of answers, reward them, train, hand the weights on.

    torchrun --nproc-per-node 2 examples/grpo.py

The policy is sharded. Answers are written by a generator with a plain copy of the model, as a rollout engine
has (vLLM, SGLang): after each step it gets the new weights in lists, and no rank ever holds a second whole
copy in one piece. The task is to answer with the digits of the question in reverse.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fullshard import clip_grad_norm_, fully_shard, stream_weights

DIGITS, LENGTH = 4, 3  # three digits from 0 to 3 are asked, and three answered
GROUP = 16  # answers a question


class Policy(nn.Module):
    """Logits of the next digit. digits: (batch, up to 6) -> (batch, the same, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.digit, self.place = nn.Embedding(DIGITS, 64), nn.Embedding(2 * LENGTH, 64)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(64, DIGITS)

    def forward(self, digits: torch.Tensor) -> torch.Tensor:
        length = digits.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        states = self.digit(digits) + self.place(torch.arange(length))
        for block in self.blocks:
            states = block(states, src_mask=mask, is_causal=True)
        return self.head(states)


class Generator:
    """Stands for a rollout engine: it has a model of its own and loads weights by name."""

    def __init__(self) -> None:
        self.model = Policy().eval().requires_grad_(False)
        self._parameters = dict(self.model.named_parameters())

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self._parameters[name].copy_(tensor)

    def answer(self, questions: torch.Tensor) -> torch.Tensor:
        """Sample answers. questions: (batch, 3) -> both, (batch, 6)."""
        digits = questions
        for _ in range(LENGTH):
            chances = self.model(digits)[:, -1].softmax(-1)
            digits = torch.cat([digits, torch.multinomial(chances, 1)], dim=1)
        return digits


def log_probabilities(model: nn.Module, digits: torch.Tensor) -> torch.Tensor:
    """Return those of the answers' digits, (batch, 3)."""
    logits = model(digits[:, :-1])[:, LENGTH - 1 :]
    return -F.cross_entropy(logits.mT, digits[:, LENGTH:], reduction="none")


def main() -> None:
    """Sample, reward, train, stream."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    policy = Policy()
    for part in (*policy.blocks, policy):
        fully_shard(part)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    generator = Generator()
    torch.manual_seed(1 + rank)  # each rank has questions and answers of its own
    for step in range(arguments.steps):
        for weights in stream_weights(policy, bucket_mb=1):  # collective: every rank runs the loop
            generator.load_weights(weights)
        questions = torch.randint(0, DIGITS, (8, LENGTH)).repeat_interleave(GROUP, dim=0)
        with torch.no_grad():
            digits = generator.answer(questions)
        rewards = (digits[:, LENGTH:] == questions.flip(1)).float().mean(1)
        groups = rewards.view(-1, GROUP)
        advantages = groups - groups.mean(1, keepdim=True)
        advantages = (advantages / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        before = None
        for _ in range(2):  # two updates on one set of answers
            now = log_probabilities(policy, digits)
            before = now.detach() if before is None else before
            ratio = (now - before).exp()
            gains = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            (-gains.mean()).backward()
            clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        reward = rewards.mean() / size
        dist.all_reduce(reward)
        if rank == 0 and (step + 1) % 5 == 0:
            print(f"step {step + 1}: reward {reward.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
