"""Reductions over axes: sums, extremes and where they are, any and all, variance, norms; running sums.

f16 is accumulated in f32, integers in i32 (an int64 sum is right while it fits 32 bits). The order of additions is
fixed, so results repeat bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from backend.graph import Call, ShapeError
from backend.ops.registry import (
    ALL,
    FLOATS,
    INTS,
    Accepts,
    dtypes,
    every,
    normalize_axes,
    normalize_axis,
    register,
)
from backend.ops.rows import Rows, reread, rows_of
from backend.runtime import value as values
from backend.runtime.tensor import COMPUTE
from backend.runtime.value import Value


def _reduce(op: str, x: Value, axes: list[int], shape: tuple[int, ...], dtype: str, b: Any) -> Value:
    """`op` (sum, mean, prod, max, min) of x over axes, never empty; dtype is the kernel's, f32 or i32 inside."""
    x, rows = rows_of(x, axes, b)
    total = rows.n
    cut = rows.chunks()
    if cut is not None:
        parts, params = cut
        geometry, groups = parts.geometry(b)
        first = "sum" if op == "mean" else op
        rows = Rows(rows.outer, params["splits"], rows.inner)
        x = b.launch(
            "reduce",
            shape=(rows.outer, rows.n, rows.inner),
            dtype="int64" if COMPUTE[dtype] == "i32" else "float32",
            reads={"x": x},
            params=params,
            constants={**geometry, "op": first, "type": COMPUTE[dtype], "split": True},
            groups=groups,
        )
    geometry, groups = rows.geometry(b)
    return b.launch(
        "reduce",
        shape=shape,
        dtype=dtype,
        reads={"x": x},
        params={**rows.params(), **({"divisor": float(total)} if op == "mean" else {})},
        constants={**geometry, "op": op, "type": COMPUTE[dtype], "split": False},
        groups=groups,
    )


def _axes(call: Call, rank: int) -> list[int]:
    return normalize_axes(call.get("dim"), rank) if rank else []


def _length(x: Any, axes: list[int]) -> int:
    return math.prod(x.shape[axis] for axis in axes)


def _not_empty(call: Call) -> str | None:
    """For what has no value over nothing."""
    x = call["self"]
    empty = [axis for axis in _axes(call, x.rank) if x.shape[axis] == 0]
    return f"no maximum or minimum over axis {empty[0]}, which is empty" if empty else None


def _require(x: Value, axes: list[int], call: Call) -> None:
    """An axis of dynamic size may turn out empty; without other elements there is nothing to refuse."""
    shape = next((spec.shape for spec in call.outputs if spec is not None), ())
    if _length(x, axes) == 0 and math.prod(shape) != 0:
        raise ShapeError(f"{call.op} over an empty axis of a tensor of shape {x.shape}")


def _out_dtypes(allowed: tuple[str, ...]) -> Accepts:
    def accepts(call: Call) -> str | None:
        return next(
            (f"no kernel for {out.dtype}" for out in call.outputs if out is not None and out.dtype not in allowed), None
        )

    return accepts


# --- sum, mean, prod --------------------------------------------------------------------------------------------------


def _lower_accumulate(op: str) -> Callable[[Call, Any], Value]:
    def lower(call: Call, b: Any) -> Value:
        out = call.outputs[0]
        x: Value = call["self"]
        axes = _axes(call, x.rank)
        if _length(x, axes) == 0:
            return values.scalar({"sum": 0, "prod": 1, "mean": math.nan}[op], out.dtype, out.shape)
        is_float = COMPUTE[out.dtype] == "f32"
        if op != "mean":  # whose elements eager does not round to a half that is asked for
            x = values.cast(x, out.dtype if is_float or x.dtype not in FLOATS else "int64")
        elif x.dtype not in FLOATS:
            x = values.cast(x, "float32")
        return values.cast(_reduce(op, x, axes, out.shape, out.dtype if is_float else "int64", b), out.dtype)

    return lower


for _op, _overloads in (("sum", ("dim_IntList", "default")), ("prod", ("dim_int", "default"))):
    register(
        [f"aten.{_op}.{overload}" for overload in _overloads],
        accepts=every(dtypes(ALL, "self"), _out_dtypes(FLOATS + INTS)),
        lower=_lower_accumulate(_op),
    )
register(
    ("aten.mean.dim", "aten.mean.default"),
    accepts=every(dtypes(ALL, "self"), _out_dtypes(FLOATS)),
    lower=_lower_accumulate("mean"),
)

# --- extremes ---------------------------------------------------------------------------------------------------------


def _countable(x: Value) -> Value:
    """bool as 0 and 1."""
    return values.cast(x, "int32") if x.dtype == "bool" else x


