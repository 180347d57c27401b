"""From a comparison to findings and a verdict, without running or reading anything."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fullshard.tools.doctor.findings import Finding, Severity, counted, numbered
from fullshard.tools.verify.comparing import KINDS, Comparison, Difference
from fullshard.tools.verify.facts import Failure, Unit

_NUM_NAMES = 4
_SAME_RATIO = 0.01  # two gradients are scaled alike if their factors differ by less
_IS_SCALED = 0.02  # what may remain of a gradient beside its scaled original
_OF_FOLLOWERS = ("PeerLostError", "PeerTimeoutError", "DivergenceError", "DistBackendError")
_SAID_BY_FOLLOWERS = ("gloo/transport", "Connection reset by peer", "Connection closed by peer")


def judge(comparison: Comparison) -> list[Finding]:
    """Return every finding, worst first; among equals, causes come before what follows from them."""
    found = [finding for judge_one in JUDGES for finding in judge_one(comparison)]
    order = list(Severity)
    return sorted(found, key=lambda finding: order.index(finding.severity))


def verdict_of(findings: Iterable[Finding]) -> Severity:
    """Return the worst severity."""
    order = list(Severity)
    return min((each.severity for each in findings), key=order.index, default=Severity.OK)


def judge_deaths(comparison: Comparison) -> Iterator[Finding]:
    """Name ranks that ended without a record."""
    if comparison.died:
        yield Finding(
            "rank-died",
            Severity.PROBLEM,
            numbered(comparison.died),
            comparison.ending.message or "ended by itself, without an exception",
            "Look for what ends a process: too little memory (`dmesg`), os._exit, a fault in native code.",
        )


def judge_failures(comparison: Comparison) -> Iterator[Finding]:
    """Say what was raised, and by whom first; those that only followed are one finding."""
    if (failure := comparison.alone.failure) is not None:
        yield Finding(
            "failed-alone",
            Severity.PROBLEM,
            "one process",
            _said(failure),
            "Nothing is sharded here, so no rank was started. Mend the program first.",
        )
    failures = {r: run.failure for r, run in comparison.ranks.items() if run.failure is not None}
    causes = {rank: each for rank, each in failures.items() if not _follows(each)}
    if not causes and not comparison.died:
        causes = failures
    for failure, ranks in _grouped(causes):
        yield _failure_finding(failure, ranks)
    if followers := [rank for rank in failures if rank not in causes]:
        yield Finding("followed", Severity.NOTE, numbered(followers), "ended because of the others")


def _follows(failure: Failure) -> bool:
    """Whether a failure may come from another rank's."""
    said = any(text in failure.text for text in _SAID_BY_FOLLOWERS)
    return said or failure.kind in _OF_FOLLOWERS


def _failure_finding(failure: Failure, ranks: Sequence[int]) -> Finding:
    where = numbered(ranks)
    if failure.kind == "TimeoutError":
        advice = "See where it was, below. Do ranks take other paths? If it is only slow, give a longer --timeout."
        return Finding("timeout", Severity.PROBLEM, where, _said(failure), advice)
    if failure.phase == "forward" and (call := _outside_forward(failure.calls)) is not None:
        path, method = call
        owner = f"model.{path}" if path else "model"
        return Finding(
            "forward-method",
            Severity.PROBLEM,
            where,
            f"{_said(failure)} (in {'.'.join(filter(None, call))}, which is not a forward)",
            f'After sharding: fullshard.register_fsdp_forward_method({owner}, "{method}"). Weights of a unit '
            "are whole only while its forward, or such a method, runs.",
        )
    return Finding("failed", Severity.PROBLEM, where, _said(failure), _advice_on(failure))


def _outside_forward(calls: Sequence[str]) -> tuple[str, str] | None:
    """Return path and name of the last method that is not a forward, and not called by its own."""
    split = [call.rpartition(".")[::2] for call in calls]
    for path, method in reversed(split):
        if method != "forward" and (path, "forward") not in split:
            return path, method
    return None


def _advice_on(failure: Failure) -> str:
    if failure.phase == "forward" and "DTensor" in failure.text:
        return (
            "A sharded weight seems to be used outside the forward of its own module: call the module, "
            "or use fullshard.gathered(weight)."
        )
    return "One process ran the same step without an error; so it is of sharding, or of this rank."


