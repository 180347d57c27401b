"""Run a program in a Python that has imported nothing yet."""

from __future__ import annotations

import os
import subprocess
import sys


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
