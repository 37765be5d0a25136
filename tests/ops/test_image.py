"""pytest tests/ops/test_image.py"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness import EXACT, check_op, overload, refusal_of, run_graph, run_op

from backend.blob import to_blob
from backend.expr import Expr
from backend.graph import Graph, Node, Ref, ShapeError, TensorSpec
from backend.ops import registry
from backend.runtime.capabilities import capabilities
from backend.runtime.delegate import Delegate
from backend.runtime.device import get_device
from backend.runtime.errors import DeviceError

FLOATS = [torch.float32, torch.float16]
CUBIC = 2e-6  # sums of 16 products; weights add up to 1.5 in size on each axis
INF, NAN = float("inf"), float("nan")


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def check_copies(name: str, *args):
    """Against eager in the same dtype: elements are copied, and float64 would round the coordinates elsewhere."""
    return check_op(name, *args, golden=lambda: overload(name)(*args), **EXACT)


# --- resizing ---------------------------------------------------------------------------------------------------------


def test_o9_nearest_takes_the_floor():
    (result,) = check_copies("aten.upsample_nearest1d.vec", torch.arange(5.0).reshape(1, 1, 5), [8], None)
    np.testing.assert_array_equal(result.ravel(), [i * 5 // 8 for i in range(8)])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [(1, 1), (7, 11), (14, 22), (3, 5), (10, 31), (29, 8)])
def test_nearest_sizes(size, dtype):
    check_copies("aten.upsample_nearest2d.vec", rand(2, 3, 7, 11, dtype=dtype), list(size), None)
    check_copies("aten.upsample_nearest2d.default", rand(1, 3, 7, 11, dtype=dtype), list(size))


def test_nearest_every_ratio():
    """Each ratio of small sizes, where a rounding of the scale would show."""
    graph = Graph(symbols={"s": (1, None), "t": (1, None)}, inputs=[0, 1], outputs=[2])
    graph.values = [TensorSpec("float32", (1, 1, Expr("s"))), TensorSpec("float32", (Expr("t"),))]
    graph.values.append(TensorSpec("float32", (1, 1, Expr("t"))))
    args = {"input": Ref(0), "output_size": [Expr("t")], "scale_factors": None}
    graph.nodes = [Node("aten.upsample_nearest1d.vec", args, (2,))]
    delegate = Delegate(to_blob(graph), {}.__getitem__)
    for size in (1, 3, 5, 7, 29):
        for out in (1, 2, 3, 5, 6, 7, 10, 14, 41, 58, 87):
            x = torch.arange(float(size)).reshape(1, 1, -1)
            wanted = torch.nn.functional.interpolate(x, size=(out,))
            np.testing.assert_array_equal(delegate.execute([x.numpy(), np.zeros(out, np.float32)])[0], wanted.numpy())
    delegate.close()


@pytest.mark.parametrize("factors", [[2.0, 2.0], [1.5, 0.7], [2.3, 3.9], [0.34, 1.0]])
def test_given_factors_decide(factors):
    """The step is the factor's inverse, not the ratio of the rounded sizes."""
    x = rand(1, 2, 13, 17)
    check_copies("aten.upsample_nearest2d.vec", x, None, factors)
    for align in (False, True):
        check_op("aten.upsample_bilinear2d.vec", x, None, align, factors)
        check_op("aten.upsample_bicubic2d.vec", x, None, align, factors, atol=CUBIC)
    check_copies("aten.upsample_nearest1d.vec", x[0], None, factors[:1])
    check_copies("aten.upsample_nearest1d.default", x[0], [int(17 * factors[1])], factors[1])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (7, 11), (14, 22), (3, 5), (1, 31), (29, 8)])
def test_bilinear(size, align, dtype):
    check_op("aten.upsample_bilinear2d.vec", rand(2, 3, 7, 11, dtype=dtype), list(size), align, None)
    check_op("aten.upsample_bilinear2d.default", rand(1, 2, 1, 11, dtype=dtype), list(size), align)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (7, 11), (14, 22), (3, 5), (1, 31), (29, 8)])
