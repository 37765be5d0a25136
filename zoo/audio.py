"""Speech out: a WAV file or raw PCM on stdout, from the same bytes.

Samples are float32 in [-1, 1]. They become 16-bit integers by `round(x * 32767)`, ties to even, clamped to
[-32768, 32767]: what is too loud is clipped, never wrapped. Each sample is converted by itself, so it does not
matter how a signal is cut into frames.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from recipes.recipe import UserError
from zoo.console import Stdout, own_stdout
from zoo.files import atomic_file

# A WAV file counts its bytes in 32 bits, the 44 bytes of the header among them.
WAV_LIMIT = 2**32 - 1 - 44


def to_pcm(frame: NDArray[Any]) -> bytes:
    """float samples of any shape, in order, as 16-bit little-endian PCM. Raises `UserError` for NaN."""
    samples = np.asarray(frame, dtype=np.float32).reshape(-1)
    if np.isnan(samples).any():
        raise UserError("the model produced samples that are not numbers (NaN): nothing more is written")
    # In float64: in float32, 32767 * x is already rounded once.
    scaled = np.rint(samples.astype(np.float64) * 32767.0)
    return np.clip(scaled, -32768, 32767).astype("<i2").tobytes()


class Sink(Protocol):
    """Where frames go. `samples` counts what was written so far."""

    sample_rate: int
    samples: int

    def write(self, frame: NDArray[Any]) -> None:
        """Writes one frame of float samples in [-1, 1]."""


class _Wav:
    def __init__(self, file: BinaryIO, sample_rate: int) -> None:
        self.sample_rate = sample_rate
        self.samples = 0
        self._file = file
        self._write_header()

    def _write_header(self) -> None:
        # RIFF/WAVE, one 16-byte `fmt ` chunk (1 = integer PCM, 1 channel, 2 bytes a sample), one `data` chunk.
        size = 2 * self.samples
        form = struct.pack("<4sI4s4sIHHIIHH", b"RIFF", 36 + size, b"WAVE", b"fmt ", 16, 1, 1, *self._rates(), 2, 16)
        self._file.seek(0)
        self._file.write(form + struct.pack("<4sI", b"data", size))

    def _rates(self) -> tuple[int, int]:
        return self.sample_rate, 2 * self.sample_rate  # samples and bytes a second

    def write(self, frame: NDArray[Any]) -> None:
        data = to_pcm(frame)
        if 2 * self.samples + len(data) > WAV_LIMIT:
            raise UserError("a WAV file holds at most 4 GiB: use --stream for more")
        self._file.write(data)
        self.samples += len(data) // 2

    def finish(self) -> None:
        """Rewrites the header with the length that is now known."""
        self._write_header()


class _Pcm:
    def __init__(self, stdout: Stdout, sample_rate: int) -> None:
        self.sample_rate = sample_rate
        self.samples = 0
        self._stdout = stdout

    def write(self, frame: NDArray[Any]) -> None:
        data = to_pcm(frame)
        self._stdout.write(data)
        self.samples += len(data) // 2


@contextmanager
def open_sink(output: Path | None, stream: bool, sample_rate: int) -> Iterator[Sink]:
    """A place for mono speech: the WAV file `output`, or raw s16le PCM on stdout when `stream` is set.

    The WAV file appears when the block ends well; on any failure and on Ctrl-C nothing is left. On stdout each
    frame leaves at once, and whatever else would print there goes to stderr while the block runs; when the
    reader closes the pipe, `write` raises `zoo.console.ReaderClosed`, which ends the command quietly.

    Raises `UserError` for both or neither of the two, a missing folder, another ending, PCM on a terminal.
    """
    if stream and output is not None:
        raise UserError("choose one of --output and --stream")
    if stream:
        with own_stdout() as stdout:
            if stdout.is_terminal():
                raise UserError(
                    "--stream writes raw samples and stdout is a terminal: pipe it, for example into "
                    f"`aplay -q -f S16_LE -r {sample_rate} -c 1`"
                )
            yield _Pcm(stdout, sample_rate)
        return
    if output is None:
        raise UserError("name a WAV file with --output, or use --stream")
    if output.suffix.lower() != ".wav":
        raise UserError(f"{output}: speech is written as WAV, so the name must end in .wav")
    with atomic_file(output) as file:
        wav = _Wav(file, sample_rate)
        yield wav
        wav.finish()
