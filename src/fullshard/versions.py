"""Which version this is, and which versions of torch it runs with."""

import re
import warnings
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

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
