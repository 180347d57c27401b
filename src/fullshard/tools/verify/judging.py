"""From a comparison to findings and a verdict, without running or reading anything."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from fullshard.tools.doctor.findings import (
    Finding,
    Severity,
    counted,
    note,
    numbered,
    ok,
    problem,
    warning,
)
from fullshard.tools.verify.comparing import KINDS, Comparison, Difference, paired
from fullshard.tools.verify.judge_failures import grouped, judge_deaths, judge_failures
from fullshard.tools.verify.options import VerifyOptions

_NUM_NAMES = 4
_SAME_RATIO = 0.01  # two gradients are scaled alike if their factors differ by less
_IS_SCALED = 0.02  # what may remain of a gradient beside its scaled original
_ADVICE_ON_FINAL = (
    "They were equal after the backward, so what the script does to them before the step differs: a norm over shards alone "
    "is each rank's own. Clip by the model's clip_grad_norm_, or torch.nn.utils.clip_grad_norm_ of DTensors."
)


def judge(comparison: Comparison) -> list[Finding]:
    """Return every finding, worst first; among equals, causes come before what follows from them."""
    found = [finding for judge_one in JUDGES for finding in judge_one(comparison)]
    order = list(Severity)
    return sorted(found, key=lambda finding: order.index(finding.severity))


def judge_batches(comparison: Comparison) -> Iterator[Finding]:
    """Find parts of batches that are not what the one process had."""
    parts = paired(comparison.alone, comparison.ranks)
    others = [part for alone, part in parts if alone.batch != part.batch]
    if others:
        yield problem(
            "batches",
            numbered({part.rank for part in others}),
            f"another batch than the {comparison.reference} had, first in step {min(p.step for p in others)}",
            "The script gives its model other inputs when it runs again: seed what shuffles and draws, by a "
            "generator of its own."
            if comparison.options.script
            else "batch(step) has to return the whole batch, the same in every process: it may depend on step and "
            "on seeded random numbers, not on the rank or the time.",
        )


def judge_division(comparison: Comparison) -> Iterator[Finding]:
    """Find a script that gives every rank the same batches, which trains on one rank's share of the data."""
    if not comparison.options.script:
        return
    batches: dict[tuple[int, int], set[str]] = {}
    ranks: set[int] = set()
    for rank, run in comparison.ranks.items():
        for part in run.parts:
            if part.batch:
                ranks.add(rank)
                batches.setdefault((part.step, part.backward), set()).add(part.batch)
    if len(ranks) > 1 and all(len(each) == 1 for each in batches.values()):
        yield warning(
            "same-batches",
            numbered(ranks),
            f"every rank has the same batches, in {counted(len({step for step, _ in batches}), 'step')}",
            "Each rank should read its own part of the data: use a DistributedSampler, or seed what shuffles by the rank. "
            "Ranks that share one batch on purpose (tensor parallel) need nothing.",
        )


def judge_start(comparison: Comparison) -> Iterator[Finding]:
    """Compare first values: whole parameters after sharding, and every rank's buffers."""
    alone = comparison.alone
    if (first := comparison.begun) is not None:
        if lacking := [name for name in alone.initial if name not in first.initial]:
            text = f"{_listed(lacking)}: not in the sharded model"
            yield problem("lacking", "all ranks", text)
        yield from _judge_first_values(comparison, _others(alone.initial, first.initial))
    where = "on rank 0" if comparison.options.script else "in the one process"
    by_rank = {r: _others(alone.buffers, run.buffers) for r, run in comparison.ranks.items()}
    for names, ranks in grouped({r: tuple(names) for r, names in by_rank.items() if names}):
        yield problem(
            "initial-buffers",
            numbered(ranks),
            f"{_listed(names)}: other values before the first step than {where}",
            "Buffers are not sharded, and nothing makes them alike: build them the same on every rank, or "
            "broadcast them once (torch.distributed.broadcast) before training.",
        )


