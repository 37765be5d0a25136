"""pytest tests/passes/test_quantized_pass.py: what torchao's configs export, fused, refused with a reason, and run.

Golden: eager of the same quantized modules. Tolerance 1e-5 of the largest result: both sides add the same products in
f32, and rounded activations agree bit for bit.
"""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchao.quantization import (
    Int8DynamicActivationIntxWeightConfig,
    IntxWeightOnlyConfig,
    MappingType,
    quantize_,
)
from torchao.quantization.granularity import PerAxis, PerGroup

from backend import quantization
from backend.blob import from_blob
from backend.graph import Graph
from backend.partitioner import Refusal
from backend.runtime.program import read_program
from tests.passes.programs import RUNTIMES, Lowered, Method, compare, lower
from zoo.program import Program

Dim = torch.export.Dim
LINEAR, EMBEDDING, ROUND = "zoo.quantized_linear", "zoo.quantized_embedding", "zoo.round_rows"


def config(mode: str, group: int = 32, **options):
    """torchao's config of a mode; group 0: one scale a row."""
    wanted = quantization.MODES[mode]
    dtype = getattr(torch, f"int{wanted.bits}")
    granularity = PerGroup(group) if group else PerAxis(0)
    if wanted.dynamic:
        return Int8DynamicActivationIntxWeightConfig(weight_dtype=dtype, weight_granularity=granularity, **options)
    return IntxWeightOnlyConfig(weight_dtype=dtype, granularity=granularity, **options)


def quantized(module: nn.Module, mode: str, group: int = 32, kind: type[nn.Module] = nn.Linear, **options) -> nn.Module:
    quantize_(module, config(mode, group, **options), filter_fn=lambda part, _: isinstance(part, kind))
    return module


def graph_of(result: Lowered, method: str = "forward") -> Graph:
    (call,) = read_program(result.path).methods[method].calls
    return from_blob(call.blob)


def ops(graph: Graph) -> collections.Counter:
    return collections.Counter(node.op for node in graph.nodes)


def whole(result: Lowered) -> Graph:
    assert result.refusals == []
    assert result.delegates == {"forward": 1} and result.outside == {"forward": []}
    graph = graph_of(result)
    assert not any(op.startswith("torchao.") for op in ops(graph))
    return graph


def check(result: Lowered, module: nn.Module, *calls: Tensor, bound: float = 1e-5) -> None:
    for runtime in RUNTIMES:
        with Program.load(result.path, runtime=runtime) as program:
            for x in calls:
                with torch.no_grad():
                    want = module(x).numpy()
                compare(program.run("forward", x.numpy())[0], want, bound * np.abs(want).max())


