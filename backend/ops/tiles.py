"""Large tiles (gemm_wide.wgsl): which one a product or convolution takes on a GPU, and how its depth is split.

The rule is made of one idea: keep at least `BUSY` workgroups under way, with tiles as large as that allows, because a
larger tile reads each operand less often; and sum in parts rather than go without. Parts are added in their order: the
result of a shape is always the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from backend.runtime import value as values
from backend.runtime.builder import Builder, Vector
from backend.runtime.tensor import Tensor
from backend.runtime.value import Value

BUSY = 256  # workgroups that keep a large GPU busy: about two on each of its processors
MOST_PARTS = 32
LEAST_DEPTH = 128  # of a part: below it, adding up costs more than it saves


@dataclass(frozen=True)
class Tile:
    """TX x TY invocations, each with 4 RM rows and 4 RN columns, KT deep a step; a multiple of 32 invocations."""

    TX: int
    TY: int
    RM: int
    RN: int
    KT: int

    @property
    def rows(self) -> int:
        return 4 * self.TY * self.RM

    @property
    def cols(self) -> int:
        return 4 * self.TX * self.RN

    def count(self, rows: int, cols: int) -> int:
        return -(-rows // self.rows) * -(-cols // self.cols)

    def parts(self, batches: int, rows: int, cols: int, depth: int) -> int:
        """In how many parts the depth is summed to have BUSY groups."""
        wanted = -(-BUSY // (batches * self.count(rows, cols)))
        return max(1, min(wanted, MOST_PARTS, depth // LEAST_DEPTH))


LARGE = Tile(8, 16, 2, 4, 8)  # 128 x 128
MEDIUM = Tile(8, 8, 2, 2, 16)  # 64 x 64
TURNED = Tile(8, 8, 2, 2, 8)  # 64 x 64, for operands that both have to be turned on the way: fewer clashes of banks
SMALL = Tile(8, 8, 1, 1, 16)  # 32 x 32
LONG = Tile(16, 8, 2, 2, 8)  # 64 x 128: few channels, many positions
LONG_DEEP = Tile(16, 8, 2, 2, 16)


def usable(b: Builder) -> bool:
    """On a processor, staging through registers and workgroup memory costs more than it saves."""
    return b.capabilities.adapter_type != "CPU" and b.capabilities.max_invocations >= 128


def choose(batches: int, rows: int, cols: int, depth: int, turned: bool = False) -> Tile:
    """The largest tile with enough groups, whole or in parts; the smallest where none has. turned: see TURNED."""
    if rows > MEDIUM.rows and cols > MEDIUM.cols and batches * LARGE.count(rows, cols) >= BUSY // 2:
        return LARGE
    groups = batches * MEDIUM.count(rows, cols) * MEDIUM.parts(batches, rows, cols, depth)
    if min(rows, cols) <= SMALL.rows or groups < BUSY:
        return SMALL
    return TURNED if turned else MEDIUM


def choose_patches(batches: int, rows: int, cols: int, depth: int) -> Tile:
    """The same for a convolution, whose patches are costly to fetch: as many rows (channels) as share them."""
    if rows > SMALL.rows and batches * LONG.count(rows, cols) * LONG.parts(batches, rows, cols, depth) >= BUSY // 2:
        return LONG if batches * LONG.count(rows, cols) >= BUSY else LONG_DEEP
    return choose(batches, rows, cols, depth)


def launch(
    tile: Tile, sizes: tuple[int, int, int, int], *, shape: Sequence[int], dtype: str,
    reads: Mapping[str, Value | Tensor | Vector], params: Mapping[str, Any], constants: Mapping[str, Any], b: Builder,
) -> Value:  # fmt: skip
    """sizes: batches, rows, cols, depth. params and constants: what gemm_wide.wgsl wants besides the tile's own."""
    batches, rows, cols, depth = sizes
    parts = tile.parts(*sizes)
    chunk = -(-depth // (tile.KT * parts)) * tile.KT
    parts = -(-depth // chunk)
    tiles_m, tiles_n = -(-rows // tile.rows), -(-cols // tile.cols)
    own = {"rows": rows, "cols": cols, "depth": depth, "chunk": chunk}
    own |= {"tiles_m": tiles_m, "tiles_n": tiles_n, "batches": batches}
    shape = tuple(shape)
    sums = b.launch(
        "gemm_wide", shape=shape if parts == 1 else (parts, *shape), dtype=dtype if parts == 1 else "float32",
        reads=reads, groups=parts * batches * tiles_m * tiles_n, params=own | dict(params),
        constants=asdict(tile) | dict(constants),
    )  # fmt: skip
    return sums if parts == 1 else add_parts(sums, dtype, b)


def add_parts(sums: Value, dtype: str, b: Builder) -> Value:
    """The sum over the first axis, in order."""
    parts, *shape = sums.shape
    found = b.movable(sums)
    slices = [b.reshape(values.slice_(found, 0, part, 1), shape) for part in range(parts)]
    return b.pointwise(" + ".join(f"{{{part}}}" for part in range(parts)), slices, dtype, shape)
