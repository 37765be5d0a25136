"""pytest tests/ops/test_join.py

cat, stack and pad move data: every comparison is exact.
"""

import numpy as np
import pytest
import torch
from harness import check_op, run_graph, run_op

from backend.graph import Graph, Node, Ref, TensorSpec
from backend.runtime.builder import lower_graph
from backend.runtime.capabilities import Capabilities

EXACT = {"atol": 0, "rtol": 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_cat_of_every_dtype_and_axis(dtype, axis):
    parts = []
    for size in (3, 1, 5):
        shape = [2, 3, 7]
        shape[axis] = size
        parts.append(torch.randint(0, 3, shape).to(dtype))
    check_op("aten.cat.default", parts, axis)


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 40])
@pytest.mark.parametrize("axis", [0, 1])
def test_cat_of_more_tensors_than_a_kernel_can_read(count, axis):
    shapes = [(3, i % 4, 2) if axis else (i % 4, 3, 2) for i in range(count)]
    check_op("aten.cat.default", [torch.randn(shape) for shape in shapes], axis, **EXACT)


def test_cat_of_many_columns():
    check_op("aten.cat.default", [torch.randn(5, 1, 3) for _ in range(41)], 1, **EXACT)


def test_d3_zero_length_tensors():
    x = torch.randn(1, 3, 8)
    check_op("aten.cat.default", [torch.zeros(1, 0, 8), x], 1)
    check_op("aten.cat.default", [torch.zeros(0), x], -1)
    check_op("aten.cat.default", [torch.zeros(0), torch.zeros(0)], 0)
    check_op("aten.cat.default", [torch.zeros(0, 4), torch.zeros(0, 3)], 1)
    check_op("aten.cat.default", [torch.zeros(0, dtype=torch.int64), x], 0)


def test_i2_cat_of_three_bools():
    check_op("aten.cat.default", [torch.rand(5) > 0.5 for _ in range(3)], 0)


def test_cat_promotes_mixed_dtypes():
    check_op("aten.cat.default", [torch.arange(3), torch.rand(2), torch.tensor([True])], 0)
    check_op("aten.cat.default", [torch.arange(3, dtype=torch.uint8), torch.arange(2)], 0)
    check_op("aten.cat.default", [torch.rand(2).half(), torch.rand(3)], 0)


def test_o7_negative_axis_at_rank_one():
    check_op("aten.cat.default", [torch.randn(3), torch.randn(4)], -1)


def test_stack():
    parts = [torch.randn(2, 5) for _ in range(3)]
    for axis in (0, 1, 2, -1):
        check_op("aten.stack.default", parts, axis, **EXACT)
    check_op("aten.stack.default", [torch.tensor(1.0), torch.tensor(2.0)])


@pytest.mark.parametrize(
    "pads", [[1, 2], [0, 0, 3, 1], [1, 0, 0, 2, 2, 3], [-1, 2], [2, -1, -1, 1], [-1, -1, 0, 0, -1, 0], [0, 0], [-7, 3]]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool])
def test_constant_pad(pads, dtype):
    check_op("aten.constant_pad_nd.default", torch.randint(0, 2, (3, 5, 7)).to(dtype), pads, 1)


def test_constant_pad_values():
    x = torch.randn(2, 3)
    for value in (0, -2.5, float("inf"), float("nan")):
        check_op("aten.constant_pad_nd.default", x, [1, 1], value)
    check_op("aten.constant_pad_nd.default", torch.zeros(2, 0), [1, 2], 3.0)
    check_op("aten.constant_pad_nd.default", torch.arange(3, dtype=torch.uint8), [1, 2], 255)
    check_op("aten.constant_pad_nd.default", torch.randn(1, 2, 1, 3, 1, 2), [1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 2, 0])
    check_op("aten.constant_pad_nd.default", torch.tensor([1.0]), [1, 0], 2)


def test_more_groups_than_one_row_holds():
    x = torch.arange(65536 * 128 + 5, dtype=torch.int32).reshape(1, -1)
    (y,) = run_op("aten.cat.default", [x, x + 1], 1)
    np.testing.assert_array_equal(y, torch.cat([x, x + 1], 1).numpy())


# --- in a graph -------------------------------------------------------------------------------------------------------


