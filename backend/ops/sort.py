"""topk, sort and median, by rank (see `shaders/sort.wgsl`).

The work grows with the square of what is looked at. All of a row is for sort and median, which take short rows only.
The k first elements of a long row are in the k blocks of neighbours whose own first elements go first: topk ranks the
blocks by these, then the elements of those k blocks. Equal elements keep their order in both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from backend.graph import Call, ShapeError
from backend.ops.registry import ALL, FLOATS, INTS, dtypes, every, normalize_axes, normalize_axis, register
from backend.ops.rows import Rows, reread, rows_of
from backend.runtime import value as values
from backend.runtime.tensor import COMPUTE, Tensor
from backend.runtime.value import Value

MAX_LENGTH = 16384  # elements that are ranked at once: at this length 2.7e8 comparisons a row
_WORKGROUP = 64
_SHORT = 1024  # rows up to this are ranked whole
_SMALLEST_BLOCK = 4  # block_keys.wgsl reads as many at a time


def _block(n: int, k: int) -> int:
    """Neighbours that are a block where the `k` first of `n` elements are looked for by blocks; 0: rank them all."""
    if n <= _SHORT or k < 1:
        return 0
    # The power of two at which blocks (n / block) and the elements of chosen blocks (k * block) are about as many.
    block = max(1 << max(round(math.log2(n / k) / 2), 0), _SMALLEST_BLOCK)
    blocks = -(-n // block)
    saves = n > MAX_LENGTH or 4 * (blocks**2 + (k * block) ** 2) <= n**2
    return block if k <= blocks and saves else 0


def _ranked(n: int, k: int) -> int:
    """The most elements that are ranked at once for the `k` first of `n`."""
    if k < 1:
        return 0
    block = _block(n, k)
    return max(-(-n // block), k * block) if block else n


def _accepts(call: Call) -> str | None:
    x = call["self"]
    n, k = x.shape[normalize_axis(call["dim"], x.rank)] if x.rank else 1, call.get("k")
    if not isinstance(n, int):
        return None
    if not isinstance(k, int):
        return f"sorted rows have at most {MAX_LENGTH} elements, not {n}" if n > MAX_LENGTH else None
    if not 0 <= k <= n:
        return f"topk of {k} out of {n}"
    if (ranked := _ranked(n, k)) > MAX_LENGTH:
        return f"topk ranks at most {MAX_LENGTH} elements at once, {k} out of {n} take {ranked}"
    return None


def _rank(
    x: Value,
    rows: Rows,
    targets: Mapping[str, Tensor],
    kept: int,
    descending: bool,
    b: Any,
    blocks: tuple[Value, int] | None = None,
) -> None:
    """Writes the `kept` first elements of each row to `targets`: `values`, `indices` or both.

    blocks: (which are looked into, int `[outer, number, inner]`; their size), where not all of a row is.
    """
    at, block = blocks if blocks is not None else (None, 0)
    looked = rows.n if at is None else at.numel // rows.count * block
    tiles = -(-looked // _WORKGROUP)
    b.launch_into(
        "sort",
        targets=targets,
        reads={"x": x} if at is None else {"x": x, "at": at},
        params={"n": looked, "length": rows.n, "inner": rows.inner, "kept": kept, "tiles": tiles},
        constants={
            "workgroup": _WORKGROUP,
            "descending": descending,
            "type": COMPUTE[x.dtype],
            "writes": tuple(targets),
            "block": block,
        },
        groups=rows.count * tiles if kept else 0,
    )


def _likely_blocks(x: Value, rows: Rows, k: int, block: int, descending: bool, b: Any) -> Value:
    """The `k` blocks of each row that hold its first `k` elements, int64 `[outer, k, inner]`."""
    number = -(-rows.n // block)
    count = rows.count * number
    keys = b.launch(
        "block_keys",
        shape=(rows.outer, number, rows.inner),
        dtype="int32",
        reads={"x": x},
        params={"n": rows.n, "inner": rows.inner, "blocks": number, "count": count},
        constants={"workgroup": _WORKGROUP, "descending": descending, "type": COMPUTE[x.dtype], "block": block},
        groups=-(-count // _WORKGROUP),
    )
    chosen = b.temp((rows.outer, k, rows.inner), "int64")
    _rank(reread(keys, b), Rows(rows.outer, number, rows.inner), {"indices": chosen}, k, True, b)
    return values.of_tensor(chosen)


def _median_accepts(call: Call) -> str | None:
    x = call["self"]
    axes = normalize_axes(call.get("dim"), x.rank)
    sizes = [x.shape[axis] for axis in axes] if x.rank else [1]
    if 0 in sizes:
        return "median of nothing"
    known = math.prod(size for size in sizes if isinstance(size, int))
    return f"sorted rows have at most {MAX_LENGTH} elements, not {known}" if known > MAX_LENGTH else None


def _lower_median(call: Call, b: Any) -> Any:
    """The lower of the two middle ones; a NaN, the first one, when there is any.

    Sorted downwards, NaN comes first and equal elements keep their order.
    """
    found, where = (*call.outputs, None)[:2]
    shape = (found or where).shape
    x: Value = call["self"]
    x, rows = rows_of(x, normalize_axes(call.get("dim"), x.rank) if x.rank else [], b)
    if rows.n == 0:
        raise ShapeError("median of nothing")
    whole = (rows.outer, rows.n, rows.inner)
    targets = {"values": b.temp(whole, x.dtype), "indices": b.temp(whole, "int64")}
    _rank(reread(x, b), rows, targets, rows.n, True, b)

    def at(name: str, position: int) -> Value:
        return b.reshape(values.slice_(values.of_tensor(targets[name]), 1, position, 1), shape)

    if COMPUTE[x.dtype] != "f32":
        results = [at(name, rows.n // 2) for name in targets]
    else:
        code = "select({0}, {1}, is_nan({2}))"
        top = at("values", 0)
        results = [
            b.pointwise(code, [at(name, rows.n // 2), at(name, 0), top], targets[name].dtype, shape) for name in targets
        ]
    if len(call.outputs) == 1:
        return results[0]
    return results[0] if found is not None else None, results[1] if where is not None else None


def _lower(call: Call, b: Any) -> Any:
    x: Value = call["self"]
    dtype = x.dtype
    axes = [normalize_axis(call["dim"], x.rank)]
    x, rows = rows_of(values.cast(x, "int32") if dtype == "bool" else x, axes, b)
    k = rows.n if call.get("k") is None or call["self"].rank == 0 else int(call["k"])
    if not 0 <= k <= rows.n:
        raise ShapeError(f"topk of {k} out of {rows.n}")
    found, where = call.outputs
    targets = {}
    if found is not None:
        targets["values"] = b.temp(found.shape, x.dtype)
    if where is not None:
        targets["indices"] = b.temp(where.shape, "int64")
    descending = bool(call.get("largest", call.get("descending", False)))
    x, block = reread(x, b), _block(rows.n, k) if rows.count else 0
    blocks = (_likely_blocks(x, rows, k, block, descending, b), block) if block else None
    _rank(x, rows, targets, k, descending, b, blocks)
    results = {name: values.of_tensor(target) for name, target in targets.items()}
    return values.cast(results["values"], dtype) if found is not None else None, results.get("indices")


register(
    ("aten.topk.default", "aten.sort.default", "aten.sort.stable"),
    accepts=every(dtypes(ALL, "self"), _accepts),
    lower=_lower,
)
register(
    ("aten.median.default", "aten.median.dim"),
    accepts=every(dtypes(FLOATS + INTS, "self"), _median_accepts),
    lower=_lower_median,
)
