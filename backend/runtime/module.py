"""Running a fully delegated `.pte` without ExecuTorch and without torch: the file, numpy, our runtime."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from backend.runtime.device_tensor import DeviceTensor
from backend.runtime.program import MethodInfo, ProgramError, ProgramFile, TensorMeta, read_program


def _default_delegate(blob: memoryview, get_data: Callable[[str], memoryview], states: Any) -> Any:
    from backend.runtime.delegate import Delegate

    return Delegate(blob, get_data, states)


def _default_states() -> Any:
    from backend.runtime.state import StateStore

    return StateStore()


class Module:
    """A loaded program whose methods share mutable state; two modules of one file share none.

    Calls of one module take turns; different modules run side by side. A method's delegates are made at its first
    call. `new_delegate` and `new_states` replace the GPU runtime in tests.
    """

    def __init__(
        self,
        program: ProgramFile,
        new_delegate: Callable[[memoryview, Callable[[str], memoryview], Any], Any] = _default_delegate,
        new_states: Callable[[], Any] = _default_states,
    ) -> None:
        blocked = [f"{name} {info.undelegated}" for name, info in program.methods.items() if info.undelegated]
        if blocked:
            raise ProgramError(f"needs ExecuTorch's runtime: {'; '.join(blocked)}")
        self._program: ProgramFile | None = program
        self._new_delegate = new_delegate
        self._states = new_states()
        self._delegates: dict[str, list[Any]] = {}
        self._lock = threading.RLock()
        self.methods: tuple[str, ...] = tuple(program.methods)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Module:
        """Raises `OSError` when the file cannot be read, `ProgramError` when it is damaged or not fully delegated."""
        return cls(read_program(path))

    def run(self, method: str, *inputs: np.ndarray | DeviceTensor) -> list[np.ndarray]:
        """Runs `method`; outputs have their live shapes and stay valid after later calls.

        Raises `KeyError` for an unknown method, `ShapeError` for inputs outside of its bounds, `ValueError` for a
        closed program or tensor, `DeviceError` for a tensor of another GPU device.
        """
        with self._lock:
            info = self._open().methods[method]
            values = _given(info, inputs)
            for call, delegate in zip(info.calls, self._load(info), strict=True):
                _put(
                    call.outputs, delegate.execute([_array(index, info, values) for index in call.inputs]), info, values
                )
            # An output that is an input or a constant must not alias it: the caller may write into either.
            fresh = {index for call in info.calls for index in call.outputs}
            outputs = []
            for index in info.outputs:
                value = _array(index, info, values)
                array = value.numpy() if isinstance(value, DeviceTensor) else value
                outputs.append(array if index in fresh else np.array(array))
            return outputs

    def start(self, method: str, *inputs: np.ndarray | DeviceTensor, fetch: Sequence[int] = ()) -> list[DeviceTensor]:
        """Runs `method` without waiting for it; the outputs stay on the GPU, as inputs of other calls.

        fetch: positions of outputs whose values are wanted here soon. They are on their way to the host when this
        returns, and their `numpy()` waits for this call alone, whatever was started since; those of others copy them
        when asked. A GPU that is lost meanwhile is told there. Results are those of `run`, bit for bit.
        Raises as `run` does, and `ValueError` for a method with an output that no delegate makes.
        """
        with self._lock:
            info = self._open().methods[method]
            values = _given(info, inputs)
            made = {index for call in info.calls for index in call.outputs}
            if not made.issuperset(info.outputs):
                raise ValueError(f"{method} returns an input or a constant as it is: use run")
            wanted = {info.outputs[position] for position in fetch}
            for call, delegate in zip(info.calls, self._load(info), strict=True):
                positions = [position for position, index in enumerate(call.outputs) if index in wanted]
                given = [_array(index, info, values) for index in call.inputs]
                _put(call.outputs, delegate.start(given, positions), info, values)
            return [values[index] for index in info.outputs]

    def plan(self, method: str, *arrays: np.ndarray | DeviceTensor) -> dict[str, Any]:
        """What the GPU runtime decides for inputs of these shapes, without running it.

        {"dispatches": int, "buffer_bytes": int, "bound_bytes": int, "weight_bytes": int, "kernels": [one label a
        dispatch, in order]}. buffer_bytes: of inputs and intermediate values, in memory that methods share;
        bound_bytes: the most of them that are live at one time. Of several delegates, the largest counts for both.
        Raises as `run` does.
        """
        with self._lock:
            info = self._open().methods[method]
            values = _given(info, arrays)
            told: dict[str, Any] = dict.fromkeys(("dispatches", "buffer_bytes", "bound_bytes", "weight_bytes"), 0)
            told["kernels"] = []
            for call, delegate in zip(info.calls, self._load(info), strict=True):
                plan = delegate.plan([_array(index, info, values).shape for index in call.inputs])
                told["dispatches"] += len(plan.steps)
                told["buffer_bytes"] = max(told["buffer_bytes"], plan.buffer_bytes)
                told["bound_bytes"] = max(told["bound_bytes"], plan.bound_bytes)
                told["weight_bytes"] += delegate.weight_bytes
                told["kernels"] += [step.label for step in plan.steps]
                for index, tensor in zip(call.outputs, plan.outputs, strict=True):
                    values[index] = np.broadcast_to(np.zeros((), tensor.dtype), tensor.shape)
            return told

    def profile(self, method: str, *arrays: np.ndarray | DeviceTensor) -> list[tuple[str, int]]:
        """(label, nanoseconds on the GPU) of every dispatch of one call, after one that is not timed.

        Each dispatch is timed in a pass of its own, so that the sum is more than a call's time. States change as if the
        method had been run twice. Raises as `run` does, and `ValueError` when the adapter has no timestamp queries.
        """
        with self._lock:
            info = self._open().methods[method]
            values = _given(info, arrays)
            spent: list[tuple[str, int]] = []
            for call, delegate in zip(info.calls, self._load(info), strict=True):
                given = [_array(index, info, values) for index in call.inputs]
                values.update(zip(call.outputs, delegate.execute(given), strict=True))
                spent += delegate.profile(given)
            return spent

    def load_method(self, method: str) -> None:
        """Makes the method's delegates now (weights go to the GPU) rather than at its first call."""
        with self._lock:
            self._load(self._open().methods[method])

    def close(self) -> None:
        """Frees the GPU's buffers; later calls raise `ValueError`. Safe to call again."""
        with self._lock:
            delegates, self._delegates, self._program = self._delegates, {}, None
            for delegate in (item for items in delegates.values() for item in items):
                delegate.close()
            self._states = None

    def __enter__(self) -> Module:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> ProgramFile:
        if self._program is None:
            raise ValueError("the program is closed")
        return self._program

    def _load(self, info: MethodInfo) -> list[Any]:
        if info.name not in self._delegates:
            get_data = self._open().get_data
            made: list[Any] = []
            try:
                for call in info.calls:
                    made.append(self._new_delegate(call.blob, get_data, self._states))
                    expected = len(made[-1].graph.inputs)
                    if expected != len(call.inputs):
                        raise ProgramError(
                            f"{info.name}: the file gives its delegate {len(call.inputs)} inputs, it takes {expected}"
                        )
            except BaseException:
                for delegate in made:
                    delegate.close()
                raise
            self._delegates[info.name] = made
        return self._delegates[info.name]


Given = np.ndarray | DeviceTensor


def _given(info: MethodInfo, inputs: Sequence[Given]) -> dict[int, Any]:
    """The method's values so far: its inputs, checked."""
    checked = [given if isinstance(given, DeviceTensor) else np.asarray(given) for given in inputs]
    info.check_inputs(checked)
    return dict(zip(info.inputs, checked, strict=True))


def _put(indices: Sequence[int], produced: Sequence[Given], info: MethodInfo, values: dict[int, Any]) -> None:
    if len(produced) != len(indices):
        raise ProgramError(f"{info.name}: {len(produced)} outputs computed, the file says {len(indices)}")
    values.update(zip(indices, produced, strict=True))


def _array(index: int, info: MethodInfo, values: dict[int, Any]) -> Any:
    if index in values:
        return values[index]
    value = info.values[index]
    if isinstance(value, TensorMeta):
        return value.array()
    return np.asarray(value)
