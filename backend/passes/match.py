"""What passes look at graphs with: who computes a value, how often it is read, and numbers behind arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from backend.graph import Graph, Node, Ref, TensorSpec
from backend.ops import registry

CASTS = ("dim_order_ops._to_dim_order_copy.default", "aten._to_copy.default", "aten.to.dtype")
PERMUTES = ("aten.permute_copy.default", "aten.permute.default")
TRANSPOSES = ("aten.transpose_copy.int", "aten.transpose.int")
UNSQUEEZES = ("aten.unsqueeze_copy.default", "aten.unsqueeze.default")
EXPANDS = ("aten.expand_copy.default", "aten.expand.default")
RESHAPES = tuple(f"aten.{name}.default" for name in ("view_copy", "view", "reshape", "_unsafe_view"))
SLICES = ("aten.slice_copy.Tensor", "aten.slice.Tensor")
FILLS = ("aten.full.default", "aten.full_like.default", "aten.scalar_tensor.default")


@dataclass
class Rewriter:
    """Replaces nodes of a graph one after the other. `Matched` lists what a pattern has taken in."""

    graph: Graph
    producers: dict[int, Node] = field(init=False)
    uses: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.producers = self.graph.producers()
        self.uses = self.graph.use_counts()

    def spec(self, ref: Ref) -> TensorSpec:
        return self.graph.values[ref.value]

    def producer(self, arg: Any, ops: Sequence[str], once: bool = False) -> Node | None:
        """The node that computes `arg`, if it is one of `ops` (and, with `once`, `arg` has no other reader)."""
        if not isinstance(arg, Ref) or (once and self.uses[arg.value] != 1):
            return None
        node = self.producers.get(arg.value)
        return node if node is not None and node.op in ops else None

    def number(self, arg: Any) -> float | None:
        """The number that an argument is: a literal, a zero-dimensional constant, or a tensor filled with one."""
        if isinstance(arg, (int, float)):
            return float(arg)
        if not isinstance(arg, Ref):
            return None
        if arg.value in self.graph.scalars:
            return float(self.graph.scalars[arg.value])
        node = self.producer(arg, FILLS)
        return self.number(node.args["s" if "s" in node.args else "fill_value"]) if node is not None else None

    def accepted(self, node: Node) -> bool:
        return registry.refusal(self.graph.call(node)) is None

    def add(self, op: str, args: Mapping[str, Any], spec: TensorSpec, origin: tuple[str, ...]) -> tuple[Node, Ref]:
        """A node with a new value; the caller puts it in its place."""
        value = self.graph.add_value(spec)
        return Node(op, args, (value,), origin), Ref(value)


Rule = Callable[[Rewriter, Node], Sequence[Node] | None]


def rewrite(graph: Graph, rule: Rule) -> Graph:
    """`rule` gives the nodes to put in a node's place, the last with its outputs, or None to leave it.

    What nobody reads any more goes.
    """
    # rules add values: the caller's graph stays as it was
    look = Rewriter(replace(graph, values=list(graph.values)))
    nodes: list[Node] = []
    changed = False
    for node in graph.nodes:
        made = rule(look, node)
        changed |= made is not None
        nodes.extend([node] if made is None else made)
        for new in made or ():
            look.producers.update({out: new for out in new.outputs if out is not None})
    return look.graph.rewired(nodes, {}).compacted() if changed else graph


def origins(*nodes: Node) -> tuple[str, ...]:
    """Every origin once, in order."""
    return tuple(dict.fromkeys(name for node in nodes for name in node.origin))


def both_ways(node: Node) -> list[tuple[Any, Any]]:
    """The operands of a sum or product, in either order."""
    first, second = node.args["self"], node.args["other"]
    return [(first, second), (second, first)]


def swaps_last_two(node: Node, rank: int) -> bool:
    """Whether a permute or transpose exchanges the last two axes and nothing else."""
    if rank < 2:
        return False
    if node.op in TRANSPOSES:
        return {node.args["dim0"] % rank, node.args["dim1"] % rank} == {rank - 2, rank - 1}
    return [dim % rank for dim in node.args["dims"]] == [*range(rank - 2), rank - 1, rank - 2]
