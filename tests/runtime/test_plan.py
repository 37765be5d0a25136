"""pytest tests/runtime/test_plan.py: results of constants, replay."""

from __future__ import annotations

import random

import numpy as np
import torch

from backend.blob import to_blob
from backend.expr import Expr
from backend.graph import Graph, Node, Ref, TensorSpec
from backend.runtime.builder import lower_graph
from backend.runtime.capabilities import Capabilities
from backend.runtime.delegate import Delegate
from tests.passes.make import Maker

# --- constants ----------------------------------------------------------------------------------------------------


def constant_graph() -> tuple[Graph, dict[str, bytes], np.ndarray]:
    """relu(w)ᵀ + x over [s0, 3]: relu depends on constants only."""
    from backend.expr import Expr

    weight = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    graph = Graph(symbols={"s0": (1, 64)})
    x = graph.add_value(TensorSpec("float32", (Expr("s0"), 1, 1)))
    w = graph.add_value(TensorSpec("float32", (4, 3), "w"))
    doubled = graph.add_value(TensorSpec("float32", (4, 3)))
    tiled = graph.add_value(TensorSpec("float32", (4, 6)))
    y = graph.add_value(TensorSpec("float32", (Expr("s0"), 4, 6)))
    graph.inputs, graph.outputs = [x], [y]
    graph.nodes = [
        Node("aten.exp.default", {"self": Ref(w)}, (doubled,)),
        Node("aten.cat.default", {"tensors": [Ref(doubled), Ref(w)], "dim": 1}, (tiled,)),
        Node("aten.add.Tensor", {"self": Ref(x), "other": Ref(tiled), "alpha": 1}, (y,)),
    ]
    return graph, {"w": weight.tobytes()}, weight


def test_what_depends_on_constants_runs_once_for_all_shapes():
    graph, data, weight = constant_graph()
    delegate = Delegate(to_blob(graph), data.__getitem__)
    expected = np.concatenate([np.exp(weight), weight], 1)
    try:
        for rows in (2, 5, 2, 7):
            x = np.random.default_rng(rows).standard_normal((rows, 1, 1)).astype(np.float32)
            np.testing.assert_allclose(delegate.execute([x])[0], x + expected, rtol=1e-5, atol=1e-6)
            assert len(delegate.plan([x.shape]).steps) == 1
        resources = delegate._resources
        assert resources is not None
        static = dict(resources.static)
        assert static
        delegate.execute([np.zeros((11, 1, 1), np.float32)])
        assert resources.static == static  # the plan of another shape found it there
    finally:
        delegate.close()


def test_an_output_that_is_a_constant():
    graph = Graph()
    x = graph.add_value(TensorSpec("float32", (2,)))
    w = graph.add_value(TensorSpec("float32", (2,), "w"))
    y = graph.add_value(TensorSpec("float32", (2,)))
    graph.inputs, graph.outputs = [x], [y, w, x]
    graph.nodes = [Node("aten.neg.default", {"self": Ref(w)}, (y,))]
    delegate = Delegate(to_blob(graph), {"w": np.float32([1, 2]).tobytes()}.__getitem__)
    for _ in range(2):
        got = delegate.execute([np.float32([3, 4])])
        assert [array.tolist() for array in got] == [[-1, -2], [1, 2], [3, 4]]
    delegate.close()


def test_replay_gives_what_a_fresh_plan_gives():
    m = Maker()
    x, y = m.input(7, 5), m.input(5)
    z = m("cat.default", tensors=[m("exp.default", self=x), m("add.Tensor", self=x, other=y)], dim=0)
    m.graph.outputs = [m("permute.default", self=z, dims=[1, 0]).value]
    kept = Delegate(to_blob(m.graph), {}.__getitem__)
    for seed in range(4):
        torch.manual_seed(seed)
        inputs = [torch.randn(7, 5).numpy(), torch.randn(5).numpy()]
        fresh = Delegate(to_blob(m.graph), {}.__getitem__)
        first = kept.execute(inputs)[0]
        again = kept.execute(inputs)[0]
        np.testing.assert_array_equal(first, fresh.execute(inputs)[0])
        np.testing.assert_array_equal(first, again)
        assert first is not again
        fresh.close()
    kept.close()


def test_plans_of_several_shapes_share_scratch_memory_without_mixing():
    graph, data, weight = constant_graph()
    delegate = Delegate(to_blob(graph), data.__getitem__)
    expected = np.concatenate([np.exp(weight), weight], 1)
    shapes = [64, 7, 1, 33, 64]
    for rows in shapes:
        x = np.arange(rows, dtype=np.float32).reshape(rows, 1, 1)
        np.testing.assert_allclose(delegate.execute([x])[0], x + expected, rtol=1e-5)
    assert len(delegate._plans) == len(set(shapes))
    delegate.close()


def test_fifty_lengths_give_what_fresh_plans_give():
    """One delegate meets them in a shuffled order, more than it keeps plans for; every other one is new to each."""
    s = Expr("s0")
    graph = Graph(symbols={"s0": (1, 200)})
    x = graph.add_value(TensorSpec("float32", (s, 12)))
    w = graph.add_value(TensorSpec("float32", (12, 12), "w"))
    product, soft, summed = (graph.add_value(TensorSpec("float32", (s, 12))) for _ in range(3))
    mean = graph.add_value(TensorSpec("float32", (12,)))
    graph.nodes = [
        Node("aten.mm.default", {"self": Ref(x), "mat2": Ref(w)}, (product,)),
        Node("aten._softmax.default", {"self": Ref(product), "dim": 0, "half_to_float": False}, (soft,)),
        Node("aten.cumsum.default", {"self": Ref(soft), "dim": 0, "dtype": None}, (summed,)),
        Node("aten.mean.dim", {"self": Ref(product), "dim": [0], "keepdim": False, "dtype": None}, (mean,)),
    ]
    graph.inputs, graph.outputs = [x], [summed, mean]
    rng = np.random.default_rng(0)
    data = {"w": rng.standard_normal((12, 12)).astype(np.float32).tobytes()}
    blob = to_blob(graph)
    kept = Delegate(blob, data.__getitem__)
    lengths = [*range(1, 41), 64, 65, 97, 127, 128, 129, 150, 191, 199, 200]
    for length in random.Random(0).sample(lengths * 2, 2 * len(lengths)):
        array = rng.standard_normal((length, 12)).astype(np.float32)
        fresh = Delegate(blob, data.__getitem__)
        for actual, wanted in zip(kept.execute([array]), fresh.execute([array]), strict=True):
            np.testing.assert_array_equal(actual, wanted)
        fresh.close()
    kept.close()


def test_lowering_is_deterministic():
    m = Maker()
    x = m.input(7, 5)
    m.graph.outputs = [m("add.Tensor", self=m("exp.default", self=x), other=x).value]
    first, second = (lower_graph(m.graph, {}, Capabilities()).dispatches for _ in range(2))
    assert [(d.code, d.params, d.groups) for d in first] == [(d.code, d.params, d.groups) for d in second]
