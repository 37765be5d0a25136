"""Pictures in: any file that Pillow reads, as colour, alpha and what to say about it. No torch.

Colour is RGB or grey, 8 or 16 bits, upright (the EXIF orientation is applied). Where alpha is 0, a file may hold any
colour: it is replaced by its surroundings' before the network sees it, so that it never bleeds.
"""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from PIL.TiffImagePlugin import TiffImageFile

from recipes.recipe import UserError
from zoo.pictures import opened, to_srgb

_STRIP = 256  # rows that are worked on at a time in float
_ROWS = 64  # of a result that one of several threads works on

NOT_NUMBERS = "the network produced pixels that are not numbers: nothing is written"


@functools.cache
def workers() -> ThreadPoolExecutor:
    """Threads for what numpy and zlib do without Python's lock."""
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), "zoo-picture")


@dataclass
class Picture:
    """`colour` `[H, W, 1 or 3]`, `alpha` `[H, W, 1]` or None, both uint8 or both uint16."""

    colour: np.ndarray
    alpha: np.ndarray | None = None
    icc: bytes | None = None
    notices: list[str] = field(default_factory=list)

    @property
    def height(self) -> int:
        return int(self.colour.shape[0])

    @property
    def width(self) -> int:
        return int(self.colour.shape[1])

    @property
    def limit(self) -> int:
        return int(np.iinfo(self.colour.dtype).max)

    def read(self, top: int, bottom: int, left: int, right: int) -> np.ndarray:
        """A part as the network takes it: float32 `[3, rows, columns]` in [0, 1]."""
        planes = self.colour[top:bottom, left:right].transpose(2, 0, 1)
        return np.divide(planes, np.float32(self.limit), out=np.empty((3, *planes.shape[1:]), np.float32))

    def empty(self, rows: int, columns: int) -> np.ndarray:
        """An array for a part of the result, `[rows, columns, channels]` of this picture's own integers."""
        return np.empty((rows, columns, self.colour.shape[2]), self.colour.dtype)

    def finish(self, part: np.ndarray, out: np.ndarray) -> None:
        """Writes a part of the network's output to its place in an array of `empty`.

        `part`: `[rows, columns, 3]`, as floats or as the 8-bit pixels of this picture already. Raises `UserError` for
        floats that are not finite. By stripes, several at a time: beside a GPU, a large picture takes its time here.
        """
        convert = np.copyto if part.dtype == np.uint8 else self._round

        def stripe(first: int) -> None:
            convert(out[first : first + _ROWS], part[first : first + _ROWS])

        for _ in workers().map(stripe, range(0, len(part), _ROWS)):
            pass

    def _round(self, out: np.ndarray, part: np.ndarray) -> None:
        planes = part.transpose(2, 0, 1)
        if not np.isfinite(planes).all():
            raise UserError(NOT_NUMBERS)
        if self.colour.shape[2] == 1:
            planes = planes.mean(0, keepdims=True)
        for channel, plane in enumerate(planes):
            scaled = np.clip(plane, 0.0, 1.0).astype(np.float32, copy=False)
            scaled *= np.float32(self.limit)
            out[..., channel] = np.rint(scaled, out=scaled)


def open_picture(path: Path) -> Picture:
    """Decodes the first frame of a file. Raises `UserError` for one that is missing, damaged or not a picture."""
    with opened(path) as image:
        picture = _decode(image, path)
    if picture.alpha is not None:
        fill_hidden(picture.colour, picture.alpha)
    return picture


def _decode(image: Image.Image, path: Path) -> Picture:
    notices = []
    frames = getattr(image, "n_frames", 1)
    if frames > 1:
        notices.append(f"{path.name} holds {frames} frames: the first is taken")
    icc = image.info.get("icc_profile") or None
    bits, deep = _sample_bits(image), _deep_colour(image, path)
    image.load()  # what stands behind the pixels in the file, like a PNG's EXIF, is known after this
    image_mode, key = image.mode, image.info.get("transparency")
    if deep is not None:
        array = _upright(deep, image.getexif().get(0x0112, 1))
        colour, alpha = (array[..., :3], array[..., 3:]) if array.shape[2] == 4 else (array, _keyed(array, key))
        return Picture(np.ascontiguousarray(colour), alpha, icc, notices)
    if bits > 8 and image_mode[0] not in "IF":
        notices.append(f"{path.name} holds {bits} bits a channel, of which 8 are kept")
    ImageOps.exif_transpose(image, in_place=True)
    if image_mode in ("I", "F"):
        array = np.asarray(image).astype(np.float64)
        top = 65535.0 if image_mode == "I" else 1.0
        if array.min(initial=0) < 0 or array.max(initial=0) > top:
            raise UserError(f"{path}: values of a {image_mode!r} picture are expected from 0 to {top:g}")
        return Picture(np.rint(array * (65535.0 / top)).astype(np.uint16)[..., None], None, icc, notices)
    if image_mode.startswith("I;16"):
        array = np.array(image).astype(np.uint16)[..., None]
        return Picture(array, _keyed(array, key), icc, notices)
    if image_mode in ("CMYK", "LAB"):
        image, icc = to_srgb(image, icc), None
    has_alpha = image.has_transparency_data
    grey = image_mode in ("1", "L", "LA", "La")
    mode = ("L" if grey else "RGB") + ("A" if has_alpha else "")
    if image.mode != mode:
        image = image.convert(mode)
    array = np.array(image)
    array = array[..., None] if array.ndim == 2 else array
    channels = 1 if grey else 3
    alpha = np.ascontiguousarray(array[..., channels:]) if has_alpha else None
    return Picture(np.ascontiguousarray(array[..., :channels]), alpha, icc, notices)


