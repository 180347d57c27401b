"""The program that trains a model of the user's functions, on whatever side: what a script is of other users."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import fullshard
from fullshard.planning.traced import default_units
from fullshard.tools.config import OptionError
from fullshard.tools.import_path import function_at
from fullshard.tools.verify.options import DTYPES, VerifyOptions
from fullshard.tools.verify.sides import Side
from fullshard.tools.verify.values import fingerprint, fingerprints, mapped, seed_all, tensors_in
from fullshard.tools.verify.watching import Watch


def train(program: "Program", side: Side, watch: Watch) -> None:
    """Train with plain SGD: a difference of parameters is then one of gradients, times the learning rate.

    A rank computes its own part of each step's batch, sharded. The one process computes those of all ranks in turn,
    each divided by their number: that is what data-parallel training has to give, whatever the loss is: the mean over
    ranks of each rank's mean. Random generators are seeded by step and rank, so masks of dropout are the same.
    """
    options, diary = program.options, side.diary
    diary.phase = "building the model"
    with watch.paused():
        plain, batch_of = program.make()
        watch.know({module: path for path, module in plain.named_modules()})
        diary.run.own |= fingerprints(plain.named_parameters(remove_duplicate=False))
        diary.phase = "sharding"
        model = side.sharded(plain, program.sharded)
        watch.add_model(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    for step in range(options.steps):
        for rank in side.parts:
            diary.step, diary.phase = step + 1, "making a batch"
            with watch.paused():
                part = program.part(batch_of, step, rank)
                watch.begin_part(rank, fingerprint(*tensors_in(part)))
            diary.phase = "forward"
            seed_all(options.seed, step, rank)
            loss = program.loss_of(model, part)
            loss.backward(torch.full_like(loss, 1 / len(side.parts)))
        optimizer.step()
        optimizer.zero_grad()


@dataclasses.dataclass(frozen=True)
class Program:
    """The user's functions, imported, and what they are used with."""

    options: VerifyOptions
    build_model: Callable[[], Any]
    batch: Callable[[int], Any] | None
    loss: Callable[[nn.Module, Any], Any] | None
    shard: Callable[[nn.Module], Any] | None

    def make(self) -> tuple[nn.Module, Callable[[int], Any]]:
        """Build the plain model from the seed, and what gives whole batches. Raises OptionError if that gives no model and batch."""
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
        made = made.to(device=torch.device(options.device), dtype=_dtype_of(options))
        return made, batch

    def part(self, batch: Callable[[int], Any], step: int, rank: int) -> Any:
        """Return a rank's part of a step's batch; of the first, step is 0. Raises OptionError if it cannot be divided."""
        seed_all(self.options.seed, step)
        whole = batch(step)
        if not tensors_in(whole):
            raise OptionError(
                f"the batch of step {step + 1} is a {type(whole).__name__} without tensors. Give a tensor, or "
                "tuples, lists and dicts of tensors."
            )
        dtype = _dtype_of(self.options)

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            own = _cut(tensor, rank, self.options.ranks, step).to(self.options.device)
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
    """Shard a model without being told how: the units that `fullshard plan` takes by default."""
    blocks = [model.get_submodule(path) for path in default_units(model)]
    if api == "fsdp1":
        policy = fullshard.CustomPolicy(lambda module: any(module is block for block in blocks))
        return fullshard.FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True
        )
    for block in blocks:
        fullshard.fully_shard(block)
    return fullshard.fully_shard(model)


def _dtype_of(options: VerifyOptions) -> torch.dtype | None:
    return getattr(torch, DTYPES[options.dtype]) if options.dtype else None


def _cut(tensor: torch.Tensor, rank: int, num_ranks: int, step: int) -> torch.Tensor:
    if tensor.ndim == 0:
        return tensor
    size = tensor.shape[0]
    if size == 0 or size % num_ranks:
        raise OptionError(
            f"the batch of step {step + 1} has a tensor of shape {tuple(tensor.shape)}, whose dim 0 cannot be "
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
