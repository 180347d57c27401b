"""Units that a plan keeps unsharded within a budget: what they take, what they buy, and when there are none.

`tests/engine/test_planned_steps.py` compares them with those that `keep_unsharded` chooses in a run, and both memories.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fullshard.errors import ShardingError
from fullshard.planning.machines import machine_named
from fullshard.planning.setup import SetupError, TrainingSetup
from fullshard.planning.shapes import TransformerShape
from fullshard.planning.subject import Subject
from fullshard.planning.training import TrainingPlan, plan_training, planned
from fullshard.tools.plan_page import plan_data

# Two hosts on a slow network: a step waits for gathers.
SETUP = TrainingSetup(machine_named("A100-40GB-SXM", network_rate=1.5e9), 16, seq=512)
SUBJECT = Subject(TransformerShape(8, 2048, 16, 16, 5504, 32000, 128))
BARE = planned(SUBJECT, SETUP)
LAYER_NBYTES = 2 * (4 * 2048 * 2048 + 3 * 2048 * 5504 + 2 * 2048)  # in bfloat16


def _unsharded_nbytes(plan: TrainingPlan) -> int:
    return dict(plan.memory.parts)["unsharded units"]


@pytest.mark.parametrize("num", range(1, 9))
def test_a_plan_keeps_as_many_units_as_a_budget_holds(num: int) -> None:
    budget = num * LAYER_NBYTES + num
    plan = planned(SUBJECT, replace(SETUP, keep_unsharded_nbytes=budget))
    kept = plan.kept
    assert kept is not None
    assert (len(kept.units), kept.nbytes, kept.budget_nbytes) == (num, num * LAYER_NBYTES, budget)
    assert kept.saved_s == pytest.approx(BARE.time.step_s - plan.time.step_s)
    assert kept.saved_s > 0
    assert 0 <= _unsharded_nbytes(plan) - _unsharded_nbytes(BARE) <= kept.nbytes
    as_if_named = planned(SUBJECT, replace(SETUP, unsharded=kept.units))
    assert as_if_named.time == plan.time
    assert as_if_named.memory == plan.memory
    assert plan.as_dict()["kept_unsharded"]["units"] == kept.units
    assert str(kept) in str(plan)
    assert ("Kept unsharded", str(kept)) in plan_data(plan)[0]["about"]


def test_a_budget_that_holds_no_unit_is_refused_with_what_it_takes() -> None:
    with pytest.raises(ShardingError, match=f"layers.0, takes {LAYER_NBYTES} bytes"):
        planned(SUBJECT, replace(SETUP, keep_unsharded_nbytes=LAYER_NBYTES - 1))
    for wrong in (-1, 1.5, True, None):
        with pytest.raises(SetupError, match="keep_unsharded_nbytes"):
            replace(SETUP, keep_unsharded_nbytes=wrong)


def test_nothing_is_kept_where_nothing_is_gathered_again() -> None:
    setup = replace(SETUP, keep_unsharded_nbytes=1, reshard_after_forward=False)
    plan = planned(SUBJECT, setup)
    assert plan.kept is not None
    assert (plan.kept.units, plan.kept.nbytes, plan.kept.saved_s) == ((), 0, 0.0)


def test_a_suggested_budget_saves_what_it_says_and_fits() -> None:
    # There is room for some units, and not for all.
    nbytes = BARE.memory.total_nbytes + 5 * LAYER_NBYTES
    gpu = replace(SETUP.machine.gpu, memory_nbytes=nbytes)
    setup = replace(SETUP, machine=replace(SETUP.machine, gpu=gpu))
    plan = plan_training(SUBJECT, setup)
    (found,) = (each for each in plan.suggestions if "keep_unsharded" in each.text)
    mib = float(re.search(r"keep ([0-9.]+) MiB", found.text)[1])  # type: ignore[index]
    chosen = planned(SUBJECT, replace(setup, keep_unsharded_nbytes=int(mib * 2**20)))
    assert chosen.memory.fits
    assert found.saved_s == pytest.approx(plan.time.step_s - chosen.time.step_s)
    assert found.saved_s > 0.01 * plan.time.step_s
    assert chosen.kept is not None
    assert 0 < len(chosen.kept.units) < 8
