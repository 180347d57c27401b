import pytest

from fullshard.errors import ShardingError
from fullshard.plan.mesh import MeshPlan, check_reshard_after_forward


def test_every_rank_of_both_axes_sees_other_data() -> None:
    plan = MeshPlan(shard_size=4, shard_rank=2, replicate_size=2, replicate_rank=1)
    assert plan.data_parallel_size == 8


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, True), (False, False), (None, None), (8, True), (1, False), (4, 4), (2, 2)],
)
def test_trivial_group_sizes_become_booleans(value: object, expected: object) -> None:
    result = check_reshard_after_forward(value, 8)  # type: ignore[arg-type]
    assert (type(result), result) == (type(expected), expected)  # 1 == True


@pytest.mark.parametrize("value", [3, 0, -2, 16])
def test_a_group_size_that_is_no_factor_is_refused(value: int) -> None:
    with pytest.raises(ShardingError, match=r"factor of 8.*Choose one of: 2, 4"):
        check_reshard_after_forward(value, 8)


def test_something_else_than_a_group_size_is_refused() -> None:
    with pytest.raises(ShardingError, match="expected True, False, None"):
        check_reshard_after_forward("always", 8)  # type: ignore[arg-type]
