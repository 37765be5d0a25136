"""Draws for operators that combine elements: reductions, norms, pools, products, convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from backend.ops.registry import ALL, FLOATS, INTS
from tests.ops.draw import Arguments, Draw, draws

# --- reductions -------------------------------------------------------------------------------------------------------


@draws("all.dim", "any.dim", "max.dim", "min.dim", "argmax.default", "argmin.default")
def _(d: Draw) -> Arguments:
    shape = d.shape()
    axis = None if "arg" in d.op and d.seldom() else d.axis(len(shape))
    return (d.tensor(shape, d.dtype()), axis, d.flag()), {}


@draws("all.dims", "any.dims", "amax.default", "amin.default", "logsumexp.default")
def _(d: Draw) -> Arguments:
    shape = d.shape()
    axes = d.axes(len(shape))
    return (d.tensor(shape, d.dtype(FLOATS if "log" in d.op else ALL)), axes, d.flag()), {}


@draws("sum.default", "mean.default", "prod.default")
def _(d: Draw) -> Arguments:
    keywords = _result_dtype(d)
    return (_summand(d, d.shape(), keywords),), keywords


@draws("sum.dim_IntList", "mean.dim", "prod.dim_int")
def _(d: Draw) -> Arguments:
    shape = d.shape()
    axes = d.axis(len(shape)) if "prod" in d.op else None if d.seldom() else d.axes(len(shape))
    keywords = _result_dtype(d)
    return (_summand(d, shape, keywords), axes, d.flag()), keywords


def _result_dtype(d: Draw) -> dict[str, Any]:
    return {"dtype": getattr(torch, d.dtype(("float32", "float16", "int64", "int32")))} if d.seldom() else {}


def _summand(d: Draw, shape: Sequence[int], keywords: dict[str, Any]) -> torch.Tensor:
    """Small factors for products; finite where the sum is one of whole numbers, as which infinities have no value."""
    dtype = keywords.get("dtype")
    return d.tensor(
        shape,
        d.dtype(),
        *((-2, 2) if "prod" in d.op else ()),
        special=dtype is None or dtype.is_floating_point,
    )


@draws("cumsum.default", "cumprod.default")
def _(d: Draw) -> Arguments:
    shape, keywords = d.shape(), _result_dtype(d)
    return (_summand(d, shape, keywords), d.axis(len(shape))), keywords


@draws("var.default", "std.default")
def _(d: Draw) -> Arguments:
    return (d.tensor(d.shape(), d.dtype(FLOATS)), d.flag()), {}


@draws("var.dim", "std.dim")
def _(d: Draw) -> Arguments:
    shape = d.shape()
    return (d.tensor(shape, d.dtype(FLOATS)), d.axes(len(shape)), d.flag(), d.flag()), {}


@draws("var.correction", "std.correction", "var_mean.correction", "std_mean.correction")
def _(d: Draw) -> Arguments:
    shape = d.shape()
    keywords = {"correction": d.one((None, 0, 1, 2, 0.5)), "keepdim": d.flag()}
    return (d.tensor(shape, d.dtype(FLOATS)), d.axes(len(shape))), keywords


@draws("linalg_vector_norm.default", "norm.ScalarOpt_dim")
def _(d: Draw) -> Arguments:
    shape = d.shape()
    order = d.one((2, 1, 0, math.inf, -math.inf, 2.0, 3))
    return (d.tensor(shape, d.dtype(FLOATS)), order, d.axes(len(shape)), d.flag()), {}


@draws("softmax.int", "log_softmax.int", "_softmax.default", "_log_softmax.default")
def _(d: Draw) -> Arguments:
    shape = d.shape()
    whole = d.op.endswith(".int") and d.seldom()
    last = (torch.float32 if whole else d.one((None, torch.float32))) if d.op.endswith(".int") else False
    return (d.tensor(shape, "int64" if whole else d.dtype(FLOATS)), d.axis(len(shape)), last), {}


def _distinct(d: Draw, shape: Sequence[int]) -> torch.Tensor:
    """Whole numbers from 0 on in any order; in a float16, those up to 2048 are distinct."""
    count = math.prod(shape)
    dtypes = [name for name in FLOATS + INTS[:3] if name != "float16" or count <= 2049]
    return d.distinct(count, count).reshape(shape).to(getattr(torch, d.dtype(dtypes)))


@draws("sort.default", "sort.stable")
def _(d: Draw) -> Arguments:
    shape = d.shape()
    keywords = {"dim": d.axis(len(shape)), "descending": d.flag()}
    if "stable" in d.op:
        return (d.tensor(shape, d.dtype()),), keywords | {"stable": True}
    # Of distinct elements: where equal ones go is eager's own choice.
    return (_distinct(d, shape),), keywords


@draws("median.default", "median.dim")
def _(d: Draw) -> Arguments:
    """Of distinct elements: which of equal ones eager takes is its own choice."""
    shape = d.shape(smallest=1)
    x = _distinct(d, shape)
    if x.is_floating_point() and d.seldom():
        x[x == d.int(0, 5)] = math.nan
    return (x, *((d.axis(len(shape)), d.flag()) if d.op.endswith("dim") else ())), {}


@draws("topk.default")
def _(d: Draw) -> Arguments:
    """Of distinct elements: which of equal ones eager takes is its own choice."""
    shape = d.shape()
    axis = d.axis(len(shape))
    x = _distinct(d, shape)
    return (x, d.int(0, shape[axis] if shape else 1), axis, d.flag(), True), {}


# --- normalisation ----------------------------------------------------------------------------------------------------


def _maybe(d: Draw, shape: Sequence[int], dtype: str) -> torch.Tensor | None:
    return None if d.seldom() else d.tensor(shape, dtype, special=False)


@draws("layer_norm.default", "native_layer_norm.default", "rms_norm.default", "_fused_rms_norm.default")
def _(d: Draw) -> Arguments:
    shape, dtype = d.shape(1), d.dtype(FLOATS)
    own = list(shape[d.int(0, len(shape) - 1) :])
    eps = d.one((1e-5, 1e-3))
    x, weight = d.tensor(shape, dtype, special=False), _maybe(d, own, dtype)
    if "rms" in d.op:
        return (x, own, weight, None if d.seldom() and dtype == "float32" else eps), {}
    return (x, own, weight, _maybe(d, own, dtype), eps), {}


@draws("group_norm.default", "native_group_norm.default")
def _(d: Draw) -> Arguments:
    batch, groups, each = d.one((2, 1, 3)), d.int(1, 4), d.int(1, 5)
    shape, dtype = (batch, groups * each, *d.shape(0, 3, smallest=1)), d.dtype(FLOATS)
    x = d.tensor(shape, dtype, special=False)
    weight, bias = _maybe(d, shape[1:2], dtype), _maybe(d, shape[1:2], dtype)
    if "native" in d.op:
        return (x, weight, bias, batch, shape[1], math.prod(shape[2:]), groups, 1e-5), {}
    return (x, groups, weight, bias, 1e-5), {}


@draws("batch_norm.default", "_native_batch_norm_legit_no_training.default")
def _(d: Draw) -> Arguments:
    shape, dtype = d.shape(2), d.dtype(FLOATS)
    own = shape[1:2]
    x = d.tensor(shape, dtype, special=False)
    parts = (
        _maybe(d, own, dtype),
        _maybe(d, own, dtype),
        d.tensor(own, dtype, special=False),
        d.tensor(own, dtype, 1, 3),
    )
    return (x, *parts, *(() if "native" in d.op else (False,)), 0.1, 1e-5, *(() if "native" in d.op else (True,))), {}


# --- pictures ---------------------------------------------------------------------------------------------------------


def _picture(d: Draw, dims: int, smallest: int = 1, largest: int = 12) -> tuple[int, ...]:
    lead = (d.int(1, 4),) if d.seldom() else (d.int(1, 2), d.int(1, 4))
    return (*lead, *(d.int(smallest, largest) for _ in range(dims)))


def _dims(op: str) -> int:
    return next((dims for dims in (1, 2, 3) if f"{dims}d" in op), 2)


@draws(*(f"{kind}.default" for n in (2, 3) for kind in (f"avg_pool{n}d", f"max_pool{n}d_with_indices")))
def _(d: Draw) -> Arguments:
    dims = _dims(d.op)
    kernel = [d.int(1, 4) for _ in range(dims)]
    padding = [d.int(0, size // 2) for size in kernel]
    stride = [] if d.seldom() else [d.int(1, 3) for _ in range(dims)]
    x = d.tensor(_picture(d, dims, 7), d.dtype(FLOATS), special="max" in d.op)
    if "max" in d.op:
        return (x, kernel, stride, padding, d.one((1, [1, 2, 2][:dims], 2)), d.flag()), {}
    return (x, kernel, stride, padding, d.flag(), d.flag(), d.one((None, 3))), {}


@draws(*(f"{kind}_pool{n}d.default" for n in (2, 3) for kind in ("_adaptive_avg", "adaptive_avg", "adaptive_max")))
def _(d: Draw) -> Arguments:
    dims = _dims(d.op)
    x = d.tensor(_picture(d, dims), d.dtype(FLOATS), special="max" in d.op)
    return (x, [d.int(1, 9) for _ in range(dims)]), {}


_UPSAMPLES = ("nearest1d", "nearest2d", "bilinear2d", "bicubic2d")


@draws(*(f"upsample_{kind}.{form}" for kind in _UPSAMPLES for form in ("vec", "default")))
def _(d: Draw) -> Arguments:
    dims = _dims(d.op)
    x = d.tensor((d.int(1, 2), d.int(1, 3), *(d.int(1, 9) for _ in range(dims))), d.dtype(FLOATS), special=False)
    size: Any = [d.int(1, 20) for _ in range(dims)]
    corners = [] if "nearest" in d.op else [d.flag()]
    if d.op.endswith("default"):
        return (x, size, *corners, *(None for _ in range(dims))), {}
    factors = [d.one((2.0, 1.5, 0.5, 3.0)) for _ in range(dims)]
    by_size = d.flag() or any(int(s * f) < 1 for s, f in zip(x.shape[2:], factors, strict=True))
    return (x, size if by_size else None, *corners, None if by_size else factors), {}


@draws(*(f"{kind}_pad{dims}d.default" for kind in ("reflection", "replication") for dims in (1, 2)))
def _(d: Draw) -> Arguments:
    x = d.tensor(_picture(d, _dims(d.op), 3), d.dtype(FLOATS))
    return (x, [d.int(-1, 2) for _ in range(2 * _dims(d.op))]), {}


@draws("pixel_shuffle.default", "pixel_unshuffle.default")
def _(d: Draw) -> Arguments:
    r = d.int(1, 3)
    *lead, channels, height, width = (*d.shape(0, 2, smallest=1), d.int(1, 3), d.int(1, 5), d.int(1, 5))
    shape = (channels * r * r, height, width) if "unshuffle" not in d.op else (channels, height * r, width * r)
    return (d.tensor((*lead, *shape), d.dtype()), r), {}


# --- products ---------------------------------------------------------------------------------------------------------


def _sizes(d: Draw, count: int) -> list[int]:
    return [d.one((3, 1, 5, 8, 17, 2, 0, 64, 70)) for _ in range(count)]


def _factor(d: Draw, shape: Sequence[int], dtype: str) -> torch.Tensor:
    return (
        d.tensor(shape, dtype, -4, 4)
        if dtype in INTS and dtype != "uint8"
        else d.tensor(shape, dtype, *((0, 4) if dtype == "uint8" else ()), special=False, scale=1.0)
    )


@draws("mm.default", "bmm.default", "addmm.default", "baddbmm.default")
def _(d: Draw) -> Arguments:
    m, k, n = _sizes(d, 3)
    lead = (d.int(1, 3),) if "bmm" in d.op else ()
    dtype = d.dtype(("float32", "float16", "int64", "int32"))
    pair = _factor(d, (*lead, m, k), dtype), _factor(d, (*lead, k, n), dtype)
    if "add" not in d.op:
        return pair, {}
    return (_factor(d, d.like((*lead, m, n)), dtype), *pair), {"beta": d.one((1, 0, 2)), "alpha": d.one((1, 3))}


@draws("addmv.default", "mv.default", "dot.default")
def _(d: Draw) -> Arguments:
    m, k = _sizes(d, 2)
    dtype = d.dtype(("float32", "int64", "int32", "float16"))
    vector = _factor(d, (k,), dtype)
    if "dot" in d.op:
        return (_factor(d, (k,), dtype), vector), {}
    added = (_factor(d, (m,), dtype),) if "add" in d.op else ()
    return (*added, _factor(d, (m, k), dtype), vector), {}


@draws("matmul.default")
def _(d: Draw) -> Arguments:
    m, k, n = _sizes(d, 3)
    lead, dtype = d.shape(0, 2), d.dtype(FLOATS)
    left = (k,) if d.seldom() else (*d.like(lead), m, k)
    right = (k,) if d.seldom() else (*d.like(lead), k, n)
    return (_factor(d, left, dtype), _factor(d, right, dtype)), {}


@draws("linear.default")
def _(d: Draw) -> Arguments:
    m, k, n = _sizes(d, 3)
    dtype = d.dtype(FLOATS)
    x = _factor(d, (*d.shape(0, 2), m, k) if d.flag() else (k,), dtype)
    return (x, _factor(d, (n, k), dtype), None if d.seldom() else _factor(d, (n,), dtype)), {}


@draws("scaled_dot_product_attention.default")
def _(d: Draw) -> Arguments:
    batch, heads, dtype = d.int(1, 2), d.int(1, 4), d.dtype(FLOATS)
    queries, keys, size = d.one((5, 1, 7, 17)), d.one((5, 1, 9, 33)), d.one((8, 4, 16, 5))
    causal = d.seldom()
    mask = None
    if not causal and d.flag():
        shape = d.like((batch, heads, queries, keys))
        shape = (1,) * (4 - len(shape)) + shape
        mask = d.tensor(shape, d.one((dtype, "bool")), special=False)
        if mask.dtype == torch.bool:
            mask[..., 0] = True
    parts = (_factor(d, (batch, heads, n, size), dtype) for n in (queries, keys, keys))
    return (*parts, mask, 0.0, causal), {"scale": d.one((None, 0.5))}


# --- convolutions -----------------------------------------------------------------------------------------------------


@draws(
    *(f"conv{dims}d.{form}" for dims in (1, 2, 3) for form in ("default", "padding")),
    *("conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input", "convolution.default"),
)
def _(d: Draw) -> Arguments:
    dims = _dims(d.op) if "convolution" not in d.op else d.int(1, 3)
    transposed = "transpose" in d.op or ("convolution" in d.op and d.flag())
    groups, each_in, each_out, dtype = d.one((1, 2, 3)), d.int(1, 4), d.int(1, 4), d.dtype(FLOATS)
    kernel, size = [d.int(1, 4 if dims < 3 else 3) for _ in range(dims)], [d.int(7, 14) for _ in range(dims)]
    stride, dilation, padding = ([d.int(low, 3) for _ in range(dims)] for low in (1, 1, 0))
    extra = [d.int(0, max(stride[at], dilation[at]) - 1) for at in range(dims)] if transposed else [0] * dims
    batch = (d.int(1, 3),) if "convolution" in d.op or not d.seldom() else ()
    x = _factor(d, (*batch, groups * each_in, *size), dtype)
    sides = (groups * each_in, each_out) if transposed else (groups * each_out, each_in)
    weight, bias = _factor(d, (*sides, *kernel), dtype), None if d.seldom() else _factor(d, (groups * each_out,), dtype)
    if "convolution" in d.op:
        return (x, weight, bias, stride, padding, dilation, transposed, extra, groups), {}
    if transposed:
        return (x, weight, bias, stride, padding, extra, groups, dilation), {}
    if d.op.endswith("padding"):
        word = d.one(("valid", "same"))
        return (x, weight, bias, [1] * dims if word == "same" else stride, word, dilation, groups), {}
    return (x, weight, bias, stride, padding, dilation, groups), {}
