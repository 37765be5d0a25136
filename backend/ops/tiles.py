"""Large tiles (gemm_wide.wgsl): which one a product or convolution takes on a GPU, and how its depth is split.

A `Rule` chooses. The one used is `Costs`: a model of the time that each tile takes, of which the fastest is taken. Its
numbers were measured (`SHIPPED`), or are those of this very adapter (`zoo tune`, backend/ops/calibration.py). Parts are
added in their order: the result of a shape is always the same under one rule.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

from backend.ops.parts import add_parts, parts_along, sum_code
from backend.runtime import value as values
from backend.runtime.builder import Builder
from backend.runtime.capabilities import Capabilities
from backend.runtime.dispatch import Launch, Vector
from backend.runtime.tensor import Tensor
from backend.runtime.value import Value

BUSY = 256  # workgroups that keep a large GPU busy: about two on each of its processors
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
MOST_PARTS = PARTS[-1]
MOST_IN_PARTS = 2**22  # elements of the parts together, float32
SECOND = 1.15  # how much faster a way must be for a second dispatch, which costs the host time too
LONG_DEPTH = 4096  # up to so many products are added one after the other: a long row of sums loses digits
RUN = 2048  # beyond that, so many, and then their sum to those before
LEAST_DEPTH = 128  # of a part: below it, adding up costs more than it saves


@dataclass(frozen=True)
class Tile:
    """TX × TY invocations, each with 4 RM rows and 4 RN columns, KT deep a step; a multiple of 32 invocations.

    SLICES: so many times the invocations, which share the steps. BUFFERS: of workgroup memory, as gemm_wide.wgsl says.
    """

    TX: int
    TY: int
    RM: int
    RN: int
    KT: int
    SLICES: int = 1
    BUFFERS: int = 2

    @property
    def rows(self) -> int:
        return 4 * self.TY * self.RM

    @property
    def cols(self) -> int:
        return 4 * self.TX * self.RN

    @property
    def stride(self) -> int:
        """The depth of one step of all slices."""
        return self.KT * self.SLICES

    @property
    def invocations(self) -> int:
        return self.TX * self.TY * self.SLICES

    @property
    def bytes(self) -> int:
        """Of workgroup memory."""
        return 4 * self.stride * self.BUFFERS * (self.rows + self.cols)

    @property
    def resident(self) -> int:
        """Groups that a processor of a GPU takes as long for as for one: two warps for each of its four schedulers."""
        return 2 if self.invocations <= 128 else 1

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.cols}x{self.KT}/{self.invocations} slices {self.SLICES} buffers {self.BUFFERS}"

    def fits(self, can: Capabilities) -> bool:
        return self.invocations <= can.max_invocations and self.bytes <= can.max_workgroup_bytes

    def count(self, rows: int, cols: int) -> int:
        return -(-rows // self.rows) * -(-cols // self.cols)


HUGE = Tile(8, 16, 2, 4, 16, BUFFERS=1)  # 128 × 128
HUGE_HALVED = Tile(8, 16, 2, 4, 16, SLICES=2, BUFFERS=1)
LARGE = Tile(16, 16, 2, 2, 16, BUFFERS=1)  # 128 × 128 by more invocations: less work for each
TALL = Tile(8, 16, 2, 2, 8)  # 128 × 64
MEDIUM = Tile(8, 8, 2, 2, 16, BUFFERS=1)  # 64 × 64
MEDIUM_QUARTERED = Tile(8, 8, 2, 2, 16, SLICES=4, BUFFERS=1)
SMALL_HALVED = Tile(8, 8, 1, 1, 16, SLICES=2, BUFFERS=1)  # 32 × 32
SMALL_QUARTERED = Tile(8, 8, 1, 1, 16, SLICES=4)

TILES = (HUGE, HUGE_HALVED, LARGE, TALL, MEDIUM, MEDIUM_QUARTERED, SMALL_HALVED, SMALL_QUARTERED)

LONG = Tile(16, 8, 2, 2, 8)  # 64 × 128, for patches alone
LONG_DEEP = Tile(16, 8, 2, 2, 16)

Sizes = tuple[int, int, int, int]  # batches, rows, cols, depth


@dataclass(frozen=True)
class Choice:
    """A tile, and in how many parts at most the depth is summed, each by groups of its own."""

    tile: Tile
    parts: int = 1

    def split(self, depth: int) -> tuple[int, int]:
        """(depth of a part, parts): whole steps, and no part without one."""
        chunk = -(-depth // (self.tile.stride * self.parts)) * self.tile.stride
        return chunk, -(-depth // chunk)


class Rule(Protocol):
    def choose(self, sizes: Sizes, tiles: tuple[Tile, ...]) -> Choice:
        """One of `tiles`, which all run on the device."""
        ...


@dataclass(frozen=True)
class Fixed:
    """The rule of measurements and tests: always the same."""

    choice: Choice

    def choose(self, sizes: Sizes, tiles: tuple[Tile, ...]) -> Choice:
        return self.choice


class Rate(NamedTuple):
    """What a step of depth 1 of a tile takes, in µs.

    alone: bound by latencies, however many groups a processor works on at a time (`Tile.resident`). shared: of its
    processor's time, for each group. The larger counts; 0 is never the larger. edge: to fill and empty a group's
    pipeline and to store its results, as so much more depth.
    """

    alone: float
    shared: float
    edge: float


@dataclass(frozen=True)
class Costs:
    """What a product takes on one adapter, in µs. See `terms` for how it adds up.

    processors: groups that run without slowing each other down at all. launch: of a dispatch. adding, element: of the
    dispatch that adds parts, and of a million elements that it reads or writes. rates: of each of `TILES`.
    """

    processors: int
    launch: float
    adding: float
    element: float
    rates: tuple[Rate, ...]

    def choose(self, sizes: Sizes, tiles: tuple[Tile, ...]) -> Choice:
        return _fastest(self, sizes, tiles)

    def predict(self, sizes: Sizes, choice: Choice) -> float:
        """µs."""
        rate = self.rates[TILES.index(choice.tile)]
        once, adds, elements, waves, shares = terms(sizes, choice, self.processors, rate.edge)
        return (
            once * self.launch
            + adds * self.adding
            + elements * self.element
            + max(waves * rate.alone, shares * rate.shared)
        )


def terms(sizes: Sizes, choice: Choice, processors: int, edge: float) -> tuple[float, float, float, float, float]:
    """What launch, adding, element, alone and shared are multiplied with; of the last two the larger counts."""
    batches, rows, cols, depth = sizes
    chunk, parts = choice.split(depth)
    crowd = -(-parts * batches * choice.tile.count(rows, cols) // processors)
    steps = chunk / choice.tile.SLICES + edge
    many = float(parts > 1)
    waves = -(-crowd // choice.tile.resident)
    return 1.0, many, many * (parts + 1) * batches * rows * cols / 1e6, steps * waves, steps * crowd


# Fitted to 682 times of 47 products on an NVIDIA H200 (132 processors), with a relative error of 4%. What the model
# chooses was measured for 39 of them: 2% slower than the fastest way, on geometric average, and 14% at most.
SHIPPED = Costs(
    processors=132, launch=2.117, adding=2.451, element=0.787,
    rates=(
        Rate(0.1779, 0.0964, 21.0), Rate(0.0, 0.1999, 14.6), Rate(0.1027, 0.0, 15.7), Rate(0.0726, 0.0618, 12.6),
        Rate(0.0557, 0.0307, 10.0), Rate(0.0, 0.1241, 12.6), Rate(0.0301, 0.0227, 6.3), Rate(0.0, 0.0538, 19.3),
    ),
)  # fmt: skip


def choices(sizes: Sizes, tiles: Sequence[Tile]) -> list[Choice]:
    """Every way to sum a product that is worth a thought."""
    batches, rows, cols, depth = sizes
    found = []
    for tile in tiles:
        for parts in PARTS:
            whole = parts * batches * rows * cols <= MOST_IN_PARTS and depth >= parts * LEAST_DEPTH
            if parts == 1 or whole:
                found.append(Choice(tile, parts))
    return found


@functools.lru_cache(maxsize=4096)
def _fastest(costs: Costs, sizes: Sizes, tiles: tuple[Tile, ...]) -> Choice:
    """The fastest without a second dispatch, unless one with it is faster by `SECOND`."""
    found = choices(sizes, tiles)
    fastest = min(found, key=lambda choice: costs.predict(sizes, choice))
    whole = min((choice for choice in found if choice.parts == 1), key=lambda choice: costs.predict(sizes, choice))
    return whole if costs.predict(sizes, whole) <= SECOND * costs.predict(sizes, fastest) else fastest


def usable(b: Builder) -> bool:
    """On a processor, staging through registers and workgroup memory costs more than it saves."""
    return not b.capabilities.on_processor and b.capabilities.max_invocations >= 128


def fitting(can: Capabilities) -> tuple[Tile, ...]:
    """Those of `TILES` that a device runs."""
    return tuple(tile for tile in TILES if tile.fits(can))


def choose(sizes: Sizes, b: Builder) -> Choice:
    """What the device's rule says."""
    rule: Rule = b.capabilities.tile_rule or SHIPPED
    return rule.choose(sizes, fitting(b.capabilities))


