"""Pointwise operators: a table of WGSL expressions. They never are kernels of their own unless nothing else can carry
them: the builder moves them into the kernels around (see `backend.runtime.builder`).

Arithmetic happens in the output's dtype as torch promotes it, comparisons in the operands' common dtype; f16 is
computed in f32 and rounded where it is stored. Small ints live in i32 and wrap.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from backend.graph import Call
from backend.ops import registry
from backend.ops.registry import ALL, BOOL, FLOATS, INTS, dtypes, every
from backend.runtime import value as values
from backend.runtime.tensor import COMPUTE
from backend.runtime.value import Value

_RANK = {"bool": 0, "uint8": 1, "int8": 1, "int16": 2, "int32": 3, "int64": 4, "float16": 5, "float32": 6}


def _scalar_dtype(item: Any) -> str:
    return "bool" if isinstance(item, bool) else "int64" if isinstance(item, int) else "float32"


def _category(dtype: str) -> int:
    return 0 if dtype == "bool" else 1 if dtype in INTS else 2


def promoted(*operands: Any) -> str:
    """torch's result type of tensors (specs or values) and Python scalars.

    A tensor with dimensions outranks a zero-dimensional one, and that a scalar, unless of a lower category.
    """
    result = ""
    for group in (
        [x.dtype for x in operands if hasattr(x, "dtype") and len(x.shape) > 0],
        [x.dtype for x in operands if hasattr(x, "dtype") and len(x.shape) == 0],
        [_scalar_dtype(x) for x in operands if not hasattr(x, "dtype")],
    ):
        if not group:
            continue
        best = max(group, key=_RANK.__getitem__)
        if {"uint8", "int8"} <= set(group) and best in ("uint8", "int8"):
            best = "int16"
        if not result or _category(best) > _category(result):
            result = best
    return result


def operand(item: Any, dtype: str) -> Value:
    """A tensor or scalar argument as a value of `dtype`."""
    if isinstance(item, Value):
        return values.cast(item, dtype)
    return values.Value((), dtype, values.cast_expression(values.Scalar(_scalar_dtype(item), item), dtype))


def _wrapped(code: str, dtype: str) -> str:
    return values.WRAP[dtype].format(code) if dtype in values.WRAP else code


# --- one tensor -------------------------------------------------------------------------------------------------------

# Float functions: computed in f32; an integer or bool input is converted first, as in torch.
UNARY_FLOAT = {
    "exp": "exp({0})",
    "expm1": "expm1_exact({0})",
    "log": "log_exact({0})",
    "log2": "(log_exact({0}) * 1.4426950408889634)",
    "log10": "(log_exact({0}) * 0.4342944819032518)",
    "log1p": "log1p_exact({0})",
    "sqrt": "sqrt({0})",
    "rsqrt": "(1.0 / sqrt({0}))",
    "reciprocal": "(1.0 / {0})",
    "sin": "sin_exact({0})",
    "cos": "cos_exact({0})",
    "tan": "(sin_exact({0}) / cos_exact({0}))",
    "tanh": "tanh_exact({0})",
    "sinh": "sinh_exact({0})",
    "cosh": "cosh_exact({0})",
    "asin": "asin_exact({0})",
    "acos": "acos_exact({0})",
    "atan": "atan_exact({0})",
    "sigmoid": "sigmoid({0})",
    "erf": "erf({0})",
    "erfc": "erfc({0})",
    "exp2": "exp2({0})",
    "asinh": "asinh_exact({0})",
    "acosh": "acosh_exact({0})",
    "atanh": "atanh_exact({0})",
    "special_expit": "sigmoid({0})",
}
# The same dtype out: f32, i32 and bool forms where torch has them.
UNARY_SAME: dict[str, dict[str, str]] = {
    "neg": {"f32": "(-{0})", "i32": "(-{0})"},
    "abs": {"f32": "abs({0})", "i32": "abs({0})"},
    "relu": {"f32": "max_nan({0}, 0.0)", "i32": "max({0}, 0)"},
    "floor": {"f32": "floor({0})", "i32": "{0}"},
    "ceil": {"f32": "ceil({0})", "i32": "{0}"},
    "round": {"f32": "round({0})", "i32": "{0}"},
    "trunc": {"f32": "trunc({0})", "i32": "{0}"},
    "sign": {"f32": "select(sign({0}), 0.0, is_nan({0}))", "i32": "sign({0})", "bool": "{0}"},
    "sgn": {"f32": "select(sign({0}), 0.0, is_nan({0}))", "i32": "sign({0})", "bool": "{0}"},
    "positive": {"f32": "{0}", "i32": "{0}"},
    "frac": {"f32": "({0} - trunc({0}))"},
    "silu": {"f32": "silu({0})"},
    "mish": {"f32": "mish({0})"},
    "log_sigmoid": {"f32": "(-softplus(-{0}))"},
    "selu": {"f32": "(1.0507010 * select(1.6732632 * expm1_exact({0}), {0}, {0} > 0.0))"},
    "relu6": {"f32": "min_nan(max_nan({0}, 0.0), 6.0)"},
    "hardsigmoid": {"f32": "(min_nan(max_nan({0} + 3.0, 0.0), 6.0) / 6.0)"},
    "hardswish": {"f32": "({0} * (min_nan(max_nan({0} + 3.0, 0.0), 6.0) / 6.0))"},
    "square": {"f32": "({0} * {0})", "i32": "({0} * {0})"},
    "bitwise_not": {"i32": "(~{0})", "bool": "(!{0})"},
}
UNARY_BOOL = {
    "logical_not": {"f32": "({0} == 0.0)", "i32": "({0} == 0)", "bool": "(!{0})"},
    "isnan": {"f32": "is_nan({0})", "i32": "false", "bool": "false"},
    "isinf": {"f32": "is_inf({0})", "i32": "false", "bool": "false"},
    "isfinite": {"f32": "(!(is_nan({0}) || is_inf({0})))", "i32": "true", "bool": "true"},
    "isposinf": {"f32": "(is_inf({0}) && {0} > 0.0)", "i32": "false", "bool": "false"},
    "isneginf": {"f32": "(is_inf({0}) && {0} < 0.0)", "i32": "false", "bool": "false"},
    "signbit": {"f32": "((bitcast<u32>({0}) >> 31u) == 1u)", "i32": "({0} < 0)", "bool": "false"},
}


def _lower_unary(table: dict[str, str]) -> registry.Lower:
    """Computed in the input's dtype, by the form for its compute type."""

    def lower(call: Call, b: Any) -> Value:
        out, x = call.outputs[0], call["self"]
        code = table[COMPUTE[x.dtype]]
        return b.pointwise(_wrapped(code, out.dtype), [x], out.dtype, out.shape)

    return lower


