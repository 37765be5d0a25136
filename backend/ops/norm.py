"""Softmax and its kin, LayerNorm, GroupNorm, RMSNorm. f16 is computed in f32 and rounded where it is stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from backend.graph import Call, ShapeError
from backend.ops.registry import ALL, FLOATS, dtypes, every, is_static, normalize_axes, normalize_axis, register
from backend.ops.rows import Rows, held, reread, rows_of
from backend.runtime import value as values
from backend.runtime.value import Value

# --- softmax ----------------------------------------------------------------------------------------------------------


def _softmax_launch(op: str, x: Value, rows: Rows, shape: Sequence[int], dtype: str, b: Any) -> Value:
    geometry, groups = rows.geometry(b)
    keep = held(rows.n, geometry["lanes"])
    return b.launch(
        "softmax",
        shape=shape,
        dtype=dtype,
        reads={"x": x if keep else reread(x, b)},
        params=rows.params(),
        constants={**geometry, "op": op, "held": keep},
        groups=groups if rows.n else 0,
    )


def softmax(x: Value, axis: int, dtype: str, b: Any) -> Value:
    """The softmax of `x` along `axis`, for operators that are made of one."""
    x, rows = rows_of(x, [normalize_axis(axis, x.rank)], b)
    return _softmax_launch("softmax", x, rows, x.shape, dtype, b)


def _lower_softmax(op: str) -> Callable[[Call, Any], Value]:
    def lower(call: Call, b: Any) -> Value:
        out = call.outputs[0]
        x: Value = call["self"]
        wanted = call.get("dtype")
        # torch converts to `dtype` first; half_to_float and the default keep every digit of the input.
        x = values.cast(x, wanted) if wanted else x
        x, rows = rows_of(x, [normalize_axis(call["dim"], x.rank)], b)
        return _softmax_launch(op, x, rows, out.shape, out.dtype, b)

    return lower


def _float_output(call: Call) -> str | None:
    return next((f"no kernel for {o.dtype}" for o in call.outputs if o is not None and o.dtype not in FLOATS), None)


for _op in ("softmax", "log_softmax"):
    register(f"aten._{_op}.default", accepts=every(dtypes(FLOATS, "self"), _float_output), lower=_lower_softmax(_op))
    register(
        f"aten.{_op}.int",
        accepts=every(dtypes(ALL, "self"), _float_output),
        lower=_lower_softmax(_op),
        preserve=True,
    )


def _lower_logsumexp(call: Call, b: Any) -> Value:
    out = call.outputs[0]
    x: Value = call["self"]
    if x.dtype not in FLOATS:
        x = values.cast(x, "float32")
    x, rows = rows_of(x, normalize_axes(call["dim"], x.rank), b)
    if rows.n == 0:
        return values.scalar(-math.inf, out.dtype, out.shape)
    return _softmax_launch("lse", x, rows, out.shape, out.dtype, b)


register("aten.logsumexp.default", accepts=every(dtypes(ALL, "self"), _float_output), lower=_lower_logsumexp)

# --- norms ------------------------------------------------------------------------------------------------------------


def _norm(
    call: Call, b: Any, rows: Rows, eps: float, *, rms: bool = False, channels: tuple[int, int, int] | None = None
) -> tuple[Value | None, ...]:
    """The outputs that are used. channels: (groups, channels a group, elements a channel) for weights by channel."""
    x: Value = call["input"]
    geometry, groups = rows.geometry(b)
    keep = held(rows.n, geometry["lanes"])
    reads = {"x": x if keep else reread(x, b)}
    for name in ("weight", "bias"):
        if call.get(name) is not None:
            reads[name] = call[name]
    constants = {
        **geometry,
        "rms": rms,
        "weight": "weight" in reads,
        "bias": "bias" in reads,
        "channels": channels is not None,
        "held": keep,
    }
    per_row = dict(zip(("row_groups", "group_channels", "spatial"), channels or (1, rows.n, 1), strict=True))
    params = {**rows.params(), **per_row, "eps": float(eps)}
    launch: dict[str, Any] = {"reads": reads, "params": params, "groups": groups if rows.n else 0}
    specs = call.outputs
    names = ("y", "rstd") if rms else ("y", "mean", "rstd")
    if len(specs) == 1 or all(spec is None for spec in specs[1:]):
        constants["writes"] = "out"
        y = b.launch("norm", shape=x.shape, dtype=x.dtype, constants=constants, **launch)
        return (y, *(None for _ in specs[1:]))
    targets = {
        name: b.temp(spec.shape, spec.dtype) for name, spec in zip(names, specs, strict=True) if spec is not None
    }
    constants["writes"] = tuple(targets)
    b.launch_into("norm", targets=targets, constants=constants, **launch)
    return tuple(values.of_tensor(targets[name]) if name in targets else None for name in names)


def _accepts_norm(call: Call) -> str | None:
    return every(dtypes(FLOATS, "input", "weight", "bias"), _float_output, _statistics_of_something)(call)


def _statistics_of_something(call: Call) -> str | None:
    stats = any(spec is not None for spec in call.outputs[1:])
    return "statistics of empty rows" if stats and 0 in call["input"].shape else None


def _last_axes(call: Call) -> Rows:
    shape = call["input"].shape
    split = len(shape) - len(call["normalized_shape"])
    return Rows(math.prod(shape[:split]), math.prod(shape[split:]), 1)


def _lower_layer_norm(call: Call, b: Any) -> Any:
    outputs = _norm(call, b, _last_axes(call), call["eps"])
    return outputs if len(call.outputs) > 1 else outputs[0]


register("aten.layer_norm.default", accepts=_accepts_norm, lower=_lower_layer_norm, preserve=True)
register("aten.native_layer_norm.default", accepts=_accepts_norm, lower=_lower_layer_norm)


def rms_eps(given: float | None) -> float:
    """What an RMSNorm adds to the mean of squares, by its own word or by torch's default."""
    return float(np.finfo(np.float32).eps if given is None else given)


