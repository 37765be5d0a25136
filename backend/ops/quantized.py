"""Linear layers and embeddings over packed weights of 4 and 8 bits, and activations rounded to 8 bits.

`backend.passes.quantized` makes these operators of what torchao exports; `backend.quantization` says how codes are
packed. A quantized linear is the product of `matmul` with another way of loading the weight: `gemm_lanes` on
processors, `gemv_codes` for at most 8 rows, `gemm_wide` or `gemm`, with the loader of codes.wgsl. Weights stay packed
on the GPU. In dynamic modes the activations are rounded to what 8 bits and the row's scale can hold
(`zoo.round_rows`), as torchao's eager mode does, and the product is computed in f32, as there; in those of the PT2E
flow, one scale holds for all (`zoo.round_tensor`).

zoo.quantized_linear     input [..., K], weight int32 [N, words], scale [N, K / group], zero_point? int, bias? [N],
                         bits, group → [..., N]
zoo.quantized_embedding  weight, scale, zero_point? as above, indices, depth, bits, group → [..., depth]
                         zero_point may be a fraction
zoo.round_rows           input [..., K], eps → the same shape
zoo.round_tensor         input of any shape, eps → the same shape
aten._int_mm             self int8 [M, K], mat2 int8 [K, N] → int32 [M, N], exact
"""

from __future__ import annotations

import math
from typing import Any

from backend.graph import Call, TensorSpec
from backend.ops import gemv, lanes, normed, registry, tiles
from backend.ops.matmul import Operand, fast_axis, in_memory, product, tile_block
from backend.ops.registry import FLOATS, INTS, WIDE_INTS, register
from backend.quantization import RANGES, group_refusal, row_words
from backend.runtime import value as values
from backend.runtime.builder import Builder
from backend.runtime.value import Value

WORKGROUP = 256
GEMV_ROWS = 8  # gemv_codes.wgsl holds so many
# Of few bytes each, workgroups spend most of their time beginning and ending: where a GPU has very many of them, each
# takes QUADS times as many columns (and on a processor, where it does no harm).
MANY_GROUPS, QUADS = 4096, 4


