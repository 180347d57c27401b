"""What `make test-all` writes down."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.recording import Run

TESTS = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_number(number):
    assert number != 1

@pytest.mark.skip(reason="to be counted")
def test_skipped():
    pass
"""


def test_a_record_counts_and_names_what_failed() -> None:
    run = Run(
        began="2026-11-23 06:15",
        commit="1234567",
        machine="2 cores",
        load=(0.1, 2.25),
        seconds=90,
        counts={"passed": 5300, "failed": 1},
        failed=["tests/test_a.py::test_b"],
    )
    text = str(run)
    for line in (
        "| tests | 5,300 passed, 1 failed |",
        "| minutes | 1.5 |",
        "| load | 0.1 before, 2.2 at the end |",
        "- `tests/test_a.py::test_b`",
    ):
        assert f"\n{line}\n" in text


@pytest.mark.long  # it takes six interpreters, and `make test` records nothing
def test_a_run_of_all_tests_is_recorded_and_a_selection_is_not(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    (tmp_path / "test_numbers.py").write_text(TESTS)
    record = tmp_path / "record.md"

    def run(*selection: str) -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2"]
        command += ["-o", f"testpaths={tmp_path}", "--record", str(record)]
        done = subprocess.run(
            [*command, *selection], cwd=root, capture_output=True, text=True, check=False
        )
        assert "1 failed" in done.stdout, done.stdout + done.stderr

    run("-k", "number")
    assert not record.exists()
    run()
    text = record.read_text()
    assert "| tests | 2 passed, 1 failed, 1 skipped |" in text
    assert "test_numbers.py::test_number[1]`" in text
