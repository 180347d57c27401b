"""Programs with collectives of the user's own, memory of the group's, and groups of their own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import fullshard
from fullshard.comm.calls import all_gather, reduce_scatter
from tests.streams.lab import Lab
from tests.streams.programs.common import problem_of, program, shard, train


class _Gather(fullshard.AllGather):
    def __init__(self, *, returns_work: bool) -> None:
        self._returns_work = returns_work

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        async_op &= self._returns_work
        return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _Reduce(fullshard.ReduceScatter):
    def __init__(self, *, returns_work: bool) -> None:
        self._returns_work = returns_work

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        async_op &= self._returns_work
        return reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _custom(lab: Lab, name: str, *, returns_work: bool) -> None:
    problem = problem_of(name)
    model = shard(problem)
    for unit in (*problem.units, model):
        unit.set_custom_all_gather(_Gather(returns_work=returns_work))  # type: ignore[operator]
        unit.set_custom_reduce_scatter(_Reduce(returns_work=returns_work))  # type: ignore[operator]
    train(lab, problem, model)


program("custom-collectives")(partial(_custom, returns_work=True))
program("custom-collectives-without-work")(partial(_custom, returns_work=False))


class _RegisteredMemory:
    """The part of a backend that allocates memory for its collectives."""

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return True

    def allocate_tensor(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=device)


@program("registered-memory")
def _registered(lab: Lab, name: str) -> None:
    problem = problem_of(name)
    model = shard(problem)
    backend = _RegisteredMemory()
    with (
        mock.patch("fullshard.comm.collectives.backend_of", return_value=backend),
        mock.patch("fullshard.fsdp2.communication.backend_of", return_value=backend),
    ):
        for unit in (*problem.units, model):
            unit.set_allocate_memory_from_process_group_for_comm(True)  # type: ignore[operator]
        train(lab, problem, model)


@program("separate-reduce-group")
def _separate_group(lab: Lab, name: str) -> None:
    problem = problem_of(name)
    model = shard(problem)
    with mock.patch.object(dist, "new_group", return_value=dist.group.WORLD):
        model.set_separate_reduce_scatter_group(True)
    train(lab, problem, model)
