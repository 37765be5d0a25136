"""Tensors made from nothing: counters and constants, both lazy, and triangles of a matrix.

Sizes and bounds may be symbolic: they are numbers by the time of lowering.
"""

from __future__ import annotations

from typing import Any

from backend.graph import Call
from backend.ops.registry import ALL, FLOATS, INTS, dtypes, every, register
from backend.runtime import value as values
from backend.runtime.value import Value


def _fill(item: Any, dtype: str, shape: Any) -> Value:
    source = "bool" if isinstance(item, bool) else "int64" if isinstance(item, int) else "float32"
    return Value(tuple(shape), dtype, values.cast_expression(values.Scalar(source, item), dtype))


def _fits(name: str) -> Any:
    def accepts(call: Call) -> str | None:
        item = call.get(name, 0)
        if call.outputs[0].dtype in INTS:
            if isinstance(item, float) and item != item:
                return f"{call.op}: NaN as an integer"
            if isinstance(item, (int, float)) and not -(2**31) <= item < 2**31:
                return f"{call.op}: {item} does not fit the GPU's 32 bits"
        return None

    return accepts


def _output_dtype(call: Call) -> str | None:
    return None if call.outputs[0].dtype in ALL else f"no kernel for {call.outputs[0].dtype}"


# --- counters ---------------------------------------------------------------------------------------------------------


def _lower_arange(call: Call, b: Any) -> Value:
    out = call.outputs[0]
    start, step = call.get("start", 0), call.get("step", 1)
    if out.dtype in FLOATS:
        return values.iota(out.shape[0], float(start), float(step), out.dtype)
    return values.cast(values.iota(out.shape[0], start, step, "int64"), out.dtype)


def _accepts_arange(call: Call) -> str | None:
    bounds = [call.get(name) for name in ("start", "end", "step")]
    if call.outputs[0].dtype in FLOATS:
        return None
    if call.outputs[0].dtype == "bool":
        return "no kernel for bool"
    if any(isinstance(bound, float) for bound in bounds):
        return "arange: integers from fractional bounds"
    if any(isinstance(bound, int) and not -(2**31) <= bound < 2**31 for bound in bounds):
        return "arange: a bound does not fit the GPU's 32 bits"
    return None


def _lower_linspace(call: Call, b: Any) -> Value:
    out = call.outputs[0]
    start, end, count = float(call["start"]), float(call["end"]), out.shape[0]
    step = (end - start) / (count - 1) if count > 1 else 0.0
    i = values.iota(count, 0.0, 1.0, "float32")
    scalars = [values.scalar(item, "float32") for item in (start, end, step, float(count - 1))]
    # Counted from both ends, so that the last element is exact.
    code = "select({1} + {3} * {0}, {2} - {3} * ({4} - {0}), {0} * 2.0 > {4})"
    return b.pointwise(code, [i, *scalars], out.dtype, out.shape)


def _accepts_linspace(call: Call) -> str | None:
    return None if call.outputs[0].dtype in FLOATS else f"linspace: no kernel for {call.outputs[0].dtype}"


register(
    ("aten.arange.start_step", "aten.arange.start", "aten.arange.default"),
    accepts=_accepts_arange,
    lower=_lower_arange,
)
register("aten.linspace.default", accepts=_accepts_linspace, lower=_lower_linspace)


# --- constants --------------------------------------------------------------------------------------------------------


def _lower_constant(name: str, default: Any) -> Any:
    def lower(call: Call, b: Any) -> Value:
        out = call.outputs[0]
        return _fill(call.get(name, default), out.dtype, out.shape)

    return lower


for _names, _argument, _default in (
    (("full.default", "full_like.default", "new_full.default"), "fill_value", 0),
    (("scalar_tensor.default",), "s", 0),
    (("zeros.default", "zeros_like.default", "new_zeros.default"), "", 0),
    (("ones.default", "ones_like.default", "new_ones.default"), "", 1),
    # Uninitialised memory may as well be zeros: results stay the same from run to run.
    (("empty.memory_format", "empty_like.default", "new_empty.default"), "", 0),
    (("fill.Scalar",), "value", 0),
):
    register(
        [f"aten.{name}" for name in _names],
        accepts=every(_output_dtype, _fits(_argument)),
        lower=_lower_constant(_argument, _default),
    )


def _lower_fill_tensor(call: Call, b: Any) -> Value:
    out = call.outputs[0]
    return values.expand(b.movable(values.cast(call["value"], out.dtype)), out.shape)


register("dim_order_ops._empty_dim_order.default", accepts=_output_dtype, lower=_lower_constant("", 0))
register("aten.fill.Tensor", accepts=dtypes(ALL), lower=_lower_fill_tensor)


# --- triangles --------------------------------------------------------------------------------------------------------


def _row_and_column(rows: int, columns: int, b: Any) -> tuple[Value, Value]:
    row = b.reshape(values.iota(rows, 0, 1, "int32"), (rows, 1))
    return row, values.iota(columns, 0, 1, "int32")


def _lower_eye(call: Call, b: Any) -> Value:
    out = call.outputs[0]
    row, column = _row_and_column(out.shape[0], out.shape[1], b)
    return values.cast(b.pointwise("({0} == {1})", [row, column], "bool", out.shape), out.dtype)


def _lower_triangle(test: str) -> Any:
    def lower(call: Call, b: Any) -> Value:
        x = call["self"]
        row, column = _row_and_column(x.shape[-2], x.shape[-1], b)
        diagonal = values.scalar(call.get("diagonal", 0), "int32")
        code = f"select({{1}}, {{0}}, {{3}} - {{2}} {test} {{4}})"
        return b.pointwise(code, [x, _fill(0, x.dtype, ()), row, column, diagonal], x.dtype, x.shape)

    return lower


register(("aten.eye.default", "aten.eye.m"), accepts=_output_dtype, lower=_lower_eye)
register("aten.tril.default", accepts=dtypes(ALL), lower=_lower_triangle("<="))
register("aten.triu.default", accepts=dtypes(ALL), lower=_lower_triangle(">="))
