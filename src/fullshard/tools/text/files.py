"""Files of text: as they are, or JSON lines of which one field is the text.

A line of JSON such as {"text": "Hello", "id": 7} is a document. Read as bytes, it stands for those of Hello
and a newline.
"""

import codecs
import enum
import json
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from fullshard.tools.config import OptionError

DEFAULT_FIELD = "text"
"""Where text is, unless --text-field says otherwise."""

BINARY_NBYTES = 1024
PIECE_SIZE = 2**20
"""A document is tokenized in pieces of about so many characters."""
_JSON_LINES = frozenset((".jsonl", ".ndjson"))
_COMPRESSED = (
    b"\x1f\x8b",
    b"BZh",
    b"\xfd7zXZ",
    b"\x28\xb5\x2f\xfd",
    b"PK\x03\x04",
    b"\x04\x22\x4d\x18",
)
_AS_TEXT = "Chats and other lists have to be written as text first, each into a field of its own: docs/data.md, Chats."
_MOST_NAMED = 12
_MOST_HEADER = 2**16
_KINDS = {type(None): "null", bool: "true or false", list: "a list", dict: "an object"}


class CorpusError(OptionError):
    """Text that is missing, unreadable, too short or not what the run was started with."""


class Piece(NamedTuple):
    """Part of a document, or all of it. done: how much of its source lies behind it, from 0 to 1."""

    text: str
    ends_document: bool
    done: float


class Source(Protocol):
    """Documents in one place. path: what they are called by. size: on the disk, in bytes."""

    path: Path
    size: int

    def pieces(self) -> Iterator[Piece]:
        """Give the documents one after the other; raises CorpusError where there is none to read."""
        ...

    def stamp(self) -> list[tuple[str, int, int]]:
        """Return name, size and time of change of what is read: other text has another stamp."""
        ...


class ByteSource(Source, Protocol):
    """Documents that can be read as one string of bytes as well."""

    @property
    def nbytes(self) -> int: ...

    def read(self, offset: int, nbytes: int) -> bytes:
        """Raises CorpusError when the file is gone or has changed."""
        ...


class TextFile:
    """A file whose bytes are the text: one document.

    replace: whether bytes that are not UTF-8 become U+FFFD in it, instead of being an error. Bytes are read as
    they are.
    """

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

    def stamp(self) -> list[tuple[str, int, int]]:
        return stamp_of([self.path])


class JsonLines:
    """A file of JSON objects, one a line, whose `field` is the text.

    To be read as bytes it is first read once, to learn where each line begins and how long its text is, 16
    bytes a line; a window is then taken from the lines that it touches. Two lines with the texts "abc" and
    "de" at offsets 0 and 15 of the file have starts (0, 15) and ends (4, 7). Raises CorpusError for a line
    that is not an object with such a field, a string.
    """

    def __init__(self, path: Path, field: str) -> None:
        self.path, self._field = path, field
        self.size = path.stat().st_size

    @cached_property
    def _lines(self) -> tuple["array[int]", "array[int]"]:
        starts, ends = array("q"), array("q")
        end = position = 0
        for line, text, _ in self._texts():
            if text is not None:
                end += len(_as_bytes(text))
                starts.append(position)
                ends.append(end)
            position += len(line)
        return starts, ends

    @property
    def nbytes(self) -> int:
        ends = self._lines[1]
        return ends[-1] if ends else 0

    def read(self, offset: int, nbytes: int) -> bytes:
        starts, ends = self._lines
        index = bisect_right(ends, offset)
        begin = ends[index - 1] if index else 0
        skip, text = offset - begin, b""
        with opened(self.path) as file:
            while len(text) < skip + nbytes:
                file.seek(starts[index])
                line = file.readline()
                if line:
                    text += _as_bytes(self._text(line, where=f"byte {starts[index]}"))
                if begin + len(text) != ends[index]:
                    raise CorpusError(
                        f"{self.path} has changed since the run started; training text "
                        "must not change during a run."
                    )
                index += 1
        return text[skip : skip + nbytes]

    def pieces(self) -> Iterator[Piece]:
        for _, text, done in self._texts():
            if text is not None:
                yield from in_pieces(text, done)

    def stamp(self) -> list[tuple[str, int, int]]:
        return stamp_of([self.path])

    def _texts(self) -> Iterator[tuple[bytes, str | None, float]]:
        """Give each line, its text, or None for an empty line, and how much of the file is done."""
        position = 0
        with opened(self.path) as file:
            for number, line in enumerate(file, start=1):
                position += len(line)
                text = self._text(line, where=f"line {number}") if line.strip() else None
                yield line, text, position / self.size

    def _text(self, line: bytes, *, where: str) -> str:
        where = f"{self.path}, {where}"
        return text_of(parsed(line, where=where), self._field, where=where)


