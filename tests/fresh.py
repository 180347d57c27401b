"""Run a program in a Python that has imported nothing yet, or a test in ranks of its own."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.harness import Fate, run_fresh


class Ended(NamedTuple):
    """A program's exit code and standard output."""

    code: int
    out: str


def in_fresh_python(code: str, *arguments: str, options: tuple[str, ...] = ()) -> str:
    """Return what a program writes; it must end well."""
    done = subprocess.run(
        [sys.executable, *options, "-c", code, *arguments],
        env={k: v for k, v in os.environ.items() if k != "FORCE_COLOR"} | {"COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def in_fresh_forks(*programs: str) -> list[Ended]:
    """Run programs, each in a Python that has imported torch alone, and see how each ends."""
    written = in_fresh_python(
        """
import os, sys
import torch.distributed.tensor
for program in sys.argv[1:]:
    if not (child := os.fork()):
        exec(program, {"__name__": "__main__"})
        sys.exit()
    print(end=f"\\0{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\\0", flush=True)
""",
        *programs,
    )
    said, codes = written.split("\0")[::2], written.split("\0")[1::2]
    return [Ended(int(code), text) for code, text in zip(codes, said, strict=False)]


def in_fresh_ranks(world_size: int) -> Callable[[Any], Any]:
    """Make a function a test whose body runs in processes of its own, which it may leave changed."""

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(body)
        def test(**kwargs: Any) -> None:
            for outcome in run_fresh(world_size, body, limit_s=60, **kwargs):
                assert outcome.fate is Fate.RETURNED, outcome.text

        test.__signature__ = inspect.signature(body)  # type: ignore[attr-defined]
        return test

    return decorate
