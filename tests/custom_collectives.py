"""An all-gather and a reduce-scatter as users write them, which note what they are asked for."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.comm.calls import all_gather, reduce_scatter
from tests.api import Api


def public(api: Api, name: str) -> Any:
    """Return a class of the interface, which PyTorch keeps in private modules."""
    if not api.is_torch:
        return getattr(api, name)
    private = "torch.distributed.fsdp._fully_shard"
    modules = [
        importlib.import_module(f"{private}.{n}") for n in ("_fsdp_api", "_fsdp_collectives")
    ]
    return next(found for module in modules if (found := getattr(module, name, None)))


class Watched:
    """Allocates memory, and notes every call in `calls` and its own name in `log`."""

    def __init__(self, log: list[str] | None = None, name: str = "") -> None:
        self.log = [] if log is None else log
        self.name = name
        self.memory: list[Tensor] = []
        self.calls: list[dict[str, Any]] = []
        self.returns_work = True

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.memory.append(torch.full(tuple(size), torch.nan, dtype=dtype, device=device))
        return self.memory[-1]

    def run(self, collective: Any, output: Tensor, source: Tensor, **options: Any) -> Any:
        for tensor in (output, source):
            assert any(_share_memory(tensor, owner) for owner in self.memory)
        self.log.append(self.name)
        self.calls.append({"output": output, "input": source.clone(), **options})
        options["async_op"] = options["async_op"] and self.returns_work
        return collective(output, source, **options)


def _share_memory(first: Tensor, second: Tensor) -> bool:
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def custom_gather(api: Api, *args: Any, memory: type[Watched] = Watched) -> Any:
    """Return an all-gather that notes what it is asked for."""

    class Gather(memory, public(api, "AllGather")):  # type: ignore[misc,valid-type]
        def __call__(
            self,
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: dist.ProcessGroup,
            async_op: bool = False,
        ) -> Any:
            begin = dist.get_rank(group) * input_tensor.numel()
            own = output_tensor.narrow(0, begin, input_tensor.numel())
            assert own.data_ptr() == input_tensor.data_ptr()
            return self.run(all_gather, output_tensor, input_tensor, group=group, async_op=async_op)

    return Gather(*args)


def custom_reduce(api: Api, *args: Any, memory: type[Watched] = Watched) -> Any:
    """Return a reduce-scatter that notes what it is asked for."""

    class Reduce(memory, public(api, "ReduceScatter")):  # type: ignore[misc,valid-type]
        def __call__(
            self,
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: dist.ProcessGroup,
            op: Any,
            async_op: bool = False,
        ) -> Any:
            return self.run(
                reduce_scatter, output_tensor, input_tensor, group=group, op=op, async_op=async_op
            )

    return Reduce(*args)
