"""Attention as models spell it out → one node: softmax(q kᵀ · scale + mask) v, and repeated heads → grouped heads.

The fused operator is `zoo.sdpa`. It differs from torch's `scaled_dot_product_attention` in one thing: a query that sees
no key gives NaN, as the softmax of nothing but -inf does, not 0. A bool mask that fills with a finite number is added
as a float mask, so that such a query looks at all keys alike, as it did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from backend.graph import Graph, Node, Ref, TensorSpec
from backend.passes.match import (
    CASTS,
    EXPANDS,
    PERMUTES,
    RESHAPES,
    TRANSPOSES,
    UNSQUEEZES,
    Rewriter,
    origins,
    rewrite,
    swaps_last_two,
)

PRODUCTS = ("aten.matmul.default", "aten.bmm.default", "aten.mm.default")
SOFTMAXES = ("aten.softmax.int", "aten._softmax.default", "aten._safe_softmax.default")
SCALINGS = tuple(f"aten.{op}.{kind}" for op in ("mul", "div") for kind in ("Tensor", "Scalar"))
NEGATIONS = ("aten.logical_not.default", "aten.bitwise_not.default")
ATTENTIONS = ("zoo.sdpa", "aten.scaled_dot_product_attention.default")
# added to any score of moderate size, this gives itself: a row of such sums is uniform as a row of such fills is
SWALLOWS = -1e30


@dataclass
class _Scores:
    """What was found between the softmax and the first product. `before`: nodes that make the mask."""

    query: Ref
    key: Ref
    is_transposed: bool
    scale: float = 1.0
    mask: Ref | None = None
    taken: list[Node] = field(default_factory=list)
    before: list[Node] = field(default_factory=list)


def fuse_attention(graph: Graph) -> Graph:
    return rewrite(graph, _attention)


def _attention(look: Rewriter, node: Node) -> Sequence[Node] | None:
    if node.op not in PRODUCTS:
        return None
    weights, value = _operands(node)
    taken = [node]
    softmax = None
    while softmax is None:
        step = look.producer(weights, (*SOFTMAXES, *CASTS), once=True)
        if step is None or (step.op in CASTS and not _is_float_cast(look, step)):
            return None
        taken.append(step)
        weights = step.args["self"]
        softmax = step if step.op in SOFTMAXES else None
    rank = look.spec(weights).rank
    if softmax.args["dim"] % rank != rank - 1 or softmax.args.get("dtype") not in (None, "float32", "float16"):
        return None
    found = _scores(look, weights, softmax)
    if found is None:
        return None
    taken += found.taken
    query, value_spec, out = look.spec(found.query), look.spec(value), look.graph.values[node.outputs[0] or 0]
    key = found.key
    key_shape = look.spec(key).shape
    if found.is_transposed:  # stored as kᵀ: a view, the kernel reads any strides
        key_shape = (*key_shape[:-2], key_shape[-1], key_shape[-2])
        dims = [*range(query.rank - 2), query.rank - 1, query.rank - 2]
        args = {"self": key, "dims": dims}
        view, key = look.add(
            "aten.permute_copy.default", args, TensorSpec(look.spec(key).dtype, key_shape), origins(*taken)
        )
        found.before.append(view)
    batch = query.shape[:-2]
    if not (query.rank == len(key_shape) == value_spec.rank == out.rank) or query.dtype != out.dtype:
        return None
    if key_shape[:-2] != batch or value_spec.shape[:-2] != batch:
        return None
    fused = Node(
        "zoo.sdpa",
        {
            "query": found.query, "key": key, "value": value, "attn_mask": found.mask, "dropout_p": 0.0,
            "is_causal": False, "scale": found.scale, "enable_gqa": False,
        },
        node.outputs,
        origins(*reversed(taken)),
    )  # fmt: skip
    made = [*found.before, fused]
    return made if all(look.accepted(new) for new in made) else None


def _operands(node: Node) -> tuple[Any, Any]:
    return node.args["self"], node.args["other" if "other" in node.args else "mat2"]


def _is_float_cast(look: Rewriter, node: Node) -> bool:
    floats = ("float32", "float16")
    return look.spec(node.args["self"]).dtype in floats and look.graph.values[node.outputs[0] or 0].dtype in floats


def _scores(look: Rewriter, scores: Any, softmax: Node) -> _Scores | None:
    """Reads the chain below the softmax: mask, scale, product; None unless all of it is known and read here only."""
    if softmax.op == "aten._safe_softmax.default":
        return None
    shape = look.spec(scores).shape
    taken, scale, mask = [], 1.0, None
    while True:
        product = look.producer(scores, PRODUCTS, once=True)
        if product is not None:
            break
        node = look.producer(scores, (*SCALINGS, *CASTS, "aten.add.Tensor", "aten.where.self"), once=True)
        if node is None:
            return None
        taken.append(node)
        if node.op in CASTS:
            if not _is_float_cast(look, node):
                return None
            scores = node.args["self"]
        elif node.op in SCALINGS:
            factor = _factor(look, node)
            if factor is None:
                return None
            scale, scores = scale * factor[1], factor[0]
        elif mask is None and scale == 1.0:  # a scaled mask is no mask
            mask = _split_mask(look, node)
            if mask is None:
                return None
            scores = mask[0]
        else:
            return None
        if look.spec(scores).shape != shape:
            return None
    taken.append(product)
    query, key = _operands(product)
    query, factor_q, _, more = _plain(look, query, turn=False)
    key, factor_k, turned, more_k = _plain(look, key, turn=True)
    found = _Scores(query, key, not turned, scale * factor_q * factor_k, None, [*taken, *more, *more_k])
    if mask is not None:
        _make_mask(look, found, mask[1], mask[2], softmax)
    return found


def _factor(look: Rewriter, node: Node) -> tuple[Ref, float] | None:
    """(x, f) of a node x · f or x / f with a number f."""
    x, other = node.args["self"], node.args["other"]
    number = look.number(other)
    if number is None and ".mul." in node.op:
        x, number = other, look.number(x)
    if number is None or not isinstance(x, Ref) or not math.isfinite(number) or number == 0:
        return None
    if look.spec(x).shape != look.graph.values[node.outputs[0] or 0].shape:
        return None
    return x, number if ".mul." in node.op else 1 / number


def _plain(look: Rewriter, x: Ref, turn: bool) -> tuple[Ref, float, bool, list[Node]]:
    """An operand without its scalings (and, with `turn`, without an exchange of the last two axes)."""
    scale, turned = 1.0, False
    taken: list[Node] = []
    while True:
        node = look.producer(x, (*SCALINGS, *(PERMUTES + TRANSPOSES if turn else ())))
        if node is None:
            return x, scale, turned, taken
        if node.op in SCALINGS:
            factor = _factor(look, node)
            if factor is None or look.spec(factor[0]).dtype != look.spec(x).dtype:
                return x, scale, turned, taken
            x, scale = factor[0], scale * factor[1]
        elif swaps_last_two(node, look.spec(x).rank):
            x, turned = node.args["self"], not turned
        else:
            return x, scale, turned, taken
        taken.append(node)


def _split_mask(look: Rewriter, node: Node) -> tuple[Ref, Ref, tuple[bool, float] | None] | None:
    """(scores, mask, None) of an added mask; (scores, condition, (value that keeps, fill)) of a bool one."""
    if node.op == "aten.add.Tensor":
        pair = (node.args["self"], node.args["other"])
        if node.args.get("alpha", 1) != 1 or not all(isinstance(arg, Ref) for arg in pair):
            return None
        scores, mask = pair if _is_scores(look, pair[0]) else pair[::-1]
        return (scores, mask, None) if _is_scores(look, scores) else None
    kept, other = node.args["self"], node.args["other"]
    fill = look.number(other)
    keeps = fill is not None
    if not keeps:
        kept, fill = other, look.number(kept)
    if fill is None or fill > SWALLOWS or not isinstance(kept, Ref):
        return None
    return kept, node.args["condition"], (keeps, fill)


def _is_scores(look: Rewriter, arg: Ref) -> bool:
    """Whether a product is below, through scalings and casts that nobody else reads."""
    node = look.producer(arg, (*PRODUCTS, *SCALINGS, *CASTS), once=True)
    if node is None or node.op in PRODUCTS:
        return node is not None
    below = _factor(look, node) if node.op in SCALINGS else (node.args["self"], 1.0)
    return below is not None and _is_scores(look, below[0])


def _make_mask(look: Rewriter, found: _Scores, mask: Ref, rule: tuple[bool, float] | None, softmax: Node) -> None:
    if rule is not None and math.isinf(rule[1]) and not rule[0]:
        negation = look.producer(mask, NEGATIONS)
        if negation is not None and look.spec(negation.args["self"]).dtype == "bool":
            mask = negation.args["self"]
        else:
            spec = look.spec(mask)
            node, mask = look.add(
                "aten.logical_not.default", {"self": mask}, TensorSpec("bool", spec.shape), softmax.origin
            )
            found.before.append(node)
    elif rule is not None and math.isfinite(rule[1]):
        keeps, fill = rule
        args = {"condition": mask, "self": 0.0 if keeps else fill, "other": fill if keeps else 0.0}
        spec = TensorSpec("float32", look.spec(mask).shape)
        node, mask = look.add("aten.where.self", args, spec, softmax.origin)
        found.before.append(node)
    if look.spec(mask).rank < 2:
        spec = look.spec(mask)
        shape = (*(1,) * (2 - spec.rank), *spec.shape)
        node, mask = look.add(
            "aten.view_copy.default", {"self": mask, "size": list(shape)}, TensorSpec(spec.dtype, shape), softmax.origin
        )
        found.before.append(node)
    found.mask = mask


# --- grouped heads ----------------------------------------------------------------------------------------------------


def group_heads(graph: Graph) -> Graph:
    """Attention over keys and values repeated for several query heads reads the few that there are."""
    return rewrite(graph, _grouped)


def _grouped(look: Rewriter, node: Node) -> Sequence[Node] | None:
    if node.op not in ATTENTIONS or node.args.get("enable_gqa"):
        return None
    key, value = _unrepeated(look, node.args["key"]), _unrepeated(look, node.args["value"])
    if key is None or value is None or key[1] != value[1]:
        return None
    fused = replace(
        node,
        args={**node.args, "key": key[0], "value": value[0], "enable_gqa": True},
        origin=origins(*reversed([node, *key[2], *value[2]])),
    )
    return [fused] if look.accepted(fused) else None


def _unrepeated(look: Rewriter, x: Ref) -> tuple[Ref, int, list[Node]] | None:
    """(source, repeats, nodes) of [b, h, s, d] repeated by head: view(expand(unsqueeze)) or repeat_interleave."""
    spec = look.spec(x)
    if spec.rank != 4:
        return None
    node = look.producer(x, ("aten.repeat_interleave.self_int",))
    if node is not None:
        times = node.args["repeats"]
        is_heads = node.args.get("dim") in (1, -3) and isinstance(times, int)
        return (node.args["self"], times, [node]) if is_heads else None
    view = look.producer(x, RESHAPES)
    expand = view and look.producer(view.args["self"], EXPANDS)
    single = expand and look.producer(expand.args["self"], UNSQUEEZES)
    if view is None or expand is None or single is None or single.args["dim"] not in (2, -3):
        return None
    source = single.args["self"]
    batch, heads, *rest = look.spec(source).shape
    wide = look.spec(view.args["self"]).shape
    times = wide[2] if len(wide) == 5 else None
    if not isinstance(times, int) or not isinstance(heads, int) or look.spec(source).rank != 4:
        return None
    if wide != (batch, heads, times, *rest) or spec.shape != (batch, heads * times, *rest):
        return None
    return source, times, [view, expand, single]
