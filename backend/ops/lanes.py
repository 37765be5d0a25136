"""Matrix products on processors that stand in for a GPU (gemm_lanes.wgsl): no workgroup memory, lanes share loads.

There the tiles of `gemm` lose: workgroup memory is no nearer than the rest, a barrier costs hundreds of additions, and
a load dozens of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backend.ops import tiles
from backend.runtime.builder import Builder
from backend.runtime.value import Value

ROWS = (4, 8, 16)  # of an invocation: with more, too few registers are left; with fewer, loads serve too few
COLUMNS = 8
INVOCATIONS = 8  # of a group, of which many keep all processors busy
LEAST_GROUPS = 4


def usable(b: Builder) -> bool:
    """Whether this device is a processor whose invocations can share what they load."""
    can = b.capabilities
    return can.on_processor and "subgroup" in can.features and not tiles.usable(b)


def turns(rows: int, cols: int) -> bool:
    """Whether the transposed product, stored transposed, fills more lanes."""
    return cols < rows and cols < COLUMNS * INVOCATIONS


def fills(batches: int, rows: int, cols: int) -> bool:
    """Whether a product of few rows or columns makes work enough; if not, a gemv has lanes that walk its depth."""
    return batches * -(-max(rows, cols) // (COLUMNS * INVOCATIONS)) >= LEAST_GROUPS


def launch(
    sizes: tuple[int, int, int, int], *, shape: Sequence[int], dtype: str, reads: Mapping[str, Any],
    params: Mapping[str, Any], constants: Mapping[str, Any], b: Builder,
) -> Value:  # fmt: skip
    """sizes: batches, rows, cols, depth. constants: batch_dims, a_vec ("k" or ""), and b_vec, or b_bits and has_zero.

    params may have out_m and out_n, the strides of the result; else it is row-major.
    """
    batches, rows, cols, depth = sizes
    block = next((block for block in ROWS if rows <= block), ROWS[-1])
    blocks, spans = -(-rows // block), -(-cols // (COLUMNS * INVOCATIONS))
    own = {"rows": rows, "cols": cols, "depth": depth, "blocks": blocks, "spans": spans, "out_m": cols, "out_n": 1}
    run = tiles.RUN if depth > tiles.LONG_DEPTH else 0
    how = {"R": block, "W": INVOCATIONS, "RAGGED": depth % 4 != 0, "RUN": run}
    return b.launch(
        "gemm_lanes", shape=shape, dtype=dtype, reads=reads, groups=batches * blocks * spans, params=own | dict(params),
        constants=how | {"b_vec": "", "b_bits": 0} | dict(constants),
    )  # fmt: skip


def along_depth(axis: str) -> str:
    """What the kernel makes of an operand's vector axis for a: the depth, or none."""
    return axis if axis == "k" else ""
