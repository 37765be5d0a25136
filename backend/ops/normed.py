"""Products that do the norm of their rows themselves: they read what the norm would have read, and its weights.

A norm before a product is a dispatch of its own and a round trip through memory. A product of few rows
(backend/ops/gemv.py) finds a row's mean and scale in every workgroup. One of many (gemm_wide.wgsl) adds up the squares
of what it fetches anyway and scales its results; only RMSNorm can be done that way: a mean that is subtracted after the
sum costs the digits that it has in common with the row.

A norm that is read by one product alone is still pending when that is lowered; what has more readers is in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from backend.runtime import value as values
from backend.runtime.builder import Builder
from backend.runtime.dispatch import Launch, Vector
from backend.runtime.value import Apply, Pending, Value


@dataclass(frozen=True)
class Rows:
    """Operand `a` of a product's kernel: what is read for it, with the parameters and constants that say how."""

    reads: dict[str, Any]
    params: dict[str, Any]
    constants: dict[str, Any]


def pending_norm(x: Value) -> Launch | None:
    """The kernel of the norm that `x` [..., K] is of float32 rows, if it has not run and nothing else is wanted of it.

    With a cast to float16 behind it: a product that does the norm itself takes the rows before they are rounded.
    """
    root = x.root
    if isinstance(root, Apply) and len(root.args) == 1 and isinstance(root.args[0], Pending):
        narrowed = values.cast_expression(root.args[0], "float16")
        root = root.args[0] if isinstance(narrowed, Apply) and narrowed.code == root.code else root
    if not isinstance(root, Pending) or root.launch.template != "norm" or root.launch.done is not None:
        return None
    launch: Launch = root.launch
    made, source, depth = launch.constants, launch.reads["x"], x.shape[-1]
    if made["writes"] != "out" or made["channels"] or launch.params["n"] != depth or depth % 4:
        return None
    if launch.dtype != "float32" or not isinstance(source, Value) or source.dtype != "float32" or source.pending:
        return None
    return launch


def unnormed(launch: Launch, b: Builder) -> Rows | None:
    """The rows before a `pending_norm` and its weights, by vec4; None where they do not lie so."""
    made, source, depth = launch.constants, launch.reads["x"], launch.params["n"]
    assert isinstance(source, Value)
    tensor = b.contiguous(source)
    reads = {"a": tensor}
    for name in ("weight", "bias"):
        if made[name]:
            factor = launch.reads[name]
            assert isinstance(factor, Value)
            reads[f"norm_{name}"] = b.contiguous(factor)
    if any(read.offset % 4 or read.dtype != "float32" for read in reads.values()):
        return None
    params = {"a_start": tensor.offset, "a_outer": depth, "a_k": 1, "eps": launch.params["eps"]}
    params |= {f"{name}_start": read.offset for name, read in reads.items() if name != "a"}
    constants = {"norm": "rms" if made["rms"] else "layer", "norm_weight": made["weight"], "norm_bias": made["bias"]}
    return Rows({name: Vector(read) for name, read in reads.items()}, params, constants)


def many_rows(x: Value, b: Builder) -> Rows | None:
    """How a product by large tiles takes its rows x [..., K] with the RMSNorm before them; None: from memory."""
    launch = pending_norm(x)
    found = unnormed(launch, b) if launch is not None and launch.constants["rms"] else None
    if found is None:
        return None
    norm = {"norm": True, "norm_weight": found.constants["norm_weight"]}
    return Rows(found.reads, found.params, {"a_vec": "k", "a_fast": "k", **norm})
