"""SwiGLU: silu(gate) × up, where gate and up are the halves of one product.

zoo.swiglu  input [..., 2 N] → silu(input[..., :N]) × input[..., N:]  [..., N]

`backend.passes.gated` finds it in graphs. A product by large tiles that nobody else reads does it in its own store;
else it is pointwise work on what the product has left in memory. Computed in float32 and rounded once.
"""

from __future__ import annotations

from backend.graph import Call
from backend.ops import tiles
from backend.ops.registry import FLOATS, register
from backend.runtime import value as values
from backend.runtime.builder import Builder
from backend.runtime.value import Pending, Value


def _accepts(call: Call) -> str | None:
    x, out = call["input"], call.outputs[0]
    if x.dtype not in FLOATS or out.dtype != x.dtype:
        return f"no kernel for {x.dtype if x.dtype not in FLOATS else out.dtype}"
    if x.rank == 0 or not isinstance(x.shape[-1], int) or x.shape != (*out.shape[:-1], 2 * out.shape[-1]):
        return "swiglu: the last axis has no two halves of the result's size"
    return None


def _lower(call: Call, b: Builder) -> Value:
    out, x = call.outputs[0], call["input"]
    launch = x.root.launch if isinstance(x.root, Pending) else None
    # A reshaped product's halves may not be those of its columns.
    if launch is not None and x.dtype == launch.dtype and x.shape[-1] == launch.shape[-1]:
        fused = tiles.gated(launch, b)
        if fused is not None:
            return b.reshape(fused, out.shape)
    x = b.movable(x)
    halves = [values.slice_(x, x.rank - 1, start, out.shape[-1]) for start in (0, out.shape[-1])]
    return b.pointwise("(silu({0}) * {1})", halves, out.dtype, out.shape)


register("zoo.swiglu", accepts=_accepts, lower=_lower)
