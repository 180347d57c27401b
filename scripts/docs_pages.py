"""Make the site's pages of pages that are written to be read in the repository.

    python scripts/docs_pages.py build/docs      what `make docs` does before it builds the site from there

Pages link to each other and to sources as files, `[design](../docs/design.md)`, `[tests](../tests/engine)`,
so that they can be read on the code host and in any clone. On the site a link to another of its pages stays
one between pages, and one to anything else in the repository leads to the code host. A link to what is not
there is an error; anchors are checked by the site's builder.

A picture in two versions, for light and for dark screens, is a <picture> in the repository. The site has a
switch of its own for that, so there it becomes two pictures, of which the theme shows one.

README.md, CHANGELOG.md and CONTRIBUTING.md become pages of the site too. Needs the standard library alone.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# Files beside docs/, and the pages that they become.
FROM_ROOT = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
FENCE = re.compile(r"^( *)(`{3,})[^\n]*\n.*?^\1\2 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^()\s]+)(?=\))")
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">'
    r'\s*<img alt="(?P<alt>[^"]+)" src="(?P<light>[^"]+)">\s*</picture>'
)


class PagesError(Exception):
    """Links of a page lead nowhere; the message has them."""


def home() -> str:
    """Return the repository's address, which pyproject.toml has."""
    (found,) = re.findall(r'(?m)^Homepage = "(.*)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    return found


def pages() -> dict[str, Path]:
    """Return the pages of the site, such as "reference/index.md", and the files that they are made of."""
    written = {path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
    return written | {page: ROOT / source for source, page in FROM_ROOT.items()}


def on_site(markdown: str, page: str, source: str) -> str:
    """Return a page's text with the links that it has to have on the site.

    page: its place there, such as "design.md". source: the file that it is made of, from the repository's root.
    """
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):  # code stays as it is
        parts += [_with_links(markdown[end : fence.start()], page, source), fence[0]]
        end = fence.end()
    return "".join([*parts, _with_links(markdown[end:], page, source)])


def _with_links(text: str, page: str, source: str) -> str:
    text = PICTURE.sub(r"![\g<alt>](\g<light>#only-light)![\g<alt>](\g<dark>#only-dark)", text)
    return LINK.sub(lambda link: link[1] + _target(link[2], page, source), text)


def _target(target: str, page: str, source: str) -> str:
    path, mark, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", path):
        return target
    there = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if there.startswith("..") or not (ROOT / there).exists():
        raise PagesError(f"{source} links to {target}, which is not there")
    if there in FROM_ROOT:
        inside = FROM_ROOT[there]
    elif there.startswith("docs/") and (ROOT / there).is_file():
        inside = there.removeprefix("docs/")
    else:
        kind = "tree" if (ROOT / there).is_dir() else "blob"
        return f"{home()}/{kind}/main/{there}{mark}{anchor}"
    return os.path.relpath(inside, posixpath.dirname(page) or ".") + mark + anchor


def main(out: Path) -> int:
    """Write the pages and pictures into a folder, which is emptied first."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(DOCS, out)
    wrong = []
    for page, path in pages().items():
        try:
            source = path.relative_to(ROOT).as_posix()
            (out / page).write_text(on_site(path.read_text("utf-8"), page, source), "utf-8")
        except PagesError as error:
            wrong.append(str(error))
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return len(wrong) > 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
