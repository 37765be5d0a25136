"""pytest tests/ops/test_create.py

Counters and constants are exact; fractional counters are held to one rounding of start + step × i.
"""

import math

import numpy as np
import pytest
import torch
from harness import check_op, refusal_of, run_graph

from backend.blob import to_blob
from backend.expr import Expr
from backend.graph import Graph, Node, Ref, TensorSpec
from backend.runtime.delegate import Delegate


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32, torch.float16])
def test_arange(dtype):
    check_op("aten.arange.default", 7, dtype=dtype)
    check_op("aten.arange.start", 3, 11, dtype=dtype)
    check_op("aten.arange.start_step", 30, 3, -4, dtype=dtype)
    check_op("aten.arange.start_step", 5, 5, dtype=dtype)


def test_arange_of_fractions():
    check_op("aten.arange.start_step", 1.0, 3.0, 0.1)
    check_op("aten.arange.start_step", -0.5, 9)
    check_op("aten.arange.start_step", 0, 100003, 1.0)
    assert "fractional" in refusal_of("aten.arange.start_step", 0.5, 3, dtype=torch.int64)
    assert "32 bits" in refusal_of("aten.arange.start_step", 2**31, 2**31 + 3)


def test_linspace():
    check_op("aten.linspace.default", -1.0, 3.0, 37)
    check_op("aten.linspace.default", 2.0, 3.0, 1)
    check_op("aten.linspace.default", 0, 1, 0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float16])
def test_constants(dtype):
    for shape in ([2, 3], [], [0], [1, 5, 1]):
        check_op("aten.full.default", shape, 1, dtype=dtype)
        check_op("aten.zeros.default", shape, dtype=dtype)
        check_op("aten.ones.default", shape, dtype=dtype)
    x = torch.ones(3, 2, dtype=dtype)
    check_op("aten.full_like.default", x, 0)
    check_op("aten.zeros_like.default", x)
    check_op("aten.ones_like.default", x)
    check_op("aten.fill.Scalar", x, 1)
    check_op("aten.fill.Tensor", x, torch.tensor(1))
    check_op("aten.new_full.default", x, [4], 1)
    check_op("aten.scalar_tensor.default", 1, dtype=dtype)


def test_constants_that_are_not_finite():
    for value in (math.inf, -math.inf, math.nan, -3.4028234663852886e38):
        check_op("aten.full.default", [5], value)
        check_op("aten.scalar_tensor.default", value)
    check_op("aten.full_like.default", torch.zeros(3).half(), -math.inf)
    assert "32 bits" in refusal_of("aten.full.default", [2], 2**40)


def test_eye_and_triangles():
    check_op("aten.eye.default", 5)
    check_op("aten.eye.m", 3, 5, dtype=torch.int64)
    for x in (torch.randn(2, 5, 7), torch.ones(3, 3, dtype=torch.bool), torch.arange(6).reshape(3, 2)):
        for diagonal in (-1, 0, 2, 9):
            check_op("aten.tril.default", x, diagonal)
            check_op("aten.triu.default", x, diagonal)
    check_op("aten.triu.default", torch.full((3, 3), -math.inf), 1)


def test_sizes_and_bounds_may_be_symbolic():
    """arange(n, 2n) × full([n], n), for several n in one delegate."""
    n = Expr("n")
    graph = Graph(symbols={"n": (0, 64)})
    x = graph.add_value(TensorSpec("float32", (n,)))
    graph.inputs = [x]
    counter, number, product = (graph.add_value(TensorSpec("int64", (n,))) for _ in range(3))
    arange = {"start": n, "end": Expr("*", (2, n)), "step": 1, "dtype": "int64"}
    graph.nodes = [
        Node("aten.arange.start_step", arange, (counter,)),
        Node("aten.full.default", {"size": [n], "fill_value": n, "dtype": "int64"}, (number,)),
        Node("aten.mul.Tensor", {"self": Ref(counter), "other": Ref(number)}, (product,)),
    ]
    graph.outputs = [product]
    delegate = Delegate(to_blob(graph), {}.__getitem__)
    for size in (5, 64, 1, 0, 5):
        (y,) = delegate.execute([np.zeros(size, np.float32)])
        np.testing.assert_array_equal(y, np.arange(size, 2 * size) * size)


def test_a_causal_mask():
    """where(column <= row, 0, -inf) from two counters: one kernel, no input."""
    graph = Graph()
    counter = graph.add_value(TensorSpec("int64", (5,)))
    column = graph.add_value(TensorSpec("int64", (5, 1)))
    below = graph.add_value(TensorSpec("bool", (5, 5)))
    mask = graph.add_value(TensorSpec("float32", (5, 5)))
    graph.nodes = [
        Node("aten.arange.start_step", {"start": 0, "end": 5, "step": 1, "dtype": "int64"}, (counter,)),
        Node("aten.unsqueeze_copy.default", {"self": Ref(counter), "dim": 1}, (column,)),
        Node("aten.le.Tensor", {"self": Ref(counter), "other": Ref(column)}, (below,)),
        Node("aten.where.Scalar", {"condition": Ref(below), "self": 0.0, "other": -math.inf}, (mask,)),
    ]
    graph.outputs = [mask]
    (y,) = run_graph(graph, [])
    np.testing.assert_array_equal(y, np.triu(np.full((5, 5), -np.inf), 1))