def parsed(content: bytes, *, where: str) -> object:
    """Return what JSON says; raises CorpusError for what is none, not UTF-8, or nested too deep."""
    try:
        # Text alone is wanted: as a whole number, one of 5,000 digits is an error.
        return json.loads(content, parse_int=float)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{where}: is not JSON ({error}).") from error


def text_of(entry: object, field: str, *, where: str) -> str:
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
            what_to_do = _AS_TEXT if isinstance(text, list | dict) else "Filter such lines out."
            raise CorpusError(f"{where}: field {field!r} is {kind}, not text. {what_to_do}")
        has = [key for key, value in entry.items() if isinstance(value, str)]
        raise CorpusError(f"{where}: has no field {field!r} with text. {name_another(has)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CorpusError(
            f"{where}: holds half a character (an escape such as \\ud800 alone, at "
            f"{error.start}), which is no text. Write it whole, or filter the line out."
        ) from error
    return text


def name_another(has: Sequence[str]) -> str:
    """Say what to do where a field has no text. has: those that have."""
    is_in = named(has) or "none"
    return f"Name another with --text-field (text is in: {is_in}).{'' if has else f' {_AS_TEXT}'}"


def named(names: Sequence[str]) -> str:
    """Return the first of many names, each cut: where there is no header, they are text themselves."""
    more = ", ..." if len(names) > _MOST_NAMED else ""
    return ", ".join(f"{name:.60}" for name in names[:_MOST_NAMED]) + more


def is_json_lines(path: Path) -> bool:
    """Whether a file's name says that it holds JSON lines."""
    return path.suffix.lower() in _JSON_LINES


def is_binary(path: Path) -> bool:
    """Whether a zero byte comes early: text has none, most other formats do."""
    with opened(path) as file:
        return b"\0" in file.read(BINARY_NBYTES)


class JsonForm(enum.Enum):
    """What a file of JSON is: objects, one a line; or one value, a list or an object; or no JSON."""

    LINES = enum.auto()
    LIST = enum.auto()
    OBJECT = enum.auto()
    NONE = enum.auto()


class JsonLook(NamedTuple):
    """What the beginning of a file of JSON says. first: its first object, or the first of its list, if that is short."""

    form: JsonForm
    first: object = None


def look_at_json(path: Path) -> JsonLook:
    """Look at the beginning of a file, whatever its name is."""
    with opened(path) as file:
        content = file.read(PIECE_SIZE)
        if content.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
            content += file.readline() + file.read(BINARY_NBYTES)  # a first line may be long
    head = content.decode("utf-8-sig", errors="replace").lstrip()
    if not head.startswith(("[", "{")):
        return JsonLook(JsonForm.NONE)
    form = JsonForm.LIST if head[0] == "[" else JsonForm.OBJECT
    head = head[form is JsonForm.LIST :].lstrip()
    try:
        first, end = json.JSONDecoder(parse_int=float).raw_decode(head)
    except (ValueError, RecursionError):
        return JsonLook(form)
    if form is JsonForm.OBJECT and head[end:].lstrip().startswith("{"):
        form = JsonForm.LINES
    return JsonLook(form, first)


def first_line(path: Path) -> str:
    """Return the beginning of a file up to the end of a line, or as much as a line of a header has."""
    with opened(path) as file:
        line = file.readline(_MOST_HEADER)
    return line.decode("utf-8-sig", errors="replace").rstrip("\r\n")


def is_compressed(path: Path) -> bool:
    """Whether a file begins as gzip, bzip2, xz, zstd, zip and lz4 do."""
    with opened(path) as file:
        return file.read(8).startswith(_COMPRESSED)


def in_pieces(text: str, done: float) -> Iterator[Piece]:
    """Cut a document that is long: 2.5 million characters become three pieces."""
    for start in range(0, max(1, len(text)), PIECE_SIZE):
        end = start + PIECE_SIZE
        yield Piece(text[start:end], end >= len(text), done)


def stamp_of(paths: list[Path]) -> list[tuple[str, int, int]]:
    """Return each file's full name, size and time of change in nanoseconds, which no program can set back."""
    found = ((path.resolve(), path.stat()) for path in paths)
    return [(str(path), status.st_size, status.st_ctime_ns) for path, status in found]


def _as_bytes(text: str) -> bytes:
    return text.encode() + b"\n"


def opened(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise CorpusError(f"{path} cannot be read: {error.strerror}.") from error
