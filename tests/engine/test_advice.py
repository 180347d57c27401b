"""The table of checks at first use: a function and a line, run at their moment and no other."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.engine.checks import advice
from fullshard.engine.checks.advice import CHECKS, Check, When
from fullshard.engine.checks.model import Model
from tests.api import Api
from tests.harness import on_ranks


def test_every_check_has_a_name_of_its_own_and_says_what_it_finds() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert {check.when for check in CHECKS} == {*When}
    assert not [check.name for check in CHECKS if not inspect.getdoc(check.find)]


@on_ranks(1)
@pytest.mark.ours("checks")
def test_checks_run_once_at_their_moment(api: Api, monkeypatch: Any) -> None:
    runs: list[tuple[When, Any]] = []

    def find(when: When, of: Any) -> None:
        runs.append((when, of))

    def train() -> list[tuple[When, Any]]:
        runs.clear()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return [*runs]

    mine = [Check(str(when), when, functools.partial(find, when), advice.refuse) for when in When]
    model = nn.Linear(2, 2)
    api.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters())
    monkeypatch.setattr(advice, "CHECKS", (*CHECKS, *mine))
    (memory, of), (root, also), *of_optimizer = train()
    assert (memory, root) == (When.HAS_MEMORY, When.IS_ROOT)
    assert isinstance(of, Model)
    assert of is also
    assert (of.root, [*of.modules], of.own) == (model, [model], of.units)
    assert of_optimizer == [
        (When.NEW_OPTIMIZER, optimizer),
        (When.FIRST_STEP, optimizer),
        (When.STEPPED, optimizer),
    ]
    assert train() == []
    model.late = nn.Parameter(torch.zeros(1))
    with pytest.warns(UserWarning, match="late"):
        assert train() == [(When.HAS_GROWN, ["late"])]
    optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    assert train() == [(When.NEW_OPTIMIZER, optimizer)]
