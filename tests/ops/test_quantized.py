"""pytest tests/ops/test_quantized.py: packed codes, quantized linears and embeddings, rounded rows.

Golden: float64 products of the same dequantized weights. Tolerance 1e-5 of the largest result: sums of f32.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torchao.quantization  # noqa: F401 - registers torch.ops.torchao

from backend import quantization
from backend.blob import to_blob
from backend.graph import Graph, Node, Ref, TensorSpec
from backend.ops import registry, tiles
from backend.runtime.builder import lower_graph
from backend.runtime.capabilities import Capabilities
from backend.runtime.delegate import Delegate
from tests.ops.harness import run_graph

LOW = {4: -8, 8: -128}


def unpacked(words: np.ndarray, bits: int, depth: int) -> np.ndarray:
    """Codes by the layout's words, one by one: independent of `pack`."""
    rows = words.shape[0]
    codes = np.zeros((rows, depth), np.int64)
    for n, k in itertools.product(range(rows), range(depth)):
        word = int(words[n, k * bits // 32]) & 0xFFFFFFFF
        if bits == 8:
            byte = word >> 8 * (k % 4) & 255
            codes[n, k] = byte - 256 * (byte > 127)
        else:
            codes[n, k] = (word >> (8 * (k % 4) + 4 * (k % 8 >= 4)) & 15) - 8
    return codes


class Weight:
    """Random codes with their scales and, unless symmetric, zero points."""

    def __init__(
        self, rows: int, depth: int, bits: int, group: int, symmetric: bool = True, dtype: str = "float32"
    ) -> None:
        rng = np.random.default_rng(rows * 1009 + depth)
        low = LOW[bits]
        self.bits, self.group, self.depth = bits, group, depth
        self.codes = rng.integers(low, -low, (rows, depth), dtype=np.int8)
        self.scale = rng.uniform(0.5, 1.5, (rows, depth // group)).astype(dtype)
        self.zero = None if symmetric else rng.integers(low, -low, (rows, depth // group), dtype=np.int8)

    def dense(self) -> np.ndarray:
        zero = 0 if self.zero is None else self.zero.repeat(self.group, 1).astype(np.float64)
        return (self.codes - zero) * self.scale.astype(np.float64).repeat(self.group, 1)

    def place(self, graph: Graph, data: dict[str, bytes]) -> dict[str, Any]:
        args: dict[str, Any] = {"bits": self.bits, "group": self.group, "zero_point": None}
        parts = {"weight": quantization.pack(self.codes, self.bits), "scale": self.scale, "zero_point": self.zero}
        for name, array in parts.items():
            if array is not None:
                args[name] = Ref(graph.add_value(TensorSpec(array.dtype.name, array.shape, name)))
                data[name] = array.tobytes()
        return args


def linear_graph(
    weight: Weight,
    shape: tuple[int, ...],
    dtype: str = "float32",
    bias: np.ndarray | None = None,
    turned: bool = False,
) -> tuple[Graph, dict[str, bytes]]:
    graph, data = Graph(), {}
    args = weight.place(graph, data)
    args["input"] = Ref(graph.add_value(TensorSpec(dtype, shape[::-1] if turned else shape)))
    graph.inputs = [args["input"].value]
    if turned:
        view = graph.add_value(TensorSpec(dtype, shape))
        dims = list(range(len(shape)))[::-1]
        graph.nodes.append(Node("aten.permute_copy.default", {"self": args["input"], "dims": dims}, (view,)))
        args["input"] = Ref(view)
    if bias is not None:
        args["bias"] = Ref(graph.add_value(TensorSpec(dtype, bias.shape, "bias")))
        data["bias"] = bias.tobytes()
    out = graph.add_value(TensorSpec(dtype, (*shape[:-1], weight.codes.shape[0])))
    graph.nodes.append(Node("zoo.quantized_linear", args, (out,)))
    graph.outputs = [out]
    return graph, data


def check_linear(weight: Weight, *rows: int, dtype: str = "float32", bias: bool = False, turned: bool = False) -> None:
    """Tolerances: sums of f32; a float16 result is rounded once more (2^-11)."""
    rng = np.random.default_rng(7)
    shape = (*rows, weight.depth)
    x = rng.standard_normal(shape).astype(dtype)
    offset = rng.standard_normal(weight.codes.shape[0]).astype(dtype) if bias else None
    graph, data = linear_graph(weight, shape, dtype, offset, turned)
    assert registry.refusal(graph.call(graph.nodes[-1])) is None
    feed = np.ascontiguousarray(x.transpose()) if turned else x
    (got,) = run_graph(graph, [feed], data)
    want = x.astype(np.float64) @ weight.dense().T + (0 if offset is None else offset)
    assert got.shape == want.shape and got.dtype == x.dtype
    bound = (1e-5 if dtype == "float32" else 1e-3) * np.abs(want).max(initial=0)
    worst = np.abs(got - want).max(initial=0)
    assert worst <= bound, f"{worst} off, at most {bound}: {weight.bits} bits, {shape} x {weight.codes.shape}"


# --- layout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("depth", (1, 7, 32, 33, 64))
def test_packed_codes_are_where_the_layout_says(bits, depth):
    codes = np.random.default_rng(depth).integers(LOW[bits], -LOW[bits], (5, depth), dtype=np.int8)
    words = quantization.pack(codes, bits)
    assert words.shape == (5, quantization.row_words(depth, bits))
    assert (unpacked(words, bits, depth) == codes).all()


def test_codes_that_do_not_fit_are_an_error():
    with pytest.raises(ValueError, match="4 bits hold -8 to 7"):
        quantization.pack(np.array([[8]], np.int8), 4)


# --- linear -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", (1, 2, 5))
def test_q1_odd_sizes_and_nibble_order(rows):
    """Codes +1, −1, … (9, 7 with the offset of 8): a nibble in its neighbour's place turns the sign."""
    for cols in (1, 3, 4, 5, 7, 8, 9, 12, 13):
        weight = Weight(cols, 64, 4, 32)
        weight.codes[:] = np.tile(np.array([1, -1], np.int8), 32)
        weight.scale[:] = np.arange(1, cols + 1)[:, None]
        graph, data = linear_graph(weight, (rows, 64))
        x = np.tile(np.array([1, 0], np.float32), (rows, 32))
        (got,) = run_graph(graph, [x], data)
        np.testing.assert_array_equal(got, np.tile(32.0 * np.arange(1, cols + 1), (rows, 1)))


@pytest.mark.parametrize("mode", ((4, 32), (4, 64), (4, 128), (4, 256), (8, 0), (8, 32)))
def test_q1_sweep_of_columns_rows_and_groups(mode):
    """Every N to 17 and M to 9 (the ninth row takes the tiles), groups once and twice a row, with and without zeros."""
    bits, group = mode
    for cols, rows in itertools.product(range(1, 18), range(1, 10)):
        if (cols + rows) % 3 and cols not in (1, 4, 17):  # each pair with some group; corners with every one
            continue
        for times in (1, 2) if group else (1,):
            depth = group * times or 96
            check_linear(Weight(cols, depth, bits, group or depth, symmetric=bool((cols + rows + times) % 2)), rows)


@pytest.mark.parametrize("bits", (4, 8))
def test_many_columns_are_several_quads_a_workgroup(bits, monkeypatch):
    """What an output head of one row takes on a GPU, on any device and on few columns; partly filled groups."""
    monkeypatch.setattr("backend.ops.quantized.MANY_GROUPS", 1)
    monkeypatch.setattr("backend.ops.lanes.usable", lambda b: False)
    for cols in (1, 4, 15, 16, 17, 37, 64, 300):
        for depth, symmetric in ((32, True), (100, False), (1024, False)):
            check_linear(Weight(cols, depth, bits, depth, symmetric=symmetric), 1, bias=cols % 2 == 0)


@pytest.mark.parametrize(
    "rows, cols, depth, normed, groups, workers",
    [
        (1, 151936, 1024, False, 9496, 64),  # an output head
        (2, 151936, 1024, False, 37984, 64),
        (1, 6144, 1024, True, 1536, 64),
        (1, 6144, 1024, False, 1536, 64),
        (1, 1024, 2048, True, 256, 128),
        (1, 1024, 2048, False, 256, 128),
    ],
)
def test_what_a_gpu_takes_for_few_rows(rows, cols, depth, normed, groups, workers):
    """By lowering alone, so that the sizes are those of real models."""
    graph = Graph()
    x = graph.add_value(TensorSpec("float32", (rows, depth)))
    graph.inputs = [x]
    args: dict[str, Any]
    if normed:
        args = {"input": Ref(x), "normalized_shape": [depth], "weight": None, "eps": 1e-6}
        x = graph.add_value(TensorSpec("float32", (rows, depth)))
        graph.nodes.append(Node("aten.rms_norm.default", args, (x,)))
    weight = graph.add_value(TensorSpec("int32", (cols, depth // 8), "w"))
    scale = graph.add_value(TensorSpec("float32", (cols, depth // 32), "s"))
    out = graph.add_value(TensorSpec("float32", (rows, cols)))
    args = {"input": Ref(x), "weight": Ref(weight), "scale": Ref(scale), "zero_point": None, "bits": 4, "group": 32}
    graph.nodes.append(Node("zoo.quantized_linear", args, (out,)))
    graph.outputs = [out]
    (*_, last) = lower_graph(graph, {}, Capabilities()).dispatches
    assert last.template == "gemv_codes" and f"@workgroup_size({workers})" in last.code
    assert math.prod(last.groups) == groups


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("depth", (1, 3, 6, 30, 33, 100, 516))
def test_rows_that_end_within_a_word(bits, depth):
    for rows in (1, 3, 9, 40):
        check_linear(Weight(11, depth, bits, depth, symmetric=False), rows, bias=True)


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("symmetric", (True, False))
def test_prompts_by_tiles(bits, symmetric):
    """Tiles of 32 and of 64, edges of both; dims before the rows; an input that is a turned view."""
    check_linear(Weight(33, 96, bits, 32, symmetric), 2, 37)
    check_linear(Weight(200, 160, bits, 32, symmetric), 130, bias=True)
    check_linear(Weight(71, 64, bits, 64, symmetric), 67, turned=True)
    check_linear(Weight(5, 64, bits, 64, symmetric), 3, turned=True)


@pytest.mark.parametrize("tile", (tiles.TALL, tiles.MEDIUM, tiles.SMALL_QUARTERED), ids=lambda tile: tile.name)
@pytest.mark.parametrize("bits", (4, 8))
def test_prompts_by_wide_tiles(tile, bits, monkeypatch):
    """GPUs' own kernel, on any device: edges, words that end after depth does, sums in parts, another layout of a."""
    monkeypatch.setattr("backend.ops.tiles.usable", lambda b: True)
    for symmetric in (True, False):
        monkeypatch.setattr("backend.ops.tiles.choose", lambda sizes, b, s=symmetric: tiles.Choice(tile, 1 + s))
        check_linear(Weight(131, 96, bits, 32, symmetric), 17)
        check_linear(Weight(68, 33, bits, 33, symmetric), 133, bias=True)
    check_linear(Weight(70, 1024, bits, 128), 3, 13, dtype="float16")
    check_linear(Weight(35, 64, bits, 64), 40, turned=True)


@pytest.mark.parametrize("rows", (1, 4, 20))
def test_float16(rows):
    for bits, group in ((4, 32), (8, 128)):
        check_linear(Weight(19, 128, bits, group, False, "float16"), rows, dtype="float16", bias=True)


def test_a_long_row_and_many_columns():
    check_linear(Weight(3, 5120, 4, 128), 1)
    check_linear(Weight(70001, 32, 8, 32), 1)


def test_no_rows():
    check_linear(Weight(5, 32, 4, 32), 0)


def test_a_weight_stays_packed_on_the_gpu():
    graph, data = linear_graph(Weight(64, 256, 4, 32), (1, 256))
    delegate = Delegate(to_blob(graph), data.__getitem__)
    assert delegate.weight_bytes == 64 * 256 // 2 + 64 * 8 * 4
    delegate.close()


def refusal(weight: Weight, **changes: Any) -> str | None:
    graph, _ = linear_graph(weight, (2, weight.depth))
    node = graph.nodes[0]
    return registry.refusal(graph.call(Node(node.op, {**node.args, **changes}, node.outputs)))


def test_what_no_kernel_takes_is_refused_with_its_reason():
    weight = Weight(4, 96, 4, 32)
    assert refusal(weight) is None
    assert refusal(weight, group=64) == "linear: 4-bit weight needs a group size that divides K"
    assert refusal(weight, group=24) == "linear: 4-bit weight needs groups of a multiple of 32, or one scale a row"
    assert refusal(weight, group=96) == "linear: one scale a group is needed"
    assert refusal(weight, bits=2) == "linear: no kernel for 2-bit weights"
    assert refusal(weight, bits=8) == "linear: the weight is not packed for 96 codes of 8 bits"


@pytest.mark.parametrize("mode", quantization.MODES)
def test_q3_every_declared_mode_runs(mode):
    """No mode without a kernel: each one's bits, through both kernels."""
    bits = quantization.MODES[mode].bits
    for rows in (1, 9):
        check_linear(Weight(6, 64, bits, 32), rows)


# --- embedding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("depth, group", ((64, 32), (96, 96), (30, 30), (1, 1)))
@pytest.mark.parametrize("dtype", ("float32", "float16"))
def test_embedding(bits, depth, group, dtype):
    for symmetric, indices in ((True, np.array([[0, 10, 3]])), (False, np.array([7])), (True, np.zeros((2, 0)))):
        weight = Weight(11, depth, bits, group, symmetric, dtype)
        graph, data = Graph(), {}
        indices = indices.astype(np.int64)
        graph.inputs = [graph.add_value(TensorSpec("int64", indices.shape))]
        args = {**weight.place(graph, data), "indices": Ref(graph.inputs[0]), "depth": depth}
        graph.outputs = [graph.add_value(TensorSpec(dtype, (*indices.shape, depth)))]
        graph.nodes = [Node("zoo.quantized_embedding", args, tuple(graph.outputs))]
        assert registry.refusal(graph.call(graph.nodes[0])) is None
        (got,) = run_graph(graph, [indices], data)
        np.testing.assert_array_equal(got, weight.dense()[indices].astype(dtype))  # one rounding


# --- rounded rows -----------------------------------------------------------------------------------------------------


def rounded(x: torch.Tensor) -> torch.Tensor:
    """As eager torchao rounds activations."""
    block = [1] * (x.dim() - 1) + [x.shape[-1]]
    scale, zero = torch.ops.torchao.choose_qparams_affine(
        x, "ASYMMETRIC", block, torch.int8, -128, 127, None, None, torch.int8
    )
    codes = torch.ops.torchao.quantize_affine(x, block, scale, zero, torch.int8, -128, 127)
    return torch.ops.torchao.dequantize_affine(codes, block, scale, zero, torch.int8, -128, 127, output_dtype=x.dtype)


def run_rows(x: torch.Tensor) -> np.ndarray:
    graph = Graph()
    dtype = str(x.dtype).removeprefix("torch.")
    graph.inputs = [graph.add_value(TensorSpec(dtype, tuple(x.shape)))]
    graph.outputs = [graph.add_value(TensorSpec(dtype, tuple(x.shape)))]
    args = {"input": Ref(graph.inputs[0]), "eps": torch.finfo(x.dtype).smallest_normal}
    graph.nodes = [Node("zoo.round_rows", args, tuple(graph.outputs))]
    assert registry.refusal(graph.call(graph.nodes[0])) is None
    return run_graph(graph, [x.numpy()])[0]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
@pytest.mark.parametrize("shape", ((1, 1), (3, 7), (5, 64), (2, 3, 257), (4, 1024), (2, 0), (0, 8)))
def test_rounded_rows_are_eager_ones_bit_for_bit(dtype, shape):
    torch.manual_seed(0)
    for x in (torch.randn(shape), torch.rand(shape) * 1e-3 + 1, -torch.rand(shape) * 300, torch.randn(shape) * 1e4):
        x = x.to(dtype)
        want = rounded(x) if x.numel() else x
        np.testing.assert_array_equal(run_rows(x), want.numpy())


def test_rounded_rows_at_ties():
    """Halves between codes: scale 1 and zero point 0, so that x + 0.5 lies between two."""
    x = torch.cat([torch.arange(-127, 127) + 0.5, torch.tensor([-128.0, 127.0])])[None]
    np.testing.assert_array_equal(run_rows(x), rounded(x).numpy())


def test_rounded_rows_of_nothing_but_zero_and_of_nan():
    x = torch.zeros(4, 9)
    x[1, 2], x[2, 3], x[3, :] = float("nan"), float("inf"), 1.0
    got = run_rows(x)
    np.testing.assert_array_equal(got[0], np.zeros(9))
    assert np.isnan(got[1:3]).all()
    np.testing.assert_array_equal(got[3], rounded(x[3:]).numpy()[0])
