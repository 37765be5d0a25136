"""pytest tests/passes/test_partition.py: what is taken and refused, state, constants, in both runtimes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from backend.graph import ShapeError
from backend.ops import registry
from backend.partitioner import Refusal
from tests.passes.programs import RUNTIMES, Lowered, Method, check, compare, lower
from zoo.program import Program

Dim = torch.export.Dim


class Function(nn.Module):
    """A module around a function of tensors."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor):
        return self.function(*args)


def lowered(tmp_path, function, *args, dynamic=None) -> tuple[Lowered, nn.Module]:
    module = function if isinstance(function, nn.Module) else Function(function)
    if dynamic is not None and not isinstance(function, nn.Module):
        dynamic = (dynamic,)  # the module takes *args
    return lower(tmp_path / "program.pte", Method(module, args, dynamic)), module


def whole(result: Lowered) -> None:
    assert result.refusals == []
    assert result.delegates == {"forward": 1}
    assert result.outside == {"forward": []}


# --- refusals -------------------------------------------------------------------------------------------------------


def test_a_refused_dtype_falls_back_with_its_reason(tmp_path):
    result, module = lowered(tmp_path, lambda x: (x * 2).double().cos().float().relu() + 1, torch.randn(3, 5))
    assert {(r.op.split(".")[1], r.reason) for r in result.refusals} >= {("cos", "no kernel for float64")}
    assert result.delegates["forward"] >= 1
    assert any("cos" in name for name in result.outside["forward"])
    with Program.load(result.path, runtime="executorch") as program:
        x = torch.randn(3, 5)
        compare(program.run("forward", x.numpy())[0], module(x).numpy(), 1e-6)


def test_an_unknown_operator_falls_back_and_reasons_are_counted(tmp_path, monkeypatch):
    """Three times over, between operators that are taken."""
    registry.names()  # loads them
    monkeypatch.delitem(registry._OPS, "aten.tan.default")

    def function(x: Tensor) -> Tensor:
        for _ in range(3):
            x = (x * 0.5).tan().exp() - 1
        return x

    x = torch.rand(4) * 0.1
    result, module = lowered(tmp_path, function, x)
    assert result.refusals == [Refusal("aten.tan.default", "no kernel for this operator", 3)]
    with Program.load(result.path, runtime="executorch") as program:
        compare(program.run("forward", x.numpy())[0], module(x).numpy(), 1e-6)


def test_a_fused_pattern_is_judged_by_its_parts_when_refused(tmp_path):
    """Attention of rank 5: no kernel takes it whole, its parts run."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    args = tuple(torch.randn(1, 2, 2, 5, 8) for _ in range(3))
    result, module = lowered(tmp_path, attend, *args)
    whole(result)
    check(result, module, [args])


def test_declaring_an_operator_twice_raises():
    name = registry.names()[0]
    with pytest.raises(ValueError, match=f"operator {name} is declared twice"):
        registry.register(name, accepts=registry.anything, lower=lambda call, b: call["self"])


def test_preserved_operators_exist():
    for name in registry.preserved():
        namespace, op, kind = name.split(".")
        assert isinstance(getattr(getattr(getattr(torch.ops, namespace), op), kind), torch._ops.OpOverload)


def test_declared_aten_operators_exist():
    """A misspelt name would never be asked for."""
    unknown = []
    for name in registry.names():
        namespace, *rest = name.split(".")
        if namespace == "aten":
            packet = getattr(torch.ops.aten, rest[0], None)
            if packet is None or rest[1] not in packet.overloads():
                unknown.append(name)
    assert unknown == []


# --- cases from the wild --------------------------------------------------------------------------------------------


def test_d1_live_sizes_not_those_of_the_build(tmp_path):
    """The last token is S-1, joined tensors have no stale tail."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        last = x.select(1, -1)
        joined = torch.cat((x, x), 1)
        chained = torch.cat((joined.squeeze(0), x.squeeze(0) + 1), 0)
        return last, joined, x.squeeze(0), chained, chained.select(0, -1)

    def tokens(size: int) -> Tensor:
        return torch.arange(size, dtype=torch.float32)[None, :, None].expand(1, size, 4).contiguous()

    result, module = lowered(tmp_path, function, tokens(16), dynamic=({1: Dim("S", min=1, max=64)},))
    whole(result)
    check(result, module, [(tokens(size),) for size in (64, 7, 1, 33, 64)], atol=0)
    with Program.load(result.path, runtime="direct") as program:
        assert program.run("forward", tokens(7).numpy())[0].tolist() == [[6.0] * 4]


