"""pytest tests/ops/test_pointwise.py

Every row of the pointwise tables against float64 eager: special values, accuracy, dtypes, promotion, broadcasting.
Float tolerance 1e-6 absolute plus 1e-5 relative (a driver's exp may be off by 3 + 2|x| roundings), float16:
one rounding.
"""

import math

import numpy as np
import pytest
import torch
from harness import check_op, overload, refusal_of, run_graph, run_op
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.graph import Graph, Node, Ref, ShapeError, TensorSpec
from backend.ops import pointwise
from backend.runtime import pointwise as kernels

INF, NAN = math.inf, math.nan
SPECIAL = [0.0, -0.0, INF, -INF, NAN, 1e-30, 1.0, -1.0, 1e-4, -1e-4, 1e4, -1e4, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5]
SPECIAL += [88.5, -88.5, -104.0, 1000.0, -1000.0, 0.93, -0.93, 1e-8, 3.4e38, -3.4e38]
RANGE = torch.cat([torch.tensor(SPECIAL), torch.linspace(-12, 12, 3001), torch.linspace(-1.1, 1.1, 1001)])
INTS = torch.tensor([0, 1, -1, 2, -2, 3, -7, 7, 100, -100, 2**31 - 1, -(2**31)])
# -inf times a gate of 0 is NaN in torch; here the gate wins, as it does for every finite x (see the tests below).
GATED = ("silu", "mish")


def finite_or_gated(x, name):
    return x[~torch.isneginf(x)] if name in GATED else x


@pytest.mark.parametrize("name", [*pointwise.UNARY_FLOAT, *(k for k, t in pointwise.UNARY_SAME.items() if "f32" in t)])
def test_unary_float(name):
    x = finite_or_gated(RANGE, name)
    if name in ("tan", "sin", "cos"):
        x = x[~(x.abs() > 1e6)]
    tolerance = {"atol": 2e-5} if name == "tan" else {}  # near its poles tan magnifies the argument's rounding
    if name in ("exp2", "exp", "expm1", "sinh", "cosh"):
        tolerance = {"rtol": 2e-5}  # drivers: exp's error grows with |x|
    check_op(f"aten.{name}.default", x, **tolerance)


@pytest.mark.parametrize("name", [*pointwise.UNARY_FLOAT, *(k for k, t in pointwise.UNARY_SAME.items() if "f32" in t)])
def test_unary_float16(name):
    x = finite_or_gated(
        torch.cat([torch.tensor([0.0, INF, -INF, NAN, 65504.0, -5.0]), torch.linspace(-9, 9, 331)]), name
    )
    tolerance = {"atol": 4e-3} if name == "tan" else {}
    check_op(f"aten.{name}.default", x.half(), **tolerance)


@pytest.mark.parametrize("name", pointwise.UNARY_FLOAT)
def test_unary_float_of_other_dtypes(name):
    for x in (torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2], dtype=torch.uint8), torch.tensor([True, False])):
        check_op(f"aten.{name}.default", x)


@pytest.mark.parametrize("name", [k for k, t in pointwise.UNARY_SAME.items() if "i32" in t])
def test_unary_ints(name):
    kept = INTS[(INTS.abs() < 2**15)] if name == "square" else INTS[INTS > -(2**31)]
    check_op(f"aten.{name}.default", kept)
    check_op(f"aten.{name}.default", kept.int())
    for dtype in (torch.int8, torch.uint8):
        check_op(f"aten.{name}.default", torch.arange(0, 256, 5).to(dtype))


@pytest.mark.parametrize("name", [k for k, t in pointwise.UNARY_SAME.items() if "bool" in t])
def test_unary_bool(name):
    check_op(f"aten.{name}.default", torch.tensor([True, False, True]))


@pytest.mark.parametrize("name", pointwise.UNARY_BOOL)
def test_unary_tests(name):
    for x in (torch.tensor(SPECIAL), torch.tensor(SPECIAL).half(), INTS, torch.tensor([True, False])):
        check_op(f"aten.{name}.default", x)


