"""pytest tests/runtime/test_plan.py: results of constants, replay, outputs of a byte an element."""

from __future__ import annotations

import random

import numpy as np
import pytest
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


@pytest.mark.parametrize("keep", [True, False])
def test_inputs_that_are_kept_serve_repeated_dispatches(keep: bool) -> None:
    """What `zoo bench kernels` and `zoo tune` time; without it, results come to lie over the inputs."""
    m = Maker()
    y = m.input(64)
    for _ in range(3):
        y = m("cumsum.default", self=y, dim=0)
    m.graph.outputs = [y.value]
    delegate = Delegate(to_blob(m.graph), {}.__getitem__, keep_inputs=keep)
    x = np.random.default_rng(0).standard_normal(64, dtype=np.float32)
    (first,) = delegate.execute([x])
    plan = delegate.plan([x.shape])
    for _ in range(2):
        plan._submit(plan._table)
    buffer, offset = plan._place(plan.outputs[0].buffer)
    again = np.frombuffer(plan.device.read(buffer, offset + x.nbytes), np.float32)[offset // 4 :]
    assert np.array_equal(again, first) == keep
    delegate.close()


def test_plans_that_are_not_in_use_hold_no_large_buffers() -> None:
    """As of a folder of pictures, each of another size: results by either way, and small ones that stay."""
    graph = Graph(symbols={"s0": (1, 4096)})
    x = graph.add_value(TensorSpec("float32", (Expr("s0"), 1024)))
    y = graph.add_value(TensorSpec("float32", (Expr("s0"), 1024)))
    graph.inputs, graph.outputs = [x], [y]
    graph.nodes = [Node("aten.exp.default", {"self": Ref(x)}, (y,))]
    delegate = Delegate(to_blob(graph), {}.__getitem__)

    def spares() -> list[int]:
        return [
            sum(len(spare) for spare in (*plan._kept, *(readout.spare for readout in plan._readouts.values())))
            for plan in delegate._plans.values()
        ]

    for rows in (256, 300, 2, 301, 256):
        array = np.zeros((rows, 1024), np.float32)
        delegate.execute([array])
        (result,) = delegate.start([array], [0])
        np.testing.assert_array_equal(result.numpy(), 1)
        result.close()
    assert spares() == [0, 2, 0, 2]  # of 300, 2, 301 and 256 rows
    delegate.close()


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


# --- outputs of a byte an element ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "int8", "bool"])
@pytest.mark.parametrize(("rows", "packs"), [(2**15, True), (2**14 - 1, False), (2**15 + 1, False)])
def test_large_outputs_of_bytes_are_read_as_bytes(dtype, rows, packs):
    """Four to a word where they are many and fill their words: computed, viewed, of a constant, an input as it is."""
    w = np.random.default_rng(1).integers(-128, 256, (2**15, 2)).astype(dtype)
    m = Maker()
    x, given = m.input(rows, 2, dtype="int32"), m.input(rows, 2, dtype=dtype)
    cast = m("_to_copy.default", self=x, dtype=dtype)
    flipped = m("permute.default", self=cast, dims=[1, 0])
    constant = m.graph.add_value(TensorSpec(dtype, w.shape, "w"))
    m.graph.outputs = [cast.value, flipped.value, constant, given.value]
    delegate = Delegate(to_blob(m.graph), {"w": w.tobytes()}.__getitem__)
    for seed in range(2):
        inputs = [np.random.default_rng(seed).integers(-300, 300, (rows, 2), np.int32)]
        inputs.append(inputs[0][::-1].astype(dtype))
        small = torch.from_numpy(inputs[0]).to(getattr(torch, dtype)).numpy()
        expected = [small, small.T, w, inputs[1]]
        started = delegate.start(inputs, (1, 2))
        for got in (delegate.execute(inputs), [tensor.numpy() for tensor in started]):
            for mine, wanted in zip(got, expected, strict=True):
                assert mine.dtype == wanted.dtype
                np.testing.assert_array_equal(mine, wanted)
    plan = delegate.plan([(rows, 2)] * 2)
    (readout,) = [found for fetch, found in plan._readouts.items() if len(fetch) == 4]
    each = (1 if packs else 4) * 2 * rows
    assert readout.nbytes == 3 * -(-each // 8) * 8 + 2 * 2**15
    delegate.close()