def _judge_first_values(comparison: Comparison, other: Sequence[str]) -> Iterator[Finding]:
    """Say why first values differ: as ranks made them, by what came after sharding, or by sharding."""
    alone = comparison.alone
    later = [n for n in other if comparison.options.script and n not in alone.own]
    if sharded := [name for name in other if name not in later]:
        own = [r for r, run in comparison.ranks.items() if _others(alone.own, run.own)]
        yield problem(
            "initial-parameters",
            numbered(own) if own else "sharding",
            f"{_listed(sharded)}: other values before the first step than in the {comparison.reference}",
            "Each rank shards what it made itself: build the model from seeded random numbers alone, or load "
            "or send the same values on all ranks."
            if own
            else "The values were changed while the model was sharded.",
        )
    if later:
        yield warning(
            "initial-parameters",
            "after sharding",
            f"{_listed(later)}: were given values after sharding, which are others than in the whole model",
            "Random numbers for parts of a parameter are others than for all of it; so this is expected of an "
            "initialisation, and not of a checkpoint. Both sides went on with the sharded model's values.",
        )


def judge_ties(comparison: Comparison) -> Iterator[Finding]:
    """Compare which names share a parameter."""
    if comparison.begun is None:
        return
    groups = [set(tied) for tied in comparison.begun.ties]
    for tied in comparison.alone.ties:
        if not any(set(tied) <= group for group in groups):
            yield problem(
                "untied",
                "all ranks",
                f"{' and '.join(tied)} are one parameter in the {comparison.reference}, and several in the sharded model",
                "Something between building and sharding gave one of the names a parameter of its own: tie "
                "them again before sharding.",
            )


def judge_writes(comparison: Comparison) -> Iterator[Finding]:
    """Name parameters that a forward writes to."""
    written = dict.fromkeys(name for part in comparison.alone.parts for name in part.written)
    if written:
        owners = dict.fromkeys(name.rpartition(".")[0] or "the model" for name in written)
        say = problem if comparison.differing else warning
        yield say(
            "forward-writes",
            _listed(list(owners)),
            f"the forward writes to {_listed(list(written))}",
            "In a sharded model such a write reaches a gathered copy, and is lost when that is freed. Write "
            "after optimizer.step(), or compute with a changed copy.",
        )


def judge_divide_factor(comparison: Comparison) -> Iterator[Finding]:
    """Find gradients that are all the same multiple of those of the one process, by unit.

    Where the forward differs already, gradients that happen to be a multiple say nothing.
    """
    gradients = [d for d in comparison.differing if d.kind == "gradient"]
    first = [d for d in gradients if d.step == gradients[0].step]
    in_forward = [d.step for d in comparison.differing if d.kind == "output"]
    if first and any(step <= first[0].step for step in in_forward):
        return
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
        divisors = ", ".join(f"{each:g}" for each in sorted({unit.divide_factor for unit in whole}))
        yield problem(
            "divide-factor",
            f"unit {_listed([unit.name or '(root)' for unit in whole])}"
            if whole
            else _listed(names),
            f"gradients of {counted(len(names), 'parameter')} are {factor:.4g} times those of the {comparison.reference}"
            f"{divisors and f'; divided by {divisors}'}",
            _advice_on_factor(factor, comparison.options),
        )


def _factor(difference: Difference) -> float | None:
    ratio, residual = difference.ratio, difference.residual
    if ratio is None or residual is None or residual > _IS_SCALED or ratio <= 0:
        return None
    return ratio if abs(ratio - 1) > _SAME_RATIO else None


def _advice_on_factor(factor: float, options: VerifyOptions) -> str:
    num_ranks = options.ranks
    if math.isclose(factor, num_ranks, rel_tol=_SAME_RATIO):
        cause = "They are summed over the ranks, and not averaged."
    elif math.isclose(factor * num_ranks, 1, rel_tol=_SAME_RATIO):
        cause = "They are divided by the number of ranks twice."
    else:
        cause = f"The mean over {num_ranks} ranks divides by {num_ranks}."
    meant = " If it is meant: --divide-factor." if options.script else ""
    return f"{cause} Look at set_gradient_divide_factor, hooks on gradients, and factors on the loss.{meant}"


def judge_random(comparison: Comparison) -> Iterator[Finding]:
    """Say that the first module that differs is random, if nothing before it explains that it differs."""
    first = comparison.first
    if first is None or first.missing or not first.output.is_random:
        return
    is_explained = any(each.step < first.step for each in comparison.differing) or any(
        True for judge_one in _JUDGES_OF_INPUTS for _ in judge_one(comparison)
    )
    if not is_explained:
        state, off = "seeded alike for each step and rank", "p=0, or --eval"
        if comparison.options.script:
            state, off = "in the same state on both sides before the first forward", "p=0"
        yield problem(
            "random",
            first.output.path or "the model",
            f"the first output that differs is that of {first.output.kind}, which draws random numbers",
            f"Torch's, NumPy's and Python's generators are {state}, so what was drawn came from "
            "elsewhere (a generator of the module's own) or in another number. Verify without it: "
            f"{off}. If that passes, sharding is right and "
            "the masks alone differ.",
        )


