"""pytest tests/recipes/test_quantized_golden.py: what a check compares a quantized program with."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from recipes.recipe import ExportRequest, Method, Recipe, quant_modes
from zoo import quantize


def methods(module: nn.Module) -> dict[str, Method]:
    return {"forward": Method(module, (torch.zeros(1, 64),))}


def settled(module: nn.Module, mode: str, how: Any) -> nn.Module:
    """The module after `how`, `apply_request` or `settle`, of this mode."""
    module = copy.deepcopy(module)
    table = {"webgpu": quant_modes("4w", "8w", "8da4w", "8da8w")}
    recipe = cast(Recipe, SimpleNamespace(name="toy", quantization=table, embeddings={}))
    how(recipe, ExportRequest("webgpu", qlinear=mode), methods(module))
    return module


@pytest.mark.parametrize("mode", ["4w", "8w", "8da4w", "8da8w"])
def test_it_computes_what_torchao_does_and_in_float64_too(mode: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))
    x = torch.randn(7, 64)
    golden = settled(plain, mode, quantize.settle)
    with torch.no_grad():
        wanted = settled(plain, mode, quantize.apply_request)(x)
        torch.testing.assert_close(golden(x), wanted, rtol=1e-6, atol=1e-6)
        # A number between two codes may fall on the other side in float64: a part in 255 of the row's range.
        assert (golden.double()(x.double()) - wanted).abs().max() < 1e-2
        rounding = (golden(x.double()) - plain.double()(x.double())).abs().max()
    assert rounding > 1e-3


def test_a_dynamic_mode_rounds_what_goes_into_its_linears() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 32, bias=False))
    x = torch.randn(3, 64)
    with torch.no_grad():
        rounded = settled(plain, "8da8w", quantize.settle)(x)
        exact = settled(plain, "8w", quantize.settle)(x)
    assert (rounded - exact).abs().max() > 1e-4
