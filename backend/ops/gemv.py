"""What a product of few rows reads in place of rows in memory: the norm before it, or pointwise work, in one kernel.

A step of a transformer is short kernels whose launches cost as much as their work. A norm of one row is a reduction
that every workgroup of the product can do for itself, and SwiGLU's gate is cheap to compute again. That costs the GPU
arithmetic that it has to spare while weights come from memory; a processor has none, nor has a GPU when the weight has
very many columns (an output head), whose workgroups would do it all again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from backend.runtime import value as values
from backend.runtime.builder import Builder, Launch, Vector
from backend.runtime.value import Pending, Value

MOST_ROWS = 4
MOST_COLUMNS = 8192
MOST_COST = 16  # operations an element


NO_NORM = {"norm": "", "norm_weight": False, "norm_bias": False}


@dataclass(frozen=True)
class Rows:
    """Operand `a` of a gemv kernel: what is read for it, with the parameters and constants that say how."""

    reads: dict[str, Any]
    params: dict[str, Any]
    constants: dict[str, Any]


def spends_arithmetic(cols: int, b: Builder) -> bool:
    """Whether this device computes a gemv's input again in every workgroup rather than once in a kernel of its own."""
    return not b.capabilities.on_processor and cols <= MOST_COLUMNS


def fused_rows(x: Value, rows: int, cols: int, b: Builder) -> Rows | None:
    """How a product [rows, K] × [K, cols] takes its rows without a kernel before it; None: from memory.

    x: [..., K], K divisible by 4.
    """
    depth = x.shape[-1]
    if rows > MOST_ROWS or depth % 4 or not spends_arithmetic(cols, b):
        return None
    if isinstance(x.root, Pending):
        return _normed(x.root.launch, rows, depth, b)
    if x.tensor is not None or x.pending is not None or values.cost(x.root) > MOST_COST:
        return None
    flat = values.reshape(x, (rows, depth))
    if flat is None:
        return None
    return Rows({"a": flat}, {"a_start": 0, "a_outer": depth, "a_k": 1}, {"a_vec": False, **NO_NORM})


def _normed(launch: Launch, rows: int, depth: int, b: Builder) -> Rows | None:
    """The rows of a norm's input, the norm left to the product."""
    made = launch.constants
    if launch.template != "norm" or launch.done is not None or launch.dtype != "float32":
        return None
    if made["writes"] != "out" or made["channels"] or launch.params["n"] != depth:
        return None
    source = launch.reads["x"]
    if not isinstance(source, Value) or source.dtype != "float32" or source.pending:
        return None
    tensor = b.contiguous(source)
    reads: dict[str, Any] = {"a": tensor}
    for name in ("weight", "bias"):
        if made[name]:
            factor = launch.reads[name]
            assert isinstance(factor, Value)
            reads[f"norm_{name}"] = b.contiguous(factor)
    if any(read.offset % 4 or read.dtype != "float32" for read in reads.values()):
        return None
    params = {"a_start": tensor.offset, "a_outer": depth, "a_k": 1, "eps": launch.params["eps"]}
    params |= {f"{name}_start": read.offset for name, read in reads.items() if name != "a"}
    constants = {"a_vec": True, "norm": "rms" if made["rms"] else "layer"}
    constants |= {"norm_weight": made["weight"], "norm_bias": made["bias"]}
    return Rows({name: Vector(read) for name, read in reads.items()}, params, constants)
