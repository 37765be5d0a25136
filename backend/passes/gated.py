"""silu(x[..., :N]) × x[..., N:], of a tensor that nothing else reads → `zoo.swiglu`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from backend.graph import Graph, Node
from backend.passes.match import SLICES, Rewriter, both_ways, origins, rewrite


def fuse_swiglu(graph: Graph) -> Graph:
    return rewrite(graph, _swiglu)


def _swiglu(look: Rewriter, node: Node) -> Sequence[Node] | None:
    if node.op != "aten.mul.Tensor":
        return None
    for first, second in both_ways(node):
        silu = look.producer(first, ("aten.silu.default",), once=True)
        parts = [look.producer(part, SLICES, once=True) for part in (silu and silu.args["self"], second)]
        if silu is None or parts[0] is None or parts[1] is None:
            continue
        whole = parts[0].args["self"]
        ranges = [_range(look, part) for part in parts if part is not None]
        size = look.spec(whole).shape[-1]
        if whole != parts[1].args["self"] or look.uses[whole.value] != 2 or not isinstance(size, int) or size % 2:
            continue
        if ranges != [(0, size // 2), (size // 2, size)]:
            continue
        fused = Node("zoo.swiglu", {"input": whole}, node.outputs, origins(parts[0], silu, parts[1], node))
        return [fused] if look.accepted(fused) else None
    return None


def _range(look: Rewriter, node: Node) -> tuple[int, int] | None:
    """(start, end) of a slice of the last axis."""
    whole: Any = node.args["self"]
    rank, size = look.spec(whole).rank, look.spec(whole).shape[-1]
    start, end = node.args.get("start") or 0, node.args.get("end")
    if node.args.get("dim", 0) % rank != rank - 1 or node.args.get("step", 1) != 1:
        return None
    if not isinstance(size, int) or not isinstance(start, int) or not isinstance(end, int | None):
        return None
    return slice(start, end).indices(size)[:2]
