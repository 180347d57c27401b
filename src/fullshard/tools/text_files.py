"""Files of training text: as they are, or JSON lines of which one field is the text.

A line of JSON such as {"text": "Hello", "id": 7} stands for the bytes of Hello and a newline.
"""

import json
from array import array
from bisect import bisect_right
from pathlib import Path
from typing import IO

from fullshard.tools.config import OptionError

BINARY_NBYTES = 1024
_JSON_LINES = frozenset((".jsonl", ".ndjson"))


class CorpusError(OptionError):
    """Text that is missing, unreadable, too short or not what the run was started with."""


class TextFile:
    """A file whose bytes are the text."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nbytes = path.stat().st_size

    def read(self, offset: int, nbytes: int) -> bytes:
        """Raises CorpusError when the file is gone or has shrunk."""
        with _opened(self.path) as file:
            file.seek(offset)
            part = file.read(nbytes)
        if len(part) != nbytes:
            raise CorpusError(
                f"--data: {self.path} has become shorter since the run started; training text must "
                "not change during a run."
            )
        return part


class JsonLines:
    """A file of JSON objects, one a line, whose `field` is the text.

    It is read once to learn where each line begins and how long its text is, 16 bytes a line; a
    window is then taken from the lines that it touches. Two lines with the texts "abc" and "de" at
    offsets 0 and 15 of the file have starts (0, 15) and ends (4, 7). Raises CorpusError for a line
    that is not an object with such a field, a string.
    """

    def __init__(self, path: Path, field: str) -> None:
        self.path, self._field = path, field
        self._starts, self._ends = array("q"), array("q")
        self.nbytes = position = 0
        with _opened(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self.nbytes += len(self._text(line, where=f"line {number}"))
                    self._starts.append(position)
                    self._ends.append(self.nbytes)
                position += len(line)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Raises CorpusError when the file has changed."""
        index = bisect_right(self._ends, offset)
        begin = self._ends[index - 1] if index else 0
        skip, text = offset - begin, b""
        with _opened(self.path) as file:
            while len(text) < skip + nbytes:
                file.seek(self._starts[index])
                line = file.readline()
                if line:
                    text += self._text(line, where=f"byte {self._starts[index]}")
                if begin + len(text) != self._ends[index]:
                    raise CorpusError(
                        f"--data: {self.path} has changed since the run started; training text "
                        "must not change during a run."
                    )
                index += 1
        return text[skip : skip + nbytes]

    def _text(self, line: bytes, *, where: str) -> bytes:
        try:
            entry = json.loads(line)
        except ValueError as error:  # not JSON, or not UTF-8
            raise CorpusError(f"--data: {self.path}, {where}: is not JSON ({error}).") from error
        if not isinstance(entry, dict):
            raise CorpusError(
                f"--data: {self.path}, {where}: is not an object such as "
                f'{{"{self._field}": "..."}}.'
            )
        text = entry.get(self._field)
        if not isinstance(text, str):
            has = ", ".join(key for key, value in entry.items() if isinstance(value, str))
            raise CorpusError(
                f"--data: {self.path}, {where}: has no field {self._field!r} with text. Name "
                f"another with --text-field (text is in: {has or 'none'})."
            )
        return text.encode(errors="replace") + b"\n"


def open_text(path: Path, text_field: str) -> TextFile | JsonLines:
    """Open a file by its name: .jsonl and .ndjson are JSON lines, all else is text."""
    if path.suffix.lower() in _JSON_LINES:
        return JsonLines(path, text_field)
    return TextFile(path)


def is_binary(path: Path) -> bool:
    """Whether a zero byte comes early: text has none, most other formats do."""
    with _opened(path) as file:
        return b"\0" in file.read(BINARY_NBYTES)


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise CorpusError(f"--data: {path} cannot be read: {error.strerror}.") from error
