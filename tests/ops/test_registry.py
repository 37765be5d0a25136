"""pytest tests/ops/test_registry.py: the registry tells the truth. ZOO_CASES=200 draws that many nodes an operator.

With --hypothesis-seed=N, a long draw can be run again.

For every declared operator, nodes are drawn (`draws.py`); those that its declaration accepts run on the device, their
inputs sometimes permuted, cut or reversed by views before and their results permuted after, and are compared with
float64 eager. By default the draws are few and the same every time; with ZOO_CASES they are many and new each run.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st

from backend.convert import dtype_name, op_name
from backend.graph import Graph, Node, Ref, TensorSpec
from backend.ops import registry
from backend.partitioner import WebGPUPartitioner
from tests.ops.draws import WITHOUT, Draw, strategy, without_strategy
from tests.ops.harness import EXACT, F16, F32, _promote, as_tuple, assert_close, build, overload, run_graph

CASES = int(os.environ.get("ZOO_CASES", "0"))
LOOSE = {"atol": 2e-5, "rtol": 2e-5}  # sums of up to a few thousand float32 products: their order is the kernel's own
# Sums in float32 of elements up to 40 that may cancel: the error grows with their number, not with the result.
SUMS = ("sum", "mean", "var", "std", "norm", "mm", "matmul", "linear", "conv", "dot", "mv")
TOLERANCES = {
    # Steep where a driver's exp, or the argument's own last digit, is amplified by the size of the argument.
    "aten.exp.default": {"atol": 1e-6, "rtol": 1e-4},
}
FEW = settings(max_examples=8, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
MANY = settings(FEW, max_examples=max(CASES, 1), derandomize=False, print_blob=True)


def test_every_operator_has_a_strategy() -> None:
    assert without_strategy() == [], "write a strategy in draws.py, or say in WITHOUT why there is none"
    assert [name for name in WITHOUT if registry.find(name) is None] == []


class _Calls(torch.nn.Module):
    """Every call of a list, one after the other."""

    def __init__(self, calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]):
        super().__init__()
        self.calls = calls

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        results = [x + 1]
        for op, args, kwargs in self.calls:
            results += as_tuple(op(*args, **kwargs))
        return results


class _Spy(WebGPUPartitioner):
    """Keeps the names of the operators that it is given."""

    def partition(self, exported_program: Any) -> Any:
        self.seen = {op_name(node.target) for node in exported_program.graph.nodes if node.op == "call_function"}
        return super().partition(exported_program)


def test_preserved_operators_exist_and_survive_export() -> None:
    """One program of all of them: what export is asked to keep whole must reach the partitioner whole."""

    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    @settings(FEW, max_examples=1)
    @given(st.data())
    def draw(data: st.DataObject) -> None:
        for name in registry.preserved():
            drawn = strategy(name)
            assert drawn is not None, name
            args, kwargs = drawn(Draw(data, name))
            graph, *_ = build(name, args, kwargs)
            assert registry.refusal(graph.call(graph.nodes[0])) is None, name
            calls.append((overload(name), args, kwargs))

    draw()
    spy = _Spy()
    program = torch.export.export(_Calls(calls).eval(), (torch.zeros(1),))
    to_edge_transform_and_lower(program, partitioner=[spy])
    lost = sorted(set(registry.preserved()) - spy.seen)
    assert lost == [], f"decomposed all the same: {lost}"
    assert spy.refusals == []


def _view_before(draw: Draw, graph: Graph, index: int, feed: np.ndarray) -> np.ndarray:
    """Makes value `index`, an input, the view of another input; returns that input's array."""
    spec, rank = graph.values[index], feed.ndim
    kind = draw.one(("permute", "slice", "flip", "expand"))
    position = graph.inputs.index(index)

    def replaced(array: np.ndarray, op: str, args: dict[str, Any]) -> np.ndarray:
        source = graph.add_value(TensorSpec(spec.dtype, array.shape))
        graph.inputs[position] = source
        graph.nodes.insert(0, Node(op, {"self": Ref(source), **args}, (index,)))
        return np.asarray(array, order="C")  # ascontiguousarray would give a scalar an axis

    if kind == "permute":
        order = draw.data.draw(st.permutations(range(rank)))
        back = [order.index(axis) for axis in range(rank)]
        return replaced(feed.transpose(order), "aten.permute.default", {"dims": back})
    axis = draw.int(0, rank - 1)
    if kind == "slice":
        wide = np.zeros((*feed.shape[:axis], 2 * feed.shape[axis] + 3, *feed.shape[axis + 1 :]), feed.dtype)
        where = (slice(None),) * axis
        wide[(*where, slice(2, 2 + 2 * feed.shape[axis], 2))] = feed
        args = {"dim": axis, "start": 2, "end": 2 + 2 * feed.shape[axis], "step": 2}
        return replaced(wide, "aten.slice.Tensor", args)
    if kind == "flip":
        return replaced(np.flip(feed, axis), "aten.flip.default", {"dims": [axis]})
    if feed.shape[axis] != 1:
        return feed
    return replaced(feed.squeeze(axis), "aten.unsqueeze.default", {"dim": axis})


def _view_after(draw: Draw, graph: Graph, results: list[np.ndarray] | None, order: list[int]) -> None:
    """The first output, permuted."""
    index = graph.outputs[0]
    spec = graph.values[index]
    out = graph.add_value(TensorSpec(spec.dtype, tuple(spec.shape[axis] for axis in order)))
    graph.nodes.append(Node("aten.permute.default", {"self": Ref(index), "dims": order}, (out,)))
    graph.outputs[0] = out