def test_n12_nan_tests_are_not_optimised_away():
    x = torch.tensor([NAN, INF, -INF, 0.0, float(np.uint32(0x7FFFFFFF).view(np.float32))])
    assert run_op("aten.isnan.default", x)[0].tolist() == [True, False, False, False, True]
    assert run_op("aten.isinf.default", x)[0].tolist() == [False, True, True, False, False]
    assert run_op("aten.ne.Tensor", x, x)[0].tolist() == [True, False, False, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_n3_tanh_gelu_does_not_overflow(dtype):
    x = torch.tensor([-100, -13.24, -5, 0, 20, 1000], dtype=dtype)
    (y,) = run_op("aten.gelu.default", x, approximate="tanh")
    np.testing.assert_allclose(
        y, [0, 0, -2.29e-7, 0, 20, 1000], rtol=1e-3, atol=1e-9 if dtype == torch.float32 else 2e-8
    )


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_n3b_gelu_is_the_one_asked_for(approximate):
    x = torch.cat([torch.linspace(-15, 15, 30001), torch.tensor([INF, NAN, 1e30, -1e30, 1e-20])])
    check_op("aten.gelu.default", x, approximate=approximate, atol=1e-6, rtol=3e-7)


def test_gates_close_at_minus_infinity():
    x = torch.tensor([-INF, -1000.0, INF, NAN])
    for name in ("silu", "gelu", "mish"):
        (y,) = run_op(f"aten.{name}.default", x)
        np.testing.assert_array_equal(y, [0, 0, INF, NAN])


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_circular_functions_of_large_arguments(name):
    torch.manual_seed(0)
    x = torch.cat(
        [(torch.rand(20000) * 2 - 1) * 1e5, torch.arange(4096.0), torch.tensor([1e10, -3e38, 2**24 * math.pi])]
    )
    check_op(f"aten.{name}.default", x, atol=5e-7, rtol=0)


@pytest.mark.parametrize(
    "name", ["fmod.Tensor", "remainder.Tensor", "floor_divide.default", "atan2.default", "div.Tensor"]
)
def test_division_and_signs(name):
    torch.manual_seed(0)
    items = torch.tensor([*SPECIAL[:5], 1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 0.5, 6.0, -7.0, 7.5, 1e10])
    x, y = items.repeat_interleave(len(items)), items.repeat(len(items))
    wide = 10 ** (torch.rand(2, 2000) * 6 - 3) * torch.randn(2, 2000).sign()
    whole = torch.arange(-60.0, 60.0)
    x, y = torch.cat([x, wide[0], whole]), torch.cat([y, wide[1], torch.full_like(whole, 3)])
    check_op(f"aten.{name}", x, y)


@pytest.mark.parametrize("mode", ["floor", "trunc", None])
def test_div_with_rounding(mode):
    check_op(
        "aten.div.Tensor_mode",
        torch.tensor([7.0, -7.0, 6.0, 0.3]),
        torch.tensor([2.0, 2.0, -3.0, 0.1]),
        rounding_mode=mode,
    )
    check_op("aten.div.Tensor_mode", torch.tensor([7, -7, 6, -8]), torch.tensor([2, 2, -3, -4]), rounding_mode=mode)


def test_integer_division_and_remainder():
    x, y = torch.tensor([7, -7, 7, -7, 6, 0]), torch.tensor([3, 3, -3, -3, 2, 5])
    for name in ("remainder.Tensor", "fmod.Tensor", "floor_divide.default"):
        check_op(f"aten.{name}", x, y)
    check_op("aten.remainder.Scalar", x, 4)


@pytest.mark.parametrize("name", pointwise.COMPARISON)
def test_comparisons(name):
    x = torch.tensor([0.0, -0.0, 1.0, NAN, INF, -INF])
    check_op(f"aten.{name}.Tensor", x.repeat_interleave(6), x.repeat(6))
    check_op(f"aten.{name}.Scalar", x, 0)
    check_op(f"aten.{name}.Scalar", torch.tensor([True, False]), True)
    check_op(f"aten.{name}.Tensor", torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False]))
    check_op(f"aten.{name}.Scalar", torch.tensor([1, 2, 3]), 2.5)
    check_op(f"aten.{name}.Tensor", torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.5, 2.0]))
    half = torch.tensor([0.1, 0.2, -0.1]).half()
    check_op(f"aten.{name}.Scalar", half, 0.1, golden=lambda: overload(f"aten.{name}.Scalar")(half, 0.1))


