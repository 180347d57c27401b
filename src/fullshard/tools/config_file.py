"""Options of a command from a file: `--config run.toml`.

Keys are the options' names, with hyphens or underscores. What is typed comes before what the file says,
and that before the defaults.

    model = "35m"
    data = ["books/", "notes.txt"]
    grad-accum = 4

A run's folder, or its config.json, is such a file too: it has every option that the run was started with.
"""

import re
import sys
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fullshard.json_files import LARGEST, Refuse, as_typed, parse_json, read_text
from fullshard.tools.config import OptionError

_MOST_NBYTES = 16 << 20
_MOST_DOTS = 1000
_TEXT = re.compile(r'"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'')  # between quotes, where dots are no keys


def read_options(
    path: Path,
    *,
    known: Collection[str],
    flags: Collection[str] = (),
    lists: Collection[str] = (),
) -> dict[str, Any]:
    """Return what a file says, by names with underscores.

    known: names of options. flags, lists: those that are true or false, and those that may repeat. Raises
    OptionError for a file that cannot be read, a name that is not known or comes twice, and a value of a kind
    that its option does not take.
    """
    if path.is_dir():
        path = path / "config.json"
    found: dict[str, Any] = {}
    for name, value in _read(path).items():
        key = name.replace("-", "_")
        if key in found:
            raise OptionError(f"--config {path}: {key} comes twice, with - and with _. Keep one.")
        found[key] = value
    for key, value in found.items():
        if key not in known:
            close = get_close_matches(key, known, n=1)
            hint = f" Did you mean {close[0]}?" if close else f" Known: {', '.join(sorted(known))}."
            raise OptionError(f"--config {path}: there is no option {key}.{hint}")
        parts = value if isinstance(value, list) else [value]
        if any(isinstance(part, int) and not -LARGEST <= part < LARGEST for part in parts):
            raise OptionError(f"--config {path}: {key} is a number that is far too large.")
        if not all(isinstance(part, str | int | float | bool) for part in parts):
            raise OptionError(
                f"--config {path}: {key} is {_shown(value)}; give text, a number, true, false, or a list."
            )
        if key in flags and not isinstance(value, bool):
            raise OptionError(f"--config {path}: {key} is {_shown(value)}; give true or false.")
        if key not in flags and any(isinstance(part, bool) for part in parts):
            raise OptionError(f"--config {path}: {key} is {_shown(value)}; give text or a number.")
        if key in lists:
            found[key] = parts
        elif isinstance(value, list):
            raise OptionError(
                f"--config {path}: {key} is {_shown(value)}; give one value, not a list."
            )
    if path.name == "config.json":
        found |= _copies(path.parent, found)
    return found


def _shown(value: Any) -> str:
    """Write a value for a message, cut; Python does not write out numbers of many thousand digits."""
    try:
        return f"{value!r:.200}"
    except ValueError:
        return "a number that is far too large"


def _copies(run: Path, found: Mapping[str, Any]) -> dict[str, str]:
    """Return the run's own copies of what its options name: the originals may be gone, or others by now."""
    copies = {"tokenizer": run / "tokenizer", "model": run / "model.json"}
    return {name: str(copy) for name, copy in copies.items() if found.get(name) and copy.exists()}


def _read(path: Path) -> Mapping[str, Any]:
    def refuse(why: str) -> OptionError:
        return OptionError(f"--config {path}: {why}. Name a TOML file, or a run's folder.")

    text = read_text(path, refuse, most_nbytes=_MOST_NBYTES)
    if path.suffix != ".json":
        return _toml(text, refuse)
    fields: dict[str, Any] = parse_json(text, dict[str, Any], refuse)
    if "options" in fields:
        return dict(as_typed(fields["options"], dict[str, Any], refuse))
    return fields


def _toml(text: str, refuse: Refuse) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    # The parser's time grows with the square of the dots of one key.
    if any(line.count(".") > _MOST_DOTS for line in _TEXT.sub("", text).splitlines()):
        raise refuse(f"has a key of more than {_MOST_DOTS} dots")
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise refuse(f"is no TOML: {error}") from error
    except RecursionError:
        raise refuse("is nested too deep") from None
