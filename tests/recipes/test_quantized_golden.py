"""pytest tests/recipes/test_quantized_golden.py: what a check compares a quantized program with."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from recipes.recipe import Backend, ExportRequest, Method, Recipe, quant_modes
from zoo import quantize


def methods(module: nn.Module) -> dict[str, Method]:
    return {"forward": Method(module, (torch.zeros(1, 64),))}


def settled(module: nn.Module, mode: str, how: Any, backend: Backend = "webgpu") -> nn.Module:
    """The module after `how`, `apply_request` or `settle`, of this mode."""
    module = copy.deepcopy(module)
    table = {backend: quant_modes("4w", "8w", "8da4w", "8da8w")}
    recipe = cast(Recipe, SimpleNamespace(name="toy", quantization=table, embeddings={}))
    how(recipe, ExportRequest(backend, qlinear=mode), methods(module))
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


def test_xnnpack_keeps_the_scales_of_groups_in_bfloat16() -> None:
    """Of 8 bits: weights differ by up to a part in 512 from those of a backend that keeps float32's; rows' do not."""
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(64, 32, bias=False))
    for mode, apart in (("8da4w", True), ("8da8w", False)):
        ours, theirs = (settled(plain, mode, quantize.settle, backend) for backend in ("webgpu", "xnnpack"))
        weights = [cast(Any, side)[0].weight for side in (ours, theirs)]
        assert torch.equal(*weights) != apart
        torch.testing.assert_close(*weights, rtol=2**-8, atol=0)
        if apart:
            lines = weights[1].view(32, 2, 32)
            scales = lines.abs().amax(-1) / torch.tensor([7.0, 8.0]).view(2, 1, 1)
            assert ((scales == scales.bfloat16().float()).any(0)).float().mean() > 0.9
