"""Every fault is named on every rank within ten seconds, or proven harmless."""

from __future__ import annotations

import re
import socket

import pytest
import torch

from tests.faults import job
from tests.faults.job import Plan, alone, random_plan
from tests.faults.run import Ending, run
from tests.selection import repeats

WITHIN_S = 10.0
LIMIT_S = 40.0
NUM_RANDOM = 200
PER_TEST = 10

# The errors that say what was planted. A rank that raises or dies by itself has an error of its own.
NAMED = {"DivergenceError", "PeerLostError", "PeerTimeoutError"}
LOST = {"kill", "exit_at_once", *job.RAISES} - {"raise_and_go_on"}


def check(plan: Plan, endings: list[Ending] | None = None) -> None:
    """Assert that a plan's fault was named, or harmless. endings: of its ranks; None to run it here."""
    if endings is None:
        endings = run(plan, LIMIT_S)
    report = "\n".join(f"rank {e.rank}: exit code {e.exit_code}\n{e.words}" for e in endings)
    assert all(each.exit_code is not None for each in endings), f"a rank hangs\n{report}"
    if all(each.exit_code == 0 for each in endings):
        assert plan.fault in job.ROUTES, f"nothing was said\n{report}"
        expected = alone(plan)
        for each in endings:
            assert each.parameters is not None
            torch.testing.assert_close(each.parameters, expected)
        return
    for each in endings:
        if _ends_by_itself(plan, each):
            continue
        assert each.exit_code == 1, report
        _assert_named(plan, each, report)
    said = {_essence(each.text) for each in endings if "DivergenceError" in each.kinds}
    assert len(said) <= 1, f"ranks say different things\n{report}"


def _ends_by_itself(plan: Plan, ending: Ending) -> bool:
    """Whether a rank is the one with the fault, and ends because of the fault alone."""
    if ending.rank != plan.rank:
        return False
    codes = {"kill": -9, "exit": 3, "exit_at_once": 5}
    if plan.fault in codes:
        return ending.exit_code == codes[plan.fault]
    if "PlantedError" in ending.kinds:
        return ending.exit_code == 1
    # It has nothing more to do, or computes with a dtype that does not fit before it meets the others.
    return plan.fault in ("out_of_data", "skip_step", "dtype") and not NAMED & set(ending.kinds)


def _assert_named(plan: Plan, ending: Ending, report: str) -> None:
    """Assert that a rank's error says who and where, in time."""
    words = ending.words
    kinds = set(re.findall(r"\b(\w+Error)\b", words)) | set(ending.kinds)
    assert kinds & NAMED, report
    if plan.fault in LOST.intersection(job.RAISES):
        assert "PlantedError: " in words, report
        assert "\x1b" not in words, report
    assert f"rank {plan.rank}" in words or f"{plan.rank}" in _ranks_in(words), report
    if plan.fault not in job.BUILDS:
        assert re.search(r"step \d", words) or plan.step == 1, report
    if ending.kinds:
        assert ending.seconds < WITHIN_S, report


def _ranks_in(words: str) -> set[str]:
    lists = re.findall(r"ranks ([\d, ]+)", words)
    return {number for each in lists for number in re.findall(r"\d+", each)}


def _essence(text: str) -> str:
    return text.partition(":")[0]


