"""pytest tests/passes/test_gated_pass.py: silu(gate) × up of one tensor's halves becomes `zoo.swiglu`."""

from __future__ import annotations

import pytest

from backend.graph import Ref
from tests.passes.make import Maker
from tests.passes.test_patterns import same


def halves(m: Maker, x: Ref, dim: int = -1, first: tuple[int, int] = (0, 5)) -> tuple[Ref, Ref]:
    gate = m("slice.Tensor", self=x, dim=dim, start=first[0], end=first[1], step=1)
    return gate, m("slice.Tensor", self=x, dim=dim, start=5, end=2**40, step=1)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dim", [-1, 2])
def test_swiglu(dim: int, turned: bool) -> None:
    m = Maker()
    gate, up = halves(m, m("neg.default", self=m.input(2, 3, 10)), dim)
    silu = m("silu.default", self=gate)
    first, second = (up, silu) if turned else (silu, up)
    m.graph.outputs = [m("mul.Tensor", self=first, other=second).value]
    same(m, ["neg.default", "zoo.swiglu"])


def test_the_second_half_is_not_the_gate() -> None:
    m = Maker()
    first, second = halves(m, m.input(3, 10))
    m.graph.outputs = [m("mul.Tensor", self=m("silu.default", self=second), other=first).value]
    same(m, ["slice.Tensor", "slice.Tensor", "silu.default", "mul.Tensor"])


def test_halves_that_overlap_or_lie_on_another_axis() -> None:
    for dim, first in ((-1, (1, 6)), (0, (0, 5))):
        m = Maker()
        gate, up = halves(m, m.input(10, 10), dim, first)
        m.graph.outputs = [m("mul.Tensor", self=m("silu.default", self=gate), other=up).value]
        same(m, ["slice.Tensor", "slice.Tensor", "silu.default", "mul.Tensor"])


def test_what_others_read_stays() -> None:
    for extra in ("x", "gate", "silu"):
        m = Maker()
        x = m("neg.default", self=m.input(3, 10))
        gate, up = halves(m, x)
        silu = m("silu.default", self=gate)
        out = m("mul.Tensor", self=silu, other=up)
        m.graph.outputs = [out.value, {"x": x, "gate": gate, "silu": silu}[extra].value]
        same(m, ["neg.default", "slice.Tensor", "slice.Tensor", "silu.default", "mul.Tensor"])