def judge_finite(comparison: Comparison) -> Iterator[Finding]:
    """Find losses that are not finite in the one process: nothing can be compared from there on."""
    for loss in comparison.losses:
        if not math.isfinite(loss.alone):
            yield problem(
                "not-finite",
                comparison.reference,
                f"the loss of step {loss.step} is {loss.alone}",
                "Try fewer --steps."
                if comparison.options.script
                else "Try a smaller --lr, fewer --steps, or --dtype fp32.",
            )
            return


def judge_values(comparison: Comparison) -> Iterator[Finding]:
    """Say of each kind of value whether it is the same."""
    losses = [loss for loss in comparison.losses if loss.differs]
    if losses:
        one = losses[0]
        yield problem(
            "losses",
            numbered({loss.rank for loss in losses}),
            f"first in step {one.step}: {one.alone:.6g} in the {comparison.reference}, {one.sharded:.6g} on rank {one.rank}",
        )
    elif comparison.losses:
        yield ok("losses", "all ranks", "equal")
    has_gradients = any(each.kind == "gradient" for each in comparison.differing)
    for kind in KINDS:
        compared = [each for each in comparison.worst if each.kind == kind]
        differing = [each for each in comparison.differing if each.kind == kind]
        if differing:
            first = [d for d in differing if d.step == differing[0].step]
            ranks = {each.rank for each in differing if each.rank is not None}
            yield problem(
                f"{kind}s",
                numbered(ranks) if ranks else "all ranks",
                f"{_listed(list(dict.fromkeys(d.label for d in first)))}: first in step {first[0].step}, "
                f"{_by_how_much(first, comparison.reference)}",
                _ADVICE_ON_FINAL if kind == "final-gradient" and not has_gradients else "",
            )
        elif compared:
            most = max(each.relative for each in compared if each.worst <= each.limit)
            equal = f"equal within {most:.0e}" if most else "equal in every bit"
            yield ok(f"{kind}s", "all ranks", equal)


def _by_how_much(differences: Sequence[Difference], reference: str) -> str:
    most = max(each.relative for each in differences)
    if math.isfinite(most):
        return f"by up to {most:.1e} of the largest value"
    return f"where the {reference} has zeros, another shape, or finite values"


def judge_modules(comparison: Comparison) -> Iterator[Finding]:
    """Name a module of which only one side has an output."""
    first = comparison.first
    if first is not None and first.missing:
        side = "sharded" if first.missing == "alone" else f"in the {comparison.reference}"
        yield note(
            "modules",
            first.output.path or "the model",
            f"was seen to run {side} alone, in step {first.step}",
            "A module that sharding replaces or compiles is not seen there. Else the sides take other paths.",
        )


def judge_seeds(comparison: Comparison) -> Iterator[Finding]:
    """Say that first values are those of one seed for all ranks, which the script does not set."""
    begun = comparison.begun
    if comparison.options.script and begun is not None and not begun.seeds:
        yield note(
            "seeds",
            "all ranks",
            "the script seeds nothing before it builds its model; here all ranks began with one seed",
            "By itself, every rank draws first values of its own, and shards these.",
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
        yield warning("warned", numbered(ranks), text)
    if comparison.begun is not None and not comparison.begun.units:
        text = "nothing in the model is sharded"
        yield warning("not-sharded", "all ranks", text)


_JUDGES_OF_INPUTS = (judge_batches, judge_start, judge_ties, judge_writes)
JUDGES: tuple[Callable[[Comparison], Iterable[Finding]], ...] = (
    judge_deaths,
    judge_failures,
    *_JUDGES_OF_INPUTS,
    judge_division,
    judge_divide_factor,
    judge_random,
    judge_finite,
    judge_values,
    judge_modules,
    judge_seeds,
    judge_warnings,
)


def _others(expected: Mapping[str, str], given: Mapping[str, str]) -> list[str]:
    """Return names that both have, with other values."""
    return [name for name, value in given.items() if expected.get(name, value) != value]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NUM_NAMES])
    more = len(names) - _NUM_NAMES
    return f"{shown} and {more} more" if more > 0 else shown
