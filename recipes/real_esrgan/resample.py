"""Lanczos resampling in bands, numpy only: rows go in from top to bottom, resized rows come out as soon as they can.

The filter is Pillow's (`Image.LANCZOS`): a sinc windowed over 3 lobes, widened by the factor when shrinking, its
weights cut off at the border and made to sum to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

LOBES = 3.0
_ROWS = 64  # resized at a time: bounds the float copies


def taps(source: int, target: int) -> tuple[np.ndarray, np.ndarray]:
    """For each of `target` positions: indices of source positions `[target, n]` and their weights."""
    factor = source / target
    widen = max(1.0, factor)
    support = LOBES * widen
    centers = (np.arange(target) + 0.5) * factor
    low = np.maximum(0, (centers - support + 0.5).astype(np.int64))
    high = np.minimum(source, (centers + support + 0.5).astype(np.int64))
    index = low[:, None] + np.arange(int((high - low).max()))
    at = (index - centers[:, None] + 0.5) / widen
    weights = np.where(np.abs(at) < LOBES, np.sinc(at) * np.sinc(at / LOBES), 0.0)
    weights[index >= high[:, None]] = 0.0
    weights /= weights.sum(1, keepdims=True)
    return np.minimum(index, source - 1), weights.astype(np.float32)


def _apply(values: np.ndarray, index: np.ndarray, weights: np.ndarray, axis: int) -> np.ndarray:
    shape = tuple(-1 if n == axis else 1 for n in range(values.ndim))
    total = np.zeros((), np.float32)
    for column in range(index.shape[1]):
        total = total + np.take(values, index[:, column], axis) * weights[:, column].reshape(shape)
    return total


def _between(held: np.ndarray, top: int, first: int, end: int) -> np.ndarray:
    """Rows `first:end` of a picture, of which those from `top` on are held."""
    return held[first - top : end - top]


class Resizer:
    """Rows `[n, width, channels]` of a picture, any number type, to rows of another size of the same type."""

    def __init__(self, height: int, width: int, new_height: int, new_width: int) -> None:
        self._rows, self._row_weights = taps(height, new_height)
        self._columns, self._column_weights = taps(width, new_width)

    def rows(self, read: Callable[[int, int], np.ndarray], first: int, end: int) -> np.ndarray:
        """Rows `first:end` of the result; `read(y0, y1)` gives rows of the source."""
        index, weights = self._rows[first:end], self._row_weights[first:end]
        top = int(index.min())
        source = read(top, int(index.max()) + 1)
        wide = _apply(source.astype(np.float32), self._columns, self._column_weights, 1)
        result = _apply(wide, index - top, weights, 0)
        if np.issubdtype(source.dtype, np.integer):
            result = np.clip(np.rint(result), 0, np.iinfo(source.dtype).max)
        return result.astype(source.dtype)

    def stream(self, bands: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """The whole result in bands; holds of the source what the next rows need."""
        held, top, made = None, 0, 0
        needed = self._rows.max(1) + 1  # source rows that each row waits for
        for band in bands:
            held = band if held is None else np.concatenate([held, band])
            ready = int(np.searchsorted(needed, top + len(held), "right"))
            while made < ready:
                end = min(ready, made + _ROWS)
                yield self.rows(partial(_between, held, top), made, end)
                made = end
            if made < len(needed):
                drop = int(self._rows[made].min()) - top
                held, top = held[drop:], top + drop
