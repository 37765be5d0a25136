"""A delegate's graph in eager PyTorch, operator by operator, in float64 if wanted: what everything is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from backend import graph, quantization
from backend.expr import evaluate
from backend.graph import Call, Graph, Node, map_arg

DTYPES = {name: getattr(torch, name) for name in ("float64", *graph.DTYPES)}


def sdpa(call: Call) -> torch.Tensor:
    """`zoo.sdpa` as the softmax that it replaces computes it: a row with nothing to attend to is NaN."""
    args = dict(call.args)
    query, key, value = args.pop("query"), args.pop("key"), args.pop("value")
    if args.get("enable_gqa"):
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    scale = args.get("scale")
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    mask = args.get("attn_mask")
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1) @ value


def rope(call: Call) -> torch.Tensor:
    """`zoo.rope`: rotated halves or, interleaved, rotated pairs."""
    x, cos, sin = call["x"], call["cos"], call["sin"]
    if call["interleaved"]:
        rotated = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        half = x.shape[-1] // 2
        rotated = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos + rotated * sin


def rope_cache(call: Call) -> tuple[torch.Tensor, ...]:
    """`zoo.rope_cache`: queries and keys normed and rotated, keys and values written to copies of their caches."""
    x, keys, values = call["x"], call["keys"], call["values"]
    kv_heads = keys.shape[1]
    both, value = x[:, :, :-kv_heads], x[:, :, -kv_heads:]
    if call.get("eps") is not None:
        both = torch.nn.functional.rms_norm(both, both.shape[-1:], None, call["eps"])
    if call.get("weight") is not None:
        both = both * call["weight"]
    both = rope(Call("zoo.rope", {"x": both, **{name: call[name] for name in ("cos", "sin", "interleaved")}}, ()))
    written = ((keys, both[:, :, -kv_heads:]), (values, value))
    caches = (old.index_copy(2, call["index"].long(), new.transpose(1, 2).to(old.dtype)) for old, new in written)
    return (both[:, :, :-kv_heads].to(keys.dtype), *caches)


def _dense(call: Call, depth: int) -> torch.Tensor:
    """The weight `[N, depth]` that packed codes, scales and zero points stand for, in the precision of the scales."""
    codes = torch.from_numpy(quantization.unpack(call["weight"].numpy(), call["bits"], depth))
    groups = (codes.shape[0], depth // call["group"], 1)
    spread = codes.reshape(codes.shape[0], groups[1], call["group"]).to(call["scale"].dtype)
    zero = call.get("zero_point")
    if zero is not None:
        spread = spread - zero.reshape(groups)
    return (spread * call["scale"].reshape(groups)).reshape(codes.shape)


def swiglu(call: Call) -> torch.Tensor:
    """`zoo.swiglu`."""
    gate, up = call["input"].chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def quantized_linear(call: Call) -> torch.Tensor:
    """`zoo.quantized_linear`: the product with the weights that the codes stand for."""
    return torch.nn.functional.linear(call["input"], _dense(call, call["input"].shape[-1]), call.get("bias"))


def quantized_embedding(call: Call) -> torch.Tensor:
    """`zoo.quantized_embedding`: rows of the table that the codes stand for."""
    return _dense(call, call["depth"])[call["indices"].long()]


def round_rows(call: Call) -> torch.Tensor:
    """`zoo.round_rows`."""
    return rounded_rows(call["input"], call["eps"])


def rounded_rows(x: torch.Tensor, eps: float = torch.finfo(torch.float32).eps) -> torch.Tensor:
    """Rows as 8-bit codes with a scale and a zero point of their own would give them back: what torchao does to the
    activations of a linear in its dynamic modes (int8, asymmetric, per token), in the precision of `x`."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 255).clamp(min=eps)
    zero = (-128 - (low / scale).round()).clamp(-128, 127)
    codes = ((x * (1 / scale)).round() + zero).clamp(-128, 127)
    return (codes - zero) * scale


FUSED: dict[str, Callable[[Call], Any]] = {
    "zoo.sdpa": sdpa,
    "zoo.rope": rope,
    "zoo.rope_cache": rope_cache,
    "zoo.swiglu": swiglu,
    "zoo.quantized_linear": quantized_linear,
    "zoo.quantized_embedding": quantized_embedding,
    "zoo.round_rows": round_rows,
}


def _torch_operator(call: Call) -> Any:
    namespace, op, kind = call.op.split(".")
    overload = getattr(getattr(getattr(torch.ops, namespace), op), kind)
    # None too: torch wants it said for an argument that may be None and has no default.
    args = {name: DTYPES[arg] if name == "dtype" and isinstance(arg, str) else arg for name, arg in call.args.items()}
    if op == "where":  # the backend's takes numbers for tensors
        like = next(
            (arg.dtype for name, arg in args.items() if name != "condition" and isinstance(arg, torch.Tensor)), None
        )
        args = {
            name: arg if isinstance(arg, torch.Tensor) else torch.tensor(arg, dtype=like) for name, arg in args.items()
        }
    return overload(**args)


def compute(node: Node, held: Mapping[int, Any], env: Mapping[str, int], double: bool = False) -> tuple[Any, ...]:
    """The results of one node; `held` has its operands by value index."""
    args = {
        name: map_arg(arg, lambda ref: held[ref.value], lambda e: evaluate(e, env)) for name, arg in node.args.items()
    }
    if double and args.get("dtype") in ("float32", "float16"):
        args["dtype"] = "float64"
    call = Call(node.op, args, ())
    result = FUSED[node.op](call) if node.op in FUSED else _torch_operator(call)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def everything(
    graph: Graph, inputs: Sequence[torch.Tensor], data: Mapping[str, torch.Tensor] | None = None, double: bool = False
) -> dict[int, torch.Tensor]:
    """Every value of the graph by its index, in float64 throughout with `double`. States without contents are zeros."""
    held: dict[int, Any] = dict(zip(graph.inputs, inputs, strict=True))
    env = graph.bind([tuple(tensor.shape) for tensor in inputs], [int(held[index]) for index in graph.sizes])
    for index, spec in enumerate(graph.values):
        if spec.constant is not None:
            held[index] = (data or {})[spec.constant]
        elif spec.state is not None:
            held[index] = torch.zeros(spec.concrete({}), dtype=DTYPES[spec.dtype])
    if double:
        held = {index: tensor.double() if tensor.is_floating_point() else tensor for index, tensor in held.items()}
    for node in graph.nodes:
        for out, tensor in zip(node.outputs, compute(node, held, env, double), strict=True):
            if out is not None:
                held[out] = tensor
    return held


def interpret(
    graph: Graph, inputs: Sequence[torch.Tensor], data: Mapping[str, torch.Tensor] | None = None, double: bool = False
) -> list[torch.Tensor]:
    """The outputs of the graph, in float64 throughout with `double`."""
    held = everything(graph, inputs, data, double)
    return [held[index] for index in graph.outputs]
