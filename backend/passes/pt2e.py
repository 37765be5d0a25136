"""What the PT2E flow (`prepare_pt2e`, `convert_pt2e`) writes, in the terms of `backend.passes.quantized`.

dequantize_per_channel, dequantize_per_channel_group, dequantize_per_tensor of codes   a `Weight`
choose_qparams → quantize_per_tensor → dequantize_per_tensor                           zoo.round_tensor
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backend.graph import Node, Ref
from backend.passes.match import Rewriter, origins
from backend.quantization import RANGES

PER_CHANNEL = "quantized_decomposed.dequantize_per_channel.default"
PER_GROUP = "quantized_decomposed.dequantize_per_channel_group.default"
PER_TENSOR = "quantized_decomposed.dequantize_per_tensor.default"
WEIGHTS = (PER_CHANNEL, PER_GROUP, PER_TENSOR)
CHOOSE = "quantized_decomposed.choose_qparams.tensor"
QUANTIZE = "quantized_decomposed.quantize_per_tensor.tensor"
DEQUANTIZE = "quantized_decomposed.dequantize_per_tensor.tensor"
ROUND = "zoo.round_tensor"


@dataclass(frozen=True)
class Weight:
    """A dequantization, whichever flow wrote it: `(codes - zero) * scale`, one scale a `block` of codes.

    scale and zero are tensors or numbers; low and high bound the codes, None where they are all that the dtype holds.
    """

    codes: Ref
    dtype: str
    scale: Any
    zero: Any
    block: list[Any]
    low: float | None
    high: float | None


def weight_of(look: Rewriter, node: Node) -> Weight | str:
    """The weight that one of `WEIGHTS` dequantizes, or why there is none."""
    args = node.args
    codes = args["w_int8" if "w_int8" in args else "input"]
    depth = look.spec(codes).shape[-1] if look.spec(codes).rank else 1
    if node.op == PER_TENSOR:
        scale, zero, block = args["scale"], args["zero_point"], [1, depth]
    elif node.op == PER_CHANNEL:
        if args["axis"] != 0:
            return f"no kernel for scales along axis {args['axis']}"
        scale, zero, block = args["scales"], args["zero_points"], [1, depth]
    else:
        scale, zero, block = args["scales"], args["zero_points"], [1, args["group_size"]]
    return Weight(codes, args["dtype"], scale, zero, block, args["quant_min"], args["quant_max"])


def round_tensor(look: Rewriter, node: Node) -> Sequence[Node] | None:
    """The three nodes that round an activation to 8 bits of one scale and zero point, found at run time."""
    if node.op != DEQUANTIZE:
        return None
    quantize = look.producer(node.args["input"], (QUANTIZE,))
    choose = quantize and look.producer(quantize.args["scale"], (CHOOSE,))
    if quantize is None or choose is None or not isinstance(x := quantize.args["input"], Ref):
        return None
    parameters = [None if out is None else Ref(out) for out in choose.outputs]
    same = all([part.args["scale"], part.args["zero_point"]] == parameters for part in (quantize, node))
    parts = (choose, quantize, node)
    ranges = all((part.args["quant_min"], part.args["quant_max"]) == RANGES[8] for part in parts)
    types = all(part.args["dtype"] == "int8" for part in parts)
    out = look.graph.values[node.outputs[0] or 0]
    if choose.args["input"] != x or not (same and ranges and types) or out.dtype != look.spec(x).dtype:
        return None
    fused = Node(ROUND, {"input": x, "eps": choose.args["eps"]}, node.outputs, origins(*parts))
    return [fused] if look.accepted(fused) else None
