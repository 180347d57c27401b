"""What a run of a program shows, and when two runs agree.

Numbers agree to `TOLERANCE` of the largest element of their tensor: float32 has 24 bits, a gradient
here is a sum of a few hundred products, and sums over ranks and micro-batches are formed in another
order than in one process. An element of a tensor that is far smaller than the others of the same
gradient or state may be what is left of terms that cancel, and is compared with `FLOOR` of those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

TOLERANCE = 2e-6
FLOOR = 0.1


@dataclass
class Record:
    """What one rank saw, in order: a name, and a tensor, named tensors, a number or text."""

    seen: list[tuple[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def differences(
    actual: Record,
    expected: Record,
    tolerance: float,
    *,
    warnings: bool = True,
    none_is_zero: bool = False,
) -> list[str]:
    """Say in what a record differs from another; nothing if they agree.

    A difference of keys or kinds is one however small; NaN agrees with NaN. none_is_zero: where a
    tensor is expected to be missing, zeros will do.
    """
    found = []
    names, expected_names = ([name for name, _ in r.seen] for r in (actual, expected))
    if names != expected_names:
        return [f"showed {names}, expected {expected_names}"]
    for number, ((name, value), (_, other)) in enumerate(
        zip(actual.seen, expected.seen, strict=True)
    ):
        if none_is_zero and isinstance(other, dict):
            other = _with_zeros(other, value)  # noqa: PLW2901
        found += [f"{number}. {name}: {text}" for text in _compare(value, other, tolerance)]
    if warnings and actual.warnings != expected.warnings:
        for text in sorted(set(actual.warnings) ^ set(expected.warnings)):
            found.append(f"{'warned' if text in actual.warnings else 'did not warn'}: {text[:300]}")
    return found


def _with_zeros(expected: dict[str, Any], actual: dict[str, Any]) -> dict[str, Any]:
    """Put zeros in the place of what is missing, where the other one has something."""
    return {
        name: torch.zeros_like(actual[name])
        if value is None and actual.get(name) is not None
        else value
        for name, value in expected.items()
    }


def _compare(actual: Any, expected: Any, tolerance: float) -> list[str]:
    if isinstance(expected, Mapping):
        if list(actual) != list(expected):
            return [f"keys {list(actual)}, expected {list(expected)}"]
        largest = max((_size(value) for value in expected.values()), default=0.0)
        return [
            f"{name}: {text}"
            for name, value in expected.items()
            for text in _compare_tensors(actual[name], value, tolerance, FLOOR * largest)
        ]
    if isinstance(expected, float):
        actual, expected = torch.tensor(actual), torch.tensor(expected)
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        return _compare_tensors(actual, expected, tolerance, 0.0)
    if isinstance(expected, frozenset) and isinstance(actual, frozenset):
        return [] if expected <= actual else [f"{set(actual)}, expected {set(expected)}"]
    return [] if actual == expected else [f"{actual!r}, expected {expected!r}"]


def _compare_tensors(
    actual: Tensor | None, expected: Tensor | None, tolerance: float, floor: float
) -> list[str]:
    if actual is None or expected is None:
        return [] if actual is expected else [f"{_short(actual)}, expected {_short(expected)}"]
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return [
            f"{actual.dtype} {tuple(actual.shape)}, "
            f"expected {expected.dtype} {tuple(expected.shape)}"
        ]
    if not actual.numel() or torch.equal(actual, expected):
        return []
    scale = max(_size(expected), floor)
    if expected.is_complex():
        actual, expected = torch.view_as_real(actual), torch.view_as_real(expected)
    gap = (actual.double() - expected.double()).abs()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    worst = float(torch.where(same, 0.0, gap).nan_to_num(math.inf, math.inf).max())
    if worst <= tolerance * scale:
        return []
    return [
        f"differs by {worst:.3g} where the largest is {scale:.3g}: "
        f"{_short(actual)}, expected {_short(expected)}"
    ]


def _size(tensor: Tensor | None) -> float:
    if tensor is None or not tensor.numel():
        return 0.0
    numbers = tensor.abs() if tensor.is_complex() else tensor
    return float(numbers.double().nan_to_num(0.0, 0.0, 0.0).abs().max())


def _short(value: Tensor | None) -> str:
    if value is None:
        return "none"
    numbers = value.flatten()[:5].tolist()
    text = ", ".join(f"{number:.7g}" for number in numbers[:4])
    return f"[{text}{', ...' if len(numbers) > 4 else ''}]"
