"""Names of modules, and the unit that owns a parameter which several modules share."""

import re
from collections.abc import Container, Sequence

# The attribute under which FSDP1 wrappers keep the module that they wrap.
WRAPPED_MODULE = "_fsdp_wrapped_module"
_WRAPPERS = re.compile(rf"(^|\.)(?:{WRAPPED_MODULE}|_checkpoint_wrapped_module)(?=\.|$)")


def clean_name(name: str) -> str:
    """Return a qualified name without the attributes that wrappers add.

    "layers.0._fsdp_wrapped_module.weight" becomes "layers.0.weight".
    """
    return _WRAPPERS.sub("", name).removeprefix(".")


def without_compile(name: str) -> str:
    """Return a name without what ``torch.compile`` puts in front of a module's own names."""
    return name.replace("_orig_mod.", "")


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


def unit_around(name: str, units: Container[str]) -> str | None:
    """Return the innermost unit that contains a module and is not the module itself, or None."""
    return lowest_common_unit([_parent(name)], units) if name else None


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def contains(unit: str, module: str) -> bool:
    return unit in ("", module) or module.startswith(unit + ".")
