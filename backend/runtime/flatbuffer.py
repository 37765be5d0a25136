"""Reading flatbuffers that may be damaged: every offset and length is checked before use.

The `flatbuffers` package trusts its input (a bad offset is an IndexError, or a read somewhere else); here each
mistake is a `FlatbufferError`, and a budget bounds the work, so that tables which refer to each other in a knot end
too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

_FORMATS = {code: struct.Struct(f"<{code}") for code in "bBHiIqQd"}
_ELEMENTS = {"b": "<i1", "B": "<u1", "i": "<i4", "I": "<u4", "q": "<i8", "Q": "<u8"}


class FlatbufferError(ValueError):
    """The bytes are not the flatbuffer that they should be."""


class Reader:
    """`data`: the whole flatbuffer; offsets are from its start."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        # A table takes 4 bytes or more and a sound file holds no table twice.
        self._budget = len(data)

    def scalar(self, code: str, position: int) -> int:
        form = _FORMATS[code]
        if position < 0 or position + form.size > len(self.data):
            raise FlatbufferError(f"offset {position} is outside of the {len(self.data)} bytes")
        value: int = form.unpack_from(self.data, position)[0]
        return value

    def root(self) -> Table:
        return self.table(self.scalar("I", 0))

    def table(self, position: int) -> Table:
        self._budget -= 4
        if self._budget < 0:
            raise FlatbufferError("tables refer to each other too often")
        return Table(self, position)

    def vector(self, position: int, item_bytes: int) -> tuple[int, int]:
        """Start and length of the vector whose length word is at `position`."""
        count = self.scalar("I", position)
        if position + 4 + count * item_bytes > len(self.data):
            raise FlatbufferError(f"a list of {count} items at {position} is longer than the data")
        return position + 4, count


class Table:
    """Fields are read by number, as counted in the schema (a union counts twice: its type, then its value)."""

    __slots__ = ("_position", "_reader", "_vtable", "_vtable_bytes")

    def __init__(self, reader: Reader, position: int) -> None:
        self._reader = reader
        self._position = position
        self._vtable = position - reader.scalar("i", position)
        self._vtable_bytes = reader.scalar("H", self._vtable)
        if self._vtable_bytes < 4 or self._vtable + self._vtable_bytes > len(reader.data):
            raise FlatbufferError(f"the table at {position} has no sound layout")

    def _field(self, number: int) -> int | None:
        slot = 4 + 2 * number
        if slot + 2 > self._vtable_bytes:
            return None
        offset = self._reader.scalar("H", self._vtable + slot)
        return self._position + offset if offset else None

    def _target(self, number: int) -> int | None:
        at = self._field(number)
        return None if at is None else at + self._reader.scalar("I", at)

    def has(self, number: int) -> bool:
        return self._field(number) is not None

    def number(self, number: int, code: str, default: int = 0) -> int:
        at = self._field(number)
        return default if at is None else self._reader.scalar(code, at)

    def float64(self, number: int) -> float:
        return float(self.number(number, "d"))

    def table(self, number: int) -> Table | None:
        at = self._target(number)
        return None if at is None else self._reader.table(at)

    def data(self, number: int) -> memoryview:
        """A byte list, without a copy; empty when absent."""
        at = self._target(number)
        if at is None:
            return self._reader.data[:0]
        start, count = self._reader.vector(at, 1)
        return self._reader.data[start : start + count]

    def string(self, number: int) -> str:
        try:
            return bytes(self.data(number)).decode()
        except UnicodeDecodeError as error:
            raise FlatbufferError(f"a name is not UTF-8: {error.reason}") from error

    def numbers(self, number: int, code: str) -> list[int]:
        """A list of scalars; empty when absent."""
        at = self._target(number)
        if at is None:
            return []
        dtype = np.dtype(_ELEMENTS[code])
        start, count = self._reader.vector(at, dtype.itemsize)
        values: list[int] = np.frombuffer(self._reader.data, dtype, count, start).tolist()
        return values

    def count(self, number: int) -> int:
        at = self._target(number)
        return 0 if at is None else self._reader.vector(at, 4)[1]

    def item(self, number: int, index: int) -> Table:
        """One table of a list of tables. Raises `FlatbufferError` when there is no such item."""
        at = self._target(number)
        start, count = (0, 0) if at is None else self._reader.vector(at, 4)
        if not 0 <= index < count:
            raise FlatbufferError(f"item {index} of a list of {count}")
        where = start + 4 * index
        return self._reader.table(where + self._reader.scalar("I", where))

    def tables(self, number: int) -> Iterator[Table]:
        for index in range(self.count(number)):
            yield self.item(number, index)