def test_bicubic(size, align, dtype):
    atol = CUBIC if dtype == torch.float32 else 1e-3
    check_op("aten.upsample_bicubic2d.vec", rand(2, 3, 7, 11, dtype=dtype), list(size), align, None, atol=atol)
    check_op("aten.upsample_bicubic2d.default", rand(1, 2, 1, 11, dtype=dtype), list(size), align, atol=atol)


def test_bicubic_coefficients_and_border():
    """An impulse shows the weights of A = -0.75, a border the repetition of its last element."""
    x = torch.zeros(1, 1, 1, 8)
    x[..., 3] = 1
    (result,) = run_op("aten.upsample_bicubic2d.vec", x, [1, 16], False, None)
    near, far = (1.25 * 0.25 - 2.25) * 0.25**2 + 1, ((-0.75 * 1.25 + 3.75) * 1.25 - 6) * 1.25 + 3
    np.testing.assert_allclose(result[0, 0, 0, 6:10], [near, near, result[0, 0, 0, 8], far], atol=1e-6)
    (result,) = run_op("aten.upsample_bicubic2d.vec", torch.full((1, 1, 3, 3), 2.5), [7, 5], False, None)
    np.testing.assert_allclose(result, np.full((1, 1, 7, 5), 2.5), atol=1e-5)  # 16 products


@pytest.mark.parametrize("align", [False, True])
def test_places_are_exact_however_far_from_the_first(align):
    """Float32 coordinates would be off by thousandths; eager's own floor is float32's even in float64."""
    line = torch.zeros(1, 1, 1, 12001)
    line[..., 1::2] = 1
    size = 17003
    (result,) = run_op("aten.upsample_bilinear2d.vec", line, [1, size], align, None)
    o = np.arange(size)
    places = o * (12000 / (size - 1)) if align else (o + 0.5) * (12001 / size) - 0.5
    np.testing.assert_allclose(result.ravel(), np.interp(places, np.arange(12001), line.ravel()), atol=1e-6)
    check_op("aten.upsample_bicubic2d.vec", line, [1, size], align, None, atol=CUBIC)
    check_op("aten.upsample_bicubic2d.vec", line, None, align, [1.0, 2.3], atol=CUBIC)


def test_bicubic_of_large_values_that_cancel():
    """Draws that failed: results near zero of elements near 10, so that errors of places and weights show."""
    x = 10 * torch.randn(1, 1, 2, 7, generator=torch.Generator().manual_seed(1))
    check_op("aten.upsample_bicubic2d.vec", x, None, True, [2.0, 2.0], atol=5e-7 * float(x.abs().max()))
    x = 10 * torch.randn(1, 2, 5, 7, generator=torch.Generator().manual_seed(245))
    check_op("aten.upsample_bicubic2d.default", x, [1, 5], False, atol=5e-7 * float(x.abs().max()))


def test_places_too_far_for_integers_are_an_error():
    with pytest.raises(ShapeError, match="beyond 2"):
        run_op("aten.upsample_bilinear2d.default", torch.zeros(1, 1, 1, 9), [1, 20000], False, 1.0, 1e-5)
    assert "inf" in refusal_of("aten.upsample_bilinear2d.default", torch.zeros(1, 1, 2, 9), [1, 20], False, 1.0, INF)


def test_a_factor_from_the_shape_is_refused():
    graph = Graph(values=[TensorSpec("float32", (1, 1, Expr("s")))], symbols={"s": (1, None)})
    graph.values.append(TensorSpec("float32", (1, 1, 8)))
    args = {"self": Ref(0), "output_size": [8], "scales": Expr("s")}
    graph.nodes = [Node("aten.upsample_nearest1d.default", args, (1,))]
    assert "depends on the shape" in registry.refusal(graph.call(graph.nodes[0]))


