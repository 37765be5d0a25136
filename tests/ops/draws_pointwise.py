"""Draws for pointwise operators, casts, and tensors made from nothing."""

from __future__ import annotations

from typing import Any

import torch

from backend.ops.registry import FLOATS, INTS
from tests.ops.draw import DIMS, Arguments, Draw, draws
from tests.ops.harness import overload

# --- one tensor, two operands -----------------------------------------------------------------------------------------


def unary(d: Draw) -> Arguments:
    rank = 2 if ".t." in d.op or ".t_copy." in d.op else 5
    return (d.tensor(d.shape(0, rank), d.dtype()),), {}


def binary(d: Draw) -> Arguments:
    """Tensors of any two dtypes that broadcast either way; or one and a number, on either side."""
    shape, dtype = d.shape(), d.dtype()
    tensors = [d.tensor(shape, dtype), d.tensor(d.like(shape), d.dtype() if d.seldom() else dtype)]
    if d.seldom():
        tensors.reverse()
    if "shift" in d.op:
        tensors = [tensors[0], tensors[1].abs() % 40 if tensors[1].dtype != torch.bool else tensors[1]]
    arguments: list[Any] = []
    for position, argument in enumerate(overload(d.op)._schema.arguments[:2]):
        is_tensor = str(argument.type) == "Tensor"
        number = d.int(0, 40) if "shift" in d.op else d.scalar(dtype if dtype in INTS or d.flag() else "int64")
        arguments.append(tensors[position] if is_tensor else number)
    keywords: dict[str, Any] = {}
    names = [argument.name for argument in overload(d.op)._schema.arguments]
    if "alpha" in names and d.seldom():
        keywords["alpha"] = d.scalar("int64")
    if "rounding_mode" in names:
        keywords["rounding_mode"] = d.one((None, "floor", "trunc"))
    return tuple(arguments), keywords


@draws("clamp.default", "clamp_min.default", "clamp_max.default")
def _(d: Draw) -> Arguments:
    dtype = d.dtype(FLOATS + INTS)
    bounds = [d.scalar(dtype if d.flag() else "int64") for _ in range(1 if "_m" in d.op else 2)]
    if len(bounds) == 2 and d.seldom():
        bounds[d.int(0, 1)] = None
    return (d.tensor(d.shape(), dtype), *bounds), {}


@draws("clamp.Tensor")
def _(d: Draw) -> Arguments:
    shape, dtype = d.shape(), d.dtype(FLOATS + INTS)
    low, high = (None if d.seldom() else d.tensor(d.like(shape), dtype) for _ in range(2))
    return (d.tensor(shape, dtype), low, high), {}


@draws("leaky_relu.default", "celu.default", "hardshrink.default", "softshrink.default")
def _(d: Draw) -> Arguments:
    return (d.tensor(d.shape(), d.dtype(FLOATS)), *([d.one((0.5, 0.01, 1.5, 2))] if d.flag() else [])), {}


@draws("elu.default", "softplus.default", "hardtanh.default", "threshold.default")
def _(d: Draw) -> Arguments:
    if "threshold" not in d.op and d.flag():
        return (d.tensor(d.shape(), d.dtype(FLOATS)),), {}
    low = d.one((1.0, 0.5, 2.0, 1))
    return (d.tensor(d.shape(), d.dtype(FLOATS)), low, low + d.one((1.0, 0.25, 3.0))), {}


@draws("silu.default", "mish.default", "gelu.default")
def _(d: Draw) -> Arguments:
    """Without -inf, which is 0 here and NaN in torch, by intent: see tests/ops/test_pointwise.py."""
    x = d.tensor(d.shape(), d.dtype(FLOATS))
    x[torch.isneginf(x)] = -1.0
    return (x,), {"approximate": d.one(("none", "tanh"))} if "gelu" in d.op else {}


@draws("logit.default")
def _(d: Draw) -> Arguments:
    return (d.tensor(d.shape(), d.dtype(FLOATS), 0, 1), d.one((None, 1e-3, 0.1))), {}


@draws("round.decimals")
def _(d: Draw) -> Arguments:
    return (d.tensor(d.shape(), d.dtype(FLOATS)),), {"decimals": d.int(-3, 4)}


@draws("nan_to_num.default")
def _(d: Draw) -> Arguments:
    return (d.tensor(d.shape(), d.dtype()), *(d.one((None, 0.0, -2.5, 1e4)) for _ in range(3))), {}


@draws("prelu.default")
def _(d: Draw) -> Arguments:
    shape, dtype = d.shape(), d.dtype(FLOATS)
    channels = 1 if len(shape) < 2 or d.flag() else shape[1]
    return (d.tensor(shape, dtype), d.tensor((channels,), dtype)), {}


@draws("_prelu_kernel.default")
def _(d: Draw) -> Arguments:
    shape, dtype = d.shape(2), d.dtype(FLOATS)
    return (d.tensor(shape, dtype), d.tensor((1, shape[1], *(1,) * (len(shape) - 2)), dtype)), {}


@draws("glu.default")
def _(d: Draw) -> Arguments:
    shape = list(d.shape(1, 4))
    axis = d.axis(len(shape))
    shape[axis] *= 2
    return (d.tensor(shape, d.dtype(FLOATS)), axis), {}


@draws("lerp.Scalar", "lerp.Tensor")
def _(d: Draw) -> Arguments:
    shape, dtype = d.shape(), d.dtype(FLOATS)
    weight = d.one((0.25, 0.5, 0.75, 2.0)) if "Scalar" in d.op else d.tensor(d.like(shape), dtype)
    return (d.tensor(shape, dtype), d.tensor(d.like(shape), dtype), weight), {}


