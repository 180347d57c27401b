"""Which unit owns a parameter that several modules share, and what modules are called."""

import re
from collections.abc import Iterable, Sequence

# Attributes under which wrappers keep the module they wrap.
WRAPPED_MODULE = "_fsdp_wrapped_module"
_WRAPPERS = re.compile(rf"(^|\.)(?:{WRAPPED_MODULE}|_checkpoint_wrapped_module)(?=\.|$)")


def clean_name(name: str) -> str:
    """Return a qualified name without what wrappers add: "layers.0._fsdp_wrapped_module.weight"."""
    return _WRAPPERS.sub("", name).removeprefix(".")


def lowest_common_unit(users: Sequence[str], units: Iterable[str]) -> str:
    """Return the innermost unit that contains every module in ``users``.

    Names are fully qualified, "" being the root. With units "", "decoder" and "decoder.embed",
    a weight used by "decoder.embed" and "decoder.head" belongs to "decoder". The root contains
    everything, so there is always an answer if "" is among the units.
    """
    candidates = [unit for unit in units if all(contains(unit, user) for user in users)]
    return max(candidates, key=lambda unit: unit.count(".") + bool(unit))


def contains(unit: str, module: str) -> bool:
    """Whether ``module`` is ``unit`` itself or lies below it."""
    return unit in ("", module) or module.startswith(unit + ".")
