"""`build`: a checkpoint to the methods `upscale` and `pixels`, and what their runner must know."""

from __future__ import annotations

import math
from dataclasses import asdict

import torch
from torch import nn
from torch.export import Dim

from recipes.real_esrgan import checkpoint as checkpoints
from recipes.real_esrgan.networks import Pixels, Upscale
from recipes.real_esrgan.tiling import Limits
from recipes.real_esrgan.variants import Architecture
from recipes.recipe import Bundle, ExportRequest, Method

EXAMPLE = (28, 36)  # height and width of the example input


def build(request: ExportRequest) -> Bundle:
    """The methods in the precision of `request`: half precision inside, float32 pictures outside.

    `pixels` is for a GPU, and for networks beside which reading floats back counts: exporting a large one twice does
    not pay. The runner rounds what it gets without.
    """
    checkpoint = checkpoints.load(request.weights)
    architecture = checkpoint.architecture
    dtype = torch.float16 if request.dtype == "fp16" else torch.float32
    limits = limits_of(architecture, request.backend, request.dtype)
    multiple, most = limits.multiple, limits.max_side // limits.multiple
    height, width = (multiple * Dim(name, min=1, max=most) for name in ("height", "width"))
    example = torch.rand(1, 3, *EXAMPLE, generator=torch.Generator().manual_seed(0))
    modules: dict[str, nn.Module] = {"upscale": (upscale := Upscale(checkpoint.network, dtype).eval())}
    if request.backend == "webgpu" and architecture.kind == "compact":
        modules["pixels"] = Pixels(upscale).eval()
    return Bundle(
        methods={name: Method(module, (example,), ({2: height, 3: width},)) for name, module in modules.items()},
        metadata={
            "variant": checkpoint.variant,
            "denoise": checkpoint.denoise,
            **asdict(limits),
            "is_real": checkpoint.is_real,
        },
        notices=checkpoint.notices,
    )


def limits_of(architecture: Architecture, backend: str, dtype: str) -> Limits:
    """What tiles of a program may be. ExecuTorch sets memory aside for the largest: for the picture alone where one
    delegate holds the whole network, for intermediates too where operators stay outside."""
    side = 1024
    if backend != "webgpu":
        side = min(side, 64 * math.isqrt(2**28 // (4 * architecture.pixel_floats) // 64**2))
    width = 2 if dtype == "fp16" else 4
    result = 4 * 3 * architecture.scale**2  # in whole words in any precision
    pixel_bytes = max(width * architecture.pixel_floats, result)
    return Limits(architecture.scale, architecture.multiple, architecture.radius, side, pixel_bytes)
