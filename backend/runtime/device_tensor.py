"""Results that stay on the GPU, and results on their way to the host."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from backend.runtime.hostdata import Stored
from backend.runtime.state import StateStore


class Readback:
    """Arrays that the GPU is still writing: asked for when the work was submitted, waited for when they are wanted.

    `layout`: of each array in the staging memory of `mapping`; `spare` gets that memory back for a later call.
    """

    def __init__(self, device: Any, mapping: Any, layout: Sequence[Stored], spare: deque[Any]):
        self._device, self._mapping, self._layout, self._spare = device, mapping, layout, spare
        self._lock = threading.Lock()
        self._arrays: list[np.ndarray] | None = None
        self._tries = 0

    def arrays(self) -> list[np.ndarray]:
        """The arrays, the same ones at every call. Raises `DeviceError`, at every call, when they cannot be read."""
        with self._lock:
            if self._arrays is None:
                self._tries += 1
                self._arrays = self._device.guard("reading results back", self._read)
                # Memory whose mapping failed is never used again: it must not poison later calls. Nor is memory whose
                # reading was interrupted: threads may still be copying from it, and it stays mapped until they end.
                if self._tries == 1 and self._mapping is not None:
                    self._spare.append(self._mapping.close())
                self._mapping = None
            return self._arrays

    def _read(self) -> list[np.ndarray]:
        data = memoryview(b"") if self._mapping is None else self._mapping.wait()
        return [stored.array(data) for stored in self._layout]


class DeviceTensor:
    """A result of a method that stays on the GPU, in memory of its own: no later call changes it.

    Methods of any program on the same GPU device take it as an input, in place of an array of its `dtype` and `shape`.
    It may outlive its program. `Module.start` makes them.
    """

    def __init__(
        self,
        device: Any,
        buffer: Any,
        dtype: str,
        shape: tuple[int, ...],
        spare: deque[Any],
        states: StateStore,
        readback: Callable[[], np.ndarray] | None,
    ):
        self.dtype = np.dtype(dtype)
        self.shape = shape
        self.device = device
        self._buffer = buffer
        self._spare = spare
        self._states = states  # of the program that made it: lost with the GPU
        self._readback = readback
        self._array: np.ndarray | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __repr__(self) -> str:
        return f"DeviceTensor({self.dtype}{list(self.shape)} on {self.device.name})"

    @property
    def buffer(self) -> Any:
        """The GPU buffer, which holds the elements in row-major order from its start, four to a word where they cross
        so (`packing.is_packed`). Raises `ValueError`."""
        buffer = self._buffer
        if buffer is None:
            raise ValueError("the tensor is closed")
        return buffer

    def numpy(self) -> np.ndarray:
        """The values, as one read-only array, once the GPU has them.

        Waits for work up to the tensor's own where the values were fetched (see `Module.start`); otherwise copies them
        to the host now. Raises `DeviceError` when the GPU was lost meanwhile, `ValueError` after `close`.
        """
        buffer = self.buffer
        array = self._array
        if array is None:
            readback = self._readback  # `close` in another thread takes it away
            with self._states.told():
                if readback is None:
                    from backend.runtime.plan import read_later

                    readback = self._readback = read_later(self.device, buffer, str(self.dtype), self.shape)
                array = readback()
            array.flags.writeable = False
            self._array = array
        return array

    def close(self) -> None:
        """Gives the memory back now rather than with the last reference. Safe to call again.

        An array that `numpy` gave stays valid.
        """
        buffer, self._buffer = self._buffer, None
        self._readback = self._array = None
        if buffer is not None:
            self._spare.append(buffer)  # work in flight reads it before whatever is submitted next writes to it

    def __del__(self) -> None:
        self.close()