def test_d3_zero_length_tensors(tmp_path):
    def function(x: Tensor, fifo: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat((fifo, x), 1) * 2, fifo.sum(1)

    dynamic = ({1: Dim("T", min=1, max=32)}, {1: Dim("F", min=0, max=32)})
    result, _ = lowered(tmp_path, function, torch.randn(1, 3, 8), torch.randn(1, 5, 8), dynamic=dynamic)
    whole(result)
    with Program.load(result.path, runtime="direct") as program:
        for kept in (5, 0, 9, 0):
            x, fifo = torch.randn(1, 3, 8), torch.randn(1, kept, 8)
            for actual, wanted in zip(program.run("forward", x.numpy(), fifo.numpy()), function(x, fifo), strict=True):
                compare(actual, wanted.numpy(), 1e-6)


def test_i1_int64_through_identity_and_a_table(tmp_path):
    ids = torch.tensor([0, -1, 5, 2**31 - 1])
    table = torch.arange(12, dtype=torch.float32).reshape(6, 2)

    def function(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return x.view(2, 2).clone(), torch.nn.functional.embedding(rows, table)

    rows = torch.tensor([0, 5, 5, 1])
    result, module = lowered(tmp_path, function, ids, rows)
    check(result, module, [(ids, rows)])
    for runtime in RUNTIMES:
        with Program.load(result.path, runtime=runtime) as program:
            with pytest.raises(ShapeError, match=f"holds {2**31 + 5}"):
                program.run("forward", np.array([0, 1, 2, 2**31 + 5]), rows.numpy())
            assert program.run("forward", ids.numpy(), rows.numpy())[0].dtype == np.int64


def test_r3_sizes_that_are_no_multiple_of_four_bytes(tmp_path):
    def function(mask: Tensor, half: Tensor, *bytes_: Tensor) -> tuple[Tensor, ...]:
        return ~mask, half * 2, *(torch.flip(item, (0,)) for item in bytes_)

    args = (
        torch.rand(5, 5) < 0.5,
        torch.tensor([1.0, 2.0, 3.0]).half(),
        *(torch.arange(250, 250 + n).to(torch.uint8) for n in range(1, 8)),
    )
    result, module = lowered(tmp_path, function, *args)
    check(result, module, [args, args])


def test_r6_bounds_of_each_dimension(tmp_path):
    dynamic = ({0: Dim("A", min=1, max=4), 1: Dim("B", min=1, max=3)},)
    result, _ = lowered(tmp_path, lambda x: x * 2, torch.randn(3, 2), dynamic=dynamic)
    for runtime in RUNTIMES:
        with Program.load(result.path, runtime=runtime) as program:
            with pytest.raises(ShapeError, match=r"dimension 1 is 6"):
                program.run("forward", np.ones((2, 6), np.float32))
            assert program.run("forward", np.ones((4, 3), np.float32))[0].shape == (4, 3)


def test_q4_a_constant_with_two_readers(tmp_path):
    """A bias that a convolution packs and a subtraction reads; the file goes after loading."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            assert self.conv.bias is not None
            return self.conv(x) - self.conv.bias[:, None, None]

    module, x = Shared(), torch.randn(1, 3, 6, 7)
    result, _ = lowered(tmp_path, module, x)
    whole(result)
    wanted = module(x).detach().numpy()
    for runtime in RUNTIMES:
        copy = tmp_path / f"{runtime}.pte"
        copy.write_bytes(result.path.read_bytes())
        with Program.load(copy, runtime=runtime) as program:
            copy.unlink()
            for _ in range(2):
                compare(program.run("forward", x.numpy())[0], wanted, 1e-5)


# --- state ----------------------------------------------------------------------------------------------------------


class Cache(nn.Module):
    """Rows written at a position that is data; the whole cache is read back."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Buffer(torch.zeros(8, 4))

    def forward(self, position: Tensor, x: Tensor) -> Tensor:
        self.rows.index_copy_(0, position, x)
        return self.rows * 2


class Peek(nn.Module):
    """Reads, then replaces, what another method wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Buffer(torch.zeros(8, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        old = self.rows.sum(0)
        self.rows.add_(x)
        return old, self.rows.clone()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_state_is_shared_by_methods_and_not_by_loads(tmp_path, runtime):
    methods = {
        "write": Method(Cache(), (torch.tensor([0]), torch.randn(1, 4)), (None, None)),
        "peek": Method(Peek(), (torch.randn(8, 4),)),
    }
    result = lower(tmp_path / "state.pte", methods)
    assert result.refusals == []
    assert result.delegates == {"write": 1, "peek": 1}
    rows = np.zeros((8, 4), np.float32)
    with Program.load(result.path, runtime=runtime) as program, Program.load(result.path, runtime=runtime) as other:
        for step in range(10):
            x = np.full((1, 4), step + 1.0, np.float32)
            rows[step % 8] = x
            np.testing.assert_array_equal(program.run("write", np.array([step % 8]), x)[0], rows * 2)
            old, new = program.run("peek", np.ones((8, 4), np.float32))
            np.testing.assert_array_equal(old, rows.sum(0))
            rows += 1
            np.testing.assert_array_equal(new, rows)
        assert not other.run("peek", np.zeros((8, 4), np.float32))[0].any()
    with Program.load(result.path, runtime=runtime) as program:
        assert not program.run("peek", np.zeros((8, 4), np.float32))[1].any()


class Swapped(nn.Module):
    """Two states that take each other's contents; the old ones are results."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Buffer(torch.tensor([1.0, 2.0])), nn.Buffer(torch.tensor([3.0, 4.0]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.a.clone(), self.b.clone()
        self.a.copy_(b + x)
        self.b.copy_(a)
        return a, self.a * 1


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_states_swap(tmp_path, runtime):
    result = lower(tmp_path / "swap.pte", Method(Swapped(), (torch.zeros(2),)))
    assert result.refusals == []
    a, b = np.float32([1, 2]), np.float32([3, 4])
    with Program.load(result.path, runtime=runtime) as program:
        for step in range(4):
            x = np.full(2, step, np.float32)
            first, second = program.run("forward", x)
            np.testing.assert_array_equal(first, a)
            a, b = b + x, a
            np.testing.assert_array_equal(second, a)