@pytest.mark.parametrize("name", pointwise.LOGICAL)
def test_logical_on_numbers(name):
    check_op(f"aten.{name}.default", torch.tensor([0.0, 2.0, NAN, 0.0]), torch.tensor([0.0, 0.0, 1.0, 3.0]))
    check_op(f"aten.{name}.default", torch.tensor([0, 2, 5]), torch.tensor([True, False, True]))


@pytest.mark.parametrize("name", ["maximum", "minimum", "fmax", "fmin", "hypot", "copysign.Tensor"])
def test_pairs(name):
    x = torch.tensor([0.0, 1.0, NAN, INF, -INF, -3.0, 1e30])
    check_op(f"aten.{name if '.' in name else name + '.default'}", x.repeat_interleave(7), x.repeat(7))


def test_bitwise_operators():
    x, y = torch.tensor([0b1100, -1, 7, 2**31 - 1]), torch.tensor([0b1010, 5, 3, 1])
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_right_shift"):
        check_op(f"aten.{name}.Tensor", x, y)
    check_op("aten.bitwise_left_shift.Tensor", x[:3], y[:3])
    check_op("aten.bitwise_not.default", x)


def test_pow():
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, INF, -INF, NAN, 10.0])
    y = torch.tensor([0.0, 1.0, -1.0, 2.0, 3.0, -3.0, 0.5, -0.5, INF, -INF, NAN, 2.5])
    check_op("aten.pow.Tensor_Tensor", x.repeat_interleave(len(y)), y.repeat(len(x)))
    for exponent in (0, 1, 2, 3, 4, -1, -2, 5, 0.5, -0.5, 1.5, 2.0):
        check_op("aten.pow.Tensor_Scalar", x, exponent)
    check_op("aten.pow.Scalar", 10000.0, torch.linspace(-1, 0, 33))
    check_op("aten.pow.Tensor_Scalar", torch.tensor([0, 1, -2, 7]), 5)
    check_op("aten.pow.Tensor_Tensor", torch.tensor([1, -1, -1, 3]), torch.tensor([-1, 3, 2, 4]))
    check_op("aten.mul.Tensor", torch.randn(3), 2**40)
    check_op("aten.div.Tensor", torch.tensor([3]), 2**40)
    assert "2147483648" in refusal_of("aten.add.Tensor", torch.ones(2, dtype=torch.int64), 2**31)


def test_clamp():
    x = torch.tensor([-2.0, 0.0, 3.0, NAN, INF])
    check_op("aten.clamp.default", x, -1, 2)
    check_op("aten.clamp.default", x, 2, -1)
    check_op("aten.clamp.default", x, max=1.5)
    check_op("aten.clamp.default", x, NAN)
    check_op("aten.clamp.Tensor", x, torch.tensor([0.0, NAN, 0.0, 0.0, 0.0]), torch.tensor(1.0))
    check_op("aten.clamp.default", torch.tensor([-5, 5]), 0.5)
    check_op("aten.clamp.default", torch.tensor([-5, 5]), -1, 3)


def test_where_and_masked_fill():
    mask = torch.tensor([[True], [False]])
    check_op("aten.where.self", mask, torch.randn(3), torch.tensor(2))
    check_op("aten.where.ScalarOther", mask, torch.randn(2, 3), -INF)
    check_op("aten.where.Scalar", mask, 1, 0)
    check_op("aten.masked_fill.Scalar", torch.randn(2, 3), mask, -INF)
    check_op("aten.masked_fill.Tensor", torch.arange(3), mask[0], torch.tensor(7))


