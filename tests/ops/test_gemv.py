"""pytest tests/ops/test_gemv.py: products of few rows that take the norm, or pointwise work, before them along; walks
along the depth that are written out.

Golden: the chain of operators in float64. The fusion is for GPUs; here it is switched on, and the dispatches counted.
Tolerance 2e-5 of the largest result: sums of float32 products. Walks of batches have those of test_matmul.py, for the
same reasons; whole numbers are exact.
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
from tests.ops.harness import EXACT
from tests.ops.test_matmul import HALF, SUMS, check_chain
from tests.ops.test_quantized import Weight, check_linear
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


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Walks are written out as GPUs do where there are few workgroups: the width and the steps of each."""
    found = []

    def walk(depth: int, width: int, rows: int, groups: int, b: Any) -> dict[str, int]:
        way = gemv.written_out(depth, width, rows)
        found.append((width, way["STEPS"]))
        return way

    monkeypatch.setattr("backend.ops.gemv.walk", walk)
    monkeypatch.setattr("backend.ops.lanes.usable", lambda b: False)  # a processor's own kernel for many results
    return found


@pytest.mark.parametrize("bits", [32, 8, 4])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_walks_written_out(bits: int, rows: int, written: list[tuple[int, int]]) -> None:
    """On any device; with rows that the kernel has and no use for."""
    for depth in (256, 768, 2048):
        for kind in ("rms", "layer"):
            chain = Chain(1, min(rows, 3), depth)
            chain.check(chain.linear(chain.norm(chain.x, kind), 37, bits, bias=True), dispatches=1)
        chain = Chain(rows, depth)
        chain.check(chain.linear(chain.x, 6, bits), dispatches=1)
    assert any(steps for _, steps in written)


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Whole ones so large that their sums wrap."""
    if dtype == torch.int32:
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).int()
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
@pytest.mark.parametrize(("rows", "cols"), [(1, 37), (3, 37), (8, 9), (40, 2)])
@pytest.mark.parametrize("depth", [256, 768, 1024])
def test_walks_written_out_of_batches(
    dtype: torch.dtype, rows: int, cols: int, depth: int, written: list[tuple[int, int]]
) -> None:
    """Batches in one dim and two that broadcast; a matrix that begins where no vec4 does; rows read one by one. With
    fewer columns than rows, the kernel's rows are columns."""
    torch.manual_seed(0)
    many, few, (matrix, part) = (3, rows, depth), (2, 1, rows, depth), ((3, cols, depth), (3, cols, depth + 4))

    def turn(result: str, of: str) -> tuple[str, str, dict[str, Any]]:
        return result, "aten.permute.default", {"self": of, "dims": [0, 2, 1]}

    def times(left: str) -> tuple[str, str, dict[str, Any]]:
        return "out", "aten.matmul.default", {"self": left, "other": "w"}

    cut = ("cut", "aten.slice.Tensor", {"self": "y", "dim": 2, "start": 1, "end": depth + 1})
    for left, right, *steps in (
        (many, matrix, turn("w", "y"), times("x")),
        (few, matrix, turn("w", "y"), times("x")),
        (many, part, cut, turn("w", "cut"), times("x")),
        ((3, depth, rows), matrix, turn("w", "y"), turn("t", "x"), times("t")),
    ):
        tolerance = {torch.float32: SUMS, torch.float16: HALF, torch.int32: EXACT}[dtype]
        inputs = {"x": numbers(dtype, *left), "y": numbers(dtype, *right)}
        assert check_chain(inputs, *steps, **tolerance) == ["gemv"]
    # What begins where no vec4 does is read one by one, as a matrix or as rows.
    assert {width for width, _ in written} == ({1, 4} if rows <= cols else {4})
    assert all(steps for width, steps in written if width == 4)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_walks_written_out_of_halves(bits: int, rows: int, written: list[tuple[int, int]]) -> None:
    for depth in (256, 768, 1024):
        check_linear(Weight(37, depth, bits, 32, dtype="float16"), 1, rows, dtype="float16", bias=True)
    assert all(steps for _, steps in written)


def test_a_processor_does_not_do_it_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    processor = get_device().is_cpu
    chain = Chain(1, 64)
    chain.check(chain.linear(chain.norm(chain.x, "rms"), 6), dispatches=2 if processor else 1)
