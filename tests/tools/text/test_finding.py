"""Which files of folders are text: data sets, their splits, and what lies beside them."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from fullshard.tools.config import TrainConfig
from fullshard.tools.text.cache import CorpusError
from fullshard.tools.text.finding import (
    HELD_OUT,
    TRAINING,
    Skipped,
    Use,
    find_sources,
    split_of,
)
from fullshard.tools.text.opening import open_text
from tests.tools.text.conftest import Words, byte_text


def _names(path: Path, use: Use = TRAINING, skipped: Skipped | None = None) -> list[str]:
    found = find_sources(
        [str(path)],
        use,
        text_field="",
        cache=path / ".cache",
        skipped=Skipped() if skipped is None else skipped,
    )
    return [str(source.path.relative_to(path)) for source in found]


def _folder(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        described = name.endswith("infos.json")
        (path / name).write_text("{}" if described else '{"text": "hello there"}\n')
    return path


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.jsonl", "train"),
        ("data/train-00000-of-00002.parquet", "train"),
        ("my_training_set.jsonl", "train"),
        ("test/part0.jsonl", "test"),
        ("validation/x.jsonl", "validation"),
        ("dev.jsonl", "validation"),
        ("eval-1.jsonl", "test"),
        ("trainer.jsonl", ""),
        ("latest.jsonl", ""),
        ("contest/x.jsonl", ""),
    ],
)
def test_a_split_is_a_word_of_the_path(name: str, split: str) -> None:
    assert split_of(Path(name)) == split


def test_of_a_data_set_one_split_is_taken_and_the_rest_is_said(tmp_path: Path) -> None:
    names = ("data/train-0.jsonl", "data/train-1.jsonl", "data/test-0.jsonl", "data/dev.jsonl")
    _folder(tmp_path, *names, "README.md", "dataset_infos.json")
    skipped = Skipped()
    assert _names(tmp_path, TRAINING, skipped) == ["data/train-0.jsonl", "data/train-1.jsonl"]
    said = str(skipped)
    assert f"2 beside data ({tmp_path}/README.md, {tmp_path}/dataset_infos.json)" in said
    assert "2 of other splits" in said
    assert _names(tmp_path, HELD_OUT) == ["data/dev.jsonl"]
    (tmp_path / "data/dev.jsonl").unlink()
    assert _names(tmp_path, HELD_OUT) == ["data/test-0.jsonl"]


def test_what_is_held_out_is_not_said_to_be_left_out(tmp_path: Path) -> None:
    _folder(tmp_path, "train.jsonl", "test.jsonl")
    text = byte_text([str(tmp_path)], seq=4, val_data=(str(tmp_path),))
    assert not text.remarks
    assert (text.train_nbytes, text.val_nbytes) == (12, 12)


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (["a.jsonl", "b.jsonl"], ["a.jsonl", "b.jsonl"]),
        (["a.jsonl", "test.jsonl"], ["a.jsonl"]),
        (["test_one.txt", "train.txt", "x.jsonl"], ["test_one.txt", "train.txt", "x.jsonl"]),
        (["test.jsonl", "a.txt"], ["a.txt", "test.jsonl"]),
    ],
)
def test_folders_that_name_no_split_for_training(
    tmp_path: Path, names: list[str], taken: list[str]
) -> None:
    assert _names(_folder(tmp_path, *names)) == taken


@pytest.mark.parametrize("beside", ["LICENSE", "load.py", "notes.txt"])
def test_whatever_lies_beside_tables_for_training_they_are_a_data_set(
    tmp_path: Path, beside: str
) -> None:
    _folder(tmp_path, "train.jsonl", "test.jsonl", beside)
    skipped = Skipped()
    assert _names(tmp_path, TRAINING, skipped) == ["train.jsonl"]
    assert skipped.beside_data == [str(tmp_path / beside)]
    assert _names(tmp_path, HELD_OUT) == ["test.jsonl"]


def test_a_split_that_is_not_there_is_asked_for(tmp_path: Path) -> None:
    _folder(tmp_path, "dev.jsonl", "test.jsonl")
    with pytest.raises(
        CorpusError, match=r"without the split train \(there is: validation, test\)"
    ):
        _names(tmp_path)
    only = _folder(tmp_path / "only", "test.jsonl")
    with pytest.raises(CorpusError, match=r"without the split train \(there is: test\)"):
        _names(only)
    other = _folder(tmp_path / "other", "train.jsonl")
    with pytest.raises(CorpusError, match=r"--val-data .*without the split validation or test"):
        _names(other, HELD_OUT)


def test_text_that_is_trained_on_cannot_be_held_out(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("hello there " * 5)
    with pytest.raises(CorpusError, match=r"--val-data: .*a\.txt is text of --data as well"):
        byte_text([str(tmp_path)], seq=4, val_data=(str(path),))


class TestSaved:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        import datasets

        def rows(*texts: str) -> datasets.Dataset:
            return datasets.Dataset.from_dict({"text": list(texts), "n": [*range(len(texts))]})

        splits = {"train": rows("one", "two"), "test": rows("three"), "other": rows("four")}
        datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
        return tmp_path / "saved"

    def test_its_splits_are_told_apart(self, folder: Path) -> None:
        skipped = Skipped()
        assert _names(folder, TRAINING, skipped) == ["train"]
        assert skipped.of_other_splits == [str(folder / "other"), str(folder / "test")]
        assert _names(folder, HELD_OUT) == ["test"]
        assert _names(folder / "other") == ["."]

    def test_what_else_lies_there_is_said(self, folder: Path) -> None:
        (folder / "train.jsonl").write_text('{"text": "five"}')
        skipped = Skipped()
        assert _names(folder, TRAINING, skipped) == ["train"]
        assert skipped.beside_data == [str(folder / "train.jsonl")]

    def test_its_bytes_are_those_of_its_texts_a_line_each(self, folder: Path) -> None:
        corpus = byte_text(
            [str(folder)], seq=2, val_data=(str(folder),), cache=folder.parent / "cache"
        )
        assert corpus.read(0, corpus.train_nbytes) == b"one\ntwo\n"
        assert corpus.read(corpus.train_nbytes, corpus.val_nbytes) == b"three\n"

    def test_a_column_that_is_no_text_is_refused(self, folder: Path) -> None:
        for field in ("n", "nothing"):
            with pytest.raises(
                CorpusError, match=rf"no column '{field}' with text.*text is in: text\)"
            ):
                byte_text([str(folder)], seq=2, text_field=field, cache=folder / "cache")

    def test_a_folder_around_it_is_refused(self, folder: Path) -> None:
        with pytest.raises(CorpusError, match=r"holds a data set in .*Name that folder"):
            _names(folder.parent)


def test_a_row_without_text_and_a_file_that_is_no_table_are_named(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": ["a", None]}).to_parquet(tmp_path / "x.parquet")
    with pytest.raises(CorpusError, match=r"x\.parquet, row 2: has no text in 'text'"):
        byte_text([str(tmp_path)], seq=2, cache=tmp_path / "cache")
    (tmp_path / "x.parquet").write_text("not a table")
    with pytest.raises(CorpusError, match=r"x\.parquet: is no Parquet file"):
        byte_text([str(tmp_path)], seq=2, cache=tmp_path / "cache")


def test_text_is_read_in_every_way_that_arrow_keeps_it(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = ["one", "two", "one"]
    kinds = {
        "plain": pa.array(texts),
        "large": pa.array(texts, pa.large_string()),
        "view": pa.array(texts, pa.string_view()),
        "dictionary": pa.array(texts).dictionary_encode(),
    }
    pq.write_table(pa.table(kinds | {"list": [[text] for text in texts]}), tmp_path / "x.parquet")
    for kind in kinds:
        corpus = byte_text([str(tmp_path)], seq=2, text_field=kind, cache=tmp_path / ".cache")
        assert corpus.read(0, corpus.nbytes) == b"one\ntwo\none\n"
    with pytest.raises(CorpusError, match=r"text is in: plain, large, view, dictionary\)"):
        byte_text([str(tmp_path)], seq=2, text_field="list", cache=tmp_path / ".cache")


def test_a_data_set_without_rows_is_refused(tmp_path: Path) -> None:
    import datasets

    made = datasets.Dataset.from_dict({"text": ["a"]})
    made.select([]).save_to_disk(tmp_path / "empty")
    with pytest.raises(CorpusError, match=r"empty: cannot be read by datasets|0 bytes of text"):
        byte_text([str(tmp_path / "empty")], seq=2, cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.csv", 'id,body\n1,"a, ""b""\nc"\n2,d\n'),
        ("t.tsv", 'id\tbody\n1\t"a, ""b""\nc"\n2\td\n'),
        ("t.json", '[{"body": "a, \\"b\\"\\nc", "id": 1}, {"body": "d"}]'),
        ("t.json", '{"body": "a, \\"b\\"\\nc", "id": 1}\n{"body": "d"}\n'),
    ],
)
def test_a_table_is_read_by_its_column(tmp_path: Path, name: str, content: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / name).write_text(content)
    cache = tmp_path / "cache"
    for path in (folder, folder / name):
        corpus = byte_text([str(path)], seq=4, text_field="body", cache=cache)
        assert corpus.read(0, corpus.nbytes) == b'a, "b"\nc\nd\n'
        config = TrainConfig(data=(str(path),), seq=4, text_field="body")
        said = " ".join(open_text(config, None, cache=cache).notes())
        assert "column 'body' (--text-field)" in said
    if "}\n{" not in content:  # else it may be any JSON
        for path, field in ((folder, "no"), (folder / name, "no"), (folder / name, "text")):
            with pytest.raises(CorpusError, match=r"--text-field \(text is in: .*body"):
                byte_text([str(path)], seq=4, text_field=field, cache=cache)
    assert byte_text([str(folder)], seq=4, cache=cache).read(0, 9) == content.encode()[:9]


_TEXT = "some text of a row. " * 3
_ROWS = {
    "a list of objects, one with a number of 5,000 digits": (
        f'[{{"text": "{_TEXT}", "n": {"9" * 5000}}}]',
        1,
    ),
    "JSON lines with such a number": (f'{{"text": "{_TEXT}", "n": {"9" * 5000}}}\n' * 3, 3),
    "rows under a key": (json.dumps({"version": "1", "data": [{"text": _TEXT}] * 2}), 2),
    "rows under one of several keys": (
        json.dumps({"info": [{"n": 1}], "data": [{"text": _TEXT}]}),
        1,
    ),
    "a list of texts": (json.dumps([_TEXT] * 3), 3),
    "a list of texts under a key": (json.dumps({"data": [_TEXT] * 3}), 3),
    "columns": (json.dumps({"text": [_TEXT] * 2, "name": ["a", "b"]}), 2),
    "one object, over several lines": (json.dumps({"text": _TEXT, "n": [1]}, indent=1), 1),
    "a first row that is longer than is looked at": (
        json.dumps([{"n": "x" * 2**20, "text": _TEXT}]),
        1,
    ),
    "a first line that is": (
        json.dumps({"n": "x" * 2**20, "text": _TEXT}) + f'\n{{"text": "{_TEXT}"}}',
        2,
    ),
    "values that are no JSON of others": (f'[{{"n": NaN, "m": -Infinity, "text": "{_TEXT}"}}]', 1),
    "a byte order mark": ("\ufeff" + json.dumps([{"text": _TEXT}]), 1),
}


_ONLY_BY_NAME = {"a list of texts", "a first row that is longer than is looked at"}


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
    ("name", "form"),
    [("t.json", form) for form in _ROWS]
    + [("t", form) for form in _ROWS if form not in _ONLY_BY_NAME],
)
def test_json_is_read_by_a_field_that_is_given_whatever_its_form(
    tmp_path: Path, words: Words, name: str, form: str, is_packed: bool
) -> None:
    content, num_rows = _ROWS[form]
    (tmp_path / name).write_text(content)
    expected = f"{_TEXT}\n" * num_rows
    config = TrainConfig(
        data=(str(tmp_path / name),), seq=4, text_field="text", tokenizer="x" * is_packed
    )
    text = open_text(config, words.tokenizer if is_packed else None, cache=tmp_path / "cache")
    if is_packed:
        num_words = len(_TEXT.split()) + 1
        assert text.size == f"{num_rows * num_words} tokens"
    else:
        assert text.size == f"{len(expected)} bytes"
    assert any(name in line and "tables" in line for line in text.notes())


_NO_ROWS = {
    "an object without rows": '{"a": 1, "b": {"text": ["x"]}}',
    "rows under several keys": '{"a": [{"x": "y"}], "b": [{"x": "y"}]}',
    "rows without the field": '{"data": [{"body": "hello there"}]}',
    "lists of lists": '[[{"text": "hello there"}]]',
    "numbers": "[1, 2, 3]",
    "a number": "17",
    "a string": '"hello there"',
    "no JSON": "hello there",
    "half of it": '[{"text": "hello there"}, {"te',
    "a comment": '// of ours\n[{"text": "hello there"}]',
    "text and others": '["hello there", 7]',
    "half a character": '[{"text": "hello \\ud800"}]',
    "too deep": "[" * 100_000,
    "too deep, in a key": '{"data":' * 100_000,
    "UTF-16 without a zero byte": "\ufeff\u4e2d\u6587".encode("utf-16-le"),
    "lines without the field": '{"body": "hello"}\n{"body": "there"}\n',
}


@pytest.mark.parametrize("in_folder", [False, True])
@pytest.mark.parametrize("content", _NO_ROWS.values(), ids=_NO_ROWS)
def test_json_without_rows_is_refused_by_name_where_a_field_is_given_and_else_named_as_plain_text(
    tmp_path: Path, words: Words, content: str | bytes, in_folder: bool
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    file = data / "x.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    path, cache = str(data if in_folder else file), tmp_path / "cache"
    given = TrainConfig(data=(path,), seq=1, text_field="text")
    for tokenizer in (None, words.tokenizer):
        with pytest.raises(CorpusError, match=r"x\.json"):
            open_text(given, tokenizer, cache=cache)
    try:
        said = open_text(TrainConfig(data=(path,), seq=1), None, cache=cache).notes()
    except CorpusError as error:  # as of lists of objects, where the field is not in them
        said = [f"as plain text it is refused: {error}"]
    assert any("as plain text" in line and str(file) in line for line in said)


def test_a_table_of_another_name_is_refused_where_a_field_is_given(tmp_path: Path) -> None:
    for name, delimiter in (("t.txt", ","), ("t.dat", "\t")):
        (tmp_path / name).write_text(f'id{delimiter}"text"\n1{delimiter}hello there\n')
        with pytest.raises(CorpusError, match=rf"{name}: .*\.csv"):
            byte_text([str(tmp_path / name)], seq=2, text_field="text")
        assert byte_text([str(tmp_path / name)], seq=2).nbytes > 20
    (tmp_path / "p.txt").write_text("Of text, much is said.\n")
    assert byte_text([str(tmp_path / "p.txt")], seq=2, text_field="text").nbytes == 23


@pytest.mark.parametrize(
    "columns",
    [
        {"messages": [{"role": "user"}]},
        {"id": "1", "conversations": [{"from": "human"}]},
        {"prompt": "a", "completion": "b"},
        {"instruction": "a", "input": "", "output": "b"},
        {"question": "a", "answer": "b"},
    ],
)
def test_chats_are_recognised(tmp_path: Path, columns: dict[str, object]) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps(columns) + "\n")
    with pytest.raises(CorpusError, match=r"plain text.*examples/trl_sft\.py") as caught:
        byte_text([str(path)], seq=2)
    assert "--text-field" not in str(caught.value)  # it would learn half of each
    assert (Path(__file__).parents[3] / "examples" / "trl_sft.py").is_file()


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.json", "t.jsonl"])
def test_a_header_that_is_text_is_not_repeated_whole(tmp_path: Path, name: str) -> None:
    words = "word " * 500
    columns = {f"{words} {number}": "x" for number in range(100)}
    content = json.dumps([columns]) if name == "t.json" else json.dumps(columns)
    if name[2:] in ("csv", "tsv"):
        content = ("," if name == "t.csv" else "\t").join(columns)
    (tmp_path / name).write_text(f"{content}\n")
    with pytest.raises(CorpusError, match=rf"{name}.*text is in: word") as caught:
        byte_text([str(tmp_path / name)], seq=2)
    assert len(str(caught.value)) < 1500


def test_what_is_no_regular_file_is_called_what_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p")
    for path, kind in ((tmp_path / "p", "pipe"), (Path("/dev/null"), "character device")):
        with pytest.raises(CorpusError, match=rf"{path}: .*{kind}.* to a file"):
            byte_text([str(path)], seq=2)


def test_compressed_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b"text"))
    (tmp_path / "a.txt").write_text("some text")
    skipped = Skipped()
    assert _names(tmp_path, TRAINING, skipped) == ["a.txt"]
    assert "1 compressed" in str(skipped)
    with pytest.raises(CorpusError, match=r"x\.jsonl\.gz: is compressed"):
        _names(tmp_path / "x.jsonl.gz")


def test_of_chats_it_is_said_how_they_become_text(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hello"}]}\n' * 9)
    for field in ("text", "messages"):
        with pytest.raises(CorpusError, match=r"docs/training\.md, Chats"):
            byte_text([str(path)], seq=4, text_field=field)


def test_a_path_that_is_not_there_is_said_with_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CorpusError, match=rf"--data nowhere: no such file or folder in {tmp_path}"):
        byte_text(["nowhere"], seq=2)
