"""Attention without a mask on processors that stand in for a GPU: two products by `gemm_lanes`, a softmax between them.

There it takes a fifth of the time of a running softmax in workgroup memory. Scores are kept for some queries at a time,
so that they stay few; with causality, those see no keys behind the last of them.
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
    query: Value, key: Value, value: Value, scale: float, causal: bool, shape: tuple[int, ...], dtype: str, b: Builder
) -> Value:
    """query [..., Q, d], key [..., K, d], value [..., K, e] → `shape`, [..., Q, e]; heads of key and value may each
    serve several of query's."""
    heads, queries, keys = shape[:-2], shape[-2], key.shape[-2]
    query, key, value = (b.movable(x) for x in (query, key, value))
    turned = values.permute(key, (*range(key.rank - 2), key.rank - 1, key.rank - 2))
    block = max(1, MOST_SCORES // (math.prod(heads) * keys))
    block = min(block, CAUSAL_BLOCK if causal else queries)
    parts = []
    for first in range(0, queries, block):
        count = min(block, queries - first)
        seen = min(keys, first + count) if causal else keys
        rows = values.slice_(query, query.rank - 2, first, count)
        scores = _by_head(rows, values.slice_(turned, turned.rank - 1, 0, seen), (*heads, count, seen), "float32", b)
        args, code = [scores, operand(scale, "float32")], "({0} * {1})"
        if causal:
            last = b.reshape(values.iota(count, first, 1, "int32"), (count, 1))
            args += [values.iota(seen, 0, 1, "int32"), last]
            code = "select({0} * {1}, -inf(), {2} > {3})"
        weights = softmax(b.pointwise(code, args, "float32", scores.shape), -1, "float32", b)
        seen_values = values.slice_(value, value.rank - 2, 0, seen)
        # Computed now: until then the weights would be kept, of all blocks together.
        parts.append(b.movable(_by_head(b.movable(weights), seen_values, (*heads, count, shape[-1]), dtype, b)))
    return concatenate(parts, len(shape) - 2, dtype, shape, b)


def _by_head(left: Value, right: Value, shape: tuple[int, ...], dtype: str, b: Builder) -> Value:
    """The product, of `shape`, where heads of right may each serve several neighbours of left's."""
    heads, own = (1, *shape)[-3], (1, *right.shape)[-3]
    if own not in (1, heads):
        left = b.reshape(left, (*left.shape[:-3], own, heads // own, *left.shape[-2:]))
        right = b.reshape(right, (*right.shape[:-3], own, 1, *right.shape[-2:]))
    return b.reshape(product(left, right, dtype, b), shape)
