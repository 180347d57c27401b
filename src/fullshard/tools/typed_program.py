"""A script, or a module with -m, and its arguments, in a command line: without torch, which help has no use for."""

import importlib.util
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path


def split_program(words: Sequence[str], with_value: Collection[str]) -> tuple[list[str], list[str]]:
    """Divide a command line after the script, or after -m and its module, as Python does.

    All that follows is the program's, even what looks like an option of this one. with_value: options that take
    the word after them.
    """
    number = 0
    while number < len(words) and words[number].startswith("-"):
        if words[number].startswith("-m"):
            number += 1 if words[number] == "-m" else 0
            break
        number += 2 if words[number] in with_value else 1
    return list(words[: number + 1]), list(words[number + 1 :])


def why_no_script(script: str, arguments: Sequence[str] = ()) -> str:
    """Say why a path is no script; "" if it is one."""
    if Path(script).is_file():
        return ""
    if not Path(script).is_dir():
        return f"{script}: there is no such file."
    folders = [script, *(each for each in arguments if Path(each).is_dir())]
    return (
        f"{script}: is a folder, and no script. What is in folders of runs is shown, or compared, by: fullshard report "
        f"{shlex.join(folders)}"
    )


def has_module(name: str) -> bool:
    """Return whether ``python -m`` would find a module, the current folder included."""
    sys.path.insert(0, "")
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # of a package above it, or of a name like .a
        return False
    finally:
        del sys.path[0]
