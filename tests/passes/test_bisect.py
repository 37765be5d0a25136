"""pytest tests/passes/test_bisect.py: an operator that is made to go wrong is named, and its case runs alone."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backend.graph import Graph, Node, Ref, TensorSpec
from backend.ops import registry
from backend.quantization import joined_key
from backend.runtime import value as values
from recipes.recipe import UserError
from zoo import bisect

ROOT = Path(__file__).resolve().parents[2]


def chain() -> tuple[Graph, dict[str, np.ndarray]]:
    """tanh(x w), its softmax, and the sum with what a state held."""
    graph = Graph()
    x = graph.add_value(TensorSpec("float32", (5, 8)))
    w = graph.add_value(TensorSpec("float32", (8, 8), "w"))
    state = graph.add_value(TensorSpec("float32", (5, 8), None, "kept"))
    product, bent, soft, out = (graph.add_value(TensorSpec("float32", (5, 8))) for _ in range(4))
    graph.nodes = [
        Node("aten.mm.default", {"self": Ref(x), "mat2": Ref(w)}, (product,)),
        Node("aten.tanh.default", {"self": Ref(product)}, (bent,)),
        Node("aten._softmax.default", {"self": Ref(bent), "dim": -1, "half_to_float": False}, (soft,)),
        Node("aten.add.Tensor", {"self": Ref(soft), "other": Ref(state), "alpha": 1}, (out,)),
    ]
    graph.inputs, graph.outputs, graph.mutations = [x], [out], {state: soft}
    rng = np.random.default_rng(0)
    return graph, {"w": rng.standard_normal((8, 8)).astype(np.float32)}


def case() -> bisect.Case:
    graph, data = chain()
    x = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)
    return bisect.Case("step", graph, [x], SimpleNamespace(get_data=lambda key: data[key].tobytes()))  # type: ignore[arg-type]


def test_constants_that_were_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear whose weights and biases are each those of two, the biases alike: found, and written so that it runs."""
    graph = Graph()
    x = graph.add_value(TensorSpec("float32", (5, 8)))
    w = graph.add_value(TensorSpec("float32", (12, 8), joined_key(["q", "k"])))
    b = graph.add_value(TensorSpec("float32", (12,), joined_key(["zero", "zero"])))
    out = graph.add_value(TensorSpec("float32", (5, 12)))
    graph.nodes = [Node("aten.linear.default", {"input": Ref(x), "weight": Ref(w), "bias": Ref(b)}, (out,))]
    graph.inputs, graph.outputs = [x], [out]
    rng = np.random.default_rng(0)
    shapes = {"q": (4, 8), "k": (8, 8), "zero": (6,)}
    data = {key: rng.standard_normal(shape).astype(np.float32).tobytes() for key, shape in shapes.items()}
    inputs = [rng.standard_normal((5, 8)).astype(np.float32)]
    joined = bisect.Case("step", graph, inputs, SimpleNamespace(get_data=data.__getitem__))  # type: ignore[arg-type]
    found = joined.find(tmp_path)
    assert found.first is None and found.rows[0].error < 1e-6
    with monkeypatch.context() as patch:
        sabotage(patch, "aten.linear.default", lambda y, b: b.pointwise("({0} * 1.01)", [y], y.dtype, y.shape))
        found = joined.find(tmp_path)
    assert found.first is not None and found.reproducer is not None
    assert alone(found.reproducer) < 1e-6


@pytest.mark.parametrize(
    "size", [{"output_size": [6, 14], "scale_factors": None}, {"output_size": None, "scale_factors": [2.0, 2.0]}]
)
def test_an_operator_whose_arguments_are_none(size: dict[str, Any], tmp_path: Path) -> None:
    """None where torch has no default for it: a resize by a size or by factors."""
    graph = Graph()
    x, near = (graph.add_value(TensorSpec("float32", (1, 2, *sides))) for sides in ((3, 7), (6, 14)))
    graph.nodes = [Node("aten.upsample_nearest2d.vec", {"input": Ref(x), **size}, (near,))]
    graph.inputs, graph.outputs = [x], [near]
    data = np.random.default_rng(0).standard_normal((1, 2, 3, 7), np.float32)
    found = bisect.Case("resize", graph, [data], SimpleNamespace(get_data={}.__getitem__)).find(tmp_path)  # type: ignore[arg-type]
    assert found.first is None and [row.error for row in found.rows] == [0.0]


def sabotage(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any) -> None:
    op = registry.find(name)
    assert op is not None
    lower = op.lower
    monkeypatch.setitem(registry._OPS, name, replace(op, lower=lambda call, b: wrong(lower(call, b), b)))


