"""Build the package, and use it as somebody does who has nothing but what was built.

    python3 scripts/check_package.py                            # make package
    python3 scripts/check_package.py --python python3.13        # used with another Python
    python3 scripts/check_package.py --only-build               # without downloading torch

    build       sdist and wheel into dist/; the wheel from the sdist is the wheel from the tree
    describe    twine's strict check of what a package page shows
    alone       a new environment with torch, NumPy and the wheel: import, the README's program on 2 ranks
    types       mypy --strict sees types of the installed wheel
    extras      fullshard[train] trains 3 steps, fullshard[notebook] launches a lambda, fullshard[huggingface]
                trains on tokens as docs/training.md has it

What is downloaded goes into temporary environments, which are removed. Uses the standard library alone, so
that any Python can run it; exits 1 with the output of the step that failed.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
LIMIT_S = 1800  # for one command: a download of torch

TYPED = """
import torch
from typing_extensions import assert_type

import fullshard

model = fullshard.fully_shard(torch.nn.Linear(2, 2))
assert_type(model, torch.nn.Linear)
assert isinstance(model, fullshard.FSDPModule)
model.reshard()
assert_type(fullshard.launch(len, "ab"), list[int])
fullshard.fully_shard(3)  # E: no module
fullshard.no_such_name  # E: not there
"""

LAUNCHED = """
import torch.distributed as dist
import fullshard

print(fullshard.launch(lambda: dist.get_rank(), ranks=2))
"""


class CheckError(Exception):
    """A step failed; the message says how."""


def run(*command: str | Path, cwd: Path | None = None, fails: bool = False) -> str:
    """Run a command without what this shell tells Python, and return what it wrote."""
    words = [str(part) for part in command]
    done = subprocess.run(
        ["/usr/bin/env", "-u", "PYTHONPATH", "-u", "VIRTUAL_ENV", *words],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if (done.returncode != 0) is not fails:
        raise CheckError(f"$ {' '.join(words)}\n{done.stdout}\nexit code {done.returncode}")
    return done.stdout


@contextmanager
def step(what: str) -> Iterator[list[str]]:
    """Say how long a step took, and what it found."""
    found: list[str] = []
    began = time.monotonic()
    print(f"{what} ...", flush=True)
    yield found
    for line in found:
        print(f"    {line}")
    print(f"    {time.monotonic() - began:.0f} s", flush=True)


class Environment:
    """A new virtual environment."""

    def __init__(self, folder: Path, python: str) -> None:
        self.bin = folder / "bin"
        self.python = self.bin / "python"
        run(python, ROOT / "scripts" / "bootstrap_venv.py", folder)

    def install(self, *what: str | Path) -> None:
        """Install packages, of the pinned versions."""
        pip = [self.python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        run(*pip, "--constraint", CONSTRAINTS, *what)

    def packages(self) -> str:
        """Return what is installed, as one line."""
        listed = run(
            self.python, "-m", "pip", "--disable-pip-version-check", "list", "--format=freeze"
        )
        return ", ".join(line for line in listed.splitlines() if "==" in line)


def build(tools: Environment, work: Path, dist: Path) -> tuple[Path, Path]:
    """Build sdist and wheel, and see that the sdist lacks nothing that the wheel is made of."""
    with step("build: sdist, and the wheel from it") as found:
        shutil.rmtree(dist, ignore_errors=True)
        run(tools.python, "-m", "build", "--outdir", dist, ROOT)
        run(tools.python, "-m", "build", "--wheel", "--outdir", work / "tree", ROOT)
        (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
        (from_tree,) = (work / "tree").glob("*.whl")
        if contents(wheel) != contents(from_tree):
            raise CheckError(f"{wheel.name} from the sdist is another one than from the tree")
        for path in (sdist, wheel):
            found.append(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB")
        found.append(f"{len(contents(wheel))} files in the wheel, the same from sdist and tree")
    with step("describe: twine check --strict") as found:
        twine = [tools.python, "-m", "twine", "--no-color", "check", "--strict"]
        found.extend(run(*twine, sdist, wheel).splitlines())
    return sdist, wheel


def contents(wheel: Path) -> dict[str, bytes]:
    """Return the files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def program_of(page: str) -> str:
    """Return the first program of a page."""
    found = re.search(r"(?ms)^```python\n(.*?)^```$", (ROOT / page).read_text())
    assert found
    return found[1]