# --- pixel shuffle ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_pixel_shuffle(dtype):
    for factor, shape in ((2, (2, 8, 3, 5)), (3, (9, 1, 7)), (1, (1, 2, 3, 4)), (2, (2, 1, 4, 2, 3))):
        x = torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
        (result,) = check_op("aten.pixel_shuffle.default", x, factor)
        (back,) = check_op("aten.pixel_unshuffle.default", torch.from_numpy(result), factor)
        np.testing.assert_array_equal(back, x.numpy())


# --- pooling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [
        ([2, 2], [], [0, 0], [1, 1]),
        ([3, 3], [2, 2], [1, 1], [1, 1]),
        ([3, 2], [1, 3], [1, 0], [2, 3]),
        ([5], [2], [2], [1]),
        ([1, 7], [4, 1], [0, 3], [1, 1]),
        ([3, 3], [2, 2], [1, 1], [3, 3]),
    ],
)
def test_max_pool(kernel, stride, padding, dilation, ceil_mode, dtype):
    # Few distinct values, so that ties decide where the maximum is.
    x = rand(2, 3, 11, 13, dtype=dtype).mul(2).round()
    check_op("aten.max_pool2d_with_indices.default", x, kernel, stride, padding, dilation, ceil_mode)
    check_op("aten.max_pool2d_with_indices.default", x[0], kernel, stride, padding, dilation, ceil_mode)


def test_max_pool_of_specials():
    x = torch.full((1, 1, 5, 6), -INF)
    check_op("aten.max_pool2d_with_indices.default", x, [3, 3], [2, 2], [1, 1])
    check_op("aten.max_pool2d_with_indices.default", torch.full((1, 1, 5, 6), -200.0), [3, 3], [2, 2], [1, 1])
    x[0, 0, 1, 2], x[0, 0, 2, 2], x[0, 0, 2, 3], x[0, 0, 4, 4] = NAN, INF, NAN, 3.0
    check_op("aten.max_pool2d_with_indices.default", x, [3, 3], [1, 1], [1, 1])


def test_max_pool_values_only_carry_a_tail():
    graph = Graph(values=[TensorSpec("float32", s) for s in ((1, 2, 6, 6), (1, 2, 3, 3), (1, 2, 3, 3))], inputs=[0])
    graph.nodes = [
        Node("aten.max_pool2d_with_indices.default", {"self": Ref(0), "kernel_size": [2, 2]}, (1, None)),
        Node("aten.neg.default", {"self": Ref(1)}, (2,)),
    ]
    graph.outputs = [2]
    x = rand(1, 2, 6, 6)
    np.testing.assert_array_equal(run_graph(graph, [x.numpy()])[0], -torch.max_pool2d(x, 2).numpy())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("count_pad", [False, True])
@pytest.mark.parametrize("divisor", [None, 5, -2])
def test_avg_pool(divisor, count_pad, ceil_mode, dtype):
    x = rand(2, 3, 11, 13, dtype=dtype)
    for kernel, stride, padding in (
        ([2, 2], [], [0, 0]),
        ([3, 3], [2, 2], [1, 1]),
        ([4, 1], [3, 2], [2, 0]),
        ([5], [4], [1]),
    ):
        check_op("aten.avg_pool2d.default", x, kernel, stride, padding, ceil_mode, count_pad, divisor)


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (12, 10), (7, 4), (13, 21)])
def test_adaptive_avg_pool(size):
    check_op("aten._adaptive_avg_pool2d.default", rand(2, 3, 12, 10), list(size))
    check_op("aten._adaptive_avg_pool2d.default", rand(3, 12, 10, dtype=torch.float16), list(size))


