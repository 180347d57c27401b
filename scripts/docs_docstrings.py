"""Show what docstrings say of arguments as lists, on the site's pages: an extension of Griffe, see mkdocs.yml.

Our docstrings are prose. Where they explain arguments, each begins a line, and what does not fit hangs below:

    model: the outermost sharded module, of either API. If it has not run yet, this makes it the
        root, as its first forward would.
    first_step: the number of the first step, for the report.

Markdown would make one paragraph of these lines. An enum's values are added.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


def with_lists(docstring: str, names: set[str]) -> str:
    """Return a docstring in which lines that begin with one of these names and a colon are items of a list."""
    blocks = []
    for block in re.split(r"\n[ \t]*\n", docstring):
        lines: list[str] = []
        was_item = False
        for line in block.splitlines():
            found = re.match(r"((\w+)(?:, \w+)*): (?=\S)", line)
            if not found or found[2] not in names:
                lines.append(line)
                continue
            if lines and not was_item:
                lines.append("")  # a list begins after an empty line
            lines.append(f"- **{found[1]}**: {line[found.end() :]}")
            was_item = True
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


class ArgumentLists(griffe.Extension):
    """Rewrites every docstring once the package is read, when all members of classes are known."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Go through all that the package defines itself."""
        waiting: list[Any] = [pkg]
        while waiting:
            each = waiting.pop()
            members = [member for member in each.members.values() if not member.is_alias]
            waiting += members
            if each.is_function:
                each.overloads = None  # several for type checkers, of one call
            if each.docstring:
                names = {member.name for member in members}
                for function in (each, each.members.get("__init__"), each.members.get("__new__")):
                    names |= {one.name for one in getattr(function, "parameters", None) or ()}
                each.docstring.value = with_lists(each.docstring.value, names)
                if each.is_class and any(str(base).endswith("Enum") for base in each.bases):
                    values = [f"`{member.name}`" for member in members if member.is_attribute]
                    each.docstring.value += f"\n\nValues: {', '.join(values)}."
