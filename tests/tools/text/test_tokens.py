"""Documents of every kind of file as tokens, made once."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fullshard.tools.text import documents, tokens
from fullshard.tools.text.cache import CorpusError
from fullshard.tools.text.documents import TextFile
from fullshard.tools.text.finding import TRAINING, Skipped, find_sources
from fullshard.tools.text.tokenizer import open_tokenizer
from fullshard.tools.text.tokens import Tokens, tokenized
from tests.fresh import in_warm_forks
from tests.tools.text.conftest import Words, all_of, byte_text, word_tokenizer

DOCUMENTS = ["a b c", "", "d", "   ", "e f"]
EXPECTED = [3, 4, 5, 2, 6, 2, 7, 8, 2]
ENDS = [4, 6, 9]


def _tokenized(words: Words, *data: Path, field: str = "text") -> Tokens:
    cache = words.folder / "cache"
    sources = find_sources(
        [str(path) for path in data], TRAINING, text_field=field, cache=cache, skipped=Skipped()
    )
    return tokenized(
        sources, words.tokenizer, text_field=field, cache=cache, progress=lambda *_: None
    )


def _write(kind: str, path: Path, documents: list[str]) -> Path:
    import datasets

    rows = [{"id": n, "body": text} for n, text in enumerate(documents)]
    if kind == "jsonl":
        path = path.with_suffix(".jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        path = path.with_suffix(".parquet")
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
def test_each_row_is_a_document_and_empty_ones_are_none(
    words: Words, tmp_path: Path, kind: str
) -> None:
    found = _tokenized(words, _write(kind, tmp_path / "d", DOCUMENTS), field="body")
    assert all_of(found) == EXPECTED
    assert found.ends.tolist() == ENDS
    assert found.dtype == np.uint16


def test_a_file_of_text_is_a_document(words: Words, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a b\nc")
    (tmp_path / "two.txt").write_text("d")
    found = _tokenized(words, tmp_path / "two.txt", tmp_path / "one.txt")
    assert all_of(found) == [6, 2, 3, 4, 5, 2]
    assert found.ends.tolist() == [2, 6]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize("batch", [1, 5, 1000])
def test_long_documents_are_read_in_pieces_and_marked_once(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, batch: int
) -> None:
    monkeypatch.setattr(documents, "PIECE_SIZE", size)
    monkeypatch.setattr(tokens, "_BATCH_SIZE", batch)
    path = tmp_path / "long.txt"
    path.write_text("a\nb\n\u00e9\nc\nd\n" * 3)
    lines = _write("jsonl", tmp_path / "d", ["a b c d e f", "g"])
    found = _tokenized(words, path)
    assert all_of(found) == [3, 4, 0, 5, 6] * 3 + [2]
    rows = _tokenized(words, lines, field="body")
    assert all_of(rows) == [3, 4, 5, 6, 7, 8, 2, 9, 2]
    assert rows.ends.tolist() == [7, 9]
    assert "".join(piece.text for piece in TextFile(path).pieces()) == path.read_text()


def test_bytes_that_are_no_text_are_refused_but_in_the_library(
    words: Words, tmp_path: Path
) -> None:
    path = tmp_path / "x.txt"
    for content in (b"a \xff b", b"a b\xc3"):
        path.write_bytes(content)
        with pytest.raises(CorpusError, match=r"x\.txt is not UTF-8 \(.*byte 0x(ff|c3)\)"):
            _tokenized(words, path)
    pieces = [piece.text for piece in TextFile(path, replace=True).pieces()]
    assert "".join(pieces) == "a b\ufffd"


def test_what_a_template_has_put_around_a_document_comes_once(tmp_path: Path) -> None:
    word_tokenizer(template="<s> $A").save(str(tmp_path / "tokenizer.json"))
    words = Words(tmp_path, open_tokenizer(tmp_path))
    lines = _write("jsonl", tmp_path / "d", ["<s> a </s>", "b", "<s> c", "d </s>", "</s>"])
    expected = [[1, token, 2] for token in (3, 4, 5, 6)] + [[1, 2]]
    assert all_of(_tokenized(words, lines, field="body")) == [*itertools.chain(*expected)]


def test_a_byte_order_mark_is_no_text(words: Words, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbfa b")
    assert all_of(_tokenized(words, tmp_path / "x.txt")) == [3, 4, 2]


@pytest.mark.parametrize("name", ["tokens", "ends", "ends.crc32", "made.json"])
@pytest.mark.parametrize("cut", [True, False])
def test_what_was_cut_or_removed_is_made_again(
    words: Words, tmp_path: Path, name: str, cut: bool
) -> None:
    path = tmp_path / "x.txt"
    path.write_text("a b c d")
    file = _tokenized(words, path).folder / name
    if cut:
        file.write_bytes(file.read_bytes()[:-2])
    else:
        file.unlink()
    assert all_of(_tokenized(words, path)) == [3, 4, 5, 6, 2]


@pytest.mark.parametrize("name", ["tokens", "tokens.crc32", "ends", "ends.crc32", "bytes"])
def test_other_bytes_than_were_written_are_not_trained_on(
    words: Words, tmp_path: Path, name: str
) -> None:
    """Of tokens, and of a table's column as bytes. What is noticed is made anew."""
    path = _write("parquet", tmp_path / "d", ["a b c d " * 5000])

    def read() -> object:
        if name == "bytes":
            corpus = byte_text([str(path)], seq=4, text_field="body", cache=words.folder / "cache")
            return corpus.read(39_990, 8)
        found = _tokenized(words, path, field="body")
        return found.ends.tolist(), *(part.tolist() for part in found.read([19_990, 1], 6))

    before = read()
    (file,) = (words.folder / "cache").glob(f"*/{name}")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorpusError, match=file.name.removesuffix(".crc32")):
        read()
    assert read() == before


