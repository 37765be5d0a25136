"""How the elements of a kernel of nothing but pointwise work are shared out among invocations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.runtime import value as values
from backend.runtime.codegen import VECTOR, in_vectors

if TYPE_CHECKING:
    from backend.runtime.capabilities import Capabilities
    from backend.runtime.tensor import Tensor
    from backend.runtime.value import Value

WORKGROUP = 256
ITEMS = 4
MANY = 2**20  # elements
SOME = 2**16  # elements
CHEAP = 4  # operations an element


def geometry(value: Value, target: Tensor, capabilities: Capabilities) -> tuple[int, int, int]:
    """(invocations of a group, items of an invocation, elements of an item) where `value` is written to `target`."""
    if not capabilities.on_processor:
        # A large copy is bound by how many reads are under way.
        return WORKGROUP, ITEMS if value.numel >= MANY else 1, 1
    # A processor spends more on an invocation, and on each read and write, than on an element that costs little. Where
    # one costs much, there must be some for what they save to be worth a longer text.
    cheap, some = values.cost(value.root) <= CHEAP, value.numel >= SOME
    if (cheap or some) and in_vectors(value, target, capabilities.max_storage_buffers):
        return WORKGROUP // 2, 2 if cheap and value.numel % (2 * VECTOR) == 0 else 1, VECTOR
    return (WORKGROUP // 4, 4 * ITEMS, 1) if cheap and some else (WORKGROUP, 1, 1)
