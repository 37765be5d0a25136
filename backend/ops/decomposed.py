"""Numbers to codes and back, as the PT2E flow writes them around every quantized operator (`quantized_decomposed`).

    quantize_per_tensor     clamp(round(x / scale) + zero, least, most)    x float32
    dequantize_per_tensor   (code - zero) * scale                          to float32
    dequantize_per_channel  the same, a scale and a zero point for each index of one axis

All are pointwise: work of the kernels around them, and computed once where they expand a constant. A weight that a
linear or embedding reads is not expanded: `backend.passes.quantized` packs its codes. Scales computed at run time
are float64, which no GPU has: with what computes them, those forms are `zoo.round_tensor` (`backend.ops.quantized`).
"""

from __future__ import annotations

from typing import Any

from backend.graph import Call, TensorSpec
from backend.ops.registry import WIDE_INTS, register
from backend.runtime import value as values
from backend.runtime.builder import Builder
from backend.runtime.value import Value

CODES = ("int8", "uint8", "int16")
_LARGEST_ZERO = 2**24  # whole numbers that float32 holds


def _number_refusal(call: Call) -> str | None:
    scale, zero = call["scale"], call["zero_point"]
    # Neither the scale nor its inverse may leave the normal numbers of float32.
    if not isinstance(scale, float) or not 2.0**-126 <= scale <= 2.0**126:
        return "the scale is not a positive number"
    if not isinstance(zero, int) or abs(zero) >= _LARGEST_ZERO:
        return "the zero point is not a number that float32 holds"
    return None


def _accepts_quantize(call: Call) -> str | None:
    x, out = call["input"], call.outputs[0]
    if x.dtype != "float32":
        return f"no kernel for {x.dtype}"
    if out.dtype not in CODES:
        return f"no kernel for codes of {out.dtype}"
    return _number_refusal(call)


def _lower_quantize(call: Call, b: Builder) -> Value:
    """As torch: the product with the inverse in float32, halves to even."""
    out = call.outputs[0]
    # The inverse is taken in float64 and then rounded, as Python's is there.
    numbers = (1.0 / call["scale"], float(call["zero_point"]), float(call["quant_min"]), float(call["quant_max"]))
    args = [call["input"], *(values.scalar(number, "float32") for number in numbers)]
    return b.pointwise("i32(clamp(round({0} * {1}) + {2}, {3}, {4}))", args, out.dtype, out.shape)


def _accepts_dequantize(call: Call) -> str | None:
    x, out = call["input"], call.outputs[0]
    if x.dtype not in (*CODES, "int32") or x.dtype != call["dtype"]:
        return f"no kernel for codes of {x.dtype}"
    if out.dtype != "float32":
        return f"no kernel for {out.dtype}"
    return _number_refusal(call)


def _lower_dequantize(call: Call, b: Builder) -> Value:
    out = call.outputs[0]
    args = [call["input"], *(values.scalar(float(call[name]), "float32") for name in ("zero_point", "scale"))]
    return b.pointwise("((f32({0}) - {1}) * {2})", args, out.dtype, out.shape)


def _accepts_per_channel(call: Call) -> str | None:
    x, scales, axis, out = call["input"], call["scales"], call["axis"], call.outputs[0]
    zeros: TensorSpec | None = call.get("zero_points")
    if x.dtype not in CODES or x.dtype != call["dtype"]:
        return f"no kernel for codes of {x.dtype}"
    if scales.dtype != "float32" or out.dtype != "float32":
        return f"no kernel for {scales.dtype if scales.dtype != 'float32' else out.dtype}"
    if not isinstance(axis, int) or not 0 <= axis < x.rank or scales.shape != (x.shape[axis],):
        return "one scale for each index of the axis is needed"
    if zeros is not None and (zeros.dtype not in (*WIDE_INTS, "float32") or zeros.shape != scales.shape):
        return "one zero point for each index of the axis is needed"
    return None


def _lower_per_channel(call: Call, b: Builder) -> Value:
    x, out, zeros = call["input"], call.outputs[0], call.get("zero_points")
    shape = [1] * x.rank
    shape[call["axis"]] = x.shape[call["axis"]]

    def along(value: Value) -> Value:
        return b.reshape(value, tuple(shape))

    args: list[Any] = [x, along(call["scales"])]
    if zeros is None:
        return b.pointwise("(f32({0}) * {1})", args, out.dtype, out.shape)
    difference = "f32({0} - {2})" if zeros.dtype in WIDE_INTS else "(f32({0}) - {2})"
    return b.pointwise(f"({difference} * {{1}})", [*args, along(zeros)], out.dtype, out.shape)


register("quantized_decomposed.quantize_per_tensor.default", accepts=_accepts_quantize, lower=_lower_quantize)
register("quantized_decomposed.dequantize_per_tensor.default", accepts=_accepts_dequantize, lower=_lower_dequantize)
register("quantized_decomposed.dequantize_per_channel.default", accepts=_accepts_per_channel, lower=_lower_per_channel)
