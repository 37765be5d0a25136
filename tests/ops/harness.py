"""Runs one aten operator, or a small traced function, through the torch-free runtime and compares with float64 eager.

`check_op("aten.softmax.int", x, 1, rtol=…)` builds a one-node graph from the operator's schema, asks the registry
whether
it accepts, runs it on the device and compares with the same operator in float64. No export is involved, so a case takes
milliseconds. `refusal_of` gives the registry's reason for a case that must be refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from backend.blob import to_blob
from backend.convert import dtype_name, normalize
from backend.graph import Graph, Node, Ref, TensorSpec
from backend.ops import registry
from backend.runtime.delegate import Delegate

F32 = {"atol": 1e-6, "rtol": 1e-5}  # a few roundings of float32 (eps 1.2e-7) and of a driver's exp, log, sqrt
F16 = {"atol": 1e-3, "rtol": 2e-3}  # one rounding to float16 (eps 9.8e-4); arithmetic is float32
EXACT = {"atol": 0.0, "rtol": 0.0}


def overload(name: str) -> Any:
    """`aten.add.Tensor` → the torch operator."""
    namespace, op, kind = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), kind)


def _promote(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.double() if item.is_floating_point() else item
    if isinstance(item, (list, tuple)):
        return [_promote(part) for part in item]
    return item


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def build(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], constants: tuple[str, ...] = ()
) -> tuple[Graph, list[np.ndarray], dict[str, bytes], tuple[Any, ...]]:
    """A one-node graph, its inputs, its named data (arguments named in `constants`) and eager's result."""
    op = overload(name)
    eager = as_tuple(op(*args, **kwargs))
    graph = Graph()
    feeds: list[np.ndarray] = []
    data: dict[str, bytes] = {}

    def place(item: Any, constant: bool) -> Any:
        if isinstance(item, torch.Tensor):
            array = item.detach().contiguous().numpy()
            key = f"c{len(data)}" if constant else None
            index = graph.add_value(TensorSpec(dtype_name(item.dtype), tuple(item.shape), key))
            if key:
                data[key] = array.tobytes()
            else:
                graph.inputs.append(index)
                feeds.append(array)
            return Ref(index)
        if isinstance(item, (list, tuple)):
            return [place(part, constant) for part in item]
        return item

    named = {key: place(item, key in constants) for key, item in normalize(op, args, kwargs).items()}
    outputs = tuple(graph.add_value(TensorSpec(dtype_name(t.dtype), tuple(t.shape))) for t in eager)
    graph.nodes.append(Node(name, named, outputs))
    graph.outputs = list(outputs)
    return graph, feeds, data, eager


def refusal_of(name: str, *args: Any, constants: tuple[str, ...] = (), **kwargs: Any) -> str | None:
    graph, *_ = build(name, args, kwargs, constants)
    return registry.refusal(graph.call(graph.nodes[0]))


def run_graph(graph: Graph, feeds: list[np.ndarray], data: dict[str, bytes] | None = None) -> list[np.ndarray]:
    """Through the blob, so that serialisation is exercised too."""
    delegate = Delegate(to_blob(graph), (data or {}).__getitem__)
    try:
        return delegate.execute(feeds)
    finally:
        delegate.close()


def run_op(name: str, *args: Any, constants: tuple[str, ...] = (), **kwargs: Any) -> tuple[np.ndarray, ...]:
    graph, feeds, data, _ = build(name, args, kwargs, constants)
    reason = registry.refusal(graph.call(graph.nodes[0]))
    assert reason is None, f"{name} refused: {reason}"
    return tuple(run_graph(graph, feeds, data))


def check_op(
    name: str,
    *args: Any,
    atol: float | None = None,
    rtol: float | None = None,
    constants: tuple[str, ...] = (),
    golden: Callable[[], Any] | None = None,
    **kwargs: Any,
) -> tuple[np.ndarray, ...]:
    """Asserts dtype, shape and values of every output; the tolerance defaults to the output dtype's."""
    graph, feeds, data, eager = build(name, args, kwargs, constants)
    reason = registry.refusal(graph.call(graph.nodes[0]))
    assert reason is None, f"{name} refused: {reason}"
    results = run_graph(graph, feeds, data)
    wanted = (
        as_tuple(golden())
        if golden
        else as_tuple(overload(name)(*_promote(args), **{k: _promote(v) for k, v in kwargs.items()}))
    )
    for actual, reference, exact in zip(results, eager, wanted, strict=True):
        assert actual.dtype == np.dtype(dtype_name(reference.dtype)), (
            f"dtype {actual.dtype}, expected {reference.dtype}"
        )
        assert actual.shape == tuple(reference.shape), f"shape {actual.shape}, expected {tuple(reference.shape)}"
        default = F16 if reference.dtype == torch.float16 else F32 if reference.is_floating_point() else EXACT
        assert_close(
            actual, exact.numpy(), default["atol"] if atol is None else atol, default["rtol"] if rtol is None else rtol
        )
    return tuple(results)


def assert_close(actual: np.ndarray, golden: np.ndarray, atol: float, rtol: float) -> None:
    """NaN equals NaN and infinities equal themselves; the message gives max and mean difference."""
    if not np.issubdtype(actual.dtype, np.floating):
        wrong = actual != golden
        assert not wrong.any(), (
            f"{wrong.sum()} of {wrong.size} differ, first at {np.argwhere(wrong)[:3].tolist()}: "
            f"{actual[wrong][:5]} against {golden[wrong][:5]}"
        )
        return
    with np.errstate(all="ignore"):
        golden = golden.astype(np.float64)
        rounded = golden.astype(actual.dtype)
        same = (np.isnan(actual) & np.isnan(golden)) | (actual == rounded)
        difference = np.where(same, 0.0, np.abs(actual.astype(np.float64) - golden))
        difference = np.where(np.isnan(difference), np.inf, difference)
        wrong = difference > atol + rtol * np.where(np.isfinite(golden), np.abs(golden), 0)
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} out of tolerance, max difference {difference.max():.3g}, "
        f"mean {difference.mean():.3g}, "
        f"first at {np.argwhere(wrong)[:3].tolist()}: {actual[wrong][:5]} against {golden[wrong][:5]}"
    )