def judge_batches(comparison: Comparison) -> Iterator[Finding]:
    """Find parts of batches that are not what the one process had."""
    alone = {(part.step, part.rank): part.batch for part in comparison.alone.parts}
    parts = [part for run in comparison.ranks.values() for part in run.parts]
    others = [p for p in parts if alone.get((p.step, p.rank), p.batch) != p.batch]
    if others:
        yield Finding(
            "batches",
            Severity.PROBLEM,
            numbered({part.rank for part in others}),
            f"another batch than the one process had, first in step {min(p.step for p in others)}",
            "batch(step) has to return the whole batch, the same in every process: it may depend on step and "
            "on seeded random numbers, not on the rank or the time.",
        )


def judge_start(comparison: Comparison) -> Iterator[Finding]:
    """Compare first values: whole parameters after sharding, and every rank's buffers."""
    alone = comparison.alone
    first = next((run for run in comparison.ranks.values() if run.initial), None)
    if first is not None and (lacking := [n for n in alone.initial if n not in first.initial]):
        yield Finding(
            "lacking",
            Severity.PROBLEM,
            "all ranks",
            f"{_listed(lacking)}: not in the sharded model",
        )
    if first is not None and (other := _others(alone.initial, first.initial)):
        own = [r for r, run in comparison.ranks.items() if _others(alone.own, run.own)]
        yield Finding(
            "initial-parameters",
            Severity.PROBLEM,
            numbered(own) if own else "sharding",
            f"{_listed(other)}: other values before the first step than in the one process",
            "Each rank shards what it made itself: build the model from seeded random numbers alone, or load "
            "or send the same values on all ranks."
            if own
            else "The values were changed while the model was sharded.",
        )
    by_rank = {r: _others(alone.buffers, run.buffers) for r, run in comparison.ranks.items()}
    for names, ranks in _grouped({r: tuple(names) for r, names in by_rank.items() if names}):
        yield Finding(
            "initial-buffers",
            Severity.PROBLEM,
            numbered(ranks),
            f"{_listed(names)}: other values before the first step than in the one process",
            "Buffers are not sharded, and nothing makes them alike: build them the same on every rank, or "
            "broadcast them once (torch.distributed.broadcast) before training.",
        )


def judge_ties(comparison: Comparison) -> Iterator[Finding]:
    """Compare which names share a parameter."""
    sharded = next((run.ties for run in comparison.ranks.values() if run.initial), None)
    if sharded is None:
        return
    groups = [set(tied) for tied in sharded]
    for tied in comparison.alone.ties:
        if not any(set(tied) <= group for group in groups):
            yield Finding(
                "untied",
                Severity.PROBLEM,
                "all ranks",
                f"{' and '.join(tied)} are one parameter in the one process, and several in the sharded model",
                "Something between building and sharding gave one of the names a parameter of its own: tie "
                "them again before sharding.",
            )


def judge_writes(comparison: Comparison) -> Iterator[Finding]:
    """Name parameters that a forward writes to."""
    written = dict.fromkeys(name for part in comparison.alone.parts for name in part.written)
    if written:
        owners = dict.fromkeys(name.rpartition(".")[0] or "the model" for name in written)
        yield Finding(
            "forward-writes",
            Severity.PROBLEM if comparison.differing else Severity.WARNING,
            _listed(list(owners)),
            f"the forward writes to {_listed(list(written))}",
            "In a sharded model such a write reaches a gathered copy, and is lost when that is freed. Write "
            "after optimizer.step(), or compute with a changed copy.",
        )


