"""pytest tests/passes/test_pt2e.py: what the PT2E flow makes of a model with the usual quantizers, fused and run.

Golden: eager of the converted model. Weights and rounded activations agree bit for bit, sums are of f32 on both sides:
1e-5 of the largest result. Where a result is rounded to codes once more, a sum that lies between two may fall to
either: one step of the last scale.
"""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config
from torch import Tensor, nn
from torchao.quantization.pt2e import allow_exported_model_train_eval
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer.embedding_quantizer import EmbeddingQuantizer

from backend.blob import from_blob
from backend.graph import Graph
from backend.runtime.program import read_program
from tests.passes.programs import RUNTIMES, Lowered, Method, compare, lower
from zoo.program import Program

LINEAR, EMBEDDING, ROUND = "zoo.quantized_linear", "zoo.quantized_embedding", "zoo.round_tensor"


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(64, 39), nn.Linear(64, 39, bias=False)
        self.down = nn.Linear(39, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)) * self.gate(x))


class Converted(nn.Module):
    """A converted graph inside a module whose `eval` is the usual one."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        super().__init__()
        self.inner = allow_exported_model_train_eval(graph)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def converted(module: nn.Module, quantizer: Any, *inputs: Tensor) -> nn.Module:
    torch.manual_seed(0)
    prepared = prepare_pt2e(torch.export.export(module.eval(), inputs).module(), quantizer)
    prepared(*inputs)
    return Converted(convert_pt2e(prepared))


def lowered(tmp_path, module: nn.Module, *inputs: Tensor) -> tuple[Lowered, Graph]:
    result = lower(tmp_path / "program.pte", Method(module, inputs))
    assert result.refusals == []
    assert result.delegates == {"forward": 1} and result.outside == {"forward": []}
    (call,) = read_program(result.path).methods["forward"].calls
    return result, from_blob(call.blob)


def ops(graph: Graph) -> collections.Counter:
    return collections.Counter(node.op for node in graph.nodes)


def check(result: Lowered, module: nn.Module, *inputs: Tensor, step: float = 0.0) -> None:
    for runtime in RUNTIMES:
        with Program.load(result.path, runtime=runtime) as program:
            with torch.no_grad():
                want = module(*inputs).numpy()
            got = program.run("forward", *(x.numpy() for x in inputs))[0]
            compare(got, want, 1e-5 * np.abs(want).max() + step)
            if step:  # seldom, and by one step
                assert np.mean(np.abs(got - want) > step / 2) < 0.02


@pytest.mark.parametrize("per_channel", (True, False))
@pytest.mark.parametrize("dynamic", (True, False))
def test_linears(tmp_path, per_channel, dynamic):
    """Dynamic activations become one operator, shared by the linears that read them; static ones are pointwise work."""
    x = torch.randn(5, 64)
    quantizer = XNNPACKQuantizer().set_global(
        get_symmetric_quantization_config(is_per_channel=per_channel, is_dynamic=dynamic)
    )
    module = converted(Mlp(), quantizer, x)
    result, graph = lowered(tmp_path, module, x)
    count = ops(graph)
    assert count[LINEAR] == 3 and count[ROUND] == (2 if dynamic else 0)
    assert not any("choose_qparams" in op or "per_channel" in op for op in count)
    linears = [node for node in graph.nodes if node.op == LINEAR]
    assert all((node.args["bits"], node.args["zero_point"]) == (8, None) for node in linears)
    scales = [
        node.args["scale"] for node in graph.nodes if node.op == "quantized_decomposed.quantize_per_tensor.default"
    ]
    assert bool(scales) != dynamic
    check(result, module, x, step=0.0 if dynamic else 1.01 * scales[-1])


def test_dynamic_rounding_of_a_large_tensor(tmp_path):
    """More elements than a workgroup rounds, the extremes far apart."""
    x = torch.randn(70, 64)
    x[3, 5], x[66, 60] = -9.0, 11.0
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_dynamic=True))
    module = converted(nn.Sequential(nn.Linear(64, 33)), quantizer, x)
    result, _ = lowered(tmp_path, module, x)
    check(result, module, x)


def test_embedding(tmp_path):
    """Codes without a sign, zero points that are fractions."""
    ids = torch.tensor([[0, 30, 7, 7]])
    module = converted(nn.Sequential(nn.Embedding(31, 45)), EmbeddingQuantizer(), ids)
    result, graph = lowered(tmp_path, module, ids)
    assert ops(graph)[EMBEDDING] == 1
    codes = next(node for node in graph.nodes if node.op == EMBEDDING).args
    assert codes["bits"] == 8 and codes["zero_point"] is not None
    check(result, module, ids)


def test_convolution(tmp_path):
    """Its weight has no fused operator: it is expanded by the operators' own kernels."""
    x = torch.randn(1, 3, 9, 7)
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    module = converted(nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU()), quantizer, x)
    result, graph = lowered(tmp_path, module, x)
    assert ops(graph)["quantized_decomposed.dequantize_per_channel.default"] == 1
    scale = [node.args["scale"] for node in graph.nodes if node.op.endswith("quantize_per_tensor.default")][-1]
    check(result, module, x, step=1.01 * scale)


class Grouped(nn.Module):
    """A weight in groups, as `dequantize_per_channel_group` has it: codes of 4 bits with zero points."""

    def __init__(self, group: int, form: str = "linear") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.group, self.form = group, form
        self.codes = nn.Buffer(torch.randint(-8, 8, (13, 128), dtype=torch.int8))
        self.scales = nn.Buffer(torch.rand(13, 128 // group) + 0.5)
        self.zeros = nn.Buffer(torch.randint(-8, 8, (13, 128 // group), dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.ops.quantized_decomposed.dequantize_per_channel_group(
            self.codes, self.scales, self.zeros, -8, 7, torch.int8, self.group, torch.float32
        )
        return nn.functional.linear(x, weight) if self.form == "linear" else x + weight.sum()


def test_groups(tmp_path):
    module = Grouped(32)
    x = torch.randn(3, 128)
    result, graph = lowered(tmp_path, module, x)
    (node,) = [node for node in graph.nodes if node.op == LINEAR]
    assert (node.args["bits"], node.args["group"]) == (4, 32) and node.args["zero_point"] is not None
    check(result, module, x)


def test_what_has_no_kernel_stays_outside_with_its_reason():
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    from backend.partitioner import WebGPUPartitioner

    class PerToken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scale, zero = torch.ops.quantized_decomposed.choose_qparams_per_token_asymmetric(x, torch.int8)
            codes = torch.ops.quantized_decomposed.quantize_per_token(x, scale, zero, -128, 127, torch.int8)
            return torch.ops.quantized_decomposed.dequantize_per_token(
                codes, scale, zero, -128, 127, torch.int8, torch.float32
            )

    def refused(module: nn.Module) -> dict[str, str]:
        partitioner = WebGPUPartitioner()
        program = torch.export.export(module, (torch.randn(3, 128),))
        to_edge_transform_and_lower(
            program, partitioner=[partitioner], compile_config=EdgeCompileConfig(_check_ir_validity=False)
        )
        return {row.op.split(".")[1]: row.reason for row in partitioner.refusals}

    per_group = "dequantize_per_channel_group"
    assert refused(Grouped(16))[per_group].startswith("linear: 4-bit weight needs groups of a multiple of 32")
    assert refused(Grouped(32, "sum"))[per_group] == "a quantized weight is read by linear and embedding only"
    assert refused(PerToken())["quantize_per_token"] == "no kernel for this operator"
