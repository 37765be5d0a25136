"""Attention without a mask as two products and a softmax between them, whose scores are kept in memory.

Worth it where the scores are few beside the heads (attention between channels), and on processors that stand in for a
GPU: two products by `gemm_lanes` take a fifth of the time of a running softmax in workgroup memory there (`in_blocks`).
"""

from __future__ import annotations

import math

from backend.ops.join import concatenate
from backend.ops.matmul import product
from backend.ops.norm import softmax
from backend.ops.pointwise import operand
from backend.runtime import value as values
from backend.runtime.builder import Builder
from backend.runtime.value import Value

MOST_SCORES = 2**21  # at a time, float32
CAUSAL_BLOCK = 128  # queries at a time, at most, where later keys are left out


def attend(
    query: Value, key: Value, value: Value, scale: float, dtype: str, b: Builder, first: int | None = None
) -> Value:
    """query [..., Q, d], key [..., K, d], value [..., K, e] → [..., Q, e], not dispatched yet; batch dims broadcast.

    Heads of key and value may each serve several of query's. first: the first query's position, with causality.
    """
    key = b.movable(key)
    turned = values.permute(key, (*range(key.rank - 2), key.rank - 1, key.rank - 2))
    scores = _by_head(query, turned, "float32", b)
    args, code = [scores, operand(scale, "float32")], "({0} * {1})"
    if first is not None:
        queries, keys = scores.shape[-2:]
        last = b.reshape(values.iota(queries, first, 1, "int32"), (queries, 1))
        args += [values.iota(keys, 0, 1, "int32"), last]
        code = "select({0} * {1}, -inf(), {2} > {3})"
    weights = softmax(b.pointwise(code, args, "float32", scores.shape), -1, "float32", b)
    return _by_head(b.movable(weights), value, dtype, b)


def in_blocks(
    query: Value, key: Value, value: Value, scale: float, causal: bool, shape: tuple[int, ...], dtype: str, b: Builder
) -> Value:
    """The same for some queries at a time, so that their scores stay few; with causality, those see no keys behind the
    last of them. shape: of the result, [..., Q, e]."""
    queries, keys = shape[-2], key.shape[-2]
    query, key, value = (b.movable(x) for x in (query, key, value))
    block = max(1, MOST_SCORES // (math.prod(shape[:-2]) * keys))
    block = min(block, CAUSAL_BLOCK if causal else queries)
    parts = []
    for first in range(0, queries, block):
        count = min(block, queries - first)
        seen = min(keys, first + count) if causal else keys
        rows = values.slice_(query, query.rank - 2, first, count)
        seen_keys, seen_values = (values.slice_(side, side.rank - 2, 0, seen) for side in (key, value))
        # Computed now: until then the weights would be kept, of all blocks together.
        part = attend(rows, seen_keys, seen_values, scale, dtype, b, first if causal else None)
        parts.append(b.movable(part))
    return concatenate(parts, len(shape) - 2, dtype, shape, b)


def _by_head(left: Value, right: Value, dtype: str, b: Builder) -> Value:
    """The product, where heads of right may each serve several neighbours of left's."""
    heads, own = (1, *left.shape)[-3], (1, *right.shape)[-3]
    if not 1 < own < heads:
        return product(left, right, dtype, b)
    left = b.reshape(left, (*left.shape[:-3], own, heads // own, *left.shape[-2:]))
    right = b.reshape(right, (*right.shape[:-3], own, 1, *right.shape[-2:]))
    result = product(left, right, dtype, b)
    return b.reshape(result, (*result.shape[:-4], heads, *result.shape[-2:]))