def test_a_cache_that_is_removed_during_a_run_is_named(words: Words, tmp_path: Path) -> None:
    path = _write("parquet", tmp_path / "d", ["a b c d " * 5000])
    begun, other = (_tokenized(words, path, field="body") for _ in range(2))
    assert len(begun.read([3], 2)[0]) == 2
    shutil.rmtree(words.folder / "cache")
    for read in (lambda: begun.read([3], 2), lambda: other.read([3], 2), lambda: other.ends):
        with pytest.raises(CorpusError, match=str(begun.folder)):
            read()


def test_a_change_is_seen_though_size_and_time_are_set_back(words: Words, tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("a b")
    status = path.stat()
    assert all_of(_tokenized(words, path)) == [3, 4, 2]
    path.write_text("c d")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    assert all_of(_tokenized(words, path)) == [5, 6, 2]


def test_it_is_made_once_and_again_when_anything_has_changed(words: Words, tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("a b")
    first = _tokenized(words, path)
    assert _tokenized(words, path).folder == first.folder
    path.write_text("a c")
    second = _tokenized(words, path)
    assert second.folder != first.folder
    assert all_of(second) == [3, 5, 2]
    other = words._replace(tokenizer=_with_end(words, "<s>"))
    assert all_of(_tokenized(other, path)) == [3, 5, 1]


def _with_end(words: Words, end: str):
    from fullshard.tools.text.tokenizer import open_tokenizer

    return open_tokenizer(words.folder, end)


def test_of_processes_that_want_it_at_once_one_makes_it(words: Words, tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("a b c\n" * 20000)
    program = f"""
from pathlib import Path
from fullshard.tools.text.documents import TextFile
from fullshard.tools.text.tokenizer import open_tokenizer
from fullshard.tools.text.tokens import tokenized
words = Path({str(words.folder)!r})
source = TextFile(Path({str(path)!r}))
options = dict(text_field="text", cache=words / "cache", progress=lambda *_: None)
print(tokenized([source], open_tokenizer(words), **options).folder)
"""
    ended = in_warm_forks(*[program] * 3)
    assert [each.code for each in ended] == [0] * 3, ended
    found = {each.out.strip() for each in ended}
    assert len(found) == 1
    kept = sorted(each.name for each in (words.folder / "cache").iterdir())
    assert kept == [Path(*found).name, Path(*found).name + ".lock"]
    assert len(_tokenized(words, path)) == 60001


def test_what_an_interrupted_run_left_is_made_anew(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.txt"
    path.write_text("a b")

    def interrupted(*_: object) -> Iterator[tuple[list[int], bool]]:
        yield [3], False
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tokens, "_parts", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _tokenized(words, path)
    left = [each.suffix for each in (words.folder / "cache").iterdir()]
    assert sorted(left) == [".lock", ".unfinished"]
    assert all_of(_tokenized(words, path)) == [3, 4, 2]


def test_a_cache_that_cannot_be_written_is_named(words: Words, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("a b")
    (words.folder / "cache").write_text("a file")
    with pytest.raises(CorpusError, match=r"--cache .*cache: cannot be written \(File exists\)"):
        _tokenized(words, tmp_path / "x.txt")
