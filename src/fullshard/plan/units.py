"""Names of modules and tensors, and the unit that owns a parameter which several modules share."""

import re
from collections.abc import Callable, Container, Mapping, Sequence

# The attribute under which FSDP1 wrappers keep the module that they wrap.
WRAPPED_MODULE = "_fsdp_wrapped_module"
_WRAPPERS = re.compile(rf"(^|\.)(?:{WRAPPED_MODULE}|_checkpoint_wrapped_module)(?=\.|$)")

# New names for tensors, as users give them.
Rename = Mapping[str, str | None] | Callable[[str], str | None] | None


def clean_name(name: str) -> str:
    """Return a qualified name without the attributes that wrappers add.

    "layers.0._fsdp_wrapped_module.weight" becomes "layers.0.weight".
    """
    return _WRAPPERS.sub("", name).removeprefix(".")


def without_compile(name: str) -> str:
    """Return a name without what ``torch.compile`` puts in front of a module's own names."""
    return name.replace("_orig_mod.", "")


def first_names(names: Sequence[str], most: int = 8) -> str:
    """Join the first names, for a message, and say how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


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


def lowest_common_unit(users: Sequence[str], units: Container[str]) -> str | None:
    """Return the innermost unit that contains every module in ``users``; None if no unit does.

    Names are fully qualified; "" is the root. With units "", "decoder" and "decoder.embed", a
    weight that "decoder.embed" and "decoder.head" use belongs to "decoder".
    """
    # Upwards from the modules, so the cost depends on their depth, not on the number of units.
    common = users[0]
    for user in users[1:]:
        while not contains(common, user):
            common = _parent(common)
    while common not in units:
        if not common:
            return None
        common = _parent(common)
    return common


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def contains(unit: str, module: str) -> bool:
    return unit in ("", module) or module.startswith(unit + ".")
