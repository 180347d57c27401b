"""`python -m fullshard` and the `fullshard` console script."""

import io
import sys
from importlib.util import find_spec

from fullshard.versions import install_hint, installed

_EXTRA = ("jinja2", "numpy", "psutil", "rich", "typer")
"""What the extra `train` installs (pyproject.toml); the library itself needs torch alone."""
# What Python chooses, by locale; PYTHONIOENCODING=ascii:replace stays.
_RAISING = ("strict", "surrogateescape")


def main() -> None:
    """Run the command line, or say what has to be installed for it and exit with 2."""
    if sys.argv[1:2] == ["run"]:  # needs no extra; and a script's traceback is its own from here
        from fullshard.tools.run_cli import main as run_script  # noqa: PLC0415 -- as below

        run_script("fullshard run", sys.argv[2:])
        return
    _show_what_the_terminal_can()
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing and sys.argv[1:] == ["--version"]:
        print(installed())
        return
    if missing:
        print(
            f"fullshard: the command line needs {', '.join(missing)}. Install with: "
            f"{install_hint('train')}",
            file=sys.stderr,
        )
        sys.exit(2)
    try:
        from fullshard.tools.cli import main as run_command  # noqa: PLC0415 -- what it imports may be missing

        run_command()
    except KeyboardInterrupt:
        print("fullshard: stopped before anything had begun.", file=sys.stderr)
        sys.exit(130)


def _show_what_the_terminal_can() -> None:
    """Have standard output escape what its encoding lacks, as standard error does by itself."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in _RAISING:
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
