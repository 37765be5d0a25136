"""pytest tests/ops/test_views.py: views, copies and casts; everything is exact."""

import numpy as np
import pytest
import torch
from harness import check_op, refusal_of, run_op

from backend.ops import registry
from backend.runtime import pointwise

END = 2**63 - 1
X = torch.arange(2 * 3 * 5, dtype=torch.float32).reshape(2, 3, 5)

CASES = [
    ("view_copy.default", X, [6, 5]),
    ("view_copy.default", X, [-1]),
    ("view_copy.default", X, [1, 30, 1, 1]),
    ("reshape.default", torch.tensor(3.0), [1, 1]),
    ("unsqueeze_copy.default", X, -1),
    ("unsqueeze_copy.default", X, 0),
    ("squeeze_copy.default", X[:1, :, :1]),
    ("squeeze_copy.dims", X[:1], [0, 1]),
    ("squeeze.dim", torch.ones(8, 1), -1),  # o7
    ("flatten.using_ints", X, -2, -1),
    ("flatten.using_ints", X[0, 0], 0, -1),
    ("permute_copy.default", X, [2, 0, 1]),
    ("permute_copy.default", X, [-1, -3, -2]),
    ("permute_copy.default", torch.tensor(2.0), []),
    ("transpose_copy.int", X, -1, 0),
    ("transpose.int", X, 1, 1),
    ("t_copy.default", X[0]),
    ("t_copy.default", X[0, 0]),
    ("expand_copy.default", X[:1], [4, 3, 5]),
    ("expand_copy.default", X[:, :1], [7, 2, -1, 5]),
    ("expand_copy.default", torch.tensor(2.0), [3, 0]),
    ("slice_copy.Tensor", X, 1, 1, END, 1),
    ("slice_copy.Tensor", X, -1, -3, -1, 2),
    ("slice_copy.Tensor", X, 2, 4, 2, 1),
    ("slice_copy.Tensor", X, 0, -100, 100, 1),
    ("slice_copy.Tensor", X, 2, None, None, 3),
    ("select_copy.int", X, 1, -1),
    ("select_copy.int", X, -1, 2),
    ("select_copy.int", X[0, 0], 0, -5),
    ("narrow_copy.default", X, 2, 1, 3),
    ("narrow.default", X, 1, -2, 2),
    ("flip.default", X, [0, -1]),
    ("flip.default", X, []),
    ("flip.default", torch.zeros(3, 0), [1]),
    ("split_with_sizes_copy.default", X, [1, 4], -1),
    ("split_with_sizes.default", X, [0, 3, 0], 1),
    ("split_copy.Tensor", X, 2, 2),
    ("split.Tensor", X, 3, 1),
    ("unbind_copy.int", X, -2),
    ("repeat.default", X, [2, 1, 3]),
    ("repeat.default", X[0], [2, 2, 1, 1]),
    ("repeat.default", torch.tensor(1.0), [3]),
    ("repeat_interleave.self_int", X, 3, 1),
    ("repeat_interleave.self_int", X, 2),
    ("repeat_interleave.self_int", X, 2, -1),
    ("clone.default", X),
    ("alias_copy.default", X),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[2:]}")
def test_views(case):
    name, *args = case
    check_op(f"aten.{name}", *args)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool])
def test_every_dtype_moves(dtype):
    x = (torch.arange(30).reshape(5, 6) % 7).to(dtype)
    check_op("aten.permute_copy.default", x, [1, 0])
    check_op("aten.slice_copy.Tensor", x, 1, 1, 6, 2)
    check_op("aten.flip.default", x, [0])


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 4), ()])
def test_d3_empty_and_scalar(shape):
    x = torch.ones(shape)
    check_op("aten.clone.default", x)
    check_op("aten.unsqueeze_copy.default", x, 0)
    check_op("aten.view_copy.default", x, [x.numel()])
    check_op("aten.permute_copy.default", x, list(range(len(shape)))[::-1])
    check_op("aten.repeat.default", x, [2] * max(1, len(shape)))


