"""The `fullshard` command before it does anything: help, version, what is missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import fullshard
from fullshard import __main__ as command
from fullshard.tools.cli import app
from fullshard.tools.cli_options import _readable
from fullshard.tools.exits import Exit
from tests.fresh import command as program_of
from tests.fresh import fullshard_in_fork, in_fresh_forks

ROOT = Path(__file__).parent.parent.parent

_LISTING = "import atexit, sys\natexit.register(lambda: print(*sys.modules))\n"


def _without_torch(*typed: str) -> tuple[int, str, set[str]]:
    """Type a command; return its exit code, what it says, and the modules that are imported by its end."""
    (done,) = in_fresh_forks(_LISTING + program_of(*typed), imported="fullshard.tools.cli")
    said, _, imported = done.out.rstrip().rpartition("\n")
    return done.code, said + done.err, set(imported.split())


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
        "compare --help",
        "train --no-such-option",
    ],
)
def test_help_does_not_wait_for_torch(typed: str) -> None:
    code, said, imported = _without_torch(*typed.split())
    assert said
    assert code == (2 if "--no-such" in typed else 0)
    assert "typer" in imported
    assert not {"torch", "numpy", "jinja2", "fullshard.public"} & imported


def test_a_process_that_computes_nothing_does_not_wait_for_the_engine() -> None:
    (done,) = in_fresh_forks(_LISTING + program_of("report", "absent"))
    assert done.code == 2
    assert "absent" in done.err
    imported = set(done.out.split())
    assert "fullshard.tools.report" in imported
    assert not {"fullshard.engine", "torch.distributed.tensor"} & imported


_INTERRUPTING = """
import sys

class Interrupting:
    def find_spec(name, *_):
        if name == "torch":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting)
"""


@pytest.mark.parametrize(("rank", "is_heard"), [("0", True), ("1", False)])
def test_a_training_says_that_it_starts_before_torch_is_there(
    tmp_path: Path, *, rank: str, is_heard: bool
) -> None:
    """And what is left, where Ctrl-C comes meanwhile."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step-00000060\n")
    before = f"import os\nos.environ['RANK'] = '{rank}'\n{_INTERRUPTING}"
    for words, left in (
        (("--resume", tmp_path), "checkpoint of step 60"),
        (("--out", tmp_path, "--auto-resume"), "checkpoint of step 60"),
        (("--steps", 3), "nothing to save"),
    ):
        program = before + program_of("train", *words)
        (done,) = in_fresh_forks(program, imported="fullshard.tools.cli")
        lines = done.err.splitlines()
        assert (done.code, done.out, len(lines)) == (130, "", 2 if is_heard else 0)
        assert not is_heard or (lines[0] == "starting ..." and left in lines[1])


def test_the_version_is_printed() -> None:
    _, said, _ = _without_torch("--version")
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
    assert line.endswith(f"pip install '{ROOT}[train]'")


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
    done = fullshard_in_fork("report", "x" * 5000)
    assert done.code == 2
    assert "File name too long" in done.err
    assert "Traceback" not in done.err


def test_a_shell_completes_options() -> None:
    typed = {"COMP_WORDS": "fullshard train --tok", "COMP_CWORD": "2"}
    environment = {"_FULLSHARD_COMPLETE": "complete_bash", **typed}
    done = CliRunner().invoke(app, prog_name="fullshard", env=environment)
    assert done.stdout.split() == ["--tokenizer"]


def _commands() -> dict[str, Any]:
    """Return every command by what is typed for it."""
    group: Any = get_command(app)
    below = group.commands["ckpt"].commands
    return {"": group, **group.commands, **{f"ckpt {name}": each for name, each in below.items()}}


@pytest.mark.parametrize("width", [60, 120])
def test_help_fits_and_names_no_types(width: int) -> None:
    for name in _commands():
        words = [*name.split(), "--help"]
        done = CliRunner().invoke(app, words, env={"COLUMNS": str(width)})
        assert done.exit_code == 0
        assert "-h" in done.stdout
        assert not re.findall(r"<\w+|range\b.*\[x", done.stdout), name
        assert max(map(len, done.stdout.splitlines())) <= width, name
        boxes = re.findall(r"^╭─ ([\w ]+?) ─", done.stdout, re.M)
        assert "Options" not in boxes[2:], f"{name}: --help stands alone"
    assert boxes


@pytest.mark.parametrize("width", [56, 76, 116])
def test_examples_can_be_pasted_from_help_of_any_width(width: int) -> None:
    num_examples = 0
    for name, each in _commands().items():
        whole = [*_readable(each.epilog or "", 10_000)]
        examples = [line.partition("  # ")[0].split() for line in whole if line.startswith("    ")]
        folded = [line for line in _readable(each.epilog or "", width) if line.startswith("    ")]
        pasted = "\n".join(folded).replace(" \\\n", " ").splitlines()
        commands = [line.partition("# ")[0].split() for line in pasted]
        assert [words for words in commands if words] == examples, name
        num_examples += len(examples)
    assert num_examples > 30


def test_a_shell_completes_options_and_sizes_without_torch() -> None:
    for typed, found in (
        ("train --model 1", {"10m", "125m", "1b"}),
        ("train --fine", {"--finetune"}),
        ("run --r", {"--ranks"}),
        ("run --ranks 2 --comm p", {"peer_memory", "process_group"}),
        ("run train.py --r", set()),
        ("run -m pkg.train --r", set()),
    ):
        given = {"COMP_WORDS": f"fullshard {typed}", "COMP_CWORD": str(len(typed.split()))}
        given["_FULLSHARD_COMPLETE"] = "complete_bash"
        program = f"import os\nos.environ.update({given})\n{_LISTING}" + program_of()
        (done,) = in_fresh_forks(program, imported="fullshard.tools.cli")
        *said, imported = done.out.splitlines()
        assert {*said} - {""} == found
        assert "torch" not in imported.split()


@pytest.mark.parametrize("typed", ["train --help", "--version", "ckpt inspect RUN --json"])
def test_a_reader_that_ends_early_is_no_error(typed: str, tmp_path: Path) -> None:
    fullshard.save_checkpoint(tmp_path / "step-00000001", torch.nn.Linear(2, 2), step=1)
    words = typed.replace("RUN", str(tmp_path)).split()
    closed = "import os\nread, write = os.pipe()\nos.close(read)\nos.dup2(write, 1)\n"
    done = fullshard_in_fork(*words, before=closed)
    assert (done.code, done.err) == (1, "")


@pytest.mark.parametrize("typed", ["train --help", "--version"])
@pytest.mark.parametrize("where", ["os.open('/dev/full', os.O_WRONLY)", None])
def test_output_that_cannot_be_written_is_one_line_and_a_code_of_its_own(
    typed: str, where: str | None
) -> None:
    # Python that starts with a closed standard output has none.
    closed = f"os.dup2({where}, 1)" if where else "os.close(1); sys.stdout = None"
    done = fullshard_in_fork(*typed.split(), before=f"import os, sys\n{closed}\n")
    assert (done.code, done.out) == (Exit.UNWRITABLE, "")
    assert len(done.err.splitlines()) == 1
