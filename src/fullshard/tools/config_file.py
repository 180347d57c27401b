"""Options of a command from a file: `--config run.toml`.

Keys are the options' names, with hyphens or underscores. What is typed comes before what the file says,
and that before the defaults.

    model = "35m"
    data = ["books/", "notes.txt"]
    grad-accum = 4

A run's folder, or its config.json, is such a file too: it has every option that the run was started with.
"""

import json
import sys
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fullshard.tools.config import OptionError


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
        if not all(isinstance(part, str | int | float | bool) for part in parts):
            raise OptionError(
                f"--config {path}: {key} is {value!r}; give text, a number, true, false, or a list."
            )
        if key in flags and not isinstance(value, bool):
            raise OptionError(f"--config {path}: {key} is {value!r}; give true or false.")
        if key not in flags and any(isinstance(part, bool) for part in parts):
            raise OptionError(f"--config {path}: {key} is {value!r}; give text or a number.")
        if key in lists:
            found[key] = parts
        elif isinstance(value, list):
            raise OptionError(f"--config {path}: {key} is {value!r}; give one value, not a list.")
    if path.name == "config.json":
        found |= _copies(path.parent, found)
    return found


def _copies(run: Path, found: Mapping[str, Any]) -> dict[str, str]:
    """Return the run's own copies of what its options name: the originals may be gone, or others by now."""
    copies = {"tokenizer": run / "tokenizer", "model": run / "model.json"}
    return {name: str(copy) for name, copy in copies.items() if found.get(name) and copy.exists()}


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(
            f"--config {path}: {error.strerror}. Name a TOML file, or a run's folder."
        ) from error
    except UnicodeDecodeError as error:
        raise OptionError(f"--config {path}: is not text in UTF-8 ({error}).") from error
    try:
        if path.suffix == ".json":
            fields = json.loads(text)
            if not isinstance(fields, dict):
                raise ValueError("it holds no object")
            return dict(fields.get("options", fields))
        return _toml(text)
    except (ValueError, TypeError) as error:  # of both parsers, and of JSON that is no object
        raise OptionError(f"--config {path}: cannot be read: {error}") from error


def _toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)
