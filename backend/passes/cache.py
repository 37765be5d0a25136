"""A step's projection on its way to attention → `zoo.rope_cache`: norms, rotation and the writes to both caches.

    qkv ─ slice ─ (RMSNorm, weight) ─ zoo.rope ─┬ slice ─ permute ─► attention
                                                └ slice ─ permute ─ index_copy ─► keys
    qkv ─ slice ─ permute ─ index_copy ─► values

with qkv [B, S, H + 2 K, E] from one product, and casts where the caches have another dtype.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from backend.graph import Graph, Node, Ref
from backend.ops.norm import rms_eps
from backend.passes.match import CASTS, PERMUTES, SLICES, TRANSPOSES, Rewriter, both_ways, origins

_COPY = ("aten.index_copy.default",)
_HEADS = 2  # the axis of the heads in the projection, and of the positions in the caches


def fuse_rope_cache(graph: Graph) -> Graph:
    look = _Readers(replace(graph, values=list(graph.values)))
    nodes: list[Node] = []
    renames: dict[int, int] = {}
    for node in graph.nodes:
        found = look.match(node) if node.op == "zoo.rope" else None
        if found is not None:
            fused, old = found
            nodes.append(fused)
            renames |= dict(zip(old, (out for out in fused.outputs if out is not None), strict=True))
        nodes.append(node)
    return look.graph.rewired(nodes, renames).compacted() if renames else graph


@dataclass
class _Readers(Rewriter):
    readers: dict[int, list[Node]] = field(init=False)
    order: dict[int, int] = field(init=False)  # value -> position of the node that computes it

    def __post_init__(self) -> None:
        super().__post_init__()
        self.readers = defaultdict(list)
        self.order = {}
        for position, node in enumerate(self.graph.nodes):
            for ref in node.refs():
                self.readers[ref].append(node)
            self.order.update({out: position for out in node.outputs if out is not None})

    def match(self, rope: Node) -> tuple[Node, tuple[int, ...]] | None:
        """(the fused node, the values that its outputs stand for)."""
        before = self._before(rope.args["x"])
        if before is None:
            return None
        base, turned, args, taken = before
        result = rope.outputs[0] or 0
        cast = self._only_reader(result, CASTS)
        if cast is not None:
            result = cast.outputs[0] or 0
        sliced = [self._range(node) for node in self.readers[result]]
        if len(sliced) != 2 or self.uses[result] != 2:
            return None
        parts = sorted(zip(sliced, self.readers[result], strict=True), key=lambda item: item[0] or (0, 0))
        (first, query), (second, key) = parts
        if first is None or second is None or (first[0], first[1], second[1]) != (0, second[0], turned):
            return None
        kept = [reader for reader in self.readers[base.value] if self._range(reader) == (turned, self._heads(base))]
        copies = [self._copied(key), self._copied(kept[0]) if len(kept) == 1 else None]
        if copies[0] is None or copies[1] is None:
            return None
        (keys, keys_by), (values, values_by) = copies[0], copies[1]
        index = keys.args["index"]
        if index != values.args["index"] or self.order.get(index.value, -1) > self.order[rope.outputs[0] or 0]:
            return None
        old = tuple(node.outputs[0] or 0 for node in (query, keys, values))
        new = tuple(self.graph.add_value(self.graph.values[value]) for value in old)
        args |= {name: rope.args[name] for name in ("cos", "sin", "interleaved")}
        args |= {"x": base, "keys": keys.args["self"], "values": values.args["self"], "index": index}
        taken = [*taken, rope, *([cast] if cast is not None else []), query, key, kept[0], *keys_by, *values_by]
        fused = Node("zoo.rope_cache", args, new, origins(*taken))
        return (fused, old) if self.accepted(fused) else None

    def _before(self, x: Any) -> tuple[Ref, int, dict[str, Any], list[Node]] | None:
        """(projection, heads that are turned, weight and eps, nodes) of what goes into the rotation."""
        taken: list[Node] = []
        weight: Ref | None = None
        eps: float | None = None
        scaled = self.producer(x, ("aten.mul.Tensor",), once=True)
        if scaled is not None:
            for factor, normed in both_ways(scaled):
                if isinstance(factor, Ref) and self.spec(factor).is_constant and self.spec(factor).rank <= 2:
                    weight, x = factor, normed
                    taken.append(scaled)
                    break
        norm = self.producer(x, ("aten.rms_norm.default",), once=True)
        if norm is not None and len(norm.args["normalized_shape"]) == 1:
            own = norm.args.get("weight")
            if own is not None and weight is not None:
                return None
            weight = own if weight is None else weight
            eps = rms_eps(norm.args.get("eps"))
            x = norm.args["input"]
            taken.append(norm)
        elif weight is not None:
            return None
        wider = self.producer(x, CASTS, once=True)
        if wider is not None and self.spec(x).dtype == "float32":
            x = wider.args["self"]
            taken.append(wider)
        sliced = self.producer(x, SLICES, once=True)
        span = self._range(sliced) if sliced is not None else None
        if sliced is None or span is None or span[0] != 0:
            return None
        return sliced.args["self"], span[1], {"weight": weight, "eps": eps}, [*taken, sliced]

    def _copied(self, part: Node) -> tuple[Node, list[Node]] | None:
        """(the index_copy, nodes on the way) that writes `part`, a slice of heads, and nothing else reads it."""
        way: list[Node] = []
        value = part.outputs[0] or 0
        for ops in (CASTS, (*PERMUTES, *TRANSPOSES), CASTS):
            node = self._only_reader(value, ops)
            if node is None and ops == CASTS:
                continue
            if node is None or (ops != CASTS and not _swaps(node)):
                return None
            way.append(node)
            value = node.outputs[0] or 0
        copy = self._only_reader(value, _COPY)
        if copy is None or copy.args["dim"] % 4 != _HEADS or copy.args["source"] != Ref(value):
            return None
        return copy, [*way, copy]

    def _only_reader(self, value: int, ops: Sequence[str]) -> Node | None:
        readers = self.readers[value]
        return readers[0] if len(readers) == 1 and self.uses[value] == 1 and readers[0].op in ops else None

    def _heads(self, ref: Ref) -> int:
        spec = self.spec(ref)
        size = spec.shape[_HEADS] if spec.rank == 4 else None
        return size if isinstance(size, int) else -1

    def _range(self, node: Node) -> tuple[int, int] | None:
        """(start, end) of a slice of heads."""
        if node.op not in SLICES or self.spec(node.args["self"]).rank != 4 or node.args.get("dim", 0) % 4 != _HEADS:
            return None
        start, end, step = node.args.get("start") or 0, node.args.get("end"), node.args.get("step", 1)
        size = self._heads(node.args["self"])
        if size < 0 or step != 1 or not isinstance(start, int) or not isinstance(end, int | None):
            return None
        return slice(start, end).indices(size)[:2]


def _swaps(node: Node) -> bool:
    """Whether a permute exchanges positions and heads, [B, S, K, E] → [B, K, S, E]."""
    if node.op in TRANSPOSES:
        return {node.args["dim0"] % 4, node.args["dim1"] % 4} == {1, 2}
    return [dim % 4 for dim in node.args["dims"]] == [0, 2, 1, 3]
