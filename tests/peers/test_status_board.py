"""What ranks post of themselves: read whole or not at all, and cut where it is too long."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.peers import status_board
from fullshard.peers.status import GroupCounts, RankStatus, State, Verdict
from fullshard.peers.status_board import StatusBoard, StatusSlots


def _slots(size: int) -> list[StatusSlots]:
    memory = memoryview(bytearray(size * status_board.NBYTES))
    return [StatusSlots(rank, [10 + each for each in range(size)], memory) for rank in range(size)]


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> StatusBoard:
    """Return a board of ranks 10 and 11, of which this is rank 10."""
    one, two = _slots(2)
    monkeypatch.setattr(status_board, "_slots", {one})
    board = StatusBoard(10, 2)
    board.peer = two  # type: ignore[attr-defined]  (it must live as long)
    return board


def test_what_is_posted_is_read_whole(board: StatusBoard) -> None:
    status = RankStatus(
        10,
        State.WAITS,
        beat=3,
        where="a: all-gather",
        at="train.py:3",
        moment="step 2, forward",
        groups={"0 of 2": GroupCounts(2, 17, 42)},
        waited=("0 of 2",),
        tails={"0 of 2": [(41, 7, "step 2, forward: a")]},
        stack=("one", "two"),
    )
    board.post(status)
    read = board.read([10, 11])
    assert list(read) == [10]
    assert read[10] == status


def test_a_status_that_is_being_written_is_none(board: StatusBoard) -> None:
    board.post(RankStatus(10, State.RUNS))
    (slots,) = status_board._slots  # type: ignore[misc]
    slots._memory[status_board._HEAD_NBYTES] ^= 1
    assert board.read([10]) == {}


@given(st.integers(0, 3000), st.integers(0, 4000), st.integers(0, 60))
def test_a_status_always_fits_its_slot(frames: int, error: int, groups: int) -> None:
    status = RankStatus(
        0,
        State.ENDED,
        error="e" * 3 * error,
        verdict=Verdict("v" * 3 * error, about="world/7"),
        stack=tuple(f"frame {number}" for number in range(frames)),
        groups={f"{'group' * 20} {number}": GroupCounts(2, 1, 1) for number in range(groups)},
    )
    data = status.to_bytes(status_board.NBYTES - status_board._HEAD_NBYTES)
    assert len(data) <= status_board.NBYTES - status_board._HEAD_NBYTES
    read = pickle.loads(data)
    assert read.state is State.ENDED
    assert status.error.startswith(read.error[:100])
    assert read.verdict.about == "world/7"


def test_a_board_needs_the_store_for_ranks_that_share_no_memory(board: StatusBoard) -> None:
    assert not board.needs_store
    assert StatusBoard(10, 3).needs_store


def test_a_store_that_has_gone_is_asked_no_more_and_kept(board: StatusBoard) -> None:
    """A store in a file opens it once more when it is dropped, and ends the process if it cannot."""

    class Gone:
        num_asked = 0

        def add(self, *_: object) -> int:
            self.num_asked += 1
            raise RuntimeError("Too many open files")

    board._store = gone = Gone()
    for _ in range(2):
        board._answer_roll()
    assert gone.num_asked == 1
    assert board._store is gone
    board.has_other_hosts = True
    assert board.missing([11]) is None
