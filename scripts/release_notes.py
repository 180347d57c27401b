"""Print what the changelog says of a version, if a tag names the version that this tree is.

    python3 scripts/release_notes.py v0.1.0

Exits 1, saying what to change, if the tag, `VERSION` in src/fullshard/versions.py and CHANGELOG.md do not agree. Uses the
standard library alone, and imports nothing of fullshard.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class ReleaseError(Exception):
    """Something names another version; the message says what."""


def notes_of(tag: str, root: Path = ROOT) -> str:
    """Return the part of the changelog, whose heading is the version, with or without a date behind it."""
    version = tag.removeprefix("v")
    if version == tag:
        raise ReleaseError(f"{tag}: a tag of a release begins with v, such as v0.1.0")
    name = "src/fullshard/versions.py"
    found = re.search(r'(?m)^VERSION = "(.*)"$', (root / name).read_text())
    if found is None or found[1] != version:
        there = found[1] if found else "no version"
        raise ReleaseError(f"{tag}: {name} has {there}. Change it, or the tag.")
    changelog = (root / "CHANGELOG.md").read_text()
    part = re.search(rf"(?ms)^## {re.escape(version)}(?: .*?)?$(.*?)(?=^## |\Z)", changelog)
    if part is None or not part[1].strip():
        raise ReleaseError(
            f'{tag}: CHANGELOG.md has nothing under "## {version}". Write it by "towncrier build --version {version}".'
        )
    return part[1].strip()


def main() -> int:
    """Print the notes of the tag that was named."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        print(notes_of(sys.argv[1]))
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