def _lower_rms_norm(call: Call, b: Any) -> Any:
    outputs = _norm(call, b, _last_axes(call), rms_eps(call.get("eps")), rms=True)
    return outputs if len(call.outputs) > 1 else outputs[0]


register("aten.rms_norm.default", accepts=_accepts_norm, lower=_lower_rms_norm, preserve=True)
register("aten._fused_rms_norm.default", accepts=_accepts_norm, lower=_lower_rms_norm)


def _lower_group_norm(call: Call, b: Any) -> Any:
    shape = call["input"].shape
    groups = call["num_groups"] if "num_groups" in call.args else call["group"]
    batch, channels, spatial = shape[0], shape[1], math.prod(shape[2:])
    if channels % groups:
        raise ShapeError(f"group_norm: {channels} channels do not divide into {groups} groups")
    rows = Rows(batch * groups, channels // groups * spatial, 1)
    outputs = _norm(call, b, rows, call["eps"], channels=(groups, channels // groups, max(spatial, 1)))
    return outputs if len(call.outputs) > 1 else outputs[0]


def _accepts_group_norm(call: Call) -> str | None:
    spec = call["input"]
    if spec.rank < 2:
        return "group_norm: the input needs a batch and a channel axis"
    groups = call["num_groups"] if "num_groups" in call.args else call["group"]
    if is_static(groups, spec.shape[1]) and (groups < 1 or spec.shape[1] % groups):
        return f"group_norm: {spec.shape[1]} channels do not divide into {groups} groups"
    return _accepts_norm(call)


register("aten.group_norm.default", accepts=_accepts_group_norm, lower=_lower_group_norm, preserve=True)
register("aten.native_group_norm.default", accepts=_accepts_group_norm, lower=_lower_group_norm)

# --- batch norm at inference --------------------------------------------------------------------------------------


def _accepts_batch_norm(call: Call) -> str | None:
    if call.get("training", False) or call.get("running_mean") is None or call.get("running_var") is None:
        return "batch_norm: there is a kernel for inference with running statistics only"
    if call["input"].rank < 2:
        return "batch_norm: the input needs a batch and a channel axis"
    return every(dtypes(FLOATS), _float_output)(call)


def _lower_batch_norm(call: Call, b: Any) -> Any:
    """x * scale + shift, pointwise: it joins the kernel before it, and scale and shift of constants are made once."""
    x: Value = call["input"]
    shape = (x.shape[1], *(1,) * (x.rank - 2))
    weight, bias = (
        None if call.get(name) is None else values.cast(call[name], "float32") for name in ("weight", "bias")
    )
    mean, variance = (values.cast(call[name], "float32") for name in ("running_mean", "running_var"))
    eps = values.scalar(float(call["eps"]), "float32")
    scale = b.pointwise("(1.0 / sqrt({0} + {1}))", [variance, eps], "float32", variance.shape)
    if weight is not None:
        scale = b.pointwise("({0} * {1})", [scale, weight], "float32", scale.shape)
    shift = b.pointwise("(-{0} * {1})", [mean, scale], "float32", scale.shape)
    if bias is not None:
        shift = b.pointwise("({0} + {1})", [shift, bias], "float32", scale.shape)
    args = [x, b.reshape(scale, shape), b.reshape(shift, shape)]
    y = b.pointwise("({0} * {1} + {2})", args, x.dtype, x.shape)
    empty = (spec and values.scalar(0, spec.dtype, spec.shape) for spec in call.outputs[1:])
    return (y, *empty) if len(call.outputs) > 1 else y


# Export makes the first the second before it asks what to preserve.
register(
    ("aten.batch_norm.default", "aten._native_batch_norm_legit_no_training.default"),
    accepts=_accepts_batch_norm,
    lower=_lower_batch_norm,
)
