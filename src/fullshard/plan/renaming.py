"""New names for tensors, as users give them: a function, or a mapping of names and beginnings of names."""

from collections.abc import Callable, Mapping

Rename = Mapping[str, str | None] | Callable[[str], str | None] | None


def renamer(rename: Rename) -> Callable[[str], str | None]:
    """Return what gives each name its new one, or None for what is left out.

    Of a mapping, a key that ends with a dot, or is empty, is the beginning of names, and its value
    takes its place; other keys are names. A name is looked up first, then the longest beginning.
    """
    if rename is None:
        return lambda name: name
    if not isinstance(rename, Mapping):
        return rename
    beginnings = sorted((k for k in rename if not k or k.endswith(".")), key=len, reverse=True)

    def renamed(name: str) -> str | None:
        if name in rename:
            return rename[name]
        for beginning in beginnings:
            if name.startswith(beginning):
                new = rename[beginning]
                return None if new is None else new + name[len(beginning) :]
        return name

    return renamed
