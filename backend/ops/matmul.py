"""Matrix products: linear, mm, addmm, bmm, baddbmm, mv, dot, matmul.

All are one product [batch…, M, K] × [batch…, K, N] over strides: transposed, sliced and broadcast operands are read
where they lie. The kernel is chosen by shape: `matmul_small` (one invocation a result), `gemm_lanes` (on processors),
`gemv` (at most 16 rows, or columns), `gemm_wide` (large tiles, on GPUs), or `gemm` (small tiles, for integers and where
the device has not what those need). Bias, alpha and beta are pointwise work that the builder moves into the product's
store.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backend.graph import Call, TensorSpec
from backend.ops import gemv, lanes, normed, tiles
from backend.ops.parts import add_parts, parts_along
from backend.ops.pointwise import operand
from backend.ops.registry import FLOATS, INTS, register
from backend.runtime import value as values
from backend.runtime.builder import Builder
from backend.runtime.dispatch import Vector
from backend.runtime.tensor import COMPUTE, Tensor, merge_dims, reshape_strides
from backend.runtime.value import Iota, Load, Value

MOST_WHOLE = 32768  # whole numbers that are added one after the other
FEW_ROWS = 16  # up to so many rows, or columns, a product reads its matrix once
FEW_TILES = 24  # below so many 64 × 64 tiles, smaller ones keep more of a GPU busy; a CPU has few cores to keep busy
FEW_TILES_CPU = 2


@dataclass(frozen=True)
class Operand:
    """One side of a product in memory, as strides: over the merged batch dims, its own axis (M or N), and K."""

    tensor: Tensor
    batch: tuple[int, ...]
    outer: int
    depth: int

    def vector_axis(self, outer_size: int, depth: int) -> str:
        """The axis along which whole vec4s can be read: "k", "outer", or "" for none."""
        rest = [*self.batch, self.tensor.offset]
        if (
            self.depth == 1
            and depth % 4 == 0
            and all(x % 4 == 0 for x in (*rest, 0 if outer_size == 1 else self.outer))
        ):
            return "k"
        if (
            self.outer == 1
            and outer_size % 4 == 0
            and all(x % 4 == 0 for x in (*rest, 0 if depth == 1 else self.depth))
        ):
            return "outer"
        return ""

    def read(self, vectorized: bool) -> Tensor | Vector:
        return Vector(self.tensor) if vectorized else self.tensor

    def params(self, name: str) -> dict[str, int]:
        batch = {f"{name}_batch_{d}": stride for d, stride in enumerate(self.batch)}
        return {f"{name}_start": self.tensor.offset, f"{name}_outer": self.outer, f"{name}_k": self.depth, **batch}


def in_memory(value: Value, b: Builder) -> Tensor:
    """The value in memory with whatever strides it has; what only repeats along an axis is computed once."""
    value = b.movable(value)
    if value.tensor is not None or value.numel == 0:
        return b.tensor(value)
    walked = [leaf for leaf in values.leaves(value.root) if isinstance(leaf, (Load, Iota))]
    strides = [leaf.tensor.strides if isinstance(leaf, Load) else leaf.strides for leaf in walked]
    own = value
    for axis in range(value.rank):
        if all(step[axis] == 0 for step in strides):
            own = values.slice_(own, axis, 0, 1)
    tensor = values.expand(values.of_tensor(b.tensor(own)), value.shape).tensor
    assert tensor is not None
    return tensor


def product(left: Value, right: Value, dtype: str, b: Builder) -> Value:
    """[batch…, M, K] × [batch…, K, N], the batch dims broadcast; a value of `dtype`, not dispatched yet."""
    rows, depth, cols = left.shape[-2], left.shape[-1], right.shape[-1]
    batch = broadcast(left.shape[:-2], right.shape[:-2])
    shape = (*batch, rows, cols)
    if math.prod(shape) == 0 or depth == 0:
        return values.scalar(0, dtype, shape)
    first, second = in_memory(left, b), in_memory(right, b)
    if math.prod(second.shape[:-2]) == 1 and math.prod(batch) > 1:
        folded = reshape_strides(first.shape[:-1], first.strides[:-1], (math.prod(first.shape[:-1]),))
        if folded is not None:
            first = first.with_view((math.prod(first.shape[:-1]), depth), (folded[0], first.strides[-1]), first.offset)
            second = second.with_view(second.shape[-2:], second.strides[-2:], second.offset)
    if COMPUTE[dtype] == "f32":
        chunk = _chunk(math.prod(shape), min(rows, cols), depth)
        if b.capabilities.most_iterations is not None:  # 4 lanes at least walk the depth
            chunk = min(chunk, 4 * b.capabilities.most_iterations)
    else:  # whole numbers wrap alike in any order, and no loop grows too long
        chunk = min(depth, MOST_WHOLE)
    launch = _launch if chunk == depth else functools.partial(_launch_in_parts, chunk)
    result = launch(first, second, shape, dtype, b)
    return result if result.dtype == dtype else values.cast(result, dtype)


def _chunk(count: int, narrow: int, depth: int) -> int:
    """How many products are added one after the other. A sum of tens of thousands in a row loses three digits more than
    one in parts (attention between channels, over all positions of a picture). `gemv` adds 64 sums side by side."""
    chunk = max(tiles.RUN, 4 * -(-depth // (4 * tiles.MOST_PARTS)))
    long = depth > tiles.LONG_DEPTH and narrow > FEW_ROWS
    return chunk if long and count * -(-depth // chunk) <= tiles.MOST_IN_PARTS else depth


def _launch_in_parts(chunk: int, first: Tensor, second: Tensor, shape: Sequence[int], dtype: str, b: Builder) -> Value:
    """The product as a sum over chunks of depth, which are one more dim of batches; what is left over comes last."""
    depth = first.shape[-1]
    parts = depth // chunk
    rows, cols = first.shape[-2], second.shape[-1]

    def split(tensor: Tensor, axis: int, own: tuple[int, int]) -> Tensor:
        step = tensor.strides[axis]
        strides = (*tensor.strides[:-2], chunk * step, *tensor.strides[-2:])
        return tensor.with_view((*tensor.shape[:-2], parts, *own), strides, tensor.offset)

    # The batch may have been folded into rows: what is asked for has other dims than the operands.
    inner = (*broadcast(first.shape[:-2], second.shape[:-2]), rows, cols)
    whole = (*inner[:-2], parts, rows, cols)
    kind = "float32" if COMPUTE[dtype] == "f32" else dtype if dtype == "int64" else "int32"
    sums = _launch(split(first, -1, (rows, chunk)), split(second, -2, (chunk, cols)), whole, kind, b)
    slices = parts_along(sums, len(inner) - 2, b)
    if depth % chunk:
        left, right = values.of_tensor(first), values.of_tensor(second)
        rest = [
            values.slice_(side, side.rank + axis, parts * chunk, depth % chunk).tensor
            for side, axis in ((left, -1), (right, -2))
        ]
        assert rest[0] is not None and rest[1] is not None
        slices.append(b.movable(_launch(rest[0], rest[1], inner, kind, b)))
    made = dtype if kind == "float32" else kind
    return b.reshape(add_parts(slices, made, b), shape)


def broadcast(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    """torch's broadcast of two shapes that are known to be compatible."""
    rank = max(len(first), len(second))
    a = (1,) * (rank - len(first)) + tuple(first)
    b = (1,) * (rank - len(second)) + tuple(second)
    return tuple(y if x == 1 else x for x, y in zip(a, b, strict=True))


