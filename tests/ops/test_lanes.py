"""pytest tests/ops/test_lanes.py: products on processors, by gemm_lanes and by what there is without subgroups.

Tolerances as in test_matmul.py. With all-positive data every sum grows with its depth, so that an error in its last
digits is one of the largest value: sums of at most 4096 in a row leave 3e-6 of it, of 20000 in a row up to 2e-5.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backend.ops import attention_products, lanes
from backend.runtime.builder import lower_graph
from backend.runtime.capabilities import Capabilities
from tests.ops.harness import assert_close, build, check_op, run_graph, run_op
from tests.ops.test_quantized import Weight, linear_graph

SUMS = {"atol": 1e-4, "rtol": 1e-4}
HALF = {"atol": 2e-3, "rtol": 2e-3}
CLOSE = {"atol": 1e-5, "rtol": 1e-5}  # means of v, of size 1, by weights that are right to 1e-6
WITH = Capabilities(features=frozenset({"subgroup"}), on_processor=True)


@pytest.fixture(params=["lanes", "without"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "without":
        monkeypatch.setattr(lanes, "usable", lambda b: False)
    return str(request.param)


def templates(name: str, *args: torch.Tensor, can: Capabilities = WITH) -> list[str]:
    return [dispatch.template for dispatch in lower_graph(build(name, args, {}, ())[0], {}, can).dispatches]


def run_linear(weight: Weight, x: np.ndarray) -> np.ndarray:
    graph, data = linear_graph(weight, x.shape)
    return run_graph(graph, [x], data)[0]


def test_which_kernel() -> None:
    wide, narrow = torch.randn(20, 257), torch.randn(20, 16)
    assert templates("aten.mm.default", torch.randn(3, 20), wide) == ["gemm_lanes"]
    assert templates("aten.mm.default", wide.T, narrow) == ["gemm_lanes"]  # turned: few columns
    assert templates("aten.mm.default", narrow.T, narrow) == ["gemv"]
    assert templates("aten.mm.default", torch.randn(40, 20), wide, can=Capabilities(on_processor=True)) == ["gemm"]
    assert "gemm_lanes" not in templates(
        "aten.mm.default", torch.randn(40, 20), wide, can=Capabilities(features=WITH.features)
    )
    assert templates("aten.mm.default", wide.T.int(), torch.ones(20, 30).int()) == ["gemm"]


@pytest.mark.parametrize("rows", [1, 7, 21])
@pytest.mark.parametrize("depth", [12, 29])  # whole steps of 4, or not
def test_layouts(way: str, rows: int, depth: int) -> None:
    for cols in (264, 203):
        a, b = torch.randn(rows, depth), torch.randn(depth, cols)
        for left in (a, a.T.contiguous().T):
            for right in (b, b.T.contiguous().T):
                check_op("aten.mm.default", left, right, **SUMS)
        check_op("aten.mm.default", b.T.contiguous(), a.T, **SUMS)
    check_op("aten.mm.default", a.half(), b.half(), **HALF)
    check_op("aten.linear.default", a, torch.randn(cols, depth), torch.randn(cols), **SUMS)


def test_batches(way: str) -> None:
    x, y = torch.randn(2, 3, 7, 20), torch.randn(3, 20, 70)
    check_op("aten.matmul.default", x, y, **SUMS)
    check_op("aten.matmul.default", x.transpose(0, 1), y[:, None], **SUMS)
    check_op("aten.baddbmm.default", torch.randn(3, 7, 70), x[1], y, beta=0.5, alpha=2.0, **SUMS)


def test_infinities_stay_in_their_rows_and_columns(way: str) -> None:
    """Nothing beyond the depth, the rows or the columns counts, not even as 0 x inf."""
    a, b = torch.randn(18, 21), torch.randn(21, 259)
    a[17], b[:, 258] = torch.inf, torch.inf
    (found,) = run_op("aten.mm.default", a, b)
    assert np.isfinite(found[:17, :258]).all() and not np.isfinite(found[17]).any()


@pytest.mark.parametrize("rows", [1, 20])
def test_deep_sums_keep_their_digits(way: str, rows: int) -> None:
    a, b = torch.rand(rows, 20000), torch.rand(20000, 260)
    (found,) = run_op("aten.mm.default", a, b)
    golden = (a.double() @ b.double()).numpy()
    assert_close(found, golden, atol=3e-6 * golden.max(), rtol=0)


@pytest.mark.parametrize("rows", [1, 20])
def test_deep_sums_of_codes_keep_their_digits(rows: int) -> None:
    weight = Weight(260, 20000, 8, 20000)
    weight.codes = np.abs(weight.codes.astype(np.int16)).clip(0, 127).astype(np.int8)
    x = np.random.default_rng(0).random((rows, 20000), dtype=np.float32)
    golden = x.astype(np.float64) @ weight.dense().T
    assert_close(run_linear(weight, x), golden, atol=3e-6 * golden.max(), rtol=0)


@pytest.mark.parametrize("most", [12000, 2**21])  # scores of some queries at a time, or of all
def test_attention_without_a_mask(way: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_products, "MOST_SCORES", most)
    monkeypatch.setattr(attention_products, "CAUSAL_BLOCK", 16)
    sdpa = "aten.scaled_dot_product_attention.default"
    q, k, v = torch.randn(2, 6, 37, 20), torch.randn(2, 6, 45, 20), torch.randn(2, 6, 45, 12)
    for causal in (False, True):
        check_op(sdpa, q, k, v, is_causal=causal, **CLOSE)
        check_op(sdpa, q, k[:, :2], v[:, :2], is_causal=causal, enable_gqa=True, scale=0.3, **CLOSE)
        check_op(sdpa, q, k[:, :, :10], v[:, :, :10], is_causal=causal, **CLOSE)
        check_op(sdpa, q[:1, :1], k[:1, :1], v, is_causal=causal, **CLOSE)  # one score for all heads of v
    check_op(sdpa, q[0, 0], k[0, 0], v[0, 0], **CLOSE)
    check_op(sdpa, q.half(), k.half(), v.half(), **HALF)


def test_which_attention() -> None:
    q = torch.randn(2, 30, 20)
    sdpa = "aten.scaled_dot_product_attention.default"
    assert templates(sdpa, q, q, q) == ["gemm_lanes", "softmax", "gemm_lanes"]
    assert templates(sdpa, q, q, q, can=Capabilities(on_processor=True))[0] == "attention"


@pytest.mark.parametrize("bits,group,symmetric", [(4, 32, True), (4, 96, False), (8, 96, True), (8, 32, False)])
@pytest.mark.parametrize("rows", [2, 19])
def test_codes(way: str, bits: int, group: int, symmetric: bool, rows: int) -> None:
    weight = Weight(203, 96, bits, group, symmetric)
    x = np.random.default_rng(0).standard_normal((rows, 96), dtype=np.float32)
    found = run_linear(weight, x)
    golden = x.astype(np.float64) @ weight.dense().T
    assert_close(found, golden, atol=1e-5 * np.abs(golden).max(), rtol=0)
