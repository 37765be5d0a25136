"""Runs a neutral graph with torch, operator by operator: what passes and the runtime are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from backend.expr import evaluate
from backend.graph import Call, Graph, map_arg

DTYPES = {
    name: getattr(torch, name) for name in ("float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
}


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


FUSED: dict[str, Callable[[Call], Any]] = {"zoo.sdpa": sdpa, "zoo.rope": rope}


def _torch_operator(call: Call) -> Any:
    namespace, op, kind = call.op.split(".")
    overload = getattr(getattr(getattr(torch.ops, namespace), op), kind)
    args = {
        name: DTYPES[arg] if name == "dtype" and isinstance(arg, str) else arg
        for name, arg in call.args.items()
        if arg is not None
    }
    if op == "where":  # the backend's takes numbers for tensors
        like = next(
            (arg.dtype for name, arg in args.items() if name != "condition" and isinstance(arg, torch.Tensor)), None
        )
        args = {
            name: arg if isinstance(arg, torch.Tensor) else torch.tensor(arg, dtype=like) for name, arg in args.items()
        }
    return overload(**args)


def interpret(
    graph: Graph, inputs: Sequence[torch.Tensor], data: Mapping[str, torch.Tensor] | None = None, double: bool = False
) -> list[torch.Tensor]:
    """The outputs of the graph, in float64 throughout with `double`."""
    env = graph.bind([tuple(tensor.shape) for tensor in inputs])
    if double:
        inputs = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]
    held: dict[int, Any] = dict(zip(graph.inputs, inputs, strict=True))
    for index, spec in enumerate(graph.values):
        if spec.constant is not None:
            tensor = (data or {})[spec.constant]
            held[index] = tensor.double() if double and tensor.is_floating_point() else tensor
    for node in graph.nodes:
        args = {
            name: map_arg(arg, lambda ref: held[ref.value], lambda e: evaluate(e, env))
            for name, arg in node.args.items()
        }
        if double and args.get("dtype") in ("float32", "float16"):
            args["dtype"] = "float64"
        call = Call(node.op, args, ())
        result = FUSED[node.op](call) if node.op in FUSED else _torch_operator(call)
        results = result if isinstance(result, (tuple, list)) else (result,)
        for out, tensor in zip(node.outputs, results, strict=True):
            if out is not None:
                held[out] = tensor
    return [held[index] for index in graph.outputs]


DTYPES["float64"] = torch.float64
