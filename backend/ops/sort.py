"""topk and sort, by rank (see `shaders/sort.wgsl`): short rows only."""

from __future__ import annotations

from typing import Any

from backend.graph import Call, ShapeError
from backend.ops.registry import ALL, dtypes, every, normalize_axis, register
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
