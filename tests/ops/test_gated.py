"""pytest tests/ops/test_gated.py: SwiGLU of the two halves of a product, in its store and elsewhere.

Golden: the chain of operators in float64. The device says that it is a GPU, where the product goes by large tiles.
Tolerance 2e-5 of a row's largest result, as in test_normed.py: sums of float32 products, then silu and a product.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from backend.blob import to_blob
from backend.graph import Graph, Node, Ref, TensorSpec
from backend.ops import registry, tiles
from backend.runtime.delegate import Delegate
from tests.ops.test_gemv import Chain
from tests.ops.test_normed import check, gpu, run

__all__ = ["gpu"]


def swiglu(chain: Chain, both: Ref) -> Ref:
    *lead, cols = chain.graph.values[both.value].shape
    return chain.then("zoo.swiglu", (*lead, cols // 2), input=both)


# With one and two buffers, and of each way of sharing the sums.
CASES = [
    (tiles.HUGE, 32), (tiles.LARGE, 4), (tiles.LONG, 32), (tiles.MEDIUM, 8), (tiles.SMALL_HALVED, 32),
    (tiles.SMALL_QUARTERED, 32),
]  # fmt: skip


@pytest.mark.parametrize(("tile", "bits"), CASES, ids=lambda item: getattr(item, "name", str(item)))
def test_tiles(tile: tiles.Tile, bits: int, gpu: Any) -> None:
    """Halves of 133 columns: more than a tile's, with an edge on all sides; the norm before goes along."""
    gpu(tile)
    chain = Chain(1, 139, 96)
    out = swiglu(chain, chain.linear(chain.norm(chain.x, "rms"), 266, bits))
    check(chain, out, ["gemm_wide"], times=2)


@pytest.mark.parametrize("half", [9, 32, 36, 100])
@pytest.mark.parametrize("tile", [tiles.MEDIUM, tiles.SMALL_HALVED], ids=lambda tile: tile.name)
def test_sizes(half: int, tile: tiles.Tile, gpu: Any) -> None:
    gpu(tile)
    chain = Chain(2, 21, 68)
    check(chain, swiglu(chain, chain.linear(chain.x, 2 * half)), ["gemm_wide"])


@pytest.mark.parametrize(("half", "kernels"), [(40, ["gemm_wide"]), (34, ["gemm_wide", "pointwise"])])
def test_a_weight_that_is_read_across(half: int, kernels: list[str], gpu: Any) -> None:
    """Four columns at a time: a half that is not divisible by 4 would cut one in two."""
    gpu(tiles.MEDIUM)
    chain = Chain(20, 64)
    turned = chain.then("aten.permute.default", (2 * half, 64), self=chain.constant(64, 2 * half), dims=[1, 0])
    both = chain.then("aten.linear.default", (20, 2 * half), input=chain.x, weight=turned, bias=None)
    check(chain, swiglu(chain, both), kernels)


def test_batches(gpu: Any) -> None:
    gpu(tiles.SMALL_HALVED)
    chain = Chain(3, 20, 24)
    out = chain.then("aten.matmul.default", (3, 20, 80), self=chain.x, other=chain.constant(3, 24, 80))
    check(chain, swiglu(chain, out), ["gemm_wide"])


@pytest.mark.parametrize("bits", [32, 4])
def test_a_sum_in_parts_is_added_and_gated_at_once(bits: int, gpu: Any) -> None:
    gpu(tiles.MEDIUM, 2)
    chain = Chain(20, 256)
    check(chain, swiglu(chain, chain.linear(chain.norm(chain.x, "rms"), 80, bits)), ["gemm_wide", "pointwise"])


def test_a_bias_comes_before_the_gate(gpu: Any) -> None:
    gpu(tiles.MEDIUM)
    chain = Chain(20, 64)
    check(chain, swiglu(chain, chain.linear(chain.x, 80, bias=True)), ["gemm_wide", "pointwise"])


def test_what_follows_is_in_the_store_too(gpu: Any) -> None:
    gpu(tiles.MEDIUM_QUARTERED)
    chain = Chain(20, 64)
    gated = swiglu(chain, chain.linear(chain.x, 128))
    check(chain, chain.then("aten.add.Tensor", (20, 64), self=gated, other=chain.x), ["gemm_wide"])


def test_halves_of_heads_are_not_halves_of_columns(gpu: Any) -> None:
    """A product that is reshaped before it is gated."""
    gpu(tiles.MEDIUM)
    chain = Chain(20, 64)
    heads = chain.then("aten.view_copy.default", (20, 4, 32), self=chain.linear(chain.x, 128), size=[20, 4, 32])
    check(chain, chain.then("zoo.swiglu", (20, 4, 16), input=heads), ["gemm_wide", "pointwise"])


def test_a_product_that_is_read_twice(gpu: Any) -> None:
    gpu(tiles.MEDIUM)
    chain = Chain(20, 64)
    both = chain.linear(chain.x, 128)
    part = chain.then("aten.slice_copy.Tensor", (20, 64), self=both, dim=1, start=0, end=64, step=1)
    out = chain.then("aten.add.Tensor", (20, 64), self=swiglu(chain, both), other=part)
    check(chain, out, ["gemm_wide", "pointwise"])


def test_without_tiles() -> None:
    chain = Chain(2, 20, 64)
    _, kernels = run(chain, out := swiglu(chain, chain.linear(chain.x, 88)), np.ones((2, 20, 64), np.float32))
    check(chain, out, kernels)
    assert kernels[-1] in ("pointwise", "gemm_wide")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_alone(dtype: str) -> None:
    """Of a tensor: what silu gives at its limits, and a rounding to float16 at the end."""
    graph = Graph([TensorSpec(dtype, (3, 8)), TensorSpec(dtype, (3, 4))], inputs=[0], outputs=[1])
    graph.nodes = [Node("zoo.swiglu", {"input": Ref(0)}, (1,))]
    x = np.array([[0, -1e4, np.inf, np.nan, 1, 1, 1, 1], [-200, 200, -1, 1, 2, 3, 4, 5], range(8)], dtype)
    delegate = Delegate(to_blob(graph), {}.__getitem__)
    (y,) = delegate.execute([x])
    delegate.close()
    wide = x[:, :4].astype(np.float64)
    with np.errstate(over="ignore"):
        wanted = wide / (1 + np.exp(-wide)) * x[:, 4:]
    bound = 1e-3 if dtype == "float16" else 1e-6  # one rounding to float16; a driver's exp
    np.testing.assert_allclose(y, wanted, rtol=bound, atol=1e-30)


@pytest.mark.parametrize(
    ("shape", "out", "dtype"), [((3, 8), (3, 8), "float32"), ((3, 7), (3, 3), "float32"), ((3, 8), (3, 4), "int32")]
)
def test_refused(shape: tuple[int, ...], out: tuple[int, ...], dtype: str) -> None:
    graph = Graph([TensorSpec(dtype, shape), TensorSpec(dtype, out)])
    assert registry.refusal(graph.call(Node("zoo.swiglu", {"input": Ref(0)}, (1,)))) is not None
