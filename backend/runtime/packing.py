"""Outputs whose elements take a byte each on the host, four to a word: a quarter of what is stored is read back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.graph import ITEM_BYTES
from backend.runtime import value as values
from backend.runtime.tensor import Tensor

if TYPE_CHECKING:
    from backend.runtime.builder import Builder

FROM = 2**16  # elements: the fewer bytes to read back then outweigh a dispatch


def packed(output: Tensor, b: Builder) -> Tensor | None:
    """int32 words of four elements each, the first one lowest; None where elements are no bytes, or few.

    `output` is contiguous.
    """
    if ITEM_BYTES[output.dtype] != 1 or output.numel < FROM or output.numel % 4:
        return None
    count = output.numel // 4
    parts = [output.with_view((count,), (4,), output.offset + position) for position in range(4)]
    code = " | ".join(f"(({{{position}}} & 255) << {8 * position}u)" for position in range(4))
    elements = [values.cast(values.of_tensor(part), "int32") for part in parts]
    return b.tensor(b.pointwise(f"({code})", elements, "int32", (count,)))
