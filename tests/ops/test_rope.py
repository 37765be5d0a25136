"""pytest tests/ops/test_rope.py: `zoo.rope_cache` against the operators that it stands for, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from backend.graph import Call, Graph, Node, Ref, TensorSpec
from backend.ops import registry
from tests.ops.harness import F16, assert_close, run_graph
from zoo import eager

F32 = {"atol": 2e-6, "rtol": 1e-5}  # a sum of squares, a root and two products of float32 (eps 1.2e-7)


def drawn(
    batch: int = 1, positions: int = 3, heads: int = 4, kv_heads: int = 2, width: int = 16, capacity: int = 7
) -> dict[str, Any]:
    """Arguments that fit each other, in float32."""
    rng = torch.Generator().manual_seed(width + positions)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng)

    caches = (batch, kv_heads, capacity, width)
    return {
        "x": normal(batch, positions, heads + 2 * kv_heads, width),
        "weight": normal(heads + kv_heads, width),
        "eps": 1e-6,
        "cos": normal(positions, 1, width),
        "sin": normal(positions, 1, width),
        "interleaved": False,
        "keys": normal(*caches),
        "values": normal(*caches),
        "index": torch.randperm(capacity, generator=rng)[:positions],
    }


def one_node(args: dict[str, Any]) -> tuple[Graph, list[np.ndarray]]:
    graph, feeds = Graph(), []
    placed: dict[str, Any] = {}
    for name, item in args.items():
        if isinstance(item, torch.Tensor):
            placed[name] = Ref(graph.add_value(TensorSpec(str(item.dtype).removeprefix("torch."), tuple(item.shape))))
            graph.inputs.append(placed[name].value)
            feeds.append(item.numpy())
        else:
            placed[name] = item
    kv_heads = args["keys"].shape[1]
    batch, positions, every, width = args["x"].shape
    cache = graph.values[placed["keys"].value]
    specs = [TensorSpec(cache.dtype, (batch, positions, every - 2 * kv_heads, width)), cache]
    specs.append(graph.values[placed["values"].value])
    graph.outputs = [graph.add_value(TensorSpec(spec.dtype, spec.shape)) for spec in specs]
    graph.nodes.append(Node("zoo.rope_cache", placed, tuple(graph.outputs)))
    return graph, feeds


def check(args: dict[str, Any], **tolerance: float) -> None:
    graph, feeds = one_node(args)
    assert registry.refusal(graph.call(graph.nodes[0])) is None
    double = {
        name: item.double() if isinstance(item, torch.Tensor) and item.is_floating_point() else item
        for name, item in args.items()
    }
    for actual, golden in zip(run_graph(graph, feeds), eager.rope_cache(Call("", double, ())), strict=True):
        assert actual.shape == tuple(golden.shape)
        assert_close(actual, golden.numpy(), **(tolerance or F32))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", ["none", "plain", "one weight", "weight by head"])
def test_agrees_with_what_it_stands_for(norm: str, interleaved: bool) -> None:
    args = drawn() | {"interleaved": interleaved}
    if norm != "weight by head":
        args["weight"] = args["weight"][0].clone() if norm == "one weight" else None
    if norm == "none":
        args["eps"] = None
    check(args)


@pytest.mark.parametrize(
    "sizes",
    [
        {"positions": 1, "capacity": 1},
        {"batch": 3, "positions": 5, "heads": 3, "kv_heads": 3, "width": 2},
        {"positions": 17, "heads": 5, "kv_heads": 1, "width": 6, "capacity": 300},
        {"positions": 2, "heads": 16, "kv_heads": 8, "width": 128, "capacity": 4},
        {"positions": 1, "heads": 1, "kv_heads": 1, "width": 514, "capacity": 3},
    ],
)
def test_sizes(sizes: dict[str, int]) -> None:
    check(drawn(**sizes))


def test_no_positions() -> None:
    args = drawn()
    args |= {name: args[name][:0] for name in ("cos", "sin", "index")} | {"x": args["x"][:, :0]}
    graph, feeds = one_node(args)
    query, keys, values = run_graph(graph, feeds)
    assert query.shape == (1, 0, 4, 16)
    np.testing.assert_array_equal(keys, args["keys"].numpy())
    np.testing.assert_array_equal(values, args["values"].numpy())


@pytest.mark.parametrize("x", [torch.float16, torch.float32])
@pytest.mark.parametrize("cache", [torch.float16, torch.float32])
def test_projection_and_caches_in_other_precisions(x: torch.dtype, cache: torch.dtype) -> None:
    args = drawn()
    args["x"] = args["x"].to(x)
    args |= {name: args[name].to(cache) for name in ("keys", "values")}
    check(args, **(F32 if cache == torch.float32 else F16))


def test_positions_that_do_not_exist_are_not_written() -> None:
    args = drawn(positions=4)
    real = args["index"].clone()
    args["index"] = torch.tensor([-1, 7, int(real[2]), 2**31 - 1])
    graph, feeds = one_node(args)
    _, keys, values = run_graph(graph, feeds)
    only = {name: args[name][2:3] for name in ("cos", "sin")} | {"x": args["x"][:, 2:3], "index": real[2:3]}
    _, some_keys, some_values = eager.rope_cache(Call("", args | only, ()))
    assert_close(keys, some_keys.double().numpy(), **F32)
    assert_close(values, some_values.double().numpy(), **F32)


def test_what_is_not_a_number_stays_in_its_head() -> None:
    args = drawn()
    args["x"][0, 1, 2, 3] = float("nan")
    args["x"][0, 0, 7, 5] = float("inf")  # of a value, which is copied
    check(args)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("cos", lambda t: t[:2], "by position"),
        ("index", lambda t: t[:2], "by position"),
        ("weight", lambda t: t[:, :8], "by head"),
        ("keys", lambda t: t[:, :1], "four axes"),
        ("x", lambda t: t[:, :, :7], "caches' heads"),
        ("keys", lambda t: t.half(), "other dtypes"),
        ("eps", lambda e: "small", "not a number"),
    ],
)
def test_refusals(name: str, change: Any, reason: str) -> None:
    graph, _ = one_node(drawn())
    args = drawn()
    args[name] = change(args[name])
    if name == "x":
        args[name] = args[name].contiguous()
    other, _ = one_node(args)
    # The outputs of arguments that fit.
    node = other.nodes[0]
    call = other.call(node)
    refused = registry.refusal(Call(call.op, call.args, graph.call(graph.nodes[0]).outputs))
    assert refused is not None and reason in refused


def test_one_buffer_cannot_be_both_caches() -> None:
    graph, _ = one_node(drawn())
    call = graph.call(graph.nodes[0])
    state = TensorSpec("float32", call["keys"].shape, state="cache")
    refused = registry.refusal(Call(call.op, call.args | {"keys": state, "values": state}, call.outputs))
    assert refused == "rope_cache: keys and values in one cache"