def test_activations_with_parameters():
    x = finite_or_gated(RANGE, "")
    for name in ("leaky_relu", "elu", "celu", "softplus", "hardtanh", "hardshrink", "softshrink", "nan_to_num"):
        check_op(f"aten.{name}.default", x[x.abs() < 1e30] if name == "nan_to_num" else x)
    check_op("aten.elu.default", x, 1.3, 1.1, 0.7)
    check_op("aten.softplus.default", x, 2.0, 5.0)
    check_op("aten.threshold.default", x, 0.1, 20)
    check_op("aten.nan_to_num.default", torch.tensor([NAN, INF, -INF, 2.0]), 1.0, 2.0, 3.0)
    check_op("aten.logit.default", torch.linspace(0, 1, 101))
    check_op("aten.logit.default", torch.linspace(-0.2, 1.2, 101), 1e-3, rtol=1e-4)  # 1 - eps is rounded to f32
    check_op("aten.prelu.default", torch.randn(2, 3, 4), torch.tensor([0.1, 0.2, 0.3]))
    check_op("aten.prelu.default", torch.randn(5), torch.tensor([0.1]))
    check_op("aten.glu.default", torch.randn(3, 8, 2), 1)
    check_op("aten.lerp.Scalar", torch.randn(7), torch.randn(7), 0.3)
    check_op("aten.lerp.Tensor", torch.randn(7), torch.randn(7), torch.rand(7))
    check_op("aten.addcmul.default", torch.randn(2, 3), torch.randn(3), torch.randn(2, 1), value=0.5)
    check_op("aten.addcdiv.default", torch.randn(2, 3), torch.randn(3), torch.rand(2, 1) + 1, value=-2)


def test_o10_i2_casts_for_all_pairs():
    numbers = torch.tensor([0.0, 1.0, 2.0, 3.0, 200.0, 0.7, 2.999])
    for source in (torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool):
        for target in (torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool):
            check_op("aten._to_copy.default", numbers.to(source), dtype=target)
    check_op("aten._to_copy.default", torch.tensor([-1.9, -0.5, 1.9]), dtype=torch.int32)
    check_op("aten._to_copy.default", torch.tensor([-1, 256, 511]), dtype=torch.uint8)
    check_op("aten._to_copy.default", torch.tensor([NAN, 0.0, -0.0, INF]), dtype=torch.bool)
    check_op("aten._to_copy.default", torch.tensor([65519.0, 65520.0, 1e6, -1e6, INF, NAN]), dtype=torch.float16)


def test_float16_and_back_rounds_to_nearest_even_in_one_kernel():
    """All finite values of half precision, what lies halfway between two, and one rounding of float32 beside that."""
    half = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = (half[1:] + half[:-1]) / 2
    numbers = np.concatenate([half, middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))])
    numbers = np.concatenate([numbers, -numbers, np.float32([65519.99, 65520, 1e30, -1e30, INF, -INF, NAN, 1e-45])])
    whole = np.array([2049, 2051, 4099, -4101, 65519, 65520, 70000, -70000, 2**31 - 1], np.int32)
    for array in (numbers, whole):
        graph = Graph()
        dtypes = (array.dtype.name, "float16", "float32")
        x, between, out = (graph.add_value(TensorSpec(dtype, array.shape)) for dtype in dtypes)
        for source, target, dtype in ((x, between, "float16"), (between, out, "float32")):
            graph.nodes.append(Node("aten._to_copy.default", {"self": Ref(source), "dtype": dtype}, (target,)))
        graph.inputs, graph.outputs = [x], [out]
        (actual,) = run_graph(graph, [array])
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(actual, array.astype(np.float16).astype(np.float32))


def test_i1_int64_keeps_its_sign_and_is_never_wrapped():
    x = torch.tensor([0, -1, 5, 2**31 - 1])
    check_op("aten.clone.default", x)
    check_op("aten.add.Tensor", x, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ShapeError, match="2147483653"):
        run_op("aten.clone.default", torch.tensor([2**31 + 5]))


