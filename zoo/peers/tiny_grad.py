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
from zoo.peers.session import OnnxGraph, Session

_DEVICE = "WEBGPU"


class TinyGrad(Session):
    """From host arrays to host arrays, except in `repeated`. The first two calls compile and record.

    States are tensors on the device in `states`, by name, which calls write into, as tinygrad's own models do it.
    """

    def __init__(self, graph: OnnxGraph, states: dict[str, Any]) -> None:
        adapter = device()
        self.note = f"adapter: {adapter}" if adapter else ""
        from tinygrad import Tensor, TinyJit
        from tinygrad.nn.onnx import OnnxRunner

        self._tensor: Any = Tensor
        runner = OnnxRunner(graph.path)
        runner.onnx_ops = {**runner.onnx_ops, **_operators(runner.onnx_ops)}
        # It would read them through its CPU device, which needs clang.
        runner._python_const_cache |= _scalars(graph.path)
        names = list(runner.graph_inputs)
        count = len(names) - len(graph.states)
        self._names = names[:count]
        for state in graph.states:
            if state.name not in states:
                states[state.name] = self._on_device(state.initial())
        reads = {name: states[state.name] for name, state in zip(names[count:], graph.states, strict=True)}

        def forward(**inputs: Any) -> list[Any]:
            outputs = list(runner({**inputs, **reads}).values())
            kept = len(outputs) - len(graph.written)
            # Made before any of them is written: one may depend on what another was.
            Tensor.realize(*outputs)
            for name, output in zip(graph.written, outputs[kept:], strict=True):
                states[name].assign(output).realize()
            return outputs[:kept]

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
        return {name: self._on_device(array) for name, array in zip(self._names, arrays, strict=True)}

    def _on_device(self, array: np.ndarray) -> Any:
        return self._tensor(array, device=_DEVICE).contiguous().realize()

    def close(self) -> None:
        self._forward = None


def _operators(plain: dict[str, Any]) -> dict[str, Any]:
    """Operators of its ONNX frontend that do not take what torch's exporter writes."""

    def unsqueeze(data: Any, axes: Any) -> Any:
        return plain["Unsqueeze"](data, [axes] if isinstance(axes, int) else axes)

    def scatter(*given: Any, **more: Any) -> Any:
        return _scatter(plain["ScatterND"], *given, **more)

    return {"Unsqueeze": unsqueeze, "ScatterND": scatter}


def _scatter(plain: Any, x: Any, indices: Any, updates: Any, reduction: str = "none") -> Any:
    """ScatterND. tinygrad's own refuses a tensor that is used elsewhere too, and is one pass over it for each row."""
    if reduction != "none" or indices.shape[-1] != 1 or indices.ndim != 2:
        return plain(x.clone(), indices, updates, reduction)
    from tinygrad import Tensor

    rows, count = x.shape[0], indices.shape[0]
    place = (indices < 0).where(indices + rows, indices).cast("int")
    found = Tensor.arange(rows).reshape(1, rows) == place
    numbers = Tensor.arange(1, count + 1).reshape(count, 1)
    source = (found * numbers).max(0).contiguous()  # from 1 on: the row of `updates` that goes there; 0: none
    return (source > 0).reshape(rows, *(1,) * (x.ndim - 1)).where(updates[(source - 1).maximum(0)], x)


def _scalars(path: Path) -> dict[str, Any]:
    """The constants of an ONNX file that are single numbers, by name."""
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    held = onnx.TensorProto.EXTERNAL
    tensors = [tensor for tensor in graph.initializer if not tensor.dims and tensor.data_location != held]
    return {tensor.name: onnx.numpy_helper.to_array(tensor).item() for tensor in tensors}


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
