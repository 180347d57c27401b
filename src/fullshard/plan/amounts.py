"""Durations and sizes as people read them."""

from collections.abc import Mapping


def seconds(value: float) -> str:
    """Write a duration with three digits: 12.3 ms."""
    return nanoseconds(1e9 * value)


def nanoseconds(value: float) -> str:
    """Write a duration with three digits: 12.3 ms."""
    return scaled(value, {"s": 1e9, "ms": 1e6, "µs": 1e3})


def nbytes(value: float) -> str:
    """Write a size with three digits: 12.3 MiB."""
    units = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    return f"{value:.0f} B" if value < 2**10 else scaled(value, units)


def scaled(value: float, units: Mapping[str, float]) -> str:
    """Write a value in the first unit that is not larger, or the last. units: the largest first."""
    unit = next((unit for unit, size in units.items() if value >= size), [*units][-1])
    value /= units[unit]
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
