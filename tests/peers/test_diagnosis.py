"""Who waits for whom, and who will never go on: by what ranks say of themselves."""

from __future__ import annotations

import signal
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fullshard.errors import DivergenceError, FullshardError, PeerLostError
from fullshard.peers.diagnosis import (
    Names,
    describe_difference,
    describe_end,
    describe_stuck,
    find_stuck,
    loss,
)
from fullshard.peers.status import NEW_GROUPS, STEADY_BEATS, GroupCounts, RankStatus, State, Verdict


def _blocked(
    rank: int, issued: int, place: int, state: State = State.CALLS, size: int = 2
) -> RankStatus:
    return RankStatus(
        rank,
        state,
        beat=STEADY_BEATS,
        where="a collective",
        groups={"world": GroupCounts(size, issued, place)},
    )


def _stuck(*statuses: RankStatus) -> set[int]:
    return find_stuck({each.rank: each for each in statuses})


ours = _blocked(0, issued=7, place=42, state=State.WAITS)
barrier = _blocked(1, issued=8, place=41)


def test_ranks_in_different_collectives_are_stuck() -> None:
    assert _stuck(ours, barrier) == {0, 1}
    text = describe_stuck({0: ours, 1: barrier}, {0, 1})
    assert "rank 0: waiting" in text
    assert "rank 1: in a collective" in text


def test_ranks_in_one_collective_are_not_stuck_however_long_it_takes() -> None:
    """Bytes may still be moving, over a slow network."""
    assert not _stuck(_blocked(0, 8, 42), _blocked(1, 8, 42))


def test_a_rank_that_computes_may_still_come() -> None:
    assert not _stuck(ours, replace(barrier, state=State.RUNS))


def test_a_rank_that_has_not_stood_still_for_long_may_go_on() -> None:
    assert not _stuck(ours, replace(barrier, beat=STEADY_BEATS - 1))


def test_a_rank_whose_other_threads_may_make_the_call_is_never_stuck() -> None:
    assert not _stuck(ours, replace(barrier, has_threads=True, beat=10_000))


def test_a_rank_that_nothing_is_known_of_may_still_come() -> None:
    one, two = (
        replace(each, groups={"world": GroupCounts(3, *counts)})
        for each, counts in ((ours, (7, 42)), (barrier, (8, 41)))
    )
    assert not _stuck(one, two)


def test_whoever_waits_for_a_rank_that_has_gone_is_stuck() -> None:
    for gone in (
        replace(barrier, state=State.ENDED, beat=0),
        replace(barrier, state=State.LEFT, beat=0),
        replace(barrier, state=State.RUNS, verdict=Verdict("...")),
    ):
        assert _stuck(ours, gone) == {0}
    text = describe_stuck({0: ours, 1: replace(barrier, state=State.ENDED)}, {0})
    assert text.startswith("Ranks do not end together: "), text
    failed = replace(barrier, state=State.ENDED, error="KeyError")
    text = describe_stuck({0: ours, 1: failed}, {0})
    assert "wait for rank 1" in text


def test_a_rank_behind_another_that_may_go_on_is_not_stuck() -> None:
    """0 waits for 1, 1 waits for 2, which computes."""
    statuses = [_blocked(0, 9, 9, size=3), _blocked(1, 8, 8, size=3)]
    last = RankStatus(2, State.RUNS, beat=9, groups={"world": GroupCounts(3, 7, 7)})
    assert not _stuck(*statuses, last)


def test_ranks_of_different_groups_may_wait_in_a_circle() -> None:
    groups = {"a": (0, 1), "b": (1, 2), "c": (2, 0)}
    ahead = {"a": 0, "b": 1, "c": 2}  # who has issued one more in the group

    def status(rank: int) -> RankStatus:
        counts = {
            key: GroupCounts(2, 5 + (ahead[key] == rank), 0)
            for key, ranks in groups.items()
            if rank in ranks
        }
        return RankStatus(rank, State.CALLS, beat=STEADY_BEATS, groups=counts)

    assert _stuck(*map(status, range(3))) == {0, 1, 2}


def test_a_rank_that_makes_a_group_waits_for_those_that_have_not_begun_to() -> None:
    """`new_group` meets through the store. Who has left it already, and waits for one that is slow in it, is not stuck."""
    one, other = (
        {"world": GroupCounts(2, 7, 41), NEW_GROUPS: GroupCounts(2, n, 0)} for n in (3, 2)
    )
    meeting = replace(barrier, op="", groups=one, waited=(NEW_GROUPS,))
    assert _stuck(replace(ours, groups={**ours.groups, NEW_GROUPS: other[NEW_GROUPS]}), meeting)
    assert not _stuck(replace(ours, groups={**ours.groups, NEW_GROUPS: one[NEW_GROUPS]}), meeting)
    assert not _stuck(replace(meeting, rank=0), meeting)


def test_ranks_that_see_whom_they_wait_for_need_no_counters() -> None:
    """After an error that the program caught, the one that waits may have entered less than the other."""
    behind = replace(ours, groups={"world": GroupCounts(2, 7, 41)}, late=(1,))
    assert not _stuck(replace(behind, late=()), barrier)
    assert _stuck(behind, barrier) == {0, 1}
    assert _stuck(behind, replace(ours, rank=1, late=(0,))) == {0, 1}
    assert not _stuck(behind, replace(barrier, beat=0))
    assert not _stuck(behind)


