"""`zoo bench encoder`: a transformer encoder like any other, so that engines can be compared without a checkpoint.

Pre-norm layers of 512 channels with 8 heads and an inner width of 2048, on seeded weights: 6 of them at 256 positions,
and on a GPU also 31 at 640, which is the size of a speech encoder. It has the form of a recipe, and is no model.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from recipes.recipe import Bundle, Comparison, ExportRequest, Method, Recipe, Tolerance, UserError

if TYPE_CHECKING:
    import torch

NAME = "encoder"
# Method: (layers, width, heads, inner width, positions).
SIZES = {"encode_6x512_at_256": (6, 512, 8, 2048, 256)}
LARGE = {"encode_31x512_at_640": (31, 512, 8, 2048, 640)}
TINY = {"encode_2x32_at_8": (2, 32, 2, 64, 8)}
SEED = 0
_TOLERANCES = {
    "fp32": Tolerance(1e-5, 1e-5, "sums of 2048 terms in f32, a few layers deep"),
    "fp16": Tolerance(1e-2, 1e-2, "activations stored in half precision after every operator"),
}


def _is_gpu() -> bool:
    from backend.runtime.device import DeviceError, choose_adapter, is_processor

    try:
        return not is_processor(choose_adapter())
    except DeviceError:
        return False


def _sizes(weights: str) -> dict[str, tuple[int, int, int, int, int]]:
    if weights == "tiny":
        return TINY
    if weights not in ("auto", "synthetic"):
        raise UserError(f"{NAME} has no checkpoint: --weights auto or tiny, not {weights}")
    return SIZES | (LARGE if _is_gpu() else {})


def _identity(weights: str) -> str:
    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    return f"{', '.join(_sizes(weights))}, {source}"


def _build(request: ExportRequest) -> Bundle:
    import torch

    dtype = torch.float16 if request.dtype == "fp16" else torch.float32
    methods = {}
    for name, (layers, width, heads, inner, positions) in _sizes(request.weights).items():
        random = torch.Generator().manual_seed(SEED)
        x = torch.randn(1, positions, width, generator=random)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            module = make(layers, width, heads, inner)
        methods[name] = Method(module.to(dtype).eval(), (x.to(dtype),))
    return Bundle(methods, {})


def make(layers: int, width: int, heads: int, inner: int) -> torch.nn.Module:
    """`[batch, positions, width]` to the same."""
    from torch import nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_in, self.norm_inner = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, positions, _ = x.shape
            parts = self.qkv(self.norm_in(x)).view(batch, positions, 3, heads, width // heads)
            query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
            seen = nn.functional.scaled_dot_product_attention(query, key, value)
            x = x + self.out(seen.transpose(1, 2).reshape(batch, positions, width))
            return x + self.down(nn.functional.gelu(self.up(self.norm_inner(x))))

    return nn.Sequential(*(Layer() for _ in range(layers)), nn.LayerNorm(width))


def _check(program: Any, request: ExportRequest) -> list[Comparison]:
    import torch

    found = []
    for name, method in _build(request).methods.items():
        (x,) = method.example_inputs
        with torch.no_grad():
            golden: np.ndarray = method.module.double()(x.double()).numpy()
        (actual,) = program.run(name, x.numpy())
        found.append(Comparison(name, actual, golden, _TOLERANCES[request.dtype]))
    return found


def _run() -> NoReturn:
    raise UserError(f"{NAME} is a workload of `zoo bench`, no model to run")


RECIPE = Recipe(
    name=NAME,
    summary="a transformer encoder on seeded weights, to compare engines with",
    checkpoint="",
    methods=tuple(SIZES),
    dtypes=tuple(_TOLERANCES),
    quantization={},
    tolerances={("webgpu", dtype, "none"): {NAME: bound} for dtype, bound in _TOLERANCES.items()},
    build=_build,
    check=_check,
    run=_run,
    identity=_identity,
)
