"""The example notebook runs as it stands, and the stop button ends a cell's ranks."""

from __future__ import annotations

import ast
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import fullshard
from fullshard.host import is_running

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
LIMIT_S = 120


def test_the_notebook_holds_no_output_and_uses_names_that_are_there() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not [cell for cell in code if cell["outputs"] or cell["execution_count"]]
    used = {
        node.attr
        for cell in code
        for node in ast.walk(ast.parse("".join(cell["source"])))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "fullshard"
    }
    assert {"fully_shard", "launch"} <= used <= {*fullshard.__all__}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep what Jupyter writes out of the home folder, and let the kernel import what this test does."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    return tmp_path


def _execute(notebook: Any) -> list[str]:
    """Run all cells with a kernel of this Python, and return what each has written to stdout."""
    import nbclient

    nbclient.NotebookClient(notebook, timeout=LIMIT_S, kernel_name="python3").execute()
    return [
        "".join(each["text"] for each in cell.outputs if each.get("name") == "stdout")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.long
def test_the_notebook_runs(place: Path) -> None:
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    _, trained, used, failed = _execute(notebook)
    first, second = sorted(trained.splitlines(), reverse=True)
    assert first.startswith("rank 0 of 2: 0.4")
    assert second.startswith("[rank 1] rank 1 of 2: 0.4")
    assert used.startswith("mean error 0.0")
    assert failed == "1 ValueError('a bad batch')\n"


@pytest.mark.long
def test_the_stop_button_ends_the_ranks_of_a_cell(place: Path) -> None:
    import nbformat

    cells = [
        f"import os; from pathlib import Path; folder = Path({str(place)!r})\n"
        "(folder / 'kernel').write_text(str(os.getpid()))",
        "import fullshard; from tests.launching import jobs\n"
        "try:\n"
        "    fullshard.launch(jobs.waits, folder)\n"
        "except KeyboardInterrupt:\n"
        "    print('stopped')",
        "print('goes on')",
    ]
    ranks = [place / "0", place / "1"]

    def stop() -> None:
        deadline = time.monotonic() + LIMIT_S
        while not all(rank.exists() for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(int((place / "kernel").read_text()), signal.SIGINT)

    button = threading.Thread(target=stop)
    button.start()
    try:
        notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, cells)])
        assert _execute(notebook) == ["", "stopped\n", "goes on\n"]
    finally:
        button.join()
    assert not [rank for rank in ranks if is_running(int(rank.read_text()))]
