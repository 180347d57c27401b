"""Collectives that are called without what `torch.distributed` puts around them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from fullshard.comm import calls
from fullshard.comm.calls import GroupCalls
from tests.api import Api
from tests.harness import on_ranks, rank

pytestmark = pytest.mark.apis("process_group")
_FUNCTIONS = [calls._ALL_GATHER, calls._REDUCE_SCATTER]


def _gather(group_calls: GroupCalls, dtype: torch.dtype = torch.float32) -> None:
    output = torch.zeros(4, dtype=dtype)
    group_calls.all_gather(output, torch.full((2,), rank() + 1, dtype=dtype)).wait()
    assert output.tolist() == [1, 1, 2, 2]


def _reduce(group_calls: GroupCalls, op: Any, expected: list[float]) -> None:
    output = torch.zeros(2)
    group_calls.reduce_scatter(output, torch.arange(4.0) * (rank() + 1), op).wait()
    assert output.tolist() == expected[2 * rank() : 2 * rank() + 2]


@contextlib.contextmanager
def _record_methods() -> Iterator[list[str]]:
    """Record calls of process groups' own methods, which torch's functions end in as well."""
    called: list[str] = []
    with contextlib.ExitStack() as stack:
        for name in (calls._GATHER_METHOD, calls._SCATTER_METHOD):
            original = getattr(dist.ProcessGroup, name)

            def call(*args: Any, _name: str = name, _original: Any = original) -> Any:
                called.append(_name)
                return _original(*args)

            stack.enter_context(mock.patch.object(dist.ProcessGroup, name, call))
        yield called


@contextlib.contextmanager
def _record_functions() -> Iterator[list[str]]:
    """Record which of ``torch.distributed``'s functions for these collectives run."""

    def watch(frame: Any, event: str, _: object) -> None:
        name = frame.f_code.co_name
        is_torchs = frame.f_code.co_filename == dist.distributed_c10d.__file__
        if event == "call" and is_torchs and name in _FUNCTIONS:
            entered.append(name)

    entered: list[str] = []
    sys.setprofile(watch)
    try:
        yield entered
    finally:
        sys.setprofile(None)


@on_ranks(2)
def test_nothing_is_between_a_call_and_the_group_if_nobody_watches(api: Api) -> None:
    with _record_methods() as called, _record_functions() as entered:
        group_calls = GroupCalls(dist.group.WORLD)  # takes the methods once
        _gather(group_calls)
        _reduce(group_calls, dist.ReduceOp.SUM, [0, 3, 6, 9])
        _reduce(group_calls, dist.ReduceOp.MAX, [0, 2, 4, 6])
    assert called == [calls._GATHER_METHOD, calls._SCATTER_METHOD, calls._SCATTER_METHOD]
    assert entered == []


@pytest.mark.parametrize("where", ["function", "mode"])
@on_ranks(2)
def test_who_watches_sees_every_call(api: Api, where: str) -> None:
    group_calls = GroupCalls(dist.group.WORLD)
    seen: list[str] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None):
            seen.append(getattr(function, "__name__", ""))
            return function(*args, **(kwargs or {}))

    def note(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return original(*args, **kwargs)

        return mock.patch.object(dist, name, call)

    if where == "function":
        with note(_FUNCTIONS[0]), note(_FUNCTIONS[1]):
            _gather(group_calls)
            _reduce(group_calls, dist.ReduceOp.SUM, [0, 3, 6, 9])
    else:
        with Mode():
            _gather(group_calls)
            _reduce(group_calls, dist.ReduceOp.SUM, [0, 3, 6, 9])
    assert set(_FUNCTIONS) <= set(seen)


@on_ranks(2)
def test_what_is_coalesced_is_called_by_torchs_functions(api: Api) -> None:
    group_calls = GroupCalls(dist.group.WORLD)
    output = torch.zeros(4)
    with (
        _record_functions() as entered,
        dist.distributed_c10d._coalescing_manager(async_ops=True) as manager,
    ):
        group_calls.all_gather(output, torch.full((2,), rank() + 1.0))
    manager.wait()
    assert output.tolist() == [1, 1, 2, 2]
    assert entered == [_FUNCTIONS[0]]


@on_ranks(2)
def test_complex_numbers_travel_as_pairs(api: Api) -> None:
    _gather(GroupCalls(dist.group.WORLD), torch.complex64)


def test_functions_that_were_replaced_before_the_import_are_not_taken_for_torchs() -> None:
    for name in _FUNCTIONS:
        original = getattr(dist, name)
        assert calls._is_original(original)
        assert not calls._is_original(lambda *args, _original=original: _original(*args))
