"""pytest tests/ops/test_conv.py"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import EXACT, check_op, run_graph, run_op

from backend.expr import Dim, Expr
from backend.graph import Graph, Node, Ref, TensorSpec
from backend.ops import conv as ops
from backend.ops import registry
from backend.ops import tiles as wide
from backend.runtime.builder import lower_graph
from backend.runtime.capabilities import Capabilities

VARIANTS = pytest.mark.parametrize("kernel_name", ["direct", "lanes", "tile", "wide"])

# A sum of n products of about 1 carries about sqrt(n) float32 roundings of itself: for n to 4000, below 2e-5 of the
# weights' scale. float16 adds one rounding of the result (eps 9.8e-4).
SUM = {"atol": 2e-5, "rtol": 1e-5}
HALF = {"atol": 2e-3, "rtol": 2e-3}
FLOATS = [torch.float32, torch.float16]


@pytest.fixture
def variant(kernel_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force(kernel_name, monkeypatch)


def force(kernel_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overrules the choice that depends on the device, so that any device tests all kernels that it can run."""
    name = "tiles" if kernel_name in ("tile", "wide") else kernel_name
    monkeypatch.setattr(ops, "_choose", lambda g, b: name if ops._takes(name, g, b) else "direct")
    monkeypatch.setattr("backend.ops.tiles.usable", lambda b: kernel_name == "wide")


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def integers(*shape: int) -> torch.Tensor:
    """Small integers: float32 sums of their products are exact."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(sum(shape))).float()


def conv(x, weight, bias, stride=1, padding=0, dilation=1, groups=1, transposed=False, output_padding=0, **tolerance):
    """aten.convolution, numbers for all axes."""
    dims = weight.dim() - 2
    lists = [[item] * dims if isinstance(item, int) else item for item in (stride, padding, dilation, output_padding)]
    tolerance = tolerance or (SUM if x.dtype == torch.float32 else HALF)
    args = (*lists[:3], transposed, lists[3], groups)
    return check_op("aten.convolution.default", x, weight, bias, *args, **tolerance)


@VARIANTS
@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kernel", [1, 2, 3, 7])
@pytest.mark.parametrize(("channels", "out"), [(1, 1), (3, 5), (5, 32), (32, 3), (64, 67)])
def test_conv1d_sizes(kernel_name, channels, out, kernel, dtype):
    scale = (channels * kernel) ** -0.5
    x, weight = rand(2, channels, 41, dtype=dtype), rand(out, channels, kernel, dtype=dtype) * scale
    tolerance = SUM if dtype == torch.float32 else HALF
    check_op("aten.conv1d.default", x, weight, rand(out, dtype=dtype), [1], [kernel // 2], **tolerance)


@VARIANTS
@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize(("channels", "out"), [(3, 5), (8, 16), (5, 9)])
@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize(("dilation", "padding"), [(1, 0), (2, 1), (3, 5)])
def test_conv2d_stride_dilation_padding(kernel_name, channels, out, stride, dilation, padding):
    x, weight = integers(2, channels, 13, 11), integers(out, channels, 3, 3)
    check_op("aten.conv2d.default", x, weight, integers(out), [stride] * 2, [padding] * 2, [dilation] * 2, **EXACT)


@VARIANTS
@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"), [((1, 3), (2, 1), (0, 1), (1, 2)), ((5, 2), (1, 3), (4, 0), (2, 1))]
)
@pytest.mark.parametrize("channels", [(2, 4), (8, 24)], ids=str)
def test_conv2d_axes_differ(kernel_name, channels, kernel, stride, padding, dilation):
    x, weight = integers(1, channels[0], 12, 17), integers(channels[1], channels[0], *kernel)
    conv(x, weight, None, list(stride), list(padding), list(dilation), **EXACT)


@VARIANTS
@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("channels", "out", "groups"), [(6, 6, 6), (5, 15, 5), (6, 4, 2), (12, 20, 2), (32, 64, 4)])
def test_groups(kernel_name, channels, out, groups, dtype):
    x, weight = rand(2, channels, 9, 14, dtype=dtype), rand(out, channels // groups, 3, 3, dtype=dtype) / 4
    conv(x, weight, rand(out, dtype=dtype), 2, 1, 1, groups)


@VARIANTS
@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 33])
@pytest.mark.parametrize("batch", [1, 3])
def test_few_positions(kernel_name, length, batch):
    conv(integers(batch, 64, length), integers(32, 64, 7), integers(32), 1, 3, **EXACT)


@VARIANTS
@pytest.mark.usefixtures("variant")
def test_long_signal(kernel_name):
    conv(rand(1, 64, 1920), rand(32, 64, 3) / 14, rand(32), 1, 1)


@VARIANTS
@pytest.mark.usefixtures("variant")
def test_patch_embedding(kernel_name):
    """A kernel as wide as its stride, and one that covers the whole picture."""
    conv(integers(1, 3, 35, 28), integers(24, 3, 7, 7), integers(24), 7, **EXACT)
    conv(integers(2, 8, 5, 3), integers(24, 8, 5, 3), integers(24), **EXACT)


@VARIANTS
@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize(
    ("channels", "groups", "dtype"), [(20, 1, torch.float16), (7, 1, torch.float32), (8, 2, torch.float32)], ids=str
)
def test_big_tiles(kernel_name, channels, groups, dtype):
    x, weight = rand(2, channels * groups, 29, 31, dtype=dtype), rand(70 * groups, channels, 3, 3, dtype=dtype) / 16
    conv(x, weight, rand(70 * groups, dtype=dtype), 1, 1, groups=groups)


@VARIANTS
@pytest.mark.usefixtures("variant")
def test_n8_every_batch(kernel_name):
    for channels, out, kernel in ((3, 5, 3), (16, 16, 3), (16, 16, 1), (1, 1, 3)):
        x = integers(1, channels, 9, 10)
        (result,) = conv(torch.cat([x, 2 * x, -x]), integers(out, channels, kernel, kernel), None, **EXACT)
        np.testing.assert_array_equal(result[1], 2 * result[0])
        np.testing.assert_array_equal(result[2], -result[0])


@VARIANTS
@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("kernel", [1, 3])
def test_n6_large_values_stay_exact(kernel_name, kernel):
    x = torch.zeros(1, 64, 6, 6)
    x[0, 0] = 1e5
    weight = torch.zeros(64, 64, kernel, kernel)
    weight[:, :, kernel // 2, kernel // 2] = torch.eye(64)
    conv(x, weight, None, 1, kernel // 2, **EXACT)


@VARIANTS
@pytest.mark.usefixtures("variant")
def test_f16_sums_in_f32(kernel_name):
    """4096 times 1 in float16 steps would stop at 2048."""
    x = torch.ones(1, 1024, 20, dtype=torch.float16)
    conv(x, torch.ones(8, 1024, 4, dtype=torch.float16), None, **EXACT)


@VARIANTS
@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan")])
def test_specials_stay_at_their_taps(kernel_name, special):
    """A border that is no element, and channels that are no channels, must not turn an infinity into NaN."""
    x = integers(1, 10, 9, 9)
    x[0, 3, 4, 4] = special
    for out in (3, 12):
        conv(x, torch.ones(out, 10, 3, 3), None, 1, 1, **EXACT)
    (result,) = run_op("aten.conv1d.default", x[0, :, 0], torch.full((12, 10, 3), special), None, [1], [1])
    assert result.shape == (12, 9)


def test_unbatched():
    x, weight = integers(5, 13), integers(8, 5, 3)
    check_op("aten.conv1d.default", x, weight, integers(8), [2], [1], **EXACT)
    check_op("aten.conv2d.default", integers(5, 7, 6), integers(9, 5, 2, 2), None, **EXACT)
    check_op("aten.conv_transpose1d.default", x, integers(5, 4, 3), integers(4), [2], **EXACT)
    check_op("aten.conv_transpose2d.input", integers(8, 7, 6), integers(8, 4, 3, 3), None, [2, 1], **EXACT)


@pytest.mark.parametrize("channels", [3, 16])
def test_empty_batch_and_constant_operands(channels):
    conv(torch.zeros(0, channels, 5, 5), integers(8, channels, 3, 3), integers(8))
    conv(torch.zeros(0, channels, 5), integers(channels, 8, 3), integers(8), transposed=True)
    args = (integers(2, channels, 5, 5), integers(8, channels, 3, 3), integers(8))
    for constants in ((), ("weight",), ("weight", "bias"), ("input",)):
        check_op("aten.conv2d.default", *args, constants=constants, **EXACT)


@pytest.mark.parametrize(("padding", "wanted"), [("valid", 0), ("same", 1)])
def test_o4_string_padding(padding, wanted):
    x, weight, bias = integers(1, 3, 9, 7), integers(4, 3, 3, 3), integers(4)
    (result,) = check_op("aten.conv2d.padding", x, weight, bias, [1, 1], padding, **EXACT)
    (same,) = check_op("aten.conv2d.default", x, weight, bias, [1, 1], [wanted] * 2, **EXACT)
    np.testing.assert_array_equal(result, same)


@pytest.mark.parametrize(("kernel", "dilation"), [(1, 1), (2, 1), (4, 1), (3, 2), (2, 3)])
@pytest.mark.parametrize("channels", [3, 16])
def test_o4_same_of_even_kernels_pads_the_end(channels, kernel, dilation):
    x = integers(2, channels, 11)
    check_op("aten.conv1d.padding", x, integers(12, channels, kernel), None, [1], "same", [dilation], **EXACT)


def test_o5_odd_pad_at_the_end():
    graph = Graph(
        values=[TensorSpec("float32", s) for s in ((1, 1, 4), (1, 1, 3), (1, 1, 5), (1, 1, 2))], inputs=[0, 1]
    )
    graph.nodes = [
        Node("aten.constant_pad_nd.default", {"self": Ref(0), "pad": [0, 1], "value": 0.0}, (2,)),
        Node("aten.conv1d.default", {"input": Ref(2), "weight": Ref(1), "stride": [2]}, (3,)),
    ]
    graph.outputs = [3]
    (result,) = run_graph(graph, [np.array([[[1, 2, 3, 4]]], np.float32), np.ones((1, 1, 3), np.float32)])
    np.testing.assert_array_equal(result, [[[6, 7]]])


# --- transposed -------------------------------------------------------------------------------------------------------


def _transposed_line(weight, stride, padding, output_padding):
    x = torch.tensor([[[1.0, 2, 3, 4]]])
    args = (x, torch.tensor([[weight]]), None, [stride], [padding], [output_padding])
    return check_op("aten.conv_transpose1d.default", *args, **EXACT)[0].ravel()


def test_o1_transposed_padding():
    np.testing.assert_array_equal(_transposed_line([1.0, 10, 100], 1, 1, 0), [12, 123, 234, 340])


def test_o2_transposed_output_padding():
    np.testing.assert_array_equal(_transposed_line([1.0, 1, 1], 2, 1, 1), [1, 3, 2, 5, 3, 7, 4, 4])


@pytest.mark.parametrize(("channels", "out", "groups"), [(3, 5, 1), (16, 6, 1), (8, 8, 8), (8, 4, 2), (32, 48, 2)])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "extra"),
    [(3, 1, 1, 1, 0), (4, 2, 1, 1, 1), (2, 3, 0, 1, 2), (3, 4, 2, 2, 1), (3, 2, 0, 2, 1), (5, 3, 4, 3, 2)],
)
def test_transposed(channels, out, groups, kernel, stride, padding, dilation, extra):
    line, bias = integers(2, channels, 7), integers(out)
    conv(line, integers(channels, out // groups, kernel), bias, stride, padding, dilation, groups, True, extra, **EXACT)
    x, weight = integers(2, channels, 4, 5), integers(channels, out // groups, kernel, kernel)
    conv(x, weight, bias, stride, padding, dilation, groups, True, extra, **EXACT)


def test_transposed_axes_differ_and_f16():
    x, weight = rand(2, 9, 4, 6, dtype=torch.float16), rand(9, 4, 3, 2, dtype=torch.float16) / 3
    args = (x, weight, rand(4, dtype=torch.float16), [2, 3], [1, 0], [1, 0], 1, [1, 2])
    check_op("aten.conv_transpose2d.input", *args, **HALF)


def test_transposed_codec_size():
    """Upsampling by 6 with kernels of 12, as neural codecs do, and depthwise."""
    conv(rand(1, 128, 16), rand(128, 64, 12) / 20, rand(64), 6, transposed=True)
    conv(rand(1, 64, 25), rand(64, 1, 32) / 4, None, 16, transposed=True, groups=64)


# --- graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("channels", "out", "kernel"), [(3, 5, 3), (16, 16, 3), (16, 16, 1)])
def test_strided_input_and_fused_tail(channels, out, kernel):
    """conv reads a permuted, flipped slice where it lies; bias and activation go into its store."""
    h = 11 - kernel + 1
    shapes = [(1, 11, 14, channels), (out, channels, kernel, kernel), (out,)]
    graph = Graph(values=[TensorSpec("float32", shape) for shape in shapes], inputs=[0, 1, 2])

    def add(op: str, shape: tuple[int, ...], **args: object) -> int:
        index = graph.add_value(TensorSpec("float32", shape))
        graph.nodes.append(Node(op, args, (index,)))
        return index

    moved = add("aten.permute_copy.default", (1, channels, 11, 14), self=Ref(0), dims=[0, 3, 1, 2])
    cut = add("aten.slice_copy.Tensor", (1, channels, 11, 12), self=Ref(moved), dim=3, start=2, end=14, step=1)
    turned = add("aten.flip.default", (1, channels, 11, 12), self=Ref(cut), dims=[2])
    y = add("aten.conv2d.default", (1, out, h, 12 - kernel + 1), input=Ref(turned), weight=Ref(1), bias=Ref(2))
    graph.outputs = [add("aten.relu.default", (1, out, h, 12 - kernel + 1), self=Ref(y))]
    tensors = [integers(*shape) for shape in shapes]
    wanted = torch.relu(torch.conv2d(tensors[0].permute(0, 3, 1, 2)[..., 2:].flip(2), *tensors[1:]))
    np.testing.assert_array_equal(run_graph(graph, [t.numpy() for t in tensors])[0], wanted.numpy())
    templates = [dispatch.template for dispatch in lower_graph(graph, {}, Capabilities()).dispatches]
    assert templates[-1] != "pointwise", templates
    if kernel == 3 and channels == 3:
        assert templates == ["conv_direct"]


@pytest.mark.parametrize("transposed", [False, True])
def test_dynamic_sizes(transposed):
    """One graph, several signal lengths and batches; weights packed once."""
    from backend.blob import to_blob
    from backend.runtime.delegate import Delegate

    n, s = Expr("n"), Expr("s")
    length: Dim = (
        Expr("+", (Expr("*", (2, s)), 1)) if transposed else Expr("+", (Expr("//", (Expr("+", (s, -1)), 2)), 1))
    )
    weight = integers(16, 12, 3) if transposed else integers(12, 16, 3)
    specs = [
        TensorSpec("float32", (n, 16, s)),
        TensorSpec("float32", tuple(weight.shape), "w"),
        TensorSpec("float32", (n, 12, length)),
    ]
    graph = Graph(values=specs, inputs=[0], outputs=[2], symbols={"n": (0, None), "s": (1, None)})
    op = "aten.conv_transpose1d.default" if transposed else "aten.conv1d.default"
    args = {"input": Ref(0), "weight": Ref(1), "stride": [2], "padding": [0 if transposed else 1]}
    graph.nodes = [Node(op, args, (2,))]
    assert registry.refusal(graph.call(graph.nodes[0])) is None
    delegate = Delegate(to_blob(graph), {"w": weight.numpy().tobytes()}.__getitem__)
    for batch, size in ((1, 5), (3, 64), (1, 129), (0, 5), (2, 1)):
        x = integers(batch, 16, size)
        if transposed:
            wanted = torch.conv_transpose1d(x, weight, None, 2)
        else:
            wanted = torch.conv1d(x, weight, None, 2, 1)
        np.testing.assert_array_equal(delegate.execute([x.numpy()])[0], wanted.numpy())
    delegate.close()


def test_r2_more_groups_than_a_dimension_holds():
    """4.2 million results of 64 a workgroup, a one-channel kernel of 2."""
    x = (torch.arange(65537 * 64 + 1) % 251).float().reshape(1, 1, -1)
    conv(x, torch.tensor([[[1.0, 3.0]]]), None, **EXACT)


def test_refusals():
    def judge(*dtypes: str) -> str | None:
        graph = Graph(values=[TensorSpec(d, s) for d, s in zip(dtypes, ((1, 2, 8), (4, 2, 3), (1, 4, 6)), strict=True)])
        graph.nodes = [Node("aten.conv1d.default", {"input": Ref(0), "weight": Ref(1), "bias": None}, (2,))]
        return registry.refusal(graph.call(graph.nodes[0]))

    assert judge("float32", "float32", "float32") is None
    assert "int64" in judge("int64", "int64", "int64")
    assert "different dtypes" in judge("float32", "float16", "float32")


@pytest.mark.parametrize(
    "tile", [wide.LONG, wide.LONG_DEEP, wide.MEDIUM, wide.SMALL_QUARTERED], ids=lambda tile: tile.name
)
def test_every_wide_tile(tile, monkeypatch):
    """Tiles that only large inputs take, on small ones: edges, groups, strides, sums in parts."""
    force("wide", monkeypatch)
    monkeypatch.setattr("backend.ops.tiles.choose_patches", lambda sizes, b: wide.Choice(tile, 2))
    for channels, out, groups in ((3, 9, 1), (32, 70, 1), (24, 34, 2)):
        weight = rand(out, channels // groups, 3, 3) * (channels // groups * 9) ** -0.5
        conv(rand(2, channels, 11, 13), weight, rand(out), padding=1, groups=groups)
        conv(rand(1, channels, 11, 13), weight, None, stride=2, padding=[0, 2], dilation=2, groups=groups)
    conv(rand(2, 64, 150), rand(40, 64, 5) * 320**-0.5, rand(40), padding=4)


def test_the_choice_of_a_wide_tile():
    def chosen(*sizes: int, memory: int = 32768) -> tuple[wide.Tile, int]:
        b = SimpleNamespace(capabilities=Capabilities(max_workgroup_bytes=memory))
        choice = wide.choose_patches(sizes, b)
        return choice.tile, choice.parts

    assert chosen(1, 64, 720 * 1280, 576) == (wide.LONG, 1)
    assert chosen(1, 512, 1024, 4608) == (wide.LONG_DEEP, 4)
    assert chosen(1, 512, 1024, 4608, memory=16384) == (wide.LONG, 4)
    assert chosen(1, 64, 64 * 64, 576) == (wide.LONG_DEEP, 4)
    assert chosen(1, 16, 64, 64)[0].rows == 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_volume(transposed, dtype):
    """3-d: groups, every axis with its own stride, padding and dilation, no batch axis, "same" padding."""
    torch.manual_seed(0)
    x, bias = torch.randn(2, 4, 7, 5, 6).to(dtype), torch.randn(6).to(dtype)
    shape = (4, 3, 3, 2, 1) if transposed else (6, 2, 3, 2, 1)
    weight = torch.randn(shape).to(dtype)
    sizes = ([2, 1, 3], [1, 0, 0], [1, 2, 1])
    extra = [1, 1, 2] if transposed else [0, 0, 0]
    stride, padding, dilation = sizes
    tolerance = {"atol": 2e-2, "rtol": 4e-3} if dtype == torch.float16 else {"atol": 1e-5, "rtol": 1e-5}
    args = (x, weight, bias, stride, padding, dilation, transposed, extra, 2)
    check_op("aten.convolution.default", *args, **tolerance)
    if transposed:
        check_op("aten.conv_transpose3d.input", x[0], weight, None, stride, padding, extra, 2, dilation, **tolerance)
        return
    check_op("aten.conv3d.default", x[0], weight, None, stride, padding, dilation, 2, **tolerance)
    for word in ("same", "valid"):
        check_op("aten.conv3d.padding", x, weight, bias, [1, 1, 1], word, dilation, 2, **tolerance)


# Of positive data a sum's error is one of the largest value. Of 2048 products in a row it is below 3e-6 of that: the
# roundings of so many additions, each at most 6e-8 of a sum that grows to the whole. 36864 in a row leave 1e-5.
@VARIANTS
@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("channels", [1024, 4096])
def test_deep_sums_keep_their_digits(kernel_name, channels):
    generator = torch.Generator().manual_seed(channels)
    x, weight = torch.rand(1, channels, 3, 5, generator=generator), torch.rand(8, channels, 3, 3, generator=generator)
    check_op("aten.conv2d.default", x, weight, None, [1, 1], [1, 1], atol=3e-6 * 9 * channels / 4, rtol=0)
