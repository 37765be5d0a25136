"""Rotary embedding: alone, or with all that stands between a step's first product and its attention.

`zoo.rope` is one pointwise kernel (`backend.passes.rope` finds it in graphs): x is seen as two halves, or as pairs; its
partner is the same tensor with that axis of two walked backwards, so that no half is copied anywhere.

`zoo.rope_cache` (`backend.passes.cache`) is one kernel for a whole fused projection: queries and keys are normed and
rotated, keys and values written into their caches.

zoo.rope        x [..., E], cos, sin broadcast to it, interleaved → like x
zoo.rope_cache  x [B, S, H + 2 K, E], weight? [H + K, E] or [E], eps (None: no RMSNorm), cos, sin [S, 1, E],
                interleaved, keys, values [B, K, C, E], index int [S] → query [B, S, H, E], keys, values
"""

from __future__ import annotations

from typing import Any

from backend.graph import Call
from backend.ops.index import position_to_write, updatable
from backend.ops.registry import FLOATS, WIDE_INTS, dtypes, register
from backend.ops.rows import Rows, held, reread
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


def _accepts_cache(call: Call) -> str | None:
    x, keys, values_, index, weight = (call.get(name) for name in ("x", "keys", "values", "index", "weight"))
    query = call.outputs[0]
    wrong = dtypes(FLOATS, "x", "weight", "cos", "sin", "keys", "values")(call) or dtypes(WIDE_INTS, "index")(call)
    if wrong:
        return wrong
    if query is None or x.rank != 4 or keys.rank != 4 or index.rank != 1 or keys.shape != values_.shape:
        return "rope_cache: x and the caches have four axes, the index one"
    batch, positions, heads, width = query.shape
    kv_heads = keys.shape[1]
    if not all(isinstance(size, int) for size in (heads, kv_heads, width)) or width % 2 or not width:
        return "rope_cache: the last axis has no two halves"
    if x.shape != (batch, positions, heads + 2 * kv_heads, width) or keys.shape[::3] != (batch, width):
        return "rope_cache: x is not queries, keys and values of the caches' heads"
    if any(table.shape != (positions, 1, width) for table in (call["cos"], call["sin"])) or index.shape != (positions,):
        return "rope_cache: cos, sin and index are not by position"
    if weight is not None and weight.shape not in ((heads + kv_heads, width), (width,)):
        return "rope_cache: the weight is not by head"
    if any(
        out is not None and out.dtype != cache.dtype
        for out, cache in zip(call.outputs[1:], (keys, values_), strict=True)
    ):
        return "rope_cache: outputs of other dtypes than the caches"
    if query.dtype not in FLOATS:
        return f"no kernel for {query.dtype}"
    if keys.state is not None and keys.state == values_.state:
        return "rope_cache: keys and values in one cache"
    eps = call.get("eps")
    return None if eps is None or isinstance(eps, (int, float)) else "rope_cache: eps is not a number"


def _lower_cache(call: Call, b: Any) -> tuple[Value, ...]:
    x, keys = call["x"], call["keys"]
    batch, positions, heads, width = call.outputs[0].shape
    kv_heads, capacity = keys.shape[1:3]
    rows = Rows(batch * positions * (heads + 2 * kv_heads), width, 1)
    geometry, groups = rows.geometry(b)
    index = position_to_write(call["index"], capacity, b)
    keep = held(width // 2, geometry["lanes"])
    reads = {"x": x if keep else reread(x, b), "index": index}
    for name in ("cos", "sin"):
        reads[name] = b.reshape(call[name], (positions, width))
    if call.get("weight") is not None:
        reads["weight"] = values.expand(b.movable(call["weight"]), (heads + kv_heads, width))
    targets = {"query": b.temp(call.outputs[0].shape, call.outputs[0].dtype)}
    targets |= {name: updatable(call[name], b, output) for output, name in ((1, "keys"), (2, "values"))}
    params = {**rows.params(), "positions": positions, "heads": heads, "kv_heads": kv_heads, "capacity": capacity}
    constants = {**geometry, "norm": call.get("eps") is not None, "weight": "weight" in reads, "held": keep}
    b.launch_into(
        "rope_cache",
        targets=targets,
        reads=reads,
        params={**params, "eps": float(call.get("eps") or 0.0)},
        constants={**constants, "interleaved": call["interleaved"]},
        groups=groups if rows.count else 0,
    )
    return tuple(values.of_tensor(target) for target in targets.values())


register("zoo.rope", accepts=_accepts, lower=_lower)
register("zoo.rope_cache", accepts=_accepts_cache, lower=_lower_cache)