class Net:
    """A graph written node by node."""

    def __init__(self):
        self.graph = Graph()

    def input(self, dtype, *shape):
        index = self.graph.add_value(TensorSpec(dtype, shape))
        self.graph.inputs.append(index)
        return Ref(index)

    # Not `self`: operators have an argument of that name.
    def node(net, op, dtype, shape, **args):
        index = net.graph.add_value(TensorSpec(dtype, tuple(shape)))
        net.graph.nodes.append(Node(op, args, (index,)))
        return Ref(index)

    def run(self, out, *feeds):
        self.graph.outputs = [out.value]
        return run_graph(self.graph, [np.ascontiguousarray(feed.numpy()) for feed in feeds])[0]

    def dispatches(self, out):
        self.graph.outputs = [out.value]
        return len(lower_graph(self.graph, {}, Capabilities()).dispatches)


@pytest.mark.parametrize("axis", [0, 1])
def test_cat_of_strided_lazy_and_pending_parts(axis):
    net = Net()
    x = net.input("float32", 5, 5)
    turned = net.node("aten.permute_copy.default", "float32", (5, 5), self=x, dims=[1, 0])
    lazy = net.node("aten.exp.default", "float32", (5, 5), self=turned)
    padded = net.node("aten.constant_pad_nd.default", "float32", (5, 5), self=x, pad=[1, -1, -1, 1], value=2.0)
    pending = net.node("aten.neg.default", "float32", (5, 5), self=padded)
    shape = [5, 5]
    shape[axis] = 20
    joined = net.node("aten.cat.default", "float32", shape, tensors=[x, turned, lazy, pending], dim=axis)
    out = net.node("aten.mul.Tensor", "float32", shape, self=joined, other=2.0)
    feed = torch.randn(5, 5)
    pad = -torch.nn.functional.pad(feed, [1, -1, -1, 1], value=2.0)
    wanted = torch.cat([feed, feed.T, feed.T.exp(), pad], axis) * 2
    np.testing.assert_allclose(net.run(out, feed), wanted, rtol=1e-6)


def test_kernels_write_their_part_of_a_cat_directly():
    net = Net()
    x = net.input("float32", 2, 3)
    parts = [
        net.node("aten.constant_pad_nd.default", "float32", (2, 4), self=x, pad=[side, 1 - side], value=0)
        for side in (0, 1)
    ]
    out = net.node("aten.cat.default", "float32", (4, 4), tensors=parts, dim=0)
    assert net.dispatches(out) == 2
    feed = torch.randn(2, 3)
    wanted = torch.cat([torch.nn.functional.pad(feed, [side, 1 - side]) for side in (0, 1)])
    np.testing.assert_array_equal(net.run(out, feed), wanted)


def test_rotate_half_is_one_kernel():
    net = Net()
    x = net.input("float32", 3, 2, 8)
    low = net.node("aten.slice_copy.Tensor", "float32", (3, 2, 4), self=x, dim=2, start=0, end=4, step=1)
    high = net.node("aten.slice_copy.Tensor", "float32", (3, 2, 4), self=x, dim=2, start=4, end=8, step=1)
    minus = net.node("aten.neg.default", "float32", (3, 2, 4), self=high)
    turned = net.node("aten.cat.default", "float32", (3, 2, 8), tensors=[minus, low], dim=-1)
    out = net.node("aten.add.Tensor", "float32", (3, 2, 8), self=turned, other=x, alpha=1)
    assert net.dispatches(out) == 1
    feed = torch.randn(3, 2, 8)
    np.testing.assert_allclose(net.run(out, feed), torch.cat([-feed[..., 4:], feed[..., :4]], -1) + feed, rtol=1e-6)


def test_cat_of_one_tensor_twice():
    net = Net()
    x = net.input("float32", 2, 3)
    padded = net.node("aten.constant_pad_nd.default", "float32", (2, 4), self=x, pad=[1, 0], value=0)
    out = net.node("aten.cat.default", "float32", (4, 4), tensors=[padded, padded], dim=0)
    feed = torch.randn(2, 3)
    np.testing.assert_array_equal(net.run(out, feed), torch.nn.functional.pad(feed, [1, 0]).repeat(2, 1))