def _lower_float_unary(code: str) -> registry.Lower:
    def lower(call: Call, b: Any) -> Value:
        out = call.outputs[0]
        return b.pointwise(code, [values.cast(call["self"], out.dtype)], out.dtype, out.shape)

    return lower


def _has_form(table: dict[str, str]) -> registry.Accepts:
    return dtypes([dtype for dtype in ALL if COMPUTE[dtype] in table], "self")


_PRESERVED = ("silu", "mish", "log_sigmoid", "hardswish", "hardsigmoid")
for _name, _expression in UNARY_FLOAT.items():
    registry.register(f"aten.{_name}.default", accepts=dtypes(ALL, "self"), lower=_lower_float_unary(_expression))
for _name, _table in (UNARY_SAME | UNARY_BOOL).items():
    registry.register(
        f"aten.{_name}.default", accepts=_has_form(_table), lower=_lower_unary(_table), preserve=_name in _PRESERVED
    )

# --- two operands -----------------------------------------------------------------------------------------------------

ARITHMETIC: dict[str, dict[str, str]] = {
    "mul": {"f32": "({0} * {1})", "i32": "({0} * {1})", "bool": "({0} && {1})"},
    "div": {"f32": "({0} / {1})"},
    "maximum": {"f32": "max_nan({0}, {1})", "i32": "max({0}, {1})", "bool": "({0} || {1})"},
    "minimum": {"f32": "min_nan({0}, {1})", "i32": "min({0}, {1})", "bool": "({0} && {1})"},
    "remainder": {"f32": "remainder_f32({0}, {1})", "i32": "remainder_i32({0}, {1})"},
    "fmod": {"f32": "fmod_f32({0}, {1})", "i32": "fmod_i32({0}, {1})"},
    "floor_divide": {"f32": "floor_div_f32({0}, {1})", "i32": "floor_div_i32({0}, {1})"},
    "bitwise_and": {"i32": "({0} & {1})", "bool": "({0} && {1})"},
    "bitwise_or": {"i32": "({0} | {1})", "bool": "({0} || {1})"},
    "bitwise_xor": {"i32": "({0} ^ {1})", "bool": "({0} != {1})"},
    "bitwise_left_shift": {"i32": "select(0, {0} << u32({1}), {1} < 32)"},
    "bitwise_right_shift": {"i32": "({0} >> u32(min({1}, 31)))"},
    "atan2": {"f32": "atan2_exact({0}, {1})"},
    "hypot": {"f32": "hypot({0}, {1})"},
    "copysign": {"f32": "copysign({0}, {1})"},
    "fmax": {"f32": "select(select(max({0}, {1}), {0}, is_nan({1})), {1}, is_nan({0}))", "i32": "max({0}, {1})"},
    "fmin": {"f32": "select(select(min({0}, {1}), {0}, is_nan({1})), {1}, is_nan({0}))", "i32": "min({0}, {1})"},
}
COMPARISON = {
    "eq": {"f32": "({0} == {1})", "i32": "({0} == {1})", "bool": "({0} == {1})"},
    "ne": {"f32": "(!({0} == {1}))", "i32": "({0} != {1})", "bool": "({0} != {1})"},
    "lt": {"f32": "({0} < {1})", "i32": "({0} < {1})", "bool": "(!{0} && {1})"},
    "le": {"f32": "({0} <= {1})", "i32": "({0} <= {1})", "bool": "(!{0} || {1})"},
    "gt": {"f32": "({0} > {1})", "i32": "({0} > {1})", "bool": "({0} && !{1})"},
    "ge": {"f32": "({0} >= {1})", "i32": "({0} >= {1})", "bool": "({0} || !{1})"},
}
LOGICAL = {"logical_and": "({0} && {1})", "logical_or": "({0} || {1})", "logical_xor": "({0} != {1})"}


