"""The `fullshard` command before it does anything: help, version, what is missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fullshard
from fullshard import __main__ as command
from fullshard.tools.cli import app
from tests.fresh import in_fresh_python

ROOT = Path(__file__).parent.parent.parent

_COMMAND = """
import sys
from fullshard.__main__ import main
try:
    main()
except SystemExit as end:
    print(end.code, *sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "typed",
    [
        "--help",
        "--version",
        "train -h",
        "report --help",
        "ckpt --help",
        "ckpt diff -h",
        "export --help",
        "doctor --help",
        "launch --help",
        "migrate-report --help",
        "train --no-such-option",
    ],
)
def test_help_does_not_wait_for_torch(typed: str) -> None:
    *said, ended = in_fresh_python(_COMMAND, *typed.split()).splitlines()
    code, *imported = ended.split()
    assert said
    assert code == ("2" if "--no-such" in typed else "0")
    assert "typer" in imported
    assert not {"torch", "numpy", "jinja2", "fullshard.public"} & set(imported)


def test_a_process_that_computes_nothing_does_not_wait_for_the_engine() -> None:
    *said, ended = in_fresh_python(_COMMAND, "report", "absent").splitlines()
    code, *imported = ended.split()
    assert said
    assert code == "2"
    assert not {"fullshard.engine", "torch.distributed.tensor"} & set(imported)


def test_the_version_is_printed() -> None:
    said = in_fresh_python(_COMMAND, "--version").splitlines()[0]
    assert said == f"fullshard {fullshard.__version__}, torch {version('torch')}"


def _without_packages(*words: str) -> subprocess.CompletedProcess[str]:
    program = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); {{}}"
    # -S: nothing that is installed is found.
    program = program.format("import fullshard.__main__ as m; m.main()")
    return subprocess.run(
        [sys.executable, "-S", "-c", program, *words],
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_the_extra_packages_the_command_says_what_to_install() -> None:
    done = _without_packages("train")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("fullshard: the command line needs jinja2, numpy, psutil, rich, ty")
    assert line.endswith('pip install "fullshard[train]"')


def test_without_the_extra_packages_the_version_is_printed() -> None:
    done = _without_packages("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"fullshard {fullshard.__version__}, no torch\n"


def test_the_command_asks_for_the_packages_of_its_extra() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    lists = re.findall(r"^(?:dependencies|train) = \[\n(.*?)^\]", project, re.S | re.M)
    needed = {name for text in lists for name in re.findall(r'"(\w+)>=[^;"]*"', text)}
    assert len(lists) == 2
    assert needed - {"torch"} == set(command._EXTRA)


def test_the_console_script_is_the_module() -> None:
    assert 'fullshard = "fullshard.__main__:main"' in (ROOT / "pyproject.toml").read_text()


def test_names_that_no_file_can_have_are_refused() -> None:
    typed = [sys.executable, "-m", "fullshard", "report", "x" * 5000]
    done = subprocess.run(typed, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "File name too long" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_shell_completes_options() -> None:
    typed = {"COMP_WORDS": "fullshard train --tok", "COMP_CWORD": "2"}
    environment = {"_FULLSHARD_COMPLETE": "complete_bash", **typed}
    done = CliRunner().invoke(app, prog_name="fullshard", env=environment)
    assert done.stdout.split() == ["--tokenizer"]
