"""Sample text from a language model, alone or sharded over ranks that all take part."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fullshard.models.llama import KeyValueCache, Llama

Agree = Callable[[Tensor], Tensor]
"""Makes one rank's choice everybody's: takes and returns the chosen tokens (batch, 1)."""


def _alone(tokens: Tensor) -> Tensor:
    return tokens


@torch.no_grad()
def generate(
    model: Llama,
    prompt: Tensor,
    *,
    length: int,
    temperature: float = 0.8,
    seed: int = 0,
    agree: Agree = _alone,
) -> Iterator[Tensor]:
    """Yield `length` tokens (batch, 1), one at a time, that continue `prompt` (batch, positions).

    Temperature 0 takes the likeliest token. With a sharded model every rank must call this with
    the same arguments, because each forward gathers parameters from all of them; `agree` then
    broadcasts one rank's choice, so that ranks stay together even where their devices round
    differently. Raises ValueError for an empty prompt.
    """
    if prompt.shape[1] == 0:
        raise ValueError("generate: the prompt is empty; give at least one token to continue.")
    generator = torch.Generator().manual_seed(seed)
    caches = [KeyValueCache() for _ in range(model.config.num_layers)]
    tokens = prompt
    for _ in range(length):
        logits = model(tokens, caches)[:, -1].float().cpu()
        if temperature == 0:
            choice = logits.argmax(-1, keepdim=True)
        else:
            odds = torch.softmax(logits / temperature, dim=-1)
            choice = torch.multinomial(odds, 1, generator=generator)
        tokens = agree(choice.to(prompt.device))
        yield tokens