def fits_int32(call: Call) -> str | None:
    """Where the arithmetic is in integers, whole numbers among the arguments are what the GPU's integers can hold."""
    tensors = [*call.tensors(), *call.outputs]
    if any(tensor is not None and tensor.dtype in FLOATS for tensor in tensors):
        return None
    for arg in call.args.values():
        if isinstance(arg, int) and not -(2**31) <= arg < 2**31:
            return f"integer {arg} does not fit the GPU's 32 bits"
    return None


def _accepts_arithmetic(table: dict[str, str]) -> registry.Accepts:
    def accepts(call: Call) -> str | None:
        out = call.outputs[0]
        return None if COMPUTE[out.dtype] in table else f"no kernel for {out.dtype}"

    return every(fits_int32, accepts)


def _lower_arithmetic(table: dict[str, str]) -> registry.Lower:
    def lower(call: Call, b: Any) -> Value:
        out = call.outputs[0]
        args = [operand(call["self"], out.dtype), operand(call["other"], out.dtype)]
        return b.pointwise(_wrapped(table[COMPUTE[out.dtype]], out.dtype), args, out.dtype, out.shape)

    return lower


def _lower_comparison(table: dict[str, str]) -> registry.Lower:
    def lower(call: Call, b: Any) -> Value:
        dtype = promoted(call["self"], call["other"])
        args = [_compared(call["self"], dtype), _compared(call["other"], dtype)]
        return b.pointwise(table[COMPUTE[dtype]], args, "bool", call.outputs[0].shape)

    return lower


def _compared(item: Any, dtype: str) -> Value:
    """A number compared with f16 elements is rounded as they are: 0.1 equals 0.1."""
    if dtype == "float16" and not isinstance(item, Value):
        with np.errstate(over="ignore"):
            item = float(np.float16(item))
    return operand(item, dtype)


def _lower_logical(code: str) -> registry.Lower:
    def lower(call: Call, b: Any) -> Value:
        args = [operand(call["self"], "bool"), operand(call["other"], "bool")]
        return b.pointwise(code, args, "bool", call.outputs[0].shape)

    return lower


_OVERLOADS = {
    **dict.fromkeys(("maximum", "minimum", "atan2", "hypot", "fmax", "fmin"), ("default",)),
    **dict.fromkeys(("bitwise_left_shift", "bitwise_right_shift"), ("Tensor", "Tensor_Scalar", "Scalar_Tensor")),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor"), ("Tensor", "Scalar", "Scalar_Tensor")),
    "remainder": ("Tensor", "Scalar", "Scalar_Tensor"),
    "floor_divide": ("default", "Scalar"),
}
for _name, _table in ARITHMETIC.items():
    _overloads = _OVERLOADS.get(_name, ("Tensor", "Scalar"))
    registry.register(
        [f"aten.{_name}.{overload}" for overload in _overloads],
        accepts=_accepts_arithmetic(_table),
        lower=_lower_arithmetic(_table),
    )
for _name, _table in COMPARISON.items():
    registry.register(
        [f"aten.{_name}.Tensor", f"aten.{_name}.Scalar"], accepts=fits_int32, lower=_lower_comparison(_table)
    )
for _name, _expression in LOGICAL.items():
    registry.register(f"aten.{_name}.default", accepts=registry.anything, lower=_lower_logical(_expression))

# --- add and sub, with alpha ------------------------------------------------------------------------------------------


def _accepts_add(call: Call) -> str | None:
    if call.outputs[0].dtype == "bool":
        return "no kernel for bool" if call.op.startswith("aten.sub") or call.get("alpha", 1) != 1 else None
    return fits_int32(call)


