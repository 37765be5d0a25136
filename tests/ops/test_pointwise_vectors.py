"""pytest tests/ops/test_pointwise_vectors.py: pointwise kernels of processors, which move four elements at once.

They are made for whatever adapter there is, and give the bits of kernels that take elements one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from backend.graph import Node, Ref, TensorSpec
from backend.runtime import pointwise
from backend.runtime.builder import lower_graph
from backend.runtime.capabilities import Capabilities
from tests.ops.harness import EXACT, F16, F32, assert_close, run_graph
from tests.passes.make import Maker
from zoo.eager import DTYPES, interpret

PROCESSOR = Capabilities(on_processor=True)
Make = Callable[[Maker], Ref]


@pytest.fixture(autouse=True)
def on_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = pointwise.geometry
    monkeypatch.setattr(
        pointwise, "geometry", lambda value, target, can: chosen(value, target, replace(can, on_processor=True))
    )


def made(make: Make) -> Maker:
    m = Maker()
    m.graph.outputs = [make(m).value]
    return m


def code(m: Maker, can: Capabilities = PROCESSOR) -> str:
    (dispatch,) = lower_graph(m.graph, {}, can).dispatches
    assert dispatch.template == "pointwise"
    return dispatch.code


def feeds(m: Maker) -> list[torch.Tensor]:
    torch.manual_seed(0)
    specs = [m.graph.values[index] for index in m.graph.inputs]
    return [(9 * torch.randn([int(size) for size in spec.shape])).to(DTYPES[spec.dtype]) for spec in specs]


def check(m: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = feeds(m)
    arrays = [tensor.numpy() for tensor in inputs]
    (actual,) = run_graph(m.graph, arrays)
    (wanted,) = interpret(m.graph, [x.double() if x.dtype == torch.float32 else x for x in inputs])
    tolerance = {"float32": F32, "float16": F16}.get(str(actual.dtype), EXACT)
    assert_close(actual, wanted.numpy(), **tolerance)
    monkeypatch.setattr(pointwise, "in_vectors", lambda *_: False)
    np.testing.assert_array_equal(actual.view(np.uint8), run_graph(m.graph, arrays)[0].view(np.uint8))


def add(m: Maker, x: Ref, y: Ref | float) -> Ref:
    return m("add.Tensor", self=x, other=y)


def cut(m: Maker, x: Ref, start: int, end: int) -> Ref:
    return m("slice.Tensor", self=x, dim=1, start=start, end=end, step=1)


def turned(m: Maker, x: Ref, *dims: int) -> Ref:
    return m("permute.default", self=x, dims=list(dims))


def counted(m: Maker, count: int) -> Ref:
    index = m.graph.add_value(TensorSpec("int64", (count,)))
    m.tensors[index] = torch.empty(count, dtype=torch.int64, device="meta")
    m.graph.nodes.append(Node("aten.arange.start_step", {"start": 0, "end": count, "step": 1}, (index,)))
    return Ref(index)


WIDE: dict[str, Make] = {
    "a scalar": lambda m: m("mul.Tensor", self=m.input(5, 12), other=2.0),
    "many groups, the last not full": lambda m: add(m, m.input(41, 132), m.input(41, 132)),
    "one vector": lambda m: add(m, m.input(4), 1.0),
    "an odd number of vectors": lambda m: add(m, m.input(3, 4), 1.0),
    "rows that only together are vectors": lambda m: add(m, m.input(2, 6), m.input(2, 6)),
    "a row for all": lambda m: add(m, m.input(5, 12), m.input(12)),
    "a number a row": lambda m: add(m, m.input(5, 12), m.input(5, 1)),
    "a number for all": lambda m: add(m, m.input(5, 12), m.input(1)),
    "a plane in between": lambda m: add(m, m.input(3, 5, 8), m.input(3, 1, 8)),
    "rows that start at a multiple of four": lambda m: add(m, cut(m, m.input(5, 16), 4, 12), m.input(5, 8)),
    "one buffer, read both ways": lambda m: add(m, x := m.input(5, 12), cut(m, x, 3, 4)),
    "outer dims turned": lambda m: turned(m, m.input(3, 5, 8), 1, 0, 2),
    "float16": lambda m: add(m, m.input(5, 12, dtype="float16"), m.input(12, dtype="float16")),
    "float16 and float32": lambda m: add(m, m.input(5, 12, dtype="float16"), m.input(5, 12)),
    "int64": lambda m: add(m, m.input(5, 12, dtype="int64"), m.input(5, 1, dtype="int64")),
    "uint8, which wraps": lambda m: m("mul.Tensor", self=(x := m.input(5, 12, dtype="uint8")), other=x),
    "bool": lambda m: m("logical_or.default", self=m.input(5, 12, dtype="bool"), other=m.input(5, 1, dtype="bool")),
    "to bool and on": lambda m: m(
        "where.self", condition=m("gt.Scalar", self=(x := m.input(5, 12)), other=0.5), self=x, other=m.input(5, 12)
    ),
    "a function of one element": lambda m: m("silu.default", self=m.input(5, 12)),
}
NARROW: dict[str, Make] = {
    "rows that are no vectors": lambda m: add(m, m.input(2, 6), m.input(6)),
    "elements that are no vectors": lambda m: add(m, m.input(3, 5), 1.0),
    "one element": lambda m: add(m, m.input(1), 1.0),
    "rows that start in between": lambda m: add(m, cut(m, m.input(5, 16), 1, 9), 1.0),
    "rows of an odd length": lambda m: add(m, cut(m, m.input(5, 9), 0, 8), 1.0),
    "turned": lambda m: turned(m, m.input(8, 12), 1, 0),
    "backwards": lambda m: m("flip.default", self=m.input(8), dims=[0]),
    "counted": lambda m: add(m, m.input(8), counted(m, 8)),
}


@pytest.mark.parametrize("name", WIDE)
def test_four_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    m = made(WIDE[name])
    assert "load4_x" in code(m) and "store4" in code(m)
    check(m, monkeypatch)


@pytest.mark.parametrize("name", NARROW)
def test_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    m = made(NARROW[name])
    assert "load4_x" not in code(m)
    check(m, monkeypatch)


def test_groups_in_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.runtime.dispatch.MAX_GROUPS", 5)
    m = made(lambda m: add(m, m.input(4 * 1024 + 4), 1.0))
    assert "load4_x" in code(m)
    check(m, monkeypatch)


def test_bindings_are_counted() -> None:
    """A buffer that is read both ways takes two of them."""
    m = made(WIDE["one buffer, read both ways"])
    assert "load4_x" in code(m, replace(PROCESSOR, max_storage_buffers=3))
    assert "load4_x" not in code(m, replace(PROCESSOR, max_storage_buffers=2))


def test_much_work_an_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written out four times only where there are many elements."""

    def chain(m: Maker) -> Ref:
        x = y = m.input(5, 12)
        for _ in range(pointwise.CHEAP):
            y = m("sigmoid.default", self=add(m, y, x))
        return y

    assert "load4_x" not in code(made(chain))
    monkeypatch.setattr(pointwise, "SOME", 60)
    assert "load4_x" in code(made(chain))
    check(made(chain), monkeypatch)


def test_gpus_take_elements_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert "load4_x" not in code(made(WIDE["a scalar"]), replace(PROCESSOR, on_processor=False))
