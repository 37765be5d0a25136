"""Mutable buffers that outlive a call: KV caches, streaming state. Shared by the methods of one loaded program."""

from __future__ import annotations

from typing import Any

from backend.graph import BlobError, TensorSpec


class StateStore:
    """GPU buffers by qualified name. One store a loaded program; two loads of a file never share one."""

    def __init__(self) -> None:
        self._buffers: dict[str, tuple[Any, TensorSpec]] = {}
        self._device: Any = None

    def get(self, device: Any, spec: TensorSpec, nbytes: int, initial: bytes | None) -> Any:
        """The buffer of `spec.state`, created with `initial` contents (zeros when None) by the first method to ask.

        Raises `BlobError` when two methods disagree on its dtype or shape.
        """
        if device is not self._device:  # a lost device took its buffers along: streams start over
            self._buffers, self._device = {}, device
        name = spec.state
        assert name is not None
        if name in self._buffers:
            buffer, known = self._buffers[name]
            if (known.dtype, known.shape) != (spec.dtype, spec.shape):
                raise BlobError(f"state {name!r} is {known} in one method and {spec} in another")
            return buffer
        buffer = device.buffer(nbytes, f"state {name}")
        if initial is not None:
            device.write(buffer, initial)
        self._buffers[name] = (buffer, spec)
        return buffer

    def names(self) -> list[str]:
        return sorted(self._buffers)

    def read(self, name: str) -> memoryview:
        """The contents as stored on the GPU (for tests and inspection). Raises `KeyError`."""
        buffer, _ = self._buffers[name]
        return self._device.read(buffer, buffer.size)

    def close(self) -> None:
        self._buffers.clear()
