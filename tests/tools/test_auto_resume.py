"""`--auto-resume`: one command line that begins a run, goes on with it, and ends when it is done."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fullshard.tools import cli, commands, train
from fullshard.tools.config import TrainConfig
from fullshard.tools.exits import Exit
from fullshard.tools.job import restarted_job
from fullshard.tools.run_folder import RunFolder
from tests.tools.conftest import save_nothing
from tests.tools.processes import PAGES, TINY

RUN = (*TINY, *PAGES, "--trace-steps", "0", "--save-every", "2", "--auto-resume")


def _save(folder: RunFolder, step: int) -> None:
    save_nothing(folder.checkpoints / f"step-{step:08d}")


def test_it_begins_until_there_is_a_checkpoint(folder: RunFolder, text: Path) -> None:
    options = {**vars(TrainConfig(model="tiny", seq=16, data=(str(text),), steps=70))}
    assert restarted_job(options, folder.path / "elsewhere", {}).config.steps == 70
    assert restarted_job(options, folder.path, {}).config.steps == 70
    assert restarted_job(options, folder.path, {}).done == 0
    _save(folder, 20)
    job = restarted_job(options, folder.path, {})
    assert (job.done, job.config.steps) == (20, 50)
    assert restarted_job(options, folder.path, {"steps": 70}).config.steps == 70


def _typed(monkeypatch: pytest.MonkeyPatch, *options: object) -> Result:
    """Call the command, which must not start ranks."""
    monkeypatch.setattr(commands, "launch", lambda *_, **__: pytest.fail("ranks were started"))
    words = ["train", "--device", "cpu", "--auto-resume", *map(str, options)]
    return CliRunner().invoke(cli.app, words)


def test_a_run_that_has_finished_is_left_alone(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(folder, 50)
    result = _typed(monkeypatch, "--out", folder.path, "--steps", 50)
    assert result.exit_code == Exit.OK
    assert result.output == f"{folder.path}: the run has finished; nothing is left to do.\n"


def test_another_run_in_the_folder_is_refused(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(folder, 20)
    result = _typed(monkeypatch, "--out", folder.path, "--model", "10m")
    assert result.exit_code == Exit.USAGE
    assert "this run was started with other options: --model 10m" in result.output


@pytest.mark.parametrize("options", [[], ["--out", "a", "--resume", "a"]], ids=" ".join)
def test_it_needs_the_folder_alone(monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    result = _typed(monkeypatch, *options)
    assert result.exit_code == Exit.USAGE
    assert "--auto-resume: continues the run in --out" in result.output


def test_ranks_that_see_different_checkpoints_do_not_begin(
    folder: RunFolder, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(into: list[tuple[str, int]], own: tuple[str, int]) -> None:
        into[:] = [own, (own[0], 40)]  # as if the other rank's host saw another one

    _save(folder, 20)
    trainer = object.__new__(train.Trainer)
    job = restarted_job({}, folder.path, {})
    trainer.folder, trainer.text = folder, job.text
    monkeypatch.setattr(train.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(train.dist, "all_gather_object", gather)
    with pytest.raises(train.TrainingError, match="rank 1 would begin after step 40, rank 0 after"):
        trainer._check_alike(job)
