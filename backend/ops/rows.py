"""Tensors seen as rows along one or several axes, and how many invocations a row gets: shared by reduce and norm.

`rows_of` views a value as [outer, n, inner]; `Rows.geometry` chooses the constants of `shaders/rows.wgsl`. Choices go
by powers of two, so that few pipelines serve all lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backend.runtime import value as values
from backend.runtime.value import Value

# A row this long is cut into chunks, one a workgroup, when there are too few rows to keep a GPU busy.
_SPLIT_LENGTH, _CHUNK, _FEW_ROWS, _MAX_SPLITS = 8192, 2048, 64, 256

PASSES = 3  # over a row, at most
MAX_HELD = 16  # elements that a lane keeps in registers between passes
_WIDE, _NARROW = 256, 64  # workgroup sizes: WebGPU guarantees 256 invocations
# On a processor, lanes -> the longest row that they take. Lanes wait for each other at barriers, which cost more there
# than what more lanes would share out; long rows have more all the same, for sums of thousands in a row lose digits.
_LONGEST = {1: 32, 4: 512, 8: 2048, 16: 8192, 64: 2**18, 256: math.inf}

# On a GPU, lanes -> the longest row that they take: as measured on an NVIDIA H200 (norms and softmax of 1 to 65536 rows
# of 64 to 1024). Where rows are many, what counts is how many are under way at a time.
_MANY = 1024
_MANY_ROWS = {1: 4, 8: 64, 16: 256, 64: 1024, 128: 2048, 256: math.inf}
_OTHER_ROWS = {1: 4, 8: 64, 64: 256, 128: 512, 256: math.inf}


@dataclass(frozen=True)
class Rows:
    outer: int
    n: int
    inner: int

    @property
    def count(self) -> int:
        return self.outer * self.inner

    def params(self) -> dict[str, int]:
        return {"rows": self.count, "n": self.n, "inner": self.inner}

    def chunks(self) -> tuple[Rows, dict[str, int]] | None:
        """Long rows as [outer * splits, chunk, inner], with the parameters of the kernel; None: leave them whole."""
        if self.n < _SPLIT_LENGTH or not 0 < self.count <= _FEW_ROWS:
            return None
        chunk = max(_CHUNK, -(-self.n // _MAX_SPLITS))
        splits = -(-self.n // chunk)
        parts = Rows(self.outer * splits, chunk, self.inner)
        return parts, {**parts.params(), "n": self.n, "chunk": chunk, "splits": splits}

    def geometry(self, b: Any) -> tuple[dict[str, Any], int]:
        """(constants workgroup, lanes, minor, flat; number of groups)."""
        n = self.n
        flat = wants_few_lanes(b)
        b.capabilities.check_iterations(PASSES * n // _WIDE, f"a row of {n} elements")
        if flat:
            lanes = next(lanes for lanes, longest in _LONGEST.items() if n <= longest)
            workgroup = max(_NARROW, lanes)
        elif self.inner > 1:
            lanes = 1 if n <= 32 else 4 if n <= 128 else 16
            workgroup = _NARROW if lanes == 1 else _WIDE
        else:
            table = _MANY_ROWS if self.count >= _MANY else _OTHER_ROWS
            lanes = next(lanes for lanes, longest in table.items() if n <= longest)
            workgroup = max(_NARROW if lanes < _NARROW else 2 * _NARROW, lanes)
        groups = -(-self.count // (workgroup // lanes))
        return {"workgroup": workgroup, "lanes": lanes, "minor": self.inner > 1, "flat": flat}, groups


def wants_few_lanes(b: Any) -> bool:
    """Whether barriers cost this device more than idle lanes do: it is a processor."""
    on_processor: bool = b.capabilities.on_processor
    return on_processor


def held(n: int, lanes: int) -> int:
    """Elements a lane keeps so that a row is read once: a power of two, or 0 when the row is too long for that."""
    each = -(-n // lanes)
    return 0 if each > MAX_HELD else 1 << (each - 1).bit_length() if each else 1


def rows_of(x: Value, axes: Sequence[int], b: Any) -> tuple[Value, Rows]:
    """`x` as [outer, n, inner] with `axes` merged to n; axes that are not neighbours are moved to the end.

    The rows are in the order of the remaining axes.
    """
    matter = [axis for axis in range(x.rank) if x.shape[axis] != 1]
    reduced = [axis for axis in matter if axis in axes]
    if reduced:
        first, last = matter.index(reduced[0]), matter.index(reduced[-1])
        if last - first + 1 != len(reduced):
            kept = [axis for axis in range(x.rank) if axis not in axes]
            x = values.permute(b.movable(x), [*kept, *(axis for axis in range(x.rank) if axis in axes)])
            n = math.prod(x.shape[len(kept) :])
            return x, Rows(math.prod(x.shape[: len(kept)]), n, 1)
        low, high = reduced[0], reduced[-1] + 1
    else:
        low = high = x.rank
    return x, Rows(math.prod(x.shape[:low]), math.prod(x.shape[low:high]), math.prod(x.shape[high:]))


def reread(x: Value, b: Any) -> Value:
    """The value for a kernel that reads it more than once: in memory, unless it is free to compute."""
    return x if x.tensor is not None or (not x.pending and values.cost(x.root) == 0) else values.of_tensor(b.tensor(x))
