"""Which files are text to train on: those that are named, and those of folders.

A folder is one of three kinds. What `datasets` has saved is a data set. A folder with tables (JSON lines, Parquet,
CSV, JSON) is one too if some of these are said to be for training, by the words that `datasets` looks for in names, or if no other
text is in it but what describes it; one of its splits is taken. Any other is a folder of texts.
"""

import dataclasses
import functools
import os
import re
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from fullshard.tools.config import how_to_get
from fullshard.tools.run_folder import RunFolder
from fullshard.tools.text import documents
from fullshard.tools.text.cache import CorpusError

_NUM_NAMED = 3
_NOT_OURS = frozenset(("site-packages", "dist-packages", "__pycache__"))
_DESCRIBES = re.compile(
    r"(README|LICEN[CS]E|NOTICE|CITATION|CHANGELOG)\b.*|.*\.(md|json|ya?ml)", re.I
)
"""Names of files beside the data of a data set."""
# Source of the words: https://huggingface.co/docs/datasets/repository_structure
_TRAIN = "train"
_SPLITS = {
    _TRAIN: "train|training",
    "validation": "validation|valid|val|dev",
    "test": "test|testing|eval|evaluation",
}


@dataclasses.dataclass(frozen=True)
class Use:
    """What text is for: the option that names it, and which splits of a data set it takes, the first there is."""

    option: str
    splits: tuple[str, ...]


TRAINING = Use("--data", (_TRAIN,))
HELD_OUT = Use("--val-data", ("validation", "test"))


@dataclasses.dataclass
class Skipped:
    """The files of --data that are not trained on, by the reason.

    Prints as "2 binary (a.png, b.gif), 1 empty (c.txt)".
    """

    binary: list[str] = dataclasses.field(default_factory=list)
    compressed: list[str] = dataclasses.field(default_factory=list)
    hidden: list[str] = dataclasses.field(default_factory=list)
    empty: list[str] = dataclasses.field(default_factory=list)
    of_earlier_runs: list[str] = dataclasses.field(default_factory=list)
    beside_data: list[str] = dataclasses.field(default_factory=list)
    of_other_splits: list[str] = dataclasses.field(default_factory=list)

    def without(self, held: Sequence[documents.Source]) -> "Skipped":
        """Return the same without text that is held out, which has a use."""
        names = {str(source.path) for source in held}
        others = [name for name in self.of_other_splits if name not in names]
        return dataclasses.replace(self, of_other_splits=others)

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def __str__(self) -> str:
        return ", ".join(
            f"{len(names)} {reason.replace('_', ' ')} ({', '.join(names[:_NUM_NAMED])}"
            f"{', ...' if len(names) > _NUM_NAMED else ''})"
            for reason, names in vars(self).items()
            if names
        )


def find_sources(
    data: Sequence[str], use: Use, *, text_field: str, cache: Path, skipped: Skipped
) -> list[documents.Source]:
    """Open the text of files and folders, in the given order.

    text_field: where rows have their text; "" for none that was given, which is `text`. Folders give their files
    in the order of their relative paths. Notes in `skipped` what is left out. Raises
    CorpusError for a path that does not exist, a binary file that is named itself, and a data set without
    the split that is wanted.
    """
    found: list[documents.Source] = []
    for name in data:
        path = Path(name)
        if path.is_dir() and documents.is_saved_dataset(path):
            splits = documents.saved_splits(path)
            taken = _chosen(splits, use, path)
            skipped.beside_data += map(str, documents.beside_saved(path))
            skipped.of_other_splits += [
                str(folder) for split, folder in splits.items() if split != taken
            ]
            found.append(
                documents.Table(
                    splits[taken],
                    text_field or documents.DEFAULT_FIELD,
                    cache,
                    documents.saved_rows,
                )
            )
            continue
        found += _files_of(path, use, skipped, functools.partial(_opened, text_field, cache))
    return found


def _opened(field: str, cache: Path, path: Path, *, is_named: bool = False) -> documents.Source:
    """Open a file by its name and, where it is called .json or a field is given, by what it holds.

    With a field that is given (not ""), tables are read by it, whatever their names, or refused when they are
    read. Without one, CSV and JSON that have no `text` are plain text, unless they are named and have rows.
    """
    is_given, field = bool(field), field or documents.DEFAULT_FIELD
    kind = path.suffix.lower()
    if kind in documents.TABLES:
        return documents.Table(path, field, cache, documents.TABLES[kind])
    if kind in (".csv", ".tsv"):
        is_table = is_given or is_named or documents.has_csv_column(path, field)
        return (
            documents.Table(path, field, cache, documents.csv_rows)
            if is_table
            else documents.TextFile(path)
        )
    if kind != ".json" and not is_given:
        return documents.TextFile(path)
    texts = documents.json_reader(path, field, is_given=is_given, is_named=is_named)
    if texts is None and kind != ".json":
        _check_no_table(path, field)
    return documents.Table(path, field, cache, texts) if texts else documents.TextFile(path)


def _check_no_table(path: Path, field: str) -> None:
    """Raise CorpusError for a file whose first line names the column, though its name says nothing of a table."""
    for delimiter in ",\t":
        cells = [cell.strip('" ') for cell in documents.first_line(path).split(delimiter)]
        if len(cells) > 1 and field in cells:
            raise CorpusError(
                f"{path}: its first line has {field!r} as the header of a table has. Rename it to .csv, or to .tsv "
                "where tabs part the columns; or train on it as plain text, without --text-field."
            )