def _sample_bits(image: Image.Image) -> int:
    """Bits of a sample in the file, where its format tells."""
    if isinstance(image, TiffImageFile):
        bits = image.tag_v2.get(258, (8,))
        return int(max(bits) if isinstance(bits, tuple) else bits)
    tiles = getattr(image, "tile", ())
    raw = [str(tile[3][0] if isinstance(tile[3], tuple) else tile[3]) for tile in tiles]
    return 16 if any(";16" in mode for mode in raw) else 8


def _deep_colour(image: Image.Image, path: Path) -> np.ndarray | None:
    """16-bit colour of a PNG, uint16, or None. Pillow keeps 8 bits of it, of its choice: both halves, one at a time."""
    tiles = getattr(image, "tile", ())
    if image.format != "PNG" or not tiles or tiles[0][3] not in ("RGB;16B", "RGBA;16B"):
        return None
    halves = []
    for order in "BL":  # the file's byte order gives the high bytes, the other one the low bytes
        with Image.open(path) as half:
            _set_raw_mode(half, tiles[0][3][:-1] + order)
            half.load()
            halves.append(np.array(half))
    return (halves[0].astype(np.uint16) << 8) | halves[1]


def _keyed(colour: np.ndarray, key: Any) -> np.ndarray | None:
    """Alpha of 16 bits, where a PNG names one colour that stands for nothing."""
    if key is None:
        return None
    opaque = (colour != np.asarray(key, np.uint16)).any(2, keepdims=True)
    return np.where(opaque, np.uint16(65535), np.uint16(0))


def _set_raw_mode(image: Any, mode: str) -> None:
    image.tile = [tile._replace(args=mode) for tile in image.tile]


def _upright(array: np.ndarray, orientation: int) -> np.ndarray:
    """What `ImageOps.exif_transpose` does, for an array."""
    if orientation in (5, 6, 7, 8):
        array = array.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        array = array[::-1]
    if orientation in (2, 3, 6, 7):
        array = array[:, ::-1]
    return np.ascontiguousarray(array)


def fill_hidden(colour: np.ndarray, alpha: np.ndarray) -> None:
    """Replaces colour where alpha is 0, in place, by that of what is visible nearby.

    Push and pull: means of the visible colour over 2×2, 4×4, … pixels, and each hidden pixel takes the finest that
    has any. Pixels that can be seen keep their value.
    """
    hidden = alpha[..., 0] == 0
    if not hidden.any():
        return
    if hidden.all():
        colour[...] = 0
        return
    levels = [_halve(colour, alpha)]
    while max(levels[-1][1].shape[:2]) > 1:
        levels.append(_halve(*levels[-1]))
    means, _ = levels.pop()
    while levels:
        finer, finer_weight = levels.pop()
        empty = finer_weight[..., 0] == 0
        finer[empty] = _enlarged(means, finer.shape)[empty]
        means = finer
    for top in range(0, colour.shape[0], _STRIP):
        part = colour[top : top + _STRIP]
        empty = hidden[top : top + _STRIP]
        wide = _enlarged(means[top // 2 : (top + _STRIP + 1) // 2], part.shape)
        part[empty] = np.rint(wide[empty]).astype(colour.dtype)


def _enlarged(means: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return means.repeat(2, 0)[: shape[0]].repeat(2, 1)[:, : shape[1]]


def _halve(colour: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weighted means of 2×2 pixels, float32, and the mean of their weights."""
    rows, columns = -(-colour.shape[0] // 2), -(-colour.shape[1] // 2)
    means = np.empty((rows, columns, colour.shape[2]), np.float32)
    weights = np.empty((rows, columns, 1), np.float32)
    for top in range(0, rows, _STRIP):
        part = slice(2 * top, 2 * (top + _STRIP))
        w = _padded(weight[part].astype(np.float32))
        total = _sums(w)
        sums = _sums(_padded(colour[part].astype(np.float32)) * w)
        means[top : top + _STRIP] = np.divide(sums, total, out=np.zeros_like(sums), where=total > 0)
        weights[top : top + _STRIP] = total / 4
    return means, weights


def _padded(array: np.ndarray) -> np.ndarray:
    return np.pad(array, ((0, array.shape[0] % 2), (0, array.shape[1] % 2), (0, 0)))


def _sums(array: np.ndarray) -> np.ndarray:
    return array[::2, ::2] + array[1::2, ::2] + array[::2, 1::2] + array[1::2, 1::2]
