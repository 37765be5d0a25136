"""What follows a convolution joins its store: counted in dispatches, and compared with float64 eager.

pytest tests/ops/test_conv_tail.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness import assert_close, run_graph
from torch.nn import functional

from backend.graph import Graph, Node, Ref, TensorSpec
from backend.runtime.builder import lower_graph
from backend.runtime.capabilities import Capabilities
from backend.runtime.plan import _static_dispatches

# 3 and 16 channels: the kernels for narrow and for wide inputs. 1×1 runs as a matrix product.
SHAPES = pytest.mark.parametrize(
    ("channels", "out", "kernel", "groups", "transposed"),
    [(3, 5, 3, 1, False), (16, 16, 3, 1, False), (16, 8, 1, 1, False), (8, 8, 3, 8, False), (6, 4, 3, 1, True)],
    ids=["direct", "wide", "1x1", "depthwise", "transposed"],
)
SIZE = (9, 11)
TOLERANCE = {"atol": 2e-5, "rtol": 1e-5}  # sums of at most 144 products of about 1


class Chain:
    """A graph of one convolution with bias, operators after it, and the same in float64."""

    def __init__(self, channels: int, out: int, kernel: int, groups: int, transposed: bool) -> None:
        self.generator = torch.Generator().manual_seed(channels + out)
        self.graph = Graph(values=[], inputs=[])
        self.data: dict[str, bytes] = {}
        self.feeds: list[np.ndarray] = []
        self.out = out
        self.args = {"stride": [1, 1], "padding": [kernel // 2] * 2, "dilation": [1, 1], "groups": groups}
        x = self.input(1, channels, *SIZE)
        shape = (channels, out // groups) if transposed else (out, channels // groups)
        weight, bias = self.constant(*shape, kernel, kernel), self.constant(out)
        convolve = torch.conv_transpose2d if transposed else torch.conv2d
        extra = {"output_padding": [0, 0]} if transposed else {}
        name = "aten.conv_transpose2d.input" if transposed else "aten.conv2d.default"
        sizes = {"input": Ref(x[0]), "weight": Ref(weight[0]), "bias": Ref(bias[0])}
        golden = convolve(x[1], weight[1], bias[1], **self.args, **extra)
        self.last = (self.add(name, **sizes, **self.args, **extra), golden)

    def input(self, *shape: int) -> tuple[int, torch.Tensor]:
        value = torch.randn(shape, generator=self.generator)
        self.graph.inputs.append(self.graph.add_value(TensorSpec("float32", shape)))
        self.feeds.append(value.numpy())
        return self.graph.inputs[-1], value.double()

    def constant(self, *shape: int, positive: bool = False) -> tuple[int, torch.Tensor]:
        value = torch.randn(shape, generator=self.generator)
        value = value.abs() + 0.5 if positive else value
        index = self.graph.add_value(TensorSpec("float32", shape, f"c{len(self.data)}"))
        self.data[f"c{len(self.data)}"] = value.numpy().tobytes()
        return index, value.double()

    def add(self, op: str, /, **args: object) -> int:
        index = self.graph.add_value(TensorSpec("float32", (1, self.out, *SIZE)))
        self.graph.nodes.append(Node(op, args, (index,)))
        return index

    def leaky_relu(self) -> Chain:
        index, golden = self.last
        self.last = (
            self.add("aten.leaky_relu.default", self=Ref(index), negative_slope=0.2),
            functional.leaky_relu(golden, 0.2),
        )
        return self

    def prelu(self) -> Chain:
        index, golden = self.last
        slope = self.constant(self.out)
        self.last = (
            self.add("aten.prelu.default", self=Ref(index), weight=Ref(slope[0])),
            functional.prelu(golden, slope[1]),
        )
        return self

    def residual(self) -> Chain:
        """0.2 of what there is, and another picture on top, as in an RRDBNet."""
        other = self.input(1, self.out, *SIZE)
        index, golden = self.last
        scaled = self.add("aten.mul.Scalar", self=Ref(index), other=0.2)
        self.last = (
            self.add("aten.add.Tensor", self=Ref(scaled), other=Ref(other[0]), alpha=1),
            golden * 0.2 + other[1],
        )
        return self

    def batch_norm(self) -> Chain:
        index, golden = self.last
        weight, bias, mean = (self.constant(self.out) for _ in range(3))
        variance = self.constant(self.out, positive=True)
        names = ("weight", "bias", "running_mean", "running_var")
        refs = {name: Ref(value[0]) for name, value in zip(names, (weight, bias, mean, variance), strict=True)}
        self.last = (
            self.add(
                "aten.batch_norm.default",
                input=Ref(index), training=False, momentum=0.1, eps=1e-5, cudnn_enabled=False, **refs,
            ),
            functional.batch_norm(golden, mean[1], variance[1], weight[1], bias[1]),
        )  # fmt: skip
        return self

    def run(self) -> None:
        self.graph.outputs = [self.last[0]]
        (result,) = run_graph(self.graph, self.feeds, self.data)
        assert_close(result, self.last[1].numpy(), **TOLERANCE)

    def templates(self) -> list[str]:
        """The kernels of a call; what is made of constants alone is made once, when a program is loaded."""
        self.graph.outputs = [self.last[0]]
        dispatches = lower_graph(self.graph, {}, Capabilities()).dispatches
        static = _static_dispatches(dispatches)
        return [dispatch.template for dispatch in dispatches if id(dispatch) not in static]


TAILS = {
    "leaky_relu": Chain.leaky_relu,
    "prelu": Chain.prelu,
    "residual": Chain.residual,
    "leaky_relu and residual": lambda chain: chain.leaky_relu().residual(),
    "batch norm": Chain.batch_norm,
    "batch norm, prelu and residual": lambda chain: chain.batch_norm().prelu().residual(),
}


@SHAPES
@pytest.mark.parametrize("tail", TAILS)
def test_the_tail_joins_the_convolution(tail, channels, out, kernel, groups, transposed):
    """No dispatch more than the convolution alone has, and none of its own."""
    sizes = (channels, out, kernel, groups, transposed)
    alone, chain = Chain(*sizes).templates(), TAILS[tail](Chain(*sizes))
    assert chain.templates() == alone and "pointwise" not in alone
    chain.run()


def test_a_convolution_that_something_else_reads_stays_as_it_is():
    """Its own values are asked for too: the tail runs after it."""
    chain = Chain(3, 5, 3, 1, False)
    own, golden = chain.last
    chain.leaky_relu()
    after, activated = chain.last
    chain.graph.outputs = [own, after]
    for result, wanted in zip(run_graph(chain.graph, chain.feeds, chain.data), (golden, activated), strict=True):
        assert_close(result, wanted.numpy(), **TOLERANCE)
