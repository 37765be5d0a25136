"""pytest tests/ops/test_normed.py: products of many rows, by large tiles, that do the RMSNorm of their rows themselves.

Golden: the chain of operators in float64. The fusion is for GPUs: here the device says that it is one, and the
dispatches are counted. Tolerance 2e-5 of a row's largest result: sums of some hundred float32 products, whose terms are
larger than what they add up to (float32 eager: up to 4e-6 of it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from backend.blob import to_blob
from backend.graph import Node, Ref, TensorSpec
from backend.ops import tiles
from backend.runtime import delegate as delegates
from backend.runtime.delegate import Delegate
from tests.ops.test_gemv import Chain
from zoo.eager import interpret

Case = Callable[[Chain, Ref], Ref]
TILES = pytest.mark.parametrize("tile", tiles.TILES, ids=lambda tile: tile.name)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """gpu(tile, parts): the device is taken for a GPU whose products all go by that tile."""
    own = delegates.capabilities

    def switch(tile: tiles.Tile, parts: int = 1) -> None:
        rule = tiles.Fixed(tiles.Choice(tile, parts))
        able = {"on_processor": False, "tile_rule": rule}
        monkeypatch.setattr(delegates, "capabilities", lambda device: replace(own(device), **able))

    return switch


def run(chain: Chain, out: Ref, x: np.ndarray, times: int = 1) -> tuple[list[np.ndarray], list[str]]:
    """Results of so many runs, and the kernels."""
    chain.graph.outputs = [out.value]
    delegate = Delegate(to_blob(chain.graph), chain.data.__getitem__)
    try:
        results = [np.array(delegate.execute([x])[0]) for _ in range(times)]
        return results, [step.template for step in delegate.plan([x.shape]).steps]
    finally:
        delegate.close()


def golden(chain: Chain, x: np.ndarray, double: bool = True) -> np.ndarray:
    held = {
        spec.constant: torch.from_numpy(
            np.frombuffer(chain.data[spec.constant], spec.dtype).reshape(spec.concrete({})).copy()
        )
        for spec in chain.graph.values
        if spec.constant is not None
    }
    return interpret(chain.graph, [torch.from_numpy(x)], held, double=double)[0].numpy()


def check(
    chain: Chain, out: Ref, kernels: list[str], times: int = 1, change: Callable[[np.ndarray], None] | None = None
) -> None:
    x = chain.rng.standard_normal(chain.graph.values[chain.x.value].shape, dtype=np.float32)
    if change is not None:
        change(x)
    results, found = run(chain, out, x, times)
    assert found == kernels
    wanted = golden(chain, x)
    bound = 2e-5 * np.abs(wanted).max(-1, keepdims=True)
    assert (np.abs(results[0] - wanted) <= bound).all(), (np.abs(results[0] - wanted) / bound).max()
    assert all(result.tobytes() == results[0].tobytes() for result in results)


FORMS = {"f32": 32, "4w": 4, "8w": 8}
CASES = [(tile, bits) for at, tile in enumerate(tiles.TILES) for bits in (32, (4, 8)[at % 2])]


@pytest.mark.parametrize(("tile", "bits"), CASES, ids=lambda item: getattr(item, "name", str(item)))
def test_tiles(tile: tiles.Tile, bits: int, gpu: Any) -> None:
    """Edges on all sides; the depth is no multiple of a step of all slices; the same bits every time."""
    gpu(tile)
    chain = Chain(1, 139, 196 if bits == 32 else 224)
    out = chain.linear(chain.norm(chain.x, "rms"), 133, bits, bias=True)
    check(chain, out, ["gemm_wide"], times=2)


@pytest.mark.parametrize(
    ("rows", "depth", "cols"), [(17, 12, 17), (18, 16, 33), (257, 20, 19), (33, 1028, 40), (19, 64, 260)]
)
@pytest.mark.parametrize("tile", [tiles.HUGE, tiles.TALL, tiles.SMALL_QUARTERED], ids=lambda tile: tile.name)
def test_sizes(rows: int, depth: int, cols: int, tile: tiles.Tile, gpu: Any) -> None:
    gpu(tile)
    chain = Chain(rows, depth)
    check(chain, chain.linear(chain.norm(chain.x, "rms"), cols, bias=True), ["gemm_wide"])


def test_a_norm_without_weights(gpu: Any) -> None:
    gpu(tiles.MEDIUM)
    chain = Chain(2, 20, 72)
    check(chain, chain.linear(chain.norm(chain.x, "rms", weight=False), 24), ["gemm_wide"])


def _residual(chain: Chain, product: Ref) -> Ref:
    return chain.then("aten.add.Tensor", (1, 40, 128), self=chain.x, other=product)


def _activated(chain: Chain, product: Ref) -> Ref:
    return chain.then("aten.silu.default", (1, 40, 128), self=product)


def _both(chain: Chain, product: Ref) -> Ref:
    return _residual(chain, _activated(chain, product))


@pytest.mark.parametrize("after", [_residual, _activated, _both])
@pytest.mark.parametrize("bits", FORMS.values(), ids=FORMS)
def test_what_follows_sees_the_scaled_product(after: Case, bits: int, gpu: Any) -> None:
    gpu(tiles.MEDIUM_QUARTERED)
    chain = Chain(1, 40, 128)
    out = after(chain, chain.linear(chain.norm(chain.x, "rms"), 128, bits, bias=True))
    check(chain, out, ["gemm_wide"])


@pytest.mark.parametrize("tile", [tiles.MEDIUM, tiles.SMALL_QUARTERED], ids=lambda tile: tile.name)
def test_rows_of_any_size(tile: tiles.Tile, gpu: Any) -> None:
    """1e-18: the norm's eps decides. 1e18: so does the sum of squares, 1e38. A row of zeros gives the bias."""

    def scale(x: np.ndarray) -> None:
        x[3] *= 1e-18
        x[7] *= 1e18
        x[9] *= 1e8
        x[21] = 0

    gpu(tile)
    chain = Chain(23, 68)
    check(chain, chain.linear(chain.norm(chain.x, "rms"), 21, bias=True), ["gemm_wide"], change=scale)


