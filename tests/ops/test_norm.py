"""pytest tests/ops/test_norm.py

Tolerances are the harness's unless a test says otherwise. Norms get atol=2e-6: their results are of size 1 to 5, and
the driver's sqrt and the order of additions cost a few units of the last place (eps 1.2e-7).
"""

import math

import numpy as np
import pytest
import torch
from harness import F32, assert_close, check_op, refusal_of, run_graph, run_op

from backend.blob import to_blob
from backend.expr import symbol
from backend.graph import Graph, Node, Ref, TensorSpec
from backend.ops import registry
from backend.runtime.delegate import Delegate

INF, NAN = math.inf, math.nan


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# --- softmax ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["aten.softmax.int", "aten.log_softmax.int"])
@pytest.mark.parametrize("shape,dim", [((), 0), ((1,), 0), ((7,), -1), ((3, 5, 7), 0), ((3, 5, 7), 1), ((3, 5, 7), -1)])
def test_softmax_axes(name, shape, dim):
    check_op(name, torch.randn(shape) * 5, dim)


@pytest.mark.parametrize(
    "shape,dim", [((2, 37, 3), 1), ((2, 300, 41), 1), ((5000, 2), 0), ((2, 129), 1), ((2, 4097), 1)]
)
def test_softmax_every_geometry(shape, dim):
    x = torch.randn(shape) * 3
    check_op("aten._softmax.default", x, dim, False)
    check_op("aten._log_softmax.default", x, dim, False)


@pytest.mark.parametrize("length", [*range(1, 18), 31, 33, 257, 600, 5000])
def test_n1_softmax_of_equal_negative_values(length):
    (result,) = run_op("aten._softmax.default", torch.full((1, length), -200.0), -1, False)
    assert_close(result, np.full((1, length), 1 / length), **F32)


def test_n2_softmax_of_masked_rows():
    x = torch.tensor([[0.0, 0, 0], [-INF, -INF, -INF], [0, -INF, 1], [INF, 0, 1], [NAN, 0, 1], [1e30, -1e30, 0]])
    for name in ("aten._softmax.default", "aten._log_softmax.default"):
        check_op(name, x, -1, False)
        check_op(name, x.T.contiguous(), 0, False)
        check_op(name, torch.cat([x, x[:, :1].expand(-1, 4998)], 1), -1, False)


def test_softmax_of_large_values():
    check_op(
        "aten._softmax.default", torch.tensor([[1000.0, 1001, 999], [-1000, -1001, -1e38], [88, 89, 3e38]]), -1, False
    )


def test_softmax_dtypes():
    x = torch.randn(5, 33)
    check_op("aten._softmax.default", x.half(), -1, False)
    check_op("aten.softmax.int", x.half(), -1, torch.float32, golden=lambda: x.half().double().softmax(-1))
    check_op("aten.softmax.int", (x * 3).int(), 0, torch.float32, golden=lambda: (x * 3).int().double().softmax(0))
    # half_to_float has no CPU kernel: only the node of a CUDA trace carries it
    graph = Graph([TensorSpec("float16", (5, 33)), TensorSpec("float32", (5, 33))], [0], [1])
    graph.nodes = [Node("aten._softmax.default", {"self": Ref(0), "dim": -1, "half_to_float": True}, (1,))]
    (result,) = run_graph(graph, [x.half().numpy()])
    assert_close(result, x.half().double().softmax(-1).numpy(), **F32)


def test_softmax_of_many_rows_and_of_none():
    check_op("aten._softmax.default", torch.randn(70001, 3), -1, False)
    check_op("aten._softmax.default", torch.randn(65537, 5), -1, False)
    for shape in [(0, 3), (3, 0), (0,)]:
        check_op("aten._softmax.default", torch.randn(shape), -1, False)


def test_logsumexp():
    x = torch.randn(4, 5, 600) * 10
    for axes in ([0], [1], [-1], [0, 2], [0, 1, 2]):
        check_op("aten.logsumexp.default", x, axes, True)
    check_op("aten.logsumexp.default", torch.randn(2, 5000).half(), [1])
    check_op("aten.logsumexp.default", torch.tensor([[-INF, -INF], [INF, 0], [NAN, 1], [-INF, 2]]), [1])
    check_op("aten.logsumexp.default", torch.zeros(2, 0), [1])


# --- norms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3, 7, 37, 64, 89, 257, 768, 3001, 5000])
@pytest.mark.parametrize("affine", ["none", "weight", "both"])
def test_layer_norm(n, affine):
    weight = None if affine == "none" else torch.randn(n)
    bias = torch.randn(n) if affine == "both" else None
    check_op("aten.layer_norm.default", torch.randn(3, n), [n], weight, bias, 1e-5, atol=2e-6)
    check_op("aten.rms_norm.default", torch.randn(3, n), [n], weight, 1e-6, atol=2e-6)


