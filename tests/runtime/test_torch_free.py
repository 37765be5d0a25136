"""pytest tests/runtime/test_torch_free.py: the runtime where torch, ExecuTorch, recipes and zoo cannot be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tests.passes.programs import Method, lower

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import importlib, pkgutil, sys
for name in ("torch", "executorch", "torchao", "transformers", "recipes", "zoo"):
    sys.modules[name] = None  # importing it fails
import numpy as np
import backend.graph, backend.ops, backend.passes, backend.runtime, shaders
for package in (backend.runtime, backend.ops, backend.passes):
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
if len(sys.argv) > 1:
    module = backend.runtime.load(sys.argv[1])
    data = np.load(sys.argv[2])
    results = [module.run("forward", data["x"])[0] for _ in range(2)]
    np.savez(sys.argv[3], first=results[0], second=results[1])
present = {name.split(".")[0] for name, module in sys.modules.items() if module is not None}
assert not present & {"torch", "executorch"}
"""


def run_without_torch(*args: str) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, *args],
        capture_output=True,
        text=True,
        cwd="/",
        env=environ,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_every_module_imports():
    run_without_torch()


class Small(nn.Module):
    """A bit of everything: weights, state, norm, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(8), nn.Linear(8, 24)
        self.total = nn.Buffer(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        self.total.add_(y.sum((0, 1)))
        return y + self.total


def test_a_saved_program_runs(tmp_path):
    torch.manual_seed(0)
    module = Small()
    size = torch.export.Dim("S", min=1, max=64)
    lowered = lower(tmp_path / "small.pte", Method(module, (torch.randn(1, 4, 8),), ({1: size},)))
    assert lowered.outside == {"forward": []}
    module.total.zero_()
    x = torch.randn(1, 7, 8)
    np.savez(tmp_path / "in.npz", x=x.numpy())
    run_without_torch(str(lowered.path), str(tmp_path / "in.npz"), str(tmp_path / "out.npz"))
    out = np.load(tmp_path / "out.npz")
    with torch.no_grad():
        for name in ("first", "second"):
            np.testing.assert_allclose(out[name], module(x).numpy(), atol=1e-5)
