"""Programs whose parameters say themselves what travels: float8 training and the like."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_map_only

from tests.streams.lab import Lab
from tests.streams.programs.common import OFFLOAD, problem_of, program, shard, train


class Held(torch.Tensor):
    """A tensor around another, `held`, which every operation is done on."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Held:
        # On the host for torch, as all memory is; the mode says of `held` where it is.
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device="cpu"
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, lambda each: each.held, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, function(*args, **kwargs))


class Narrow(Held):
    """Travels as bfloat16, padded; the result has memory of its own, written through ``out``."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, policy: Any
    ) -> Any:
        """Return what travels: as many rows as the first rank has."""
        num_rows = -(-outer_size[0] // mesh.size())
        sent = self.held.new_zeros(num_rows, *self.held.shape[1:], dtype=torch.bfloat16)
        sent[: self.held.size(0)] = self.held
        return (sent,), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Widen what was gathered."""
        (whole,) = outputs
        if out is None:
            wide = whole.to(param_dtype)
            return wide, (wide,)
        with torch.no_grad(), _unsafe_preserve_version_counter(out):
            out.copy_(whole[: out.size(0)])
        return None


class AsItIs(Held):
    """Travels as it is; what was gathered is the parameter, without a copy."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        """Return what travels."""
        return (self.held,), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Take what was gathered."""
        (whole,) = outputs
        return (whole, (whole,)) if out is None else None


class Scaled(torch.Tensor):
    """Codes and the scale of all of them, which operations multiply."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=scale.dtype, device="cpu"
        )

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.t.default):
            return cls(function(args[0].codes), args[0].scale)
        args, kwargs = tree_map_only(
            cls, lambda x: x.codes.to(x.dtype) * x.scale, (args, kwargs or {})
        )
        return function(*args, **kwargs)


class Shared(Held):
    """Travels in fewer bits with a scale from the gather's lane, which compute reads: as torchao's float8 weights."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        """Return what travels, and the scale."""
        scale = self.held.abs().amax().clamp(min=1e-6)
        return ((self.held / scale).bfloat16(),), scale

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Put both together, or the new scale to codes that are there."""
        (codes,) = outputs
        if out is None:
            return Scaled(codes, metadata), (codes,)
        out.scale = metadata
        return None


KINDS: dict[str, type[Held]] = {"out": Narrow, "no-out": AsItIs, "scale": Shared}


def _extended(lab: Lab, name: str, *, kind: str, alone: bool, **options: Any) -> None:
    """Train with extended parameters. alone: all of them; else those of two dims or more."""
    problem = problem_of(name)
    for module in problem.model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            # Those that divide unevenly have to be padded, which only `Narrow` does.
            if kind != "out" and parameter.size(0) % 4:
                continue
            if alone or parameter.dim() > 1:
                held = KINDS[kind](parameter.detach().clone())
                setattr(module, key, nn.Parameter(held, requires_grad=parameter.requires_grad))
    train(lab, problem, shard(problem, **options))


for _kind in KINDS:
    program(f"extensions-alone-{_kind}")(partial(_extended, kind=_kind, alone=True))
    program(f"extensions-mixed-{_kind}")(partial(_extended, kind=_kind, alone=False))
    program(f"extensions-alone-{_kind}-async", is_nccl=False)(
        partial(_extended, kind=_kind, alone=True)
    )
program("extensions-hsdp")(partial(_extended, kind="out", alone=True, mesh=(1, 4)))
program("extensions-kept")(partial(_extended, kind="out", alone=True, reshard_after_forward=False))
program(
    "offload-extensions", host_waits=1, may_stall="shards of the user's classes are not pinned"
)(partial(_extended, kind="out", alone=True, offload_policy=OFFLOAD))