def judge_divide_factor(comparison: Comparison) -> Iterator[Finding]:
    """Find gradients that are all the same multiple of those of the one process, by unit."""
    gradients = [d for d in comparison.differing if d.kind == "gradient"]
    first = [d for d in gradients if d.step == gradients[0].step]
    units = next((run.units for run in comparison.ranks.values() if run.units), ())
    owner = {name: unit for unit in units for name in unit.parameters}
    by_factor: dict[float, list[Difference]] = {}
    for each in first:
        if (factor := _factor(each)) is not None:
            same = next((f for f in by_factor if abs(f - factor) <= _SAME_RATIO * f), factor)
            by_factor.setdefault(same, []).append(each)
    for factor, scaled in by_factor.items():
        names = [each.name for each in scaled]
        chosen = dict.fromkeys(owner[name] for name in names if name in owner)
        whole = [unit for unit in chosen if set(unit.parameters) <= set(names)]
        yield Finding(
            "divide-factor",
            Severity.PROBLEM,
            f"unit {_listed([unit.name or '(root)' for unit in whole])}"
            if whole
            else _listed(names),
            f"gradients of {counted(len(names), 'parameter')} are {factor:.4g} times those of the one process"
            f"{_divided(whole)}",
            _advice_on_factor(factor, comparison.options.ranks),
        )


def _factor(difference: Difference) -> float | None:
    ratio, residual = difference.ratio, difference.residual
    if ratio is None or residual is None or residual > _IS_SCALED or ratio <= 0:
        return None
    return ratio if abs(ratio - 1) > _SAME_RATIO else None


def _divided(units: Sequence[Unit]) -> str:
    factors = sorted({unit.divide_factor for unit in units})
    return f"; divided by {', '.join(f'{factor:g}' for factor in factors)}" if factors else ""


def _advice_on_factor(factor: float, num_ranks: int) -> str:
    if math.isclose(factor, num_ranks, rel_tol=_SAME_RATIO):
        cause = "They are summed over the ranks, and not averaged."
    elif math.isclose(factor * num_ranks, 1, rel_tol=_SAME_RATIO):
        cause = "They are divided by the number of ranks twice."
    else:
        cause = f"The mean over {num_ranks} ranks divides by {num_ranks}."
    return (
        f"{cause} Look at set_gradient_divide_factor, hooks on gradients, and factors on the loss."
    )


def judge_random(comparison: Comparison) -> Iterator[Finding]:
    """Say that the first module that differs is random, if nothing before it explains that it differs."""
    first = comparison.first
    if first is None or first.missing or not first.output.is_random:
        return
    is_explained = any(each.step < first.step for each in comparison.differing) or any(
        True for judge_one in _JUDGES_OF_INPUTS for _ in judge_one(comparison)
    )
    if not is_explained:
        yield Finding(
            "random",
            Severity.PROBLEM,
            first.output.path or "the model",
            f"the first output that differs is that of {first.output.kind}, which draws random numbers",
            "Torch's, NumPy's and Python's generators are seeded alike for each step and rank, so what was drawn "
            "came from elsewhere (a generator of the module's own) or in another number. Verify without it: "
            "p=0, or --eval. If that passes, sharding is right and the masks alone differ.",
        )


def judge_finite(comparison: Comparison) -> Iterator[Finding]:
    """Find losses that are not finite in the one process: nothing can be compared from there on."""
    for loss in comparison.losses:
        if not math.isfinite(loss.alone):
            yield Finding(
                "not-finite",
                Severity.PROBLEM,
                "one process",
                f"the loss of step {loss.step} is {loss.alone}",
                "Try a smaller --lr, fewer --steps, or --dtype fp32.",
            )
            return


def judge_values(comparison: Comparison) -> Iterator[Finding]:
    """Say of each kind of value whether it is the same."""
    losses = [loss for loss in comparison.losses if loss.differs]
    if losses:
        one = losses[0]
        yield Finding(
            "losses",
            Severity.PROBLEM,
            numbered({loss.rank for loss in losses}),
            f"first in step {one.step}: {one.alone:.6g} in the one process, {one.sharded:.6g} on rank {one.rank}",
        )
    elif comparison.losses:
        yield Finding("losses", Severity.OK, "all ranks", "equal")
    for kind in KINDS:
        compared = [each for each in comparison.worst if each.kind == kind]
        differing = [each for each in comparison.differing if each.kind == kind]
        if differing:
            first = [d for d in differing if d.step == differing[0].step]
            yield Finding(
                f"{kind}s",
                Severity.PROBLEM,
                _whose(differing),
                f"{_listed(list(dict.fromkeys(d.label for d in first)))}: first in step {first[0].step}, "
                f"{_by_how_much(first)}",
            )
        elif compared:
            most = max(each.relative for each in compared if each.worst <= each.limit)
            equal = f"equal within {most:.0e}" if most else "equal in every bit"
            yield Finding(f"{kind}s", Severity.OK, "all ranks", equal)


