"""Elements of a byte cross between host and GPU four to a word: a quarter of what they take where kernels work on them.

An input stays as it came, and kernels that read it take the bytes apart (`codegen`). An output is packed by a dispatch
of its own, for the way to the host and for other calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.graph import ITEM_BYTES
from backend.runtime import value as values
from backend.runtime.tensor import Tensor

if TYPE_CHECKING:
    from backend.runtime.builder import Builder

FROM = 2**16  # elements: the fewer bytes to read back then outweigh a dispatch


def is_packed(dtype: str, numel: int) -> bool:
    """Whether so many elements cross packed, in either direction and from one call to another."""
    return ITEM_BYTES[dtype] == 1 and numel >= FROM and numel % 4 == 0


def packed(output: Tensor, b: Builder) -> Tensor | None:
    """int32 words of four elements each, the first one lowest; None for an output that crosses as it is stored.

    `output` is contiguous.
    """
    if not is_packed(output.dtype, output.numel):
        return None
    count = output.numel // 4
    parts = [output.with_view((count,), (4,), output.offset + position) for position in range(4)]
    code = " | ".join(f"(({{{position}}} & 255) << {8 * position}u)" for position in range(4))
    elements = [values.cast(values.of_tensor(part), "int32") for part in parts]
    return b.tensor(b.pointwise(f"({code})", elements, "int32", (count,)))