@pytest.mark.parametrize("size", [3e18, 1e25, 1e35])
def test_squares_that_overflow(size: float, gpu: Any) -> None:
    """Float32 eager scales such a row by 1 / inf."""
    gpu(tiles.MEDIUM)
    chain = Chain(20, 64)
    out = chain.linear(chain.norm(chain.x, "rms"), 24)
    x = chain.rng.standard_normal((20, 64), dtype=np.float32)
    x[5] = np.sign(x[5]) * size
    ((y,), kernels) = run(chain, out, x)
    assert kernels == ["gemm_wide"]
    eager = golden(chain, x, double=False)
    assert (eager[5] == 0).all() and (y[5] == 0).all()
    np.testing.assert_allclose(y, eager, rtol=0, atol=2e-5 * np.abs(eager).max())


@TILES
def test_rows_that_are_not_numbers(tile: tiles.Tile, gpu: Any) -> None:
    """In the last row, which stands in for those beyond the edge, and in the last step, which is not whole."""
    gpu(tile)
    chain = Chain(18, 68)
    out = chain.linear(chain.norm(chain.x, "rms"), 20, bias=True)
    x = np.ones((18, 68), np.float32)
    x[2, 67], x[9, 0], x[17, 66] = np.nan, np.inf, -np.inf
    ((y,), kernels) = run(chain, out, x)
    assert kernels == ["gemm_wide"]
    odd = np.isin(np.arange(18), (2, 9, 17))
    assert np.isnan(y[odd]).all() and np.isfinite(y[~odd]).all()


