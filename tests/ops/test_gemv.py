"""pytest tests/ops/test_gemv.py: products of few rows that take the norm, or pointwise work, before them along.

Golden: the chain of operators in float64. The fusion is for GPUs; here it is switched on, and the dispatches counted.
Tolerance 2e-5 of the largest result: sums of float32 products.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from backend.blob import to_blob
from backend.graph import Graph, Node, Ref, TensorSpec
from backend.ops import gemv
from backend.runtime.delegate import Delegate
from backend.runtime.device import get_device
from tests.ops.test_quantized import Weight
from zoo.eager import interpret


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.ops.gemv.spends_arithmetic", lambda cols, b: True)


class Chain:
    """A graph of float32 operators one after the other, with constants."""

    def __init__(self, *shape: int) -> None:
        self.graph, self.data = Graph(), {}
        self.rng = np.random.default_rng(sum(shape))
        self.x = Ref(self.graph.add_value(TensorSpec("float32", shape)))
        self.graph.inputs = [self.x.value]

    def constant(self, *shape: int) -> Ref:
        name = f"c{len(self.data)}"
        self.data[name] = self.rng.standard_normal(shape, dtype=np.float32).tobytes()
        return Ref(self.graph.add_value(TensorSpec("float32", shape, name)))

    def then(self, op: str, shape: tuple[int, ...], /, **args: Any) -> Ref:
        out = self.graph.add_value(TensorSpec("float32", shape))
        self.graph.nodes.append(Node(op, args, (out,)))
        return Ref(out)

    def norm(self, x: Ref, kind: str, weight: bool = True, bias: bool = True) -> Ref:
        shape = self.graph.values[x.value].shape
        args: dict[str, Any] = {"input": x, "normalized_shape": [shape[-1]], "eps": 1e-5}
        args["weight"] = self.constant(shape[-1]) if weight else None
        if kind == "layer":
            args |= {"bias": self.constant(shape[-1]) if bias else None, "cudnn_enable": False}
        return self.then(f"aten.{kind}_norm.default", shape, **args)

    def linear(self, x: Ref, cols: int, bits: int = 32, bias: bool = False) -> Ref:
        *lead, depth = self.graph.values[x.value].shape
        args: dict[str, Any] = {"input": x, "bias": self.constant(cols) if bias else None}
        if bits == 32:
            return self.then("aten.linear.default", (*lead, cols), weight=self.constant(cols, depth), **args)
        placed = Weight(cols, depth, bits, 32).place(self.graph, self.data)
        return self.then("zoo.quantized_linear", (*lead, cols), **placed, **args)

    def check(self, *outputs: Ref, dispatches: int, offset: float = 0.0, scale: float = 1.0) -> None:
        graph = self.graph
        graph.outputs = [ref.value for ref in outputs]
        shape = graph.values[self.x.value].shape
        x = self.rng.standard_normal(shape, dtype=np.float32) * np.float32(scale) + np.float32(offset)
        held = {
            spec.constant: torch.from_numpy(
                np.frombuffer(self.data[spec.constant], spec.dtype).reshape(spec.concrete({})).copy()
            )
            for spec in graph.values
            if spec.constant is not None
        }
        golden = interpret(graph, [torch.from_numpy(x)], held, double=True)
        delegate = Delegate(to_blob(graph), self.data.__getitem__)
        try:
            results = delegate.execute([x])
            again = delegate.execute([x])
            steps = delegate.plan([shape]).steps
        finally:
            delegate.close()
        assert len(steps) == dispatches, [step.label for step in steps]
        for actual, same, wanted in zip(results, again, golden, strict=True):
            np.testing.assert_array_equal(actual, same)
            worst = np.abs(wanted.numpy()).max() if wanted.numel() else 0.0
            np.testing.assert_allclose(actual, wanted.numpy(), rtol=0, atol=2e-5 * worst)


@pytest.mark.parametrize("bits", [32, 4, 8])
@pytest.mark.parametrize(
    ("kind", "weight", "bias"),
    [
        ("rms", True, False),
        ("rms", False, False),
        ("layer", True, True),
        ("layer", True, False),
        ("layer", False, False),
    ],
)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_norm_in_the_product(kind: str, weight: bool, bias: bool, bits: int, rows: int) -> None:
    chain = Chain(1, rows, 128)
    chain.check(chain.linear(chain.norm(chain.x, kind, weight, bias), 37, bits, bias=True), dispatches=1)


@pytest.mark.parametrize("depth", [64, 68, 1000, 2048])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_depths(kind: str, depth: int) -> None:
    chain = Chain(2, depth)
    chain.check(chain.linear(chain.norm(chain.x, kind), 9), dispatches=1)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_scales(kind: str, scale: float) -> None:
    chain = Chain(1, 256)
    chain.check(chain.linear(chain.norm(chain.x, kind), 5), dispatches=1, scale=scale)


def test_a_mean_far_above_the_spread() -> None:
    """Found first and taken off, as in the norm's own kernel; x itself keeps 2e-5 of the spread at 300."""
    chain = Chain(1, 256)
    chain.check(chain.linear(chain.norm(chain.x, "layer"), 5), dispatches=1, offset=100.0)


