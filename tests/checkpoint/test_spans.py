"""Boxes are read out of a file in parts that cover them, fit into memory, and leave out what is far."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.checkpoint.read import Limits, Wanted, parts_to_read, read_shared, span
from fullshard.plan.boxes import Box, common, tiling_fault, whole_box
from fullshard.state.host_memory import bytes_of

_SIDES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=4
)


@given(sides=_SIDES, buffer_nbytes=st.integers(1, 200), gap_nbytes=st.integers(1, 200))
def test_parts_cover_what_is_wanted_within_their_limits(
    sides: list[tuple[int, int, int]], buffer_nbytes: int, gap_nbytes: int
) -> None:
    piece = whole_box(tuple(before + size + after for before, size, after in sides))
    shared = Box(tuple(before for before, _, _ in sides), tuple(size for _, size, _ in sides))
    limits = Limits(buffer_nbytes, gap_nbytes)
    parts = list(parts_to_read(shared, piece, 4, limits))
    relative = [part.moved(tuple(-o for o in shared.offset)) for part in parts]
    assert tiling_fault(shared.shape, relative) is None
    for part in parts:
        first, stop = span(part, piece)
        assert 4 * (stop - first) <= max(buffer_nbytes, 4 * piece.shape[-1])


@given(sides=_SIDES, gap_nbytes=st.integers(1, 200))
def test_what_is_read_is_where_it_belongs(
    sides: list[tuple[int, int, int]], gap_nbytes: int
) -> None:
    shape = tuple(before + size + after for before, size, after in sides)
    whole = torch.arange(whole_box(shape).numel, dtype=torch.int32).view(shape)
    box = Box(tuple(before for before, _, _ in sides), tuple(size for _, size, _ in sides))
    data, num_read = bytes_of(whole), 0

    def read(first: int, out: memoryview) -> int:
        nonlocal num_read
        out[:] = data[first : first + len(out)]
        num_read += len(out)
        return len(out)

    for dtype in (torch.int32, torch.float64):  # read straight where it can be, and converted
        view = torch.zeros(box.shape, dtype=dtype)
        shared = common(box, whole_box(shape))
        assert shared is not None
        wanted, num_read = Wanted("w", box, view), 0
        limits = Limits(1 << 20, gap_nbytes)
        total = read_shared(wanted, whole_box(shape), shared, torch.int32, read, limits)
        assert total == num_read
        assert view.equal(whole[box.within(whole_box(shape))].to(dtype))


def test_gaps_are_left_out_where_they_are_large() -> None:
    piece, columns = whole_box((100, 1000)), Box((0, 10), (100, 20))
    together = list(parts_to_read(columns, piece, 4, Limits(1 << 20, gap_nbytes=4000)))
    assert together == [columns]
    apart = list(parts_to_read(columns, piece, 4, Limits(1 << 20, gap_nbytes=3000)))
    assert [span(part, piece) for part in apart] == [
        (n + 10, n + 30) for n in range(0, 100_000, 1000)
    ]
