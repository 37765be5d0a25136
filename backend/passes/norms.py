"""RMSNorm spelled out (square, mean, eps, rsqrt, two products, casts between) → `aten.rms_norm`; x · sigmoid(x) → silu.

The fused operators compute in float32 and round once, where a float16 graph rounds at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from backend.graph import Graph, Node, Ref
from backend.passes.match import CASTS, Rewriter, both_ways, origins, rewrite

_MUL = ("aten.mul.Tensor",)
_SQUARES = ("aten.pow.Tensor_Scalar", "aten.mul.Tensor", "aten.square.default")


def fuse_rms_norm(graph: Graph) -> Graph:
    return rewrite(rewrite(graph, _weighted), _bare)


def _weighted(look: Rewriter, node: Node) -> Sequence[Node] | None:
    if node.op not in _MUL:
        return None
    for weight, normed in both_ways(node):
        if not (isinstance(weight, Ref) and isinstance(normed, Ref)) or look.spec(weight).rank != 1:
            continue
        taken = [node]
        cast = look.producer(normed, CASTS, once=True)
        if cast is not None:
            taken.append(cast)
            normed = cast.args["self"]
        inner = look.producer(normed, _MUL, once=True)
        if inner is not None and look.spec(weight).shape == look.spec(normed).shape[-1:]:
            return _fused(look, node, inner, weight, [*taken, inner])
    return None


def _bare(look: Rewriter, node: Node) -> Sequence[Node] | None:
    return _fused(look, node, node, None, [node]) if node.op in _MUL else None


def _fused(look: Rewriter, root: Node, inner: Node, weight: Ref | None, taken: list[Node]) -> Sequence[Node] | None:
    for x, scale in both_ways(inner):
        found = _scale_of(look, x, scale)
        if found is None:
            continue
        eps, below = found
        taken = [*taken, *below]
        out = look.graph.values[root.outputs[0] or 0]
        cast = look.producer(x, CASTS)
        if look.spec(x).dtype != out.dtype and cast is not None:
            x = cast.args["self"]
            taken.append(cast)
        width = out.shape[-1]
        if look.spec(x).dtype != out.dtype or look.spec(x).shape != out.shape or not isinstance(width, int):
            return None
        args = {"input": x, "normalized_shape": [width], "weight": weight, "eps": eps}
        fused = Node("aten.rms_norm.default", args, root.outputs, origins(*reversed(taken)))
        return [fused] if look.accepted(fused) else None
    return None


def _scale_of(look: Rewriter, x: Any, scale: Any) -> tuple[float, list[Node]] | None:
    """(eps, nodes) if `scale` is rsqrt(mean(x²) + eps) over the last axis."""
    root = look.producer(scale, ("aten.rsqrt.default",), once=True)
    total = root and look.producer(root.args["self"], ("aten.add.Tensor", "aten.add.Scalar"), once=True)
    if root is None or total is None or total.args.get("alpha", 1) != 1:
        return None
    eps = look.number(total.args["other"])
    mean = look.producer(total.args["self"], ("aten.mean.dim",), once=True)
    if eps is None or mean is None or not mean.args.get("keepdim") or mean.args.get("dtype") is not None:
        return None
    rank = look.spec(mean.args["self"]).rank
    if [axis % rank for axis in mean.args["dim"] or ()] != [rank - 1]:
        return None
    square = look.producer(mean.args["self"], _SQUARES, once=True)
    if square is None or square.args["self"] != x:
        return None
    if square.op in _MUL and square.args["other"] != x:
        return None
    if "exponent" in square.args and square.args["exponent"] != 2:
        return None
    return eps, [root, total, mean, square]


def fuse_silu(graph: Graph) -> Graph:
    return rewrite(graph, _silu)


def _silu(look: Rewriter, node: Node) -> Sequence[Node] | None:
    for x, gate in both_ways(node) if node.op in _MUL else ():
        sigmoid = look.producer(gate, ("aten.sigmoid.default",), once=True)
        if sigmoid is not None and sigmoid.args["self"] == x:
            fused = Node("aten.silu.default", {"self": x}, node.outputs, origins(sigmoid, node))
            same = look.spec(x) == look.graph.values[node.outputs[0] or 0] or look.spec(x).is_constant
            return [fused] if same and look.accepted(fused) else None
    return None
