"""Files as documents: a file of text is one, and so is each row of a table with a column of text.

    text            bytes as they are
    table           JSON lines, JSON, CSV, Parquet and what `datasets` has saved; a row such as
                    {"text": "Hello", "id": 7} is the document Hello, and read as bytes Hello and a newline

JSON and CSV are read here and not by `datasets`, which the extra `train` does not install, and which takes a row without
text for one, guesses types of columns that nobody asked for, and names no line of a file that it cannot read.
"""

import codecs
import csv
import importlib
import io
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

from fullshard.tools.config import OptionError
from fullshard.tools.text.cache import CorpusError, KeptFile, kept
from fullshard.versions import install_hint

DEFAULT_FIELD = "text"
"""Where text is, unless --text-field says otherwise."""

BINARY_NBYTES = 1024
PIECE_SIZE = 2**20
"""A document is tokenized in pieces of about so many characters."""
_NUM_ROWS = 1000  # read at once
_SAVED = "state.json"  # in the folder of a data set that was saved
_SAVED_SPLITS = "dataset_dict.json"  # in one that holds several, by their splits
SAVED_NAMES = frozenset((_SAVED, _SAVED_SPLITS))
_COMPRESSED = (
    b"\x1f\x8b",
    b"BZh",
    b"\xfd7zXZ",
    b"\x28\xb5\x2f\xfd",
    b"PK\x03\x04",
    b"\x04\x22\x4d\x18",
)
_AS_TEXT = (
    "Lists have to be written as text first, each into a field of its own: docs/training.md, Chats."
)
_CHATS = ("messages", "conversations", "conversation")
_QUESTIONS = ("prompt", "instruction", "question", "query", "input")
_ANSWERS = ("completion", "response", "chosen", "answer", "answers", "output")
_MOST_NAMED = 12
_MOST_HEADER = 2**16
_KINDS = {type(None): "null", bool: "true or false", list: "a list", dict: "an object"}


class Piece(NamedTuple):
    """Part of a document, or all of it. done: how much of its source lies behind it, from 0 to 1."""

    text: str
    ends_document: bool
    done: float


class TextFile:
    """A file whose bytes are the text: one document.

    replace: whether bytes that are not UTF-8 become U+FFFD in it, instead of being an error. Bytes are read as
    they are.
    """

    kind = "text"

    def __init__(self, path: Path, *, replace: bool = False) -> None:
        self.path, self._errors = path, "replace" if replace else "strict"
        self.size = self.nbytes = path.stat().st_size

    def read(self, offset: int, nbytes: int) -> bytes:
        with opened(self.path) as file:
            file.seek(offset)
            part = file.read(nbytes)
        if len(part) != nbytes:
            raise CorpusError(
                f"{self.path} has become shorter since the run started; training text must "
                "not change during a run."
            )
        return part

    def pieces(self) -> Iterator[Piece]:
        """Give the file in pieces that end with a line, where lines are not too long for that."""
        # Without a byte order mark, if there is one.
        decoder = codecs.getincrementaldecoder("utf-8-sig")(errors=self._errors)
        text, position = "", 0
        try:
            with opened(self.path) as file:
                while block := file.read(PIECE_SIZE):
                    position += len(block)
                    text += decoder.decode(block)
                    end = text.rfind("\n") + 1 or len(text)
                    if len(text) > end or position < self.nbytes:
                        yield Piece(text[:end], False, position / self.nbytes)
                        text = text[end:]
            yield Piece(text + decoder.decode(b"", final=True), True, 1.0)
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"{self.path} is not UTF-8 ({error.reason}, byte {error.object[error.start]:#x}). Convert "
                "it, leave it out, or train on bytes, without --tokenizer."
            ) from error


Texts = Iterator[tuple[str | None, float]]
"""The text of each row, None where it has none, and how much of the table is read, from 0 to 1."""


