"""Sample text from a language model, alone or sharded over ranks that all take part."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

Agree = Callable[[Tensor], Tensor]
"""Makes one rank's choice everybody's: takes and returns the chosen tokens (batch, 1)."""

NO_TOKEN = -1
"""In place of a token, where there is none."""

Step = Callable[[Tensor], Tensor]
"""Takes the next tokens (batch, new) of some sequences and returns their logits (batch, new, vocab)."""


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off, and back afterwards: each module's own mode, as parts may be in another."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _alone(tokens: Tensor) -> Tensor:
    return tokens


@torch.no_grad()
def generate(
    step: Step,
    prompt: Tensor,
    *,
    length: int,
    temperature: float = 0.8,
    seed: int = 0,
    agree: Agree = _alone,
) -> Iterator[Tensor]:
    """Yield `length` tokens (batch, 1), one at a time, that continue `prompt` (batch, positions).

    step: of new sequences, such as `continuation(model)`. Temperature 0 takes the likeliest token. With a
    sharded model every rank must call this with the same arguments, because each forward gathers
    parameters from all of them; `agree` then broadcasts one rank's choice, so that ranks stay together even
    where their devices round differently. Ends with `NO_TOKEN` where logits are not finite, or `agree` returns it. Raises ValueError for an empty prompt.
    """
    if prompt.shape[1] == 0:
        raise ValueError("generate: the prompt is empty; give at least one token to continue.")
    generator = torch.Generator().manual_seed(seed)
    tokens = prompt
    for _ in range(length):
        logits = step(tokens)[:, -1].float().cpu()
        if temperature == 0:
            choice = logits.argmax(-1, keepdim=True)
        else:
            odds = torch.softmax(logits / temperature, dim=-1)
            choice = torch.full_like(odds[:, :1], NO_TOKEN, dtype=torch.long)
            if not odds.isnan().any():
                choice = torch.multinomial(odds, 1, generator=generator)
        tokens = agree(choice.to(prompt.device))
        yield tokens
        if (tokens == NO_TOKEN).any():
            return
