"""What a product of few rows reads in place of rows in memory: the norm before it, or pointwise work, in one kernel.

A step of a transformer is short kernels whose launches cost as much as their work. A norm of one row is a reduction
that every workgroup of the product can do for itself, and SwiGLU's gate is cheap to compute again. That costs the GPU
arithmetic that it has to spare while weights come from memory; a processor has none, nor has a GPU when the weight has
very many columns (an output head), whose workgroups would do it all again.
"""

from __future__ import annotations

from backend.ops.normed import Rows, pending_norm, unnormed
from backend.runtime import value as values
from backend.runtime.builder import Builder
from backend.runtime.value import Value

MOST_ROWS = 4
MOST_COLUMNS = 8192
MOST_COST = 16  # operations an element


# A GPU waits for the weights: where there are few workgroups, more invocations ask for all that they need at once.
LOOP = {"WORKERS": 64, "STEPS": 0}
FEW_GROUPS = 512
WORKERS, MOST_WORKERS = 128, 256  # the number to be near, and the largest that every device has
MOST_STEPS = 4
MOST_SUMS = 512  # of a workgroup, which holds them in its memory


NO_NORM = {"norm": "", "norm_weight": False, "norm_bias": False}


def spends_arithmetic(cols: int, b: Builder) -> bool:
    """Whether this device computes a gemv's input again in every workgroup rather than once in a kernel of its own."""
    return not b.capabilities.on_processor and cols <= MOST_COLUMNS


def walk(depth: int, width: int, rows: int, groups: int, b: Builder) -> dict[str, int]:
    """WORKERS and STEPS of a kernel whose invocations walk `depth`, `width` elements a step, for up to `rows` rows."""
    return LOOP if b.capabilities.on_processor or groups > FEW_GROUPS else written_out(depth, width, rows)


def written_out(depth: int, width: int, rows: int) -> dict[str, int]:
    """Few steps, the same for all invocations; a loop where no number of invocations has them."""
    ways = [(depth // (width * steps), steps) for steps in range(1, MOST_STEPS + 1)]
    most = min(MOST_WORKERS, MOST_SUMS // rows)
    fitting = [
        {"WORKERS": workers, "STEPS": steps}
        for workers, steps in ways
        if workers * steps * width == depth and workers % 32 == 0 and 4 * rows <= workers <= most
    ]
    return min(fitting, key=lambda way: abs(way["WORKERS"] - WORKERS), default=LOOP)


def fused_rows(x: Value, rows: int, cols: int, b: Builder) -> Rows | None:
    """How a product [rows, K] × [K, cols] takes its rows without a kernel before it; None: from memory.

    x: [..., K], K divisible by 4.
    """
    depth = x.shape[-1]
    if rows > MOST_ROWS or depth % 4 or not spends_arithmetic(cols, b):
        return None
    norm = pending_norm(x)
    if norm is not None:
        found = unnormed(norm, b)
        return found and Rows(found.reads, found.params, {"a_vec": True, **found.constants})
    if x.tensor is not None or x.pending is not None or values.cost(x.root) > MOST_COST:
        return None
    flat = values.reshape(x, (rows, depth))
    if flat is None:
        return None
    return Rows({"a": flat}, {"a_start": 0, "a_outer": depth, "a_k": 1}, {"a_vec": False, **NO_NORM})
