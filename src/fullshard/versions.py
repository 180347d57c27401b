"""Which versions of torch this release was tested with."""

import re
import warnings
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

OLDEST, NEWEST = (2, 11), (2, 13)


def installed(own: str) -> str:
    """Say which versions there are of fullshard (``own``) and of torch, without importing torch."""
    try:
        torch = f"torch {version_of('torch')}"
    except PackageNotFoundError:
        torch = "no torch"
    return f"fullshard {own}, {torch}"


def check_torch_version(version: str) -> None:
    """Warn about a torch that is older or newer than those tested. ``version``: "2.13.0+cpu"."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    found = tuple(map(int, numbers.groups())) if numbers else (0, 0)
    if not OLDEST <= found <= NEWEST:
        warnings.warn(
            f"fullshard was tested with torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, "
            f"this is {version}. Should something fail, try one of those.",
            stacklevel=3,
        )
