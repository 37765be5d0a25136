"""What torchao and the PT2E flow export for quantized modules → operators over packed weights.

    dequantize_affine(codes, …) → linear, mm, addmm, matmul     zoo.quantized_linear
    dequantize_affine(codes, …) → embedding                     zoo.quantized_embedding
    choose_qparams_affine → quantize_affine → dequantize_affine zoo.round_rows: activations of the dynamic modes
    quantized_decomposed.…                                      the same of PT2E (`backend.passes.pt2e`)

The codes become a packed constant, made ahead of time (`backend.quantization`); zero points that are all 0 go. A
dequantization of torchao that no operator takes in keeps a note of the reason: no kernel expands it at run time. Those
of PT2E have kernels (`backend.ops.decomposed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from backend.graph import Graph, Node, Ref, TensorSpec
from backend.ops import registry
from backend.passes import pt2e
from backend.passes.match import PERMUTES, TRANSPOSES, Rewriter, origins, rewrite, swaps_last_two
from backend.passes.pt2e import Weight
from backend.quantization import RANGES, bits_of, packed_key, row_words, unsigned_offset

CHOOSE = "torchao.choose_qparams_affine.default"
QUANTIZE = "torchao.quantize_affine.default"
DEQUANTIZE = "torchao.dequantize_affine.default"
WEIGHTS = (DEQUANTIZE, *pt2e.WEIGHTS)
ROUND = "zoo.round_rows"
UNREAD = "a quantized weight is read by linear and embedding only"
_SMALLEST_NORMAL = {"float32": 2.0**-126, "float16": 2.0**-14}

Notes = dict[tuple[str, ...], str]


def fuse_quantized(graph: Graph) -> Graph:
    """Replaces torchao's patterns where the fused operators accept them, and notes why where they do not."""
    if not any(node.op in (*WEIGHTS, pt2e.DEQUANTIZE) for node in graph.nodes):
        return graph
    graph = _shared(rewrite(rewrite(graph, _round_rows), pt2e.round_tensor))
    notes: Notes = {}
    graph = rewrite(graph, lambda look, node: _fused(look, node, notes))
    nodes = [
        replace(node, note=notes.get(node.origin, UNREAD)) if node.op in (DEQUANTIZE, pt2e.PER_GROUP) else node
        for node in graph.nodes
    ]
    return graph.rewired(nodes, {})


# --- activations ------------------------------------------------------------------------------------------------------


def _round_rows(look: Rewriter, node: Node) -> Sequence[Node] | None:
    """The three nodes that round each row of an activation to 8 bits of its own scale and zero point."""
    if node.op != DEQUANTIZE:
        return None
    quantize = look.producer(node.args["input"], (QUANTIZE,))
    choose = quantize and look.producer(quantize.args["scale"], (CHOOSE,))
    if quantize is None or choose is None or not isinstance(x := quantize.args["input"], Ref):
        return None
    spec, out = look.spec(x), look.graph.values[node.outputs[0] or 0]
    row = [1] * (spec.rank - 1) + list(spec.shape[-1:])
    parameters = [None if out_ is None else Ref(out_) for out_ in choose.outputs]
    same = all([part.args["scale"], part.args["zero_point"]] == parameters for part in (quantize, node))
    blocks = all(list(part.args["block_size"]) == row for part in (choose, quantize, node))
    ranges = all((part.args["quant_min"], part.args["quant_max"]) == RANGES[8] for part in (choose, quantize, node))
    types = (choose.args["target_dtype"], quantize.args["output_dtype"], node.args["input_dtype"]) == ("int8",) * 3
    scale_dtype, zero_dtype = choose.args.get("scale_dtype"), choose.args.get("zero_point_dtype")
    plain = scale_dtype in (None, spec.dtype) and zero_dtype in (None, "int8", "int32") and out.dtype == spec.dtype
    if choose.args["input"] != x or choose.args["mapping_type"] != "ASYMMETRIC" or spec.dtype not in _SMALLEST_NORMAL:
        return None
    if not (same and blocks and ranges and types and plain):
        return None
    eps = choose.args.get("eps")
    args = {"input": x, "eps": _SMALLEST_NORMAL[spec.dtype] if eps is None else eps}
    fused = Node(ROUND, args, node.outputs, origins(choose, quantize, node))
    return [fused] if look.accepted(fused) else None


def _shared(graph: Graph) -> Graph:
    """Rounded rows of one tensor are computed once, however many linears read them."""
    first: dict[tuple[Any, ...], int] = {}
    nodes: list[Node] = []
    renames: dict[int, int] = {}
    for node in graph.nodes:
        if node.op in (ROUND, pt2e.ROUND):
            key = (node.op, node.args["input"], node.args["eps"])
            if key in first:
                known = nodes[first[key]]
                nodes[first[key]] = replace(known, origin=origins(known, node))
                renames[node.outputs[0] or 0] = known.outputs[0] or 0
                continue
            first[key] = len(nodes)
        nodes.append(node)
    return graph.rewired(nodes, renames) if renames else graph


# --- weights ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Product:
    """x times the transpose of a weight, plus bias; `taken`: nodes between."""

    x: Any
    weight: Any
    bias: Any = None
    taken: tuple[Node, ...] = ()