def check_apart(sources: Sequence[documents.Source], held: Sequence[documents.Source]) -> None:
    """Raise CorpusError for a file that is to be trained on and held out."""
    training = {source.path.resolve() for source in sources if held}  # of thousands it takes time
    for source in held:
        if source.path.resolve() in training:
            raise CorpusError(
                f"--val-data: {source.path} is text of --data as well. Hold out other text, or a part of that "
                "with --val-fraction."
            )


def python_library() -> list[documents.Source]:
    """Open the source files of Python's own library, without what is installed beside it."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = _in_order(_python_files(root), root)
    # Some are in other encodings, to test those.
    return [documents.TextFile(path, replace=True) for path in paths]


def _files_of(
    path: Path, use: Use, skipped: Skipped, opened: Callable[..., documents.Source]
) -> list[documents.Source]:
    if path.is_file():
        if documents.is_compressed(path):
            raise CorpusError(f"{use.option} {path}: is compressed. Unpack it first.")
        if documents.is_binary(path):
            raise CorpusError(
                f"{use.option} {path}: is not text (a zero byte comes within its first "
                f"{documents.BINARY_NBYTES}), and a folder's files of that kind are skipped. Give text in "
                "UTF-8, which has none."
            )
        return [opened(path, is_named=True)]
    if not path.is_dir() and path.exists():
        raise CorpusError(
            f"{use.option} {path}: is no regular file but a {_kind_of(path)}, and text is read more than once, by "
            "every rank. Write it to a file first."
        )
    if not path.is_dir():
        seen_from = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise CorpusError(
            f"{use.option} {path}: no such file or folder{seen_from}.{how_to_get(str(path), 'dataset')}"
        )
    files = {file: opened(file) for file in _readable(path, use, skipped)}
    return [files[file] for file in _of_data_set(files, path, use, skipped)]


def _kind_of(path: Path) -> str:
    mode = path.stat().st_mode
    kinds = {stat.S_ISFIFO: "pipe", stat.S_ISSOCK: "socket", stat.S_ISCHR: "character device"}
    return next((name for check, name in kinds.items() if check(mode)), "device")


def _readable(path: Path, use: Use, skipped: Skipped) -> list[Path]:
    """Return a folder's files that are neither hidden nor binary, nor of runs of `fullshard train` in it."""
    found = []
    files = _in_order(path.rglob("*"), path)
    runs = {each.parent for each in files if each.name == RunFolder(each.parent).metrics_file.name}
    runs = {each for each in runs if RunFolder(each).config_file.exists()}
    for file in files:
        if any(part.startswith(".") for part in file.relative_to(path).parts):
            skipped.hidden.append(str(file))
        elif not runs.isdisjoint(file.parents):
            skipped.of_earlier_runs.append(str(file))
        elif documents.is_compressed(file):
            skipped.compressed.append(str(file))
        elif documents.is_binary(file):
            skipped.binary.append(str(file))
        else:
            found.append(file)
        if file.name in documents.SAVED_NAMES and documents.is_saved_dataset(file.parent):
            raise CorpusError(
                f"{use.option} {path}: holds a data set in {file.parent}. Name that folder, and others beside it."
            )
    return found


def _of_data_set(
    found: Mapping[Path, documents.Source], path: Path, use: Use, skipped: Skipped
) -> list[Path]:
    """Return the files of one split, or all if the folder is no data set."""
    splits: dict[str, list[Path]] = {}
    others = []
    for file, source in found.items():
        if not isinstance(source, documents.TextFile):
            splits.setdefault(split_of(file.relative_to(path)), []).append(file)
        else:
            others.append(file)
    only_described = all(_DESCRIBES.fullmatch(file.name) for file in others)
    if not splits or not (_TRAIN in splits or only_described):
        return list(found)
    skipped.beside_data += map(str, others)
    taken = _chosen(splits, use, path)
    skipped.of_other_splits += [
        str(file) for split, files in splits.items() if split != taken for file in files
    ]
    return splits[taken]


def split_of(path: Path) -> str:
    """Return the split that a file's name or folder says, or "": data/train-00000-of-00002.parquet is of train."""
    for part in reversed(path.with_suffix("").parts):
        for split, words in _SPLITS.items():
            if re.search(rf"(?:^|[-._ 0-9])(?:{words})(?:[-._ 0-9]|$)", part):
                return split
    return ""


def _chosen(splits: Mapping[str, object], use: Use, path: Path) -> str:
    """Return the name of the split to take. What names none ("") is for training, or is all that there is."""
    nameless = [""] if use is TRAINING or set(splits) == {""} else []
    for wanted in (*use.splits, *nameless):
        if wanted in splits:
            return wanted
    there = ", ".join(split or "no split" for split in splits)
    raise CorpusError(
        f"{use.option} {path}: is a data set without the split {' or '.join(use.splits)} (there is: {there}). "
        "Name the files or the folder of one."
    )


def _python_files(root: Path) -> Iterator[Path]:
    for folder, inner, names in os.walk(root):
        # Not entered: what is installed beside the library is ten times its size.
        inner[:] = [name for name in inner if name not in _NOT_OURS]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _in_order(paths: Iterable[Path], root: Path) -> list[Path]:
    return sorted((p for p in paths if p.is_file()), key=lambda p: p.relative_to(root).as_posix())
