"""From records to findings: processes that failed or died, and which of them only followed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fullshard.tools.doctor.findings import Finding, counted, note, numbered, problem
from fullshard.tools.verify.comparing import Comparison
from fullshard.tools.verify.record import Failure

_WITH_FORWARDS = ("forward", "the script")
_ADVICE_ON_NOTHING = (
    "A script that is not to shard, such as one of DDP, has nothing to verify. Else give it the arguments that make it "
    "shard and train: fullshard verify SCRIPT -- ARGUMENTS"
)
_ADVICE_ON_FACTORY = "Nothing is sharded here, so no rank was started. Mend the program first."
_ADVICE_ON_BOTH = (
    "It is not of sharding: mend the script, or give it the arguments that it needs, after --."
)
_ADVICE_ON_SCRIPT = (
    "Here every call that shards leaves the model whole. If the script fails on its ranks too, mend it first; what needs a "
    "sharded model cannot be verified: leave it out, by an argument of the script."
)


def judge_deaths(comparison: Comparison) -> Iterator[Finding]:
    """Name ranks that ended without a record."""
    if comparison.died:
        yield problem(
            "rank-died",
            numbered(comparison.died),
            comparison.ending.message or "ended by itself, without an exception",
            "Look for what ends a process: too little memory (`dmesg`), os._exit, a fault in native code.",
        )


def judge_failures(comparison: Comparison) -> Iterator[Finding]:
    """Say what was raised, and by whom first; those that only followed are one finding."""
    failures = {r: run.failure for r, run in comparison.ranks.items() if run.failure is not None}
    alone = comparison.alone.failure
    alike = {
        rank: failure
        for rank, failure in failures.items()
        if alone is not None
        and (failure.kind, failure.text) == (alone.kind, alone.text)
        and not failure.may_follow
    }
    for failure, ranks in grouped(alike):
        yield problem(
            "timeout" if failure.kind == "TimeoutError" else "failed",
            numbered(ranks),
            f"in both runs, sharded and whole: {_said(failure)}",
            _ADVICE_ON_NOTHING if failure.is_nothing else _ADVICE_ON_BOTH,
        )
    if (failure := alone) is not None and not alike and not (failures and failure.may_follow):
        advice = _ADVICE_ON_SCRIPT if comparison.options.script else _ADVICE_ON_FACTORY
        if failure.is_nothing:
            advice = _ADVICE_ON_NOTHING
        where = comparison.reference
        yield problem("failed-alone", where, _said(failure), advice)
    causes = {rank: each for rank, each in failures.items() if not each.may_follow}
    ended = [] if causes or comparison.died else _ended_early(comparison)
    if ended:
        num = len(comparison.ranks[ended[0]].seconds)
        yield problem(
            "failed",
            numbered(ended),
            f"ended without an error after {counted(num, 'step')}, while others went on",
            "All ranks have to take as many steps: see what ends its loop, such as a shorter part of the data.",
        )
    elif not causes and not comparison.died:
        causes = failures
    for failure, ranks in grouped({r: f for r, f in causes.items() if r not in alike}):
        yield _failure_finding(failure, ranks, comparison)
    if followers := [rank for rank in failures if rank not in causes]:
        yield note("followed", numbered(followers), "ended because of the others")


def _ended_early(comparison: Comparison) -> list[int]:
    """Return ranks that ended well, where others failed."""
    if not any(run.failure is not None for run in comparison.ranks.values()):
        return []
    ended = {r: run for r, run in comparison.ranks.items() if run.failure is None}
    return [r for r, run in ended.items() if len(run.seconds) < comparison.options.steps]


def _failure_finding(failure: Failure, ranks: Sequence[int], comparison: Comparison) -> Finding:
    where = numbered(ranks)
    if failure.kind == "TimeoutError":
        advice = "See where it was, below. Do ranks take other paths? If it is only slow, give a longer --timeout."
        return problem("timeout", where, _said(failure), advice)
    is_own = failure.phase in _WITH_FORWARDS and not failure.may_follow
    if is_own and (call := _outside_forward(failure.calls)) is not None:
        path, method = call
        owner = f"model.{path}" if path else "model"
        return problem(
            "forward-method",
            where,
            f"{_said(failure)} (in {'.'.join(filter(None, call))}, which is not a forward)",
            f'After sharding: fullshard.register_fsdp_forward_method({owner}, "{method}"). Weights of a unit '
            "are whole only while its forward, or such a method, runs.",
        )
    return problem("failed", where, _said(failure), _advice_on(failure, comparison))


def _outside_forward(calls: Sequence[str]) -> tuple[str, str] | None:
    """Return path and name of the last method that is not a forward, and not called by its own."""
    split = [call.rpartition(".")[::2] for call in calls]
    for path, method in reversed(split):
        if method != "forward" and (path, "forward") not in split:
            return path, method
    return None


def _advice_on(failure: Failure, comparison: Comparison) -> str:
    if failure.is_nothing:
        return _ADVICE_ON_NOTHING
    if failure.phase in (*_WITH_FORWARDS, "backward") and "DTensor" in failure.text:
        return (
            "A sharded weight seems to be used outside the forward of its own module: call the module, "
            "or use fullshard.gathered(weight)."
        )
    reference, ended = comparison.reference, comparison.alone.failure
    if ended is not None and (
        failure.step is None or ended.step is None or ended.step <= failure.step
    ):
        return f"The {reference} did not get past that step either: mend what ended it first, and verify again."
    return f"The {reference} ran the same step without an error; so it is of sharding, or of this rank."


def grouped(by_rank: Mapping[int, Any]) -> list[tuple[Any, list[int]]]:
    """Group ranks of one value; failures are alike if they say the same."""
    found: dict[object, tuple[Any, list[int]]] = {}
    for rank, value in by_rank.items():
        key = (value.text, value.phase) if isinstance(value, Failure) else value
        found.setdefault(key, (value, []))[1].append(rank)
    return list(found.values())


def _said(failure: Failure) -> str:
    if failure.is_nothing:
        return f"nothing to compare: {failure.text}"
    when = "" if failure.step is None else f" of step {failure.step}"
    text = failure.text.strip().splitlines()[0]
    line = f" ({failure.line})" if failure.line else ""
    return f"{failure.phase}{when}: {failure.kind}: {text}{line}"
