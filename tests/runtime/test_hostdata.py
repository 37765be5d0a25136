"""pytest tests/runtime/test_hostdata.py: bytes of the GPU as arrays, by one thread or several."""

from __future__ import annotations

import numpy as np
import pytest

from backend.runtime import hostdata


@pytest.mark.parametrize(
    "dtype, stored",
    [
        ("float32", np.float32),
        ("float16", np.float16),
        ("int64", np.int32),
        ("bool", np.uint32),
        ("int8", np.int32),
        ("int8", np.int8),
        ("bool", np.bool_),
    ],
)
@pytest.mark.parametrize("count", (0, 1, 63, 64, 65, 1001))
def test_pieces_make_the_whole(monkeypatch, dtype, stored, count):
    """Pieces of 64 bytes; the numbers are those of one copy, in memory of their own."""
    monkeypatch.setattr(hostdata, "PIECE", 64)
    monkeypatch.setattr(hostdata, "COPIERS", 2)
    source = (np.arange(count) % 7 - (dtype != "bool") * 3).astype(stored)
    data = memoryview(bytearray(source.tobytes()))
    array = hostdata.from_storage(data, dtype, (count, 1))
    np.testing.assert_array_equal(array, source.astype(dtype).reshape(count, 1))
    assert array.dtype == dtype and array.flags.writeable
    data[:] = bytes(len(data))
    np.testing.assert_array_equal(array, source.astype(dtype).reshape(count, 1))
