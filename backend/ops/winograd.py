"""Convolutions of 3 × 3 as Winograd's F(2×2, 3×3) (conv_winograd.wgsl): 16 products where a direct sum takes 36.

S. Winograd, "Arithmetic Complexity of Computations", 1980; A. Lavin and S. Gray, "Fast Algorithms for Convolutional
Neural Networks", 2015. Larger tiles save more products and lose digits: F(4×4, 3×3) is off by some ten times as much.

A result depends on the inputs that it sees and no other, and is about as exact as a direct sum in float32 of their
largest magnitude. What comes out infinite or NaN is summed again directly, so infinities and NaN are where a direct sum
has them; only kernels that hold infinities themselves give NaN for all that they touch.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from backend.ops import tiles
from backend.ops.parts import add_parts, parts_along
from backend.runtime.builder import Builder
from backend.runtime.dispatch import Vector
from backend.runtime.tensor import Tensor
from backend.runtime.value import Value

if TYPE_CHECKING:
    from backend.ops.conv import Geometry

WORKGROUP = 64
LEAST_CHANNELS = 32  # in and out: below, turning inputs into points and back costs more than it saves
LEAST_TILES = 32  # of all pictures: below, most of a workgroup's would be empty
LEAST_DEPTH = 16  # channels of a part
PARTS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Tile:
    """16 · TX · TY invocations, each with 4 RM channels × 4 RN tiles of one point; KT channels a step.

    Raises `ValueError` for sizes that the kernel does not compute.
    """

    TX: int
    TY: int
    RM: int
    RN: int
    KT: int

    def __post_init__(self) -> None:
        if 4 * self.TY * self.tiles > self.bytes // 16:
            raise ValueError(f"{self}: a row of results does not fit in the memory of one step")
        if self.KT * self.RM % self.TX:
            raise ValueError(f"{self}: TX must divide KT · RM, so that all invocations fetch as many kernels")

    @property
    def channels(self) -> int:
        return 4 * self.TY * self.RM

    @property
    def tiles(self) -> int:
        return 4 * self.TX * self.RN

    @property
    def invocations(self) -> int:
        return 16 * self.TX * self.TY

    @property
    def bytes(self) -> int:
        """Of workgroup memory."""
        return 64 * self.KT * (self.channels + self.tiles)


LARGE = Tile(8, 4, 2, 2, 8)  # 32 channels × 64 tiles
SMALL = Tile(4, 4, 2, 2, 8)  # 32 × 32: where there are few tiles
SHALLOW = Tile(4, 4, 2, 2, 4)  # the same in the 16 KiB that every device has

# What a workgroup takes to begin and end, and for a step, in µs. Fitted, with the terms of `_cost`, to 24 times of 5
# convolutions on an NVIDIA H200: off by 5% on average, 12% at most, but for one of `SHALLOW` (22%).
COSTS = {LARGE: (10.4, 2.51), SMALL: (6.4, 1.41), SHALLOW: (3.5, 0.85)}


def takes(g: Geometry, b: Builder) -> bool:
    """Whether the kernel computes this convolution, on this device."""
    plain = g.kernel == (3, 3) and g.stride == g.dilation == (1, 1) and g.sets == 1
    return plain and bool(_fitting(b))


def prefers(g: Geometry, b: Builder) -> bool:
    """Whether it is faster than a product of patches, on a GPU."""
    return takes(g, b) and min(g.in_c, g.out_c) >= LEAST_CHANNELS and _count(g)[1] >= LEAST_TILES


def choose(g: Geometry, b: Builder) -> tuple[Tile, int]:
    """The tile, and in how many parts the channels are summed, each by groups of its own: the fastest by `COSTS`."""
    whole = g.batch * g.out_c * g.positions
    most = min(g.in_c // LEAST_DEPTH, tiles.MOST_IN_PARTS // whole)
    ways = [(tile, parts) for tile in _fitting(b) for parts in PARTS if parts <= max(1, most)]
    return min(ways, key=lambda way: _cost(g, *way))


def _cost(g: Geometry, tile: Tile, parts: int) -> float:
    """µs. Each processor takes one group after the other; parts are then added."""
    costs = tiles.SHIPPED
    edge, step = COSTS[tile]
    chunk, parts = _split(g, tile, parts)
    tiles_m, tiles_n = _groups(g, tile)
    adding = costs.adding + costs.element * (parts + 1) * g.batch * g.out_c * g.positions / 1e6
    rounds = -(-parts * tiles_m * tiles_n // costs.processors)
    return rounds * (edge + chunk // tile.KT * step) + (adding if parts > 1 else 0)


def launch(x: Tensor, weight: Value, g: Geometry, whole: tuple[int, ...], dtype: str, b: Builder) -> Value:
    """x: `[N, C, H, W]`, weight: `[O, C, 3, 3]`; the result has the shape `whole`, `[N, O, out_h, out_w]`."""
    tile, parts = choose(g, b)
    wide = -(-g.out_c // 4) * 4
    kernels = _points(b.contiguous(weight), g, wide, b)
    across, count = _count(g)
    tiles_m, tiles_n = _groups(g, tile)
    chunk, parts = _split(g, tile, parts)
    params = {"images": g.batch, "wide": wide, "tiles_w": across, "tiles_hw": count // g.batch}
    params |= {"tiles_m": tiles_m, "tiles_n": tiles_n, "chunk": chunk}
    sums = b.launch(
        "conv_winograd",
        shape=whole if parts == 1 else (parts, *whole),
        dtype=dtype if parts == 1 else "float32",
        reads={"x": x, "u": Vector(kernels)},
        groups=parts * tiles_m * tiles_n,
        params=g.params(x) | params,
        constants=asdict(tile),
    )
    return sums if parts == 1 else add_parts(parts_along(sums, 0, b), dtype, b)


def _points(weight: Tensor, g: Geometry, wide: int, b: Builder) -> Tensor:
    """The kernels' 16 points, float32 `[C, 16, wide]`: of constant weights, made once, when a program is loaded."""
    count = g.in_c * 16 * wide
    return b.contiguous(
        b.launch(
            "winograd_weights",
            shape=(g.in_c, 16, wide),
            dtype="float32",
            reads={"weight": weight},
            groups=-(-count // WORKGROUP),
            params={"w_start": weight.offset, "out_c": g.out_c, "in_c": g.in_c, "wide": wide, "count": count},
        )
    )


def _count(g: Geometry) -> tuple[int, int]:
    """Tiles of a row, of all pictures."""
    across = -(-g.out[1] // 2)
    return across, g.batch * -(-g.out[0] // 2) * across


def _groups(g: Geometry, tile: Tile) -> tuple[int, int]:
    """Blocks of channels, and of tiles."""
    return -(-g.out_c // tile.channels), -(-_count(g)[1] // tile.tiles)


def _split(g: Geometry, tile: Tile, parts: int) -> tuple[int, int]:
    """(channels of a part, parts): whole steps, and no part without one."""
    chunk = -(-g.in_c // (tile.KT * parts)) * tile.KT
    return chunk, -(-g.in_c // chunk)


def _fitting(b: Builder) -> list[Tile]:
    """The tiles of the choice; `SHALLOW` where there is no memory for another."""
    can = b.capabilities
    fits = [tile.invocations <= can.max_invocations and tile.bytes <= can.max_workgroup_bytes for tile in COSTS]
    found = list(itertools.compress(COSTS, fits))
    return [tile for tile in found if tile != SHALLOW] or found
