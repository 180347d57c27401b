"""Run a program on several paths in the same ranks, and compare what it shows."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

from fullshard.errors import DivergenceError
from tests.api import OURS, TORCH, use_api
from tests.differential.compare import Record, differences
from tests.differential.program import NONE, Program
from tests.differential.reached import gradients_arrive
from tests.differential.run import perform
from tests.harness import rank

PATHS = (TORCH, *OURS)


class PathError(RuntimeError):
    """A program raised an exception that it does not expect."""


def joined(by_rank: list[list[str]]) -> list[str]:
    """Say what differs and on which ranks, each difference once."""
    ranks_of: dict[str, list[int]] = {}
    for number, found in enumerate(by_rank):
        for text in found:
            ranks_of.setdefault(text, []).append(number)
    return [f"ranks {numbers}: {text}" for text, numbers in ranks_of.items()]


def compare_paths(
    program: Program, face: str, paths: list[str], may_raise: str | None = None
) -> list[str]:
    """Run a program on this rank, on each path, and say what differs.

    may_raise: the path on which an exception is a difference. Elsewhere it ends the ranks, since
        others may wait. So does DivergenceError there: one rank may have come further than another,
        and the next program of these ranks would begin at different places of their flight record.
    """
    found: list[str] = []
    records: dict[str, Record] = {}
    for path in ([NONE] if program.has_reference else []) + paths:
        if path in records:
            continue
        try:
            records[path] = _run(program, face, path)
        except PathError as error:
            if path == may_raise and not isinstance(error.__cause__, DivergenceError):
                return [str(error)]
            raise
    ours = [path for path in OURS if path in paths]
    pairs: list[tuple[str, str, float]] = []
    if program.has_reference:
        pairs += [(path, NONE, program.reference_tolerance) for path in paths]
    if TORCH in records:
        pairs += [(path, TORCH, program.tolerance) for path in ours]
    if len(ours) == 2:
        pairs.append((*OURS, 0.0))  # the same sums in the same order
    for path in ours:  # ours may warn of what PyTorch warns of
        if TORCH in records:
            theirs = {warning.lower() for warning in records[TORCH].warnings}
            expected = records[NONE].warnings if program.has_reference else []
            own = records[path].warnings
            records[path].warnings = [w for w in own if w in expected or w.lower() not in theirs]
    for path, other, tolerance in pairs:
        is_zero = other == NONE and bool(program.declared(program.zeros, face, path))
        found += [
            f"{path} beside {other}: {text}"
            for text in differences(
                records[path],
                records[other],
                tolerance,
                warnings=TORCH not in (path, other),
                none_is_zero=is_zero,
            )[:4]
        ]
    return found


def _run(program: Program, face: str, path: str) -> Record:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if path == NONE:
                part = rank() // (program.ranks // program.parts)
                record: Any = perform(program, face, path, rank())[part]
            else:
                with use_api(path), gradients_arrive() if path in OURS else nullcontext():
                    record = perform(program, face, path, rank())[0]
        except Exception as error:
            raise PathError(f"{path} raised {type(error).__name__}: {error}") from error
    record.warnings = sorted({f"{w.category.__name__}: {w.message}" for w in caught})
    if path in OURS and program.warns:
        known = [w for w in record.warnings if w.partition(": ")[2].startswith(program.warns)]
        record.warnings = [w for w in record.warnings if w not in known]
        if not known:
            record.warnings.append(f"(nothing begins with {program.warns})")
    return record