def test_small_ints_wrap():
    x, y = torch.tensor([250, 3, 128], dtype=torch.uint8), torch.tensor([10, 7, 2], dtype=torch.uint8)
    for name in ("add", "sub", "mul"):
        check_op(f"aten.{name}.Tensor", x, y)
    check_op("aten.neg.default", torch.tensor([1, 0, 255], dtype=torch.uint8))
    check_op("aten.add.Tensor", torch.tensor([120], dtype=torch.int8), torch.tensor([100], dtype=torch.int8))


def test_mixed_dtypes_promote_as_torch_does():
    tensors = [
        torch.ones(2, dtype=d)
        for d in (torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool)
    ]
    for x in tensors:
        for y in tensors:
            check_op("aten.mul.Tensor", x, y)
            check_op("aten.lt.Tensor", x, y[0])
            check_op("aten.add.Tensor", x[0], y)
    check_op("aten.add.Tensor", torch.randn(3), torch.randn(3), alpha=2.5)
    check_op("aten.sub.Tensor", torch.arange(3), torch.arange(3) * 2, alpha=3)
    check_op("aten.rsub.Scalar", torch.randn(3), 2, alpha=3)


def test_r2_more_elements_than_one_row_of_groups(monkeypatch):
    monkeypatch.setattr(kernels, "WORKGROUP", 64)
    monkeypatch.setattr(kernels, "ITEMS", 1)
    check_op("aten.relu.default", torch.arange(65535 * 64 + 1, dtype=torch.float32))
    count = 65536 * 64 + 3  # the last groups are in the second row of the fold
    x = torch.arange(count) % 1000003 - 7
    np.testing.assert_array_equal(run_op("aten.neg.default", x.int())[0], -x.numpy())


@pytest.mark.parametrize(
    "x",
    [torch.rand(5, 5) > 0.5, torch.tensor([1, 2, 3]).half(), *(torch.arange(n, dtype=torch.uint8) for n in range(8))],
    ids=str,
)
def test_r3_sizes_that_are_no_multiple_of_four_bytes(x):
    check_op("aten.logical_not.default", x)
    if x.dtype != torch.bool:
        check_op("aten.neg.default", x)


@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3), (5, 1, 11), (), (0,), (3, 0, 2), (1, 2, 1, 3, 1, 2)])
def test_broadcasting(shape):
    torch.manual_seed(0)
    check_op("aten.add.Tensor", torch.randn(shape), torch.randn(3, *shape))
    check_op("aten.mul.Tensor", torch.randn(shape), torch.randn(()))


# --- random operators, dtypes, broadcasts -----------------------------------------------------------------------------

RANDOM_OPS = (
    "add.Tensor",
    "sub.Tensor",
    "mul.Tensor",
    "maximum.default",
    "lt.Tensor",
    "eq.Tensor",
    "logical_and.default",
)
DTYPES = (torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)


@st.composite
def operands(draw):
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 7]), max_size=5))
    tensors = []
    for _ in range(2):
        own = [draw(st.sampled_from([size, 1])) for size in shape][draw(st.integers(0, len(shape))) :]
        seed = draw(st.integers(0, 1000))
        values = torch.randint(-9, 10, own, generator=torch.Generator().manual_seed(seed)) / 2
        tensors.append(
            values.abs().to(torch.uint8)
            if (dtype := draw(st.sampled_from(DTYPES))) == torch.uint8
            else values.to(dtype)
        )
    return tensors


@given(name=st.sampled_from(RANDOM_OPS), tensors=operands())
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_random_pointwise_operators(name, tensors):
    """What is accepted gives torch's dtype, shape and values; a bool subtraction is torch's own error."""
    if name == "sub.Tensor" and torch.bool in (tensors[0].dtype, tensors[1].dtype):
        return
    check_op(f"aten.{name}", *tensors)
