"""The README's examples run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_both_apis_have_a_short_example(examples: list[str]) -> None:
    assert [len(example.splitlines()) <= 21 for example in examples] == [True, True]


def test_the_example_of_fully_shard_runs_on_two_ranks(examples: list[str], tmp_path: Path) -> None:
    printed = _run(examples[0], tmp_path)
    assert re.search(r"rank 1: loss [12]\.\d{3}$", printed, re.MULTILINE)
    assert "5 units" in printed
    assert "shard 2" in printed
    assert printed.count("shard 2; peer memory (one host)") == 2 * 5


def test_the_example_of_the_wrapper_runs_on_two_ranks(examples: list[str], tmp_path: Path) -> None:
    printed = _run(examples[1], tmp_path)
    assert re.search(r"rank 1: loss \d\.\d{3}", printed)


def _run(example: str, folder: Path) -> str:
    script = folder / "example.py"
    script.write_text(example)
    logs = folder / "logs"  # one for each rank: in one pipe their lines mix
    launcher = ["torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    launcher += ["--redirects", "1", "--log-dir", str(logs)]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return "".join(path.read_text() for path in logs.rglob("stdout.log"))
