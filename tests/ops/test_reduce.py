"""pytest tests/ops/test_reduce.py

Sums are compared with an absolute tolerance that grows with the square root of their length (`summed`): that is how
roundings of float32 (eps 1.2e-7) add up. Integers, indices and extremes are exact.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from harness import F32, assert_close, check_op, refusal_of, run_graph, run_op

from backend.blob import to_blob
from backend.expr import symbol
from backend.graph import Graph, Node, Ref, ShapeError, TensorSpec
from backend.ops import registry
from backend.runtime.delegate import Delegate

INF, NAN = math.inf, math.nan
AXES = [[0], [1], [2], [-1], [0, 1], [1, 2], [0, 2], [-1, -3], [0, 1, 2], [], None]


def summed(length):
    return {"atol": 2e-7 * math.sqrt(length) + 1e-6, "rtol": 1e-5}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# --- sums -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keepdim", [False, True])
def test_axes(keepdim):
    x = torch.randn(3, 5, 7)
    for axes in AXES:
        check_op("aten.sum.dim_IntList", x, axes, keepdim, **summed(105))
        check_op("aten.mean.dim", x, axes, keepdim, **summed(105))
        check_op("aten.amax.default", x, axes or [], keepdim)
        check_op("aten.any.dims", x > 1, axes, keepdim)
        check_op("aten.all.dims", x < 1, axes, keepdim)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (1, 1, 1), (5, 1, 11), (2, 3, 5, 7, 2)])
def test_whole(shape):
    x = torch.randn(shape)
    for name in ("sum", "mean", "prod", "max", "min", "argmax", "argmin", "any", "all"):
        check_op(f"aten.{name}.default", x, **({} if "arg" in name or name in ("max", "min") else summed(x.numel())))


@pytest.mark.parametrize(
    "shape,axis",
    [((3, 5), 1), ((3, 37), 1), ((3, 500), 1), ((3, 5003), 1), ((5, 37, 3), 1), ((2, 113, 3), 1), ((2, 3001, 3), 1)],
)
def test_every_geometry(shape, axis):
    x = torch.randn(shape)
    check_op("aten.sum.dim_IntList", x, [axis], **summed(shape[axis]))
    check_op("aten.amin.default", x, [axis])
    check_op("aten.max.dim", x, axis)
    check_op("aten.argmin.default", x, axis)
    check_op("aten.var.correction", x, [axis])
    check_op("aten.cumsum.default", x, axis, **summed(10 * shape[axis]))


@pytest.mark.parametrize(
    "shape,axes", [((100003,), [0]), ((3, 20011, 2), [1]), ((70, 300, 2), [0, 1]), ((9000, 5), [0])]
)
def test_long_rows_are_cut_into_chunks(shape, axes):
    x = torch.randn(shape)
    check_op("aten.sum.dim_IntList", x, axes, **summed(100003))
    check_op("aten.mean.dim", x.half(), axes)
    check_op("aten.amax.default", -x.abs(), axes)
    if len(axes) == 1:
        check_op("aten.argmax.default", (x * 4).int(), axes[0])
        check_op("aten.argmin.default", x.half(), axes[0])
        check_op("aten.max.dim", x, axes[0])
    check_op("aten.amin.default", (x * 1000).int(), axes)
    check_op("aten.all.dims", x > -9, axes)
    check_op("aten.sum.dim_IntList", (x * 1000).long(), axes)


def test_r2_more_rows_than_workgroups_in_one_dimension():
    x = torch.arange(70001 * 3).reshape(70001, 3)
    check_op("aten.sum.dim_IntList", x, [1])
    x = torch.randn(70001, 70)
    check_op("aten.amax.default", x, [1])
    check_op("aten.argmax.default", x[:, :20].contiguous(), 1)
    check_op("aten.sum.dim_IntList", x.T.contiguous(), [0], **summed(70))


def test_sum_dtypes():
    x = torch.randint(-100, 100, (5, 37))
    for dtype in (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool):
        check_op("aten.sum.dim_IntList", x.to(dtype), [1])
        check_op("aten.sum.default", x.to(dtype))
    check_op("aten.sum.dim_IntList", x.to(torch.int32), [1], dtype=torch.int8)
    check_op("aten.sum.dim_IntList", x, [0], dtype=torch.float32)
    check_op("aten.mean.dim", x, [0], dtype=torch.float32)
    check_op("aten.sum.dim_IntList", x.float() + 0.5, [1], dtype=torch.int64)
    check_op("aten.prod.dim_int", torch.randint(-3, 4, (5, 7)), 1)
    check_op("aten.prod.dim_int", torch.randn(5, 7), 0)
    assert "bool" in refusal_of("aten.sum.default", x, dtype=torch.bool)


def test_f16_accumulates_in_f32():
    x = torch.full((1, 3000), 30.0, dtype=torch.float16)
    check_op("aten.sum.dim_IntList", x * 0.5, [1])  # 45000; in f16 it would stall at 32768
    check_op("aten.mean.dim", x * 1000, [1])  # the sum overflows f16, the mean does not
    check_op("aten.sum.dim_IntList", torch.ones(1, 5000).half(), [1], dtype=torch.float32)


def test_d3_zero_sized_axes():
    check_op("aten.sum.dim_IntList", torch.zeros(0, 4), [0])
    check_op("aten.sum.dim_IntList", torch.zeros(0, 4), [1])
    check_op("aten.sum.default", torch.zeros(3, 0, dtype=torch.int64))
    check_op("aten.mean.dim", torch.zeros(0, 4), [0])
    check_op("aten.prod.dim_int", torch.zeros(0, 4), 0)
    check_op("aten.any.dim", torch.zeros(0, 4), 0)
    check_op("aten.all.dim", torch.zeros(0, 4), 0)
    check_op("aten.var_mean.correction", torch.zeros(0, 4), [0])
    check_op("aten.linalg_vector_norm.default", torch.zeros(0, 4), 2, [0])
    check_op("aten.cumsum.default", torch.zeros(0, 4), 0)
    check_op("aten.cumsum.default", torch.zeros(0, 4), 1)
    check_op("aten.amax.default", torch.zeros(0, 4), [1])
    check_op("aten.argmax.default", torch.zeros(0, 4), 1)
    check_op("aten.max.dim", torch.zeros(0, 4), 1)
    spec = Graph([TensorSpec("float32", (0, 4)), TensorSpec("float32", (4,))], [0])
    node = Node("aten.amax.default", {"self": Ref(0), "dim": [0], "keepdim": False}, (1,))
    assert "empty" in registry.refusal(spec.call(node))


def test_d3_a_dynamic_axis_that_turns_out_empty():
    graph = Graph([TensorSpec("float32", (symbol("s"), 4)), TensorSpec("float32", (4,))], [0], [1])
    graph.symbols = {"s": (0, None)}
    for op, golden in (("sum", 0), ("amax", None)):
        name = "aten.sum.dim_IntList" if op == "sum" else "aten.amax.default"
        graph.nodes = [Node(name, {"self": Ref(0), "dim": [0], "keepdim": False}, (1,))]
        delegate = Delegate(to_blob(graph), {}.__getitem__)
        for size in (3, 0, 700):
            x = np.random.default_rng(size).normal(size=(size, 4)).astype(np.float32)
            if size == 0 and golden is None:
                with pytest.raises(ShapeError, match="empty"):
                    delegate.execute([x])
                continue
            (result,) = delegate.execute([x])
            assert_close(result, (x.astype(np.float64).sum(0) if op == "sum" else x.max(0)), **summed(700))
        delegate.close()


# --- extremes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [*range(1, 18), 31, 33, 257])
def test_n1_maximum_of_negative_rows(length):
    x = torch.full((2, length), -200.0)
    assert (run_op("aten.amax.default", x, [1])[0] == -200).all()
    assert (run_op("aten.amin.default", -x, [1])[0] == 200).all()
    assert (run_op("aten.amax.default", x.int(), [1])[0] == -200).all()
    assert (run_op("aten.prod.default", x / -200)[0]) == 1


def test_extremes_of_infinities_nan_and_integers():
    x = torch.tensor([[INF, -INF, 0], [-INF, -INF, -INF], [1, NAN, 2], [-0.0, 0.0, -1], [3e38, -3e38, 1e-45]])
    for name in ("aten.amax.default", "aten.amin.default"):
        check_op(name, x, [1])
        check_op(name, x.half(), [1])
        check_op(name, torch.tensor([[2**31 - 1, -(2**31)], [-5, -7]]), [1])
        check_op(name, x > 0, [1])
        check_op(name, torch.tensor([[200, 3], [7, 9]], dtype=torch.uint8), [0])
    for name in ("aten.max.dim", "aten.min.dim"):
        check_op(name, x, 1)
        check_op(name, x.half(), 1, True)
        check_op(name, x > 0, 1)
        check_op(name, torch.tensor([[2**31 - 1, -(2**31)], [-5, -5]]), 1)


def test_n10_infinity_is_no_sentinel():
    assert run_op("aten.argmax.default", torch.tensor([1.0, 3, 3, 2]))[0] == 1
    assert run_op("aten.argmax.default", torch.tensor([2, NAN, 7]))[0] == 1
    assert run_op("aten.argmin.default", torch.tensor([2, NAN, NAN, -INF]))[0] == 1
    assert run_op("aten.argmax.default", torch.full((3, 300), -INF), 1)[0].tolist() == [0, 0, 0]
    assert run_op("aten.argmin.default", torch.full((3, 300), INF), 1)[0].tolist() == [0, 0, 0]
    found, where = run_op("aten.topk.default", torch.tensor([-INF, 1, -INF, INF]), 2)
    assert found.tolist() == [INF, 1] and where.tolist() == [3, 1]


def test_argmax_takes_the_first_of_equal_elements():
    x = torch.randint(0, 3, (7, 700))
    for name, axis, keepdim in itertools.product(("argmax", "argmin"), (None, 0, 1), (False, True)):
        check_op(f"aten.{name}.default", x, axis, keepdim)
        check_op(f"aten.{name}.default", x.half(), axis, keepdim)


def test_any_and_all():
    x = torch.tensor([[0.0, NAN, 0], [0, 0, 0], [1, -1, INF]])
    for name in ("any", "all"):
        for item in (x, x.half(), x > 0, torch.tensor([[0, 256, -1], [0, 0, 0]]), torch.tensor([[0, 2]]).byte()):
            check_op(f"aten.{name}.dim", item, 1)
            check_op(f"aten.{name}.default", item)
            check_op(f"aten.{name}.dims", item, [])


# --- variance, norms, running sums ------------------------------------------------------------------------------------


@pytest.mark.parametrize("correction", [None, 0, 1, 2.5, 30])
def test_variance(correction):
    x = torch.randn(3, 5, 7)
    for axes in ([1], [0, 2], None):
        check_op("aten.var.correction", x, axes, correction=correction)
        check_op("aten.std.correction", x, axes, correction=correction, keepdim=True)
        check_op("aten.var_mean.correction", x, axes, correction=correction)
    check_op("aten.std.correction", x.half(), [0], correction=correction)


def test_variance_of_one_element_constants_and_other_overloads():
    check_op("aten.var.correction", torch.randn(3, 1), [1])
    check_op("aten.var.correction", torch.full((3, 900), 0.1), [1], atol=1e-12)
    check_op("aten.var.dim", torch.randn(3, 5), [1], False)
    check_op("aten.std.dim", torch.randn(3, 5), [1])
    check_op("aten.var.default", torch.randn(3, 5))
    check_op("aten.std.default", torch.randn(3, 5), False)
    check_op("aten.std_mean.correction", torch.randn(3, 5), [0])


def test_mean_beside_the_variance_of_a_row_with_an_infinity():
    """The mean of a sum, wherever the infinity stands; eager has NaN for some places."""
    x = torch.tensor([[-0.0, -0.5, INF], [INF, -0.5, 1], [-INF, 0, 2], [INF, -INF, 0], [NAN, INF, 0], [1, 2, 6]])
    for name in ("aten.std_mean.correction", "aten.var_mean.correction"):
        for rows, axis in ((x, 1), (x.t().contiguous(), 0), (x.half(), 1)):
            spread, mean = run_op(name, rows, [axis])
            assert np.isnan(spread[:5]).all() and np.isfinite(spread[5])
            np.testing.assert_array_equal(mean, [INF, INF, -INF, NAN, NAN, 3])


def test_whole_numbers_that_are_added_as_halves_are_rounded_first():
    """A draw that failed: 2**31 - 1 and -2**31 are infinities as float16, and their sum is NaN."""
    x = torch.tensor([[2**31 - 1, 4, -3], [7, 14, -(2**31)], [2049, 2051, -4099]], dtype=torch.int32)
    check_op("aten.sum.dim_IntList", x, None, dtype=torch.float16)
    check_op("aten.sum.dim_IntList", x, [1], dtype=torch.float16)
    check_op("aten.sum.dim_IntList", x, [1], dtype=torch.float32)
    y = torch.tensor([[70000, 4, -3], [7, 14, -70001], [2049, 2051, -4099]], dtype=torch.int32)
    for numbers in (y, y.float()):  # a mean is of the elements as they are
        check_op("aten.mean.dim", numbers, [0, 1], dtype=torch.float16)
        check_op("aten.mean.default", numbers, dtype=torch.float16)


@pytest.mark.parametrize("order", [2, 1, 0, INF, -INF])
def test_vector_norms(order):
    x = torch.randn(4, 37)
    x[1, 3] = 0
    check_op("aten.linalg_vector_norm.default", x, order, [1])
    check_op("aten.linalg_vector_norm.default", x.half(), order, None, True)
    check_op("aten.norm.ScalarOpt_dim", x, order, [0])
    assert "order 3" in refusal_of("aten.linalg_vector_norm.default", x, 3)


def test_cumsum():
    for shape, axis in (((), 0), ((1,), 0), ((3, 5, 7), 0), ((3, 5, 7), -1), ((2, 700, 3), 1), ((2, 5000), 1)):
        check_op("aten.cumsum.default", torch.randint(-50, 50, shape), axis)
        check_op("aten.cumsum.default", torch.randn(shape), axis, **summed(50000))
    check_op("aten.cumsum.default", torch.rand(3, 300) > 0.5, 1)
    check_op("aten.cumsum.default", torch.rand(2, 300).half(), 1)
    check_op("aten.cumsum.default", torch.randint(0, 9, (2, 30)), 1, dtype=torch.float32)
    check_op("aten.cumprod.default", 1 + torch.randn(3, 70) / 50, 1)


# --- in a graph -------------------------------------------------------------------------------------------------------


def _run(x, steps, dtype="float32"):
    """`x` through steps (op, its other arguments, shape, dtype); each reads what the one before it made."""
    graph = Graph([TensorSpec(dtype, tuple(x.shape))], [0])
    for op, args, shape, kind in steps:
        outputs = (graph.add_value(TensorSpec(kind, tuple(shape))),)
        graph.nodes.append(Node(op, {"self": Ref(len(graph.values) - 2), **args}, outputs))
    graph.outputs = [len(graph.values) - 1]
    return run_graph(graph, [x.numpy()])[0]


@pytest.mark.parametrize("axes", [[0], [1], [2], [0, 2], [1, 2], [0, 1]])
def test_permuted_sliced_and_computed_input(axes):
    x = torch.randn(5, 7, 6)
    y = x.permute(2, 0, 1)[1:5]
    z = y.exp()
    steps = [
        ("aten.permute_copy.default", {"dims": [2, 0, 1]}, (6, 5, 7), "float32"),
        ("aten.slice_copy.Tensor", {"dim": 0, "start": 1, "end": 5, "step": 1}, y.shape, "float32"),
    ]
    shape = torch.amax(y, axes).shape
    for last, golden in (
        (
            ("aten.sum.dim_IntList", {"dim": axes, "keepdim": False, "dtype": None}, shape, "float32"),
            y.double().sum(axes),
        ),
        (("aten.amax.default", {"dim": axes, "keepdim": False}, shape, "float32"), y.double().amax(axes)),
        (
            ("aten.var.correction", {"dim": axes, "correction": 1, "keepdim": False}, shape, "float32"),
            y.double().var(axes),
        ),
    ):
        assert_close(_run(x, [*steps, last]), golden.numpy(), **F32)
    exp = ("aten.exp.default", {}, y.shape, "float32")
    var = ("aten.var.correction", {"dim": axes, "correction": 1, "keepdim": False}, shape, "float32")
    assert_close(_run(x, [*steps, exp, var]), z.double().var(axes).numpy(), 1e-6, 3e-5)
    where = ("aten.argmax.default", {"dim": axes[0], "keepdim": True}, y.amax(axes[0], True).shape, "int64")
    assert_close(_run(x, [*steps, exp, where]), y.argmax(axes[0], True).numpy(), 0, 0)


def test_pointwise_work_after_a_reduction_is_fused():
    x = torch.randn(6, 50)
    steps = [
        ("aten.mean.dim", {"dim": [1], "keepdim": True, "dtype": None}, (6, 1), "float32"),
        ("aten.neg.default", {}, (6, 1), "float32"),
        ("aten.softmax.int", {"dim": 0, "dtype": None}, (6, 1), "float32"),
        ("aten.sum.dim_IntList", {"dim": [0, 1], "keepdim": False, "dtype": None}, (), "float32"),
    ]
    assert_close(_run(x, steps), np.array(1.0), **F32)
    assert_close(_run(x, steps[:3]), (-x.double().mean(1, True)).softmax(0).numpy(), **F32)


@pytest.mark.parametrize("used", [(True, False), (False, True)])
def test_one_of_two_outputs(used):
    x = torch.randn(3, 70)
    for op, args in (
        ("aten.max.dim", {"dim": 1, "keepdim": False}),
        ("aten.var_mean.correction", {"dim": [1], "correction": 1, "keepdim": False}),
        ("aten.topk.default", {"k": 3, "dim": 1, "largest": True, "sorted": True}),
    ):
        schema = getattr(getattr(torch.ops.aten, op.split(".")[1]), op.split(".")[2])
        wanted = schema(x.double(), **args)
        graph = Graph([TensorSpec("float32", (3, 70))], [0])
        outputs = []
        for tensor, use in zip(wanted, used, strict=True):
            kind = "float32" if tensor.is_floating_point() else "int64"
            outputs.append(graph.add_value(TensorSpec(kind, tuple(tensor.shape))) if use else None)
        graph.nodes = [Node(op, {"self": Ref(0), **args}, tuple(outputs))]
        graph.outputs = [out for out in outputs if out is not None]
        (result,) = run_graph(graph, [x.numpy()])
        assert_close(result, wanted[used.index(True)].numpy(), **F32)


def test_results_repeat_bit_by_bit():
    x = torch.randn(3, 50021)
    first = run_op("aten.sum.dim_IntList", x, [1])[0]
    assert all((run_op("aten.sum.dim_IntList", x, [1])[0] == first).all() for _ in range(3))
