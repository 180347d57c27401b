"""Programs drawn at random show the same on every path.

The draws of a test are always the same ones. A failure prints its draw, which can be pasted into
`compare_draw`; nothing is shrunk, since each attempt costs a set of ranks if it hangs.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.differential.generated import Draw, compare_draw, documented, draws
from tests.differential.paths import PATHS, joined
from tests.harness import Pools, Task

RUN = settings(
    database=None,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)


def _check(pools: Pools, draw: Draw, ranks: int) -> None:
    known = documented(draw)
    paths = [path for path in PATHS if path not in known]
    kwargs = {"draw": draw, "ranks": ranks, "paths": paths}
    task = Task(compare_draw.__module__, compare_draw.__name__, kwargs)
    found = joined(pools.run(ranks, task))
    assert not found, "\n".join([repr(draw), *found])


def test_generated_programs(pools: Pools) -> None:
    """A few, on two ranks."""

    @settings(RUN, max_examples=12)
    @seed(14)
    @given(draw=draws())
    def check(draw: Draw) -> None:
        _check(pools, draw, 2)

    check()


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(10))
def test_many_generated_programs(pools: Pools, number: int) -> None:
    """Two thousand in all, most of them on two ranks, some on three and four."""

    @settings(RUN, max_examples=200)
    @seed(1000 + number)
    @given(draw=draws())
    def check(draw: Draw) -> None:
        _check(pools, draw, {8: 3, 9: 4}.get(number, 2))

    check()