def choose_patches(sizes: Sizes, b: Builder) -> Choice:
    """The same for a convolution, whose patches are costly to fetch: as many rows (channels) as share them; deep ones
    in parts that keep their digits, as long as there is room for the parts."""
    batches, rows, cols, depth = sizes
    choice = _choose_patches(sizes, b)
    least = -(-depth // RUN) if depth > LONG_DEPTH else 1
    deep = choice.parts < least and least * batches * rows * cols <= MOST_IN_PARTS
    return Choice(choice.tile, least) if deep else choice


def _choose_patches(sizes: Sizes, b: Builder) -> Choice:
    batches, rows, cols, depth = sizes
    groups = batches * LONG.count(rows, cols)
    parts = max(1, min(-(-BUSY // groups), MOST_PARTS, depth // LEAST_DEPTH))
    if rows > SMALL_HALVED.rows and groups * parts >= BUSY // 2:
        deep = groups < BUSY and LONG_DEEP.fits(b.capabilities)
        return Choice(LONG_DEEP if deep else LONG, parts)
    return choose(sizes, b)


def launch(
    choice: Choice, sizes: Sizes, *, shape: Sequence[int], dtype: str, reads: Mapping[str, Value | Tensor | Vector],
    params: Mapping[str, Any], constants: Mapping[str, Any], b: Builder,
) -> Value:  # fmt: skip
    """sizes: batches, rows, cols, depth. params and constants: what gemm_wide.wgsl wants besides the tile's own.

    A part knows the squares of its own part of a row: with `norm`, they are added up, and scale, where the parts are.
    """
    batches, rows, cols, depth = sizes
    tile = choice.tile
    chunk, parts = choice.split(depth)
    tiles_m, tiles_n = -(-rows // tile.rows), -(-cols // tile.cols)
    own = {"rows": rows, "cols": cols, "depth": depth, "chunk": chunk}
    own |= {"tiles_m": tiles_m, "tiles_n": tiles_n, "batches": batches}
    shape = tuple(shape)
    norm = bool(constants.get("norm"))
    usual = {
        "CONV": False,
        "FLAT": False,
        "TAPS_FIRST": False,
        "norm": norm,
        "norm_weight": False,
        "norm_apart": norm and parts > 1,
        "GATED": False,
    }
    kernel: dict[str, Any] = {
        "reads": reads, "groups": parts * batches * tiles_m * tiles_n, "params": own | dict(params),
        "constants": asdict(tile) | usual | dict(constants), "row": params.get("positions", cols),
    }  # fmt: skip
    if parts == 1:
        return b.launch("gemm_wide", shape=shape, dtype=dtype, **kernel)
    if not norm:
        whole = b.launch("gemm_wide", shape=(parts, *shape), dtype="float32", **kernel)
        return add_parts(parts_along(whole, 0, b), dtype, b)
    found = {"out": b.temp((parts, *shape), "float32"), "squares": b.temp((parts, rows, 1), "float32")}
    b.launch_into("gemm_wide", targets=found, **kernel)
    sums, squares = (values.of_tensor(found[name]) for name in ("out", "squares"))
    numbers = [values.scalar(float(item), "float32") for item in (depth, params["eps"])]
    code = f"(({sum_code(parts)}) * (1.0 / sqrt(({sum_code(parts, parts)}) / {{{2 * parts}}} + {{{2 * parts + 1}}})))"
    return b.pointwise(code, [*parts_along(sums, 0, b), *parts_along(squares, 0, b), *numbers], dtype, shape)


def gated(product: Launch, b: Builder) -> Value | None:
    """silu(first half) × second half of a pending product's columns, by its own kernel; None: it cannot do that."""
    if product.template != "gemm_wide" or product.done is not None:
        return None
    made, params = product.constants, product.params
    *lead, cols = product.shape
    half = cols // 2
    if made["CONV"] or made["GATED"] or params["chunk"] < params["depth"] or (made["b_vec"] == "outer" and half % 4):
        return None
    tiles_n = -(-half // (4 * made["TX"] * made["RN"] // 2))
    return b.launch(
        "gemm_wide", shape=(*lead, half), dtype=product.dtype, reads=product.reads,
        groups=params["batches"] * params["tiles_m"] * tiles_n, params={**params, "half": half, "tiles_n": tiles_n},
        constants={**made, "GATED": True}, row=half,
    )  # fmt: skip
