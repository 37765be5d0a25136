"""Pictures out, row by row: PNG as it is made, JPEG and WebP through a file that is mapped, not held. No torch."""

from __future__ import annotations

import math
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from PIL import Image

from recipes.real_esrgan.pictures import workers
from recipes.recipe import UserError
from zoo.files import atomic_file, check_output

# The most pixels of a side that each format can say.
LIMITS = {".png": 2**31 - 1, ".jpg": 65500, ".jpeg": 65500, ".webp": 16383}
_QUALITY = 95
_PNG_COLOURS = {1: 0, 2: 4, 3: 2, 4: 6}  # channels -> colour type
_PIECE = 2**18  # bytes that a thread compresses at a time
_PIECES = 16  # that are held at a time
_WINDOW = 2**15  # bytes that deflate looks back


class Sink(Protocol):
    def write(self, rows: np.ndarray) -> None:
        """Takes the next rows, `[n, width, channels]`, uint8 or (PNG) uint16."""


def check_picture_output(path: Path, width: int, height: int) -> None:
    """Raises `UserError` when a picture of this size cannot be written at `path`; called before the work."""
    limit = LIMITS.get(path.suffix.lower())
    if limit is None:
        raise UserError(f"{path}: the ending decides the format: choose one of {', '.join(LIMITS)}")
    if max(width, height) > limit:
        raise UserError(f"{path}: {width}×{height} is more than {path.suffix[1:]} can hold ({limit} a side): use .png")
    check_output(path)


def loses(path: Path, channels: int, deep: bool) -> list[str]:
    """What the format of `path` does not keep of a picture, as notices."""
    suffix = path.suffix.lower()
    lost = []
    if deep and suffix != ".png":
        lost.append(f"{path.name}: 16 bits a channel become 8: only .png keeps them")
    if channels in (2, 4) and suffix in (".jpg", ".jpeg"):
        lost.append(f"{path.name}: JPEG has no alpha: the picture is laid on white")
    return lost


@contextmanager
def open_sink(path: Path, width: int, height: int, channels: int, deep: bool, icc: bytes | None) -> Iterator[Sink]:
    """The picture appears as `path` when the block ends well, having written `height` rows; else nothing does."""
    check_picture_output(path, width, height)
    with atomic_file(path) as file:
        if path.suffix.lower() == ".png":
            png = _Png(file, width, height, channels, 16 if deep else 8, icc)
            yield png
            png.finish()
            return
        with tempfile.TemporaryFile(dir=path.parent, prefix=".") as scratch:
            mapped = _Mapped(scratch, width, height, channels, jpeg=path.suffix.lower() != ".webp")
            yield mapped
            mapped.save(file, icc)


