"""pytest tests/ops/test_sort.py: topk and sort; values and indices are exact."""

import math

import numpy as np
import pytest
import torch
from harness import check_op, refusal_of, run_op

from backend.ops import sort

INF, NAN = math.inf, math.nan


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    "shape,axis", [((7,), 0), ((3, 5, 7), 1), ((3, 300), -1), ((257, 3), 0), ((2, 1000), 1), ((), 0)]
)
def test_sort_and_topk(shape, axis):
    x = torch.randn(shape)
    n = shape[axis] if shape else 1
    for flag in (False, True):
        check_op("aten.sort.default", x, axis, flag)
        check_op("aten.sort.stable", (x * 2).int(), stable=True, dim=axis, descending=flag)
        check_op("aten.sort.stable", (x * 2).half(), stable=True, dim=axis, descending=flag)
        for k in {0, 1, n // 2, n}:
            check_op("aten.topk.default", x, k, axis, flag)


def test_sort_of_nan_and_infinities():
    x = torch.tensor([2.0, NAN, -INF, INF, -0.0, 0.0, NAN, -3])
    for flag in (False, True):
        check_op("aten.sort.stable", x, stable=True, dim=0, descending=flag)
        check_op("aten.topk.default", x[[0, 1, 2, 3, 7]], 4, 0, flag)
    check_op("aten.sort.stable", x > 0, stable=True, dim=0)
    check_op("aten.sort.default", torch.zeros(0, 4), 0)
    check_op("aten.sort.default", torch.zeros(4, 0), 1)
    assert "16384" in refusal_of("aten.sort.default", torch.zeros(16385))


def _first(x, k, axis, largest):
    """The golden: a stable sort, which NaN is the greatest for, as for topk."""
    values, indices = torch.sort(x, dim=axis, descending=largest, stable=True)
    return values.narrow(axis, 0, k).numpy(), indices.narrow(axis, 0, k).numpy()


@pytest.mark.parametrize(
    "shape,axis,k",
    [
        ((151936,), 0, 64),
        ((16385,), 0, 1774),
        ((1, 65537), 1, 1),
        ((2, 5003), -1, 20),
        ((5003, 3), 0, 7),
        ((2, 1031, 3), 1, 2),
    ],
)
def test_topk_of_long_rows_by_blocks(shape, axis, k):
    """Exact, and equal elements in their order: many are equal here, across the bounds of blocks and at the k-th."""
    assert sort._block(shape[axis], k)
    x = torch.randint(-50, 50, shape)
    for given in (x.int(), x.float() / 4, x.half(), torch.randn(shape)):
        for largest in (False, True):
            for actual, golden in zip(
                run_op("aten.topk.default", given, k, axis, largest), _first(given, k, axis, largest), strict=True
            ):
                np.testing.assert_array_equal(actual, golden)


@pytest.mark.parametrize("where", [[0, 4999, 5000], list(range(4990, 5003)), []])
def test_topk_by_blocks_of_nan_and_infinities(where):
    """Special elements at the ends, in the last block, which is a part, and rows of nothing else."""
    x = torch.randn(5003)
    for special in (NAN, INF, -INF, -0.0):
        for given in (x, torch.full_like(x, special), torch.full_like(x, -INF)):
            given = given.clone()
            given[where] = special
            for largest in (False, True):
                values, indices = run_op("aten.topk.default", given, 20, 0, largest)
                golden, places = _first(given, 20, 0, largest)
                np.testing.assert_array_equal(values, golden)
                np.testing.assert_array_equal(indices, places)


def test_topk_of_integer_extremes_by_blocks():
    x = torch.tensor([2**31 - 1, -(2**31), 0], dtype=torch.int32).repeat(700)
    for largest in (False, True):
        for k in (3, 33):
            for actual, golden in zip(
                run_op("aten.topk.default", x, k, 0, largest), _first(x, k, 0, largest), strict=True
            ):
                np.testing.assert_array_equal(actual, golden)


def test_topk_limits():
    assert "16384" in refusal_of("aten.topk.default", torch.zeros(20000), 15000)
    assert refusal_of("aten.topk.default", torch.zeros(10**6), 64) is None
    assert refusal_of("aten.topk.default", torch.zeros(10**6), 0) is None
    for n, k in ((16385, 1774), (20000, 4096), (32768, 3600)):  # too many to be ranked whole
        assert refusal_of("aten.topk.default", torch.zeros(n), k) is None and sort._ranked(n, k) <= sort.MAX_LENGTH
    for n in (1025, 5003, 151936, 10**6):
        for k in (1, 2, 20, 64, 500, n - 1):
            block = sort._block(n, k)
            assert not block or (k <= -(-n // block) and sort._ranked(n, k) < n)