def _launch(first: Tensor, second: Tensor, shape: Sequence[int], dtype: str, b: Builder) -> Value:
    rows, depth = first.shape[-2:]
    cols = second.shape[-1]
    batch_shape = broadcast(first.shape[:-2], second.shape[:-2])
    a_batch, b_batch = (_batch_strides(tensor, batch_shape) for tensor in (first, second))
    runs = merge_dims(batch_shape, [a_batch, b_batch])
    batch = math.prod(batch_shape)
    a = Operand(first, tuple(steps[0] for _, steps in runs), first.strides[-2], first.strides[-1])
    w = Operand(second, tuple(steps[1] for _, steps in runs), second.strides[-1], second.strides[-2])
    integer = COMPUTE[dtype] == "i32"
    # Small ints wrap after the sum; the kernel itself computes in i32.
    kernel_dtype = dtype if not integer or dtype == "int64" else "int32"
    constants: dict[str, Any] = {"scalar": "i32" if integer else "f32", "batch_dims": len(runs)}
    params = {f"batch_{d}": size for d, (size, _) in enumerate(runs)}
    out_strides = (cols, 1)
    few = min(rows, cols) <= FEW_ROWS
    if depth <= 8 or (rows <= 16 and cols <= 16 and depth <= 64 and batch >= 32):
        count = batch * rows * cols
        params |= {"count": count, "rows": rows, "cols": cols, "depth": depth, **a.params("a"), **w.params("b")}
        return b.launch(
            "matmul_small", shape=shape, dtype=kernel_dtype, reads={"a": first, "b": second}, groups=-(-count // 64),
            params=params, constants=constants,
        )  # fmt: skip
    if not integer and lanes.usable(b) and (not few or lanes.fills(batch, rows, cols)):
        if lanes.turns(rows, cols):
            a, w, rows, cols, out_strides = w, a, cols, rows, (1, cols)
        a_vec, b_vec = lanes.along_depth(a.vector_axis(rows, depth)), w.vector_axis(cols, depth)
        params |= {"out_m": out_strides[0], "out_n": out_strides[1], **a.params("a"), **w.params("b")}
        return lanes.launch(
            (batch, rows, cols, depth), shape=shape, dtype=kernel_dtype, b=b, params=params,
            reads={"a": a.read(bool(a_vec)), "b": w.read(bool(b_vec))},
            constants={"batch_dims": len(runs), "a_vec": a_vec, "b_vec": b_vec},
        )  # fmt: skip
    if few:
        if rows > cols:  # the transposed product, stored transposed
            a, w, rows, cols, out_strides = w, a, cols, rows, (1, cols)
        return _launch_gemv(a, w, (batch, rows, cols, depth), out_strides, shape, kernel_dtype, params, constants, b)
    if not integer and tiles.usable(b):
        a_vec, b_vec = a.vector_axis(rows, depth), w.vector_axis(cols, depth)
        sizes = (batch, rows, cols, depth)
        return tiles.launch(
            tiles.choose(sizes, b), sizes, shape=shape, dtype=kernel_dtype,
            reads={"a": a.read(bool(a_vec)), "b": w.read(bool(b_vec))}, params=params | a.params("a") | w.params("b"),
            constants={
                "batch_dims": len(runs), "a_vec": a_vec, "b_vec": b_vec,
                "a_fast": fast_axis(a, a_vec), "b_fast": fast_axis(w, b_vec),
            }, b=b,
        )  # fmt: skip
    block = tile_block(batch, rows, cols, b)
    tiles_m, tiles_n = -(-rows // (8 * block)), -(-cols // (8 * block))
    a_vec, b_vec = a.vector_axis(rows, depth), w.vector_axis(cols, depth)
    params |= {"rows": rows, "cols": cols, "depth": depth, "tiles_m": tiles_m, "tiles_n": tiles_n}
    constants |= {"T": block, "a_vec": a_vec, "b_vec": b_vec, "b_bits": 0}
    constants |= {"a_fast": fast_axis(a, a_vec), "b_fast": fast_axis(w, b_vec)}
    return b.launch(
        "gemm", shape=shape, dtype=kernel_dtype, reads={"a": a.read(bool(a_vec)), "b": w.read(bool(b_vec))},
        groups=batch * tiles_m * tiles_n, params=params | a.params("a") | w.params("b"), constants=constants,
    )  # fmt: skip


def tile_block(batch: int, rows: int, cols: int, b: Builder) -> int:
    """How many results an invocation of gemm.wgsl holds along each axis: 8, or 4 where that leaves too few tiles."""
    big_tiles = batch * -(-rows // 64) * -(-cols // 64)
    enough = FEW_TILES_CPU if b.capabilities.on_processor else FEW_TILES
    return 8 if big_tiles >= enough and min(rows, cols) > 32 else 4


def _launch_gemv(
    a: Operand, w: Operand, sizes: tuple[int, int, int, int], out_strides: tuple[int, int], shape: Sequence[int],
    dtype: str, params: dict[str, Any], constants: dict[str, Any], b: Builder,
) -> Value:  # fmt: skip
    batch, rows, cols, depth = sizes
    vec = w.vector_axis(cols, depth)
    axis = "k" if w.depth == 1 and (w.outer != 1 or depth >= 64) else "n"
    width = 4 if vec == ("k" if axis == "k" else "outer") else 1
    a_vec = axis == "k" and width == 4 and a.vector_axis(rows, depth) == "k"
    lanes = 16 if cols > 32 else 4
    span = 4 if axis == "k" else 4 * lanes
    tiles_n = -(-cols // span)
    bucket = next(size for size in (1, 2, 4, 8, 16) if size >= rows)
    constants |= {"axis": axis, "width": width, "a_vec": a_vec, "ROWS": bucket, "LANES": lanes, **gemv.NO_NORM}
    constants |= gemv.walk(depth, width, bucket, batch * tiles_n, b) if axis == "k" else gemv.LOOP
    params |= {"rows": rows, "cols": cols, "depth": depth, "tiles_n": tiles_n}
    params |= {"out_m": out_strides[0], "out_n": out_strides[1], **a.params("a"), **w.params("b")}
    return b.launch(
        "gemv", shape=shape, dtype=dtype, reads={"a": a.read(a_vec), "b": w.read(width == 4)},
        groups=batch * tiles_n, params=params, constants=constants,
    )  # fmt: skip


def _batch_strides(tensor: Tensor, batch_shape: Sequence[int]) -> tuple[int, ...]:
    own = tensor.shape[:-2]
    steps = (0 if size == 1 else stride for size, stride in zip(own, tensor.strides[:-2], strict=True))
    return (0,) * (len(batch_shape) - len(own)) + tuple(steps)


def fast_axis(side: Operand, vec: str) -> str:
    """The axis that neighbouring invocations follow when they read."""
    return vec or ("outer" if side.outer == 1 else "k")


# --- declarations -----------------------------------------------------------------------------------------------------


def _accepts(call: Call) -> str | None:
    """Floats or ints, all of one dtype, as torch wants them."""
    specs: list[TensorSpec] = list(call.tensors())
    found = {spec.dtype for spec in specs}
    wrong = sorted(found - set(FLOATS + INTS))
    if wrong:
        return f"no kernel for {wrong[0]}"
    if len(found | {call.outputs[0].dtype}) > 1:
        return f"operands of different dtypes: {', '.join(sorted(found | {call.outputs[0].dtype}))}"
    scalars = [call.args[name] for name in ("alpha", "beta") if name in call.args]
    if any(not isinstance(item, (int, float)) for item in scalars):
        return "alpha or beta is not a number"
    if call.outputs[0].dtype in INTS and any(item != int(item) or not -(2**31) <= item < 2**31 for item in scalars):
        return "alpha or beta does not fit the GPU's 32-bit integers"
    return None


def _lower_mm(call: Call, b: Builder) -> Value:
    return product(call["self"], call["mat2"], call.outputs[0].dtype, b)


def _lower_matmul(call: Call, b: Builder) -> Value:
    """mv, dot and matmul: a rank-1 operand is a row on the left, a column on the right."""
    out = call.outputs[0]
    left = call["self"]
    right = next(call[name] for name in ("other", "vec", "tensor") if name in call.args)
    if left.rank == 1:
        left = b.reshape(left, (1, left.numel))
    if right.rank == 1:
        right = b.reshape(right, (right.numel, 1))
    return b.reshape(product(left, right, out.dtype, b), out.shape)


def _lower_linear(call: Call, b: Builder) -> Value:
    out = call.outputs[0]
    x = call["input"]
    weight = b.movable(call["weight"])
    if weight.rank == 1:
        weight = b.reshape(weight, (1, weight.numel))
    if x.rank == 1:
        x = b.reshape(x, (1, x.numel))
    result = _fused_gemv(x, weight, out.dtype, b) or _normed_product(x, weight, out.dtype, b)
    result = b.reshape(result or product(x, values.permute(weight, (1, 0)), out.dtype, b), out.shape)
    bias = call.get("bias")
    return result if bias is None else b.pointwise("({0} + {1})", [result, bias], out.dtype, out.shape)


def _fused_gemv(x: Value, weight: Value, dtype: str, b: Builder) -> Value | None:
    """The product of few rows with what comes before it in the same kernel, where that is worth it."""
    cols, depth = weight.shape
    rows = math.prod(x.shape[:-1])
    if not 0 < rows <= cols or depth < 64 or COMPUTE[dtype] != "f32" or weight.tensor is None:
        return None
    w = Operand(weight.tensor, (), weight.tensor.strides[0], weight.tensor.strides[1])
    if w.vector_axis(cols, depth) != "k":
        return None
    fused = gemv.fused_rows(x, rows, cols, b)
    if fused is None:
        return None
    tiles_n = -(-cols // 4)
    bucket = next(size for size in (1, 2, 4) if size >= rows)
    constants = {"scalar": "f32", "batch_dims": 0, "axis": "k", "width": 4, "LANES": 16, "ROWS": bucket}
    constants |= gemv.walk(depth, 4, bucket, tiles_n, b)
    params = {"rows": rows, "cols": cols, "depth": depth, "tiles_n": tiles_n, "out_m": cols, "out_n": 1}
    return b.launch(
        "gemv", shape=(rows, cols), dtype=dtype, reads={**fused.reads, "b": w.read(True)}, groups=tiles_n,
        params=params | fused.params | w.params("b"), constants={**constants, **fused.constants},
    )  # fmt: skip


def _normed_product(x: Value, weight: Value, dtype: str, b: Builder) -> Value | None:
    """The product by large tiles of rows that their RMSNorm is still to be done for, where it can do that itself."""
    cols, depth = weight.shape
    rows = math.prod(x.shape[:-1])
    if min(rows, cols) <= FEW_ROWS or depth <= 8 or not tiles.usable(b):
        return None
    if weight.tensor is None or _chunk(rows * cols, min(rows, cols), depth) != depth:
        return None
    fused = normed.many_rows(x, b)
    if fused is None:
        return None
    sizes = (1, rows, cols, depth)
    w = Operand(weight.tensor, (), weight.tensor.strides[0], weight.tensor.strides[1])
    vec = w.vector_axis(cols, depth)
    return tiles.launch(
        tiles.choose(sizes, b), sizes, shape=(rows, cols), dtype=dtype, b=b,
        reads={**fused.reads, "b": w.read(bool(vec))}, params=fused.params | w.params("b"),
        constants={
            "batch_dims": 0, "b_vec": vec, "b_fast": fast_axis(w, vec), **fused.constants,
        },
    )  # fmt: skip


def _lower_addmm(call: Call, b: Builder) -> Value:
    """beta × self + alpha × product; with beta = 0, self counts for nothing, NaN or not."""
    out = call.outputs[0]
    names = (
        ("mat", "vec") if "vec" in call.args else ("batch1", "batch2") if "batch1" in call.args else ("mat1", "mat2")
    )
    left, right = (call[name] for name in names)
    if right.rank == 1:
        right = b.reshape(right, (right.numel, 1))
    result = b.reshape(product(left, right, out.dtype, b), out.shape)
    alpha, beta = call.get("alpha", 1), call.get("beta", 1)
    if alpha != 1:
        result = b.pointwise("({0} * {1})", [result, _number(alpha, out.dtype)], out.dtype, out.shape)
    if beta == 0:
        return _wrapped(result)
    if beta == 1:
        return _wrapped(b.pointwise("({0} + {1})", [result, call["self"]], out.dtype, out.shape))
    args = [result, call["self"], _number(beta, out.dtype)]
    return _wrapped(b.pointwise("({0} + {2} * {1})", args, out.dtype, out.shape))


def _number(item: float, dtype: str) -> Value:
    return operand(int(item) if dtype in INTS else float(item), dtype)


def _wrapped(result: Value) -> Value:
    """Small ints wrap once more after an addition in i32."""
    if result.dtype not in values.WRAP:
        return result
    code = values.WRAP[result.dtype].format("{0}")
    return Value(result.shape, result.dtype, values.Apply(code, (result.root,), result.dtype))


register(("aten.mm.default", "aten.bmm.default"), accepts=_accepts, lower=_lower_mm)
register(("aten.addmm.default", "aten.baddbmm.default", "aten.addmv.default"), accepts=_accepts, lower=_lower_addmm)
register(("aten.mv.default", "aten.dot.default"), accepts=_accepts, lower=_lower_matmul)
register("aten.matmul.default", accepts=_accepts, lower=_lower_matmul, preserve=True)
register("aten.linear.default", accepts=_accepts, lower=_lower_linear, preserve=True)