class _Png:
    """A PNG encoder that holds a few rows. Filters are chosen by row: the least sum of absolute differences.

    Pieces of rows are filtered and compressed side by side, each with what comes before it as its dictionary, into one
    stream: its bytes depend on the rows of each `write`, not on how many threads there are.
    """

    def __init__(self, file: BinaryIO, width: int, height: int, channels: int, bits: int, icc: bytes | None) -> None:
        self._file = file
        self._bytes = bits // 8 * channels
        self._above = np.zeros(width * self._bytes, np.uint8)
        self._before = b""  # the end of what was compressed
        self._checksum = zlib.adler32(b"")
        file.write(b"\x89PNG\r\n\x1a\n")
        self._chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, _PNG_COLOURS[channels], 0, 0, 0))
        if icc:
            self._chunk(b"iCCP", b"ICC profile\0\0" + zlib.compress(icc))
        self._chunk(b"IDAT", b"\x78\x9c")  # the head of a zlib stream

    def _chunk(self, kind: bytes, data: bytes) -> None:
        self._file.write(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)))

    def write(self, rows: np.ndarray) -> None:
        height = max(1, _PIECE // (rows.shape[1] * self._bytes))
        for start in range(0, len(rows), height * _PIECES):
            part = rows[start : start + height * _PIECES]
            raw = part.astype(">u2").view(np.uint8) if part.dtype == np.uint16 else part
            self._pack(np.ascontiguousarray(raw).reshape(len(part), -1), height)

    def _pack(self, raw: np.ndarray, height: int) -> None:
        above = np.concatenate([self._above[None], raw[:-1]])
        pieces = [slice(start, start + height) for start in range(0, len(raw), height)]
        filtered = list(workers().map(lambda piece: _filtered(raw[piece], above[piece], self._bytes), pieces))
        before = [self._before]
        for lines in filtered:
            before.append((before[-1] + lines[-_WINDOW:])[-_WINDOW:])
            self._checksum = zlib.adler32(lines, self._checksum)
        for data in workers().map(_deflated, filtered, before[:-1]):
            self._chunk(b"IDAT", data)
        self._above, self._before = raw[-1].copy(), before[-1]

    def finish(self) -> None:
        self._chunk(b"IDAT", zlib.compressobj(wbits=-15).flush() + struct.pack(">I", self._checksum))
        self._chunk(b"IEND", b"")


def _filtered(raw: np.ndarray, above: np.ndarray, step: int) -> bytes:
    """Rows of bytes as PNG lines, each with its filter before it. `step`: bytes of a pixel."""
    left, corner = (np.pad(rows, ((0, 0), (step, 0)))[:, : rows.shape[1]] for rows in (raw, above))
    filtered = np.stack([raw, raw - left, raw - above, raw - _paeth(left, above, corner)])  # modulo 256
    cost = np.abs(filtered.view(np.int8).astype(np.int16)).sum(2, dtype=np.int64)
    best = cost.argmin(0)
    lines = np.empty((len(raw), 1 + raw.shape[1]), np.uint8)
    lines[:, 0] = np.array([0, 1, 2, 4])[best]
    lines[:, 1:] = filtered[best, np.arange(len(raw))]
    return lines.tobytes()


def _deflated(data: bytes, before: bytes) -> bytes:
    """A piece of a raw deflate stream, up to a byte boundary. `before`: what the stream holds before it."""
    deflate = zlib.compressobj(6, wbits=-15, zdict=before) if before else zlib.compressobj(6, wbits=-15)
    return deflate.compress(data) + deflate.flush(zlib.Z_SYNC_FLUSH)


def _paeth(left: np.ndarray, above: np.ndarray, corner: np.ndarray) -> np.ndarray:
    a, b, c = (rows.astype(np.int16) for rows in (left, above, corner))
    to_left, to_above, to_corner = np.abs(b - c), np.abs(a - c), np.abs(a + b - 2 * c)
    nearest_left = (to_left <= to_above) & (to_left <= to_corner)
    return np.where(nearest_left, left, np.where(to_above <= to_corner, above, corner))


class _Mapped:
    """Pillow encodes whole pictures: this one lies in a mapped file, in the form that Pillow takes without a copy."""

    def __init__(self, scratch: Any, width: int, height: int, channels: int, *, jpeg: bool) -> None:
        self._format = "JPEG" if jpeg else "WEBP"
        self._flatten = jpeg and channels in (2, 4)
        self._grey = jpeg and channels < 3
        if self._grey:
            self.mode = "L"
        else:
            self.mode = "RGBA" if channels in (2, 4) and not jpeg else "RGBX"
        shape = (height, width, 1 if self._grey else 4)
        # A write to a mapped page that the disk has no room for would end the process: have it now, or say so.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(scratch.fileno(), 0, math.prod(shape))
        self._pixels = np.memmap(scratch, np.uint8, "w+", shape=shape)
        self._at = 0

    def write(self, rows: np.ndarray) -> None:
        if rows.dtype == np.uint16:
            rows = ((rows.astype(np.uint32) + 128) // 257).astype(np.uint8)
        colour, alpha = (rows[..., :-1], rows[..., -1:]) if rows.shape[2] in (2, 4) else (rows, None)
        if self._flatten and alpha is not None:
            opaque = alpha.astype(np.uint16)
            colour = ((colour * opaque + 255 * (255 - opaque) + 127) // 255).astype(np.uint8)
        out = self._pixels[self._at : self._at + len(rows)]
        out[..., : 1 if self._grey else 3] = colour
        if not self._grey:
            out[..., 3:] = alpha if alpha is not None and not self._flatten else 255
        self._at += len(rows)

    def save(self, file: BinaryIO, icc: bytes | None) -> None:
        height, width = self._pixels.shape[:2]
        # One that frombuffer shares, not copies: RGBX, RGBA and L lie in memory as they are here.
        image = Image.frombuffer(self.mode, (width, height), self._pixels, "raw", self.mode, 0, 1)
        options: dict[str, Any] = {"icc_profile": icc} if icc else {}
        if self._format == "JPEG":
            options["subsampling"] = 0
        image.save(file, self._format, quality=_QUALITY, **options)