class Table:
    """Rows with a column of text. Read as bytes, each is followed by a newline, and all are written to `cache` first.

    texts: gives them, of a path and a field; raises CorpusError for a column that is not there or is not text.
    """

    def __init__(
        self, path: Path, field: str, cache: Path, texts: Callable[[Path, str], Texts]
    ) -> None:
        self.path, self._field, self._cache, self._texts = path, field, cache, texts
        self.kind = texts.__name__
        self.size = sum(nbytes for _, nbytes, _ in stamp(path))

    def pieces(self) -> Iterator[Piece]:
        """Give the documents, long ones in parts: 2.5 million characters become three pieces."""
        for number, (text, done) in enumerate(self._texts(self.path, self._field), start=1):
            if text is None:
                raise CorpusError(
                    f"{self.path}, row {number}: has no text in {self._field!r}. Filter such rows out."
                )
            for start in range(0, max(1, len(text)), PIECE_SIZE):
                end = start + PIECE_SIZE
                yield Piece(text[start:end], end >= len(text), done)

    @property
    def nbytes(self) -> int:
        return self._flat.nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        return self._flat.read([(offset, nbytes)])[0]

    @cached_property
    def _flat(self) -> KeptFile:
        def write(folder: Path) -> None:
            with (folder / "bytes").open("wb") as file:
                for text, ends, _ in self.pieces():
                    file.write(text.encode() + (b"\n" if ends else b""))

        key = ["bytes", 2, self.kind, self._field, stamp(self.path)]
        return KeptFile(kept(self._cache, key, write) / "bytes")


Source = TextFile | Table
"""Documents in one place. path: what they are called by. size: on the disk, in bytes."""


def json_lines(path: Path, field: str) -> Texts:
    """Read a file of JSON objects, one a line; empty lines are none."""
    size, position = path.stat().st_size, 0
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            position += len(line)
            if line.strip():
                where = f"{path}, line {number}"
                yield _text_of(_parsed(line, where=where), field, where=where), position / size


def json_list(path: Path, field: str) -> Texts:
    """Read a file of JSON that is one list of rows, or an object with one under a key, whole.

    A row is an object, or text, which is column `text`:

        [{"body": "a", "id": 1}, {"body": "b"}]    ["a", "b"]    {"version": 2, "data": [{"body": "a"}]}
    """
    key, rows = _json_rows(path, field)
    if field in (key, DEFAULT_FIELD):
        rows = [{field: row} if isinstance(row, str) else row for row in rows]
    for number, row in enumerate(rows, start=1):
        yield _text_of(row, field, where=f"{path}, entry {number}"), number / len(rows)


def csv_rows(path: Path, field: str) -> Texts:
    """Read comma-separated values, or tab-separated ones, whose first row names the columns."""
    csv.field_size_limit(2**31 - 1)  # 128 KiB otherwise
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            lines = io.TextIOWrapper(file, newline="", encoding="utf-8-sig")
            delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
            rows = csv.DictReader(lines, delimiter=delimiter, strict=True)
            _check_column(path, field, dict.fromkeys(rows.fieldnames or (), True))
            for row in rows:
                yield row[field], file.tell() / size
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CorpusError(
            f"{path}: cannot be read as a table ({error}). Write it as JSON lines or Parquet; to "
            "train on it as plain text, rename it to .txt."
        ) from error