def test_rows_that_are_not_numbers() -> None:
    chain = Chain(3, 64)
    chain.graph.outputs = [chain.linear(chain.norm(chain.x, "rms"), 8).value]
    x = np.ones((3, 64), np.float32)
    x[0, 5], x[2, 7] = np.nan, np.inf
    delegate = Delegate(to_blob(chain.graph), chain.data.__getitem__)
    try:
        (y,) = delegate.execute([x])
    finally:
        delegate.close()
    assert np.isnan(y[0]).all() and np.isfinite(y[1]).all() and np.isnan(y[2]).all()


@pytest.mark.parametrize("bits", [32, 4, 8])
def test_a_gate_in_the_product(bits: int) -> None:
    """SwiGLU: silu(gate) × up of one product goes into the next."""
    chain = Chain(1, 2, 64)
    both = chain.linear(chain.x, 256)
    halves = [
        chain.then("aten.slice_copy.Tensor", (1, 2, 128), self=both, dim=2, start=start, end=start + 128, step=1)
        for start in (0, 128)
    ]
    gate = chain.then("aten.silu.default", (1, 2, 128), self=halves[0])
    gated = chain.then("aten.mul.Tensor", (1, 2, 128), self=gate, other=halves[1])
    chain.check(chain.linear(gated, 33, bits), dispatches=2)


def test_a_norm_with_another_reader_is_computed_once() -> None:
    chain = Chain(1, 64)
    normed = chain.norm(chain.x, "rms")
    chain.check(chain.linear(normed, 6), normed, dispatches=2)


def test_many_rows_have_a_kernel_for_the_norm() -> None:
    chain = Chain(5, 64)
    chain.check(chain.linear(chain.norm(chain.x, "rms"), 6), dispatches=2)


@pytest.mark.parametrize(
    ("depth", "width", "rows", "workers", "steps"),
    [
        (2048, 8, 1, 128, 2),
        (3072, 8, 1, 128, 3),
        (768, 4, 1, 96, 2),
        (1024, 4, 8, 64, 4),  # sums of 8 rows: no more fit
        (256, 8, 1, 32, 1),
        (128, 8, 1, 64, 0),  # 16 words
        (4096, 4, 1, 256, 4),
        (8192, 4, 1, 64, 0),
        (1000, 4, 1, 64, 0),
        (0, 4, 1, 64, 0),
        (256, 8, 16, 64, 0),  # 32 invocations would not hold the results of 16 rows
    ],
)
def test_how_invocations_share_a_walk(depth: int, width: int, rows: int, workers: int, steps: int) -> None:
    assert gemv.written_out(depth, width, rows) == {"WORKERS": workers, "STEPS": steps}


@pytest.mark.parametrize("bits", [32, 8, 4])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_walks_written_out(bits: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What GPUs do where there are few workgroups, on any device; with rows that the kernel has and no use for."""
    found = []

    def walk(depth: int, width: int, rows: int, groups: int, b: Any) -> dict[str, int]:
        found.append(gemv.written_out(depth, width, rows))
        return found[-1]

    monkeypatch.setattr("backend.ops.gemv.walk", walk)
    for depth in (256, 768, 2048):
        for kind in ("rms", "layer"):
            chain = Chain(1, min(rows, 3), depth)
            chain.check(chain.linear(chain.norm(chain.x, kind), 37, bits, bias=True), dispatches=1)
        chain = Chain(rows, depth)
        chain.check(chain.linear(chain.x, 6, bits), dispatches=1)
    assert any(way["STEPS"] for way in found)


def test_a_processor_does_not_do_it_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    processor = get_device().is_cpu
    chain = Chain(1, 64)
    chain.check(chain.linear(chain.norm(chain.x, "rms"), 6), dispatches=2 if processor else 1)
