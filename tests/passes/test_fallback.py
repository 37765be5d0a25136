"""pytest tests/passes/test_fallback.py: drawn nodes that the registry refuses, between nodes that it takes.

They stay outside with a reason, ExecuTorch's own kernels run them, and the whole gives what eager gives.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.passes.programs import Method, compare, lower
from zoo.program import Program

# Of float64, which no WebGPU device holds; each takes one tensor and keeps its shape. Portable kernels have them all.
REFUSED: dict[str, Callable[[Tensor, random.Random], Tensor]] = {
    "add": lambda x, r: x + r.choice([1, -0.5, 1e-3]),
    "mul": lambda x, r: x * r.choice([2, -1.5, 0.0]),
    "div": lambda x, r: x / r.choice([3, -0.25]),
    "sub": lambda x, r: x - x.flip(0),
    "exp": lambda x, r: (x * 0.1).exp(),
    "tanh": lambda x, r: x.tanh(),
    "sigmoid": lambda x, r: x.sigmoid(),
    "cos": lambda x, r: x.cos(),
    "relu": lambda x, r: x.relu(),
    "abs": lambda x, r: x.abs(),
    "softmax": lambda x, r: F.softmax(x, r.choice([0, -1])),
    "sum": lambda x, r: x + x.sum(r.choice([0, 1]), keepdim=True),
    "mean": lambda x, r: x - x.mean(-1, keepdim=True),
    "amax": lambda x, r: x / (1 + x.amax(0, keepdim=True).abs()),
    "cat": lambda x, r: torch.cat([x, x], 1)[:, : x.shape[1]],
    "where": lambda x, r: torch.where(x > r.choice([0.0, -0.5]), x, -x),
    "slice": lambda x, r: x[:1] + x,
    "permute": lambda x, r: (x.t().contiguous() * 2).t(),
    "mm": lambda x, r: x @ (x.t() @ x) * 0.1,
    "clamp": lambda x, r: x.clamp(-1, r.choice([0.5, 2])),
}


class Mixed(nn.Module):
    """float32 work, something in float64, float32 work again, and so on."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed
        self.names = random.Random(seed).sample(sorted(REFUSED), 5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        r = random.Random(self.seed)
        seen = []
        for name in self.names:
            x = torch.tanh(x * 1.5 + 0.25)
            x = REFUSED[name](x.double(), r).float()
            seen.append(x * 2)
        return (*seen, torch.softmax(x, -1))


@pytest.mark.parametrize("seed", range(6))
def test_refused_nodes_are_run_by_executorch(seed: int, tmp_path: Path) -> None:
    r = random.Random(seed)
    x = torch.randn(r.choice([1, 2, 5, 17]), r.choice([1, 3, 8, 31]), generator=torch.Generator().manual_seed(seed))
    module = Mixed(seed)
    result = lower(tmp_path / "program.pte", Method(module, (x,)))
    assert result.delegates["forward"] >= 2 and result.outside["forward"]
    assert {"no kernel for float64"} <= set(result.reasons.values())
    with Program.load(result.path) as program, torch.no_grad():
        for scale in (1.0, -3.0):
            for actual, wanted in zip(program.run("forward", (x * scale).numpy()), module(x * scale), strict=True):
                # float32 work twice a round, five rounds: a few roundings each
                compare(actual, np.asarray(wanted), atol=2e-5, rtol=1e-5)
