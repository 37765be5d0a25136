"""pytest tests/ops/test_hostile_nodes.py: whole blobs of nodes that export never wrote. ZOO_CASES=2000 for a long run.

Nodes are drawn as in `test_registry.py`, then one thing of them is changed: an argument, a shape, a dtype, the number
of outputs. Loading and running such a blob gives an error of ours, or some result of the declared shape; it never gives
another error, a hang, or the end of the process.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from backend.blob import to_blob
from backend.graph import DTYPES, BlobError, Graph, ShapeError
from backend.ops import registry
from backend.runtime.delegate import Delegate
from backend.runtime.errors import DeviceError
from tests.ops.draws import WITHOUT, Draw, strategy
from tests.ops.harness import build

CASES = int(os.environ.get("ZOO_CASES", "0"))
ODD = (
    -1,
    0,
    1,
    2,
    3,
    -(2**31),
    2**31,
    2**33,
    2**62,
    None,
    True,
    0.5,
    math.nan,
    "none",
    [],
    [1],
    [2, 2],
    [-1, 0],
    [2**33],
)
DIMS = (0, 1, 2, 3, 5, 2**16, 2**31, 2**39)
SECONDS = 20  # for one blob, on a slow machine
MOST_FED = 2**20


def mutated(draw: Draw, graph: Graph) -> Graph:
    node = graph.nodes[0]
    kind = draw.one(("argument", "shape", "dtype", "rank", "outputs", "missing"))
    if kind == "argument":
        name = draw.one(sorted(node.args))
        return replace(graph, nodes=[replace(node, args={**node.args, name: draw.one(ODD)})])
    if kind == "missing":
        name = draw.one(sorted(node.args))
        return replace(graph, nodes=[replace(node, args={k: v for k, v in node.args.items() if k != name})])
    if kind == "outputs":
        extra = len(graph.values)
        outputs = draw.one(((), (*node.outputs, extra), (None,) * len(node.outputs), node.outputs[:1]))
        kept = [out for out in outputs if out is not None]
        return replace(
            graph, values=[*graph.values, graph.values[-1]], nodes=[replace(node, outputs=outputs)], outputs=kept
        )
    at = draw.int(0, len(graph.values) - 1)
    spec, values = graph.values[at], list(graph.values)
    if kind == "dtype":
        values[at] = replace(spec, dtype=draw.one(DTYPES))
    elif kind == "rank" or not spec.shape:
        values[at] = replace(spec, shape=(*spec.shape, draw.one(DIMS)))
    else:
        axis = draw.int(0, spec.rank - 1)
        values[at] = replace(spec, shape=(*spec.shape[:axis], draw.one(DIMS), *spec.shape[axis + 1 :]))
    return replace(graph, values=values)


def feeds(graph: Graph) -> list[np.ndarray]:
    """Zeros as declared; an array that would be huge is one of no elements."""
    specs = [graph.values[index] for index in graph.inputs]
    sizes = [spec.shape if math.prod(map(int, spec.shape)) <= MOST_FED else (0,) * spec.rank for spec in specs]
    return [np.zeros(size, spec.dtype) for spec, size in zip(specs, sizes, strict=True)]


def check_hostile(op: str, data: Any) -> None:
    draw = Draw(data, op)
    drawn = strategy(op)
    assert drawn is not None
    args, kwargs = drawn(draw)
    try:
        graph, *_ = build(op, args, kwargs)
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        return
    graph = mutated(draw, graph)
    note(f"{graph.nodes} {list(map(str, graph.values))}")
    start = time.monotonic()
    try:
        delegate = Delegate(to_blob(graph), {}.__getitem__)
        results = delegate.execute(feeds(graph))
    except (BlobError, ShapeError, DeviceError, OverflowError) as error:
        assert str(error)
    else:
        for index, result in zip(graph.outputs, results, strict=True):
            assert (str(result.dtype), result.shape) == (graph.values[index].dtype, graph.values[index].shape)
        delegate.close()
    assert time.monotonic() - start < SECONDS


@settings(
    max_examples=CASES or 250,
    deadline=None,
    derandomize=not CASES,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.data())
def test_errors_only(data: st.DataObject) -> None:
    names = [name for name in registry.names() if name not in WITHOUT]
    check_hostile(data.draw(st.sampled_from(names)), data)
