"""Tables of which one column is text: Parquet, CSV, JSON and what `datasets` has saved to disk. A row is a document."""

import csv
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from fullshard.tools.config import OptionError
from fullshard.tools.text.cache import KeptFile, kept
from fullshard.tools.text.files import (
    DEFAULT_FIELD,
    CorpusError,
    JsonForm,
    JsonLook,
    Piece,
    in_pieces,
    name_another,
    named,
    opened,
    parsed,
    stamp_of,
    text_of,
)

_NUM_ROWS = 1000  # read at once
_SAVED = "state.json"  # in the folder of a data set that was saved
_SAVED_SPLITS = "dataset_dict.json"  # in one that holds several, by their splits
SAVED_NAMES = frozenset((_SAVED, _SAVED_SPLITS))


class Rows(ABC):
    """Rows with a column of text. Read as bytes, each is followed by a newline, and all are written to `cache`.

    Raises CorpusError for a column that is not there or is not text, and for a row without.
    """

    path: Path
    size: int

    def __init__(self, path: Path, field: str, cache: Path) -> None:
        self.path, self._field, self._cache = path, field, cache
        self.size = sum(nbytes for _, nbytes, _ in self.stamp())

    @abstractmethod
    def stamp(self) -> list[tuple[str, int, int]]: ...

    @abstractmethod
    def _batches(self) -> Iterator[Sequence[str | None]]: ...

    @abstractmethod
    def _num_rows(self) -> int: ...

    def pieces(self) -> Iterator[Piece]:
        total, number = self._num_rows(), 0
        for batch in self._batches():
            for text in batch:
                number += 1
                if text is None:
                    raise CorpusError(
                        f"{self.path}, row {number}: has no text in {self._field!r}. Filter such rows out."
                    )
                yield from in_pieces(text, number / total)

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

        key = ["bytes", 1, self._field, self.stamp()]
        return KeptFile(kept(self._cache, key, write) / "bytes")

    def _check_column(self, columns: dict[str, bool]) -> None:
        """columns: of each name, whether it holds text."""
        if not columns.get(self._field):
            has = [name for name, is_text in columns.items() if is_text]
            raise CorpusError(
                f"{self.path}: has no column {self._field!r} with text. {name_another(has)}"
            )


class ParquetFile(Rows):
    """A file of Apache Parquet."""

    def _batches(self) -> Iterator[Sequence[str | None]]:
        try:
            with self._opened() as file:
                for batch in file.iter_batches(batch_size=_NUM_ROWS, columns=[self._field]):
                    yield batch.column(0).to_pylist()
        except (OSError, ValueError) as error:
            if isinstance(error, CorpusError):
                raise
            raise CorpusError(f"{self.path}: cannot be read: {error}") from error

    def _num_rows(self) -> int:
        types = _library("pyarrow.types")
        try:
            with self._opened() as file:
                schema = file.schema_arrow
                self._check_column({each.name: _is_text(each.type, types) for each in schema})
                return int(file.metadata.num_rows)
        except (OSError, ValueError) as error:
            if isinstance(error, CorpusError):
                raise
            raise CorpusError(f"{self.path}: is no Parquet file ({error}).") from error

    def _opened(self) -> Any:
        return _library("pyarrow.parquet").ParquetFile(self.path, memory_map=True)

    def stamp(self) -> list[tuple[str, int, int]]:
        return stamp_of([self.path])


class CsvFile(Rows):
    """A file of comma-separated values, or tab-separated ones, whose first row names the columns."""

    def _batches(self) -> Iterator[Sequence[str | None]]:
        csv.field_size_limit(2**31 - 1)  # 128 KiB otherwise
        try:
            with self.path.open(newline="", encoding="utf-8-sig") as file:
                delimiter = "\t" if self.path.suffix.lower() == ".tsv" else ","
                rows = csv.DictReader(file, delimiter=delimiter, strict=True)
                self._check_column(dict.fromkeys(rows.fieldnames or (), True))
                yield from ([row[self._field]] for row in rows)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise CorpusError(
                f"{self.path}: cannot be read as a table ({error}). Write it as JSON lines or Parquet; to "
                "train on it as plain text, rename it to .txt."
            ) from error

    def _num_rows(self) -> int:
        return sum(1 for _ in self._batches())

    def stamp(self) -> list[tuple[str, int, int]]:
        return stamp_of([self.path])

    def has_column(self) -> bool:
        """Whether the field is one of the columns, or may be: what cannot be read is named when it is read."""
        try:
            next(self._batches(), None)
        except CorpusError:
            return False
        return True


