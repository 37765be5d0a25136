"""Pointwise operators with parameters: activations, clamp, interpolation. Lazy, as those of `backend.ops.pointwise`."""

from __future__ import annotations

import math
from typing import Any

from backend.graph import Call, TensorSpec
from backend.ops import registry
from backend.ops.pointwise import fits_int32, operand
from backend.ops.registry import FLOATS, INTS, dtypes, every, normalize_axis
from backend.runtime import value as values
from backend.runtime.tensor import COMPUTE
from backend.runtime.value import Value

# --- scalar parameters ------------------------------------------------------------------------------------------------

# name -> (WGSL over {0} = self and the parameters, (parameter name, default)…)
PARAMETRIC: dict[str, tuple[str, tuple[tuple[str, float], ...]]] = {
    "leaky_relu": ("select({0} * {1}, {0}, {0} > 0.0)", (("negative_slope", 0.01),)),
    "elu": (
        "(select({1} * expm1_exact({0} * {3}), {0}, {0} > 0.0) * {2})",
        (("alpha", 1.0), ("scale", 1.0), ("input_scale", 1.0)),
    ),
    "celu": ("select({1} * expm1_exact({0} / {1}), {0}, {0} > 0.0)", (("alpha", 1.0),)),
    "softplus": ("select(softplus({0} * {1}) / {1}, {0}, {0} * {1} > {2})", (("beta", 1.0), ("threshold", 20.0))),
    "hardtanh": ("min_nan(max_nan({0}, {1}), {2})", (("min_val", -1.0), ("max_val", 1.0))),
    "hardshrink": ("select({0}, 0.0, abs({0}) <= {1})", (("lambd", 0.5),)),
    "softshrink": (
        "select(select(select({0} * 0.0, {0} + {1}, {0} < -{1}), {0} - {1}, {0} > {1}), {0}, is_nan({0}))",
        (("lambd", 0.5),),
    ),
    "threshold": ("select({0}, {2}, {0} <= {1})", (("threshold", 0.0), ("value", 0.0))),
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
        preserve=_name not in ("hardshrink", "softshrink"),  # which export decomposes in any case
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
    for name, function in (("min", "max"), ("max", "min")):  # a lower bound above the upper one gives the upper one
        bound = call.get(name)
        if bound is not None:
            code = f"{function}_nan({{0}}, {{1}})" if is_float else f"{function}({{0}}, {{1}})"
            result = b.pointwise(code, [result, operand(bound, out.dtype)], out.dtype, out.shape)
    return result


registry.register(
    ("aten.clamp.default", "aten.clamp.Tensor", "aten.clamp_min.default", "aten.clamp_max.default"),
    accepts=every(dtypes(FLOATS + INTS), fits_int32),
    lower=_lower_clamp,
)


def _lower_logit(call: Call, b: Any) -> Value:
    out = call.outputs[0]
    x, eps = call["self"], call.get("eps")
    if eps is not None and eps >= 0:
        bounds = [operand(float(eps), "float32"), operand(1.0 - float(eps), "float32")]
        x = b.pointwise("min_nan(max_nan({0}, {1}), {2})", [x, *bounds], "float32", out.shape)
    return b.pointwise("(log_exact({0}) - log1p_exact(-{0}))", [x], out.dtype, out.shape)


registry.register("aten.logit.default", accepts=dtypes(FLOATS, "self"), lower=_lower_logit)


def _lower_nan_to_num(call: Call, b: Any) -> Value:
    out = call.outputs[0]
    if COMPUTE[out.dtype] != "f32":
        return call["self"]
    largest = 65504.0 if out.dtype == "float16" else 3.4028234663852886e38
    given = [call.get("nan", 0.0), call.get("posinf", largest), call.get("neginf", -largest)]
    code = "select(select({0}, select({3}, {2}, {0} > 0.0), is_inf({0})), {1}, is_nan({0}))"
    scalars = [operand(float(item), "float32") for item in given]
    return b.pointwise(code, [call["self"], *scalars], out.dtype, out.shape)


registry.register(
    "aten.nan_to_num.default",
    accepts=every(
        dtypes(FLOATS + INTS + ("bool",), "self"),
        lambda call: (
            None
            if all(math.isfinite(call.get(name, 0.0)) for name in ("nan", "posinf", "neginf"))
            else "nan_to_num: replacement is not finite"
        ),
    ),
    lower=_lower_nan_to_num,
)


def _lower_round_decimals(call: Call, b: Any) -> Value:
    out = call.outputs[0]
    decimals = int(call["decimals"])
    scale = operand(float(10 ** abs(decimals)), "float32")
    code = "(round({0} * {1}) / {1})" if decimals >= 0 else "(round({0} / {1}) * {1})"
    return b.pointwise(code, [call["self"], scale], out.dtype, out.shape)


registry.register(
    "aten.round.decimals",
    accepts=every(
        dtypes(FLOATS, "self"),
        lambda call: None if abs(call["decimals"]) <= 30 else f"round to {call['decimals']} decimals",
    ),
    lower=_lower_round_decimals,
)

# --- tensor parameters ------------------------------------------------------------------------------------------------


def _accepts_prelu(call: Call) -> str | None:
    weight: TensorSpec = call["weight"]
    if call.op == "aten.prelu.default" and weight.rank > 1:
        return "prelu: the weight is one number or one a channel"
    return dtypes(FLOATS)(call)


def _lower_prelu(call: Call, b: Any) -> Value:
    x, weight = call["self"], call["weight"]
    if call.op == "aten.prelu.default":  # `_prelu_kernel` has the weight's shape for broadcasting already
        weight = b.reshape(
            weight, (weight.numel, *(1,) * (x.rank - 2)) if x.rank >= 2 else (weight.numel,) * min(x.rank, 1)
        )
    return b.pointwise("select({0} * {1}, {0}, {0} > 0.0)", [x, weight], x.dtype, x.shape)


registry.register(
    ("aten.prelu.default", "aten._prelu_kernel.default"), accepts=_accepts_prelu, lower=_lower_prelu, preserve=True
)


def _lower_glu(call: Call, b: Any) -> Value:
    out = call.outputs[0]
    x = b.movable(call["self"])
    axis = normalize_axis(call.get("dim", -1), x.rank)
    half = x.shape[axis] // 2
    parts = [values.slice_(x, axis, start, half) for start in (0, half)]
    return b.pointwise("({0} * sigmoid({1}))", parts, out.dtype, out.shape)


registry.register("aten.glu.default", accepts=dtypes(FLOATS), lower=_lower_glu, preserve=True)


def _lower_lerp(call: Call, b: Any) -> Value:
    out = call.outputs[0]
    args = [call["self"], call["end"], operand(call["weight"], out.dtype)]
    code = "select({1} - ({1} - {0}) * (1.0 - {2}), {0} + {2} * ({1} - {0}), abs({2}) < 0.5)"
    return b.pointwise(code, args, out.dtype, out.shape)


registry.register(("aten.lerp.Scalar", "aten.lerp.Tensor"), accepts=dtypes(FLOATS), lower=_lower_lerp)


def _lower_addc(code: str) -> registry.Lower:
    def lower(call: Call, b: Any) -> Value:
        out = call.outputs[0]
        args = [call["self"], call["tensor1"], call["tensor2"], call.get("value", 1)]
        return b.pointwise(code, [operand(arg, out.dtype) for arg in args], out.dtype, out.shape)

    return lower


registry.register("aten.addcmul.default", accepts=dtypes(FLOATS), lower=_lower_addc("({0} + {3} * {1} * {2})"))
registry.register("aten.addcdiv.default", accepts=dtypes(FLOATS), lower=_lower_addc("({0} + {3} * ({1} / {2}))"))
