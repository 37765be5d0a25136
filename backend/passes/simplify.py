"""Numbers in place of constants without dims (a uniform, not a buffer), and no nodes that change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from backend.graph import Graph, Node, Ref
from backend.passes.match import CASTS, EXPANDS, PERMUTES, RESHAPES, SLICES, Rewriter, rewrite

_COPIES = (
    "aten.clone.default",
    "aten.alias_copy.default",
    "aten.alias.default",
    "aten.contiguous.default",
    "aten.detach_copy.default",
    "aten.detach.default",
    "aten.lift_fresh_copy.default",
    "aten.dropout.default",
    "dim_order_ops._clone_dim_order.default",
)
# Operators whose declaration takes a number where a tensor may stand, with the same rules of promotion.
_TAKE_NUMBERS = {
    **{f"aten.{name}.Tensor": ("other",) for name in ("add", "sub", "mul", "div")},
    **{f"aten.{name}.Tensor": ("other",) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "aten.where.self": ("self", "other"),
}


def inline_scalars(graph: Graph) -> Graph:
    """Constants without dims become literals of pointwise operators; a fill does not wait for the tensor it is like."""
    return rewrite(graph, _inline)


def _inline(look: Rewriter, node: Node) -> Sequence[Node] | None:
    if node.op == "aten.full_like.default" and node.outputs[0] is not None:  # reads the shape, not the tensor
        spec = look.graph.values[node.outputs[0]]
        args = {"size": list(spec.shape), "fill_value": node.args["fill_value"], "dtype": spec.dtype}
        full = replace(node, op="aten.full.default", args=args)
        return [full] if look.accepted(full) else None
    numbers = {}
    for name in _TAKE_NUMBERS.get(node.op, ()):
        arg = node.args[name]
        # a number is float32 or int64 to torch's promotion: a constant of another dtype stays what it is
        if isinstance(arg, Ref) and arg.value in look.graph.scalars and look.spec(arg).dtype in ("float32", "int64"):
            numbers[name] = look.graph.scalars[arg.value]
    if not numbers:
        return None
    changed = replace(node, args={**node.args, **numbers})
    tensors = [arg for arg in changed.args.values() if isinstance(arg, Ref)]
    whole = all(look.spec(arg).rank > 0 for arg in tensors)
    return [changed] if tensors and whole and look.accepted(changed) else None


def remove_no_ops(graph: Graph) -> Graph:
    """Copies, products with 1, and casts, expands, reshapes, permutes and slices to what the tensor is already."""
    look = Rewriter(graph)
    renames: dict[int, int] = {}
    nodes = []
    for node in graph.nodes:
        source = node.args.get("self", node.args.get("input"))
        if isinstance(source, Ref) and _changes_nothing(look, node, source) and look.accepted(node):
            assert node.outputs[0] is not None
            renames[node.outputs[0]] = source.value
        else:
            nodes.append(node)
    return graph.rewired(nodes, renames) if renames else graph


def _changes_nothing(look: Rewriter, node: Node, source: Ref) -> bool:
    if len(node.outputs) != 1 or node.outputs[0] is None:
        return False
    before, after = look.spec(source), look.graph.values[node.outputs[0]]
    if (before.dtype, before.shape) != (after.dtype, after.shape):
        return False
    if node.op in PERMUTES:
        return [dim % max(after.rank, 1) for dim in node.args["dims"]] == list(range(after.rank))
    if node.op in ("aten.mul.Tensor", "aten.mul.Scalar"):
        return isinstance(node.args["other"], float) and node.args["other"] == 1.0
    return node.op in (*_COPIES, *CASTS, *EXPANDS, *RESHAPES) or (node.op in SLICES and node.args.get("step", 1) == 1)
