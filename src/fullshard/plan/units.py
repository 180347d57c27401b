"""Which unit owns a parameter that several modules share, and what modules are called."""

import re
from collections.abc import Container, Sequence

# Attributes under which wrappers keep the module they wrap.
WRAPPED_MODULE = "_fsdp_wrapped_module"
_WRAPPERS = re.compile(rf"(^|\.)(?:{WRAPPED_MODULE}|_checkpoint_wrapped_module)(?=\.|$)")


def clean_name(name: str) -> str:
    """Return a qualified name without what wrappers add: "layers.0._fsdp_wrapped_module.weight"."""
    return _WRAPPERS.sub("", name).removeprefix(".")


def lowest_common_unit(users: Sequence[str], units: Container[str]) -> str | None:
    """Return the innermost unit that contains every module in ``users``, None if no unit does.

    Names are fully qualified, "" being the root. With units "", "decoder" and "decoder.embed",
    a weight used by "decoder.embed" and "decoder.head" belongs to "decoder". It is looked for from
    the modules upwards, so the cost depends on how deep they lie, not on how many units there are.
    """
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
    """Whether ``module`` is ``unit`` itself or lies below it."""
    return unit in ("", module) or module.startswith(unit + ".")
