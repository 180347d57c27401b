"""Every program shows the same on every path: ours, PyTorch's, and in a single process."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest

from tests.api import OURS, TORCH, use_api
from tests.differential.compare import Record, differences
from tests.differential.program import NONE, PROGRAMS, Program, programs_and_faces
from tests.differential.run import perform
from tests.harness import Pools, RankError, Task, rank

THEMES = ("modules", "autograd", "workflows", "optimizers", "meshes", "settings", "faults")
for _theme in THEMES:
    importlib.import_module(f"tests.differential.{_theme}")

PATHS = (TORCH, *OURS)
# A program whose path is declared to fail may hang; it gets less time.
SHORT_S = 5.0


@pytest.mark.parametrize(
    ("name", "face"),
    [
        pytest.param(p.name, face, id=f"{p.theme}-{p.name}-{face}")
        for p, face in programs_and_faces()
    ],
)
def test_program(pools: Pools, name: str, face: str) -> None:
    """Run one program on all paths; compare each with one process, and with the others."""
    program = PROGRAMS[name]
    special = [p for p in PATHS if _declared(program, face, p)]
    paths = [p for p in PATHS if p not in special]
    found = _differences(pools, program, face, paths, program.limit_s) if paths else []
    for path in special:
        if program.declared(program.skips, face, path):
            continue
        try:
            beside = [TORCH] if path != TORCH and TORCH in paths else []
            differs = _differences(pools, program, face, [*beside, path], SHORT_S, may_raise=path)
        except RankError as error:
            differs = [str(error)]
        if not differs:
            found.append(f"{path} agrees, but is declared not to: {_declared(program, face, path)}")
    assert not found, "\n" + "\n".join(found)


class PathError(RuntimeError):
    """A program raised an exception that it does not expect."""


def _declared(program: Program, face: str, path: str) -> str:
    kinds = (program.broken, program.differs, program.skips)
    return next((text for kind in kinds if (text := program.declared(kind, face, path))), "")


def _differences(
    pools: Pools,
    program: Program,
    face: str,
    paths: list[str],
    limit_s: float,
    *,
    may_raise: str | None = None,
) -> list[str]:
    """Run a program on these paths, on all ranks, and say what differs, without repeats."""
    kwargs = {"name": program.name, "face": face, "paths": paths, "may_raise": may_raise}
    task = Task(__name__, compare_paths.__name__, kwargs)
    by_rank: list[list[str]] = pools.run(program.ranks, task, limit_s)
    ranks_of: dict[str, list[int]] = {}
    for number, found in enumerate(by_rank):
        for text in found:
            ranks_of.setdefault(text, []).append(number)
    return [f"ranks {numbers}: {text}" for text, numbers in ranks_of.items()]


def compare_paths(name: str, face: str, paths: list[str], may_raise: str | None) -> list[str]:
    """Run a program on this rank, on each path, and say what differs.

    may_raise: the path on which an exception is a difference. Elsewhere it ends the ranks, since
        others may wait.
    """
    program = PROGRAMS[name]
    found: list[str] = []
    records: dict[str, Record] = {}
    for path in ([NONE] if program.has_reference else [TORCH]) + paths:
        if path in records:
            continue
        try:
            records[path] = _run(program, face, path)
        except PathError as error:
            if path == may_raise:
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
            own = records[path].warnings
            records[path].warnings = [w for w in own if w.lower() not in theirs]
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
                with use_api(path):
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