def _fused(look: Rewriter, node: Node, notes: Notes) -> Sequence[Node] | None:
    if node.op == "aten.embedding.default":
        product = None
        weight = node.args["weight"]
    else:
        product = _product(look, node)
        if product is None:
            return None
        weight = product.weight
    dequantize = look.producer(weight, WEIGHTS)
    if dequantize is None:
        return None
    name = "embedding" if product is None else "linear"
    found = _weight_of(look, dequantize)
    packed = f"{name}: {found}" if isinstance(found, str) else _packed(look, found, name)
    if isinstance(packed, str) or isinstance(found, str):
        notes[dequantize.origin] = str(packed)
        return None
    args, made = packed
    if product is None:
        depth = look.spec(found.codes).shape[1]
        args |= {"indices": node.args["indices"], "depth": depth}
        fused = Node("zoo.quantized_embedding", args, node.outputs, origins(dequantize, node))
    else:
        args = {"input": product.x, **args, "bias": product.bias}
        fused = Node("zoo.quantized_linear", args, node.outputs, origins(dequantize, *product.taken, node))
    reason = registry.refusal(look.graph.call(fused))
    if reason is None and look.spec(weight).dtype != look.graph.values[node.outputs[0] or 0].dtype:
        reason = f"{name}: weight and result have different dtypes"
    if reason is not None:
        notes[dequantize.origin] = reason
        return None
    return [*made, fused]


def _product(look: Rewriter, node: Node) -> _Product | None:
    """linear as such, or as what it decomposes to."""
    args = node.args
    if node.op == "aten.linear.default":
        return _Product(args["input"], args["weight"], args.get("bias"))
    if node.op == "aten.addmm.default":
        bias = args["self"]
        plain = args.get("beta", 1) == 1 and args.get("alpha", 1) == 1
        if not plain or not isinstance(bias, Ref) or look.spec(bias).rank != 1:
            return None
        x, right = args["mat1"], args["mat2"]
    elif node.op in ("aten.mm.default", "aten.matmul.default"):
        bias = None
        x, right = args["self"], args["mat2" if "mat2" in args else "other"]
    else:
        return None
    turn = look.producer(right, PERMUTES + TRANSPOSES)
    if turn is None or not isinstance(x, Ref) or look.spec(right).rank != 2 or not swaps_last_two(turn, 2):
        return None
    return _Product(x, turn.args["self"], bias, (turn,))


def _weight_of(look: Rewriter, node: Node) -> Weight | str:
    if node.op != DEQUANTIZE:
        return pt2e.weight_of(look, node)
    args = node.args
    bounds = (args["quant_min"], args["quant_max"])
    return Weight(
        args["input"], args["input_dtype"], args["scale"], args["zero_point"], list(args["block_size"]), *bounds
    )


def _packed(look: Rewriter, weight: Weight, name: str) -> tuple[dict[str, Any], list[Node]] | str:
    """Arguments of a fused operator that say what the weight is, and nodes that compute some; or why there are none."""
    spec = look.spec(weight.codes)
    stored = [look.spec(ref) for ref in (weight.codes, weight.scale, weight.zero) if isinstance(ref, Ref)]
    if not all(part.is_constant for part in stored):
        return f"{name}: the quantized weight is not a constant of the program"
    if spec.rank != 2 or spec.dtype not in ("int8", "uint8") or weight.dtype != spec.dtype:
        return f"{name}: the codes of the quantized weight are {spec}, expected int8 or uint8 of rank 2"
    if not spec.is_static:
        return f"{name}: the size of the quantized weight is dynamic"
    bits, offset = _bits(weight, spec.dtype)
    if bits is None:
        return f"{name}: no kernel for codes from {weight.low} to {weight.high}"
    block = weight.block
    if len(block) != 2 or block[0] != 1 or not isinstance(block[1], int):
        return f"{name}: no kernel for scales that rows share"
    rows, depth = spec.concrete({})
    assert spec.constant is not None
    made: list[Node] = []

    def computed(op: str, args: dict[str, Any], dtype: str, shape: tuple[Any, ...]) -> Ref:
        node, ref = look.add(op, args, TensorSpec(dtype, shape), ())
        made.append(node)
        return ref

    def filled(number: float, dtype: str) -> Ref:
        shape = (rows, depth // max(block[1], 1))
        args = {"size": list(shape), "fill_value": number, "dtype": dtype}
        return computed("aten.full.default", args, dtype, shape)

    scale = weight.scale if isinstance(weight.scale, Ref) else filled(weight.scale, "float32")
    zero = weight.zero
    if isinstance(zero, Ref) and offset:
        kind = look.spec(zero)
        zero = computed("aten.sub.Scalar", {"self": zero, "other": offset, "alpha": 1}, kind.dtype, kind.shape)
    elif not isinstance(zero, Ref):
        zero = filled((zero or 0) - offset, "int32") if (zero or 0) != offset else None
    elif zero.value in look.graph.zeros:
        zero = None
    packed = TensorSpec("int32", (rows, row_words(depth, bits)), packed_key(spec.constant, bits))
    args = {"weight": Ref(look.graph.add_value(packed)), "scale": scale, "zero_point": zero}
    return {**args, "bits": bits, "group": block[1]}, made


def _bits(weight: Weight, dtype: str) -> tuple[int | None, int]:
    """The layout for the codes, and how far they are above it where they have no sign."""
    low, high = weight.low, weight.high
    if low is None or high is None:
        low, high = (0, 255) if dtype == "uint8" else RANGES[8]
    if dtype != "uint8":
        return bits_of(low, high), 0
    bits = next(
        (bits for bits in RANGES if bits_of(low - unsigned_offset(bits), high - unsigned_offset(bits)) == bits), None
    )
    return bits, 0 if bits is None else unsigned_offset(bits)