def test_layer_norm_over_several_axes_and_many_rows():
    check_op(
        "aten.layer_norm.default", torch.randn(2, 3, 5, 7), [5, 7], torch.randn(5, 7), torch.randn(5, 7), atol=2e-6
    )
    check_op("aten.layer_norm.default", torch.randn(70001, 3), [3], atol=1e-5)  # 3 close values: rstd up to 300
    check_op("aten.layer_norm.default", torch.randn(0, 3), [3])
    check_op("aten.layer_norm.default", torch.randn(3, 0), [0])


@pytest.mark.parametrize("n", [768, 5000])
def test_n4_f16_square_does_not_overflow(n):
    x = torch.zeros(1, n, dtype=torch.float16)
    x[0, 0] = 795
    (result,) = check_op("aten.layer_norm.default", x, [n])
    if n == 768:
        assert abs(float(result[0, 0]) - 27.69) < 0.02 and abs(float(result[0, 1]) + 0.0361) < 1e-4
    check_op("aten.rms_norm.default", x, [n])


@pytest.mark.parametrize("n", [7, 768, 5000])
def test_layer_norm_with_a_mean_far_above_the_spread(n):
    # A mean that is only as good as one f32 sum is off by 1e-3 here.
    check_op("aten.layer_norm.default", torch.randn(3, n) + 1e4, [n], atol=2e-5)
    check_op("aten.group_norm.default", torch.randn(2, 4, n) - 1e4, 2, atol=2e-5)
    check_op("aten.var_mean.correction", torch.randn(3, n) + 1e4, [1], correction=0)


def test_layer_norm_of_constant_rows_and_of_nan():
    check_op("aten.layer_norm.default", torch.full((2, 9), 3.0), [9], atol=1e-6)
    x = torch.randn(3, 9)
    x[1, 4] = NAN
    check_op("aten.layer_norm.default", x, [9], atol=2e-6)


def test_native_layer_norm_statistics():
    x, weight = torch.randn(5, 3, 11), torch.randn(11)
    check_op("aten.native_layer_norm.default", x, [11], weight, None, 1e-5, atol=2e-6)
    check_op("aten.native_layer_norm.default", x.half(), [3, 11], None, None, 1e-5)


@pytest.mark.parametrize("used", [(True, False, False), (True, False, True), (False, True, False)])
def test_native_layer_norm_with_unused_outputs(used):
    x = torch.randn(5, 11)
    wanted = torch.ops.aten.native_layer_norm(x.double(), [11], None, None, 1e-5)
    graph = Graph([TensorSpec("float32", (5, 11))], [0])
    outputs = [
        graph.add_value(TensorSpec("float32", tuple(t.shape))) if u else None for t, u in zip(wanted, used, strict=True)
    ]
    args = {"input": Ref(0), "normalized_shape": [11], "weight": None, "bias": None, "eps": 1e-5}
    graph.nodes = [Node("aten.native_layer_norm.default", args, tuple(outputs))]
    graph.outputs = [out for out in outputs if out is not None]
    results = run_graph(graph, [x.numpy()])
    for result, golden in zip(results, [t for t, u in zip(wanted, used, strict=True) if u], strict=True):
        assert_close(result, golden.numpy(), 2e-6, 1e-5)


def test_rms_norm_default_eps_and_f16():
    check_op("aten.rms_norm.default", torch.randn(3, 37), [37], torch.randn(37))
    tiny = torch.full((1, 4), 2e-3, dtype=torch.float16)
    check_op("aten.rms_norm.default", tiny, [4], golden=lambda: tiny.double() / (4e-6 + 2**-23) ** 0.5)
    check_op("aten._fused_rms_norm.default", torch.randn(3, 37), [37], torch.randn(37), 1e-6)


@pytest.mark.parametrize(
    "shape,groups", [((2, 6, 4, 5), 3), ((3, 4), 2), ((1, 8, 37), 8), ((2, 4, 70, 70), 2), ((2, 6, 3), 1)]
)
def test_group_norm(shape, groups):
    x, weight, bias = torch.randn(shape), torch.randn(shape[1]), torch.randn(shape[1])
    check_op("aten.group_norm.default", x, groups, weight, bias, atol=1e-5 if shape == (3, 4) else 2e-6)
    check_op("aten.group_norm.default", x.half(), groups, weight.half(), None)
    size = math.prod(shape[2:])
    check_op("aten.native_group_norm.default", x, weight, bias, shape[0], shape[1], size, groups, 1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 5), (2, 7, 11), (2, 3, 5, 7), (0, 3, 5, 7)])
