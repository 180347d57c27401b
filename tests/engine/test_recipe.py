"""How gradients are reduced follows from dtypes, mesh and configuration alone."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.engine.gradients.bucket import Recipe, make_recipe
from fullshard.plan.builders import rows_layout
from fullshard.plan.layout import BucketLayout, DirectRule, ParamSpec
from fullshard.plan.mesh import MeshPlan
from fullshard.policies import MixedPrecisionPolicy, UnitConfig, Unused

TWO = MeshPlan(2, 0)
LOW = [torch.bfloat16, torch.float16]


def bucket(compute_dtype: torch.dtype = torch.float32) -> BucketLayout:
    spec = ParamSpec("p", (8, 4), torch.float32, compute_dtype)
    (found,) = rows_layout([spec], shard_size=2, rule=DirectRule()).buckets
    return found


def recipe(
    *,
    mesh: MeshPlan = TWO,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    sums_natively: bool = False,
    wants_means: bool = False,
    accumulated: bool = False,
    is_offloaded: bool = False,
    **changes: object,
) -> Recipe:
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    config = dataclasses.replace(UnitConfig(mp_policy=policy), **changes)  # type: ignore[arg-type]
    return make_recipe(
        bucket(param_dtype or torch.float32),
        config,
        mesh,
        reduce_dtype=reduce_dtype or param_dtype or torch.float32,
        sum_dtype=(lambda d: d)
        if sums_natively
        else (lambda d: torch.promote_types(d, torch.float32)),
        wants_means=wants_means,
        accumulated=accumulated,
        is_offloaded=is_offloaded,
        label="block",
    )


def test_plain_float32_is_summed_into_place_and_is_all_there_is_to_do() -> None:
    plain = recipe()
    assert plain.is_final
    assert plain.is_deposited
    assert (plain.over_shards.scaling.before, plain.over_shards.scaling.after) == (1.0, 2.0)
    assert plain.over_shards.label == "block: reduce-scatter"


@given(
    st.sampled_from([None, *LOW, torch.float32]),
    st.sampled_from([None, *LOW, torch.float32]),
    st.integers(1, 64),
    st.integers(1, 4),
    st.sampled_from([None, 1.0, 3.0, 48.0]),
    st.booleans(),
)
def test_all_divisions_together_are_by_the_factor(
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    num_shards: int,
    num_replicas: int,
    factor: float | None,
    sums_natively: bool,
) -> None:
    mesh = MeshPlan(num_shards, 0, num_replicas)
    made = recipe(
        mesh=mesh,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        gradient_divide_factor=factor,
        sums_natively=sums_natively,
    )
    scaling = made.over_shards.scaling
    whole = scaling.before * scaling.after * made.divisor
    assert whole == pytest.approx(factor or mesh.data_parallel_size)
    assert num_replicas > 1 or made.divisor == 1.0
    if torch.float16 not in (param_dtype, reduce_dtype):
        assert scaling.before == 1.0


def test_float16_is_divided_in_part_before_it_can_overflow() -> None:
    mesh = MeshPlan(16, 0)
    wide = recipe(mesh=mesh, param_dtype=torch.float16)
    assert wide.over_shards.scaling.before == 1.0  # sums are formed in float32
    native = recipe(mesh=mesh, param_dtype=torch.float16, sums_natively=True)
    assert (native.over_shards.scaling.before, native.over_shards.scaling.after) == (4.0, 4.0)


def test_the_narrower_dtype_travels_unless_gradients_were_accumulated_in_the_wider() -> None:
    policy = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    assert recipe(**policy).over_shards.wire_dtype is torch.bfloat16
    assert recipe(**policy, accumulated=True).over_shards.wire_dtype is torch.float32
    assert recipe(reduce_dtype=torch.bfloat16).over_shards.wire_dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("is_final", "changes"),
    [
        (False, {"is_offloaded": True}),
        (False, {"keep_low_precision_grads": True}),
        (False, {"mesh": MeshPlan(2, 0, 2), "all_reduce_grads": False}),
        (True, {"mesh": MeshPlan(2, 0, 2)}),
        (True, {"all_reduce_grads": False}),
    ],
)
def test_sums_go_into_gradients_unless_they_are_to_be_moved_cast_or_kept_apart(
    is_final: bool, changes: dict[str, object]
) -> None:
    assert recipe(**changes).is_final is is_final  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": MeshPlan(2, 0, 2)},
        {"reduce_dtype": torch.bfloat16},  # summed in float32, to be rounded
        {"all_reduce_hook": print},
        {"unused": Unused.ZERO},
    ],
)
def test_what_follows_the_sum_is_not_skipped(changes: dict[str, object]) -> None:
    assert not recipe(**changes).is_deposited  # type: ignore[arg-type]
