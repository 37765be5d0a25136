"""Plan-time tensors: a virtual buffer seen through shape, strides and offset, as in torch.

Views (permute, expand, slice, reshape where strides allow) cost nothing: they change the view, not the data.
Strides and offsets are in elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

# torch dtype -> WGSL type as stored, and as computed with
STORAGE = {
    "float32": "f32",
    "float16": "f16",
    "int64": "i32",
    "int32": "i32",
    "int16": "i32",
    "int8": "i32",
    "uint8": "i32",
    "bool": "u32",
}
COMPUTE = {
    "float32": "f32",
    "float16": "f32",
    "int64": "i32",
    "int32": "i32",
    "int16": "i32",
    "int8": "i32",
    "uint8": "i32",
    "bool": "bool",
}
STORAGE_BYTES = {"f32": 4, "f16": 2, "i32": 4, "u32": 4}


@dataclass(eq=False)
class Buffer:
    """Storage in a plan. `kind`: temp | input | constant | state. `key` names a constant or a state."""

    kind: str
    nbytes: int
    label: str
    key: str = ""


@dataclass(frozen=True, eq=False)
class Tensor:
    """packed: elements of a byte lie four to a word, the first one lowest, and not as `STORAGE` says: an input as it
    came from the host, which is only read (`backend.runtime.packing`)."""

    buffer: Buffer
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    packed: bool = False

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        return self.numel == 0 or all(
            size == 1 or stride == expected
            for size, stride, expected in zip(self.shape, self.strides, contiguous_strides(self.shape), strict=True)
        )

    def with_view(self, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
        return replace(self, shape=tuple(shape), strides=tuple(strides), offset=offset)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = []
    running = 1
    for size in reversed(shape):
        strides.append(running)
        running *= size
    return tuple(reversed(strides))


def reshape_strides(shape: Sequence[int], strides: Sequence[int], new_shape: Sequence[int]) -> tuple[int, ...] | None:
    """Strides that show the same elements in the same order under `new_shape`; None when no strides can."""
    if math.prod(shape) == 0:
        return contiguous_strides(new_shape)
    runs = merge_dims(shape, [strides])
    remaining = list(new_shape)
    position = len(remaining) - 1
    out: list[int | None] = [None] * len(remaining)
    for run_size, (run_stride,) in reversed(runs):
        covered = 1
        while position >= 0 and (covered < run_size or remaining[position] == 1):
            size = remaining[position]
            if run_size % (covered * size):
                return None
            out[position] = run_stride * covered
            covered *= size
            position -= 1
        if covered != run_size:
            return None
    while position >= 0:
        if remaining[position] != 1:
            return None
        out[position] = 0
        position -= 1
    return tuple(0 if stride is None else stride for stride in out)


def merge_dims(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[tuple[int, tuple[int, ...]]]:
    """Fewest dims that describe the same walk for every operand: [(size, strides per operand)], outermost first.

    Size-1 dims vanish; neighbours merge where each operand's outer stride is its inner stride × inner size.
    """
    merged: list[tuple[int, tuple[int, ...]]] = []
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        step = tuple(operand[axis] for operand in strides)
        if merged:
            outer, outer_step = merged[-1]
            if all(a == b * size for a, b in zip(outer_step, step, strict=True)):
                merged[-1] = (outer * size, step)
                continue
        merged.append((size, step))
    return merged
