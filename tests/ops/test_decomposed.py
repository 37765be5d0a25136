"""pytest tests/ops/test_decomposed.py: codes and back as the PT2E flow writes them, and products of bytes.

Golden: eager of the same operators, bit for bit: a code that differs by one would be an error of a whole step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.ao.quantization.fx._decomposed

from backend.graph import Graph, Node, Ref, TensorSpec
from backend.ops import registry
from tests.ops.harness import check_op, overload, refusal_of, run_graph, run_op

QUANTIZE = "quantized_decomposed.quantize_per_tensor.default"
DEQUANTIZE = "quantized_decomposed.dequantize_per_tensor.default"
PER_CHANNEL = "quantized_decomposed.dequantize_per_channel.default"
EPS = 2.0**-12  # what XNNPACK's quantizer asks for


def rounded(x: torch.Tensor) -> np.ndarray:
    ops = torch.ops.quantized_decomposed
    scale, zero = ops.choose_qparams.tensor(x, -128, 127, EPS, torch.int8)
    codes = ops.quantize_per_tensor.tensor(x, scale, zero, -128, 127, torch.int8)
    return ops.dequantize_per_tensor.tensor(codes, scale, zero, -128, 127, torch.int8).numpy()


def run_tensor(x: torch.Tensor) -> np.ndarray:
    graph = Graph()
    graph.inputs = [graph.add_value(TensorSpec("float32", tuple(x.shape)))]
    graph.outputs = [graph.add_value(TensorSpec("float32", tuple(x.shape)))]
    graph.nodes = [Node("zoo.round_tensor", {"input": Ref(graph.inputs[0]), "eps": EPS}, tuple(graph.outputs))]
    assert registry.refusal(graph.call(graph.nodes[0])) is None
    return run_graph(graph, [x.numpy()])[0]


def exactly(op: str, *args: Any, constants: tuple[str, ...] = ()) -> None:
    check_op(op, *args, golden=lambda: overload(op)(*args), constants=constants, atol=0.0, rtol=0.0)


@pytest.mark.parametrize("shape", ((), (1,), (3, 7), (2, 3, 257), (1, 1025), (70, 300)))
def test_rounded_tensors_are_eager_ones(shape):
    torch.manual_seed(0)
    for x in (torch.randn(shape), torch.rand(shape) * 1e-3 + 1, -torch.rand(shape) * 300, torch.randn(shape) * 1e-6):
        np.testing.assert_array_equal(run_tensor(x), rounded(x))


def test_rounded_tensors_of_nothing_and_of_nan():
    assert run_tensor(torch.zeros(2, 0)).shape == (2, 0)
    np.testing.assert_array_equal(run_tensor(torch.zeros(3, 4)), np.zeros((3, 4)))
    for bad in (float("nan"), float("inf")):
        x = torch.ones(5, 300)
        x[4, 299] = bad
        assert np.isnan(run_tensor(x)).all()


def test_ties_and_limits_of_codes():
    x = torch.tensor([-1e30, -64.25, -0.75, -0.25, 0.25, 0.75, 1.25, 63.75, 1e30])
    (codes,) = run_op(QUANTIZE, x, 0.5, 3, -127, 126, torch.int8)
    assert codes.tolist() == [-127, -125, 1, 3, 3, 5, 5, 126, 126]
    for dtype, low, high in ((torch.uint8, 0, 255), (torch.int16, -32768, 32767)):
        exactly(QUANTIZE, x, 0.0223, 7, low, high, dtype)


def test_codes_of_constants_and_of_channels():
    codes = torch.arange(-60, 60, dtype=torch.int8).reshape(3, 4, 10)
    exactly(DEQUANTIZE, codes, 0.0223, -5, -128, 127, torch.int8, constants=("input",))
    for axis in range(3):
        scales = torch.rand(codes.shape[axis]) + 0.1
        for zeros in (None, torch.arange(codes.shape[axis]), torch.rand(codes.shape[axis])):
            exactly(PER_CHANNEL, codes, scales, zeros, axis, -128, 127, torch.int8)


def test_refusals():
    x, codes = torch.zeros(3), torch.zeros(3, dtype=torch.int8)
    assert refusal_of(QUANTIZE, x.half(), 1.0, 0, -128, 127, torch.int8) == "no kernel for float16"
    assert refusal_of(QUANTIZE, x, 1.0, 0, -128, 127, torch.int32) == "no kernel for codes of int32"
    assert refusal_of(QUANTIZE, x, 1e-40, 0, -128, 127, torch.int8) == "the scale is not a positive number"
    half = {"out_dtype": torch.float16}
    assert refusal_of(DEQUANTIZE, codes, 1.0, 0, -128, 127, torch.int8, **half) == "no kernel for float16"
    wrong = refusal_of(PER_CHANNEL, codes, x.double(), None, 0, -128, 127, torch.int8)
    assert wrong == "no kernel for float64"


@pytest.mark.parametrize("sizes", ((1, 3, 5), (17, 64, 8), (4, 4096, 3), (33, 70, 65), (130, 96, 200), (2, 0, 3)))
def test_products_of_bytes_are_exact(sizes):
    rows, depth, cols = sizes
    generator = torch.Generator().manual_seed(rows)
    a = torch.randint(-128, 128, (rows, depth), generator=generator, dtype=torch.int8)
    w = torch.randint(-128, 128, (cols, depth), generator=generator, dtype=torch.int8)
    a[0], w[0] = -128, -128  # the largest sum
    for right in (w.t(), w.t().contiguous()):
        (got,) = run_op("aten._int_mm.default", a, right)
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, a.numpy().astype(np.int64) @ w.numpy().astype(np.int64).T)
