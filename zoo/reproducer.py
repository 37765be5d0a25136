"""A case of a graph in a folder, which runs alone: graph, inputs, data, golden values and a script."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backend.blob import to_blob
from backend.expr import Expr, evaluate
from backend.graph import ITEM_BYTES, Graph, TensorSpec
from backend.quantization import joined_sources
from zoo.eager import interpret
from zoo.files import staged

_KEPT_BYTES = 512 << 20  # of inputs and data

_SCRIPT = '''"""{title}

python run.py, where `backend` can be imported: numpy and wgpu are enough.
"""

from pathlib import Path

import numpy as np

from backend.runtime.delegate import Delegate

here = Path(__file__).resolve().parent
data, inputs, golden = (np.load(here / name) for name in ("data.npz", "inputs.npz", "golden.npz"))
delegate = Delegate((here / "graph.zwg").read_bytes(), lambda key: np.ascontiguousarray(data[key]).tobytes())
outputs = delegate.execute([inputs[name] for name in inputs.files])
for actual, name in zip(outputs, golden.files):
    expected = golden[name]
    error = np.abs(actual.astype(np.float64) - expected)
    print("largest difference", np.max(error, initial=0), "of values up to", np.max(np.abs(expected), initial=0))
'''


def write_reproducer(
    place: Path, graph: Graph, inputs: Sequence[np.ndarray], get_data: Callable[[str], Any], title: str
) -> Path | None:
    """Writes the folder `place` whole or not at all; None where it would be too large to keep."""
    graph = graph.compacted()
    constants = [spec for spec in graph.values if spec.constant is not None]
    stored: dict[str, Any] = {key: piece for spec in constants for key, piece in _pieces(spec, get_data)}
    if sum(array.nbytes for array in [*inputs, *stored.values()]) > _KEPT_BYTES:
        return None
    data = {spec.constant: constant(spec, get_data) for spec in constants if spec.constant is not None}
    golden = interpret(graph, [torch.from_numpy(np.array(array)) for array in inputs], data, double=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    with staged(place) as (made,):
        made.mkdir()
        (made / "graph.zwg").write_bytes(to_blob(graph))
        np.savez(made / "inputs.npz", *inputs)
        np.savez(made / "data.npz", **stored)
        np.savez(made / "golden.npz", *(tensor.numpy() for tensor in golden))
        (made / "run.py").write_text(_SCRIPT.format(title=title))
    return place


def static(graph: Graph, env: Mapping[str, int]) -> Graph:
    """The graph at one set of sizes."""

    def settle(arg: Any) -> Any:
        if isinstance(arg, Expr):
            return evaluate(arg, env)
        return [settle(item) for item in arg] if isinstance(arg, (list, tuple)) else arg

    values = [replace(spec, shape=spec.concrete(env)) for spec in graph.values]
    nodes = [replace(node, args={name: settle(arg) for name, arg in node.args.items()}) for node in graph.nodes]
    return replace(graph, values=values, nodes=nodes, symbols={}, sizes={})


def constant(spec: TensorSpec, get_data: Callable[[str], Any]) -> torch.Tensor:
    """Named data as a tensor."""
    pieces = [piece for _, piece in _pieces(spec, get_data)]
    return torch.from_numpy(np.concatenate(pieces) if len(pieces) > 1 else pieces[0].copy())


def _pieces(spec: TensorSpec, get_data: Callable[[str], Any]) -> list[tuple[str, np.ndarray]]:
    """The named data of a constant: of one key, or rows of each of several that were joined."""
    assert spec.constant is not None
    shape, sources = spec.concrete({}), joined_sources(spec.constant)
    if len(sources) > 1:
        return [(key, np.frombuffer(get_data(key), spec.dtype).reshape(-1, *shape[1:])) for key in sources]
    # An empty constant has a byte in the file.
    data = memoryview(get_data(sources[0])).cast("B")[: math.prod(shape) * ITEM_BYTES[spec.dtype]]
    return [(sources[0], np.frombuffer(data, spec.dtype).reshape(shape))]
