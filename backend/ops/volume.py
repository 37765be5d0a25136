"""3-d convolution, for `backend.ops.conv`: one direct kernel for all of it."""

from __future__ import annotations

import math
from typing import Any

from backend.graph import Call
from backend.runtime import value as values
from backend.runtime.builder import Builder
from backend.runtime.value import Value

WORKGROUP = 64
AXES = "dhw"


def _three(item: Any) -> list[int]:
    numbers = [item] if isinstance(item, int) else list(item)
    return numbers * 3 if len(numbers) == 1 else numbers


def lower(call: Call, b: Builder) -> Value:
    """Forward or transposed, by the call's own word, with or without a batch axis."""
    out = call.outputs[0]
    x, weight = call["input"], call["weight"]
    transposed = bool(call.get("transposed", False)) or "transpose" in call.op
    sets = call.get("groups", 1)
    size, kernel, result = x.shape[-3:], weight.shape[2:], out.shape[-3:]
    batch = x.shape[0] if x.rank == 5 else 1
    channels, out_channels = x.shape[-4], out.shape[-4]
    whole = (batch, out_channels, *result)
    stride, dilation = _three(call.get("stride", 1)), _three(call.get("dilation", 1))
    padding = call.get("padding", 0)
    if isinstance(padding, str):  # what is in front: the output's size says what is behind
        total = [step * (length - 1) for step, length in zip(dilation, kernel, strict=True)]
        padding = [0 if padding == "valid" else amount // 2 for amount in total]
    count = math.prod(whole)
    if count == 0 or x.numel == 0 or weight.numel == 0:
        y = values.scalar(0, out.dtype, whole)
    else:
        source, kernels = b.contiguous(x), b.contiguous(weight)
        given = {"in": size, "out": result, "kernel": kernel, "stride": stride, "pad": _three(padding), "dil": dilation}
        params = {f"{name}_{axis}": sizes[d] for name, sizes in given.items() for d, axis in enumerate(AXES)}
        params |= {"x_start": source.offset, "w_start": kernels.offset, "count": count, "sets": sets}
        params |= {"in_c": channels // sets, "out_c": out_channels // sets}
        y = b.launch(
            "conv_volume",
            shape=whole,
            dtype=out.dtype,
            reads={"x": source, "weight": kernels},
            groups=-(-count // WORKGROUP),
            params=params,
            constants={"TRANSPOSED": transposed},
        )
    bias = call.get("bias")
    if bias is not None:
        y = b.pointwise("({0} + {1})", [y, b.reshape(bias, (out_channels, 1, 1, 1))], out.dtype, whole)
    return b.reshape(y, out.shape)
