"""ONNX Runtime as a peer, on its WebGPU provider or on the CPU.

Where the WebGPU provider finds no adapter that it likes, or fails at a run, ONNX Runtime goes on with the CPU unless it
is told not to. It is told here, and a session that has changed its provider all the same is refused.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from recipes.recipe import UserError
from zoo.peers.session import OnnxGraph, Session

WEBGPU, CPU = "WebGpuExecutionProvider", "CPUExecutionProvider"
_ERRORS_ONLY = 3
_ON_DEVICE = "webgpu"


def on_webgpu(graph: OnnxGraph, states: dict[str, Any]) -> OnnxRuntime:
    return OnnxRuntime(graph, WEBGPU, states)


def on_cpu(graph: OnnxGraph, states: dict[str, Any]) -> OnnxRuntime:
    return OnnxRuntime(graph, CPU, states)


def _adapters() -> int:
    """How many it can choose from: by name, as a GPU comes with several APIs, and without OpenGL, which it has not."""
    from backend.runtime.device import adapters

    return len({adapter.info["device"] for adapter in adapters() if adapter.info["backend_type"] != "OpenGL"})


class OnnxRuntime(Session):
    """From host arrays to host arrays, except in `repeated`. States stay on the device, from call to call; a session
    reads them from `states`, by name, and puts new ones there."""

    def __init__(self, graph: OnnxGraph, provider: str, states: dict[str, Any]) -> None:
        self._ort: Any = importlib.import_module("onnxruntime")
        if provider not in self._ort.get_available_providers():
            raise UserError(
                f"the onnxruntime that is installed has no {provider}: "
                "pip uninstall onnxruntime, then pip install onnxruntime-webgpu"
            )
        self._provider = provider
        path = str(graph.path)
        try:
            self._session = self._make(path, whole=True)
        except UserError:
            raise
        except Exception:  # an operator may have no kernel there; a real failure comes again
            self._session = self._make(path, whole=False)
            self.note = "some operators run on the CPU"
        if provider == WEBGPU and (count := _adapters()) > 1:
            self.note = "; ".join(filter(None, (self.note, f"on one of {count} adapters, it does not say which")))
        # What `repeated` keeps on the device, and the sessions that it is in the memory of.
        self._values: list[Any] = []
        self._bindings: list[Any] = []
        self._helpers: list[Any] = []
        self._graph, self._states = graph, states
        for state in graph.states:
            if state.name not in states:
                states[state.name] = self._upload(state.initial())

    def _make(self, model: str | bytes, *, whole: bool) -> Any:
        """`whole`: fails where an operator would be left to the CPU provider."""
        options = self._ort.SessionOptions()
        options.log_severity_level = _ERRORS_ONLY
        if whole and self._provider != CPU:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        session = self._ort.InferenceSession(model, options, providers=[self._provider], enable_fallback=0)
        if (found := session.get_providers())[0] != self._provider:
            raise UserError(f"ONNX Runtime fell back from {self._provider} to {found[0]}")
        return session

    def prepare(self, arrays: Sequence[np.ndarray]) -> Callable[[], Any]:
        feed = self._feed(arrays)
        if not self._graph.states:
            return lambda: self._session.run(None, feed)
        names = [item.name for item in self._session.get_inputs()][len(feed) :]
        reads = [(name, state.name) for name, state in zip(names, self._graph.states, strict=True)]
        outputs = [item.name for item in self._session.get_outputs()]
        count = len(outputs) - len(self._graph.written)
        device = "cpu" if self._provider == CPU else _ON_DEVICE

        def call() -> list[np.ndarray]:
            binding = self._session.io_binding()
            for name, array in feed.items():
                binding.bind_cpu_input(name, array)
            for name, state in reads:
                binding.bind_ortvalue_input(name, self._states[state])
            for index, name in enumerate(outputs):
                binding.bind_output(name, "cpu" if index < count else device, 0)
            self._session.run_with_iobinding(binding)
            values = binding.get_outputs()
            self._states |= zip(self._graph.written, values[count:], strict=True)
            return [value.numpy() for value in values[:count]]

        return call

    def repeated(self, arrays: Sequence[np.ndarray]) -> Callable[[int], float]:
        if self._provider == CPU:
            return super().repeated(arrays)
        place = len(self._bindings)
        binding = self._bind(self._session)
        for name, array in self._feed(arrays).items():
            binding.bind_ortvalue_input(name, self._upload(array))
        for output in self._session.get_outputs():
            binding.bind_output(output.name, _ON_DEVICE, 0)
        # Waiting for what is bound returns at once there; a readback from the same queue does wait.
        self._helpers.append(self._identity(np.zeros(1, np.float32)))
        fence = len(self._helpers) - 1

        def run(count: int) -> float:
            # Through `self`, for nothing may be held here when it is closed.
            start = time.perf_counter()
            for _ in range(count):
                self._session.run_with_iobinding(self._bindings[place])
            self._helpers[fence].run(None, {"x": np.zeros(1, np.float32)})
            return time.perf_counter() - start

        return run

    def _bind(self, session: Any) -> Any:
        binding = session.io_binding()
        self._bindings.append(binding)
        return binding

    def _feed(self, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        names = [item.name for item in self._session.get_inputs()]
        own = names[: len(names) - len(self._graph.states)]
        return dict(zip(own, (np.ascontiguousarray(array) for array in arrays), strict=True))

    def _upload(self, array: np.ndarray) -> Any:
        """A value on the GPU: the Python package makes none from an array, but keeps the output of a graph there."""
        session = self._identity(array)
        self._helpers.append(session)
        binding = self._bind(session)
        binding.bind_cpu_input("x", np.ascontiguousarray(array))
        binding.bind_output("y", _ON_DEVICE, 0)
        session.run_with_iobinding(binding)
        value = binding.get_outputs()[0]
        self._values.append(value)
        return value

    def _identity(self, array: np.ndarray) -> Any:
        from onnx import helper

        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        ends = [helper.make_tensor_value_info(name, kind, array.shape) for name in ("x", "y")]
        graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", ends[:1], ends[1:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        return self._make(model.SerializeToString(), whole=True)

    def close(self) -> None:
        # Values before the sessions that made them: the other way round ends the process.
        for binding in self._bindings:
            binding.clear_binding_inputs()
            binding.clear_binding_outputs()
        for held in (self._values, self._bindings, self._helpers):
            held.clear()
        self._session = None
