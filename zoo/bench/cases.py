"""The kernels that `zoo bench kernels` times: a table of short chains of operators, with what each costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from backend.graph import Graph, Node, Ref, TensorSpec
from backend.quantization import MODES, RANGES, pack


@dataclass(frozen=True)
class Array:
    """An operand: drawn from a standard normal, scaled; a constant is one that a model would hold as a weight.

    With bits, a weight [N, K] of quantized codes, one scale for `group` of them, as `zoo.quantized_linear` takes it;
    torch and the peers get what the codes stand for, in the case's dtype.
    """

    shape: tuple[int, ...]
    constant: bool = False
    scale: float = 1.0
    bits: int = 0
    group: int = 0


@dataclass(frozen=True)
class Case:
    """A chain of operators on `arrays`, what it costs, and the same in torch.

    nodes: (operator, arguments, output shape); an argument that is a string with `$` names an array, `$out` the result
    of the operator before it, `$<name>_scale` the scales of quantized codes.
    """

    name: str
    arrays: dict[str, Array]
    nodes: list[tuple[str, dict[str, Any], tuple[int, ...]]]
    torch: Callable[..., Any]
    flops: int = 0
    moved: int = 0  # bytes that have to be read and written
    dtype: str = "float32"


def gemm(name: str, m: int, k: int, n: int, dtype: str = "float32") -> Case:
    size = 2 if dtype == "float16" else 4
    return Case(
        f"{name} {m}x{k}x{n}" + (" f16" if size == 2 else ""),
        {"self": Array((m, k)), "mat2": Array((k, n))},
        [("aten.mm.default", {"self": "$self", "mat2": "$mat2"}, (m, n))],
        lambda t, x: t.mm(x["self"], x["mat2"]),
        flops=2 * m * k * n,
        moved=size * (m * k + k * n + m * n),
        dtype=dtype,
    )


def linear(name: str, m: int, k: int, n: int, dtype: str = "float32") -> Case:
    size = 2 if dtype == "float16" else 4
    return Case(
        f"{name} {m}x{k}x{n}" + (" f16" if size == 2 else ""),
        {"input": Array((m, k)), "weight": Array((n, k), True, k**-0.5), "bias": Array((n,), True)},
        [("aten.linear.default", {"input": "$input", "weight": "$weight", "bias": "$bias"}, (m, n))],
        lambda t, x: t.nn.functional.linear(x["input"], x["weight"], x["bias"]),
        flops=2 * m * k * n,
        moved=size * (m * k + k * n + m * n),
        dtype=dtype,
    )


def quantized(name: str, mode: str, m: int, k: int, n: int) -> Case:
    """A linear layer of a weight-only mode, without bias: 4 bits in groups of 32, 8 bits with a scale a row."""
    bits = MODES[mode].bits
    group = 32 if bits == 4 else k
    arguments: dict[str, Any] = {"input": "$input", "weight": "$weight", "scale": "$weight_scale", "zero_point": None}
    arguments |= {"bias": None, "bits": bits, "group": group}
    return Case(
        f"{name} {mode} {m}x{k}x{n}",
        {"input": Array((m, k)), "weight": Array((n, k), True, k**-0.5, bits, group)},
        [("zoo.quantized_linear", arguments, (m, n))],
        lambda t, x: t.nn.functional.linear(x["input"], x["weight"]),
        flops=2 * m * k * n,
        moved=4 * (m * k + m * n) + n * k * bits // 8 + 4 * n * k // group,
    )


def conv(name: str, cin: int, cout: int, size: tuple[int, int], kernel: int, groups: int = 1) -> Case:
    h, w = size
    arguments: dict[str, Any] = {"input": "$input", "weight": "$weight", "bias": "$bias", "stride": [1, 1]}
    arguments |= {"padding": [kernel // 2] * 2, "dilation": [1, 1], "groups": groups}
    return Case(
        f"{name} {cin}>{cout} {kernel}x{kernel} {h}x{w}",
        {
            "input": Array((1, cin, h, w)),
            "weight": Array((cout, cin // groups, kernel, kernel), True, (cin // groups * kernel**2) ** -0.5),
            "bias": Array((cout,), True),
        },
        [("aten.conv2d.default", arguments, (1, cout, h, w))],
        lambda t, x: t.nn.functional.conv2d(x["input"], x["weight"], x["bias"], padding=kernel // 2, groups=groups),
        flops=2 * cin // groups * cout * kernel**2 * h * w,
        moved=4 * (cin + cout) * h * w,
    )


def attention(
    name: str, heads: int, kv_heads: int, queries: int, keys: int, depth: int, causal: bool = False, batch: int = 1
) -> Case:
    arguments = {"query": "$q", "key": "$k", "value": "$v", "attn_mask": None, "dropout_p": 0.0, "is_causal": causal}
    shared = heads != kv_heads
    several = f"{batch}x" if batch > 1 else ""
    return Case(
        f"{name} {several}{heads}x{queries}x{keys}x{depth}" + (" causal" if causal else ""),
        {
            "q": Array((batch, heads, queries, depth)),
            "k": Array((batch, kv_heads, keys, depth)),
            "v": Array((batch, kv_heads, keys, depth)),
        },
        [
            (
                "aten.scaled_dot_product_attention.default",
                arguments | {"scale": None, "enable_gqa": shared},
                (batch, heads, queries, depth),
            )
        ],
        lambda t, x: t.nn.functional.scaled_dot_product_attention(
            x["q"], x["k"], x["v"], is_causal=causal, enable_gqa=shared
        ),
        flops=4 * batch * heads * queries * keys * depth // (2 if causal else 1),
        moved=4 * batch * depth * (2 * heads * queries + 2 * kv_heads * keys),
    )


def rows(count: int, width: int) -> list[Case]:
    shape = (count, width)
    norm = {"input": "$x", "normalized_shape": [width], "weight": "$w", "bias": "$b", "eps": 1e-5}
    norm["cudnn_enable"] = False
    rms = {"input": "$x", "normalized_shape": [width], "weight": "$w", "eps": 1e-5}
    chain: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
        ("aten.mul.Tensor", {"self": "$x", "other": "$y"}, shape),
        ("aten.add.Tensor", {"self": "$out", "other": "$b", "alpha": 1}, shape),
        ("aten.silu.default", {"self": "$out"}, shape),
        ("aten.add.Tensor", {"self": "$out", "other": "$x", "alpha": 1}, shape),
    ]
    weights = {"w": Array((width,), True), "b": Array((width,), True)}
    x, moved = Array(shape), 8 * count * width
    return [
        Case(
            f"layer_norm {count}x{width}",
            {"x": x, **weights},
            [("aten.layer_norm.default", norm, shape)],
            lambda t, a: t.nn.functional.layer_norm(a["x"], (width,), a["w"], a["b"]),
            moved=moved,
        ),
        Case(
            f"rms_norm {count}x{width}",
            {"x": x, "w": weights["w"]},
            [("aten.rms_norm.default", rms, shape)],
            lambda t, a: t.nn.functional.rms_norm(a["x"], (width,), a["w"], 1e-5),
            moved=moved,
        ),
        Case(
            f"softmax {count}x{width}",
            {"x": x},
            [("aten.softmax.int", {"self": "$x", "dim": -1, "dtype": None}, shape)],
            lambda t, a: t.softmax(a["x"], -1),
            moved=moved,
        ),
        Case(
            f"silu(x*y + b) + x {count}x{width}",
            {"x": x, "y": x, "b": weights["b"]},
            chain,
            lambda t, a: t.nn.functional.silu(a["x"] * a["y"] + a["b"]) + a["x"],
            moved=moved * 3 // 2,
        ),
        Case(
            f"2 x {count}x{width}",
            {"x": x},
            [("aten.mul.Tensor", {"self": "$x", "other": 2.0}, shape)],
            lambda t, a: a["x"] * 2.0,
            moved=moved,
        ),
    ]


def table(small: bool, half: bool) -> list[Case]:
    """The table of kernels; `small`: sizes for a processor, `half`: with float16 storage too."""
    if small:
        return [
            gemm("gemm", 512, 512, 512),
            gemm("gemm", 100, 768, 3072),
            gemm("gemm tall", 4096, 256, 64),
            gemm("gemm thin", 32, 512, 4096),
            gemm("gemm deep", 64, 4096, 64),
            linear("linear", 16, 512, 2048),
            linear("gemv", 1, 1024, 4096),
            *(quantized(name, mode, m, 1024, 4096) for name, m in (("gemv", 1), ("gemm", 64)) for mode in ("4w", "8w")),
            conv("conv", 64, 64, (64, 64), 3),
            conv("depthwise", 64, 64, (64, 64), 3, 64),
            attention("attention", 8, 8, 256, 256, 64, True),
            attention("attention step", 8, 8, 1, 1024, 64),
            attention("attention window", 4, 4, 64, 64, 32, batch=16),
            attention("attention channel", 4, 4, 32, 32, 1024),
            *rows(1024, 1024),
        ]
    halves = [gemm("gemm", 4096, 4096, 4096, "float16"), linear("gemv", 1, 4096, 16384, "float16")] if half else []
    return [
        gemm("gemm", 4096, 4096, 4096),
        gemm("gemm", 1024, 1024, 1024),
        linear("linear", 640, 512, 2048),
        linear("linear", 256, 512, 512),
        gemm("gemm tall", 65536, 512, 128),
        gemm("gemm thin", 64, 1024, 16384),
        gemm("gemm deep", 256, 16384, 256),
        linear("linear", 64, 1024, 4096),
        linear("linear", 16, 1024, 4096),
        linear("gemv", 1, 1024, 3072),
        linear("gemv", 1, 4096, 16384),
        linear("gemv", 4, 4096, 16384),
        *(quantized("gemv", mode, m, 4096, 16384) for m in (1, 4) for mode in ("4w", "8w")),
        *(quantized("gemm", mode, 512, 1024, 4096) for mode in ("4w", "8w")),
        *halves,
        conv("conv", 64, 64, (720, 1280), 3),
        conv("conv", 64, 64, (64, 64), 3),
        conv("conv", 512, 512, (32, 32), 3),
        conv("depthwise", 256, 256, (128, 128), 3, 256),
        attention("attention", 16, 16, 2048, 2048, 64),
        attention("attention", 16, 8, 2048, 2048, 128, True),
        attention("attention", 8, 8, 640, 640, 64),
        attention("attention step", 16, 8, 1, 4096, 128),
        attention("attention window", 8, 8, 64, 64, 32, batch=256),
        attention("attention channel", 8, 8, 32, 32, 9216),
        *rows(16384, 1024),
    ]


def draw(case: Case) -> dict[str, np.ndarray]:
    """The operands, the same at every call; of quantized codes also `<name>_codes`, int8, and `<name>_scale`."""
    rng = np.random.default_rng(0)
    operands: dict[str, np.ndarray] = {}
    for name, array in case.arrays.items():
        drawn = rng.standard_normal(array.shape, dtype=np.float32) * np.float32(array.scale)
        if array.bits:
            groups = drawn.reshape(array.shape[0], -1, array.group)
            scale = np.abs(groups).max(-1) / np.float32(RANGES[array.bits][1])
            codes = np.rint(groups / scale[..., None])
            drawn = (codes * scale[..., None]).reshape(array.shape)
            operands |= {f"{name}_codes": codes.astype(np.int8).reshape(array.shape), f"{name}_scale": scale}
        operands[name] = drawn.astype(case.dtype)
    return operands


def graph_of(case: Case, operands: dict[str, np.ndarray]) -> tuple[Graph, list[np.ndarray], dict[str, bytes]]:
    """The case as a graph, its inputs in order, and the bytes of its constants by name."""
    graph = Graph()
    places: dict[str, int] = {}
    feeds: list[np.ndarray] = []
    data: dict[str, bytes] = {}

    def constant(name: str, values: np.ndarray) -> None:
        places[f"${name}"] = graph.add_value(TensorSpec(values.dtype.name, values.shape, name))
        data[name] = values.tobytes()

    for name, array in case.arrays.items():
        if array.bits:
            constant(name, pack(operands[f"{name}_codes"], array.bits))
            constant(f"{name}_scale", operands[f"{name}_scale"])
        elif array.constant:
            constant(name, operands[name])
        else:
            places[f"${name}"] = graph.add_value(TensorSpec(case.dtype, array.shape))
            graph.inputs.append(places[f"${name}"])
            feeds.append(operands[name])
    for op, arguments, shape in case.nodes:
        args = {
            name: Ref(places[item]) if isinstance(item, str) and item in places else item
            for name, item in arguments.items()
        }
        places["$out"] = graph.add_value(TensorSpec(case.dtype, shape))
        graph.nodes.append(Node(op, args, (places["$out"],)))
    graph.outputs = [places["$out"]]
    return graph, feeds, data
