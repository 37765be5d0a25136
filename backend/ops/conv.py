"""Convolutions: conv1d, conv2d, their transposed forms, and aten.convolution, all as one 2-d family; 3-d ones go to
`backend.ops.volume`.

The kernel is chosen by structure, size and kind of adapter (`_choose`). A kernel of one tap is a matrix product; for a
handful of positions it is one of patches. On GPUs many channels go through tiles (`gemm_wide`, or, for 3 × 3,
`backend.ops.winograd`), few channels and depthwise ones are summed directly. On processors `conv_lanes` sums what has a
few channels. A transposed convolution is a matrix product whose results are gathered, or a direct gather. Bias is
pointwise work that the builder moves into the kernel's store.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from backend.graph import Call, TensorSpec
from backend.ops import tiles, volume, winograd
from backend.ops.matmul import product
from backend.ops.parts import add_parts
from backend.ops.registry import FLOATS, register
from backend.runtime import value as values
from backend.runtime.builder import Builder
from backend.runtime.dispatch import Vector
from backend.runtime.tensor import Tensor
from backend.runtime.value import Value

WORKGROUP = 64
FEW_POSITIONS = 8  # up to so many results a channel, the product is one of a matrix and few vectors
FEW_CHANNELS = 8  # below so many output channels a group, a tile would be mostly empty
FEW_TILES = 24  # below so many 64 x 64 tiles, smaller ones keep more of the GPU busy
SHALLOW = 8  # below so many products a result, staging does not pay
LONGEST = 8  # taps in a row: so many are unrolled
SPAN = 8  # positions of a row that an invocation of conv_lanes sums
LARGE = 2**26  # bytes above which products of a transposed convolution are not kept, but gathered from the inputs


@dataclass(frozen=True)
class Geometry:
    """A convolution's sizes with height first; a 1-d one has height 1. Channels are a group's own."""

    batch: int
    sets: int
    in_c: int
    out_c: int
    size: tuple[int, int]
    out: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def positions(self) -> int:
        return math.prod(self.out)

    @property
    def depth(self) -> int:
        return self.in_c * math.prod(self.kernel)

    @property
    def is_deep(self) -> bool:
        return self.depth > tiles.LONG_DEPTH

    @property
    def iterations(self) -> int:
        """Of all loops of an invocation, in the kernel that has most; a loop's last test is one."""
        height, width = self.kernel
        return self.in_c * (2 + height * (2 + width))

    @property
    def run(self) -> int:
        """Channels whose products are added in a row."""
        return max(1, tiles.RUN // math.prod(self.kernel))

    @property
    def is_pointwise(self) -> bool:
        return self.kernel == (1, 1) and self.padding == (0, 0) and self.sets == 1

    @property
    def is_flat(self) -> bool:
        """One row, and kernels of one row."""
        return self.size[0] == self.out[0] == self.kernel[0] == 1 and self.padding[0] == 0

    def params(self, x: Tensor) -> dict[str, Any]:
        pairs = {
            "in": self.size,
            "out": self.out,
            "kernel": self.kernel,
            "stride": self.stride,
            "pad": self.padding,
            "dil": self.dilation,
        }
        sizes = {f"{name}_{axis}": pair[d] for name, pair in pairs.items() for d, axis in enumerate("hw")}
        steps = {f"x_{axis}": stride & 0xFFFFFFFF for axis, stride in zip("nchw", x.strides, strict=True)}
        counts = {"in_c": self.in_c, "out_c": self.out_c, "sets": self.sets, "positions": self.positions}
        return sizes | steps | counts | {"x_start": x.offset}


def _pair(item: Any, dims: int, lead: int) -> tuple[int, int]:
    """A schema's number or list of `dims` numbers, or of one for all, as (height, width)."""
    numbers = [item] if isinstance(item, int) else list(item)
    numbers = numbers * dims if len(numbers) == 1 else numbers
    return (lead, numbers[0]) if dims == 1 else (numbers[0], numbers[1])


def _padding(call: Call, kernel: tuple[int, int], dilation: tuple[int, int], dims: int) -> tuple[int, int]:
    """What is in front of the input; the output's size says what is behind it ("same" may put one more there)."""
    padding = call.get("padding", 0)
    if isinstance(padding, str):
        total = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
        return (0, 0) if padding == "valid" else (total[0] // 2, total[1] // 2)
    return _pair(padding, dims, 0)


def _lower(call: Call, b: Builder) -> Value:
    out = call.outputs[0]
    x, weight = call["input"], call["weight"]
    dims = weight.rank - 2
    if dims == 3:
        return volume.lower(call, b)
    transposed = call.get("transposed", False) or "transpose" in call.op
    sets = call.get("groups", 1)
    size = x.shape[-dims:]
    kernel = _pair(weight.shape[2:], dims, 1)
    stride, dilation = _pair(call.get("stride", 1), dims, 1), _pair(call.get("dilation", 1), dims, 1)
    batch = x.shape[0] if x.rank == weight.rank else 1
    channels = x.shape[-dims - 1]
    out_channels = out.shape[-dims - 1]
    g = Geometry(
        batch,
        sets,
        channels // sets,
        out_channels // sets,
        _pair(size, dims, 1),
        _pair(out.shape[-dims:], dims, 1),
        kernel,
        stride,
        _padding(call, kernel, dilation, dims),
        dilation,
    )
    whole = (batch, out_channels, *g.out)
    if math.prod(whole) == 0 or x.numel == 0 or weight.numel == 0:
        result = values.scalar(0, out.dtype, whole)
    else:
        x = b.reshape(x, (batch, channels, *g.size))
        weight = b.reshape(weight, (*weight.shape[:2], *kernel))
        result = (_transposed if transposed else _forward)(x, weight, g, whole, out.dtype, b)
    bias = call.get("bias")
    if bias is not None:
        bias = b.reshape(bias, (out_channels, 1, 1))
        result = b.pointwise("({0} + {1})", [result, bias], out.dtype, whole)
    return b.reshape(result, out.shape)


def _forward(x: Value, weight: Value, g: Geometry, whole: tuple[int, ...], dtype: str, b: Builder) -> Value:
    if g.is_pointwise:
        if g.stride != (1, 1):
            x = b.movable(x)
            for axis in (0, 1):
                x = values.slice_(x, 2 + axis, 0, g.out[axis], g.stride[axis])
        x = b.reshape(x, (g.batch, g.in_c, g.positions))
        return b.reshape(product(b.reshape(weight, (g.out_c, g.in_c)), x, dtype, b), whole)
    most = b.capabilities.most_iterations
    pieces = 1 if most is None else -(-g.iterations // most)
    if pieces > 1 and g.sets == 1:
        return _in_pieces(-(-g.in_c // pieces), x, weight, g, whole, dtype, b)
    source = b.tensor(x)
    few = g.batch == 1 and g.sets == 1 and g.positions <= FEW_POSITIONS
    if few and g.out_c >= FEW_CHANNELS and g.depth >= SHALLOW:
        count = g.positions * g.depth
        params = g.params(source) | {"count": count, "depth": g.depth}
        patches = b.launch(
            "conv_unfold",
            shape=(g.positions, g.depth),
            dtype=source.dtype,
            reads={"x": source},
            groups=-(-count // WORKGROUP),
            params=params,
        )
        columns = values.permute(b.movable(patches), (1, 0))
        return b.reshape(product(b.reshape(weight, (g.out_c, g.depth)), columns, dtype, b), whole)
    return KERNELS[_choose(g, b)](source, weight, g, whole, dtype, b)


def _in_pieces(
    channels: int, x: Value, weight: Value, g: Geometry, whole: tuple[int, ...], dtype: str, b: Builder
) -> Value:
    """The sum of the convolutions of so many input channels each."""
    x, weight = b.movable(x), b.movable(weight)
    sums = []
    for first in range(0, g.in_c, channels):
        count = min(channels, g.in_c - first)
        some, kernels = (values.slice_(side, 1, first, count) for side in (x, weight))
        sums.append(b.movable(_forward(some, kernels, replace(g, in_c=count), whole, "float32", b)))
    return add_parts(sums, dtype, b)


def _choose(g: Geometry, b: Builder) -> str:
    """The kernel, one of `KERNELS`, of what is neither a product of matrices nor of a handful of positions."""
    many = g.out_c >= FEW_CHANNELS and g.depth >= SHALLOW
    if not b.capabilities.on_processor:
        return "direct" if not many else "winograd" if winograd.prefers(g, b) else "tiles"
    if g.out_c >= FEW_CHANNELS and _takes("lanes", g, b):
        return "lanes"
    # Staging costs more than it saves, except where a tile is large and full.
    return "tiles" if many and g.out_c >= 64 and g.depth >= 256 and _big_tiles(g) >= FEW_TILES else "direct"


def _takes(kernel: str, g: Geometry, b: Builder) -> bool:
    """Whether the kernel computes this convolution, on this device."""
    if kernel == "lanes":
        return g.out_c % 4 == 0 and g.kernel[1] <= LONGEST and g.out[1] > 2 and "subgroup" in b.capabilities.features
    return kernel != "winograd" or winograd.takes(g, b)


def _big_tiles(g: Geometry) -> int:
    return g.sets * -(-g.out_c // 64) * -(-(g.batch * g.positions) // 64)


def _aligned(value: Value, b: Builder) -> Tensor:
    """The value in memory, contiguous and readable four elements at a time."""
    tensor = b.contiguous(value)
    if tensor.offset % 4 == 0:
        return tensor
    copy = b.temp(tensor.shape, tensor.dtype)
    b.write(values.of_tensor(tensor), copy)
    return copy


def _direct(x: Tensor, weight: Value, g: Geometry, whole: tuple[int, ...], dtype: str, b: Builder) -> Value:
    packed = g.out_c % 4 == 0
    if packed:  # a group's channels innermost, so that the weights of four are one load
        weight = values.permute(b.movable(b.reshape(weight, (g.sets, g.out_c, g.depth))), (0, 2, 1))
    kernels = _aligned(weight, b) if packed else b.contiguous(weight)
    block = 1 if g.out_c == 1 else 4 if g.out_c <= 4 or not packed else 8
    wide = g.out[1] > 2
    blocks, spans = -(-g.out_c // block), -(-g.out[1] // 4) if wide else g.out[1]
    count = g.batch * g.sets * blocks * g.out[0] * spans
    params = {"w_start": kernels.offset, "last_quad": (kernels.offset + kernels.numel) // 4 - 1}
    params |= {"blocks": blocks, "spans": spans, "count": count, "run": g.run}
    return b.launch(
        "conv_direct",
        shape=whole,
        dtype=dtype,
        reads={"x": x, "weight": Vector(kernels) if packed else kernels},
        groups=-(-count // WORKGROUP),
        params=g.params(x) | params,
        constants={
            "BLOCK": block,
            "WIDE": wide,
            "SLIDE": wide and g.stride[1] == g.dilation[1] == 1,
            "PACKED": packed,
            "DEEP": g.is_deep,
        },
    )


def _lanes(x: Tensor, weight: Value, g: Geometry, whole: tuple[int, ...], dtype: str, b: Builder) -> Value:
    weight = values.permute(b.movable(b.reshape(weight, (g.sets, g.out_c, g.depth))), (0, 2, 1))
    kernels = _aligned(weight, b)
    block = 16 if g.out_c <= 16 else 32
    span = 4 if g.out[1] <= 4 else SPAN
    blocks, spans = -(-g.out_c // block), -(-g.out[1] // span)
    picture = -(-g.out[0] * spans // 4) * 4
    planes = g.batch * g.sets * blocks
    stride, dilation = g.stride[1], g.dilation[1]
    columns = {j * stride + k * dilation for j in range(span) for k in range(g.kernel[1])}
    params = {"blocks": blocks, "spans": spans, "picture": picture, "planes": planes, "run": g.run}
    params |= {"w_start": kernels.offset // 4, "last_quad": (kernels.offset + kernels.numel) // 4 - 1}
    constants = {"BLOCK": block, "SPAN": span, "KW": g.kernel[1], "STRIDE": stride, "DILATION": dilation}
    constants["DEEP"] = g.is_deep
    return b.launch(
        "conv_lanes",
        shape=whole,
        dtype=dtype,
        reads={"x": x, "weight": Vector(kernels)},
        groups=-(-planes * picture // WORKGROUP),
        params=g.params(x) | params,
        constants=constants | {"COLUMNS": tuple(sorted(columns))},
    )


def _tiled(x: Tensor, weight: Value, g: Geometry, whole: tuple[int, ...], dtype: str, b: Builder) -> Value:
    # With the taps outermost, four products in a row are of one tap: one test of bounds for all.
    taps_first = g.in_c % 4 == 0 and g.kernel != (1, 1)
    kernels = b.contiguous(values.permute(b.movable(weight), (0, 2, 3, 1)) if taps_first else weight)
    vector = g.depth % 4 == 0 and kernels.offset % 4 == 0
    count = g.batch * g.positions
    params = g.params(x) | {"a_start": kernels.offset, "depth": g.depth}
    if tiles.usable(b):
        sizes = (g.sets, g.out_c, count, g.depth)
        return tiles.launch(
            tiles.choose_patches(sizes, b), sizes, shape=whole, dtype=dtype,
            reads={"a": Vector(kernels) if vector else kernels, "x": x},
            params=params | {"a_outer": g.depth, "a_k": 1, "images": g.batch},
            constants={
                "CONV": True, "FLAT": g.is_flat, "TAPS_FIRST": taps_first, "a_vec": "k" if vector else "", "b_vec": "",
                "a_fast": "k", "b_fast": "outer",
            }, b=b,
        )  # fmt: skip
    block = 8 if g.out_c > 32 and _big_tiles(g) >= FEW_TILES else 4
    tiles_m, tiles_n = -(-g.out_c // (8 * block)), -(-count // (8 * block))
    chunk = -(-g.depth // (128 // block)) * (128 // block)
    return b.launch(
        "conv_tile",
        shape=whole,
        dtype=dtype,
        reads={"weight": Vector(kernels) if vector else kernels, "x": x},
        groups=g.sets * tiles_m * tiles_n,
        params=params
        | {"weight_outer": g.depth, "weight_k": 1, "count": count, "batch": g.batch}
        | {"tiles_m": tiles_m, "tiles_n": tiles_n, "chunk": chunk},
        constants={"T": block, "a_vec": "k" if vector else "", "TAPS_FIRST": taps_first, "flat": g.is_flat}
        | {"RUN": tiles.RUN if g.is_deep else 0},
    )


KERNELS = {"direct": _direct, "lanes": _lanes, "tiles": _tiled, "winograd": winograd.launch}


def _transposed(x: Value, weight: Value, g: Geometry, whole: tuple[int, ...], dtype: str, b: Builder) -> Value:
    source = b.tensor(x)
    taps = math.prod(g.kernel)
    products = (g.batch, g.out_c * taps, math.prod(g.size))
    channels = g.sets > 1 or g.in_c < FEW_CHANNELS or 4 * math.prod(products) > LARGE
    kernels = b.contiguous(weight)
    params = g.params(source)
    if channels:
        reads = {"x": source, "weight": kernels}
    else:
        by_tap = values.permute(b.reshape(values.of_tensor(kernels), (g.in_c, g.out_c * taps)), (1, 0))
        planes = b.reshape(values.of_tensor(source), (g.batch, g.in_c, products[2]))
        sums = b.contiguous(product(by_tap, planes, "float32", b))
        reads = {"x": sums}
        params |= {"x_start": sums.offset}
    steps = [stride // math.gcd(stride, dilation) for stride, dilation in zip(g.stride, g.dilation, strict=True)]
    count = math.prod(whole)
    return b.launch(
        "conv_transpose",
        shape=whole,
        dtype=dtype,
        reads=reads,
        groups=-(-count // WORKGROUP),
        params=params | {"w_start": kernels.offset, "step_h": steps[0], "step_w": steps[1], "count": count},
        constants={"channels": channels, "DENSE": g.dilation == (1, 1), "FLAT": g.is_flat},
    )


# --- declarations -----------------------------------------------------------------------------------------------------


def _accepts(call: Call) -> str | None:
    x, weight = call["input"], call["weight"]
    found = {spec.dtype for spec in call.tensors()} | {call.outputs[0].dtype}
    wrong = sorted(found - set(FLOATS))
    if wrong:
        return f"no kernel for {wrong[0]}"
    if len(found) > 1:
        return f"operands of different dtypes: {', '.join(sorted(found))}"
    if weight.rank not in (3, 4, 5):
        return f"no kernel for {weight.rank - 2}-d convolution"
    if x.rank not in (weight.rank, weight.rank - 1):
        return f"input of rank {x.rank} for a kernel of rank {weight.rank}"
    bias = call.get("bias")
    if isinstance(bias, TensorSpec) and bias.rank != 1:
        return f"bias of rank {bias.rank}"
    padding = call.get("padding", 0)
    if isinstance(padding, str) and padding not in ("valid", "same"):
        return f"unknown padding {padding!r}"
    return None


register(
    (
        "aten.conv1d.default",
        "aten.conv2d.default",
        "aten.conv_transpose1d.default",
        "aten.conv_transpose2d.input",
        "aten.conv1d.padding",
        "aten.conv2d.padding",
        "aten.conv3d.default",
        "aten.conv3d.padding",
        "aten.conv_transpose3d.input",
    ),
    accepts=_accepts,
    lower=_lower,
    preserve=True,
)
register("aten.convolution.default", accepts=_accepts, lower=_lower)