def _lower_extreme(op: str) -> Callable[[Call, Any], Value]:
    def lower(call: Call, b: Any) -> Value:
        out = call.outputs[0]
        x = _countable(call["self"])
        axes = _axes(call, x.rank)
        _require(x, axes, call)
        if x.numel == 0:
            return values.scalar(0, out.dtype, out.shape)
        return values.cast(_reduce(op, x, axes, out.shape, x.dtype, b), out.dtype)

    return lower


for _op in ("max", "min"):
    register(
        [f"aten.a{_op}.default", f"aten.{_op}.default"],
        accepts=every(dtypes(ALL, "self"), _not_empty),
        lower=_lower_extreme(_op),
    )


def _lower_truth(op: str) -> Callable[[Call, Any], Value]:
    """any is the maximum of truth values, all the minimum."""

    def lower(call: Call, b: Any) -> Value:
        out = call.outputs[0]
        x = values.cast(values.cast(call["self"], "bool"), "int32")
        # any.dims and all.dims take an empty list at its word: no axis
        axes = [] if call.op.endswith(".dims") and call.get("dim") == [] else _axes(call, x.rank)
        if _length(x, axes) == 0:
            return values.scalar(op == "all", out.dtype, out.shape)
        found = _reduce("max" if op == "any" else "min", x, axes, out.shape, "int32", b)
        return values.cast(found, out.dtype)

    return lower


for _op in ("any", "all"):
    register(
        [f"aten.{_op}.{overload}" for overload in ("dim", "dims", "default")],
        accepts=every(dtypes(ALL, "self"), _out_dtypes(ALL)),
        lower=_lower_truth(_op),
    )


def _arg(x: Value, axes: list[int], lowest: bool, pair: bool, b: Any) -> dict[str, Any]:
    """What a launch of `arg` takes apart from its output."""
    x, rows = rows_of(x, axes, b)
    constants = {"lowest": lowest, "type": COMPUTE[x.dtype]}
    reads = {"x": x}
    cut = rows.chunks()
    if cut is not None:
        parts, params = cut
        geometry, groups = parts.geometry(b)
        rows = Rows(rows.outer, params["splits"], rows.inner)
        shape = (rows.outer, rows.n, rows.inner)
        targets = {"values": b.temp(shape, x.dtype), "indices": b.temp(shape, "int64")}
        b.launch_into(
            "arg",
            targets=targets,
            reads=reads,
            params=params,
            constants={**geometry, **constants, "pair": True, "split": True, "second": False},
            groups=groups,
        )
        reads = {"x": values.of_tensor(targets["values"]), "at": values.of_tensor(targets["indices"])}
    geometry, groups = rows.geometry(b)
    constants |= {**geometry, "pair": pair, "split": False, "second": cut is not None}
    return {"reads": reads, "params": rows.params(), "constants": constants, "groups": groups}


def _lower_arg(lowest: bool) -> Callable[[Call, Any], Value]:
    def lower(call: Call, b: Any) -> Value:
        out = call.outputs[0]
        x = _countable(call["self"])
        axes = _axes(call, x.rank)
        _require(x, axes, call)
        if x.numel == 0:
            return values.scalar(0, out.dtype, out.shape)
        return b.launch("arg", shape=out.shape, dtype="int64", **_arg(x, axes, lowest, False, b))

    return lower


def _lower_extreme_pair(lowest: bool) -> Callable[[Call, Any], Any]:
    def lower(call: Call, b: Any) -> Any:
        found, where = call.outputs
        x = _countable(call["self"])
        axes = _axes(call, x.rank)
        _require(x, axes, call)
        spec = found or where
        if x.numel == 0:
            return values.scalar(0, call["self"].dtype, spec.shape), values.scalar(0, "int64", spec.shape)
        if where is None:
            top = _reduce("min" if lowest else "max", x, axes, found.shape, x.dtype, b)
            return values.cast(top, found.dtype), None
        launch = _arg(x, axes, lowest, found is not None, b)
        if found is None:
            return None, b.launch("arg", shape=where.shape, dtype="int64", **launch)
        targets = {"values": b.temp(found.shape, x.dtype), "indices": b.temp(where.shape, "int64")}
        b.launch_into("arg", targets=targets, **launch)
        return values.cast(values.of_tensor(targets["values"]), found.dtype), values.of_tensor(targets["indices"])

    return lower


for _op, _lowest in (("max", False), ("min", True)):
    register(f"aten.arg{_op}.default", accepts=every(dtypes(ALL, "self"), _not_empty), lower=_lower_arg(_lowest))
    register(f"aten.{_op}.dim", accepts=every(dtypes(ALL, "self"), _not_empty), lower=_lower_extreme_pair(_lowest))

# --- variance ---------------------------------------------------------------------------------------------------------


