"""Whether files fit a model: what differs is listed by kind, and refused on all ranks alike.

A problem is a line whose first word is its kind: "missing 0.weight". Each rank finds its own.
"""

import dataclasses
import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from fullshard.errors import CheckpointError

_MOST_LISTED = 10

# {} is what the tensors come from.
_TITLES = {
    "missing": 'The model has, and the {} lacks (allow=["missing"] leaves them as they are)',
    "unexpected": 'The {} has, and nothing takes (allow=["unexpected"] leaves them out)',
    "mismatched": "Of another shape",
    "dtype": 'Of another dtype (allow=["dtype"] converts)',
    "kind": "Of another kind of dtype, which is not converted",
    "untied": "One tensor in the model, and several in the {}",
    "groups": "Parameter groups that are divided in another way than in the {}",
    "flat": "Without the state that others of the same flat parameter have (wrap with "
    "use_orig_params=True, which keeps them apart)",
    "class": "State of another optimizer",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where tensors come from, for messages.

    path: of it. kind: "checkpoint" or the like. advice: what to do if it does not fit.
    hints: returns more lines, from what is missing and what is unexpected.
    """

    path: Path | str
    kind: str
    advice: str
    hints: Callable[[Sequence[str], Sequence[str]], list[str]] = lambda *_: []


def check_fits(
    source: Source, everyones: Sequence[Sequence[str]], allow: Collection[str]
) -> dict[str, list[str]]:
    """Refuse what does not fit and is not allowed.

    everyones: the problems that each rank has found. Returns them by kind, allowed ones then. Raises
    CheckpointError.
    """
    groups: dict[str, list[str]] = {}
    for problem in dict.fromkeys(p for own in everyones for p in own):
        kind, _, text = problem.partition(" ")
        groups.setdefault(kind, []).append(text)
    # What one rank does not take, another may: pipeline stages.
    by_none = set.intersection(*(set(own) for own in everyones))
    if "unexpected" in groups:
        groups["unexpected"] = [
            text for text in groups["unexpected"] if f"unexpected {text}" in by_none
        ]
    refused = {k: v for k, v in groups.items() if v and k not in allow}
    if refused:
        raise CheckpointError(_described(source, refused))
    return groups


def listed(allow: Collection[str] | str | None) -> list[str]:
    """Return what may differ, however users have said it, as all ranks have it that said the same."""
    if allow is None:
        return []
    if isinstance(allow, str) or not isinstance(allow, Iterable):
        return [str(allow)]
    return sorted(map(str, allow))


def check_allowed(allow: Collection[str] | str | None, known: Collection[str]) -> frozenset[str]:
    """Return what may differ. Raises CheckpointError for what is not known."""
    unknown = [each for each in listed(allow) if each not in known]
    if unknown:
        raise CheckpointError(f"allow: {unknown} is not known. Use {', '.join(known)}.")
    return frozenset(listed(allow))


def _described(source: Source, groups: Mapping[str, Sequence[str]]) -> str:
    lines = [f"{source.path}: does not fit."]
    for kind, texts in groups.items():
        lines.append(f"  {_TITLES[kind].format(source.kind)}: {len(texts)}")
        lines += [f"    {text}" for text in texts[:_MOST_LISTED]]
        if len(texts) > _MOST_LISTED:
            lines.append(f"    ... and {len(texts) - _MOST_LISTED} more")
    missing, unexpected = groups.get("missing", ()), groups.get("unexpected", ())
    hints = source.hints(missing, unexpected)
    renamed = [] if hints else _renames(missing, unexpected)
    if renamed:
        lines.append("  Perhaps renamed:")
        lines += [f"    {old} -> {new}" for old, new in renamed[:_MOST_LISTED]]
    return "\n".join([*lines, *hints, source.advice])


def _renames(missing: Sequence[str], unexpected: Sequence[str]) -> list[tuple[str, str]]:
    found = []
    for name in missing[: 5 * _MOST_LISTED]:
        close = difflib.get_close_matches(name, unexpected, n=1, cutoff=0.7)
        found += [(old, name) for old in close]
    return found
