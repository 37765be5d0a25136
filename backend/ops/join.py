"""Tensors put together and padded: cat, stack, constant_pad_nd."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from backend.graph import Call
from backend.ops.registry import ALL, dtypes, normalize_axis, register
from backend.runtime import value as values
from backend.runtime.tensor import COMPUTE, Tensor, contiguous_strides
from backend.runtime.value import Value

WORKGROUP = 256


def concatenate(parts: Sequence[Value], axis: int, dtype: str, shape: Sequence[int], b: Any) -> Value:
    """The parts along `axis`, cast to `dtype`; empty ones (also of another rank, as torch allows) are skipped."""
    shape = tuple(shape)
    parts = [values.cast(part, dtype) for part in parts if part.numel]
    if not parts:
        return values.scalar(0, dtype, shape)
    if len(parts) == 1:
        return parts[0]
    outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    limit = max(1, b.capabilities.max_storage_buffers - 1)
    if outer == 1 and any(part.pending for part in parts):
        return _side_by_side(parts, dtype, shape, b)
    if len(parts) <= limit:
        reads, params = _part_params(parts, axis, inner)
        row = shape[axis] * inner
        params |= {"count": outer * row, "row": row, "out_row": row, "start": 0}
        return b.launch("cat", shape=shape, dtype=dtype, reads=reads, params=params, **_geometry(params, dtype, parts))
    target = b.temp(shape, dtype)
    start = 0
    for first in range(0, len(parts), limit):
        chunk = parts[first : first + limit]
        reads, params = _part_params(chunk, axis, inner)
        row = sum(part.shape[axis] for part in chunk) * inner
        params |= {"count": outer * row, "row": row, "out_row": shape[axis] * inner, "start": start}
        b.launch_into("cat", targets={"out": target}, reads=reads, params=params, **_geometry(params, dtype, chunk))
        start += row
    return values.of_tensor(target)


def _side_by_side(parts: Sequence[Value], dtype: str, shape: tuple[int, ...], b: Any) -> Value:
    """Parts that are contiguous in the result: each kernel not yet dispatched writes its result in place."""
    target: Tensor = b.temp(shape, dtype)
    start = 0
    for part in parts:
        b.write(part, target.with_view(part.shape, contiguous_strides(part.shape), start))
        start += part.numel
    return values.of_tensor(target)


def _part_params(parts: Sequence[Value], axis: int, inner: int) -> tuple[dict[str, Value], dict[str, Any]]:
    params: dict[str, Any] = {}
    end = 0
    for number, part in enumerate(parts):
        length = part.shape[axis] * inner
        end += length
        params |= {f"len{number}": length, f"end{number}": end}
    return {f"x{number}": part for number, part in enumerate(parts)}, params


def _geometry(params: dict[str, Any], dtype: str, parts: Sequence[Value]) -> dict[str, Any]:
    return {
        "groups": -(-params["count"] // WORKGROUP),
        "constants": {"workgroup": WORKGROUP, "kind": COMPUTE[dtype], "parts": len(parts)},
    }


def _lower_cat(call: Call, b: Any) -> Value:
    out = call.outputs[0]
    axis = normalize_axis(call.get("dim", 0), len(out.shape))
    return concatenate(call["tensors"], axis, out.dtype, out.shape, b)


def _lower_stack(call: Call, b: Any) -> Value:
    out = call.outputs[0]
    axis = normalize_axis(call.get("dim", 0), len(out.shape))
    one = (*out.shape[:axis], 1, *out.shape[axis + 1 :])
    return concatenate([b.reshape(part, one) for part in call["tensors"]], axis, out.dtype, out.shape, b)


register(("aten.cat.default", "aten.concat.default"), accepts=dtypes(ALL), lower=_lower_cat)
register("aten.stack.default", accepts=dtypes(ALL), lower=_lower_stack)


# --- padding ----------------------------------------------------------------------------------------------------------


def pad_constant(x: Value, before: Sequence[int], after: Sequence[int], fill: Any, b: Any) -> Value:
    """`x` with `before[d]` elements of `fill` in front of axis d and `after[d]` behind; negative ones cut."""
    if any(amount < 0 for amount in (*before, *after)):
        x = b.movable(x)
        for axis, (low, high) in enumerate(zip(before, after, strict=True)):
            if low < 0 or high < 0:
                x = values.slice_(x, axis, max(-low, 0), x.shape[axis] + min(low, 0) + min(high, 0))
    before, after = [max(amount, 0) for amount in before], [max(amount, 0) for amount in after]
    if not any(before) and not any(after):
        return x
    shape = tuple(low + size + high for low, size, high in zip(before, x.shape, after, strict=True))
    if x.numel == 0:
        return Value(shape, x.dtype, values.cast_expression(values.Scalar(_scalar_dtype(fill), fill), x.dtype))
    axes: list[list[int]] = []  # [size, before, wide]
    for size, low, wide in zip(x.shape, before, shape, strict=True):
        if axes and size == wide:
            # An axis without padding scales the one around it: [size, before, wide] × n.
            axes[-1] = [amount * size for amount in axes[-1]]
        else:
            axes.append([size, low, wide])
    kind = COMPUTE[x.dtype]
    scalar = values.cast_expression(values.Scalar(_scalar_dtype(fill), fill), x.dtype)
    assert isinstance(scalar, values.Scalar)
    number = np.int32(scalar.value) if kind == "i32" else float(scalar.value) if kind == "f32" else int(scalar.value)
    params: dict[str, Any] = {"count": math.prod(shape), "value": number}
    for d, (size, low, wide) in enumerate(axes):
        params |= {f"size{d}": size, f"before{d}": low, f"wide{d}": wide}
    return b.launch(
        "pad",
        shape=shape,
        dtype=x.dtype,
        reads={"x": x},
        params=params,
        constants={"workgroup": WORKGROUP, "rank": len(axes), "kind": kind},
        groups=-(-params["count"] // WORKGROUP),
    )


def _scalar_dtype(item: Any) -> str:
    return "bool" if isinstance(item, bool) else "int64" if isinstance(item, int) else "float32"


def _lower_pad(call: Call, b: Any) -> Value:
    x = call["self"]
    pads = list(call["pad"])
    before, after = [0] * x.rank, [0] * x.rank
    for pair in range(len(pads) // 2):  # pairs start at the last axis
        before[x.rank - 1 - pair], after[x.rank - 1 - pair] = pads[2 * pair], pads[2 * pair + 1]
    return pad_constant(x, before, after, call.get("value", 0), b)


def _accepts_pad(call: Call) -> str | None:
    value = call.get("value", 0)
    if call["self"].dtype in ("int64", "int32") and not -(2**31) <= value < 2**31:
        return f"constant_pad_nd: {value} does not fit the GPU's 32 bits"
    return dtypes(ALL, "self")(call)


register("aten.constant_pad_nd.default", accepts=_accepts_pad, lower=_lower_pad)
