"""A rank that is killed takes everything with it, quickly and by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tools.processes import FOREVER, running


# test_train.py kills one under torchrun, verify/test_command.py has what the launcher says.
@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_others_and_is_named(tmp_path: Path, rank: int) -> None:
    with running(tmp_path / "run", *FOREVER, "--save-every", "2") as run:
        run.wait_for_step(5)  # the save of step 4 waits for that of step 2
        result = run.kill_rank(rank)
    assert result.code == 3, result.err
    assert f"rank {rank} died" in result.err, "said by the rank that is left"
    said = re.search(r"complete checkpoint is of step (\d+) \((.*)\); continue with", result.err)
    assert said, result.err
    assert int(said[1]) in range(2, len(run.losses()) + 1, 2)
    assert said[2] == str(run.folder / "checkpoints" / f"step-{int(said[1]):08d}")
    assert f"rank {rank} (pid " in result.err, "said by the launcher"
    assert "was killed by SIGKILL" in result.err
    assert "Traceback" not in result.err
