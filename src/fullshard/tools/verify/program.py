"""The user's functions: a model, batches, a loss, and how the model is sharded; with what stands in for them."""

import copy
import dataclasses
import hashlib
import random
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import fullshard
from fullshard.tools.config import OptionError
from fullshard.tools.import_path import function_at
from fullshard.tools.verify.options import DTYPES, VerifyOptions


class Subject(NamedTuple):
    """What is trained: a plain model, and the whole batch of a step."""

    model: nn.Module
    batch: Callable[[int], Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """The user's functions, imported, and what they are used with."""

    options: VerifyOptions
    build_model: Callable[[], Any]
    batch: Callable[[int], Any] | None
    loss: Callable[[nn.Module, Any], Any] | None
    shard: Callable[[nn.Module], Any] | None

    def make(self, device: torch.device) -> Subject:
        """Build the model from the seed. Raises OptionError if that gives no model and batch."""
        options = self.options
        seed_all(options.seed)
        made = self.build_model()
        batch = self.batch
        if isinstance(made, (tuple, list)) and len(made) == 2:
            made, first = made
            batch = batch or (lambda _: first)
        if not isinstance(made, nn.Module):
            kind = type(made).__name__
            raise OptionError(f"{options.model} returned {kind}, not a model (nn.Module).")
        if batch is None:
            raise OptionError(
                f"{options.model} returned a model alone. Return (model, batch), or give "
                "--batch MODULE:FUNCTION."
            )
        if any(tensor.is_meta for tensor in (*made.parameters(), *made.buffers())):
            raise OptionError(
                f"{options.model}: the model has parameters on the meta device, so there are no values "
                "to begin with. Return one that has memory."
            )
        made.train(not options.evaluates)
        return Subject(made.to(device=device, dtype=DTYPES.get(options.dtype)), batch)

    def part(self, subject: Subject, step: int, rank: int, device: torch.device) -> Any:
        """Return a rank's part of a step's batch. Raises OptionError if it cannot be divided."""
        seed_all(self.options.seed, step)
        whole = subject.batch(step)
        if not tensors_in(whole):
            raise OptionError(
                f"the batch of step {step} is a {type(whole).__name__} without tensors. Give a tensor, or "
                "tuples, lists and dicts of tensors."
            )
        dtype = DTYPES.get(self.options.dtype)

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            own = _cut(tensor, rank, self.options.ranks, step).to(device)
            return own.to(dtype) if own.is_floating_point() else own

        return mapped(cut, whole)

    def loss_of(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss of a part. Raises OptionError if nothing says what it is."""
        loss = _default_loss(model, batch) if self.loss is None else self.loss(model, batch)
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            return loss.reshape(())
        said = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else loss
        whose = "the model's output is" if self.loss is None else f"{self.options.loss} returned"
        raise OptionError(
            f"{whose} {said if isinstance(said, str) else type(said).__name__}, not a scalar loss. Give "
            "--loss MODULE:FUNCTION, a function of model and batch that returns one."
        )

    def sharded(self, model: nn.Module) -> nn.Module:
        """Return the model sharded as the user does, or as `default_shard` does. Collective."""
        if self.shard is None:
            return default_shard(model, self.options.api)
        made = self.shard(model)
        if not isinstance(made, nn.Module):
            kind = type(made).__name__
            raise OptionError(f"{self.options.shard} returned {kind}, not the sharded model.")
        return made


def load_program(options: VerifyOptions) -> Program:
    """Import the user's functions. Raises OptionError for one that is not there."""
    optional = (options.batch, options.loss, options.shard)
    batch, loss, shard = (function_at(each) if each else None for each in optional)
    return Program(options, function_at(options.model), batch, loss, shard)


def default_shard(model: nn.Module, api: str) -> nn.Module:
    """Shard a model without being told how: a unit for each repeated block, and one for the rest."""
    blocks = repeated_blocks(model)
    if api == "fsdp1":
        policy = fullshard.CustomPolicy(lambda module: any(module is block for block in blocks))
        return fullshard.FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True
        )
    for block in blocks:
        fullshard.fully_shard(block)
    return fullshard.fully_shard(model)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the children of every ModuleList, and of a Sequential that has several of one class.

    Inner ones first, as `fully_shard` wants them. A block without parameters, or without a forward of its
    own (a list in a list), is none.
    """
    blocks: dict[int, nn.Module] = {}
    for module in reversed(list(model.modules())):
        children = [child for child in module.children() if list(child.parameters())]
        kinds = [type(child) for child in children]
        is_repeated = isinstance(module, nn.Sequential) and len(set(kinds)) < len(kinds)
        if is_repeated or isinstance(module, nn.ModuleList):
            own = (c for c in children if not isinstance(c, (nn.ModuleList, nn.ModuleDict)))
            blocks |= {id(child): child for child in own if child is not model}
    return list(blocks.values())


def seed_all(*numbers: int) -> None:
    """Seed Python's, NumPy's and torch's generators from numbers, such as seed, step and rank."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest()
    seed = int.from_bytes(digest, "little")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def mapped(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return nested tuples, lists and dicts with their tensors changed; other values stay."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):  # libraries return mappings of classes of their own
        copied = copy.copy(value) if isinstance(value, MutableMapping) else {}
        for key, each in value.items():
            copied[key] = mapped(change, each)
        return copied
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(change, each) for each in value))
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(change, each) for each in value)
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists and dicts, in order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    mapped(note, value)
    return found


def _cut(tensor: torch.Tensor, rank: int, num_ranks: int, step: int) -> torch.Tensor:
    if tensor.ndim == 0:
        return tensor
    size = tensor.shape[0]
    if size == 0 or size % num_ranks:
        raise OptionError(
            f"the batch of step {step} has a tensor of shape {tuple(tensor.shape)}, whose dim 0 cannot be "
            f"divided evenly among {num_ranks} ranks. Give batches of a multiple of {num_ranks}, or "
            "another --ranks."
        )
    return tensor[rank * size // num_ranks : (rank + 1) * size // num_ranks]


def _default_loss(model: nn.Module, batch: Any) -> Any:
    """Call the model and take the loss out of what it returns: a scalar, `.loss` or ["loss"]."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    loss = getattr(output, "loss", None)
    return output if loss is None else loss
