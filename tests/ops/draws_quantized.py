"""Strategies for the operators of the PT2E flow, and for products of bytes."""

from __future__ import annotations

import torch
import torch.ao.quantization.fx._decomposed

from tests.ops.draw import Arguments, Draw, draws

RANGES = {"int8": (-128, 127), "uint8": (0, 255), "int16": (-(2**15), 2**15 - 1)}
SCALES = (0.5, 0.0223, 1.0, 3e-4, 17.0)


@draws("quantized_decomposed.quantize_per_tensor.default")
def _(d: Draw) -> Arguments:
    dtype = d.one(tuple(RANGES))
    low, high = RANGES[dtype]
    x = d.tensor(d.shape(), d.dtype(("float32", "float32", "float16")), special=False)
    return (x, d.one(SCALES), d.int(low, high), low + d.int(0, 1), high - d.int(0, 2), getattr(torch, dtype)), {}


@draws("quantized_decomposed.dequantize_per_tensor.default")
def _(d: Draw) -> Arguments:
    dtype = d.one((*RANGES, "int32"))
    low, high = RANGES.get(dtype, (-(2**31), 2**31 - 1))
    codes = d.tensor(d.shape(), dtype)
    out = {"out_dtype": d.one((torch.float32, torch.float16))} if d.seldom() else {}
    return (codes, d.one(SCALES), d.int(-200, 200), low, high, codes.dtype), out


@draws("quantized_decomposed.dequantize_per_channel.default")
def _(d: Draw) -> Arguments:
    dtype = d.one(tuple(RANGES))
    codes = d.tensor(d.shape(1), dtype)
    axis = d.int(0, codes.dim() - 1)
    count = codes.shape[axis]
    kind = d.one(("int64", "int32", "float32", ""))
    zeros = d.tensor((count,), kind, special=False) if kind else None
    return (codes, d.tensor((count,), special=False), zeros, axis, *RANGES[dtype], codes.dtype), {}


@draws("_int_mm.default")
def _(d: Draw) -> Arguments:
    m, k, n = (d.one((17, 3, 1, 5, 8, 32, 64, 70)) for _ in range(3))
    return (d.tensor((m, k), "int8", -128, 127), d.tensor((k, n), "int8", -128, 127)), {}
