"""A graph as bytes: what a delegate of a `.pte` holds.

4 bytes magic `ZWG1`, u32 format version, u64 length of the JSON, SHA-256 of the JSON, then the JSON (UTF-8).
Weights are not in the blob; a constant names its bytes by key in the program's named data.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from typing import Any

from backend.expr import Dim, Expr, ExprError, parse
from backend.graph import BlobError, Graph, Node, Ref, TensorSpec

MAGIC = b"ZWG1"
VERSION = 1
_HEADER = struct.Struct("<4sIQ32s")


def to_blob(graph: Graph) -> bytes:
    graph.check()
    document = {
        "symbols": {name: list(bounds) for name, bounds in graph.symbols.items()},
        "values": [_spec_to_json(spec) for spec in graph.values],
        "inputs": graph.inputs,
        "outputs": graph.outputs,
        "sizes": [[index, _dim_to_json(dim)] for index, dim in graph.sizes.items()],
        "mutations": [list(pair) for pair in graph.mutations.items()],
        "nodes": [
            {"op": node.op, "args": {k: _arg_to_json(v) for k, v in node.args.items()}, "outputs": list(node.outputs)}
            for node in graph.nodes
        ],
    }
    text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    return _HEADER.pack(MAGIC, VERSION, len(text), hashlib.sha256(text).digest()) + text


def from_blob(blob: bytes | memoryview) -> Graph:
    """Raises `BlobError` for anything but a whole, unaltered blob of this format version."""
    data = bytes(blob)
    if len(data) < _HEADER.size:
        raise BlobError(f"delegate blob is truncated: {len(data)} bytes")
    magic, version, length, digest = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise BlobError("not a delegate blob of this backend")
    if version != VERSION:
        raise BlobError(f"delegate blob has format version {version}, this runtime reads {VERSION}: export again")
    text = data[_HEADER.size : _HEADER.size + length]
    if len(text) != length:
        raise BlobError(f"delegate blob is truncated: {len(text)} of {length} bytes of its graph")
    if hashlib.sha256(text).digest() != digest:
        raise BlobError("delegate blob is corrupt: its checksum does not match")
    try:
        document = json.loads(text)
        graph = Graph(
            values=[_spec_from_json(item) for item in document["values"]],
            inputs=_ints(document["inputs"]),
            outputs=_ints(document["outputs"]),
            nodes=[
                Node(
                    str(item["op"]),
                    {k: _arg_from_json(v) for k, v in item["args"].items()},
                    tuple(None if out is None else int(out) for out in item["outputs"]),
                )
                for item in document["nodes"]
            ],
            sizes={int(index): _dim_from_json(dim) for index, dim in document["sizes"]},
            mutations={int(state): int(value) for state, value in document["mutations"]},
            symbols={
                str(name): (int(low), None if high is None else int(high))
                for name, (low, high) in document["symbols"].items()
            },
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
        raise BlobError(f"delegate blob is malformed: {error}") from error
    graph.check()
    return graph


def _ints(items: Any) -> list[int]:
    if not isinstance(items, list):
        raise TypeError(f"not a list: {items!r}")
    return [int(item) for item in items]


def _dim_to_json(dim: Dim) -> int | str:
    return dim if isinstance(dim, int) else str(dim)


def _dim_from_json(item: int | str) -> Dim:
    if isinstance(item, str):
        return parse(item)
    if type(item) is not int:
        raise ExprError(f"not a dimension: {item!r}")
    return item


def _spec_to_json(spec: TensorSpec) -> dict[str, Any]:
    item: dict[str, Any] = {"dtype": spec.dtype, "shape": [_dim_to_json(dim) for dim in spec.shape]}
    if spec.constant is not None:
        item["constant"] = spec.constant
    if spec.state is not None:
        item["state"] = spec.state
    return item


def _spec_from_json(item: dict[str, Any]) -> TensorSpec:
    shape = tuple(_dim_from_json(dim) for dim in item["shape"])
    return TensorSpec(str(item["dtype"]), shape, item.get("constant"), item.get("state"))


def _arg_to_json(arg: Any) -> Any:
    if isinstance(arg, Ref):
        return {"v": arg.value}
    if isinstance(arg, Expr):
        return {"e": str(arg)}
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"f": repr(arg)}
    if isinstance(arg, (list, tuple)):
        return [_arg_to_json(item) for item in arg]
    if arg is None or isinstance(arg, (bool, int, float, str)):
        return arg
    raise TypeError(f"argument {arg!r} cannot be written to a graph")


def _arg_from_json(item: Any) -> Any:
    if isinstance(item, list):
        return [_arg_from_json(part) for part in item]
    if isinstance(item, dict):
        ((kind, value),) = item.items()
        return {"v": lambda: Ref(int(value)), "e": lambda: parse(value), "f": lambda: float(value)}[kind]()
    return item
