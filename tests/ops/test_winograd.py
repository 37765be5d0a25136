"""The Winograd kernel of 3 × 3 convolutions: sizes, edges, tiles, sums in parts, what is not finite, when it is chosen.

pytest tests/ops/test_winograd.py
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from harness import EXACT, assert_close, run_graph
from test_conv import SUM, conv, force, integers, rand

from backend.graph import Graph, Node, Ref, TensorSpec
from backend.ops import winograd
from backend.ops.conv import Geometry, _choose
from backend.runtime.builder import Builder, lower_graph
from backend.runtime.capabilities import Capabilities
from backend.runtime.plan import _static_dispatches

GPU = Capabilities(max_workgroup_bytes=49152, max_invocations=1024)
# `LARGE` needs more memory than the driver of a processor may have: here it is half as deep.
TILES = [replace(winograd.LARGE, KT=4), winograd.SMALL, winograd.SHALLOW]


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    force("winograd", monkeypatch)


# SUM and HALF hold as for other kernels: F(2×2, 3×3) adds two or three roundings of what a tile holds, of the same size
# as those of the sum over channels (F(4×4, 3×3) would need ten times as much).


@pytest.mark.parametrize("padding", [0, 1, 2, [2, 1]], ids=str)
@pytest.mark.parametrize("size", [(1, 1), (2, 5), (3, 3), (4, 4), (7, 6), (9, 13)], ids=str)
def test_sizes_and_padding(size, padding):
    down, across = [padding] * 2 if isinstance(padding, int) else padding
    size = (max(size[0], 3 - 2 * down), max(size[1], 3 - 2 * across))
    conv(integers(2, 9, *size), integers(7, 9, 3, 3), integers(7), padding=padding, **EXACT)
    conv(rand(1, 9, *size), rand(7, 9, 3, 3) / 9, rand(7), padding=padding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("channels", "out"), [(1, 1), (3, 5), (8, 32), (33, 66), (300, 20)])
def test_channels(channels, out, dtype):
    weight = rand(out, channels, 3, 3, dtype=dtype) * (channels * 9) ** -0.5
    conv(rand(2, channels, 10, 11, dtype=dtype), weight, rand(out, dtype=dtype), padding=1)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles(tile, monkeypatch):
    monkeypatch.setattr(winograd, "choose", lambda g, b: (tile, 1))
    conv(rand(2, 36, 19, 23), rand(70, 36, 3, 3) / 18, rand(70), padding=1)
    conv(integers(1, 11, 6, 40), integers(33, 11, 3, 3), None, **EXACT)


@pytest.mark.parametrize(
    ("sizes", "reason"), [((8, 8, 1, 2, 4), "does not fit"), ((8, 4, 1, 2, 4), "TX must divide")], ids=str
)
def test_tiles_that_would_give_wrong_results_are_refused(sizes, reason):
    with pytest.raises(ValueError, match=reason):
        winograd.Tile(*sizes)


@pytest.mark.parametrize("channels", [64, 150])
def test_parts(channels, monkeypatch):
    """The channels are summed in parts, the last of which is the smallest, and the parts in order."""
    monkeypatch.setattr(winograd, "choose", lambda g, b: (winograd.SMALL, 4))
    x, weight = rand(1, channels, 6, 7), rand(24, channels, 3, 3) * (channels * 9) ** -0.5
    first, second = (conv(x, weight, rand(24), padding=1)[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_every_batch():
    x = integers(1, 16, 9, 10)
    (result,) = conv(torch.cat([x, 2 * x, -x]), integers(16, 16, 3, 3), None, padding=1, **EXACT)
    np.testing.assert_array_equal(result[1], 2 * result[0])
    np.testing.assert_array_equal(result[2], -result[0])


@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan"), 3e38])
@pytest.mark.parametrize("place", [(0, 0), (4, 5), (8, 8)], ids=str)
def test_what_is_not_finite(special, place):
    """An infinity gives infinities where it is seen, though points subtract it from itself; 3e38 overflows in them."""
    x = integers(2, 70, 9, 9)
    x[1, 3, place[0], place[1]] = special
    weight = torch.full((12, 70, 3, 3), 0.5)
    conv(x, weight, None, padding=1, **(EXACT if special != 3e38 else {"atol": 0.0, "rtol": 1e-6}))


def test_large_values():
    """Each kernel copies one channel; what is beside 1e5 is 0 and stays 0."""
    x = torch.zeros(1, 64, 6, 6)
    x[0, 0] = 1e5
    weight = torch.zeros(64, 64, 3, 3)
    weight[:, :, 1, 1] = torch.eye(64)
    conv(x, weight, None, padding=1, **EXACT)


@pytest.mark.parametrize("place", [(5, 5), (6, 5), (5, 6), (6, 6)], ids=str)
def test_errors_are_of_inputs_that_a_result_sees(place):
    """A result beside a large input carries roundings of it, also where its tap is 0; no other one of its tile does."""
    x, weight = rand(1, 32, 12, 12), rand(8, 32, 3, 3) / 17
    x[..., place[0], place[1]] *= 1e4
    golden = torch.conv2d(x.double(), weight.double(), padding=1)
    (result,) = conv(x, weight, None, padding=1, atol=1e-2, rtol=SUM["rtol"])  # of 1e4: 8 roundings
    seen = np.zeros(golden.shape, bool)
    seen[..., place[0] - 1 : place[0] + 2, place[1] - 1 : place[1] + 2] = True
    assert_close(result[~seen], golden.numpy()[~seen], **SUM)


@pytest.mark.parametrize(
    ("stride", "dilation", "kernel", "groups"), [(2, 1, 3, 1), (1, 2, 3, 1), (1, 1, 5, 1), (1, 1, 3, 2)]
)
def test_others_are_not_taken(stride, dilation, kernel, groups):
    geometry = Geometry(1, groups, 64, 64, (64, 64), (64, 64), (kernel,) * 2, (stride,) * 2, (1, 1), (dilation,) * 2)
    assert not winograd.takes(geometry, Builder(Graph(), {}, GPU))
    conv(integers(1, 16, 9, 9), integers(8, 16 // groups, kernel, kernel), None, stride, 1, dilation, groups, **EXACT)


def test_strided_input_fused_tail_and_weights_made_once():
    shapes = [(1, 11, 14, 24), (36, 24, 3, 3), (36,)]
    tensors = [integers(*shape) for shape in shapes]
    keys = [None, "w", "b"]
    values = [TensorSpec("float32", shape, key) for shape, key in zip(shapes, keys, strict=True)]
    graph = Graph(values=values, inputs=[0])

    def add(op: str, shape: tuple[int, ...], **args: object) -> int:
        index = graph.add_value(TensorSpec("float32", shape))
        graph.nodes.append(Node(op, args, (index,)))
        return index

    moved = add("aten.permute_copy.default", (1, 24, 11, 14), self=Ref(0), dims=[0, 3, 1, 2])
    cut = add("aten.slice_copy.Tensor", (1, 24, 11, 12), self=Ref(moved), dim=3, start=2, end=14, step=1)
    turned = add("aten.flip.default", (1, 24, 11, 12), self=Ref(cut), dims=[2])
    y = add("aten.conv2d.default", (1, 36, 9, 10), input=Ref(turned), weight=Ref(1), bias=Ref(2))
    graph.outputs = [add("aten.relu.default", (1, 36, 9, 10), self=Ref(y))]
    wanted = torch.relu(torch.conv2d(tensors[0].permute(0, 3, 1, 2)[..., 2:].flip(2), *tensors[1:]))
    data = {"w": tensors[1].numpy().tobytes(), "b": tensors[2].numpy().tobytes()}
    np.testing.assert_array_equal(run_graph(graph, [tensors[0].numpy()], data)[0], wanted.numpy())
    dispatches = lower_graph(graph, {}, GPU).dispatches
    static = _static_dispatches(dispatches)
    assert [d.template for d in dispatches if id(d) not in static] == ["conv_winograd"]


def square(channels: int, out: int, side: int, batch: int = 1) -> Geometry:
    return Geometry(batch, 1, channels, out, (side, side), (side, side), (3, 3), (1, 1), (1, 1), (1, 1))


def test_the_choice_by_device_and_size(monkeypatch):
    monkeypatch.undo()

    def chosen(*sizes: int, can: Capabilities = GPU) -> str:
        return _choose(square(*sizes), Builder(Graph(), {}, can))

    assert chosen(64, 64, 720) == chosen(512, 512, 32) == chosen(64, 48, 720) == "winograd"
    assert chosen(3, 64, 720) == chosen(64, 16, 720) == chosen(512, 512, 8) == "tiles"
    assert chosen(512, 512, 8, 2) == "winograd"
    assert chosen(64, 3, 720) == "direct"
    assert chosen(64, 64, 720, can=replace(GPU, max_workgroup_bytes=16384)) == "winograd"
    assert chosen(64, 64, 720, can=replace(GPU, max_invocations=128)) == "tiles"
    processor = replace(GPU, on_processor=True)
    assert chosen(64, 64, 64, can=processor) == "tiles"
    assert chosen(64, 64, 64, can=replace(processor, features=frozenset({"subgroup"}))) == "lanes"


@pytest.mark.parametrize(
    ("sizes", "fastest"),
    [
        ((64, 64, 64), (winograd.SMALL, 2)),
        ((64, 64, 256), (winograd.LARGE, 1)),
        ((64, 64, 64, 16), (winograd.LARGE, 1)),
        ((512, 512, 32), (winograd.LARGE, 2)),
        ((256, 256, 64), (winograd.LARGE, 1)),
    ],
    ids=str,
)
def test_the_choice_of_a_tile(sizes, fastest):
    """As measured on an NVIDIA H200."""
    assert winograd.choose(square(*sizes), Builder(Graph(), {}, GPU)) == fastest


def test_the_choice_of_a_tile_by_device():
    def chosen(memory: int, invocations: int) -> winograd.Tile:
        can = replace(GPU, max_workgroup_bytes=memory, max_invocations=invocations)
        return winograd.choose(square(64, 64, 720), Builder(Graph(), {}, can))[0]

    assert chosen(32768, 1024) == chosen(49152, 256) == winograd.SMALL
    assert chosen(16384, 256) == winograd.SHALLOW
