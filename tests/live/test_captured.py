"""Captured steps on several ranks: those that capture at another call are told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fullshard
from fullshard.engine.module_state import state_of
from fullshard.errors import DivergenceError
from tests.harness import Fate, mesh_of, rank, run_fresh


def _capture_at_different_calls() -> None:
    model = fullshard.fully_shard(nn.Linear(8, 8), mesh=mesh_of(2))
    model(torch.ones(2, 8)).sum().backward()
    state = state_of(model)
    assert state is not None
    assert state.known_iteration is not None
    agree = state.known_iteration.agree_on
    agree("call 4 of a captured step: capturing the step")

    def step() -> None:
        agree(f"call {5 + rank()} of a captured step: the step itself, with all checks")
        model(torch.ones(2, 8)).sum().backward()

    with pytest.raises(DivergenceError, match=r"call 5 of a .*call 6 of a "):
        step()


def test_ranks_that_capture_at_different_calls_are_told_on_each() -> None:
    outcomes = run_fresh(2, _capture_at_different_calls, limit_s=20)
    assert [outcome.fate for outcome in outcomes] == [Fate.RETURNED] * 2, outcomes
