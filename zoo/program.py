"""A loaded `.pte` and its methods, from numpy to numpy, through either runtime.

`executorch`: ExecuTorch's runtime; our delegates run in it through the native shim, beside XNNPACK's and ExecuTorch's
own operators. `direct`: our torch-free runtime alone, for programs that are ours from end to end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import numpy as np

from backend.graph import BACKEND_ID
from backend.runtime.device_tensor import DeviceTensor
from backend.runtime.program import ProgramError, ProgramFile, TensorMeta, read_program
from recipes.recipe import Runnable, Starting, UserError, keeps_on_device

if TYPE_CHECKING:
    from backend.runtime.device import Device

RUNTIMES = ("executorch", "direct")


class _Engine(Protocol):
    def run(self, method: str, *inputs: Any) -> list[np.ndarray]: ...
    def close(self) -> None: ...


@runtime_checkable
class _Starts(Protocol):
    def start(self, method: str, *inputs: Any, fetch: Sequence[int]) -> list[DeviceTensor]: ...


_NOT_ON_DEVICE = "ExecuTorch's runtime takes and gives arrays only: results stay on the GPU with --runtime direct"


class Kept:
    """What a call left with its program, where nobody reads its results: `keep` makes it."""

    def __init__(self, device: Device | None) -> None:
        self._device = device

    def wait(self) -> None:
        """Returns when the GPU has done the call. Raises `DeviceError` where it could not."""
        if self._device is not None:
            with self._device.lock:
                self._device.flush()


def keep(program: Runnable, method: str, *inputs: np.ndarray | DeviceTensor) -> Kept:
    """Runs a method for the state that it leaves with the program: its results are not wanted here.

    Where they can stay on the GPU nothing comes back, and nothing is waited for: what goes wrong on the GPU is told by
    the program's next call, as is that the state was lost. Raises as `Program.run` does.
    """
    if not keeps_on_device(program):
        program.run(method, *inputs)
        return Kept(None)
    results = cast(Starting, program).start(method, *inputs, fetch=())
    for result in results:
        result.close()
    return Kept(results[0].device if results else None)


class Program:
    """A program whose methods share mutable state. Another `Program` of the same file has its own.

    Any number of programs run side by side in threads; calls of one program take turns.
    """

    def __init__(self, file: ProgramFile, engine: _Engine) -> None:
        self.methods: tuple[str, ...] = tuple(file.methods)
        self._engine = engine
        # Whether `start` works: results can stay on the GPU. ExecuTorch's runtime hands out host memory only.
        self.keeps_on_device = isinstance(engine, _Starts)

    @classmethod
    def load(cls, path: str | os.PathLike[str], runtime: str = "executorch") -> Program:
        """Opens and checks the file. A method is made ready at its first run.

        Raises `UserError` when the file is missing, truncated, damaged, not a `.pte`, newer than this code or not
        for this runtime, and when the native shim cannot be built.
        """
        if runtime not in RUNTIMES:
            raise UserError(f"unknown runtime {runtime!r}: choose one of {', '.join(RUNTIMES)}")
        try:
            # ExecuTorch trusts more of a file than it should (a damaged one can end the process): check it first.
            file = read_program(path)
            if runtime == "executorch":
                return cls(file, _ExecuTorch(file, path))
            from backend.runtime.module import Module

            return cls(file, Module(file))
        except ProgramError as error:
            raise UserError(f"cannot load {os.fspath(path)}: {error}") from error
        except OSError as error:
            raise UserError(f"cannot read {os.fspath(path)}: {error.strerror or error}") from error

    def run(self, method: str, *inputs: np.ndarray | DeviceTensor) -> list[np.ndarray]:
        """Runs `method`; outputs have their live shapes and dtypes and stay valid after later calls.

        Raises `KeyError` for an unknown method, `backend.graph.ShapeError` for inputs that it does not take, what a
        delegate raised as it is, and `RuntimeError` with ExecuTorch's reason for what else goes wrong in there.
        """
        self._check(method)
        if not self.keeps_on_device and any(isinstance(given, DeviceTensor) for given in inputs):
            raise UserError(_NOT_ON_DEVICE)
        return self._engine.run(method, *inputs)

    def start(self, method: str, *inputs: np.ndarray | DeviceTensor, fetch: Sequence[int] = ()) -> list[DeviceTensor]:
        """Runs `method` without waiting; the outputs stay on the GPU. See `backend.runtime.module.Module.start`.

        Raises as `run` does, and `UserError` where the runtime is ExecuTorch's (`keeps_on_device`).
        """
        self._check(method)
        if not isinstance(self._engine, _Starts):
            raise UserError(_NOT_ON_DEVICE)
        return self._engine.start(method, *inputs, fetch=fetch)

    def _check(self, method: str) -> None:
        if method not in self.methods:
            raise KeyError(f"no method {method!r}: the program has {', '.join(self.methods)}")

    def close(self) -> None:
        """Frees the program; later runs raise `ValueError`. Safe to call again."""
        self._engine.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _ExecuTorch:
    """`executorch.runtime` with numpy at its edges and the delegates' own exceptions."""

    def __init__(self, file: ProgramFile, path: str | os.PathLike[str]) -> None:
        from executorch.runtime import Runtime, Verification

        from backend import native

        if any(call.backend_id == BACKEND_ID for info in file.methods.values() for call in info.calls):
            try:
                native.register()
            except native.BuildError as error:
                raise UserError(str(error)) from error
        self._file: ProgramFile | None = file
        # By path, which ExecuTorch maps; of bytes it would keep a bare pointer.
        try:
            self._program = _call(
                "loading the program",
                lambda: Runtime.get().load_program(os.fspath(path), verification=Verification.InternalConsistency),
            )
        except RuntimeError as error:
            raise ProgramError(str(error)) from error
        # Methods of one program share their memory for intermediate values.
        self._lock = threading.RLock()

    def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
        with self._lock:
            if self._file is None:
                raise ValueError("the program is closed")
            info = self._file.methods[method]
            inputs = [np.asarray(array) for array in arrays]
            info.check_inputs(inputs)
            values = [
                _to_torch(array) if isinstance(info.values[index], TensorMeta) else array.item()
                for index, array in zip(info.inputs, inputs, strict=True)
            ]
            _call(f"loading {method}", lambda: self._program.load_method(method))
            # ExecuTorch copies outputs: its own memory is written again at the next call.
            outputs = _call(f"running {method}", lambda: self._program.load_method(method).execute(values))
            return [_to_numpy(output) for output in outputs]

    def close(self) -> None:
        with self._lock:
            self._file, program, self._program = None, self._program, None
            if program is None:
                return
            # Dropping references is not enough: an exception that a caller keeps has frames of ExecuTorch's Python
            # half behind it, which hold these two wrappers. What they wrap must go now.
            for method in filter(None, program._methods.values()):
                method._method = None
            program._methods.clear()
            program._program = None


def _call(what: str, function: Callable[[], Any]) -> Any:
    """Calls ExecuTorch; its failure becomes the delegate's exception behind it or its own reason."""
    from backend import native

    native.take_error()
    # ExecuTorch's own exception is not chained: it says no more than an error number.
    with native.captured_log() as log:
        try:
            return function()
        except Exception as error:
            reason = str(error)
    cause = native.take_error()
    if cause is not None:
        raise cause
    raise RuntimeError(f"{what} failed: {log[0] if log else reason}")


def _to_torch(array: np.ndarray) -> Any:
    import torch

    if not array.size:
        # numpy gives these strides of 0, at which ExecuTorch ends the process.
        return torch.empty(array.shape, dtype=torch.from_numpy(np.empty(1, array.dtype)).dtype)
    # Without a copy where torch can do so: it has no read-only tensors, and no strides below zero.
    if not array.flags.writeable or not array.flags.c_contiguous or not array.dtype.isnative:
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(array)


def _to_numpy(value: Any) -> np.ndarray:
    import torch

    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    if value.dtype == torch.bfloat16:
        value = value.float()  # exact, and numpy has no bfloat16
    array: np.ndarray = value.numpy()
    return array
