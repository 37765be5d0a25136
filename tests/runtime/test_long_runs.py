"""pytest -m slow tests/runtime/test_long_runs.py: memory stays where it is, and results the same, however long it runs.

Counted: resident memory of the process, and what wgpu has of buffers and other objects.
"""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import wgpu

from backend.blob import to_blob
from backend.expr import Expr
from backend.graph import Graph, Node, Ref, TensorSpec
from backend.runtime.delegate import Delegate

WIDTH = 256
S = Expr("s0")


def step_graph() -> Graph:
    """state <- tanh(x w) + state / 2 over [s0, WIDTH]: a step with weights, a state and a live size."""
    graph = Graph(symbols={"s0": (1, 64)})
    x = graph.add_value(TensorSpec("float32", (S, WIDTH)))
    w = graph.add_value(TensorSpec("float32", (WIDTH, WIDTH), "w"))
    kept = graph.add_value(TensorSpec("float32", (WIDTH,), None, "kept"))
    product, bent = (graph.add_value(TensorSpec("float32", (S, WIDTH))) for _ in range(2))
    mean, half, new = (graph.add_value(TensorSpec("float32", (WIDTH,))) for _ in range(3))
    graph.nodes = [
        Node("aten.mm.default", {"self": Ref(x), "mat2": Ref(w)}, (product,)),
        Node("aten.tanh.default", {"self": Ref(product)}, (bent,)),
        Node("aten.mean.dim", {"self": Ref(bent), "dim": [0], "keepdim": False, "dtype": None}, (mean,)),
        Node("aten.mul.Tensor", {"self": Ref(kept), "other": 0.5}, (half,)),
        Node("aten.add.Tensor", {"self": Ref(mean), "other": Ref(half), "alpha": 1}, (new,)),
    ]
    graph.inputs, graph.outputs, graph.mutations = [x], [new], {kept: new}
    return graph


BLOB = to_blob(step_graph())
WEIGHT = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32) / 16


def delegate() -> Delegate:
    return Delegate(BLOB, {"w": WEIGHT.tobytes()}.__getitem__)


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def objects() -> dict[str, int]:
    gc.collect()
    counts = wgpu.diagnostics.object_counts.get_dict()
    return {name: counts[name]["count"] for name in ("Buffer", "BindGroup", "CommandBuffer", "CommandEncoder")}


@pytest.mark.slow
def test_ten_thousand_steps() -> None:
    """Of two sizes in turns; the state forgets, so that every hundredth result repeats the one before bit for bit."""
    step = delegate()
    inputs = [np.random.default_rng(i).standard_normal((1 + 6 * (i % 2), WIDTH)).astype(np.float32) for i in range(100)]
    seen: list[np.ndarray] = []
    for turn in range(100):
        for array in inputs:
            (out,) = step.execute([array])
        seen.append(out)
        if turn == 50:
            before = resident(), objects()
    assert all(np.array_equal(out, seen[1]) for out in seen[2:])
    after = resident(), objects()
    assert after[1] == before[1]
    assert after[0] - before[0] < 4e6, f"{(after[0] - before[0]) / 1e6:.1f} MB more after 4,900 steps"
    step.close()


@pytest.mark.slow
def test_two_hundred_loads() -> None:
    x = np.ones((3, WIDTH), np.float32)
    results = []
    for turn in range(200):
        step = delegate()
        results.append(step.execute([x])[0])
        step.close()
        if turn == 10:
            before = resident(), objects()
    assert all(np.array_equal(result, results[0]) for result in results)
    assert objects() == before[1]
    assert resident() - before[0] < 8e6  # 50 MB of weights were loaded since


@pytest.mark.slow
def test_four_threads_on_four_programs() -> None:
    inputs = [np.full((1 + i % 5, WIDTH), i / 100, np.float32) for i in range(300)]

    def work(_: int) -> np.ndarray:
        step = delegate()
        results = np.stack([step.execute([array])[0] for array in inputs])
        step.close()
        return results

    alone = work(0)
    with ThreadPoolExecutor(4) as pool:
        for together in pool.map(work, range(4)):
            np.testing.assert_array_equal(together, alone)
