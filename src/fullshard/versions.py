"""Which version this is, which versions of torch it runs with, and how to install what else it needs."""

import json
import re
import shlex
import sys
import warnings
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from urllib.parse import unquote, urlsplit

VERSION = "0.1.0"
OLDEST, NEWEST = (2, 11), (2, 15)
TESTED = f"torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
WHAT_TO_INSTALL = f"pip install 'torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"


def installed() -> str:
    """Say which versions there are of fullshard and of torch, without importing torch."""
    try:
        torch = f"torch {version_of('torch')}"
    except PackageNotFoundError:
        torch = "no torch"
    return f"fullshard {VERSION}, {torch}"


def install_hint(extra: str) -> str:
    """Return the command that installs the packages of an extra, for the way in which this fullshard was installed.

    No index has the name fullshard, so pip is given the clone, if it is there, or else the packages:

        pip install -e '/home/me/fullshard[train]'         installed from a clone (PEP 610), here editable
        pip install 'rich>=13.7' 'typer>=0.12'             from a wheel: those that are missing
    """
    try:
        found = Distribution.from_name("fullshard")
        source = json.loads(found.read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        found, source = None, {}
    editable = "-e " if source.get("dir_info", {}).get("editable") else ""
    # Where this file lies first: of a clone on PYTHONPATH, the metadata may be of another.
    clones = [Path(__file__).parents[2]]
    if "dir_info" in source:
        clones.append(Path(unquote(urlsplit(source["url"]).path)))
    for clone in clones:
        if (clone / "src" / "fullshard" / "versions.py").is_file():
            return f"pip install {editable}{shlex.quote(f'{clone}[{extra}]')}"
    needed = _packages_of(extra, (found and found.requires) or ())
    missing = [name for name in needed if not _is_installed(name)] or needed
    return f"pip install {' '.join(shlex.quote(needed[name]) for name in missing)}"


def _packages_of(extra: str, requirements: Iterable[str]) -> dict[str, str]:
    """Return what an extra needs, by name.

    "tomli>=2; (python_version < '3.11') and extra == 'train'" is {"tomli": "tomli>=2"} for Python 3.10.
    """
    found = {}
    for requirement in requirements:
        package, _, marker = requirement.partition(";")
        older = re.search(r"python_version < '3\.(\d+)'", marker)
        is_wanted = older is None or sys.version_info < (3, int(older[1]))
        if is_wanted and re.search(rf"extra == ['\"]{extra}['\"]", marker):
            found[re.split(r"[^\w.-]", package)[0]] = package.strip()
    return found


def _is_installed(name: str) -> bool:
    try:
        return bool(version_of(name))
    except PackageNotFoundError:
        return False


def check_torch_version(version: str) -> None:
    """Refuse a torch that is too old, and warn about one that nobody has tried.

    version: as torch says it, such as "2.13.0+cpu". Raises ImportError for one before `OLDEST`,
    which lacks what the engine is built on. A newer one, or one whose number cannot be read, is
    likely to work: what fullshard needs of its private names is looked up at once
    (`fullshard.torch_private`).
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        found = None
    elif (found := tuple(map(int, numbers.groups()))) < OLDEST:
        raise ImportError(
            f"fullshard runs with {TESTED}, this is {version}. Install one of those: "
            f"{WHAT_TO_INSTALL}."
        )
    if found is None or found > NEWEST:
        warnings.warn(
            f"fullshard was tested with {TESTED}, this is {version}. Should something fail, "
            f"install one of those: {WHAT_TO_INSTALL}.",
            stacklevel=3,
        )
