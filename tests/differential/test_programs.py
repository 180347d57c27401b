"""Every program shows the same on every path: ours, PyTorch's, and in a single process.

That takes too long for every change. `make test` compares one of our paths with a single process,
peer memory with one face and process groups with the other; both must be equal in every bit, which
tests/parity/test_matrix.py shows with every option. A program takes one face, the next another, and of
those whose names differ in what follows a hyphen there are two. What has
no single process to be compared with, or is declared to differ, runs on each face and every path.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

from tests.api import OURS, TORCH
from tests.differential.paths import PATHS, compare_paths, joined
from tests.differential.program import ALL_FACES, PROGRAMS, Program, programs_and_faces
from tests.harness import Pools, RankError, Task

THEMES = (
    "modules",
    "autograd",
    "hidden",
    "workflows",
    "optimizers",
    "meshes",
    "settings",
    "faults",
)
for _theme in THEMES:
    importlib.import_module(f"tests.differential.{_theme}")

# A program whose path is declared to fail may hang; it gets less time.
SHORT_S = 5.0


def _few_paths(program: Program, face: str) -> tuple[str, ...]:
    """Return the paths of a program in `make test`."""
    # What is declared of ours may be said of PyTorch's as well, or in comparison with it.
    if not program.has_reference or any(_declared(program, face, path) for path in OURS):
        return PATHS
    number = list(PROGRAMS).index(program.name) + ALL_FACES.index(face)
    return (OURS[number % len(OURS)],)


def _declared(program: Program, face: str, path: str) -> str:
    kinds = (program.broken, program.differs, program.skips)
    return next((text for kind in kinds if (text := program.declared(kind, face, path))), "")


def _is_again(program: Program) -> bool:
    """Whether two programs before it differ from it in one setting alone, which their names end with."""
    family = program.name.partition("-")[0]
    return [name for name in PROGRAMS if name.partition("-")[0] == family].index(program.name) >= 2


def _cases() -> Iterator[object]:
    for program, face in programs_and_faces():
        paths, name = _few_paths(program, face), f"{program.theme}-{program.name}-{face}"
        turn = program.faces[list(PROGRAMS).index(program.name) % len(program.faces)]
        repeats = paths != PATHS and (face != turn or _is_again(program))
        marks = [pytest.mark.long] if repeats else []
        yield pytest.param(program.name, face, paths, id=name, marks=marks)
        if paths != PATHS:
            every = f"{name}-every_path"
            yield pytest.param(program.name, face, PATHS, id=every, marks=pytest.mark.long)


@pytest.mark.parametrize(("name", "face", "among"), [*_cases()])
def test_program(pools: Pools, name: str, face: str, among: tuple[str, ...]) -> None:
    """Run one program on these paths; compare each with one process, and with the others."""
    program = PROGRAMS[name]
    special = [p for p in among if _declared(program, face, p)]
    paths = [p for p in among if p not in special]
    found = _differences(pools, program, face, paths, program.limit_s) if paths else []
    if found and TORCH not in among:  # ours may warn of what PyTorch warns of
        found = _differences(pools, program, face, [TORCH, *paths], program.limit_s)
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
    task = Task(__name__, compare_by_name.__name__, kwargs)
    by_rank: list[list[str]] = pools.run(program.ranks, task, limit_s)
    return joined(by_rank)


def compare_by_name(name: str, face: str, paths: list[str], may_raise: str | None) -> list[str]:
    """Run a declared program on this rank, on each path, and say what differs."""
    return compare_paths(PROGRAMS[name], face, paths, may_raise)
