"""Ten training steps against PyTorch's `fully_shard` and against one process on the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import pytest

from tests.api import Api, use_api
from tests.harness import on_ranks, world_size
from tests.models import PROBLEMS, make_problem
from tests.selection import one_way, repeats
from tests.training import (
    Recipe,
    Trace,
    assert_equal,
    mean_over_ranks,
    part_of,
    train_alone,
    train_sharded,
)

pytestmark = one_way("test_matrix.py, where both ways equal one process in every bit")

BASIC = [Recipe(problem) for problem in PROBLEMS]
OPTIONS = [
    *(Recipe(problem, optimizer="sgd") for problem in PROBLEMS),
    *(Recipe(problem, dtype="bf16") for problem in PROBLEMS),
    Recipe("transformer", dtype="bf16_reduce"),
    Recipe("transformer", reshard_after_forward=True),
    Recipe("uneven", reshard_after_forward=False),
]
SOME_OPTIONS = [
    *(Recipe("moe", optimizer="sgd"), Recipe("uneven", dtype="bf16")),
    Recipe("transformer", dtype="bf16_reduce"),
    Recipe("transformer", reshard_after_forward=True),
    Recipe("uneven", reshard_after_forward=False),
]
ACCUMULATION = [
    Recipe("transformer", num_microbatches=2),
    Recipe("transformer", num_microbatches=2, sync_every_microbatch=False),
    Recipe("uneven", num_microbatches=3, sync_every_microbatch=False, dtype="bf16"),
]
ON_4_RANKS = [
    Recipe("transformer", mesh=(2, 2)),
    Recipe("uneven", mesh=(2, 2), optimizer="sgd"),
    Recipe("moe", mesh=(2, 2), dtype="bf16"),
    Recipe("conv", mesh=(2, 2), num_microbatches=3, sync_every_microbatch=False),
    Recipe("transformer", reshard_after_forward=2),
    Recipe("uneven", reshard_after_forward=2),
]
# With SGD alone: AdamW, which the tests above use, hides a constant factor in the gradients.
FULL_PRODUCT = [
    Recipe(
        problem,
        optimizer="sgd",
        dtype=dtype,
        reshard_after_forward=reshard,
        num_microbatches=num_microbatches,
        sync_every_microbatch=False,
    )
    for problem in PROBLEMS
    for dtype in ("fp32", "bf16", "bf16_reduce")
    for reshard in (None, False)
    for num_microbatches in (1, 3)
]


def _recipes(recipes: Iterable[Recipe]) -> Any:
    return pytest.mark.parametrize("recipe", recipes, ids=str)


@functools.cache  # several tests compare with the same run
def _run(implementation: str, recipe: Recipe) -> Trace:
    if implementation == "alone":
        return train_alone(recipe)
    with use_api(implementation) as api:
        return train_sharded(api, recipe)


def _assert_same_as_torch(api: Api, recipe: Recipe) -> None:
    ours, theirs = train_sharded(api, recipe), _run("torch", recipe)
    tolerance = _tolerance_against_torch(recipe)
    assert ours.losses == pytest.approx(theirs.losses, rel=tolerance["rtol"], abs=0.0)
    for mine, other in zip(ours.gradients, theirs.gradients, strict=True):
        assert_equal(mine, other, **tolerance)
    assert_equal(ours.parameters, theirs.parameters, **tolerance)


def _tolerance_against_torch(recipe: Recipe) -> dict[str, float]:
    if recipe.dtype == "bf16_reduce":
        # We sum in float32 and round once; Gloo rounds to bfloat16 (8 bits) after each addition.
        return {"rtol": 5e-2, "atol": 2e-2}
    if (recipe.mesh or (world_size(),))[-1] == 2:
        # Two terms have one sum, whatever the order, and dividing by 2 or 4 is exact.
        return {"rtol": 0.0, "atol": 0.0}
    if recipe.dtype == "bf16":
        # A parameter next to a rounding boundary of bfloat16 goes the other way, and ten steps
        # carry that on.
        return {"rtol": 5e-2, "atol": 5e-3}
    # We add in rank order, Gloo's ring in another order on each rank; 24 bits, ten steps.
    return {"rtol": 1e-4, "atol": 1e-5}


def _assert_same_as_one_process(api: Api, recipe: Recipe) -> None:
    ours, alone = train_sharded(api, recipe), _run("alone", recipe)
    # The mean over ranks of means over samples adds in another order than the mean over all.
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    assert mean_over_ranks(ours.losses) == pytest.approx(alone.losses, rel=1e-5)
    model = make_problem(recipe.problem).model
    like = _shard_like(api, recipe)
    assert list(alone.parameters) == [name for name, _ in model.named_parameters()]
    for mine, whole in zip(ours.gradients, alone.gradients, strict=True):
        parts = {name: part_of(value, like[name]) for name, value in whole.items()}
        assert_equal(mine, parts, **tolerance)
    assert_equal(ours.parameters, alone.parameters, **tolerance)


@repeats(lambda s: s["world_size"] == 3 or s["recipe"] != BASIC[0])
@_recipes(BASIC)
@on_ranks(2, 3)
def test_ten_steps_equal_torch(api: Api, recipe: Recipe) -> None:
    _assert_same_as_torch(api, recipe)


@pytest.mark.long
@_recipes(BASIC)
@on_ranks(4)
def test_ten_steps_on_four_ranks_equal_torch(api: Api, recipe: Recipe) -> None:
    _assert_same_as_torch(api, recipe)


# What test_matrix.py compares with one process, in every bit, is compared here with PyTorch once.
@repeats(lambda s: s["recipe"] not in SOME_OPTIONS)
@_recipes(OPTIONS)
@on_ranks(2)
def test_ten_steps_with_options_equal_torch(api: Api, recipe: Recipe) -> None:
    _assert_same_as_torch(api, recipe)


@repeats(lambda s: s["world_size"] == 3 or s["recipe"] != ACCUMULATION[1])
@_recipes(ACCUMULATION)
@on_ranks(2, 3)
def test_ten_steps_of_gradient_accumulation_equal_torch(api: Api, recipe: Recipe) -> None:
    _assert_same_as_torch(api, recipe)


@pytest.mark.long  # test_matrix.py compares two axes with one process
@_recipes(ON_4_RANKS)
@on_ranks(4)
def test_ten_steps_on_two_axes_equal_torch(api: Api, recipe: Recipe) -> None:
    _assert_same_as_torch(api, recipe)


# test_matrix.py compares five steps with one process, bit by bit; here are ten, of other problems.
@pytest.mark.long
@_recipes(BASIC)
@on_ranks(1, 2, 3)
def test_ten_steps_equal_one_process_on_the_whole_batch(api: Api, recipe: Recipe) -> None:
    _assert_same_as_one_process(api, recipe)


@pytest.mark.long
@_recipes(BASIC)
@on_ranks(4)
def test_ten_steps_on_four_ranks_equal_one_process(api: Api, recipe: Recipe) -> None:
    _assert_same_as_one_process(api, recipe)


@pytest.mark.long
@_recipes(FULL_PRODUCT)
@on_ranks(2, 3, 4)
def test_full_product_equals_torch(api: Api, recipe: Recipe) -> None:
    _assert_same_as_torch(api, recipe)


@pytest.mark.long
@_recipes(dict.fromkeys(Recipe(r.problem, r.optimizer, r.dtype, (2, 2)) for r in FULL_PRODUCT))
@on_ranks(4)
def test_full_product_on_two_axes_equals_torch(api: Api, recipe: Recipe) -> None:
    _assert_same_as_torch(api, recipe)


def _shard_like(api: Api, recipe: Recipe) -> dict[str, Any]:
    problem = make_problem(recipe.problem)
    for unit in problem.units:
        api.fully_shard(unit)
    api.fully_shard(problem.model)
    return dict(problem.model.named_parameters())