def test_operations_of_different_kinds_that_are_paired_are_stuck() -> None:
    """Both are the eighth of one process group: fullshard's on rank 0, the program's on rank 1."""
    assert _stuck(
        replace(ours, groups={"world": GroupCounts(2, 8, 42)}, in_group="world"), barrier
    ) == {0, 1}
    # In a group of its own, fullshard's is no partner: the program's of rank 0 may have been started.
    assert not _stuck(replace(ours, groups={"world": GroupCounts(2, 8, 42)}), barrier)


def test_different_collectives_of_the_program_that_are_paired_are_stuck() -> None:
    one = replace(_blocked(0, 8, 41), op="barrier", waited=("world",))
    two = replace(_blocked(1, 8, 41), op="all_reduce", waited=("world",))
    assert _stuck(one, two) == {0, 1}
    assert not _stuck(one, replace(two, op="barrier"))
    # A functional one does not say in which group it is.
    assert _stuck(one, replace(two, op="wait_tensor", waited=())) == {0, 1}
    assert not _stuck(replace(one, waited=()), replace(two, waited=()))


@given(
    st.lists(
        st.tuples(st.sampled_from(State), st.integers(0, 4), st.integers(0, 2), st.integers(0, 2)),
        min_size=1,
        max_size=4,
    )
)
def test_stuck_ranks_are_blocked_and_wait_for_none_that_may_go_on(
    states: list[tuple[State, int, int, int]],
) -> None:
    size = len(states)
    statuses = {
        rank: RankStatus(rank, state, beat, groups={"world": GroupCounts(size, issued, place)})
        for rank, (state, beat, issued, place) in enumerate(states)
    }
    stuck = find_stuck(statuses)
    for rank in stuck:
        assert statuses[rank].is_blocked
        mine = statuses[rank].groups["world"]
        behind = [
            other
            for other, each in statuses.items()
            if each.groups["world"].issued < mine.issued or each.groups["world"].place < mine.place
        ]
        assert behind
        assert all(other in stuck or statuses[other].has_gone for other in behind)


def test_ranks_that_ended_in_order_did_not_end_together_and_others_are_lost() -> None:
    ended = RankStatus(1, State.ENDED, moment="step 3, forward")
    failed = replace(ended, error="KeyError: 'x'")
    told = replace(ended, verdict=Verdict("Ranks took different paths."))
    entered = {1: "step 3, forward: a", 2: ""}

    def lost(*words: RankStatus | None, code: int | None = None) -> FullshardError:
        return loss(dict(enumerate(words, 1)), {1: code}, entered, "b: all-gather").error

    for code in (None, 0, -signal.SIGSEGV):  # that came after its program
        assert isinstance(lost(ended, code=code), DivergenceError)
    assert isinstance(lost(ended, code=3), PeerLostError)
    assert "rank 1 ended (step 3, forward) with exit code 3; its" in str(lost(ended, code=3))
    assert str(lost(failed, code=3)) == str(lost(failed))
    for error in (lost(None), lost(failed), lost(ended, None)):
        assert isinstance(error, PeerLostError)
    text = str(lost(failed, None))
    for part in ("rank 1 ended (step 3, forward) with KeyError", "rank 2 died", "ranks 1, 2 at b:"):
        assert part in text
    assert ": step 3, forward: a." in str(lost(None))
    # Who is about to raise an error for all is quoted, whatever happened to the others.
    assert str(lost(None, told)) == "Ranks took different paths."
    assert isinstance(lost(None, told), DivergenceError)
    told = replace(told, verdict=Verdict("A rank died.", is_loss=True))
    assert isinstance(lost(None, told), PeerLostError)


def test_an_end_is_told_unless_the_rank_had_finished_or_was_asked_to() -> None:
    ended = RankStatus(1, State.ENDED, moment="step 3, forward")
    failed = replace(ended, error="KeyError: 'x'")
    told = replace(failed, verdict=Verdict("Ranks took different paths."))

    def said(code: int | None, words: RankStatus | None) -> str:
        return describe_end(1, 4711, code, words, "step 3, forward: a", (0, "step 3, forward: b"))

    for code in (0, -signal.SIGTERM, -signal.SIGINT):
        assert said(code, None) == ""
    for words in (ended, told):
        assert said(0, words) == said(None, words) == ""
    for code, how in ((-9, "SIGKILL"), (-11, "SIGSEGV"), (3, "exit code 3"), (None, "died")):
        for part in (
            "rank 1 (pid 4711)",
            how,
            "step 3, forward: a. Rank 0 is at: step 3",
            "from 1",
        ):
            assert part in said(code, None)
    assert "KeyError: 'x'" in said(1, failed)
    assert "SIGSEGV" in said(-11, ended)  # after its program


def test_the_remedy_follows_from_what_differs() -> None:
    def said(*texts: str) -> str:
        return describe_difference(
            7, {r: f"step 1: {t}" for r, t in enumerate(texts)}, {}, Names((), {})
        )

    assert "with other sizes" in said("a: all-gather (64 bytes)", "a: all-gather (128 bytes)")
    assert "Freeze the same parameters" in said("w is frozen now (digest 1)", "a: all-gather")
    assert "shard the same model" in said("allocating shards of w", "after backward")
    assert "set_unused" in said("a: reduce-scatter", "b: reduce-scatter")
    assert "make the same calls" in said("state dict", "after backward")
    assert "At place 7 of " in said("a", "b")
