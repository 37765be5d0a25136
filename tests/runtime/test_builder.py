"""pytest tests/runtime/test_builder.py: fusion, views and reuse in lowered graphs, against torch on the same graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.blob import to_blob
from backend.expr import Expr
from backend.graph import Graph, Node, Ref, TensorSpec
from backend.runtime import builder, memory, plan
from backend.runtime import value as values
from backend.runtime.builder import lower_graph
from backend.runtime.capabilities import Capabilities
from backend.runtime.delegate import Delegate
from backend.runtime.dispatch import fold
from backend.runtime.errors import DeviceError
from backend.runtime.tensor import Buffer, Tensor
from tests.passes.make import Maker
from zoo.eager import interpret

F32 = "float32"


def lower(graph: Graph):
    return lower_graph(graph, {}, Capabilities())


def run(graph: Graph, inputs: list[torch.Tensor]) -> list[np.ndarray]:
    delegate = Delegate(to_blob(graph), {}.__getitem__)
    try:
        return delegate.execute([tensor.numpy() for tensor in inputs])
    finally:
        delegate.close()


def check(maker: Maker, inputs: list[torch.Tensor]) -> None:
    for actual, wanted in zip(run(maker.graph, inputs), interpret(maker.graph, inputs), strict=True):
        assert actual.shape == tuple(wanted.shape)
        np.testing.assert_allclose(actual, wanted.numpy(), rtol=1e-5, atol=1e-5)  # a few roundings of float32


@st.composite
def graphs(draw: st.DrawFn) -> Maker:
    """Chains of pointwise operators and views with values read several times, over values of rank 0 to 4."""
    m = Maker()
    rank = draw(st.integers(1, 4))
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 5]), min_size=rank, max_size=rank))
    live = [m.input(*shape), m.input(*[1 if draw(st.booleans()) else size for size in shape])]
    for _ in range(draw(st.integers(2, 12))):
        x = draw(st.sampled_from(live[-4:]))
        size = m.shape(x)
        axis = draw(st.integers(0, max(len(size) - 1, 0)))
        kind = draw(
            st.sampled_from(
                [
                    "neg",
                    "abs",
                    "pair",
                    "where",
                    "permute",
                    "slice",
                    "reshape",
                    "expand",
                    "flip",
                    "select",
                    "cat",
                    "unsqueeze",
                ]
            )
        )
        if kind in ("neg", "abs"):
            new = m(f"{kind}.default", self=x)
        elif kind in ("pair", "where"):
            others = [y for y in live if m.shape(y) == size] + [x]
            y = draw(st.sampled_from(others))
            if kind == "pair":
                new = m(f"{draw(st.sampled_from(['add', 'sub', 'mul']))}.Tensor", self=x, other=y)
            else:
                new = m("where.self", condition=m("lt.Scalar", self=x, other=0.25), self=y, other=x)
        elif kind == "permute" and size:
            new = m("permute.default", self=x, dims=draw(st.permutations(range(len(size)))))
        elif kind == "slice" and size:
            new = m(
                "slice.Tensor",
                self=x,
                dim=axis,
                start=draw(st.integers(-2, 2)),
                end=draw(st.sampled_from([-1, 3, 2**40])),
                step=draw(st.integers(1, 2)),
            )
            if 0 in m.shape(new):
                live = [y for y in live if y is not new]
                continue
        elif kind == "reshape":
            flat = int(np.prod(size))
            new = m(
                "reshape.default",
                self=x,
                shape=draw(
                    st.sampled_from([[flat], [1, flat], [flat, 1], *([[2, flat // 2]] if flat % 2 == 0 else [])])
                ),
            )
        elif kind == "expand" and len(size) < 4:
            new = m("expand.default", self=x, size=[2, *size])
        elif kind == "flip" and size:
            new = m("flip.default", self=x, dims=[axis])
        elif kind == "select" and size:
            new = m("select.int", self=x, dim=axis, index=draw(st.sampled_from([0, -1])))
        elif kind == "cat" and size:
            new = m(
                "cat.default", tensors=[x, draw(st.sampled_from([y for y in live if m.shape(y) == size]))], dim=axis
            )
        elif kind == "unsqueeze" and len(size) < 4:
            new = m("unsqueeze.default", self=x, dim=axis)
        else:
            continue
        live.append(new)
    m.graph.outputs = [ref.value for ref in draw(st.lists(st.sampled_from(live), min_size=1, max_size=3))]
    return m


@given(graphs(), st.integers(0, 3), st.sampled_from([64, 0]))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_graphs_fused_or_not(maker, seed, cost):
    """`cost` 0 keeps pointwise work from being fused: one kernel an operator."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(maker.graph.values[i].shape, generator=generator) for i in maker.graph.inputs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "MAX_FUSED_COST", cost)
        check(maker, inputs)