def parquet_rows(path: Path, field: str) -> Texts:
    """Read a file of Apache Parquet."""
    parquet = _library("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path, memory_map=True) as file:
            _check_schema(path, field, file.schema_arrow)
            batches = file.iter_batches(batch_size=_NUM_ROWS, columns=[field])
            columns = (batch.column(0).to_pylist() for batch in batches)
            yield from _counted(columns, file.metadata.num_rows)
    except CorpusError:
        raise
    except (OSError, ValueError) as error:
        raise CorpusError(f"{path}: is no Parquet file that can be read ({error}).") from error


def saved_rows(path: Path, field: str) -> Texts:
    """Read a folder that `datasets.Dataset.save_to_disk` has written."""
    load = _library("datasets").load_from_disk
    try:
        found = load(str(path))
    except Exception as error:  # many kinds, for instance of one without rows
        raise CorpusError(f"{path}: cannot be read by datasets: {error!r}") from error
    _check_schema(path, field, found.data.schema)
    batches = found.select_columns(field).iter(batch_size=_NUM_ROWS)
    yield from _counted((batch[field] for batch in batches), len(found))


TABLES = {".jsonl": json_lines, ".ndjson": json_lines, ".parquet": parquet_rows}
"""How files are read whose names say that they hold a table, whatever is asked of them."""


def _counted(columns: Iterator[Sequence[str | None]], num_rows: int) -> Texts:
    texts = (text for column in columns for text in column)
    for number, text in enumerate(texts, start=1):
        yield text, number / num_rows


def _check_schema(path: Path, field: str, schema: Any) -> None:
    """Raise CorpusError if a column is not text to Arrow; with few different ones they may be kept once, as a dictionary."""
    types = _library("pyarrow.types")
    is_text = (types.is_string, types.is_large_string, types.is_string_view)
    kinds = {
        each.name: each.type.value_type if types.is_dictionary(each.type) else each.type
        for each in schema
    }
    _check_column(
        path, field, {name: any(check(kind) for check in is_text) for name, kind in kinds.items()}
    )


def _check_column(path: Path, field: str, columns: dict[str, bool]) -> None:
    """columns: of each name, whether it holds text."""
    if not columns.get(field):
        raise CorpusError(f"{path}: has no column {field!r} with text. {_what_else(columns)}")


def has_csv_column(path: Path, field: str) -> bool:
    """Whether a CSV file can be read and has a column."""
    try:
        next(csv_rows(path, field), None)
    except CorpusError:
        return False
    return True


def json_reader(
    path: Path, field: str, *, is_given: bool, is_named: bool
) -> Callable[[Path, str], Texts] | None:
    """Return what reads a file as rows of JSON; None where it is plain text.

    is_given: whether the field was named; then whatever is called .json, or begins with an object, has rows.
    is_named: whether the file itself was named; then lines and lists are rows, with the field or without. Else the
    first row has to have the field.
    """
    look = _look_at_json(path)
    if is_given:
        has_rows = path.suffix.lower() == ".json" or isinstance(look.first, dict)
        return look.texts or json_list if has_rows else None
    row = look.first
    if look.texts and (row is None or look.is_object):
        try:
            row = next(iter(_json_rows(path, field)[1]), None)
        except CorpusError:
            return None
    has_field = isinstance(row, dict) and field in row
    is_meant = is_named and not look.is_object and isinstance(row, dict | str)
    return look.texts if has_field or is_meant else None


class _JsonLook(NamedTuple):
    """What the beginning of a file says. texts: what reads its rows; None for what is no JSON.

    first: its first object, or the first of its list, if that is short. is_object: whether it is one object.
    """

    texts: Callable[[Path, str], Texts] | None
    first: object = None
    is_object: bool = False


def _look_at_json(path: Path) -> _JsonLook:
    """Look at the beginning of a file, whatever its name is."""
    with opened(path) as file:
        content = file.read(PIECE_SIZE)
        if content.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
            content += file.readline() + file.read(BINARY_NBYTES)  # a first line may be long
    head = content.decode("utf-8-sig", errors="replace").lstrip()
    if not head.startswith(("[", "{")):
        return _JsonLook(None)
    is_object = head[0] == "{"
    head = head if is_object else head[1:].lstrip()
    try:
        first, end = json.JSONDecoder(parse_int=float).raw_decode(head)
    except (ValueError, RecursionError):
        return _JsonLook(json_list, None, is_object)
    if is_object and head[end:].lstrip().startswith("{"):
        return _JsonLook(json_lines, first)
    return _JsonLook(json_list, first, is_object)


def _json_rows(path: Path, field: str) -> tuple[str, list[object]]:
    """Return the rows, and the key that they are under, or ""."""
    with opened(path) as file:
        value = _parsed(file.read(), where=str(path))
    if isinstance(value, list):
        return "", value
    if not isinstance(value, dict):
        raise CorpusError(f"{path}: is neither a list of objects nor an object.")
    if isinstance(value.get(field), str):
        return "", [value]
    lists = {
        key: rows
        for key, rows in value.items()
        if isinstance(rows, list) and rows and isinstance(rows[0], dict | str)
    }
    having = [
        key
        for key, rows in lists.items()
        if key == field or (isinstance(rows[0], dict) and field in rows[0])
    ]
    if len(keys := having or [*lists]) == 1:
        return keys[0], lists[keys[0]]
    there = f"lists under {_named(keys)}" if keys else "no list of rows"
    raise CorpusError(
        f"{path}: is an object with {there}, so it is not known what to read. Write the rows as JSON "
        "lines; to train on it as plain text, rename it to .txt."
    )


def _parsed(content: bytes, *, where: str) -> object:
    """Return what JSON says; raises CorpusError for what is none, not UTF-8, or nested too deep."""
    try:
        # Text alone is wanted: as a whole number, one of 5,000 digits is an error.
        return json.loads(content, parse_int=float)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{where}: is not JSON ({error}).") from error


def _text_of(entry: object, field: str, *, where: str) -> str:
    """Return the text in a field of an object of JSON; raises CorpusError where there is none."""
    if isinstance(entry, str):
        raise CorpusError(
            f"{where}: is text itself, and no object with a field {field!r}. Leave --text-field out."
        )
    if not isinstance(entry, dict):
        raise CorpusError(f'{where}: is not an object such as {{"{field}": "..."}}.')
    text = entry.get(field)
    if not isinstance(text, str):
        if field in entry:
            kind = _KINDS.get(type(text), "a number")
            what_to_do = "Filter such lines out."
            if isinstance(text, list | dict):
                what_to_do = _of_chats({field: False}) or _AS_TEXT
            raise CorpusError(f"{where}: field {field!r} is {kind}, not text. {what_to_do}")
        columns = {key: isinstance(value, str) for key, value in entry.items()}
        raise CorpusError(f"{where}: has no field {field!r} with text. {_what_else(columns)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CorpusError(
            f"{where}: holds half a character (an escape such as \\ud800 alone, at "
            f"{error.start}), which is no text. Write it whole, or filter the line out."
        ) from error
    return text


def _what_else(columns: Mapping[str, bool]) -> str:
    """Say what to do where a field has no text. columns: of each field, whether it holds text."""
    has = [name for name, is_text in columns.items() if is_text]
    if pair := _of_chats(columns):  # not half of it, as one of its fields would be
        return pair
    if has:
        return f"Name another with --text-field (text is in: {_named(has)})."
    return f"No field has text: leave this file out. {_AS_TEXT}"


def _of_chats(columns: Collection[str]) -> str:
    """Say what to do with conversations, and with questions and answers; "" for anything else."""
    chat = next((name for name in _CHATS if name in columns), "")
    question, answer = (
        next((name for name in names if name in columns), "") for names in (_QUESTIONS, _ANSWERS)
    )
    if not chat and not (question and answer):
        return ""
    what = f"a chat ({chat!r})" if chat else f"a question and its answer ({question!r}, {answer!r})"
    return (
        f"It is {what}, and `fullshard train` learns plain text: to fine-tune on answers see examples/trl_sft.py; to "
        "learn all of it as text, write it so first (docs/training.md, Chats)."
    )


def _named(names: Sequence[str]) -> str:
    """Return the first of many names, each cut: where there is no header, they are text themselves."""
    more = ", ..." if len(names) > _MOST_NAMED else ""
    return ", ".join(f"{name:.60}" for name in names[:_MOST_NAMED]) + more


def is_binary(path: Path) -> bool:
    """Whether a zero byte comes early: text has none, most other formats do. Parquet, which is read, has them too."""
    if path.suffix.lower() == ".parquet":
        return False
    with opened(path) as file:
        return b"\0" in file.read(BINARY_NBYTES)


def first_line(path: Path) -> str:
    """Return the beginning of a file up to the end of a line, or as much as a line of a header has."""
    with opened(path) as file:
        line = file.readline(_MOST_HEADER)
    return line.decode("utf-8-sig", errors="replace").rstrip("\r\n")


def is_compressed(path: Path) -> bool:
    """Whether a file begins as gzip, bzip2, xz, zstd, zip and lz4 do."""
    with opened(path) as file:
        return file.read(8).startswith(_COMPRESSED)


def stamp(path: Path) -> list[tuple[str, int, int]]:
    """Return full name, size and time of change in nanoseconds, which no program can set back, of each file of a source."""
    paths = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    found = ((file.resolve(), file.stat()) for file in paths)
    return [(str(file), status.st_size, status.st_ctime_ns) for file, status in found]


def opened(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise CorpusError(f"{path} cannot be read: {error.strerror}.") from error


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` of a data set, or of a dictionary of several, has written a folder."""
    alone = (folder / _SAVED).is_file() and (folder / "dataset_info.json").is_file()
    return alone or (folder / _SAVED_SPLITS).is_file()


def saved_splits(folder: Path) -> dict[str, Path]:
    """Return the folder of each split; of a data set alone, that one without a name."""
    if not (folder / _SAVED_SPLITS).is_file():
        return {"": folder}
    return {path.parent.name: path.parent for path in sorted(folder.glob(f"*/{_SAVED}"))}


def beside_saved(folder: Path) -> list[Path]:
    """Return what else lies in such a folder, hidden files aside."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [
        path
        for path in files
        if path.suffix not in (".arrow", ".json") and not path.name.startswith(".")
    ]


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise OptionError(
            f"--data: Parquet and saved data sets are read by {name.partition('.')[0]}, which is not installed "
            f"({error}). Install it with: {install_hint('huggingface')}"
        ) from error
