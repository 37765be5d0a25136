"""A network over a picture of any size, in tiles: numpy only.

Every tile is a window of one size, so one plan of the runtime serves a whole picture. A window at the border ends
at the border, where the network pads with zeros as it does for the whole picture; elsewhere `overlap` pixels of it
are context only, and what comes out for them is dropped. With an overlap of the network's radius, tiled and untiled
are the same function of every pixel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

# Overlap, for each pixel that is folded, where a network's radius is too large to be covered. What is farther away
# hardly counts: with x4plus on a photograph, tiles are then 70 dB from the whole picture at once (16: 56, 8: 48).
PARTIAL_OVERLAP = 32
COVERED = 48  # a radius that is always covered: those of the compact networks are 18 and 34
DEFAULT_BUDGET = 2**27  # bytes of one intermediate, where the adapter says nothing
MAX_BUDGET = 2**28  # larger tiles are hardly faster, and memory is set by the tile

Read = Callable[[int, int, int, int], np.ndarray]  # rows y0:y1, columns x0:x1 -> float32 [3, rows, columns]
Run = Callable[[np.ndarray], np.ndarray]  # float32 [1, 3, h, w] -> [1, 3, scale·h, scale·w]
# float32 [1, 3, h, w] -> what waits for [scale·h, scale·w, 3], and is called once
Begin = Callable[[np.ndarray], Callable[[], np.ndarray]]


@dataclass(frozen=True)
class Limits:
    """What a program says of its network (recipe.json): see `variants.Architecture` and `build`."""

    scale: int
    multiple: int
    radius: int
    max_side: int
    pixel_bytes: int


@dataclass(frozen=True)
class Layout:
    """Windows of `rows` × `columns` with starts `tops` × `lefts`, over a picture padded to whole multiples."""

    height: int
    width: int
    rows: int
    columns: int
    overlap: int
    tops: tuple[int, ...]
    lefts: tuple[int, ...]
    exact: bool

    @property
    def tiles(self) -> int:
        return len(self.tops) * len(self.lefts)


def auto_tile(limits: Limits, budget: int = DEFAULT_BUDGET) -> int:
    """The largest tile for whose window the network's largest intermediate takes no more than `budget` bytes."""
    most = min(limits.max_side, int((min(budget, MAX_BUDGET) / limits.pixel_bytes) ** 0.5))
    sizes = range(_up(most, limits.multiple), limits.multiple, -limits.multiple)
    return next((tile for tile in sizes if tile + 2 * overlap_of(limits, tile) <= most), limits.multiple)


def overlap_of(limits: Limits, tile: int) -> int:
    """The network's radius where that does not more than double a tile's side, or is small; else what pays."""
    if limits.radius <= max(tile // 2, COVERED):
        return _up(limits.radius, limits.multiple)
    return PARTIAL_OVERLAP * limits.multiple


def plan(height: int, width: int, tile: int, limits: Limits, overlap: int | None = None) -> Layout:
    """The windows for a picture: as many as take parts of at most `tile` a side, and no larger than those need; 0 is
    one window. Raises `ValueError` for windows larger than the program takes."""
    multiple = limits.multiple
    full = (_up(height, multiple), _up(width, multiple))
    if not tile:
        overlap = 0
    overlap = _up(overlap_of(limits, tile) if overlap is None else overlap, multiple)
    rows, columns = (_side(size, _up(tile, multiple), overlap, multiple) if tile else size for size in full)
    if max(rows, columns) > limits.max_side:
        raise ValueError(f"a window of {columns}×{rows} is larger than the program's {limits.max_side}")
    tops, lefts = (_starts(size, side, overlap) for size, side in zip(full, (rows, columns), strict=True))
    exact = len(tops) * len(lefts) == 1 or overlap >= limits.radius
    return Layout(height, width, rows, columns, overlap, tops, lefts, exact)


def _side(size: int, tile: int, overlap: int, multiple: int) -> int:
    if size <= tile + 2 * overlap:
        return size
    count = -(-(size - 2 * overlap) // tile)
    return _up(-(-(size - 2 * overlap) // count), multiple) + 2 * overlap


def _starts(size: int, side: int, overlap: int) -> tuple[int, ...]:
    if side == size:
        return (0,)
    step = side - 2 * overlap
    return (*range(0, size - side, step), size - side)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _kept(starts: tuple[int, ...], side: int, overlap: int) -> Iterator[tuple[int, int, int]]:
    """For each window: its start and the part of the picture that comes from it, each pixel from one window."""
    done = 0
    for index, start in enumerate(starts):
        last = index == len(starts) - 1
        end = start + side - (0 if last else overlap)
        yield start, done, end
        done = end


def upscale(
    read: Read,
    begin: Begin,
    layout: Layout,
    limits: Limits,
    empty: Callable[[int, int], np.ndarray],
    finish: Callable[[np.ndarray, np.ndarray], None],
    done: Callable[[], None] = lambda: None,
) -> Iterator[np.ndarray]:
    """Bands of the enlarged picture from top to bottom, `[rows, width, channels]`.

    A window is begun before the one before it is waited for. `empty`: rows and columns to an array for a band.
    `finish` writes what became of a window, `[h, w, 3]`, to its place in the band. `done` is called after each tile.
    """
    scale = limits.scale
    results = _results(read, begin, layout)
    for top, first, end in _kept(layout.tops, layout.rows, layout.overlap):
        bottom = min(scale * end, scale * layout.height)
        band = empty(bottom - scale * first, scale * layout.width)
        for left, start, stop in _kept(layout.lefts, layout.columns, layout.overlap):
            right = min(scale * stop, scale * layout.width)
            result = next(results)
            part = result[scale * (first - top) : bottom - scale * top, scale * (start - left) : right - scale * left]
            finish(part, band[:, scale * start : right])
            del result, part  # large ones, which would be held while the next come; the band too
            done()
        yield band
        del band


def _results(read: Read, begin: Begin, layout: Layout) -> Iterator[np.ndarray]:
    """What becomes of each window, when the next one has begun."""
    windows = (_window(read, layout, top, left) for top, left in product(layout.tops, layout.lefts))
    begun = (begin(window[None]) for window in windows)
    wait = next(begun)
    for following in begun:
        yield wait()
        wait = following
    yield wait()


def in_turn(run: Run) -> Begin:
    """Nothing ahead of time: a window is run when it is waited for."""
    return lambda window: lambda: np.asarray(run(window))[0].transpose(1, 2, 0)


def _window(read: Read, layout: Layout, top: int, left: int) -> np.ndarray:
    """A window of the picture; what a multiple adds at the bottom and the right mirrors the last pixels."""
    bottom, right = min(top + layout.rows, layout.height), min(left + layout.columns, layout.width)
    pixels = read(top, bottom, left, right)
    for axis, missing in ((1, top + layout.rows - bottom), (2, left + layout.columns - right)):
        if missing:
            pads = [(0, missing if index == axis else 0) for index in range(3)]
            pixels = np.pad(pixels, pads, mode="reflect" if pixels.shape[axis] > missing else "edge")
    return np.ascontiguousarray(pixels, dtype=np.float32)
