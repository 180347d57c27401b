"""Text: which files, in which order, which windows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.tools.corpus import CorpusError, draw_batch, open_corpus, window_start


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_bytes(b"klmnop")
    (tmp_path / "a.txt").write_bytes(b"abcdefghij")
    (tmp_path / "c.txt").write_bytes(b"")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0\0\0")
    (tmp_path / ".hidden").write_bytes(b"secret")
    return tmp_path


def test_folders_give_their_text_in_order(folder: Path) -> None:
    corpus = open_corpus([str(folder)], seq=4)
    assert [path.name for path in corpus.paths] == ["a.txt", "two.txt"]
    assert corpus.ends == (10, 16)


def test_reading_crosses_file_borders(folder: Path) -> None:
    corpus = open_corpus([str(folder)], seq=4)
    whole = b"abcdefghijklmnop"
    for start in range(16):
        for stop in range(start, 17):
            assert corpus.read(start, stop - start) == whole[start:stop]


def test_the_default_is_the_standard_library_without_installed_packages() -> None:
    corpus = open_corpus([], seq=256)
    assert corpus.nbytes > 3e6
    assert {"argparse.py", "ast.py"} <= {path.name for path in corpus.paths}
    assert not any("site-packages" in path.parts for path in corpus.paths)


def test_entropy_is_that_of_single_bytes(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"abcd" * 100)
    survey = open_corpus([str(path)], seq=4).survey
    assert survey.unigram_entropy == pytest.approx(math.log(4))
    path.write_bytes(b"abdc" * 100)
    assert open_corpus([str(path)], seq=4).survey.fingerprint != survey.fingerprint


def test_large_text_is_surveyed_in_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("fullshard.tools.corpus._SURVEY_NBYTES", 300)
    monkeypatch.setattr("fullshard.tools.corpus._BLOCK_NBYTES", 100)
    path = tmp_path / "text"
    path.write_bytes(b"a" * 500 + b"b" * 500)
    # Blocks at 0, 333 and 666: two of a, one of b.
    expected = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert open_corpus([str(path)], seq=4).survey.unigram_entropy == pytest.approx(expected)


@given(seed=st.integers(0, 2**31 - 1), step=st.integers(0, 10**9), index=st.integers(0, 10**6))
def test_every_window_lies_inside(seed: int, step: int, index: int) -> None:
    corpus = open_corpus([__file__], seq=256)
    start = window_start(corpus, seq=256, seed=seed, step=step, index=index)
    assert 0 <= start <= corpus.nbytes - 257


def test_ranks_share_the_sequences_of_a_step() -> None:
    corpus = open_corpus([__file__], seq=16)

    def draw(first: int, last: int) -> torch.Tensor:
        return draw_batch(corpus, seq=16, seed=1, step=7, indices=range(first, last))

    whole = draw(0, 6)
    assert whole.shape == (6, 17)
    assert whole.dtype == torch.int64
    assert torch.equal(whole, torch.cat((draw(0, 2), draw(2, 4), draw(4, 6))))
    assert whole.unique(dim=0).shape[0] == 6


def test_text_that_shrinks_or_vanishes_is_named(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"abcd" * 100)
    corpus = open_corpus([str(path)], seq=4)
    path.write_bytes(b"abcd")
    with pytest.raises(CorpusError, match=r"text has become shorter"):
        corpus.read(100, 10)
    path.unlink()
    with pytest.raises(CorpusError, match=r"text cannot be read: No such file"):
        corpus.read(100, 10)