def every_buffer_for_itself(dispatches, inputs, kept, elsewhere, **_):
    """In place of `assign_memory`: no memory is used twice."""
    touched = [*(b for d in dispatches for b, _ in d.slots), *kept]
    buffers = {id(b): b for b in touched if b.kind in ("temp", "input") and id(b) not in elsewhere}
    sizes = [max(4, (b.nbytes + 3) // 4 * 4) for b in buffers.values()]
    return memory.Layout({key: (arena, 0) for arena, key in enumerate(buffers)}, sizes, sum(sizes))


@given(graphs(), st.integers(0, 3))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_graphs_with_and_without_reuse_of_memory_agree_bit_for_bit(maker, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(maker.graph.values[i].shape, generator=generator) for i in maker.graph.inputs]
    shared = run(maker.graph, inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "assign_memory", every_buffer_for_itself)
        alone = run(maker.graph, inputs)
    for actual, wanted in zip(shared, alone, strict=True):
        np.testing.assert_array_equal(actual, wanted)


def test_a_pointwise_chain_is_one_kernel():
    m = Maker()
    x, y = m.input(7, 5), m.input(1, 5)
    z = m(
        "mul.Tensor",
        self=m("exp.default", self=x),
        other=m("transpose.int", self=m("transpose.int", self=y, dim0=0, dim1=1), dim0=0, dim1=1),
    )
    m.graph.outputs = [m("relu.default", self=m("add.Tensor", self=z, other=x)).value]
    assert len(lower(m.graph).dispatches) == 1
    check(m, [torch.randn(7, 5), torch.randn(1, 5)])


def test_a_value_with_two_readers_is_computed_once():
    m = Maker()
    x = m.input(7, 5)
    z = m("exp.default", self=x)
    first, second = m("neg.default", self=z), m("add.Tensor", self=z, other=x)
    m.graph.outputs = [first.value, second.value]
    dispatches = lower(m.graph).dispatches
    assert sum("exp(" in d.code.split("fn main")[0].split("fn load_x")[-1] for d in dispatches) == 1
    check(m, [torch.randn(7, 5)])


def test_views_move_no_data():
    m = Maker()
    x = m.input(4, 6)
    y = m("permute.default", self=m("slice.Tensor", self=x, dim=0, start=1, end=3, step=1), dims=[1, 0])
    m.graph.outputs = [m("neg.default", self=y).value]
    assert len(lower(m.graph).dispatches) == 1
    check(m, [torch.randn(4, 6)])


@pytest.mark.parametrize("kind", ["pending", "scalar", "memory", "empty", "counted", "computed"])
def test_a_reshape_to_another_number_of_elements_is_an_error(kind: str) -> None:
    """Whatever the value is made of: nothing but strides would tell otherwise, which only memory has."""
    memory_of = {n: Tensor(Buffer("temp", 4 * n, ""), F32, (n,), (1,)) for n in (0, 6)}
    value = {
        "pending": lambda: values.Value((6,), F32, values.Pending(None, F32)),
        "scalar": lambda: values.scalar(1.0, F32, (6,)),
        "memory": lambda: values.of_tensor(memory_of[6]),
        "empty": lambda: values.of_tensor(memory_of[0]),
        "counted": lambda: values.iota(6, 0, 1, "int32"),
        "computed": lambda: values.cast(values.of_tensor(memory_of[6]), "int32"),
    }[kind]()
    same = (0, 3) if kind == "empty" else (2, 3)
    reshaped = values.reshape(value, same)
    assert reshaped is not None and reshaped.shape == same
    for shape in ((5,), (2, 4), ()):
        with pytest.raises(AssertionError, match=r"cannot reshape \((6|0),\) to"):
            values.reshape(value, shape)


def test_the_same_value_twice_among_the_outputs_and_an_input_as_output():
    m = Maker()
    x = m.input(3)
    y = m("neg.default", self=x)
    m.graph.outputs = [y.value, y.value, x.value]
    check(m, [torch.randn(3)])


def test_a_long_chain_is_cut():
    """More work than one kernel carries: still right, in more than one kernel."""
    m = Maker()
    first = x = m.input(5)
    for _ in range(200):
        x = m("add.Tensor", self=x, other=first)
    m.graph.outputs = [x.value]
    assert 1 < len(lower(m.graph).dispatches) < 10
    check(m, [torch.arange(5, dtype=torch.float32)])


def test_more_operands_than_bindings():
    """A sum of 20 inputs has to fit kernels of 8 storage buffers."""
    m = Maker()
    inputs = [m.input(3) for _ in range(20)]
    total = inputs[0]
    for other in inputs[1:]:
        total = m("add.Tensor", self=total, other=other)
    m.graph.outputs = [total.value]
    lowered = lower(m.graph)
    assert max(len(d.slots) for d in lowered.dispatches) <= Capabilities().max_storage_buffers
    check(m, [torch.full((3,), float(i)) for i in range(20)])


def test_r2_groups_fold_over_two_dims():
    for groups in (1, 65535, 65536, 70001, 65535 * 2, 4194241, 65535 * 65535):
        x, y, z = fold(groups)
        assert max(x, y, z) <= 65535
        assert groups <= x * y < groups + x
    with pytest.raises(ValueError, match="more than a dispatch can hold"):
        fold(65535 * 65535 + 1)


@pytest.mark.parametrize("rows", [0, 1, 6])
def test_symbolic_arguments_are_evaluated(rows):
    """Sizes in arguments follow the live shape."""
    size = Expr("s0")
    graph = Graph(symbols={"s0": (0, 9)})
    x = graph.add_value(TensorSpec(F32, (size, 3)))
    y = graph.add_value(TensorSpec(F32, (Expr("*", (size, 3)),)))
    graph.inputs, graph.outputs = [x], [y]
    graph.nodes = [Node("aten.view_copy.default", {"self": Ref(x), "size": [Expr("*", (size, 3))]}, (y,))]
    array = torch.randn(rows, 3)
    np.testing.assert_array_equal(run(graph, [array])[0], array.reshape(-1).numpy())


def test_loops_that_a_device_would_end_are_refused():
    """llvmpipe ends all loops of an invocation after 65535 iterations, and says nothing."""
    Capabilities().check_iterations(10**9, "a row")
    short = Capabilities(most_iterations=60000)
    short.check_iterations(60000, "a row")
    with pytest.raises(DeviceError, match="a row of 9 elements takes loops of 60001 iterations, and this adapter ends"):
        short.check_iterations(60001, "a row of 9 elements")