class JsonTable(Rows):
    """A file of JSON that is one list of rows, or an object with one under a key, and is read whole.

    A row is an object, or text, which is column `text`:

        [{"body": "a", "id": 1}, {"body": "b"}]    ["a", "b"]    {"version": 2, "data": [{"body": "a"}]}
    """

    @cached_property
    def _texts(self) -> list[str]:
        key, rows = self._rows()
        if self._field in (key, DEFAULT_FIELD):
            rows = [{self._field: row} if isinstance(row, str) else row for row in rows]
        return [
            text_of(row, self._field, where=f"{self.path}, entry {number}")
            for number, row in enumerate(rows, start=1)
        ]

    def _rows(self) -> tuple[str, list[object]]:
        """Return the rows, and the key that they are under, or ""."""
        with opened(self.path) as file:
            value = parsed(file.read(), where=str(self.path))
        if isinstance(value, list):
            return "", value
        if not isinstance(value, dict):
            raise CorpusError(f"{self.path}: is neither a list of objects nor an object.")
        if isinstance(value.get(self._field), str):
            return "", [value]
        lists = {
            key: rows
            for key, rows in value.items()
            if isinstance(rows, list) and rows and isinstance(rows[0], dict | str)
        }
        having = [
            key
            for key, rows in lists.items()
            if key == self._field or (isinstance(rows[0], dict) and self._field in rows[0])
        ]
        if len(keys := having or [*lists]) == 1:
            return keys[0], lists[keys[0]]
        there = f"lists under {named(keys)}" if keys else "no list of rows"
        raise CorpusError(
            f"{self.path}: is an object with {there}, so it is not known what to read. Write the rows as JSON "
            "lines; to train on it as plain text, rename it to .txt."
        )

    def has_column(self, look: JsonLook, *, is_meant: bool) -> bool:
        """Whether the first row has the field, or, where the file is meant to be trained on, is a row at all."""
        row = look.first
        if row is None or look.form is JsonForm.OBJECT:
            try:
                row = next(iter(self._rows()[1]), None)
            except CorpusError:
                return False
        if isinstance(row, dict) and self._field in row:
            return True
        return is_meant and look.form is JsonForm.LIST and isinstance(row, dict | str)

    def _batches(self) -> Iterator[Sequence[str | None]]:
        yield self._texts

    def _num_rows(self) -> int:
        return len(self._texts)

    def stamp(self) -> list[tuple[str, int, int]]:
        return stamp_of([self.path])


class SavedDataset(Rows):
    """A folder that `datasets.Dataset.save_to_disk` has written."""

    @cached_property
    def _dataset(self) -> Any:
        try:
            found = _library("datasets").load_from_disk(str(self.path))
        except OptionError:
            raise
        except Exception as error:  # many kinds, for instance of one without rows
            raise CorpusError(f"{self.path}: cannot be read by datasets: {error!r}") from error
        types = _library("pyarrow.types")
        schema = found.data.schema
        self._check_column({each.name: _is_text(each.type, types) for each in schema})
        return found.select_columns(self._field)

    def _batches(self) -> Iterator[Sequence[str | None]]:
        for batch in self._dataset.iter(batch_size=_NUM_ROWS):
            yield batch[self._field]

    def _num_rows(self) -> int:
        return len(self._dataset)

    def stamp(self) -> list[tuple[str, int, int]]:
        return stamp_of(sorted(path for path in self.path.iterdir() if path.is_file()))


def _is_text(kind: Any, types: ModuleType) -> bool:
    """Whether a type of Arrow is text; with few different ones they may be kept once, as a dictionary."""
    if types.is_dictionary(kind):
        return _is_text(kind.value_type, types)
    return any(
        check(kind) for check in (types.is_string, types.is_large_string, types.is_string_view)
    )


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


def is_parquet(path: Path) -> bool:
    """Whether a file's name says that it is Parquet."""
    return path.suffix.lower() == ".parquet"


def _library(name: str) -> ModuleType:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise OptionError(
            f"--data: Parquet and saved data sets are read by {name.partition('.')[0]}, which is not installed "
            f'({error}). pip install "fullshard[huggingface]"'
        ) from error
