"""Between numpy arrays and what the GPU stores: narrowing and widening, never reinterpreting."""

from __future__ import annotations

import numpy as np

from backend.graph import ShapeError
from backend.runtime.tensor import STORAGE

_STORED = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "u32": np.uint32}
_INT32 = np.iinfo(np.int32)


def to_storage(array: np.ndarray, dtype: str, what: str) -> np.ndarray:
    """The array as the GPU stores dtype: int64 narrowed to 32 bits with a range check, bool and small ints widened.

    Raises `ShapeError` when the array's dtype is another one or an int64 value does not fit.
    """
    if array.dtype != np.dtype(dtype):
        raise ShapeError(f"{what} is {array.dtype}, expected {dtype}")
    if dtype == "int64" and array.size and (array.min() < _INT32.min or array.max() > _INT32.max):
        extreme = array.max() if array.max() > _INT32.max else array.min()
        raise ShapeError(f"{what} holds {extreme}, which does not fit the 32-bit integers of WebGPU")
    return np.ascontiguousarray(array, dtype=_STORED[STORAGE[dtype]])


def from_storage(data: memoryview, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """A fresh array of dtype and shape from GPU bytes."""
    stored = np.frombuffer(data, dtype=_STORED[STORAGE[dtype]], count=int(np.prod(shape, dtype=np.int64)))
    return stored.reshape(shape).astype(dtype)
