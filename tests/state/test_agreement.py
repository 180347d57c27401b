"""Ranks agree on what optimizer state there is, and send each other only what differs."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from fullshard.errors import StateError
from fullshard.state import agreement
from fullshard.state.agreement import Agreed, Report, agree
from tests.harness import on_ranks, rank, world_size

FP32, BF16 = torch.float32, torch.bfloat16
NAMES = [{index: f"layers.{index}.weight" for index in range(6)}]


def adam(indices: Any, *, owned: Any = None, step: float = 3.0) -> list[Report]:
    """Return a report of one unit, as AdamW's."""
    dtypes = {index: {"exp_avg": FP32, "exp_avg_sq": FP32} for index in indices}
    others = {index: {"step": torch.tensor(step), "kind": "adam"} for index in indices}
    return [Report(dtypes, others, set(indices if owned is None else owned))]


def num_messages(
    monkeypatch: pytest.MonkeyPatch, reports: list[Report]
) -> tuple[int, list[Agreed]]:
    """Count the collectives of objects."""
    counted = {
        name: Mock(wraps=getattr(agreement, name))
        for name in ("gather_objects", "broadcast_object")
    }
    for name, mock in counted.items():
        monkeypatch.setattr(agreement, name, mock)
    agreed = agree(reports, NAMES, None)
    monkeypatch.undo()
    return sum(each.call_count for each in counted.values()), agreed


def in_turn(everyones: list[list[Report]]) -> Agreed:
    """Merge by looking at every rank for each parameter, its owners first."""
    kinds: dict[int, dict[str, Any]] = {}
    others: dict[int, dict[str, Any]] = {}
    for index in range(6):
        for (report,) in sorted(everyones, key=lambda each: index not in each[0].owned):
            for name, value in report.others.get(index, {}).items():
                kinds.setdefault(index, {}).setdefault(name, None)
                others.setdefault(index, {}).setdefault(name, value)
            for name, dtype in report.dtypes.get(index, {}).items():
                kinds.setdefault(index, {}).setdefault(name, dtype)
    differing = {}
    for index, own in others.items():
        for name in own:
            having = [
                (rank, report.others[index][name])
                for rank, (report,) in enumerate(everyones)
                if index in report.owned and name in report.others.get(index, {})
            ]
            unlike = [rank for rank, value in having if value != having[0][1]]
            if unlike:
                differing[index, name] = (having[0][0], unlike[0])
    return Agreed(kinds, others, differing)


@on_ranks(3)
def test_ranks_that_have_the_same_send_nothing_but_a_digest() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        # What they own does not matter, as everybody has everything.
        reports = adam(range(6), owned=range(6 - rank()))
        calls, (agreed,) = num_messages(monkeypatch, reports)
    assert calls == 1
    assert agreed == in_turn([reports])


@on_ranks(5)
@pytest.mark.parametrize(("num_different", "expected"), [(2, 1 + 2), (5, 1 + 1)])
def test_each_distinct_report_is_sent_once(num_different: int, expected: int) -> None:
    own = rank() % num_different
    reports = adam({own, 5})
    everyones = [adam({number % num_different, 5}) for number in range(5)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        calls, (agreed,) = num_messages(monkeypatch, reports)
    assert calls == expected
    assert agreed == in_turn(everyones)


@on_ranks(2, 4)
@pytest.mark.parametrize("seed", range(5))
def test_what_owners_have_comes_first_and_all_ranks_agree(seed: int) -> None:
    def report_of(number: int) -> list[Report]:
        draw = random.Random(10 * seed + number)
        dtypes, others, owned = {}, {}, set()
        for index in range(6):
            if draw.random() < 0.6:
                dtypes[index] = {"exp_avg": draw.choice([FP32, BF16])}
                others[index] = {"step": torch.tensor(float(draw.randrange(3))), "more": [index]}
                if draw.random() < 0.5:
                    owned.add(index)
        return [Report(dtypes, others, owned)]

    (agreed,) = agree(report_of(rank()), NAMES, None)
    expected = in_turn([report_of(number) for number in range(world_size())])
    assert agreed == expected
    assert [list(own) for own in agreed.kinds.values()] == [
        list(own) for own in expected.kinds.values()
    ]


@on_ranks(3)
def test_a_rank_without_state_of_what_it_owns_is_named_on_all_ranks() -> None:
    has = {0, 1} if rank() == 1 else {0, 1, 4}
    with pytest.raises(StateError, match=r"rank 1 has none of layers\.4\.weight") as raised:
        agree(adam(has, owned={0, 1, 4}), NAMES, None)
    assert "rank 0 has" not in str(raised.value)