class Projections(nn.Module):
    """Three linears on one tensor, as attention has them, then one without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(64, 11 + 2 * i) for i in range(3))
        self.last = nn.Linear(39, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([part(x) for part in self.parts], -1))


@pytest.mark.parametrize("mode", quantization.MODES)
def test_a_declared_mode_exports_whole_and_runs(tmp_path, mode):
    """Prompts and steps of a dynamic length; symmetric weights carry no zero points; activations are rounded once."""
    torch.manual_seed(0)
    module = Projections()
    if "4w" in mode:  # groups do not divide the last one's 39
        quantized(module.parts, mode)
    else:
        quantized(module, mode, 0)
    x = torch.randn(1, 5, 64)
    result = lower(tmp_path / "program.pte", Method(module, (x,), {"x": {1: Dim("length", min=1, max=64)}}))
    graph = whole(result)
    count = ops(graph)
    assert count[LINEAR] == (3 if "4w" in mode else 4)
    dynamic = quantization.MODES[mode].dynamic
    assert count[ROUND] == (0 if not dynamic else 1 if "4w" in mode else 2)
    assert all(node.args["zero_point"] is None for node in graph.nodes if node.op == LINEAR)
    check(result, module, x, torch.randn(1, 1, 64), torch.randn(1, 33, 64))


@pytest.mark.parametrize("mode", ("4w", "8da4w"))
@pytest.mark.parametrize("group", (32, 64, 128, 256))
def test_groups(tmp_path, mode, group):
    module = quantized(nn.Sequential(nn.Linear(256, 13)), mode, group)
    x = torch.randn(3, 256)
    result = lower(tmp_path / "program.pte", Method(module, (x,)))
    assert next(node for node in whole(result).nodes if node.op == LINEAR).args["group"] == group
    check(result, module, x)


def test_asymmetric_weights_keep_their_zero_points(tmp_path):
    module = nn.Sequential(nn.Linear(64, 13))
    with torch.no_grad():
        module[0].weight += 0.1
    module = quantized(module, "4w", mapping_type=MappingType.ASYMMETRIC)
    x = torch.randn(2, 64)
    result = lower(tmp_path / "program.pte", Method(module, (x,)))
    assert next(node for node in whole(result).nodes if node.op == LINEAR).args["zero_point"] is not None
    check(result, module, x)


def test_four_bit_weights_take_four_bits_in_the_program(tmp_path):
    module = quantized(nn.Sequential(nn.Linear(256, 64, bias=False)), "4w")
    result = lower(tmp_path / "program.pte", Method(module, (torch.randn(1, 256),)))
    program = read_program(result.path)
    sizes = {key: len(program.get_data(key)) for key in program.keys}
    assert sorted(size for size in sizes.values() if size > 1)[-2:] == [64 * 8 * 4, 64 * 256 // 2]


class Tied(nn.Module):
    """A table that is also the head, as language models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(37, 64)
        self.head = nn.Linear(64, 37, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


@pytest.mark.parametrize("mode", ("4w", "8w"))
def test_tied_embeddings_are_stored_once(tmp_path, mode):
    module = Tied()
    quantized(module, mode, kind=nn.Embedding)
    quantized(module, mode, kind=nn.Linear)
    ids = torch.tensor([[0, 36, 5, 5]])
    result = lower(tmp_path / "program.pte", Method(module, (ids,)))
    graph = whole(result)
    assert ops(graph)[EMBEDDING] == ops(graph)[LINEAR] == 1
    weights = {graph.values[node.args["weight"].value].constant for node in graph.nodes if "weight" in node.args}
    assert len(weights) == 1
    check(result, module, ids)


def test_float16(tmp_path):
    """f16 eager rounds the weights to f16, and its activations: both within 2e-3 of the largest result."""
    for mode in ("4w", "8da8w"):
        module = quantized(nn.Sequential(nn.Linear(64, 13)).half(), mode, 32 if mode == "4w" else 0)
        x = torch.randn(3, 64).half()
        result = lower(tmp_path / "program.pte", Method(module, (x,)))
        whole(result)
        check(result, module, x, bound=2e-3)


class Written(nn.Module):
    """Products with a quantized weight that are no linear."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.inner = nn.Linear(64, 9)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight.dequantize().t()
        if self.form == "addmm":
            return torch.addmm(self.inner.bias, x, weight)
        return x @ weight if self.form == "matmul" else torch.mm(x, weight)


@pytest.mark.parametrize("form", ("mm", "matmul", "addmm"))
def test_products_with_the_transposed_weight(tmp_path, form):
    module = quantized(Written(form), "4w")
    x = torch.randn(4, 64)
    result = lower(tmp_path / "program.pte", Method(module, (x,)))
    assert ops(whole(result)) == {LINEAR: 1}
    check(result, module, x)


# --- refusals -------------------------------------------------------------------------------------------------------


def refusals(tmp_path, module: nn.Module, x: Tensor) -> list[Refusal]:
    """Of the partitioner alone: what it leaves has no kernel in ExecuTorch either, so no program comes of it."""
    from executorch.exir import to_edge_transform_and_lower

    from backend.partitioner import WebGPUPartitioner

    partitioner = WebGPUPartitioner()
    to_edge_transform_and_lower(torch.export.export(module, (x,), strict=False), partitioner=[partitioner])
    return partitioner.refusals


def test_a_group_without_a_kernel_is_refused_with_its_reason(tmp_path):
    module = quantized(nn.Sequential(nn.Linear(96, 5)), "4w", 24)
    (refused,) = refusals(tmp_path, module, torch.randn(2, 96))
    assert refused.op == "torchao.dequantize_affine.default"
    assert refused.reason == "linear: 4-bit weight needs groups of a multiple of 32, or one scale a row"


def test_a_weight_that_something_else_reads_is_refused(tmp_path):
    class Sum(Written):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner.weight.dequantize().sum()

    (refused,) = refusals(tmp_path, quantized(Sum(""), "8w"), torch.randn(2, 64))
    assert refused.reason == "a quantized weight is read by linear and embedding only"