def alone(reproducer: Path) -> float:
    """The largest difference that the case prints."""
    done = subprocess.run(
        [sys.executable, reproducer / "run.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, cwd=reproducer.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[2])


def test_nothing_is_found_where_nothing_is_wrong(tmp_path: Path) -> None:
    found = case().find(tmp_path)
    assert found.first is None and len(found.rows) == 4
    assert max(row.error for row in found.rows) < 1e-6
    assert list(tmp_path.iterdir()) == []


def test_the_first_operator_at_fault_and_a_case_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        sabotage(patch, "aten.tanh.default", lambda y, b: b.pointwise("({0} * 1.01)", [y], y.dtype, y.shape))
        found = case().find(tmp_path)
    assert found.first is not None and found.reproducer is not None and not found.fused
    assert found.first.op == "aten.tanh.default" and found.first.position == 1
    assert found.first.shapes == "(float32[5, 8]) -> float32[5, 8]"
    assert 0.009 < found.first.error < 0.011
    assert [row.op for row in found.rows if row.jumps] == ["aten.tanh.default"]  # what follows it is right by itself
    # Alone, on a backend that is right, it is right: the case holds what the operator was given.
    assert alone(found.reproducer) < 1e-6


def test_a_fault_of_fused_kernels_is_found_by_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tanh goes wrong only where its result is not stored: where nobody asks for it as an output."""

    def wrong(y: Any, b: Any) -> Any:
        return b.pointwise("({0} * 1.01)", [y], y.dtype, y.shape) if len(graph_outputs) == 1 else y

    graph_outputs: list[int] = []
    run = bisect.Case._run

    def spied(self: bisect.Case, outputs: Any) -> Any:
        graph_outputs[:] = outputs
        return run(self, outputs)

    monkeypatch.setattr(bisect.Case, "_run", spied)
    sabotage(monkeypatch, "aten.tanh.default", wrong)
    found = case().find(tmp_path)
    assert found.fused and found.first is not None and found.first.op == "aten.tanh.default"
    assert found.reproducer is not None and (found.reproducer / "run.py").is_file()


def test_an_infinity_where_none_should_be_is_a_jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch, "aten._softmax.default", lambda y, b: values.scalar(float("inf"), y.dtype, y.shape))
    found = case().find(tmp_path)
    assert found.first is not None and found.first.op == "aten._softmax.default"
    assert found.json()["first"]["error"] is None  # strict JSON has no infinity


def test_stretches_and_ranges_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read back value by value, or from a position on: each operator has the operands of the whole graph's run."""
    whole = case().find(tmp_path)
    monkeypatch.setattr("zoo.case._READ_BYTES", 1)
    apart = case()
    assert len(list(apart._stretches())) == 4
    assert [(row.op, row.shapes) for row in apart.find(tmp_path).rows] == [(row.op, row.shapes) for row in whole.rows]
    part = case().between(1, 3)
    found = part.find(tmp_path)
    assert [(row.position, row.op) for row in found.rows] == [(1, "aten.tanh.default"), (2, "aten._softmax.default")]
    assert found.first is None and max(row.error for row in found.rows) < 1e-6
    sabotage(monkeypatch, "aten._softmax.default", lambda y, b: b.pointwise("({0} * 1.01)", [y], y.dtype, y.shape))
    first = part.find(tmp_path).first
    assert first is not None and (first.position, first.op) == (2, "aten._softmax.default")


def long_chain(count: int) -> bisect.Case:
    graph = Graph()
    value = graph.add_value(TensorSpec("float32", (3, 7)))
    graph.inputs = [value]
    for at in range(count):
        out = graph.add_value(TensorSpec("float32", (3, 7)))
        graph.nodes.append(Node("aten.tanh.default" if at % 2 else "aten.mul.Scalar", {"self": Ref(value)}, (out,)))
        if at % 2 == 0:
            graph.nodes[-1] = replace(graph.nodes[-1], args={"self": Ref(value), "other": 1.5})
        value = out
    graph.outputs = [value]
    x = np.random.default_rng(1).standard_normal((3, 7)).astype(np.float32)
    return bisect.Case("step", graph, [x], SimpleNamespace(get_data={}.__getitem__))  # type: ignore[arg-type]


def test_fused_faults_of_a_long_graph_are_found_in_several_rounds(tmp_path: Path) -> None:
    """Everything from operator 77 on is wrong where the graph is run as a whole."""
    looked: list[int] = []

    class Faulty(bisect.Case):
        def _run(self, outputs: Any) -> list[np.ndarray]:
            positions = [self._made[out] for out in outputs]
            looked.extend(positions)
            return [made + (position >= 77) for made, position in zip(super()._run(outputs), positions, strict=True)]

    clean = long_chain(120)
    found = Faulty("step", clean.graph, clean.inputs, clean._file).find(tmp_path)
    assert found.fused and found.first is not None and found.first.position == 77
    assert len(looked) < 15


def test_recording_stops_at_the_largest_call() -> None:
    class Program:
        methods = ("a", "b")

        def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
            return list(arrays)

    recorder = bisect.Recorder(Program(), {"a": 4, "b": 2})
    recorder.run("a", np.zeros(3))
    recorder.run("b", np.zeros(2))
    with pytest.raises(bisect._Enough):
        recorder.run("a", np.zeros(4))
    assert {method: arrays[0].size for method, arrays in recorder.calls.items()} == {"a": 4, "b": 2}


def test_positions() -> None:
    assert [bisect.positions(text) for text in ("3:9", "3:", ":9", ":")] == [(3, 9), (3, None), (0, 9), (0, None)]
    for text in ("3", "a:b", "9:3", "3:3", "-1:2"):
        with pytest.raises(UserError, match=f"--operators {text}"):
            bisect.positions(text)
