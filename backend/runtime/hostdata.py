"""Between numpy arrays and what the GPU stores: narrowing and widening, never reinterpreting."""

from __future__ import annotations

import functools
import math
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from backend.graph import ShapeError
from backend.runtime.tensor import STORAGE

_STORED = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "u32": np.uint32}
_INT32 = np.iinfo(np.int32)

# A large result is copied by several threads: what takes the time is the system's giving fresh memory, page by page.
PIECE = 8 << 20  # bytes
COPIERS = min(8, os.cpu_count() or 1)


def to_storage(array: np.ndarray, dtype: str, what: str, packed: bool = False) -> np.ndarray:
    """The array as the GPU stores dtype: int64 narrowed to 32 bits with a range check, bool and small ints widened, or
    left as they are where they cross `packed`.

    Raises `ShapeError` when the array's dtype is another one or an int64 value does not fit.
    """
    if array.dtype != np.dtype(dtype):
        raise ShapeError(f"{what} is {array.dtype}, expected {dtype}")
    if dtype == "int64" and array.size and (array.min() < _INT32.min or array.max() > _INT32.max):
        extreme = array.max() if array.max() > _INT32.max else array.min()
        raise ShapeError(f"{what} holds {extreme}, which does not fit the 32-bit integers of WebGPU")
    return np.ascontiguousarray(array, dtype=dtype if packed else _STORED[STORAGE[dtype]])


def release_pages(data: memoryview) -> None:
    """Frees the physical memory behind bytes of a mapped file; whoever reads them again gets them from the file again.

    Does nothing for other memory, for a mapping that can be written to, and where the system has no such call.
    """
    mapping = data.obj
    if not data.nbytes or not isinstance(mapping, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    whole = memoryview(mapping)
    if not whole.readonly:
        return  # a private copy of a page would be lost
    start = _address(data) - _address(whole)
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    mapping.madvise(mmap.MADV_DONTNEED, first, start + data.nbytes - first)


def _address(data: memoryview) -> int:
    address: int = np.frombuffer(data, np.uint8).ctypes.data
    return address


@dataclass(frozen=True)
class Stored:
    """An array in memory that the GPU wrote, from byte `start` on: as it stores `dtype`, or `packed` as numpy does."""

    start: int
    dtype: str
    shape: tuple[int, ...]
    packed: bool = False

    @property
    def kind(self) -> np.dtype:
        """Of the elements as they lie there."""
        return np.dtype(self.dtype if self.packed else _STORED[STORAGE[self.dtype]])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.kind.itemsize

    def array(self, data: memoryview) -> np.ndarray:
        """A fresh array of `dtype` and `shape`. Raises `ValueError` where the memory ends before it does."""
        stored = np.frombuffer(data, self.kind, math.prod(self.shape), self.start)
        if stored.nbytes < 2 * PIECE or COPIERS < 2:
            return stored.reshape(self.shape).astype(self.dtype)
        result = np.empty(stored.shape, self.dtype)
        step = PIECE // stored.itemsize

        def copy(start: int) -> None:
            result[start : start + step] = stored[start : start + step]

        for _ in _copiers().map(copy, range(0, len(stored), step)):
            pass
        return result.reshape(self.shape)


@functools.cache
def _copiers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(COPIERS, "zoo-copy")
