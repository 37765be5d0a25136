"""`zoo bench kernels`: single kernels on the present adapter, as TFLOP/s or GB/s beside its measured copy bandwidth.

Operands stay on the GPU. `gpu_ms` is the time between two GPU timestamps around repeated dispatches, divided by their
number; `wall_ms` is the same work seen from the host. The peers are torch eager on the CPU and, with TF32 off, on CUDA,
in the same process and in turns with ours.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import wgpu

from backend.graph import Graph, Node, Ref, TensorSpec, to_blob
from backend.runtime.delegate import Delegate
from backend.runtime.device import READ, WRITE, Device, get_device
from backend.runtime.replay import Step, encode
from recipes.recipe import UserError
from zoo.console import step

ROUNDS = 7
WARM_SECONDS = 0.4  # a GPU that was idle takes a while to reach its clocks
TARGET_SECONDS = 0.02  # of work between two timestamps

_COPY_GROUPS = 16384
_COPY = """
@group(0) @binding(0) var<storage, read> source: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> target_: array<vec4<u32>>;
@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
  let step = groups.x * 256u;
  for (var i = id.x; i < arrayLength(&source); i += 4u * step) {
    let a = source[i];
    let b = source[i + step];
    let c = source[i + 2u * step];
    let d = source[i + 3u * step];
    target_[i] = a;
    if (i + step < arrayLength(&source)) { target_[i + step] = b; }
    if (i + 2u * step < arrayLength(&source)) { target_[i + 2u * step] = c; }
    if (i + 3u * step < arrayLength(&source)) { target_[i + 3u * step] = d; }
  }
}"""


@dataclass(frozen=True)
class Array:
    """An operand: drawn from a standard normal, scaled; a constant is one that a model would hold as a weight."""

    shape: tuple[int, ...]
    constant: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class Case:
    """A chain of operators on `arrays`, what it costs, and the same in torch.

    nodes: (operator, arguments, output shape); an argument that is a string with `$` names an array, `$out` the result
    of the operator before it.
    """

    name: str
    arrays: dict[str, Array]
    nodes: list[tuple[str, dict[str, Any], tuple[int, ...]]]
    torch: Callable[..., Any]
    flops: int = 0
    moved: int = 0  # bytes that have to be read and written
    dtype: str = "float32"


def _mm(name: str, m: int, k: int, n: int, dtype: str = "float32") -> Case:
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


def _linear(name: str, m: int, k: int, n: int, dtype: str = "float32") -> Case:
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


def _conv(name: str, cin: int, cout: int, size: tuple[int, int], kernel: int, groups: int = 1) -> Case:
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


def _attention(name: str, heads: int, kv_heads: int, queries: int, keys: int, depth: int, causal: bool) -> Case:
    arguments = {"query": "$q", "key": "$k", "value": "$v", "attn_mask": None, "dropout_p": 0.0, "is_causal": causal}
    shared = heads != kv_heads
    return Case(
        f"{name} {heads}x{queries}x{keys}x{depth}" + (" causal" if causal else ""),
        {
            "q": Array((1, heads, queries, depth)),
            "k": Array((1, kv_heads, keys, depth)),
            "v": Array((1, kv_heads, keys, depth)),
        },
        [
            (
                "aten.scaled_dot_product_attention.default",
                arguments | {"scale": None, "enable_gqa": shared},
                (1, heads, queries, depth),
            )
        ],
        lambda t, x: t.nn.functional.scaled_dot_product_attention(
            x["q"], x["k"], x["v"], is_causal=causal, enable_gqa=shared
        ),
        flops=4 * heads * queries * keys * depth // (2 if causal else 1),
        moved=4 * depth * (2 * heads * queries + 2 * kv_heads * keys),
    )


def _rows(rows: int, width: int) -> list[Case]:
    shape = (rows, width)
    norm = {"input": "$x", "normalized_shape": [width], "weight": "$w", "bias": "$b", "eps": 1e-5}
    norm["cudnn_enable"] = False
    chain: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
        ("aten.mul.Tensor", {"self": "$x", "other": "$y"}, shape),
        ("aten.add.Tensor", {"self": "$out", "other": "$b", "alpha": 1}, shape),
        ("aten.silu.default", {"self": "$out"}, shape),
        ("aten.add.Tensor", {"self": "$out", "other": "$x", "alpha": 1}, shape),
    ]
    weights = {"w": Array((width,), True), "b": Array((width,), True)}
    x, moved = Array(shape), 8 * rows * width
    return [
        Case(
            f"layer_norm {rows}x{width}",
            {"x": x, **weights},
            [("aten.layer_norm.default", norm, shape)],
            lambda t, a: t.nn.functional.layer_norm(a["x"], (width,), a["w"], a["b"]),
            moved=moved,
        ),
        Case(
            f"softmax {rows}x{width}",
            {"x": x},
            [("aten.softmax.int", {"self": "$x", "dim": -1, "dtype": None}, shape)],
            lambda t, a: t.softmax(a["x"], -1),
            moved=moved,
        ),
        Case(
            f"silu(x*y + b) + x {rows}x{width}",
            {"x": x, "y": x, "b": weights["b"]},
            chain,
            lambda t, a: t.nn.functional.silu(a["x"] * a["y"] + a["b"]) + a["x"],
            moved=moved * 3 // 2,
        ),
        Case(
            f"2 x {rows}x{width}",
            {"x": x},
            [("aten.mul.Tensor", {"self": "$x", "other": 2.0}, shape)],
            lambda t, a: a["x"] * 2.0,
            moved=moved,
        ),
    ]


def cases(small: bool, half: bool) -> list[Case]:
    """The table of kernels; `small`: sizes for a processor, `half`: with float16 storage too."""
    if small:
        return [
            _mm("gemm", 512, 512, 512),
            _mm("gemm", 100, 768, 3072),
            _mm("gemm deep", 64, 4096, 64),
            _linear("linear", 16, 512, 2048),
            _linear("gemv", 1, 1024, 4096),
            _conv("conv", 64, 64, (64, 64), 3),
            _conv("depthwise", 64, 64, (64, 64), 3, 64),
            _attention("attention", 8, 8, 256, 256, 64, True),
            _attention("attention step", 8, 8, 1, 1024, 64, False),
            *_rows(1024, 1024),
        ]
    halves = [_mm("gemm", 4096, 4096, 4096, "float16"), _linear("gemv", 1, 4096, 16384, "float16")] if half else []
    return [
        _mm("gemm", 4096, 4096, 4096),
        _mm("gemm", 1024, 1024, 1024),
        _linear("linear", 640, 512, 2048),
        _linear("linear", 256, 512, 512),
        _mm("gemm deep", 256, 16384, 256),
        _linear("linear", 64, 1024, 4096),
        _linear("linear", 16, 1024, 4096),
        _linear("gemv", 1, 1024, 3072),
        _linear("gemv", 1, 4096, 16384),
        _linear("gemv", 4, 4096, 16384),
        *halves,
        _conv("conv", 64, 64, (720, 1280), 3),
        _conv("conv", 64, 64, (64, 64), 3),
        _conv("conv", 512, 512, (32, 32), 3),
        _conv("depthwise", 256, 256, (128, 128), 3, 256),
        _attention("attention", 16, 16, 2048, 2048, 64, False),
        _attention("attention", 16, 8, 2048, 2048, 128, True),
        _attention("attention", 8, 8, 640, 640, 64, False),
        _attention("attention step", 16, 8, 1, 4096, 128, False),
        *_rows(16384, 1024),
    ]


def bench_kernels(*, runs: int = ROUNDS, only: str = "", peers: bool = True) -> dict[str, Any]:
    """Times the kernels whose names contain `only`; returns the JSON of `zoo bench kernels --json`.

    peers: torch eager beside ours, where torch is installed. Raises `UserError` for a name that no kernel has.
    """
    if runs < 1:
        raise UserError("--runs must be at least 1")
    device = get_device()
    small = is_small(device)
    chosen = [case for case in cases(small, "shader-f16" in device.features) if only in case.name]
    if not chosen:
        raise UserError(f"no kernel is called {only!r}")
    copied = copy_bandwidth(device)
    results = []
    for case in chosen:
        with step(case.name):
            results.append(_measure(case, device, runs, peers))
    return {
        "adapter": device.name,
        "driver": device.adapter.info["description"],
        "copy_gb_s": copied,
        "results": results,
    }


def is_small(device: Device) -> bool:
    """Whether the adapter is a processor that stands in for a GPU: measured with less."""
    return bool(device.adapter.info["adapter_type"] == "CPU")


def copy_bandwidth(device: Device) -> float:
    """GB/s, read and written, of the better of two copies: between buffers, and by a kernel of 16 bytes a read."""
    nbytes = (64 if is_small(device) else 512) << 20
    nbytes = min(nbytes, device.limit("max-storage-buffer-binding-size") // 1024 * 1024)
    source, target = device.buffer(nbytes, "copy source"), device.buffer(nbytes, "copy target")
    pipeline = device.pipeline(_COPY, (READ, WRITE), "copy")
    group = device.bind_group((READ, WRITE), [(source, 0, nbytes), (target, 0, nbytes)])
    copying = Step("copy", "copy", pipeline, group, (max(1, min(nbytes // 16384, _COPY_GROUPS)), 1, 1))
    by_kernel = _Timer(device, [copying])
    # Timestamps may come out equal, or be missing (NaN): such a time says nothing.
    best = min(time for _ in range(5) for time in by_kernel.run() if time > 0)

    def run(count: int) -> float:
        encoder = device.handle.create_command_encoder()
        for _ in range(count):
            encoder.copy_buffer_to_buffer(source, 0, target, 0, nbytes)
        start = time.perf_counter()
        device.handle.queue.submit([encoder.finish()])
        by_kernel.wait()
        return (time.perf_counter() - start) / count

    count = max(1, min(100, int(TARGET_SECONDS / run(1))))
    return 2 * nbytes / min(best, *(run(count) for _ in range(5))) / 1e9


def _measure(case: Case, device: Device, runs: int, peers: bool) -> dict[str, Any]:
    graph, feeds, data = _graph(case)
    delegate = Delegate(to_blob(graph), data.__getitem__)
    try:
        inputs = [feeds[name] for name in feeds]
        delegate.execute(inputs)
        plan = delegate.plan([array.shape for array in inputs])
        ours = _Timer(device, plan.steps)
        others = _peers(case) if peers else {}
        gpu, wall = [], []
        warm = time.perf_counter() + WARM_SECONDS
        while time.perf_counter() < warm:
            ours.run()
        spent: dict[str, list[float]] = {name: [] for name in others}
        for _ in range(runs):
            on_gpu, seen = ours.run()
            gpu.append(on_gpu)
            wall.append(seen)
            for name, call in others.items():
                spent[name].append(call())
        kernels = [step.template for step in plan.steps]
    finally:
        delegate.close()
    best = statistics.median(gpu if not math.isnan(gpu[0]) else wall)
    row: dict[str, Any] = {"kernel": case.name, "templates": kernels, "gpu_ms": None, "wall_ms": _ms(wall)}
    if not math.isnan(gpu[0]):
        row["gpu_ms"] = _ms(gpu)
    row["gb_s"] = case.moved / best / 1e9
    if case.flops:
        row["tflop_s"] = case.flops / best / 1e12
    row["peers_ms"] = {name: _ms(times) for name, times in spent.items()}
    return row


def _ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds)


class _Timer:
    """Repeats dispatches in one pass, enough of them for a time that can be measured."""

    def __init__(self, device: Device, steps: Sequence[Step]):
        self.device = device
        self.steps = steps
        self.stamps = "timestamp-query" in device.features
        handle = device.handle
        self.resolved = handle.create_buffer(size=16, usage=wgpu.BufferUsage.QUERY_RESOLVE | wgpu.BufferUsage.COPY_SRC)
        # Kept, for making a buffer that can be mapped may take a driver longer than the work that is timed.
        self.seen = handle.create_buffer(size=16, usage=wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST)
        if self.stamps:
            self.queries = handle.create_query_set(type=wgpu.QueryType.timestamp, count=2)
        self.repeats = 1
        self.run()
        self.repeats = max(1, min(200, int(TARGET_SECONDS / max(1e-6, self.run()[1]))))
        self.run()

    def wait(self) -> list[int]:
        """What the last timestamps were, when all that was submitted is done."""
        encoder = self.device.handle.create_command_encoder()
        if self.stamps:
            encoder.resolve_query_set(self.queries, 0, 2, self.resolved, 0)
        encoder.copy_buffer_to_buffer(self.resolved, 0, self.seen, 0, 16)
        self.device.handle.queue.submit([encoder.finish()])
        self.seen.map_sync(wgpu.MapMode.READ)
        stamps = memoryview(self.seen.read_mapped(copy=True)).cast("B").cast("Q").tolist()
        self.seen.unmap()
        return list(stamps)

    def run(self) -> tuple[float, float]:
        """(seconds by the GPU's clock or NaN, seconds by the host's) of one repetition."""
        encoder = self.device.handle.create_command_encoder()
        writes = {}
        if self.stamps:
            writes["timestamp_writes"] = {
                "query_set": self.queries,
                "beginning_of_pass_write_index": 0,
                "end_of_pass_write_index": 1,
            }
        compute = encoder.begin_compute_pass(**writes)
        for _ in range(self.repeats):
            encode(compute, self.steps)
        compute.end()
        commands = encoder.finish()
        start = time.perf_counter()
        self.device.handle.queue.submit([commands])
        first, last = self.wait()
        wall = (time.perf_counter() - start) / self.repeats
        return (last - first) / 1e9 / self.repeats if self.stamps else math.nan, wall


def _graph(case: Case) -> tuple[Graph, dict[str, np.ndarray], dict[str, bytes]]:
    graph = Graph()
    rng = np.random.default_rng(0)
    places: dict[str, int] = {}
    feeds: dict[str, np.ndarray] = {}
    data: dict[str, bytes] = {}
    for name, array in case.arrays.items():
        drawn = (rng.standard_normal(array.shape, dtype=np.float32) * np.float32(array.scale)).astype(case.dtype)
        spec = TensorSpec(case.dtype, array.shape, name if array.constant else None)
        places[f"${name}"] = graph.add_value(spec)
        if array.constant:
            data[name] = drawn.tobytes()
        else:
            graph.inputs.append(places[f"${name}"])
            feeds[name] = drawn
    for op, arguments, shape in case.nodes:
        args = {
            name: Ref(places[item]) if isinstance(item, str) and item in places else item
            for name, item in arguments.items()
        }
        places["$out"] = graph.add_value(TensorSpec(case.dtype, shape))
        graph.nodes.append(Node(op, args, (places["$out"],)))
    graph.outputs = [places["$out"]]
    return graph, feeds, data


def _peers(case: Case) -> dict[str, Callable[[], float]]:
    """torch eager by device; a call gives the seconds of one repetition."""
    try:
        import torch
    except ImportError:
        return {}
    found: dict[str, Callable[[], float]] = {}
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for kind in ["cuda"] if torch.cuda.is_available() else ["cpu"]:
        operands = {
            name: torch.randn(array.shape, device=kind, dtype=getattr(torch, case.dtype)) * array.scale
            for name, array in case.arrays.items()
        }

        def once(operands: dict[str, Any] = operands) -> None:
            case.torch(torch, operands)

        found[f"torch {kind}"] = _torch_timer(torch, once, kind)
    return found


def _torch_timer(torch: Any, once: Callable[[], None], kind: str) -> Callable[[], float]:
    def run(repeats: int) -> float:
        with torch.inference_mode():
            if kind == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(repeats):
                    once()
                end.record()
                end.synchronize()
                return float(begin.elapsed_time(end)) / 1e3 / repeats
            start = time.perf_counter()
            for _ in range(repeats):
                once()
            return (time.perf_counter() - start) / repeats

    run(3)
    repeats = max(1, min(200, int(TARGET_SECONDS / max(1e-6, run(1)))))
    return lambda: run(repeats)


def rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """The report as a table: kernel, GPU and wall time, rate, share of the copy bandwidth, ratio to each peer."""
    table: list[tuple[str, ...]] = []
    for row in report["results"]:
        time_ms = row["gpu_ms"] or row["wall_ms"]
        rate = f"{row['tflop_s']:.3f} TFLOP/s" if "tflop_s" in row else f"{row['gb_s']:.1f} GB/s"
        peers = ", ".join(f"{name} {ms:.4f} ms ({ms / time_ms:.2f}x)" for name, ms in row["peers_ms"].items())
        share = f"{100 * row['gb_s'] / report['copy_gb_s']:.0f}%"
        table.append(
            (row["kernel"], f"{time_ms:.4f}", f"{row['wall_ms']:.4f}", rate, share, peers, "+".join(row["templates"]))
        )
    return table


COLUMNS = ("kernel", "gpu ms", "wall ms", "rate", "of copy", "peers", "templates")