def use(wheel: Path, tools: Environment, work: Path, python: str) -> None:
    """Install the wheel into a new environment, and use it."""
    (work / "example.py").write_text(program_of("README.md"))
    (work / "prepare.py").write_text(program_of("docs/training.md"))
    (work / "launched.py").write_text(LAUNCHED)
    (work / "typed.py").write_text(TYPED)
    with step(f"alone: {run(python, '--version').strip()}, torch and the wheel") as found:
        fresh = Environment(work / "fresh", python)
        fresh.install(
            next(
                line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch==")
            )
        )
        before = fresh.packages()
        fresh.install(wheel)
        came = [each for each in fresh.packages().split(", ") if each not in before.split(", ")]
        found.append(f"installed beside torch: {', '.join(came)}")
        shown = "import fullshard; print(fullshard.__version__, fullshard.fully_shard, fullshard.__file__)"
        found.append(run(fresh.python, "-c", shown, cwd=work).strip())
        torchrun = [
            fresh.python,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
        ]
        out = run(*torchrun, "example.py", cwd=work)
        losses = re.findall(r"rank \d: loss \d\.\d+", out)
        if len(losses) != 2:
            raise CheckError(f"example.py of the README printed\n{out}")
        found.extend(sorted(losses))
        said = run(fresh.bin / "fullshard", "train", cwd=work, fails=True)
        found.append(f"fullshard train, without its extra: {said.strip().splitlines()[-1]}")
    with step("types: mypy --strict of a program, with the installed wheel") as found:
        tools.install("mypy", "typing_extensions")
        options = ["--strict", "--no-error-summary", "--python-executable", fresh.python]
        said = run(tools.python, "-m", "mypy", *options, "typed.py", cwd=work, fails=True)
        expected = [str(i) for i, line in enumerate(TYPED.splitlines(), 1) if "# E: " in line]
        if re.findall(r"typed\.py:(\d+): error", said) != expected:
            raise CheckError(said)
        found.append(f"types are seen: {len(expected)} planted errors are found, and no other")
    with step("extras: fullshard[train] and fullshard[notebook]") as found:
        fresh.install(f"{wheel}[train,notebook]")
        options = ["--steps", "3", "--model", "tiny", "--ranks", "2", "--device", "cpu"]
        options += ["--sample-length", "20"]
        said = run(fresh.bin / "fullshard", "train", *options, "--out", "run", cwd=work)
        if not (work / "run" / "report.html").exists():
            raise CheckError(f"fullshard train wrote no report:\n{said}")
        found.append("fullshard train --steps 3: wrote run/report.html")
        found.append(
            f"fullshard.launch(lambda): {run(fresh.python, 'launched.py', cwd=work).strip()}"
        )
        tokens = ["--tokenizer", "tokenizer.json", "--data", "code/", "--val-data", "code/"]
        tokens += ["--cache", "cache", "--out", "tokens"]
        (work / "tokenizer.json").touch()
        said = run(fresh.bin / "fullshard", "train", *options, *tokens, cwd=work, fails=True)
        found.append(f"--tokenizer, without its extra: {said.strip().splitlines()[0]}")
    with step("extras: fullshard[huggingface]") as found:
        fresh.install(f"{wheel}[train,huggingface]")
        run(fresh.python, "prepare.py", cwd=work)
        said = run(fresh.bin / "fullshard", "train", *options, *tokens, cwd=work)
        found.extend(re.findall(r"text: .* documents", said))
        if not (work / "tokens" / "report.html").exists():
            raise CheckError(f"fullshard train --tokenizer wrote no report:\n{said}")
        found.append("fullshard train --tokenizer: wrote tokens/report.html")


def main() -> int:
    """Do all steps, or say which one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--python", default=sys.executable, help="the Python that uses the package")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where it is built")
    parser.add_argument("--only-build", action="store_true", help="build and describe, no more")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fullshard-package-") as folder:
        work = Path(folder)
        try:
            tools = Environment(work / "tools", sys.executable)
            tools.install("build", "twine")
            _, wheel = build(tools, work, options.dist.resolve())
            if not options.only_build:
                use(wheel.resolve(), tools, work, options.python)
        except CheckError as error:
            print(error, file=sys.stderr)
            return 1
    print(f"the package is as it should be: {options.dist}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
