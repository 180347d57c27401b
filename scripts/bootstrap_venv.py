"""Create a virtual environment with pip, also where Debian's python3 comes without ensurepip.

    python3 scripts/bootstrap_venv.py .venv

Tried in this order, none of which changes the system or needs root:
    1. `python3 -m venv`, when the interpreter carries ensurepip;
    2. an environment without pip, filled by the pip of the interpreter that runs this script;
    3. the same, filled by the pip wheel of Debian's own `python3-pip-whl` package, which apt-get
       downloads into a temporary folder with package lists of its own.
Uses the standard library alone. Exits 1 with the command that helps when all three fail.
"""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

MIN_PYTHON = (3, 10)


class BootstrapError(Exception):
    """One of the three ways is not open here; the message says why."""


def _run(*command: str | Path, cwd: Path | None = None) -> None:
    """Run a command quietly; raise BootstrapError with the end of its output when it fails."""
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, text=True, capture_output=True, check=False
    )
    if result.returncode != 0:
        tail = "\n".join((result.stdout + result.stderr).strip().splitlines()[-3:])
        raise BootstrapError(f"{Path(command[0]).name} {command[1]} failed: {tail}")


def with_ensurepip(target: Path) -> None:
    if importlib.util.find_spec("ensurepip") is None:
        raise BootstrapError("this interpreter has no ensurepip")
    # A subprocess, because ensurepip may be present and still refuse to work.
    _run(sys.executable, "-m", "venv", "--clear", target)


def with_own_pip(target: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise BootstrapError("this interpreter has no pip")
    venv.create(target, clear=True, with_pip=False, symlinks=True)
    _run(sys.executable, "-m", "pip", "--python", target / "bin" / "python", "install", "pip")


def with_debian_wheel(target: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise BootstrapError("apt-get and dpkg-deb are not here")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for name in ("lists/partial", "cache/archives/partial"):
            (work / name).mkdir(parents=True)
        private = [
            "-o", f"Dir::State::lists={work / 'lists'}",
            "-o", f"Dir::Cache={work / 'cache'}",
            "-o", "APT::Sandbox::User=",
        ]  # fmt: skip
        print("bootstrap: fetching Debian's pip wheel (about 10 s) ...", file=sys.stderr)
        _run("apt-get", *private, "-q", "update")
        _run("apt-get", *private, "-q", "download", "python3-pip-whl", cwd=work)
        package = next(work.glob("python3-pip-whl_*.deb"))
        _run("dpkg-deb", "-x", package, work / "unpacked")
        wheel = next(work.glob("unpacked/usr/share/python-wheels/pip-*.whl"))
        venv.create(target, clear=True, with_pip=False, symlinks=True)
        # A wheel is a zip file on which Python can run a package: pip installs itself.
        _run(target / "bin" / "python", wheel / "pip", "install", "--no-index", wheel)


def main(target: Path) -> int:
    if sys.version_info < MIN_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        needed = ".".join(map(str, MIN_PYTHON))
        print(
            f"bootstrap: {sys.executable} is Python {found}; fullshard needs {needed} or newer.\n"
            "Name another one: make PYTHON=python3.12 train",
            file=sys.stderr,
        )
        return 1
    reasons = []
    for way in (with_ensurepip, with_own_pip, with_debian_wheel):
        try:
            way(target)
        except BootstrapError as error:
            reasons.append(f"  {way.__name__}: {error}")
        else:
            return 0
    shutil.rmtree(target, ignore_errors=True)
    print(
        f"bootstrap: cannot create {target} with pip:\n"
        + "\n".join(reasons)
        + "\nInstall it once, then run make again: sudo apt install python3-venv",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