# --- borders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", ["reflection", "replication"])
def test_borders(kind, dtype):
    x = rand(2, 3, 5, 7, dtype=dtype)
    for pads in ([1, 2, 3, 4], [0, 0, 0, 0], [6, 6, 4, 4], [-2, 3, 1, -1]):
        check_copies(f"aten.{kind}_pad2d.default", x, pads)
        check_copies(f"aten.{kind}_pad2d.default", x[0], pads)
        check_copies(f"aten.{kind}_pad1d.default", x[0], pads[:2])
        check_copies(f"aten.{kind}_pad1d.default", x[0, 0:1], pads[:2])
    if kind == "replication":
        check_copies("aten.replication_pad1d.default", x[0, :, :1, :1].reshape(1, 3, 1), [9, 4])


# --- all of them ------------------------------------------------------------------------------------------------------


def test_empty_batch():
    x = torch.zeros(0, 3, 4, 6)
    check_op("aten.upsample_nearest2d.vec", x, [8, 9], None)
    check_op("aten.upsample_bilinear2d.vec", x, [8, 9], True, None)
    check_op("aten.upsample_bicubic2d.vec", x, [8, 9], False, None)
    check_op("aten.max_pool2d_with_indices.default", x, [2, 2])
    check_op("aten.avg_pool2d.default", x, [2, 2])
    check_op("aten.pixel_shuffle.default", x.reshape(0, 4, 3, 6), 2)
    check_op("aten.pixel_unshuffle.default", x, 2)
    check_op("aten.reflection_pad2d.default", x, [1, 1, 1, 1])


def test_strided_input_and_tail():
    """A transposed slice with work in front and behind."""
    shapes = [(1, 7, 9, 4), (1, 4, 7, 9), (1, 4, 7, 8), (1, 4, 7, 8), (1, 4, 14, 16), (1, 4, 14, 16)]
    graph = Graph(values=[TensorSpec("float32", shape) for shape in shapes], inputs=[0], outputs=[5])
    graph.nodes = [
        Node("aten.permute_copy.default", {"self": Ref(0), "dims": [0, 3, 1, 2]}, (1,)),
        Node("aten.slice_copy.Tensor", {"self": Ref(1), "dim": 3, "start": 1, "end": 9, "step": 1}, (2,)),
        Node("aten.relu.default", {"self": Ref(2)}, (3,)),
        Node("aten.upsample_nearest2d.vec", {"input": Ref(3), "output_size": [14, 16], "scale_factors": None}, (4,)),
        Node("aten.neg.default", {"self": Ref(4)}, (5,)),
    ]
    x = rand(*shapes[0])
    wanted = -torch.nn.functional.interpolate(torch.relu(x.permute(0, 3, 1, 2)[..., 1:]), size=(14, 16))
    np.testing.assert_array_equal(run_graph(graph, [x.numpy()])[0], wanted.numpy())


def test_r2_more_groups_than_a_dimension_holds():
    x = torch.arange(2049.0 * 513).reshape(1, 1, 2049, 513)
    (result,) = run_op("aten.upsample_nearest2d.vec", x, [4098, 1026], None)
    wanted = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
    np.testing.assert_array_equal(result, wanted.numpy())


def test_refusals():
    whole = torch.ones(1, 1, 4, 4, dtype=torch.int64)
    assert "int64" in refusal_of("aten.max_pool2d_with_indices.default", whole, [2, 2])
    assert "uint8" in refusal_of("aten.upsample_nearest2d.vec", whole.to(torch.uint8), [8, 8], None)


@pytest.mark.parametrize(
    "op, arguments", [("aten.avg_pool2d.default", ([300, 300],)), ("aten._adaptive_avg_pool2d.default", ([1, 1],))]
)
def test_a_window_of_a_whole_large_picture(op, arguments):
    """Right, or refused by a device that would end its loop early: never something in between."""
    try:
        check_op(op, rand(1, 2, 300, 300), *arguments, atol=1e-4)  # 90000 numbers in a row
    except DeviceError as error:
        assert capabilities(get_device()).most_iterations is not None and "pooling windows of" in str(error)
