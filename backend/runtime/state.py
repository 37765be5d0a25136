"""GPU memory that the methods of one loaded program share: what outlives a call (KV caches, streaming state), and
memory for intermediate values, which does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from backend.graph import BlobError, TensorSpec
from backend.runtime.errors import DeviceLostError


class StateStore:
    """GPU buffers by qualified name. One store a loaded program; two loads of a file never share one."""

    def __init__(self) -> None:
        self._buffers: dict[str, tuple[Any, TensorSpec]] = {}
        self._scratch: list[Any] = []
        self._device: Any = None

    def get(self, device: Any, spec: TensorSpec, nbytes: int, initial: bytes | None) -> Any:
        """The buffer of `spec.state`, created with `initial` contents (zeros when None) by the first method to ask.

        Raises `BlobError` when two methods disagree on its dtype or shape.
        """
        self._follow(device)
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

    def scratch(self, device: Any, sizes: Sequence[int], exact: bool) -> list[Any]:
        """Distinct buffers of at least these sizes, in bytes. Every plan of every method may use the same ones.

        That is safe because a plan's uploads, dispatches and copies of results are submitted as a whole. Without
        `exact`, new ones are up to an eighth larger, so that the next plan, of a near shape, finds room in them.
        """
        self._follow(device)
        left = sorted(self._scratch, key=lambda buffer: buffer.size)
        largest = min(device.limit("max-storage-buffer-binding-size"), device.limit("max-buffer-size"))
        found = {}
        for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            fits = next((place for place, buffer in enumerate(left) if buffer.size >= sizes[index]), None)
            if fits is None:
                size = sizes[index] if exact else max(sizes[index], min(size_class(sizes[index]), largest))
                found[index] = device.buffer(size, "scratch")
                self._scratch.append(found[index])
            else:
                found[index] = left.pop(fits)
        return [found[index] for index in range(len(sizes))]

    def _follow(self, device: Any) -> None:
        """Raises `DeviceLostError`, once, when states were lost with the device and nobody was told."""
        if device is self._device:
            return
        had_states = bool(self._buffers)
        self._forget()
        self._device = device
        if had_states:
            raise DeviceLostError(
                "the GPU device was lost, and with it what the program keeps between calls (caches, streams): "
                "it starts over with the next call"
            )

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Around what tells the caller of a lost device, who need not be told again: the next call starts over."""
        try:
            yield
        except DeviceLostError:
            self._forget()
            raise

    def _forget(self) -> None:
        self._buffers, self._scratch, self._device = {}, [], None

    def names(self) -> list[str]:
        return sorted(self._buffers)

    def read(self, name: str) -> memoryview:
        """The contents as stored on the GPU (for tests and inspection). Raises `KeyError`."""
        buffer, _ = self._buffers[name]
        return self._device.read(buffer, buffer.size)

    def close(self) -> None:
        self._buffers.clear()
        self._scratch.clear()


def size_class(size: int) -> int:
    """Sizes rounded up by at most an eighth."""
    step = max(256, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step
