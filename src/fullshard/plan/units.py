"""Which unit owns a parameter that several modules share."""

from collections.abc import Iterable, Sequence


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