def _plans() -> list[Plan]:
    """Return every fault once, on paths and faces in turn, and what is met most on more of them."""
    plans = []
    for number, fault in enumerate(job.FAULTS):
        path = ("auto", "process_group")[number % 2]
        face = ("fully_shard", "wrapper")[number // 2 % 2]
        if fault in job.OF_FULLY_SHARD:
            face = "fully_shard"
        if fault not in (*job.STALLS, "out_of_data"):
            plans.append(Plan(fault, path, face))
    for number, after in enumerate(job.LEAVES):
        plans.append(Plan("out_of_data", ("auto", "process_group")[number % 2], after=after))
    return [
        *plans,
        Plan("swap", "process_group"),
        Plan("evaluate", "process_group"),
        *(Plan(fault, "like_cuda") for fault in ("swap", "skip", "barrier", "clip")),
        *(Plan(fault, "hosts") for fault in ("swap", "frozen", "freeze", "barrier")),
        *(Plan(fault, "hosts", size=3) for fault in ("kill", "raise_in_loss")),
        *(
            Plan("kill", "hosts", size=3, step=step) for step in (1, 2)
        ),  # while others ask in the store
        Plan("state_dict", "process_group", size=3, rank=0),
        Plan("barrier", "auto", size=3, rank=2),
    ]


# Faults that are planted on another path, or on more ranks, than in another plan.
AGAIN = [Plan(fault, "process_group") for fault in ("swap", "evaluate")]
AGAIN += [
    Plan("barrier", "auto", size=3, rank=2),
    Plan("state_dict", "process_group", size=3, rank=0),
]
AGAIN += [Plan("kill", "hosts", size=3, step=2)]
# Those of each class that `make test` plants, where ranks of one host are watched as such, and elsewhere.
ON_ONE_HOST = ("swap", "skip", "other_branch", "shape", "layers", "no_backward", "skip_step")
ON_ONE_HOST += ("raise_in_loss", "raise_in_backward", "evaluate", "state_dict", "save", "barrier")
ON_ONE_HOST += ("freeze", "kill", "exit")
ELSEWHERE = ("swap", "clip", "kill", "raise_in_loss")


def _is_of_a_class_again(plan: Plan) -> bool:
    if plan.fault == "out_of_data":
        return plan.after not in ("exit", "barrier")
    is_on_one_host = plan.path in ("auto", "process_group")
    return plan in AGAIN or plan.fault not in (ON_ONE_HOST if is_on_one_host else ELSEWHERE)


@repeats(lambda s: _is_of_a_class_again(s["plan"]))
@pytest.mark.parametrize("plan", _plans(), ids=lambda plan: plan.name)
def test_a_fault_is_named_on_every_rank(plan: Plan) -> None:
    check(plan)


@pytest.mark.parametrize(
    ("fault", "path", "said"),
    [
        ("sleep", "auto", "time.sleep"),
        pytest.param("sleep", "process_group", "time.sleep", marks=pytest.mark.long),
        pytest.param("stop", "auto", "it is stopped by a signal", marks=pytest.mark.long),
        ("stop", "process_group", "it is stopped by a signal"),
    ],
)
def test_a_rank_that_stalls_is_given_up_with_what_it_does(fault: str, path: str, said: str) -> None:
    plan = Plan(fault, path, timeout_s=3.0)
    (waiting, stalled) = run(plan, limit_s=12.0)
    assert stalled.exit_code is None  # it sleeps, or is stopped: nobody ends it but its launcher
    assert "PeerTimeoutError" in waiting.kinds, waiting.words
    assert waiting.exit_code == 1
    assert waiting.seconds < WITHIN_S
    assert "for rank 1, alive but not here yet" in waiting.text
    assert "step 2, backward" in waiting.text  # the last that it did with the others
    assert said in waiting.text


def test_ranks_that_are_asked_to_end_say_nothing() -> None:
    """They end one after the other, as by torchrun."""
    endings = run(Plan("terminate", size=3), LIMIT_S)
    assert [each.exit_code for each in endings] == [-15, -15, -15]
    assert [each.stderr for each in endings] == ["", "", ""]


def test_a_call_that_fails_as_others_raise_is_explained_below_its_error() -> None:
    """It was not to raise by itself yet, as on a busy machine, and the others' ends break its call."""
    (first, late) = run(Plan("barrier_unjudged", "hosts"), LIMIT_S)
    assert first.kinds[0] == "DivergenceError"
    assert late.kinds[0] == "RuntimeError", late.words
    assert f"failed on rank 1 because of others: {first.text}" in late.stderr


def test_a_rank_of_another_host_that_is_stopped_is_not_lost() -> None:
    """Its connections stay, and it may go on."""
    (waiting, stopped) = run(Plan("stop", "hosts", step=1, timeout_s=6.0), limit_s=20.0)
    assert stopped.exit_code is None
    assert waiting.kinds[0] == "PeerTimeoutError", waiting.words
    assert "rank 1" in waiting.text


def _plans_on_a_gpu() -> list[Plan]:
    """Return every fault over NCCL, where ranks read each other's flight record and where not, and over CUDA IPC."""
    return [
        Plan(
            fault, path, ("fully_shard", "wrapper")[number % 2 and fault not in job.OF_FULLY_SHARD]
        )
        for number, fault in enumerate(job.FAULTS)
        if fault not in job.STALLS
        for path in ("nccl_hosts", "nccl", "cuda")
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("plan", _plans_on_a_gpu(), ids=lambda plan: plan.name)
def test_a_fault_is_named_on_a_gpu(plan: Plan) -> None:
    check(plan)


def test_a_rank_of_another_host_that_leaves_before_it_has_run_is_named() -> None:
    """Others wait for it in the store, and not over a connection that would break."""
    check(Plan("out_of_data", "hosts", size=3, rank=0, step=1, after="destroy"))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize(
    "fault",
    [
        "raise_in_loss",
        "kill",
        *(pytest.param(f, marks=pytest.mark.long) for f in ("out_of_data", "exit")),
    ],
)
def test_a_rank_that_takes_the_store_with_it_is_named(fault: str) -> None:
    """Ranks of several hosts read what others say in the store alone."""
    check(Plan(fault, "hosts", size=3, rank=0, port=_free_port()))


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, NUM_RANDOM, PER_TEST))
def test_random_faults_are_named_or_harmless(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        check(random_plan(seed))