def _by_how_much(differences: Sequence[Difference]) -> str:
    most = max(each.relative for each in differences)
    if math.isfinite(most):
        return f"by up to {most:.1e} of the largest value"
    return "where the one process has zeros, another shape, or finite values"


def judge_modules(comparison: Comparison) -> Iterator[Finding]:
    """Name a module of which only one side has an output."""
    first = comparison.first
    if first is not None and first.missing:
        side = "on the ranks" if first.missing == "alone" else "in the one process"
        yield Finding(
            "modules",
            Severity.NOTE,
            first.output.path or "the model",
            f"was seen to run {side} alone, in step {first.step}",
            "A module that sharding replaces or compiles is not seen there. Else the sides take other paths.",
        )


def judge_warnings(comparison: Comparison) -> Iterator[Finding]:
    """Show what ranks were warned of and the one process was not."""
    said: dict[str, tuple[str, list[int]]] = {}
    for rank, run in comparison.ranks.items():
        for text in run.warnings:
            if text not in comparison.alone.warnings:
                alike = re.sub(r"\brank \d+", "rank", text)
                said.setdefault(alike, (text, []))[1].append(rank)
    for text, ranks in said.values():
        yield Finding("warned", Severity.WARNING, numbered(ranks), text)
    began = [run for run in comparison.ranks.values() if run.initial]
    if began and not began[0].units:
        yield Finding(
            "not-sharded", Severity.WARNING, "all ranks", "nothing in the model is sharded"
        )


_JUDGES_OF_INPUTS = (judge_batches, judge_start, judge_ties, judge_writes)
JUDGES: tuple[Callable[[Comparison], Iterable[Finding]], ...] = (
    judge_deaths,
    judge_failures,
    *_JUDGES_OF_INPUTS,
    judge_divide_factor,
    judge_random,
    judge_finite,
    judge_values,
    judge_modules,
    judge_warnings,
)


def as_dict(comparison: Comparison, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return comparison, findings and verdict as what JSON can hold.

    Outputs of modules and fingerprints are left out; numbers that are not finite become text.
    """
    listed = [{**dataclasses.asdict(each), "severity": each.severity.value} for each in findings]
    facts = dataclasses.asdict(comparison)
    for run in (facts["alone"], *facts["ranks"].values()):
        for left_out in ("own", "initial", "buffers"):
            del run[left_out]
        for part in run["parts"]:
            del part["outputs"], part["batch"]
    whole = {"verdict": verdict_of(findings).value, "findings": listed, **facts}
    return {key: _plain(value) for key, value in whole.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _others(expected: Mapping[str, str], given: Mapping[str, str]) -> list[str]:
    """Return names that both have, with other values."""
    return [name for name, value in given.items() if expected.get(name, value) != value]


def _grouped(by_rank: Mapping[int, Any]) -> list[tuple[Any, list[int]]]:
    """Group ranks of one value; failures are alike if they say the same."""
    found: dict[object, tuple[Any, list[int]]] = {}
    for rank, value in by_rank.items():
        key = (value.text, value.phase) if isinstance(value, Failure) else value
        found.setdefault(key, (value, []))[1].append(rank)
    return list(found.values())


def _whose(differing: Sequence[Difference]) -> str:
    ranks = {each.rank for each in differing if each.rank is not None}
    return numbered(ranks) if ranks else "all ranks"


def _said(failure: Failure) -> str:
    when = "" if failure.step is None else f" of step {failure.step}"
    text = failure.text.strip().splitlines()[0]
    return f"{failure.phase}{when}: {failure.kind}: {text}"


def _listed(names: Sequence[str]) -> str:
    """List names: "a, b, c, d and 3 more"."""
    shown = ", ".join(names[:_NUM_NAMES])
    more = len(names) - _NUM_NAMES
    return f"{shown} and {more} more" if more > 0 else shown