@draws("addcmul.default", "addcdiv.default")
def _(d: Draw) -> Arguments:
    shape, dtype = d.shape(), d.dtype(FLOATS + INTS if "mul" in d.op else FLOATS)
    parts = (d.tensor(shape, dtype), d.tensor(d.like(shape), dtype), d.tensor(d.like(shape), dtype))
    return parts, {"value": d.one((1, 2, -3))}


@draws("where.self", "where.Scalar", "where.ScalarOther", "where.ScalarSelf")
def _(d: Draw) -> Arguments:
    shape, dtype = d.shape(), d.dtype()
    sides: list[Any] = [d.tensor(d.like(shape), dtype), d.tensor(d.like(shape), d.dtype() if d.seldom() else dtype)]
    for position, name in enumerate(("self", "other")):
        if str(overload(d.op)._schema.arguments[1 + position].type) != "Tensor":
            sides[position] = d.scalar(d.one((dtype, "int64")))
        del name
    return (d.tensor(shape, "bool"), *sides), {}


@draws("masked_fill.Scalar", "masked_fill.Tensor")
def _(d: Draw) -> Arguments:
    shape, dtype = d.shape(), d.dtype()
    number = d.scalar(dtype)
    value = number if "Scalar" in d.op else torch.tensor(number, dtype=getattr(torch, dtype))
    return (d.tensor(shape, dtype), d.tensor(d.like(shape), "bool"), value), {}


# --- casts and copies -------------------------------------------------------------------------------------------------


@draws("_to_copy.default", "dim_order_ops._to_dim_order_copy.default", "to.dtype")
def _(d: Draw) -> Arguments:
    source, target = d.dtype(), d.dtype()
    # Fractions beyond the target's range, and NaN, as whole numbers are undefined.
    low = 0 if target == "uint8" else -100
    whole = target in INTS and source in FLOATS
    x = d.tensor(d.shape(), source, low, 100) if whole else d.tensor(d.shape(), source)
    kind = getattr(torch, target)
    return ((x, kind), {}) if d.op == "aten.to.dtype" else ((x,), {"dtype": kind})


@draws("clone.default", "contiguous.default", "dim_order_ops._clone_dim_order.default")
def _(d: Draw) -> Arguments:
    return unary(d)


@draws("dropout.default")
def _(d: Draw) -> Arguments:
    return (d.tensor(d.shape(), d.dtype(FLOATS)), 0.5, d.seldom()), {}


@draws("copy.default")
def _(d: Draw) -> Arguments:
    shape = d.shape()
    return (d.tensor(shape, d.dtype(FLOATS)), d.tensor(d.like(shape), d.dtype())), {}


# --- tensors from nothing ---------------------------------------------------------------------------------------------


@draws("arange.default", "arange.start", "arange.start_step")
def _(d: Draw) -> Arguments:
    dtype = d.dtype(("float32", "int64", "int32", "float16", "int16", "uint8", "int8"))
    low, high = 0, d.int(0, 100)
    if "start" in d.op:
        low = d.int(0 if dtype == "uint8" else -20, high)
    number = (lambda x: x) if dtype in INTS or d.flag() else float
    bounds = [high] if "start" not in d.op else [low, high]
    if "step" in d.op:
        bounds.append(d.int(1, 5))
        if d.seldom():
            bounds = [high, low, -bounds[2]]
    return tuple(number(bound) for bound in bounds), {"dtype": getattr(torch, dtype)}


@draws("linspace.default")
def _(d: Draw) -> Arguments:
    bounds = d.one((-1.0, 0, 3.5)), d.one((1.0, 10, -7.25))
    return (*bounds, d.int(0, 50)), {"dtype": getattr(torch, d.dtype(FLOATS))}


@draws("eye.default", "eye.m")
def _(d: Draw) -> Arguments:
    sizes = [d.one(DIMS) for _ in range(2 if d.op.endswith(".m") else 1)]
    return tuple(sizes), {"dtype": getattr(torch, d.dtype())}


@draws("full.default", "full_like.default", "new_full.default", "scalar_tensor.default", "fill.Scalar", "fill.Tensor")
def _(d: Draw) -> Arguments:
    dtype, shape = d.dtype(), d.shape()
    number = d.scalar(dtype if dtype != "uint8" else "bool")
    kind = {"dtype": getattr(torch, dtype)}
    x = d.tensor(d.shape(), dtype)
    if "scalar_tensor" in d.op:
        return (number,), kind
    if "fill." in d.op:
        return (x, number if "Scalar" in d.op else torch.tensor(number, **kind)), {}
    first = {"aten.full.default": (list(shape),), "aten.full_like.default": (x,)}.get(d.op, (x, list(shape)))
    return (*first, number), kind


@draws("zeros.default", "ones.default")
def _(d: Draw) -> Arguments:
    return (list(d.shape()),), {"dtype": getattr(torch, d.dtype())}


@draws("zeros_like.default", "ones_like.default")
def _(d: Draw) -> Arguments:
    return unary(d)


@draws("new_zeros.default", "new_ones.default")
def _(d: Draw) -> Arguments:
    return (d.tensor(d.shape(), d.dtype()), list(d.shape())), {}


@draws("tril.default", "triu.default")
def _(d: Draw) -> Arguments:
    return (d.tensor(d.shape(2), d.dtype()), d.int(-8, 8)), {}
