"""`build`: a checkpoint to the method `upscale` and what its runner must know."""

from __future__ import annotations

import math

import torch
from torch.export import Dim

from recipes.real_esrgan import checkpoint as checkpoints
from recipes.real_esrgan.networks import Upscale
from recipes.real_esrgan.variants import Architecture
from recipes.recipe import Bundle, ExportRequest, Method

EXAMPLE = (28, 36)  # height and width of the example input


def build(request: ExportRequest) -> Bundle:
    """The method in the precision of `request`: half precision inside, float32 pictures outside."""
    checkpoint = checkpoints.load(request.weights)
    architecture = checkpoint.architecture
    dtype = torch.float16 if request.dtype == "fp16" else torch.float32
    multiple, side = architecture.multiple, max_side(architecture, request.backend)
    height, width = (multiple * Dim(name, min=1, max=side // multiple) for name in ("height", "width"))
    return Bundle(
        methods={
            "upscale": Method(
                Upscale(checkpoint.network, dtype).eval(),
                (torch.rand(1, 3, *EXAMPLE, generator=torch.Generator().manual_seed(0)),),
                ({2: height, 3: width},),
            )
        },
        metadata={
            "variant": checkpoint.variant,
            "denoise": checkpoint.denoise,
            "scale": architecture.scale,
            "multiple": multiple,
            "radius": architecture.radius,
            "max_side": side,
            "pixel_bytes": architecture.pixel_floats * dtype.itemsize,
            "is_real": checkpoint.is_real,
        },
        notices=checkpoint.notices,
    )


def max_side(architecture: Architecture, backend: str) -> int:
    """The largest tile that is exported for. ExecuTorch sets memory aside for it: for the picture alone where one
    delegate holds the whole network, for intermediates too where operators stay outside."""
    if backend == "webgpu":
        return 1024
    return min(1024, 64 * math.isqrt(2**28 // (4 * architecture.pixel_floats) // 64**2))
