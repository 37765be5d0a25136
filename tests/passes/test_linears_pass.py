"""pytest tests/passes/test_linears_pass.py: linear layers of one input become one product, and give what they gave.

Golden: eager of the same modules. Tolerance 1e-5 of the largest result: both sides add the same few products in f32.
"""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from backend.blob import from_blob
from backend.graph import Graph
from backend.passes import linears
from backend.quantization import joined_key, joined_sources, packed_key
from backend.runtime.program import read_program
from tests.passes.programs import RUNTIMES, Method, compare, lower
from tests.passes.test_quantized_pass import quantized
from zoo.program import Program

LENGTHS = {"x": {1: torch.export.Dim("length", min=1, max=64)}}


class Projections(nn.Module):
    """Layers of one input, of which the last reads another."""

    def __init__(self, widths: tuple[int, ...] = (12, 8, 20), biases: tuple[bool, ...] = (True, True, True)):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(32, width, bias) for width, bias in zip(widths, biases, strict=True))
        self.last = nn.Linear(sum(widths), 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([torch.tanh(part(x)) for part in self.parts], -1))


def exported(tmp_path, module: nn.Module) -> Graph:
    """The graph as it is stored, after both runtimes have given what eager gives, for a prompt and a step."""
    path = tmp_path / "program.pte"
    result = lower(path, Method(module.eval(), (torch.randn(1, 5, 32),), LENGTHS))
    assert result.delegates == {"forward": 1} and result.outside == {"forward": []}
    for runtime in RUNTIMES:
        with Program.load(path, runtime=runtime) as program:
            for x in (torch.randn(1, 5, 32), torch.randn(1, 1, 32), torch.randn(1, 33, 32)):
                with torch.no_grad():
                    want = module(x).numpy()
                compare(program.run("forward", x.numpy())[0], want, 1e-5 * float(np.abs(want).max()))
    (call,) = read_program(path).methods["forward"].calls
    return from_blob(call.blob)


def count(graph: Graph) -> int:
    ops = collections.Counter(node.op for node in graph.nodes)
    return sum(ops[op] for op in linears.LINEARS)


@pytest.mark.parametrize(
    "widths, biases, products",
    [
        ((12, 8, 20), (True, True, True), 2),
        ((12, 8, 20), (False, False, False), 2),
        ((12, 8, 20), (True, False, True), 3),  # a layer without a bias stays by itself
        ((12, 7, 20), (True, True, True), 3),  # and one after which others would not be aligned
        ((12,), (True,), 2),
    ],
)
def test_layers_of_one_input_are_one(tmp_path, widths, biases, products):
    assert count(exported(tmp_path, Projections(widths, biases))) == products


@pytest.mark.parametrize("mode", ("4w", "8w", "8da4w", "8da8w"))
def test_quantized_layers_too(tmp_path, mode):
    module = Projections()
    quantized(module.parts, mode, 32)
    graph = exported(tmp_path, module)
    assert count(graph) == 2
    (weight,) = (node.args["weight"] for node in graph.nodes if node.op == "zoo.quantized_linear")
    assert graph.values[weight.value].shape[0] == 40


def test_no_more_than_a_binding_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(linears, "MAX_BYTES", 4 * 32 * 20)  # of the first two, 12 and 8 rows of 32 numbers
    monkeypatch.setattr(linears, "_most_bytes", lambda look, spec: 0)  # results are larger here
    assert count(exported(tmp_path, Projections())) == 3


def test_a_weight_with_another_reader_is_stored_once(tmp_path):
    class Tied(Projections):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.parts[0].weight.sum()

    graph = exported(tmp_path, Tied())
    assert count(graph) == 3  # the other two are joined
    keys = [spec.constant for spec in graph.values if spec.constant is not None]
    assert all(keys.count(key) == 1 for key in keys)


def test_one_weight_used_twice_stays_one(tmp_path):
    class Twice(Projections):
        def forward(self, x: Tensor) -> Tensor:
            return self.parts[0](x) * torch.tanh(self.parts[0](x + 1)) + self.parts[0](x)

    assert count(exported(tmp_path, Twice())) == 3


def test_no_larger_result_than_a_binding_holds(tmp_path, monkeypatch):
    """Lengths are at most 64: 12 and 8 columns are 5120 bytes, the third would make them 10240."""
    monkeypatch.setattr(linears, "MAX_BYTES", 4 * 64 * 20)
    assert count(exported(tmp_path, Projections())) == 3


def test_weights_are_stored_once_whatever_methods_join(tmp_path):
    """One method reads three layers, another two of them, and a third one."""
    whole = Projections().eval()

    class Some(nn.Module):
        def __init__(self, count: int):
            super().__init__()
            self.parts = whole.parts[:count]

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([torch.tanh(part(x)) for part in self.parts], -1)

    x = torch.randn(1, 5, 32)
    methods = {f"m{count}": Method(Some(count).eval(), (x,), LENGTHS) for count in (1, 2, 3)}
    result = lower(tmp_path / "program.pte", methods)
    weights = [key for key in read_program(result.path).keys if key.startswith("float32-") and key.count("x") == 1]
    assert len(weights) == 3, weights
    with Program.load(result.path, runtime="direct") as program:
        for name, method in methods.items():
            with torch.no_grad():
                want = method.module(x).numpy()
            compare(program.run(name, x.numpy())[0], want, 1e-6)


def test_keys_say_what_is_joined():
    sources = [packed_key("int8-4x8-ab", 4), "float32-4-cd"]
    assert joined_sources(joined_key(sources)) == sources
    assert joined_sources(sources[0]) == sources[:1]