def _lower_add(sign: str, reverse: bool = False) -> registry.Lower:
    def lower(call: Call, b: Any) -> Value:
        out = call.outputs[0]
        left, right = operand(call["self"], out.dtype), operand(call["other"], out.dtype)
        if reverse:
            left, right = right, left
        if out.dtype == "bool":
            return b.pointwise("({0} || {1})", [left, right], "bool", out.shape)
        alpha = call.get("alpha", 1)
        if alpha == 1:
            return b.pointwise(_wrapped(f"({{0}} {sign} {{1}})", out.dtype), [left, right], out.dtype, out.shape)
        scaled = f"({{0}} {sign} {{2}} * {{1}})" if not reverse else f"({{0}} {sign} {{1}} * {{2}})"
        scale = operand(alpha, out.dtype)
        return b.pointwise(_wrapped(scaled, out.dtype), [left, right, scale], out.dtype, out.shape)

    return lower


registry.register(("aten.add.Tensor", "aten.add.Scalar"), accepts=_accepts_add, lower=_lower_add("+"))
registry.register(("aten.sub.Tensor", "aten.sub.Scalar"), accepts=_accepts_add, lower=_lower_add("-"))
registry.register("aten.rsub.Scalar", accepts=_accepts_add, lower=_lower_add("-", reverse=True))


# --- div with rounding, pow, where ------------------------------------------------------------------------------------


def _lower_div_mode(call: Call, b: Any) -> Value:
    out = call.outputs[0]
    mode = call.get("rounding_mode")
    if COMPUTE[out.dtype] == "f32":
        code = {"floor": "floor_div_f32({0}, {1})", "trunc": "trunc({0} / {1})", None: "({0} / {1})"}[mode]
    else:
        code = _wrapped({"floor": "floor_div_i32({0}, {1})", "trunc": "({0} / {1})"}[mode], out.dtype)
    args = [operand(call["self"], out.dtype), operand(call["other"], out.dtype)]
    return b.pointwise(code, args, out.dtype, out.shape)


registry.register(
    ("aten.div.Tensor_mode", "aten.div.Scalar_mode"),
    accepts=every(fits_int32, lambda call: "no kernel for bool" if call.outputs[0].dtype == "bool" else None),
    lower=_lower_div_mode,
)


def _accepts_pow(call: Call) -> str | None:
    return "pow: no kernel for bool" if call.outputs[0].dtype == "bool" else fits_int32(call)


def _power(exponent: int) -> str:
    """{0} to a small whole power by multiplication."""
    terms, square, rest = [], "{0}", abs(exponent)
    while rest:
        if rest & 1:
            terms.append(square)
        square, rest = f"({square} * {square})", rest >> 1
    product = f"({' * '.join(terms)})"
    return product if exponent > 0 else f"(1.0 / {product})"


def _lower_pow(call: Call, b: Any) -> Value:
    out = call.outputs[0]
    base, exponent = call["self"], call["exponent"]
    is_float = COMPUTE[out.dtype] == "f32"
    if not isinstance(exponent, Value):
        x = operand(base, out.dtype)
        if exponent == 0:
            return values.expand(operand(1, out.dtype), out.shape)
        if exponent == 1:
            return x
        if math.isfinite(exponent) and exponent == int(exponent):
            if abs(exponent) <= 4 and (is_float or exponent > 0):
                return b.pointwise(_wrapped(_power(int(exponent)), out.dtype), [x], out.dtype, out.shape)
        elif is_float and abs(exponent) == 0.5:
            code = "sqrt({0})" if exponent > 0 else "(1.0 / sqrt({0}))"
            return b.pointwise(code, [x], out.dtype, out.shape)
    args = [operand(base, out.dtype), operand(exponent, out.dtype)]
    code = "pow_exact({0}, {1})" if is_float else _wrapped("pow_i32({0}, {1})", out.dtype)
    return b.pointwise(code, args, out.dtype, out.shape)


registry.register(
    ("aten.pow.Tensor_Scalar", "aten.pow.Tensor_Tensor", "aten.pow.Scalar"), accepts=_accepts_pow, lower=_lower_pow
)


def _lower_where(call: Call, b: Any) -> Value:
    out = call.outputs[0]
    condition = operand(call["condition"], "bool")
    args = [condition, operand(call["self"], out.dtype), operand(call["other"], out.dtype)]
    return b.pointwise("select({2}, {1}, {0})", args, out.dtype, out.shape)


registry.register(
    ("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar"),
    accepts=every(dtypes((*BOOL, "uint8"), "condition"), fits_int32),
    lower=_lower_where,
)


def _lower_masked_fill(call: Call, b: Any) -> Value:
    out = call.outputs[0]
    args = [call["mask"], call["self"], operand(call["value"], out.dtype)]
    return b.pointwise("select({1}, {2}, {0})", args, out.dtype, out.shape)


registry.register(
    ("aten.masked_fill.Scalar", "aten.masked_fill.Tensor"),
    accepts=every(dtypes(BOOL, "mask"), fits_int32),
    lower=_lower_masked_fill,
)
