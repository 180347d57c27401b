"""Every program shows the same on every path: ours, PyTorch's, and in a single process."""

from __future__ import annotations

import importlib

import pytest

from tests.api import TORCH
from tests.differential.paths import PATHS, compare_paths, joined
from tests.differential.program import PROGRAMS, Program, programs_and_faces
from tests.harness import Pools, RankError, Task

THEMES = ("modules", "autograd", "workflows", "optimizers", "meshes", "settings", "faults")
for _theme in THEMES:
    importlib.import_module(f"tests.differential.{_theme}")

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
    task = Task(__name__, compare_by_name.__name__, kwargs)
    by_rank: list[list[str]] = pools.run(program.ranks, task, limit_s)
    return joined(by_rank)


def compare_by_name(name: str, face: str, paths: list[str], may_raise: str | None) -> list[str]:
    """Run a declared program on this rank, on each path, and say what differs."""
    return compare_paths(PROGRAMS[name], face, paths, may_raise)
