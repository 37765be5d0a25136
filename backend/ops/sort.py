"""topk, sort and median, by rank (see `shaders/sort.wgsl`): short rows only."""

from __future__ import annotations

import math
from typing import Any

from backend.graph import Call, ShapeError
from backend.ops.registry import ALL, FLOATS, INTS, dtypes, every, normalize_axes, normalize_axis, register
from backend.ops.rows import reread, rows_of
from backend.runtime import value as values
from backend.runtime.tensor import COMPUTE
from backend.runtime.value import Value

MAX_LENGTH = 16384  # the work grows with the square: at this length 2.7e8 comparisons a row
_WORKGROUP = 256


def _accepts(call: Call) -> str | None:
    x = call["self"]
    n = x.shape[normalize_axis(call["dim"], x.rank)] if x.rank else 1
    if isinstance(n, int) and n > MAX_LENGTH:
        return f"sorted rows have at most {MAX_LENGTH} elements, not {n}"
    k = call.get("k")
    if isinstance(k, int) and isinstance(n, int) and not 0 <= k <= n:
        return f"topk of {k} out of {n}"
    return None


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
    tiles = -(-rows.n // _WORKGROUP)
    b.launch_into(
        "sort",
        targets=targets,
        reads={"x": reread(x, b)},
        params={"n": rows.n, "inner": rows.inner, "kept": rows.n, "tiles": tiles},
        constants={"workgroup": _WORKGROUP, "descending": True, "type": COMPUTE[x.dtype], "writes": tuple(targets)},
        groups=rows.count * tiles,
    )

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
    tiles = -(-rows.n // _WORKGROUP)
    b.launch_into(
        "sort",
        targets=targets,
        reads={"x": reread(x, b)},
        params={"n": rows.n, "inner": rows.inner, "kept": k, "tiles": tiles},
        constants={
            "workgroup": _WORKGROUP,
            "descending": bool(call.get("largest", call.get("descending", False))),
            "type": COMPUTE[x.dtype],
            "writes": tuple(targets),
        },
        groups=rows.count * tiles if k else 0,
    )
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
