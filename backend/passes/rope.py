"""Rotary embedding, x · cos + rotated(x) · sin → `zoo.rope`: one kernel that reads x twice, no joined copy.

Both forms: rotated halves, cat(-x[h:], x[:h]), and rotated pairs, stack(-x[1::2], x[::2]).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from backend.graph import Graph, Node, Ref
from backend.passes.match import RESHAPES, SLICES, UNSQUEEZES, Rewriter, both_ways, origins, rewrite

_MUL, _NEG, _CAT = ("aten.mul.Tensor",), ("aten.neg.default",), ("aten.cat.default",)


def fuse_rope(graph: Graph) -> Graph:
    return rewrite(graph, _rope)


def _rope(look: Rewriter, node: Node) -> Sequence[Node] | None:
    if node.op != "aten.add.Tensor" or node.args.get("alpha", 1) != 1:
        return None
    for left, right in both_ways(node):
        plain, turned = (look.producer(side, _MUL, once=True) for side in (left, right))
        if plain is None or turned is None:
            continue
        for rotated, sin in both_ways(turned):
            found = _rotated(look, rotated)
            for x, cos in both_ways(plain) if found is not None else ():
                if found is None or x != found[0] or not isinstance(sin, Ref) or not isinstance(cos, Ref):
                    continue
                args = {"x": x, "cos": cos, "sin": sin, "interleaved": found[1]}
                fused = Node("zoo.rope", args, node.outputs, origins(*reversed([node, plain, turned, *found[2]])))
                return [fused] if look.accepted(fused) else None
    return None


def _rotated(look: Rewriter, arg: Any) -> tuple[Ref, bool, list[Node]] | None:
    """(x, interleaved, nodes) of a rotation of x."""
    view = look.producer(arg, RESHAPES, once=True)
    cat = look.producer(view.args["self"] if view is not None else arg, _CAT, once=True)
    if cat is None or len(cat.args["tensors"]) != 2:
        return None
    rank = look.graph.values[cat.outputs[0] or 0].rank
    if cat.args.get("dim", 0) % rank != rank - 1:
        return None
    taken = [*([view] if view is not None else []), cat]
    first, second = cat.args["tensors"]
    if view is not None:  # pairs, each number unsqueezed
        for part in (first, second):
            node = look.producer(part, UNSQUEEZES, once=True)
            if node is None or node.args["dim"] % rank != rank - 1:
                return None
            taken.append(node)
        first, second = taken[-2].args["self"], taken[-1].args["self"]
    neg = look.producer(first, _NEG, once=True)
    high = look.producer(neg.args["self"], SLICES, once=True) if neg is not None else None
    low = look.producer(second, SLICES, once=True)
    if neg is None or high is None or low is None or high.args["self"] != low.args["self"]:
        return None
    x: Ref = low.args["self"]
    spec = look.spec(x)
    width = spec.shape[-1] if spec.rank else 0
    if not isinstance(width, int) or look.spec(arg).shape != spec.shape:
        return None
    wanted = (
        (range(1, width, 2), range(0, width, 2)) if view is not None else (range(width // 2, width), range(width // 2))
    )
    for node, positions in zip((high, low), wanted, strict=True):
        start, end, step = node.args.get("start"), node.args.get("end"), node.args.get("step", 1)
        if node.args.get("dim", 0) % spec.rank != spec.rank - 1 or not all(
            isinstance(i, int | None) for i in (start, end, step)
        ):
            return None
        if list(range(width)[slice(start, end, step)]) != list(positions):
            return None
    return x, view is not None, [*taken, neg, high, low]
