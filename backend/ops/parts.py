"""Sums whose parts were computed apart, added in their order."""

from __future__ import annotations

from collections.abc import Sequence

from backend.runtime import value as values
from backend.runtime.builder import Builder
from backend.runtime.value import Value


def parts_along(whole: Value, axis: int, b: Builder) -> list[Value]:
    """What lies along an axis of a value, each without that axis."""
    whole = b.movable(whole)
    shape = (*whole.shape[:axis], *whole.shape[axis + 1 :])
    return [b.reshape(values.slice_(whole, axis, part, 1), shape) for part in range(whole.shape[axis])]


def sum_code(count: int, first: int = 0) -> str:
    """The code that adds so many arguments of `Builder.pointwise`."""
    return " + ".join(f"{{{first + at}}}" for at in range(count))


def add_parts(parts: Sequence[Value], dtype: str, b: Builder) -> Value:
    """The sum of parts of one shape."""
    return b.pointwise(sum_code(len(parts)), parts, dtype, parts[0].shape)
