"""The row of a version of torch that a run of all tests writes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recording import torch_row, with_row

TESTS = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_number(number):
    assert number != 1

@pytest.mark.skip(reason="to be counted")
def test_skipped():
    pass
"""


COUNTS = {"passed": 5300, "failed": 1}
PAGE = """# Versions

| torch | build |
| --- | --- |
| 2.13.0 | cpu |
| 2.9.1 | cpu |

And more | text.
"""


def test_a_version_of_torch_has_one_row_and_those_of_others_stay() -> None:
    row = torch_row("2.15.0+cu132", "2026-11-23", 90, COUNTS, has_long=False)
    assert row == "| 2.15.0 | cu132 | 2026-11-23 | no | 5,300 | 1 | 0 | 1.5 |"
    page = with_row(PAGE, row)
    assert page == PAGE.replace("| 2.13.0 | cpu |", f"{row}\n| 2.13.0 | cpu |")
    assert with_row(page, row) == page
    between = torch_row("2.10.0", "2026-11-23", 90, COUNTS, has_long=True)
    assert between.startswith("| 2.10.0 | unknown | 2026-11-23 | yes |")
    page = with_row(page, between)
    assert re.findall(r"^\| (\d\S*)", page, re.MULTILINE) == ["2.15.0", "2.13.0", "2.10.0", "2.9.1"]
    assert page.endswith("\n\nAnd more | text.\n")


@pytest.mark.long  # it takes six interpreters, and `make test` records nothing
def test_a_run_of_all_tests_is_recorded_and_a_selection_is_not(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    (tmp_path / "test_numbers.py").write_text(TESTS)
    versions = tmp_path / "versions.md"
    versions.write_text(PAGE)

    def run(*selection: str) -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2"]
        command += ["-p", "tests.conftest", "-o", f"testpaths={tmp_path}"]
        command += [f"--record-torch={versions}"]
        done = subprocess.run(
            [*command, *selection], cwd=root, capture_output=True, text=True, check=False
        )
        assert "1 failed" in done.stdout, done.stdout + done.stderr

    run("-k", "number")
    assert versions.read_text() == PAGE
    run("--splits", "1", "--group", "1")
    assert versions.read_text() == PAGE
    run("-m", "not long")
    assert re.search(r"\| no \| 2 \| 1 \| 1 \| [\d.]+ \|$", versions.read_text(), re.MULTILINE)
    run()
    assert re.search(r"\| yes \| 2 \| 1 \| 1 \| [\d.]+ \|$", versions.read_text(), re.MULTILINE)
