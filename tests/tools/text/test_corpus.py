"""Text: which files, in which order, which windows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.tools.config import TrainConfig
from fullshard.tools.run_folder import RunFolder
from fullshard.tools.text import corpus as corpus_module
from fullshard.tools.text.cache import CorpusError
from tests.tools.text.conftest import byte_text


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
    corpus = byte_text([str(folder)], seq=4)
    assert [path.name for path in corpus.paths] == ["a.txt", "two.txt"]
    assert corpus.ends == (10, 16)


def test_what_a_folder_holds_and_is_not_trained_on_is_said_with_its_reason(folder: Path) -> None:
    for name in ("one.gif", "two.gif", "x.gif"):
        (folder / name).write_bytes(b"GIF\0")
    RunFolder(folder / "run").start(TrainConfig(), fingerprint="x", done=0)
    (said,) = byte_text([str(folder)], seq=4).remarks
    binary = ", ".join(str(folder / name) for name in ("image.png", "one.gif", "two.gif"))
    assert said == (
        "of --data, not trained on: "
        f"4 binary ({binary}, ...), 1 hidden ({folder / '.hidden'}), 1 empty ({folder / 'c.txt'}), "
        f"2 of earlier runs ({folder / 'run' / 'config.json'}, {folder / 'run' / 'metrics.jsonl'})"
    )
    assert not byte_text([str(folder / "a.txt")], seq=4).remarks


def test_a_binary_file_is_refused_by_name_and_skipped_by_folder_with_its_reason(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"\0" * 100)
    with pytest.raises(CorpusError, match=r"model\.bin: is not text \(a zero byte .* UTF-8"):
        byte_text([str(path)], seq=4)
    with pytest.raises(CorpusError, match=r"0 bytes of text .* Skipped: 1 binary \(.*model\.bin\)"):
        byte_text([str(tmp_path)], seq=4)


class TestJsonLines:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "books.jsonl"
        lines = ['{"text": "abc", "id": 1}', "", '{"id": 2, "text": "d\\u00e9"}', '{"text": ""}']
        path.write_text("\n".join(lines) + "\n\n" + '{"text": "f\\n"}')
        return path

    def test_the_text_is_that_of_the_field_one_line_each(self, path: Path) -> None:
        corpus = byte_text([str(path)], seq=4)
        whole = "abc\nd\u00e9\n\nf\n\n".encode()
        assert corpus.nbytes == len(whole)
        for start in range(len(whole)):
            for stop in range(start, len(whole) + 1):
                assert corpus.read(start, stop - start) == whole[start:stop]

    def test_it_stands_beside_other_text_in_a_folder(self, path: Path) -> None:
        (path.parent / "a.txt").write_text("first ")
        corpus = byte_text([str(path.parent)], seq=4)
        assert corpus.read(0, 10) == b"first abc\n"

    def test_another_field_is_named(self, path: Path) -> None:
        path.write_text('{"content": "hello", "id": 1}\n' * 5)
        assert byte_text([str(path)], seq=4, text_field="content").read(0, 6) == b"hello\n"
        with pytest.raises(
            CorpusError, match=r"line 1: has no field 'text' .* --text-field .*content"
        ):
            byte_text([str(path)], seq=4)

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("{", "line 2: is not JSON"),
            ("[1]", "line 2: is not an object such as"),
            ('{"text": 7}', "line 2: field 'text' is a number, not text"),
            ('{"text": null}', "line 2: field 'text' is null, not text. Filter"),
            ('{"text": "a \\ud800 b"}', "line 2: holds half a character"),
        ],
    )
    def test_a_line_that_cannot_be_read_is_named(self, path: Path, line: str, said: str) -> None:
        path.write_text('{"text": "abc"}\n' + line)
        with pytest.raises(CorpusError, match=f"books.jsonl, {said}"):
            byte_text([str(path)], seq=4)

    def test_a_run_goes_on_with_the_text_that_it_was_started_with(self, path: Path) -> None:
        corpus = byte_text([str(path)], seq=4)
        path.write_text(path.read_text().replace("abc", "xyz"))
        assert corpus.read(0, 4) == b"abc\n"
        assert byte_text([str(path)], seq=4).read(0, 4) == b"xyz\n"


def test_reading_crosses_file_borders(folder: Path) -> None:
    corpus = byte_text([str(folder)], seq=4)
    whole = b"abcdefghijklmnop"
    for start in range(16):
        for stop in range(start, 17):
            assert corpus.read(start, stop - start) == whole[start:stop]


def test_the_default_is_the_standard_library_without_installed_packages() -> None:
    corpus = byte_text([], seq=256)
    assert corpus.nbytes > 3e6
    assert {"argparse.py", "ast.py"} <= {path.name for path in corpus.paths}
    assert not any("site-packages" in path.parts for path in corpus.paths)


def test_entropy_is_that_of_single_bytes(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"abcd" * 100)
    survey = byte_text([str(path)], seq=4).survey
    assert survey.unigram_entropy == pytest.approx(math.log(4))
    path.write_bytes(b"abdc" * 100)
    assert byte_text([str(path)], seq=4).survey.fingerprint != survey.fingerprint


def test_large_text_is_surveyed_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "_SURVEY_NBYTES", 300)
    monkeypatch.setattr(corpus_module, "_BLOCK_NBYTES", 100)
    path = tmp_path / "text"
    path.write_bytes(b"a" * 500 + b"b" * 500)
    # Blocks at 0, 333 and 666: two of a, one of b.
    expected = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    survey = byte_text([str(path)], seq=4).survey
    assert survey.unigram_entropy == pytest.approx(expected)


@given(seed=st.integers(0, 2**31 - 1), step=st.integers(0, 10**9), index=st.integers(0, 10**6))
def test_every_window_lies_inside(seed: int, step: int, index: int) -> None:
    text = byte_text([__file__], seq=256, seed=seed)
    assert 0 <= text.start(step, index) <= text.nbytes - 257


def test_ranks_share_the_sequences_of_a_step() -> None:
    text = byte_text([__file__], seq=16)

    def draw(first: int, last: int) -> torch.Tensor:
        return text.batch(7, range(first, last)).inputs

    whole = draw(0, 6)
    assert whole.shape == (6, 16)
    assert whole.dtype == torch.int64
    assert torch.equal(whole, torch.cat((draw(0, 2), draw(2, 4), draw(4, 6))))
    assert whole.unique(dim=0).shape[0] == 6
    assert torch.equal(text.batch(7, range(6)).targets[:, :-1], whole[:, 1:])


def test_text_that_shrinks_or_vanishes_is_named(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"abcd" * 100)
    corpus = byte_text([str(path)], seq=4)
    path.write_bytes(b"abcd")
    with pytest.raises(CorpusError, match=r"text has become shorter"):
        corpus.read(100, 10)
    path.unlink()
    with pytest.raises(CorpusError, match=r"text cannot be read: No such file"):
        corpus.read(100, 10)
