"""Pointwise operators: a table of WGSL expressions. They never are kernels of their own unless nothing else can carry
them: the builder moves them into the kernels around (see `backend.runtime.builder`).

Arithmetic happens in the output's dtype as torch promotes it, comparisons in the operands' common dtype; f16 is computed
in f32 and rounded where it is stored. Small ints live in i32 and wrap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backend.graph import Call, TensorSpec
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


def _code(table: dict[str, str], dtype: str) -> str:
    return _wrapped(table[COMPUTE[dtype]], dtype)


# --- one tensor -------------------------------------------------------------------------------------------------------

# Float functions: computed in f32; an integer or bool input is converted first, as in torch.
UNARY_FLOAT = {
    "exp": "exp({0})",
    "expm1": "expm1_exact({0})",
    "log": "log({0})",
    "log2": "log2({0})",
    "log10": "(log({0}) * 0.4342944819032518)",
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
    "asin": "asin({0})",
    "acos": "acos({0})",
    "atan": "atan({0})",
    "sigmoid": "(1.0 / (1.0 + exp(-{0})))",
    "erf": "erf({0})",
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
    "silu": {"f32": "({0} / (1.0 + exp(-{0})))"},
    "hardsigmoid": {"f32": "(min_nan(max_nan({0} + 3.0, 0.0), 6.0) / 6.0)"},
    "hardswish": {"f32": "({0} * min_nan(max_nan({0} + 3.0, 0.0), 6.0) / 6.0)"},
    "square": {"f32": "({0} * {0})", "i32": "({0} * {0})"},
    "bitwise_not": {"i32": "(~{0})", "bool": "(!{0})"},
}
UNARY_BOOL = {
    "logical_not": {"f32": "({0} == 0.0)", "i32": "({0} == 0)", "bool": "(!{0})"},
    "isnan": {"f32": "is_nan({0})", "i32": "false", "bool": "false"},
    "isinf": {"f32": "is_inf({0})", "i32": "false", "bool": "false"},
}


def _lower_unary(code_of: Callable[[str], str], compute_of: Callable[[Value, str], str]) -> registry.Lower:
    def lower(call: Call, b: Any) -> Value:
        out = call.outputs[0]
        compute = compute_of(call["self"], out.dtype)
        x = values.cast(call["self"], compute)
        return b.pointwise(code_of(compute), [x], out.dtype, out.shape)

    return lower


def _has_form(table: dict[str, str]) -> registry.Accepts:
    return dtypes([dtype for dtype in ALL if COMPUTE[dtype] in table], "self")


for _name, _expression in UNARY_FLOAT.items():
    registry.register(
        f"aten.{_name}.default",
        accepts=dtypes(ALL, "self"),
        lower=_lower_unary(lambda _, code=_expression: code, lambda x, out: out),
    )
for _name, _table in UNARY_SAME.items():
    registry.register(
        f"aten.{_name}.default",
        accepts=_has_form(_table),
        lower=_lower_unary(lambda dtype, table=_table: _code(table, dtype), lambda x, out: x.dtype),
        preserve=_name in ("silu", "hardswish", "hardsigmoid"),
    )
for _name, _table in UNARY_BOOL.items():
    registry.register(
        f"aten.{_name}.default",
        accepts=dtypes(ALL, "self"),
        lower=_lower_unary(lambda dtype, table=_table: table[COMPUTE[dtype]], lambda x, out: x.dtype),
    )

# --- with scalar parameters -------------------------------------------------------------------------------------------

# name -> (WGSL over {0} = self and the parameters, (parameter name, default)…)
PARAMETRIC: dict[str, tuple[str, tuple[tuple[str, float], ...]]] = {
    "leaky_relu": ("select({0} * {1}, {0}, {0} > 0.0)", (("negative_slope", 0.01),)),
    "elu": (
        "(select({1} * expm1_exact({0} * {3}), {0}, {0} > 0.0) * {2})",
        (("alpha", 1.0), ("scale", 1.0), ("input_scale", 1.0)),
    ),
    "softplus": ("select(log1p_exact(exp({0} * {1})) / {1}, {0}, {0} * {1} > {2})", (("beta", 1.0), ("threshold", 20.0))),
    "hardtanh": ("min_nan(max_nan({0}, {1}), {2})", (("min_val", -1.0), ("max_val", 1.0))),
}


def _lower_parametric(code: str, parameters: tuple[tuple[str, float], ...]) -> registry.Lower:
    def lower(call: Call, b: Any) -> Value:
        out = call.outputs[0]
        scalars = [operand(float(call.get(name, default)), "float32") for name, default in parameters]
        return b.pointwise(code, [call["self"], *scalars], out.dtype, out.shape)

    return lower


for _name, (_expression, _parameters) in PARAMETRIC.items():
    registry.register(
        f"aten.{_name}.default",
        accepts=dtypes(FLOATS, "self"),
        lower=_lower_parametric(_expression, _parameters),
        preserve=True,
    )


def _accepts_gelu(call: Call) -> str | None:
    if call.get("approximate", "none") not in ("none", "tanh"):
        return f"gelu: unknown approximation {call['approximate']!r}"
    return dtypes(FLOATS, "self")(call)


def _lower_gelu(call: Call, b: Any) -> Value:
    function = "gelu_tanh" if call.get("approximate", "none") == "tanh" else "gelu_erf"
    return b.pointwise(f"{function}({{0}})", [call["self"]], call.outputs[0].dtype, call.outputs[0].shape)


registry.register("aten.gelu.default", accepts=_accepts_gelu, lower=_lower_gelu, preserve=True)


def _lower_clamp(call: Call, b: Any) -> Value:
    out = call.outputs[0]
    result = values.cast(call["self"], out.dtype)
    is_float = COMPUTE[out.dtype] == "f32"
    for name, function in (("min", "max"), ("max", "min")):
        bound = call.get(name)
        if bound is not None:
            code = f"{function}_nan({{0}}, {{1}})" if is_float else f"{function}({{0}}, {{1}})"
            result = b.pointwise(code, [result, operand(bound, out.dtype)], out.dtype, out.shape)
    return result


registry.register(
    ("aten.clamp.default", "aten.clamp.Tensor"), accepts=dtypes(FLOATS + INTS), lower=_lower_clamp
)

# --- two operands -----------------------------------------------------------------------------------------------------

ARITHMETIC: dict[str, dict[str, str]] = {
    "mul": {"f32": "({0} * {1})", "i32": "({0} * {1})", "bool": "({0} && {1})"},
    "div": {"f32": "({0} / {1})"},
    "maximum": {"f32": "max_nan({0}, {1})", "i32": "max({0}, {1})", "bool": "({0} || {1})"},
    "minimum": {"f32": "min_nan({0}, {1})", "i32": "min({0}, {1})", "bool": "({0} && {1})"},
    "remainder": {"f32": "remainder_f32({0}, {1})", "i32": "remainder_i32({0}, {1})"},
    "fmod": {"f32": "({0} - {1} * trunc({0} / {1}))", "i32": "({0} % {1})"},
    "floor_divide": {"f32": "floor({0} / {1})", "i32": "floor_div_i32({0}, {1})"},
    "bitwise_and": {"i32": "({0} & {1})", "bool": "({0} && {1})"},
    "bitwise_or": {"i32": "({0} | {1})", "bool": "({0} || {1})"},
    "bitwise_xor": {"i32": "({0} ^ {1})", "bool": "({0} != {1})"},
    "atan2": {"f32": "atan2({0}, {1})"},
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


def _fits_int32(call: Call) -> str | None:
    for arg in call.args.values():
        if isinstance(arg, int) and not -(2**31) <= arg < 2**31:
            return f"integer {arg} does not fit the GPU's 32 bits"
    return None


def _accepts_arithmetic(table: dict[str, str]) -> registry.Accepts:
    def accepts(call: Call) -> str | None:
        out = call.outputs[0]
        return None if COMPUTE[out.dtype] in table else f"no kernel for {out.dtype}"

    return every(_fits_int32, accepts)


def _lower_arithmetic(table: dict[str, str]) -> registry.Lower:
    def lower(call: Call, b: Any) -> Value:
        out = call.outputs[0]
        args = [operand(call["self"], out.dtype), operand(call["other"], out.dtype)]
        return b.pointwise(_code(table, out.dtype), args, out.dtype, out.shape)

    return lower


def _lower_comparison(table: dict[str, str]) -> registry.Lower:
    def lower(call: Call, b: Any) -> Value:
        dtype = promoted(call["self"], call["other"])
        args = [operand(call["self"], dtype), operand(call["other"], dtype)]
        return b.pointwise(table[COMPUTE[dtype]], args, "bool", call.outputs[0].shape)

    return lower


def _lower_logical(code: str) -> registry.Lower:
    def lower(call: Call, b: Any) -> Value:
        args = [operand(call["self"], "bool"), operand(call["other"], "bool")]
        return b.pointwise(code, args, "bool", call.outputs[0].shape)

    return lower


_DEFAULT_OVERLOAD = ("maximum", "minimum", "floor_divide", "atan2")
for _name, _table in ARITHMETIC.items():
    _overloads = ("default",) if _name in _DEFAULT_OVERLOAD else ("Tensor", "Scalar")
    registry.register(
        [f"aten.{_name}.{overload}" for overload in _overloads],
        accepts=_accepts_arithmetic(_table),
        lower=_lower_arithmetic(_table),
    )
for _name, _table in COMPARISON.items():
    registry.register(
        [f"aten.{_name}.Tensor", f"aten.{_name}.Scalar"], accepts=_fits_int32, lower=_lower_comparison(_table)
    )
for _name, _expression in LOGICAL.items():
    registry.register(f"aten.{_name}.default", accepts=registry.anything, lower=_lower_logical(_expression))

# --- add and sub, with alpha ------------------------------------------------------------------------------------------


def _accepts_add(call: Call) -> str | None:
    if call.outputs[0].dtype == "bool":
        return "no kernel for bool" if call.op.startswith("aten.sub") or call.get("alpha", 1) != 1 else None
    return _fits_int32(call)


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
        code = {"floor": "floor({0} / {1})", "trunc": "trunc({0} / {1})", None: "({0} / {1})"}[mode]
    else:
        code = _wrapped({"floor": "floor_div_i32({0}, {1})", "trunc": "({0} / {1})"}[mode], out.dtype)
    args = [operand(call["self"], out.dtype), operand(call["other"], out.dtype)]
    return b.pointwise(code, args, out.dtype, out.shape)


registry.register(("aten.div.Tensor_mode", "aten.div.Scalar_mode"), accepts=_fits_int32, lower=_lower_div_mode)


def _accepts_pow(call: Call) -> str | None:
    if call.outputs[0].dtype in FLOATS:
        return None
    exponent = call.get("exponent")
    if isinstance(exponent, int) and exponent in (0, 1, 2, 3) and call.outputs[0].dtype != "bool":
        return None
    return f"pow: no kernel for {call.outputs[0].dtype} with this exponent"


def _lower_pow(call: Call, b: Any) -> Value:
    out = call.outputs[0]
    base, exponent = call["self"], call["exponent"]
    powers = {0: "pow_zero", 1: "{0}", 2: "({0} * {0})", 3: "({0} * {0} * {0})"}
    if not isinstance(exponent, Value) and exponent in powers and isinstance(base, Value):
        x = operand(base, out.dtype)
        if exponent == 0:
            return values.expand(operand(1, out.dtype), out.shape)
        return b.pointwise(_wrapped(powers[int(exponent)], out.dtype), [x], out.dtype, out.shape)
    if exponent == 0.5 and not isinstance(exponent, Value):
        return b.pointwise("sqrt({0})", [operand(base, out.dtype)], out.dtype, out.shape)
    args = [operand(base, out.dtype), operand(exponent, out.dtype)]
    return b.pointwise("pow_exact({0}, {1})", args, out.dtype, out.shape)


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
    accepts=every(dtypes(BOOL + ("uint8",), "condition"), _fits_int32),
    lower=_lower_where,
)


def _lower_masked_fill(call: Call, b: Any) -> Value:
    out = call.outputs[0]
    args = [call["mask"], call["self"], operand(call["value"], out.dtype)]
    return b.pointwise("select({1}, {2}, {0})", args, out.dtype, out.shape)


registry.register(
    ("aten.masked_fill.Scalar", "aten.masked_fill.Tensor"),
    accepts=every(dtypes(BOOL, "mask"), _fits_int32),
    lower=_lower_masked_fill,
)


def _accepts_prelu(call: Call) -> str | None:
    weight: TensorSpec = call["weight"]
    if weight.rank > 1:
        return "prelu: the weight is one number or one a channel"
    return dtypes(FLOATS)(call)


def _lower_prelu(call: Call, b: Any) -> Value:
    x, weight = call["self"], call["weight"]
    if x.rank >= 2:
        weight = b.reshape(weight, (1, -1 if weight.rank == 0 else weight.numel, *(1,) * (x.rank - 2))) if weight.rank else weight
    return b.pointwise("select({0} * {1}, {0}, {0} > 0.0)", [x, weight], x.dtype, x.shape)


registry.register(("aten.prelu.default", "aten._prelu_kernel.default"), accepts=_accepts_prelu, lower=_lower_prelu, preserve=True)