def _accepts_weight(call: Call, depth: Any, name: str) -> str | None:
    """Layout of weight, scale and zero point for rows of `depth` codes."""
    weight, scale, zero = call["weight"], call["scale"], call.get("zero_point")
    bits, group = call["bits"], call["group"]
    if bits not in RANGES:
        return f"{name}: no kernel for {bits}-bit weights"
    if not isinstance(depth, int) or not weight.is_static or weight.rank != 2:
        return f"{name}: the size of the quantized weight is dynamic"
    reason = group_refusal(depth, bits, group)
    if reason is not None:
        return f"{name}: {reason}"
    rows = weight.shape[0]
    if weight.dtype != "int32" or weight.shape != (rows, row_words(depth, bits)):
        return f"{name}: the weight is not packed for {depth} codes of {bits} bits"
    count = rows * (depth // group)
    if scale.dtype not in FLOATS or not scale.is_static or math.prod(scale.shape) != count:
        return f"{name}: one scale a group is needed"
    kinds = INTS if name == "linear" else INTS + FLOATS
    if zero is not None and (zero.dtype not in kinds or not zero.is_static or math.prod(zero.shape) != count):
        return f"{name}: one {'whole ' if kinds == INTS else ''}zero point a group is needed"
    return None


def _accepts_linear(call: Call) -> str | None:
    x, out, bias = call["input"], call.outputs[0], call.get("bias")
    rows: TensorSpec = call["weight"]
    if x.dtype not in FLOATS or out.dtype != x.dtype:
        return f"no kernel for {x.dtype if x.dtype not in FLOATS else out.dtype}"
    if x.rank == 0 or out.rank == 0:
        return "linear: an operand without dimensions"
    reason = _accepts_weight(call, x.shape[-1], "linear")
    if reason is None and out.shape[-1] != rows.shape[0]:
        reason = "linear: the result does not have the weight's rows"
    if reason is None and bias is not None and (bias.dtype != x.dtype or bias.shape != (rows.shape[0],)):
        reason = "linear: the bias is not one number a row of the weight"
    return reason


def _accepts_embedding(call: Call) -> str | None:
    out = call.outputs[0]
    if call["indices"].dtype not in WIDE_INTS or out.dtype not in FLOATS:
        return f"no kernel for {out.dtype if out.dtype not in FLOATS else call['indices'].dtype}"
    if call["weight"].rank == 2 and call["weight"].shape[0] == 0:
        return "embedding: the table is empty"
    return _accepts_weight(call, call["depth"], "embedding")


def _accepts_rounding(call: Call) -> str | None:
    x, out = call["input"], call.outputs[0]
    if x.dtype not in FLOATS or out.dtype != x.dtype:
        return f"no kernel for {x.dtype if x.dtype not in FLOATS else out.dtype}"
    if x.rank == 0 and call.op == "zoo.round_rows":
        return "a tensor without dimensions has no rows"
    if x.dtype == "float16" and call.op == "zoo.round_tensor":
        return "no kernel for float16"
    return None if isinstance(call["eps"], (int, float)) and call["eps"] > 0 else "eps is not a positive number"


def _weight_reads(call: Call, depth: int, b: Builder) -> tuple[dict[str, Any], dict[str, int], bool]:
    """(reads, params, has_zero) of codes.wgsl."""
    reads = {"b": b.contiguous(call["weight"]), "scale": b.contiguous(call["scale"])}
    zero = call.get("zero_point")
    if zero is not None:
        reads["zero"] = b.contiguous(zero)
    assert all(read.offset == 0 for read in reads.values()), "parts of a quantized weight are whole tensors"
    params = {"words": reads["b"].shape[-1], "scales": depth // call["group"], "group": call["group"]}
    return reads, params, zero is not None


def _lower_linear(call: Call, b: Builder) -> Value:
    out, x, bias, bits = call.outputs[0], call["input"], call.get("bias"), call["bits"]
    depth, cols = x.shape[-1], out.shape[-1]
    rows = math.prod(x.shape[:-1])
    if rows * cols == 0:
        return values.scalar(0, out.dtype, out.shape)
    fused = gemv.fused_rows(x, rows, cols, b) if depth % (32 // bits) == 0 else None
    if fused is not None:
        reads, params, has_zero = _weight_reads(call, depth, b)
        params |= {"rows": rows, "cols": cols, "depth": depth, **fused.params}
        return _with_bias(_few_rows(fused.reads | reads, params, bits, has_zero, fused.constants, out, b), bias, out, b)
    fused = normed.many_rows(x, b) if rows > GEMV_ROWS and tiles.usable(b) else None
    if fused is not None:
        return _with_bias(_many_rows((rows, cols, depth), fused, call, b), bias, out, b)
    tensor = in_memory(b.reshape(x, (rows, depth)), b)
    a = Operand(tensor, (), tensor.strides[0], tensor.strides[1])
    vec = a.vector_axis(rows, depth)
    if rows > GEMV_ROWS and tiles.usable(b):
        plain = normed.Rows({"a": a.read(bool(vec))}, a.params("a"), {"a_vec": vec, "a_fast": fast_axis(a, vec)})
        return _with_bias(_many_rows((rows, cols, depth), plain, call, b), bias, out, b)
    reads, params, has_zero = _weight_reads(call, depth, b)
    params |= {"rows": rows, "cols": cols, "depth": depth, **a.params("a")}
    on_lanes = lanes.usable(b) and (rows > GEMV_ROWS or lanes.fills(1, rows, cols))
    if rows <= GEMV_ROWS and not on_lanes:
        is_vec = vec == "k" and depth % (32 // bits) == 0
        constants = {"a_vec": is_vec, **gemv.NO_NORM}
        result = _few_rows({"a": a.read(is_vec), **reads}, params, bits, has_zero, constants, out, b)
    elif on_lanes:
        vec = lanes.along_depth(vec)
        result = lanes.launch(
            (1, rows, cols, depth), shape=(rows, cols), dtype=out.dtype, reads={"a": a.read(bool(vec)), **reads},
            params=params | {"b_start": 0}, b=b,
            constants={"batch_dims": 0, "a_vec": vec, "b_bits": bits, "has_zero": has_zero},
        )  # fmt: skip
    else:
        block = tile_block(1, rows, cols, b)
        tiles_m, tiles_n = -(-rows // (8 * block)), -(-cols // (8 * block))
        params |= {"tiles_m": tiles_m, "tiles_n": tiles_n, "b_start": 0}
        constants = {"scalar": "f32", "batch_dims": 0, "T": block, "a_vec": vec, "a_fast": fast_axis(a, vec)}
        constants |= {"b_bits": bits, "has_zero": has_zero, "b_vec": "", "b_fast": ""}
        result = b.launch(
            "gemm", shape=(rows, cols), dtype=out.dtype, reads={"a": a.read(bool(vec)), **reads}, params=params,
            constants=constants, groups=tiles_m * tiles_n,
        )  # fmt: skip
    return _with_bias(result, bias, out, b)


def _few_rows(
    reads: dict[str, Any], params: dict[str, Any], bits: int, has_zero: bool, rows: dict[str, Any], out: Any,
    b: Builder,
) -> Value:  # fmt: skip
    """`rows`: the constants that say how the kernel takes its rows."""
    bucket = next(size for size in (1, 2, 4, 8) if size >= params["rows"])
    width = 32 // bits
    constants = {"bits": bits, "has_zero": has_zero, "ROWS": bucket, "ragged": params["depth"] % width != 0}
    groups = -(-params["cols"] // 4)
    constants |= gemv.walk(params["depth"], width, bucket, groups, b)
    quads = QUADS if bucket == 1 and not rows["norm"] and groups >= MANY_GROUPS else 1
    constants["QUADS"] = quads
    return b.launch(
        "gemv_codes", shape=(params["rows"], params["cols"]), dtype=out.dtype, reads=reads, params=params,
        constants=constants | rows, groups=-(-params["cols"] // (4 * quads)),
    )  # fmt: skip


def _many_rows(sizes: tuple[int, int, int], side: normed.Rows, call: Call, b: Builder) -> Value:
    """The product by large tiles; sizes: rows, cols, depth."""
    reads, params, has_zero = _weight_reads(call, sizes[-1], b)
    return tiles.launch(
        tiles.choose((1, *sizes), b), (1, *sizes), shape=sizes[:2], dtype=call.outputs[0].dtype, b=b,
        reads=side.reads | reads, params=side.params | params | {"b_start": 0},
        constants={
            "batch_dims": 0, "b_vec": "codes", "b_fast": "k", "b_bits": call["bits"], "has_zero": has_zero,
            **side.constants,
        },
    )  # fmt: skip


def _with_bias(result: Value, bias: Value | None, out: Any, b: Builder) -> Value:
    result = b.reshape(result, out.shape)
    return result if bias is None else b.pointwise("({0} + {1})", [result, bias], out.dtype, out.shape)


def _lower_embedding(call: Call, b: Builder) -> Value:
    out, depth, indices = call.outputs[0], call["depth"], call["indices"]
    size = call["weight"].shape[0]
    if math.prod(out.shape) == 0:
        return values.scalar(0, out.dtype, out.shape)
    position = b.pointwise("clamp({0}, 0, {1} - 1)", [indices, values.scalar(size, "int32")], "int32", indices.shape)
    reads, params, has_zero = _weight_reads(call, depth, b)
    quads = -(-depth // 4)
    count = indices.numel * quads
    params |= {"count": count, "depth": depth, "quads": quads}
    return b.launch(
        "embedding_codes", shape=out.shape, dtype=out.dtype, reads={**reads, "index": position}, params=params,
        constants={"workgroup": WORKGROUP, "bits": call["bits"], "has_zero": has_zero}, groups=-(-count // WORKGROUP),
    )  # fmt: skip


def _lower_rows(call: Call, b: Builder) -> Value:
    out, x = call.outputs[0], call["input"]
    if x.numel == 0:
        return values.scalar(0, out.dtype, out.shape)
    depth = x.shape[-1]
    rows = x.numel // depth
    half = x.dtype == "float16"
    b.tensor(x)  # read twice
    return b.launch(
        "round_rows", shape=out.shape, dtype=out.dtype, reads={"x": x}, groups=rows,
        params={"depth": depth, "eps": float(call["eps"])},
        constants={"workgroup": 64 if depth <= 512 else 256, "half": half, "given": False},
    )  # fmt: skip


def _lower_tensor(call: Call, b: Builder) -> Value:
    """The extremes first, by the kernels that find them, then the rounding in pieces of `depth`."""
    out, x = call.outputs[0], call["input"]
    if x.numel == 0:
        return values.scalar(0, out.dtype, out.shape)
    b.tensor(x)  # read three times
    extremes = {name: _extreme(op, x, b) for name, op in (("bottom", "amin"), ("top", "amax"))}
    depth = 4 * WORKGROUP
    return b.launch(
        "round_rows", shape=out.shape, dtype=out.dtype, reads={"x": x, **extremes}, groups=-(-x.numel // depth),
        params={"depth": depth, "count": x.numel, "eps": float(call["eps"])},
        constants={"workgroup": WORKGROUP, "half": False, "given": True},
    )  # fmt: skip


def _extreme(op: str, x: Value, b: Builder) -> Value:
    name = f"aten.{op}.default"
    found: Value = registry.get(name).lower(Call(name, {"self": x, "dim": []}, (TensorSpec(x.dtype, ()),)), b)
    return found


def _accepts_int_mm(call: Call) -> str | None:
    """One product of bytes in each; torch has no other form."""
    wrong = [spec.dtype for spec in (call["self"], call["mat2"]) if spec.dtype != "int8"]
    return f"no kernel for {wrong[0]}" if wrong else None


def _lower_int_mm(call: Call, b: Builder) -> Value:
    return product(call["self"], call["mat2"], "int32", b)


register("zoo.quantized_linear", accepts=_accepts_linear, lower=_lower_linear)
register("zoo.quantized_embedding", accepts=_accepts_embedding, lower=_lower_embedding)
register("zoo.round_rows", accepts=_accepts_rounding, lower=_lower_rows)
register("zoo.round_tensor", accepts=_accepts_rounding, lower=_lower_tensor)
register("aten._int_mm.default", accepts=_accepts_int_mm, lower=_lower_int_mm)