def test_o8_expanding_one_tensor_to_two_shapes():
    x = torch.tensor([7.0])
    check_op("aten.expand_copy.default", x, [1, 6])
    check_op("aten.expand_copy.default", x, [3, 2])


def test_r2_more_groups_than_one_dimension_holds(monkeypatch):
    monkeypatch.setattr(pointwise, "WORKGROUP", 64)
    monkeypatch.setattr(pointwise, "ITEMS", 1)  # 65536 groups, one more than fit
    x = torch.arange(4194241, dtype=torch.float32)
    (y,) = run_op("aten.flip.default", x, [0])
    np.testing.assert_array_equal(y, x.numpy()[::-1])


PAIRS = [torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


@pytest.mark.parametrize("target", PAIRS, ids=str)
@pytest.mark.parametrize("source", PAIRS, ids=str)
def test_i2_casts_of_all_pairs(source, target):
    """Values that both types hold, and where the target is narrower, those that wrap as torch's do."""
    x = torch.tensor([0, 1, 2, 100, 127]).to(source)
    if source in (torch.int64, torch.int32, torch.int16):
        x = torch.cat((x, torch.tensor([-1, 200, 300, -129]).to(source)))
    check_op("aten._to_copy.default", x, dtype=target)


def test_float_casts_truncate_and_nan_is_true():
    check_op("aten._to_copy.default", torch.tensor([1.9, -1.9, 0.5, -0.5]), dtype=torch.int32)
    check_op("aten._to_copy.default", torch.tensor([float("nan"), 0.0, -0.0, 1e-30]), dtype=torch.bool)
    check_op("aten._to_copy.default", torch.tensor([65519.0, 65520.0, 1e-8, -float("inf")]), dtype=torch.float16)


def test_o10_integers_become_numbers_not_bits():
    check_op("aten._to_copy.default", torch.tensor([1, 2, 3], dtype=torch.int32), dtype=torch.float32)


def test_refusals():
    assert refusal_of("aten._to_copy.default", X, dtype=torch.float64) == "no kernel for float64"
    assert refusal_of("aten.clone.default", X.double()) == "no kernel for float64"
    assert refusal_of("aten.dropout.default", X, 0.5, True) == "dropout is for training"
    assert registry.find("aten.view_copy.default") is not None


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bool])
def test_bytes_that_came_four_to_a_word(dtype, monkeypatch):
    """Every way to read an input takes its bytes apart: views, one by one, four at a time, by index, more than once."""
    monkeypatch.setattr("backend.runtime.packing.FROM", 4)
    low, high = {torch.uint8: (0, 256), torch.int8: (-128, 128), torch.bool: (0, 2)}[dtype]
    x = torch.randint(low, high, (6, 8, 4)).to(dtype)
    for name, *args in (
        ("aten.permute_copy.default", [2, 0, 1]),
        ("aten.slice_copy.Tensor", 1, 1, 8, 3),
        ("aten.select_copy.int", 2, 3),
        ("aten.expand_copy.default", [2, 6, 8, 4]),
        ("aten.view_copy.default", [4, 48]),
        ("aten.index_select.default", 1, torch.tensor([7, 0, 3])),
        ("aten.flip.default", [0, 2]),
    ):
        check_op(name, x, *args)
    check_op("aten.cat.default", [x, x[:, :4].contiguous()], 1)
    check_op("aten.eq.Tensor", x, x.flip(0).contiguous())
    check_op("aten.where.self", x > 0, x, x.flip(1).contiguous())
    if dtype != torch.bool:
        check_op("aten.mul.Tensor", x, x)
        check_op("aten.sum.dim_IntList", x, [1])
        check_op("aten.amax.default", x, [0, 2])
        check_op("aten._to_copy.default", x, dtype=torch.float32)
    else:
        check_op("aten.any.dims", x, [1])
        check_op("aten.masked_fill.Scalar", torch.randn(6, 8, 4), x, -1.0)