def _tolerance(op: str, dtype: str, inputs: list[np.ndarray]) -> dict[str, float]:
    if dtype == "float16":
        return F16
    if not dtype.startswith("float"):
        return EXACT
    if op in TOLERANCES:
        return TOLERANCES[op]
    finite = [np.abs(a[np.isfinite(a)]).max(initial=1.0) for a in inputs if np.issubdtype(a.dtype, np.floating)]
    scale = float(max(finite, default=1.0))
    if op.startswith(("aten.sum.", "aten.mean.", "aten.cumsum.")):
        # Whole numbers that are added as floats, too.
        scale = max(
            [scale, *(float(np.abs(a.astype(np.float64)).max(initial=0)) for a in inputs if a.dtype.kind in "iu")]
        )
        return {"atol": 2e-6 * scale * math.sqrt(max(a.size for a in inputs)), "rtol": 2e-5}
    if any(part in op for part in SUMS):
        size = max((a.size for a in inputs), default=1)
        return {"atol": 2e-6 * max(scale, scale * scale) * math.sqrt(size), "rtol": 2e-5}
    if "upsample_bi" in op:
        # Means of up to 16 elements, with weights that add up to 2.3 in size, may cancel: roundings are the elements'.
        return {"atol": 5e-7 * scale, "rtol": 1e-5}
    return F32


def _promoted(op: str, item: Any) -> Any:
    """linspace in float16 rounds its step as well; the truth is what float64 counts."""
    return torch.float64 if op == "aten.linspace.default" and isinstance(item, torch.dtype) else _promote(item)


def _golden(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The operator in float64. Raises what torch raises."""
    args, kwargs = tuple(_promote(args)), {key: _promoted(op, value) for key, value in kwargs.items()}
    golden = as_tuple(overload(op)(*args, **kwargs))
    if op in ("aten.var_mean.correction", "aten.std_mean.correction"):
        # Eager's update of a mean gives NaN or infinity by where in the row an infinity stands; the sum of it does not.
        golden = (golden[0], args[0].mean(args[1], kwargs["keepdim"]))
    return golden


def described(item: Any) -> str:
    """For the report of a failure: small tensors whole, larger ones by dtype and shape."""
    if isinstance(item, torch.Tensor):
        kind = f"{dtype_name(item.dtype)}{list(item.shape)}"
        return f"{kind} {item.tolist()}" if item.numel() <= 12 else kind
    if isinstance(item, dict):
        return f"{{{', '.join(f'{key}={described(value)}' for key, value in item.items())}}}"
    return f"({', '.join(map(described, item))})" if isinstance(item, (list, tuple)) else repr(item)


def check_drawn(op: str, data: st.DataObject) -> bool:
    """Draws a node; False when torch or the registry does not take it. Raises `AssertionError` on a difference."""
    draw = Draw(data, op)
    drawn = strategy(op)
    assert drawn is not None
    args, kwargs = drawn(draw)
    try:
        graph, feeds, constants, eager = build(op, args, kwargs)
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        return False  # not a call of torch's
    if registry.refusal(graph.call(graph.nodes[0])) is not None:
        return False
    if any(not t.is_floating_point() and t.numel() and t.abs().max() >= 2**31 for t in eager if t.dtype == torch.int64):
        return False  # does not fit the GPU's integers
    note(f"{op} {described(args)} {described(kwargs)}")
    inputs = list(feeds)
    for index in list(graph.inputs):
        position = graph.inputs.index(index)
        if feeds[position].ndim and draw.seldom():
            feeds[position] = _view_before(draw, graph, index, feeds[position])
    order = list(range(eager[0].dim())) if eager else []
    if len(order) > 1 and draw.seldom():
        order = draw.data.draw(st.permutations(order))
        _view_after(draw, graph, None, order)
    results = run_graph(graph, feeds, constants)
    with np.errstate(all="ignore"):
        try:
            golden = _golden(op, args, kwargs)
        except (RuntimeError, NotImplementedError, AssertionError):  # quantized_decomposed asserts float32
            golden = eager
    if order and results[0].ndim == len(order):
        results[0] = results[0].transpose([order.index(axis) for axis in range(len(order))])
    assert len(results) == len(eager)
    for actual, reference, exact in zip(results, eager, golden, strict=True):
        assert actual.dtype == np.dtype(dtype_name(reference.dtype)), f"{actual.dtype}, expected {reference.dtype}"
        assert actual.shape == tuple(reference.shape), f"shape {actual.shape}, expected {tuple(reference.shape)}"
        tolerance = _tolerance(op, dtype_name(reference.dtype), inputs)
        # Rounding and comparisons jump: what eager says of the same numbers in the same dtype is right as well.
        golden_array, eager_array = exact.numpy(), reference.numpy()
        try:
            assert_close(actual, golden_array, **tolerance)
        except AssertionError:
            assert_close(actual, eager_array, **tolerance)
    return True


RUNNABLE = [name for name in registry.names() if name not in WITHOUT]


@pytest.mark.parametrize("op", RUNNABLE)
def test_accepted_nodes_agree_with_float64_eager(op: str, drawn: Counter[str]) -> None:
    @(MANY if CASES else FEW)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        taken = check_drawn(op, data)
        drawn[op] += taken
        assume(taken)

    check()
    assert drawn[op], "not one drawn node was accepted: the strategy says nothing of this operator"
