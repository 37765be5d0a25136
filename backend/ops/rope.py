"""Rotary embedding as one pointwise kernel (`backend.passes.rope` finds it in graphs).

x is seen as two halves, or as pairs; its partner is the same tensor with that axis of two walked backwards, so that no
half is copied anywhere.
"""

from __future__ import annotations

from typing import Any

from backend.graph import Call
from backend.ops.registry import FLOATS, dtypes, register
from backend.runtime import value as values
from backend.runtime.value import Value


def _accepts(call: Call) -> str | None:
    x, out = call["x"], call.outputs[0]
    if x.rank == 0 or not isinstance(x.shape[-1], int) or x.shape[-1] % 2:
        return "rope: the last axis has no two halves"
    if out.dtype != x.dtype or out.shape != x.shape:
        return "rope: cos and sin widen the input"
    for table in (call["cos"], call["sin"]):
        if table.rank > x.rank or table.rank == 0 or table.shape[-1] != x.shape[-1]:
            return "rope: cos and sin do not cover the last axis"
        if any(a != 1 and a != b for a, b in zip(table.shape[::-1], x.shape[::-1], strict=False)):
            return "rope: cos and sin are not of the input's shape"
    return dtypes(FLOATS)(call)


def _lower(call: Call, b: Any) -> Value:
    x: Value = call["x"]
    axis = x.rank if call["interleaved"] else x.rank - 1  # of the two partners
    half = x.shape[-1] // 2

    def split(value: Value) -> Value:
        pair = (half, 2) if call["interleaved"] else (2, half)
        return b.movable(b.reshape(b.movable(value), (*value.shape[:-1], *pair)))

    own = split(x)
    partner = values.slice_(own, axis, 1, 2, -1)
    sign = values.iota(2, -1.0, 2.0, "float32")
    sign = sign if call["interleaved"] else b.reshape(sign, (2, 1))
    args = [own, split(call["cos"]), partner, split(call["sin"]), sign]
    turned = b.pointwise("({0} * {1} + {2} * {3} * {4})", args, x.dtype, own.shape)
    return b.reshape(turned, x.shape)


register("zoo.rope", accepts=_accepts, lower=_lower)
