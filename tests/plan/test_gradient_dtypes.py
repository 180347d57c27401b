"""Dtypes of gradients follow from what parameter, policy and release say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.plan.gradient_dtypes import (
    GradDtype,
    GradientDtypes,
    flat_gradient_dtypes,
    gradient_dtypes,
    reduce_dtypes,
)
from fullshard.plan.layout import ParamSpec

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
UNSET, ANY = GradDtype(), GradDtype(True, None)
FLOATS = st.sampled_from([BF16, FP16, FP32, FP64])
OWN = st.one_of(st.just(UNSET), st.just(ANY), FLOATS.map(lambda dtype: GradDtype(True, dtype)))


def spec(dtype: torch.dtype = FP32, compute_dtype: torch.dtype = BF16) -> ParamSpec:
    return ParamSpec("p", (8, 4), dtype, compute_dtype)


@pytest.mark.parametrize(
    ("own", "reduce_dtype", "follows", "expected"),
    [
        (UNSET, None, False, GradientDtypes(BF16, BF16, FP32)),
        (UNSET, None, True, GradientDtypes(BF16, FP32, FP32, ANY)),
        (UNSET, FP32, False, GradientDtypes(BF16, FP32, FP32, ANY)),
        (UNSET, BF16, True, GradientDtypes(BF16, BF16, FP32)),
        (GradDtype(True, FP64), None, False, GradientDtypes(FP64, FP64, FP64, GradDtype(True, FP64))),
        (GradDtype(True, BF16), FP32, True, GradientDtypes(FP32, FP32, BF16, GradDtype(True, FP32))),
        (ANY, None, True, GradientDtypes(BF16, BF16, None, ANY)),
        (ANY, FP32, True, GradientDtypes(FP32, FP32, None, GradDtype(True, FP32))),
    ],
)  # fmt: skip
def test_dtypes_are_those_of_the_table(
    own: GradDtype, reduce_dtype: torch.dtype | None, follows: bool, expected: GradientDtypes
) -> None:
    assert (
        gradient_dtypes(spec(), own, reduce_dtype=reduce_dtype, follows_param=follows) == expected
    )


def test_gradients_are_planned_as_the_last_ones_came() -> None:
    unset = gradient_dtypes(spec(), UNSET, reduce_dtype=FP32, follows_param=False, seen=FP32)
    assert unset == GradientDtypes(BF16, FP32, FP32, ANY)
    own = gradient_dtypes(spec(), ANY, reduce_dtype=None, follows_param=False, seen=FP32)
    assert own == GradientDtypes(FP32, FP32, None, ANY)


def test_partial_sums_over_other_ranks_are_widened_first_where_torch_does_it() -> None:
    facts = {"reduce_dtype": FP32, "reduces_elsewhere": True}
    found = gradient_dtypes(spec(), UNSET, follows_param=True, **facts)  # type: ignore[arg-type]
    assert found == GradientDtypes(FP32, FP32, FP32, GradDtype(True, FP32))
    found = gradient_dtypes(spec(), UNSET, follows_param=False, **facts)  # type: ignore[arg-type]
    assert found.full == BF16


@given(FLOATS, FLOATS, OWN, st.one_of(st.none(), FLOATS), st.booleans())
def test_a_policys_reduce_dtype_always_counts(
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
    own: GradDtype,
    reduce_dtype: torch.dtype | None,
    follows: bool,
) -> None:
    found = gradient_dtypes(
        spec(dtype, compute_dtype), own, reduce_dtype=reduce_dtype, follows_param=follows
    )
    assert reduce_dtype is None or found.reduced == reduce_dtype
    assert found.shard == (own.dtype if own.is_set else dtype)
    # Autograd is told nothing, or the very dtype that is planned, or that it may choose.
    assert found.unsharded.dtype in (None, found.full)
    assert found.unsharded.is_set or found.full == compute_dtype


def test_flat_buffers_are_reduced_in_the_compute_dtype() -> None:
    assert flat_gradient_dtypes(spec(), reduce_dtype=None) == GradientDtypes(BF16, BF16, FP32)
    assert flat_gradient_dtypes(spec(), reduce_dtype=FP32).reduced == FP32


def test_parameters_of_one_dtype_share_a_reduce_dtype_and_others_do_not_matter() -> None:
    stored = [FP32, FP32, torch.complex64, BF16]
    assert reduce_dtypes(stored, [BF16, FP32, torch.complex64, BF16]) == [
        FP32, FP32, torch.complex64, BF16,
    ]  # fmt: skip
    assert reduce_dtypes([], []) == []
