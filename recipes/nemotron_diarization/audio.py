"""Audio in: any file that libsndfile reads, or raw PCM on a pipe, as mono float32 at the model's rate, in pieces.

Nothing is held but a piece. What is wrong with the input is one `UserError`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import soundfile
import soxr

from recipes.recipe import UserError

BLOCK = 0.02  # seconds that the resampler is given at a time, however the audio arrives
RATES = (100, 10_000_000)  # Hz, what is believed of a sample rate
_UNKNOWN = 0x7FFFFF00  # a WAV file that was written to a pipe claims this much, or more
_ENDLESS = 2**48  # libsndfile's count of frames where it knows none is far above


class File:
    """An audio file, checked while it is read. `rate` in Hz; `seconds` is its length, or None where it is not known."""

    def __init__(self, path: Path):
        if not path.exists():
            raise UserError(f"no such file: {path}")
        if path.is_dir():
            raise UserError(f"{path} is a folder, not an audio file")
        if path.is_file() and path.stat().st_size == 0:
            raise UserError(f"{path} is empty")
        self._path = path
        self._state = _state(path)
        _check_riff(path)
        try:
            self._file = soundfile.SoundFile(str(path))
        except (soundfile.SoundFileError, TypeError, ValueError, OSError) as error:
            raise UserError(f"cannot read {path} as audio: {_reason(error)}") from error
        self.rate: int = self._file.samplerate
        self.channels: int = self._file.channels
        known = 0 <= self._file.frames < _ENDLESS
        self.seconds = self._file.frames / self.rate if known and self.rate else None
        if self._file.frames == 0:
            self.close()
            raise UserError(f"{path} holds no samples")

    def __enter__(self) -> File:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def blocks(self) -> Iterator[np.ndarray]:
        """Mono float32 samples at `rate`: the mean of the channels, a second at a time."""
        size = max(self.rate, 1)
        read = 0
        while True:
            try:
                block = self._file.read(size, dtype="float32", always_2d=True)
            except (soundfile.SoundFileError, RuntimeError, OSError) as error:
                raise UserError(f"cannot read {self._path} after {read / self.rate:.2f} s: {_reason(error)}") from error
            if not len(block):
                break
            read += len(block)
            yield _mono(block)
        if self.seconds is not None and read < self._file.frames:
            raise UserError(
                f"{self._path} ended while it was read: {read / self.rate:.2f} s of {self.seconds:.2f} s were there"
            )
        if _state(self._path) != self._state:
            raise UserError(f"{self._path} was changed while it was read: run again when it is complete")


class Pcm:
    """Raw signed 16-bit little-endian samples from a pipe, interleaved when there is more than one channel."""

    def __init__(self, pipe: BinaryIO, rate: int, channels: int):
        if not 1 <= channels <= 1024:
            raise UserError(f"the number of channels must be between 1 and 1024, not {channels}")
        self.rate, self.channels = rate, channels
        self.seconds: float | None = None
        self.cut = 0  # bytes of an unfinished sample at the end
        self._pipe = pipe

    def blocks(self) -> Iterator[np.ndarray]:
        """Mono float32 samples at `rate`, as they arrive."""
        width = 2 * self.channels
        rest, first = b"", True
        while data := os.read(self._pipe.fileno(), 1 << 16):
            rest += data
            if first and len(rest) >= 12:
                first = False
                if rest[:4] in (b"RIFF", b"RF64", b"fLaC", b"OggS"):
                    raise UserError("standard input holds an audio file, not raw samples: give the file by name")
            whole = len(rest) // width * width
            if whole:
                samples = np.frombuffer(rest[:whole], "<i2").reshape(-1, self.channels)
                rest = rest[whole:]
                yield _mono(samples.astype(np.float32) / np.float32(32768))
        self.cut = len(rest)


def at_rate(blocks: Iterable[np.ndarray], rate: int, target: int) -> Iterator[np.ndarray]:
    """The same audio at `target` Hz; the samples do not depend on how the blocks are cut."""
    if rate == target:
        yield from blocks
        return
    try:
        resampler = soxr.ResampleStream(rate, target, 1, dtype="float32", quality="HQ")
    except (ValueError, RuntimeError) as error:
        raise UserError(f"cannot resample from {rate} Hz: {_reason(error)}") from error
    size = max(round(rate * BLOCK), 1)
    rest = np.zeros(0, np.float32)
    for block in blocks:
        check_finite(block)
        rest = np.concatenate([rest, block])
        whole = len(rest) // size * size
        for start in range(0, whole, size):
            made = resampler.resample_chunk(rest[start : start + size])
            if len(made):
                yield made
        rest = rest[whole:]
    yield resampler.resample_chunk(rest, last=True)


def check_rate(rate: int) -> None:
    """Raises `UserError` for a sample rate that is none."""
    low, high = RATES
    if not low <= rate <= high:
        raise UserError(f"a sample rate of {rate} Hz is not one: it must be between {low} and {high}")


def check_finite(samples: np.ndarray) -> None:
    """Raises `UserError` when a sample is NaN or infinite."""
    if not np.isfinite(samples).all():
        raise UserError("the audio holds a sample that is not a finite number (NaN or infinity)")


def _mono(block: np.ndarray) -> np.ndarray:
    if block.shape[1] == 1:
        return block[:, 0]
    total = block[:, 0].copy()
    for channel in range(1, block.shape[1]):
        total += block[:, channel]
    mean: np.ndarray = total / np.float32(block.shape[1])
    return mean


def _state(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _check_riff(path: Path) -> None:
    """A WAV file that is shorter than its header says: libsndfile reads such a file without a word."""
    if not path.is_file():
        return
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(12)
        if len(head) < 12 or head[:4] != b"RIFF" or head[8:] != b"WAVE":
            return
        while len(chunk := file.read(8)) == 8:
            name, length = struct.unpack("<4sI", chunk)
            if name == b"fmt ":
                form = file.read(8)
                if len(form) == 8:
                    check_rate(struct.unpack("<HHI", form)[2])
                file.seek(length + length % 2 - len(form), os.SEEK_CUR)
                continue
            if name == b"data":
                there = size - file.tell()
                if there < length < _UNKNOWN:
                    raise UserError(
                        f"{path} is cut short: its header tells of {length} bytes of audio, {there} are there"
                    )
                return
            file.seek(length + length % 2, os.SEEK_CUR)
    raise UserError(f"{path} is cut short: a WAV header and no audio")


def _reason(error: BaseException) -> str:
    text = str(getattr(error, "error_string", "") or error)
    return (text.strip().splitlines() or [type(error).__name__])[0].rstrip(".")
