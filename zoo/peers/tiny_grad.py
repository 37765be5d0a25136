"""tinygrad's WEBGPU device as a peer: its ONNX frontend under its JIT, as its users run a network again and again."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recipes.recipe import UserError
from zoo.peers.graph import Graph, Session

_DEVICE = "WEBGPU"


class TinyGrad(Session):
    """From host arrays to host arrays, except in `repeated`. The first two calls compile and record."""

    def __init__(self, graph: Graph) -> None:
        path = graph.onnx()
        adapter = device()
        self.note = f"adapter: {adapter}" if adapter else ""
        from tinygrad import Tensor, TinyJit
        from tinygrad.nn.onnx import OnnxRunner

        runner = OnnxRunner(path)
        self._names = list(runner.graph_inputs)

        def forward(**inputs: Any) -> list[Any]:
            outputs = list(runner(inputs).values())
            Tensor.realize(*outputs)
            return outputs

        self._tensor: Any = Tensor
        self._forward: Any = TinyJit(forward)

    def prepare(self, arrays: Sequence[np.ndarray]) -> Callable[[], Any]:
        return lambda: [output.numpy() for output in self._forward(**self._upload(arrays))]

    def repeated(self, arrays: Sequence[np.ndarray]) -> Callable[[int], float]:
        from tinygrad import Device

        tensors = self._upload(arrays)

        def run(count: int) -> float:
            start = time.perf_counter()
            for _ in range(count):
                self._forward(**tensors)
            Device[_DEVICE].synchronize()
            return time.perf_counter() - start

        return run

    def _upload(self, arrays: Sequence[np.ndarray]) -> dict[str, Any]:
        # A copy on the device even where a tensor could borrow the array's memory.
        return {
            name: self._tensor(array, device=_DEVICE).contiguous().realize()
            for name, array in zip(self._names, arrays, strict=True)
        }

    def close(self) -> None:
        self._forward = None


@functools.cache
def device() -> str:
    """Makes WEBGPU tinygrad's device; the name of its adapter.

    Raises `UserError` where that is another than ours.
    """
    if "WEBGPU_PATH" not in os.environ:
        os.environ["WEBGPU_PATH"] = str(library())
    os.environ["DEV"] = _DEVICE  # read at the import
    from tinygrad import Device

    if _DEVICE != Device.DEFAULT:
        raise UserError(f"tinygrad was imported before and has {Device.DEFAULT} as its device")
    opened: Any = Device[_DEVICE]
    name = _adapter(opened)
    from backend.runtime.device import DeviceError, choose_adapter

    try:
        ours = str(choose_adapter().info["device"])
    except DeviceError:
        return name
    if name and name != ours:
        raise UserError(f"tinygrad runs on {name}, ours on {ours}: hide one with VK_DRIVER_FILES, or set ZOO_ADAPTER")
    return name


def library() -> Path:
    """Dawn's shared library in the dawn-python package, of this machine's kind."""
    spec = importlib.util.find_spec("pydawn")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "lib"
    suffix = {"Darwin": ".dylib", "Windows": ".dll"}.get(platform.system(), ".so")
    machine = platform.machine() if suffix != ".dll" else ""
    found = sorted(path for path in folder.glob(f"*{suffix}") if machine in path.name)
    if not found:
        raise UserError(f"dawn-python has no library for {platform.system()} on {platform.machine()}")
    return found[0]


def _adapter(opened: Any) -> str:
    from tinygrad.runtime.autogen import webgpu

    info = webgpu.WGPUAdapterInfo()
    webgpu.wgpuDeviceGetAdapterInfo(opened.device_res, info)
    try:
        import ctypes

        return ctypes.string_at(info.device.data, info.device.length).decode()
    finally:
        webgpu.wgpuAdapterInfoFreeMembers(info)
