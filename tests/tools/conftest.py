"""A text, and runs on it that ended before or after a checkpoint which holds nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from fullshard.checkpoint.manifest import MANIFEST, Manifest, dumps
from fullshard.tools.config import TrainConfig
from fullshard.tools.run_folder import RunFolder
from fullshard.tools.text.opening import open_text


def save_nothing(checkpoint: Path) -> None:
    """Make a folder that counts as a complete checkpoint."""
    checkpoint.mkdir(parents=True)
    (checkpoint / MANIFEST).write_bytes(dumps(Manifest((), {}, {})))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(32, 127)) * 10)
    return path


@pytest.fixture
def folder(text: Path, tmp_path: Path) -> RunFolder:
    """A run of fifty steps that has ended before its first checkpoint."""
    config = TrainConfig(model="tiny", seq=16, data=(str(text),), steps=50)
    folder = RunFolder(tmp_path / "run")
    fingerprint = open_text(config, None, cache=tmp_path).survey.fingerprint
    folder.start(config, fingerprint=fingerprint, done=0)
    folder.checkpoints.mkdir()
    return folder