def _lower_var(root: bool) -> Callable[[Call, Any], Any]:
    def lower(call: Call, b: Any) -> Any:
        spread, mean = (*call.outputs, None)[:2]
        x: Value = call["self"]
        axes = _axes(call, x.rank)
        n = _length(x, axes)
        if n == 0:
            results = [out and values.scalar(math.nan, out.dtype, out.shape) for out in call.outputs]
            return tuple(results) if len(results) > 1 else results[0]
        if spread is None:
            return None, _reduce("mean", x, axes, mean.shape, mean.dtype, b)
        correction = _correction(call)
        x, rows = rows_of(x, axes, b)
        geometry, groups = rows.geometry(b)
        launch = {
            "reads": {"x": reread(x, b)},
            "params": {**rows.params(), "divisor": float(max(0.0, n - correction))},
            "constants": {**geometry, "pair": mean is not None},
            "groups": groups,
        }
        if mean is None:
            variance = b.launch("moments", shape=spread.shape, dtype="float32", **launch)
        else:
            targets = {"variance": b.temp(spread.shape, "float32"), "mean": b.temp(mean.shape, mean.dtype)}
            b.launch_into("moments", targets=targets, **launch)
            variance = values.of_tensor(targets["variance"])
        result = b.pointwise("sqrt({0})", [variance], "float32", spread.shape) if root else variance
        result = values.cast(result, spread.dtype)
        if len(call.outputs) == 1:
            return result
        return result, None if mean is None else values.of_tensor(targets["mean"])

    return lower


def _correction(call: Call) -> float:
    if "unbiased" in call.args:
        return 1.0 if call["unbiased"] else 0.0
    return float(call.get("correction", 1))


for _op in ("var", "std"):
    register(
        [f"aten.{_op}.{overload}" for overload in ("correction", "dim", "default")],
        accepts=dtypes(FLOATS, "self"),
        lower=_lower_var(_op == "std"),
    )
    register(f"aten.{_op}_mean.correction", accepts=dtypes(FLOATS, "self"), lower=_lower_var(_op == "std"))

# --- vector norms -----------------------------------------------------------------------------------------------------

# order -> (what is done to each element, the reduction, what is done to the result)
_NORMS = {
    2.0: ("({0} * {0})", "sum", "sqrt({0})"),
    1.0: ("abs({0})", "sum", "{0}"),
    0.0: ("select(0.0, 1.0, {0} != 0.0 || is_nan({0}))", "sum", "{0}"),
    math.inf: ("abs({0})", "max", "{0}"),
    -math.inf: ("abs({0})", "min", "{0}"),
}


def _accepts_norm(call: Call) -> str | None:
    order = call.get("ord", call.get("p", 2))
    if not isinstance(order, (int, float)) or float(order) not in _NORMS:
        return f"vector norm of order {order}: there are {', '.join(f'{known:g}' for known in _NORMS)}"
    if math.isinf(order) and _not_empty(call):
        return _not_empty(call)
    return every(dtypes(FLOATS, "self"), _out_dtypes(FLOATS))(call)


def _lower_norm(call: Call, b: Any) -> Value:
    out = call.outputs[0]
    x: Value = call["self"]
    order = float(call.get("ord", call.get("p", 2)))
    axes = _axes(call, x.rank)
    if math.isinf(order):
        _require(x, axes, call)
    if _length(x, axes) == 0:
        return values.scalar(0, out.dtype, out.shape)
    before, op, after = _NORMS[order]
    x = values.cast(values.cast(x, out.dtype), "float32")
    x = b.pointwise(before, [x], "float32", x.shape)
    found = _reduce(op, x, axes, out.shape, "float32", b)
    return values.cast(b.pointwise(after, [found], "float32", out.shape), out.dtype)


register(("aten.linalg_vector_norm.default", "aten.norm.ScalarOpt_dim"), accepts=_accepts_norm, lower=_lower_norm)

# --- running sums -----------------------------------------------------------------------------------------------------


def _lower_scan(op: str) -> Callable[[Call, Any], Value]:
    def lower(call: Call, b: Any) -> Value:
        out = call.outputs[0]
        is_float = COMPUTE[out.dtype] == "f32"
        x: Value = call["self"]
        x = values.cast(x, out.dtype if is_float or x.dtype not in FLOATS else "int64")
        x, rows = rows_of(x, [normalize_axis(call["dim"], x.rank)], b)
        geometry, groups = rows.geometry(b)
        result = b.launch(
            "scan",
            shape=out.shape,
            dtype=out.dtype if is_float else "int64",
            reads={"x": reread(x, b)},
            params={**rows.params(), "segment": -(-rows.n // geometry["lanes"])},
            constants={**geometry, "op": op, "type": COMPUTE[out.dtype]},
            groups=groups if rows.n else 0,
        )
        return values.cast(result, out.dtype)

    return lower


for _op in ("sum", "prod"):
    register(
        f"aten.cum{_op}.default",
        accepts=every(dtypes(ALL, "self"), _out_dtypes(FLOATS + INTS)),
        lower=_lower_scan(_op),
    )