def test_batch_norm(shape):
    x, c = torch.randn(shape), shape[1]
    weight, bias, mean, variance = torch.randn(c), torch.randn(c), torch.randn(c), torch.rand(c)
    constants = ("weight", "bias", "running_mean", "running_var")
    for w, b in ((weight, bias), (None, None), (weight, None)):
        name = "aten._native_batch_norm_legit_no_training.default"
        check_op(name, x, w, b, mean, variance, 0.1, 1e-5, atol=2e-6, constants=constants)
        check_op("aten.batch_norm.default", x, w, b, mean, variance, False, 0.1, 1e-5, True, atol=2e-6)
    half = [t.half() for t in (x, weight, bias, mean, variance)]
    check_op("aten.batch_norm.default", *half, False, 0.1, 1e-5, True, atol=5e-3)
    if shape[0]:
        assert "inference" in refusal_of(
            "aten.batch_norm.default", x, weight, bias, mean, variance, True, 0.1, 1e-5, True
        )


def test_refusals():
    spec = Graph([TensorSpec("int64", (3, 4))], [0])
    args = {"input": Ref(0), "normalized_shape": [4], "weight": None, "bias": None, "eps": 1e-5}
    assert "int64" in registry.refusal(spec.call(Node("aten.layer_norm.default", args, (0,))))
    assert refusal_of("aten.layer_norm.default", torch.randn(3, 4), [4]) is None


# --- in a graph -------------------------------------------------------------------------------------------------------


def _graph(inputs, steps, dtype="float32"):
    """Inputs by shape, then steps (op, args, shape of the output); arguments refer to values by Ref."""
    graph = Graph([TensorSpec(dtype, shape) for shape in inputs], list(range(len(inputs))))
    for op, args, shape in steps:
        graph.nodes.append(Node(op, args, (graph.add_value(TensorSpec(dtype, shape)),)))
    graph.outputs = [len(graph.values) - 1]
    return graph


@pytest.mark.parametrize("n", [11, 5000])
def test_fused_before_and_after(n):
    x, y = torch.randn(3, n), torch.randn(3, n)
    norm = {"input": Ref(2), "normalized_shape": [n], "weight": None, "bias": None, "eps": 1e-5}
    add = ("aten.add.Tensor", {"self": Ref(0), "other": Ref(1), "alpha": 1}, (3, n))
    mul = ("aten.mul.Tensor", {"self": Ref(3), "other": Ref(1)}, (3, n))
    (result,) = run_graph(
        _graph([(3, n), (3, n)], [add, ("aten.layer_norm.default", norm, (3, n)), mul]), [x.numpy(), y.numpy()]
    )
    s = (x + y).double()
    assert_close(result, (torch.nn.functional.layer_norm(s, [n]) * y.double()).numpy(), 2e-5, 1e-5)
    soft = ("aten.softmax.int", {"self": Ref(2), "dim": -1, "dtype": None}, (3, n))
    (result,) = run_graph(_graph([(3, n), (3, n)], [add, soft, mul]), [x.numpy(), y.numpy()])
    assert_close(result, (s.softmax(-1) * y.double()).numpy(), 1e-6, 1e-5)


@pytest.mark.parametrize("dims", [[2, 0, 1], [1, 2, 0], [0, 2, 1]])
def test_permuted_input(dims):
    x = torch.randn(5, 7, 3)
    y = x.permute(dims)
    shape = tuple(y.shape)
    permute = ("aten.permute_copy.default", {"self": Ref(0), "dims": dims}, shape)
    for dim in range(3):
        soft = ("aten.softmax.int", {"self": Ref(1), "dim": dim, "dtype": None}, shape)
        (result,) = run_graph(_graph([(5, 7, 3)], [permute, soft]), [x.numpy()])
        assert_close(result, y.double().softmax(dim).numpy(), **F32)
    norm = {"input": Ref(1), "normalized_shape": [shape[-1]], "weight": None, "bias": None, "eps": 1e-5}
    (result,) = run_graph(_graph([(5, 7, 3)], [permute, ("aten.layer_norm.default", norm, shape)]), [x.numpy()])
    assert_close(result, torch.nn.functional.layer_norm(y.double(), shape[-1:]).numpy(), 2e-5, 1e-5)


def test_d1_dynamic_sizes():
    """One delegate, the softmax axis and the number of normed rows of changing size."""
    s = symbol("s")
    graph = _graph(
        [(s, 5)],
        [
            ("aten.softmax.int", {"self": Ref(0), "dim": 0, "dtype": None}, (s, 5)),
            (
                "aten.layer_norm.default",
                {"input": Ref(1), "normalized_shape": [5], "weight": None, "bias": None, "eps": 1e-5},
                (s, 5),
            ),
        ],
    )
    graph.symbols = {"s": (0, None)}
    delegate = Delegate(to_blob(graph), {}.__getitem__)
    for size in (64, 7, 1, 0, 600, 33, 64):
        x = torch.randn(size, 5)
        (result,) = delegate.execute([x.numpy()])
        golden = torch.nn.functional.layer_norm(x.double().softmax(0), [5]).numpy()
        assert_close(result, golden, 1e-4, 1e-4)  # the spread of softmax over 600 is small against sqrt(eps)
    delegate.close()
