"""embedding_bag: rows of a table reduced by bags of indices. There is a kernel for its first output only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from backend.graph import Call
from backend.ops.registry import FLOATS, WIDE_INTS, dtypes, every, register
from backend.ops.rows import reread
from backend.runtime import value as values
from backend.runtime.value import Value

WORKGROUP = 64
MODES = ("sum", "mean", "max")


def _accepts(call: Call) -> str | None:
    if any(spec is not None for spec in call.outputs[1:]):
        return "embedding_bag: there is a kernel for its first output only"
    if call.get("include_last_offset", False) and call.get("mode", 0) != 0:
        # Its own float32 and float64 kernels differ when the last offset is not the number of indices.
        return "embedding_bag: include_last_offset of a mean or maximum, which torch itself reads in several ways"
    if call["indices"].rank != 1 or 0 in call["weight"].shape[:1]:
        return "embedding_bag: indices are one row, and the table is not empty"
    return None


def _lower(call: Call, b: Any) -> tuple[Value | None, ...]:
    out = call.outputs[0]
    table, index, offsets, scale = (call[name] for name in ("weight", "indices", "offsets", "per_sample_weights"))
    count = math.prod(out.shape)
    rest = (None,) * (len(call.outputs) - 1)
    if count == 0 or index.numel == 0:
        return values.scalar(0, out.dtype, out.shape), *rest
    reads = {"table": table, "index": reread(index, b), "offsets": reread(offsets, b)}
    if scale is not None:
        reads["scale"] = reread(scale, b)
    result = b.launch(
        "bag",
        shape=out.shape,
        dtype=out.dtype,
        reads=reads,
        params={
            "count": count,
            "inner": table.shape[1],
            "size": table.shape[0],
            "n": index.numel,
            "offsets": offsets.numel,
            "padding": np.int32(call.get("padding_idx", -1)),
        },
        constants={"workgroup": WORKGROUP, "MODE": MODES[call.get("mode", 0)], "WEIGHTED": scale is not None},
        groups=-(-count // WORKGROUP),
    )
    return result, *rest


register(
    ("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default"),
    accepts=every(dtypes(FLOATS, "weight", "per_sample_weights"), dtypes(WIDE_INTS, "indices", "offsets"), _accepts),
    lower=_lower,
)
