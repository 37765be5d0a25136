"""pytest tests/runtime/test_hostdata.py: bytes of the GPU as arrays, by one thread or several."""

from __future__ import annotations

import numpy as np
import pytest

from backend.runtime import hostdata


@pytest.mark.parametrize(
    "dtype, stored, packed",
    [
        ("float32", np.float32, False),
        ("float16", np.float16, False),
        ("int64", np.int32, False),
        ("bool", np.uint32, False),
        ("int8", np.int32, False),
        ("int8", np.int8, True),
        ("bool", np.bool_, True),
    ],
)
@pytest.mark.parametrize("count", (0, 1, 63, 64, 65, 1001))
def test_pieces_make_the_whole(monkeypatch, dtype, stored, packed, count):
    """Pieces of 64 bytes; the numbers are those of one copy, in memory of their own."""
    monkeypatch.setattr(hostdata, "PIECE", 64)
    monkeypatch.setattr(hostdata, "COPIERS", 2)
    source = (np.arange(count) % 7 - (dtype != "bool") * 3).astype(stored)
    data = memoryview(bytearray(8 + source.nbytes + 4))  # others may lie before and behind it
    data[8 : 8 + source.nbytes] = source.tobytes()
    layout = hostdata.Stored(8, dtype, (count, 1), packed)
    assert layout.nbytes == source.nbytes
    array = layout.array(data)
    np.testing.assert_array_equal(array, source.astype(dtype).reshape(count, 1))
    assert array.dtype == dtype and array.flags.writeable
    data[:] = bytes(len(data))
    np.testing.assert_array_equal(array, source.astype(dtype).reshape(count, 1))


@pytest.mark.parametrize("packed", [False, True])
def test_memory_that_ends_too_early_is_an_error(packed):
    """Nothing is guessed from its size: bytes that would do for packed elements are too few for stored ones."""
    layout = hostdata.Stored(0, "int8", (8,), packed)
    with pytest.raises(ValueError, match="smaller than requested"):
        layout.array(memoryview(bytes(layout.nbytes - 1)))
