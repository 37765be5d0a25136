"""Linear layers that read the same input, one beside the other → one layer and slices of its result.

Queries, keys and values, a gate and its values, projections for several layers: one matrix product of many columns
keeps more of a GPU busy than several of few, and costs one dispatch. The weights become one constant, made ahead of
time (`backend.quantization.joined_key`): rows stay rows, so that it is their bytes one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from backend.expr import ExprError
from backend.graph import ITEM_BYTES, Graph, Node, Ref, TensorSpec
from backend.passes.match import Rewriter, origins
from backend.quantization import joined_key

LINEARS = ("aten.linear.default", "zoo.quantized_linear")
# Their constants, each with a row for each column of the result.
PARTS = ("weight", "bias", "scale", "zero_point")
MAX_BYTES = 128 << 20  # WebGPU promises bindings of this size on every device
ALIGNED = 4  # columns: what reads a slice goes on reading vectors


def join_linears(graph: Graph) -> Graph:
    look = Rewriter(replace(graph, values=list(graph.values)))
    found: dict[Hashable, list[Node]] = {}
    for node in graph.nodes:
        key = _key(look, node)
        if key is not None:
            found.setdefault(key, []).append(node)
    made: dict[int, list[Node]] = {}  # by the id of the node that they replace
    for members in found.values():
        for group in _within(look, members):
            joined = _join(look, group)
            if joined is not None:
                made.update({id(node): [] for node in group})
                made[id(group[0])] = joined
    nodes = [new for node in graph.nodes for new in made.get(id(node), [node])]
    return look.graph.rewired(nodes, {}).compacted() if made else graph


def _key(look: Rewriter, node: Node) -> Hashable | None:
    """Equal for layers that can be one; None for what is no such layer."""
    if node.op not in LINEARS or not isinstance(node.args["input"], Ref):
        return None
    kinds: list[Hashable] = []
    for name in PARTS:
        part = node.args.get(name)
        if part is None:
            kinds.append(None)
            continue
        spec = look.spec(part) if isinstance(part, Ref) else None
        # A weight with another reader would be stored twice.
        if spec is None or not spec.is_constant or not spec.is_static or spec.rank == 0:
            return None
        if name == "weight" and (spec.rank != 2 or spec.concrete({})[0] % ALIGNED or look.uses[part.value] != 1):
            return None
        kinds.append((spec.dtype, *spec.shape[1:]))
    others = tuple((name, value) for name, value in sorted(node.args.items()) if name not in PARTS and name != "input")
    return node.op, node.args["input"].value, *kinds, others


def _within(look: Rewriter, members: Sequence[Node]) -> list[list[Node]]:
    """Neighbours whose weights, and whose results, are at most `MAX_BYTES` together."""
    groups: list[list[Node]] = []
    used = 0
    for node in members:
        spec = look.spec(node.args["weight"])
        size = ITEM_BYTES[spec.dtype] * math.prod(spec.concrete({}))
        size = max(size, _most_bytes(look, look.graph.values[node.outputs[0] or 0]))
        if groups and used + size <= MAX_BYTES:
            groups[-1].append(node)
            used += size
        else:
            groups.append([node])
            used = size
    return [group for group in groups if len(group) > 1]


def _most_bytes(look: Rewriter, spec: TensorSpec) -> int:
    """Of a result whose sizes are as large as they may be; 0 where nobody said how large that is."""
    most = {name: high for name, (_, high) in look.graph.symbols.items() if high is not None}
    try:
        return ITEM_BYTES[spec.dtype] * math.prod(spec.concrete(most))
    except ExprError:
        return 0


def _join(look: Rewriter, group: Sequence[Node]) -> list[Node] | None:
    first = group[0]
    args: dict[str, Any] = dict(first.args)
    for name in PARTS:
        if first.args.get(name) is None:
            continue
        specs = [look.spec(node.args[name]) for node in group]
        rows = sum(spec.concrete({})[0] for spec in specs)
        key = joined_key([spec.constant for spec in specs if spec.constant is not None])
        args[name] = Ref(look.graph.add_value(TensorSpec(specs[0].dtype, (rows, *specs[0].shape[1:]), key)))
    outs = [look.graph.values[node.outputs[0] or 0] for node in group]
    widths = [look.spec(node.args["weight"]).concrete({})[0] for node in group]
    whole = TensorSpec(outs[0].dtype, (*outs[0].shape[:-1], sum(widths)))
    joined, result = look.add(first.op, args, whole, origins(*group))
    nodes, start = [joined], 0
    for node, width in zip(group, widths, strict=True):
        part = {"self": result, "dim": whole.rank - 1, "start": start, "end": start + width, "step": 1}
        nodes.append(Node("aten.slice_copy.Tensor", part, node.outputs, node.origin))
        start += width
    return nodes if all(look.accepted(node) for node in nodes) else None