@pytest.mark.parametrize("bits", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("tile", [tiles.LARGE, tiles.SMALL_QUARTERED], ids=lambda tile: tile.name)
def test_a_sum_in_parts(tile: tiles.Tile, bits: int, gpu: Any) -> None:
    """Each part knows its squares; they are added, and scale, where the parts are. The last part is shorter."""
    gpu(tile, 3)
    chain = Chain(139, 352)
    out = chain.linear(chain.norm(chain.x, "rms"), 133, bits, bias=True)
    check(chain, out, ["gemm_wide", "pointwise"], times=2)


def test_a_mean_is_not_taken_off_afterwards(gpu: Any) -> None:
    gpu(tiles.MEDIUM)
    chain = Chain(20, 64)
    check(chain, chain.linear(chain.norm(chain.x, "layer"), 24), ["norm", "gemm_wide"])


@pytest.mark.parametrize("bits", FORMS.values(), ids=FORMS)
def test_a_depth_that_is_not_read_by_four(bits: int, gpu: Any) -> None:
    gpu(tiles.MEDIUM)
    chain = Chain(20, 66 if bits == 32 else 64)
    if bits != 32:
        part = chain.then("aten.slice_copy.Tensor", (20, 32), self=chain.x, dim=1, start=1, end=33, step=1)
        check(chain, chain.linear(chain.norm(part, "rms"), 24, bits), ["pointwise", "gemm_wide"])
    else:
        check(chain, chain.linear(chain.norm(chain.x, "rms"), 24), ["norm", "gemm_wide"])


@pytest.mark.parametrize(("rows", "kernel"), [(20, "gemm_wide"), (2, "gemv")])
def test_a_half_product_of_a_float32_norm(rows: int, kernel: str, gpu: Any) -> None:
    """The rows are never rounded to float16; 1e-3: weights and golden are the same, the result is rounded once."""
    gpu(tiles.MEDIUM)
    chain = Chain(rows, 64)
    graph, normed = chain.graph, chain.norm(chain.x, "rms")
    weight = chain.rng.standard_normal((24, 64), dtype=np.float32).astype(np.float16)
    chain.data["half"] = weight.tobytes()
    held = Ref(graph.add_value(TensorSpec("float16", (24, 64), "half")))
    narrow, out = (Ref(graph.add_value(TensorSpec("float16", (rows, size)))) for size in (64, 24))
    graph.nodes.append(Node("aten._to_copy.default", {"self": normed, "dtype": "float16"}, (narrow.value,)))
    graph.nodes.append(Node("aten.linear.default", {"input": narrow, "weight": held, "bias": None}, (out.value,)))
    x = chain.rng.standard_normal((rows, 64), dtype=np.float32)
    ((y,), kernels) = run(chain, out, x)
    assert kernels == [kernel] and y.dtype == np.float16
    factor = np.frombuffer(chain.data["c0"], np.float32).astype(np.float64)
    wanted = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * factor @ weight.T
    np.testing.assert_allclose(y, wanted, rtol=1e-3, atol=1e-3)


def test_a_norm_with_two_readers_is_computed_once(gpu: Any) -> None:
    gpu(tiles.MEDIUM)
    chain = Chain(20, 64)
    normed = chain.norm(chain.x, "rms")
    both = chain.then("aten.add.Tensor", (20, 24), self=chain.linear(normed, 24), other=chain.linear(normed, 24))
    check(chain, both, ["norm", "gemm_wide", "gemm_wide"])


def test_a_transposed_weight(gpu: Any) -> None:
    """A weight whose rows are not read four at a time."""
    gpu(tiles.MEDIUM)
    chain = Chain(20, 64)
    turned = chain.then("aten.permute.default", (33, 64), self=chain.constant(64, 33), dims=[1, 0])
    out = chain.then("aten.linear.default", (20, 33), input=chain.norm(chain.x, "rms"), weight=turned, bias=None)
    check(chain, out, ["gemm_wide"])
