"""What a builder makes: kernels to be dispatched, over values, and dispatches, over virtual buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backend.runtime.device import UNIFORM
from backend.runtime.tensor import Buffer, Tensor
from backend.runtime.value import Value

MAX_GROUPS = 65535  # along one dim


@dataclass(frozen=True)
class Vector:
    """A tensor read four elements at a time: contiguous, offset and length divisible by 4."""

    tensor: Tensor
    width: int = 4


@dataclass(eq=False)
class Launch:
    """A kernel to be dispatched: template, what it reads and its parameters. Written once, by the builder."""

    template: str
    reads: Mapping[str, Value | Tensor | Vector]
    params: Mapping[str, Any]
    constants: Mapping[str, Any]
    groups: int
    shape: tuple[int, ...]
    dtype: str
    label: str
    done: Tensor | None = None
    width: int = 1  # elements that one load of a value, and one store, is of
    row: int | None = None  # elements of `out` that lie in a row, of a kernel that can store four of them at once


@dataclass(frozen=True)
class Dispatch:
    """One compute dispatch over virtual buffers; `slots` are (buffer, access) in binding order, the uniform last."""

    label: str
    template: str
    code: str
    slots: tuple[tuple[Buffer, str], ...]
    params: bytes
    groups: tuple[int, int, int]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of the bindings, in order."""
        return (*(access for _, access in self.slots), UNIFORM)


@dataclass
class Lowered:
    """What `lower_graph` returns: dispatches in order and where the outputs are.

    packed: for each output, where it lies once more as the host takes it, four elements of a byte in a word, or None.
    """

    dispatches: list[Dispatch]
    outputs: list[Tensor]
    packed: list[Tensor | None]
    inputs: list[Buffer]


def fold(groups: int) -> tuple[int, int, int]:
    """Workgroups in two dims of at most 65535; kernels skip the surplus of the last row."""
    if groups <= MAX_GROUPS:
        return groups, 1, 1
    rows = -(-groups // MAX_GROUPS)
    if rows > MAX_GROUPS:
        raise ValueError(f"{groups} workgroups are more than a dispatch can hold")
    return -(-groups // rows), rows, 1
