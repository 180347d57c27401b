"""Does a model see what it must not: later tokens, other documents in its row? Measured, not believed.

Of families in Transformers, most derive from positions where a document begins, some take positions and
do not, and states run through all of a row. Nothing of that is an error there: such a model would learn
across documents without a word.
"""

import torch
from torch import Tensor, nn

from fullshard.models.configured import config_of, has_experts, next_token_logits, only_attends
from fullshard.models.evaluating import evaluating
from fullshard.models.model_config import ModelConfigError

_NUM_FIRST, _NUM_SECOND = 7, 9


def check_documents_apart(model: nn.Module, *, vocab_size: int, device: torch.device) -> None:
    """Raise ModelConfigError if in a packed row a document's logits depend on the one before it.

    Two rows are the same but for their first document. Two forwards without gradients or dropout, on
    every rank if the model is sharded; nothing is drawn, and modules are left in their modes.
    """
    row, other = _rows(vocab_size, device)
    other[:, _NUM_FIRST:] = row[:, _NUM_FIRST:]
    positions = torch.cat([torch.arange(n, device=device) for n in (_NUM_FIRST, _NUM_SECOND)])
    logits = _logits(model, row, positions[None]), _logits(model, other, positions[None])
    second = [each[:, _NUM_FIRST:] for each in logits]
    if not _same(model, second[0], second[1]):
        raise ModelConfigError(
            f"model_type {config_of(model).model_type!r}: documents in one row are not kept apart. What it "
            "predicts in the second depends on the first, so it would learn across documents."
        )


def check_causal(model: nn.Module, *, vocab_size: int, device: torch.device) -> None:
    """Raise ModelConfigError if the logits at a position depend on tokens that come later.

    Two rows differ in their last tokens only; otherwise as `check_documents_apart`.
    """
    row, other = _rows(vocab_size, device)
    other[:, :_NUM_FIRST] = row[:, :_NUM_FIRST]
    first = [_logits(model, each, None)[:, :_NUM_FIRST] for each in (row, other)]
    if not _same(model, first[0], first[1]):
        raise ModelConfigError(
            f"model_type {config_of(model).model_type!r}: tokens see later ones, so it cannot learn to "
            "predict the next. Give a causal model."
        )


def _rows(vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two rows of tokens (1, positions) that differ everywhere."""
    if vocab_size < 2:
        raise ModelConfigError(f"vocab_size {vocab_size}: rows of one token cannot differ.")
    row = torch.arange(_NUM_FIRST + _NUM_SECOND, device=device)[None] * 7 % vocab_size
    return row, (row + 1 + vocab_size // 3) % vocab_size


@torch.no_grad()
def _logits(model: nn.Module, tokens: Tensor, positions: Tensor | None) -> Tensor:
    with evaluating(model):
        return next_token_logits(model, tokens, positions)


def _same(model: nn.Module, one: Tensor, other: Tensor) -> bool:
    """Whether logits are the same: in every bit, as what is masked counts nothing at all.

    Only what experts compute is rounded differently beside other tokens. There what is less than half
    of the digits counts as rounding, of a model that only attends: what attention lets through is more.
    """
    if torch.equal(one, other):
        return True
    if not (has_experts(model) and only_attends(model)):
        return False
    allowed = one.abs().max().item() * torch.finfo(one.dtype).eps ** 0.5
    return (one - other).abs().max().item() <= allowed
