"""Log-mel frames of a signal that arrives in pieces, in numpy: those of transformers' feature extractor.

Frame `f` looks at `win_length` samples around sample `f * hop`; before the start and after the end of the signal
there is silence. It is the frame of one centred pass over the whole signal, whoever asks for it and when: the
sums are made in float64, and frames are computed in the groups that the caller asks for, never in those of its feed.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class LogMel:
    """`settings`: hop_length, n_fft, preemphasis (or None), log_guard. `window` `[win]`, `filters` `[mel, bins]`."""

    def __init__(self, settings: dict[str, Any], window: np.ndarray, filters: np.ndarray):
        self.hop: int = settings["hop_length"]
        self.received = 0  # samples so far
        self.next = 0  # the frame that `take` begins with
        self._n_fft: int = settings["n_fft"]
        self._preemphasis: float | None = settings["preemphasis"]
        self._guard: float = settings["log_guard"]
        self._window = window.astype(np.float64)
        self._filters = np.ascontiguousarray(filters.T.astype(np.float64))
        self._half = len(window) // 2
        self._last: np.ndarray | None = None  # the sample before the next one
        self._start = -self._half  # index of the first sample in the buffer
        self._pieces: list[np.ndarray] = [np.zeros(self._half, np.float32)]

    def push(self, samples: np.ndarray) -> None:
        """Takes float32 samples `[n]` at the model's rate."""
        samples = np.ascontiguousarray(samples, dtype=np.float32)
        if not len(samples):
            return
        self.received += len(samples)
        if self._preemphasis is not None:
            # There is nothing before the first sample, so it stays as it is.
            before = np.zeros(1, np.float32) if self._last is None else self._last
            self._last = samples[-1:].copy()
            samples = samples - np.float32(self._preemphasis) * np.concatenate([before, samples[:-1]])
        self._pieces.append(samples)

    @property
    def total(self) -> int:
        """Frames of the signal if it ends here."""
        return self.received // self.hop

    def needed(self, frames: int) -> int:
        """Samples that must have arrived before the first `frames` frames can be computed as of an endless signal."""
        return (frames - 1) * self.hop + self._half

    def take(self, end: int) -> np.ndarray:
        """Frames from `next` up to `end`, float32 `[frames, mel]`; samples that have not arrived count as silence."""
        count = end - self.next
        if count <= 0:
            return np.zeros((0, self._filters.shape[1]), np.float32)
        buffer = np.concatenate(self._pieces)
        width = len(self._window)
        offset = self.next * self.hop - self._half - self._start
        stop = offset + (count - 1) * self.hop + width
        span = buffer[offset:stop]
        span = np.concatenate([span, np.zeros(stop - offset - len(span), np.float32)])
        views = np.lib.stride_tricks.sliding_window_view(span, width)[:: self.hop]
        spectrum = np.fft.rfft(views * self._window, n=self._n_fft)
        power = spectrum.real**2 + spectrum.imag**2
        frames: np.ndarray = np.log(power @ self._filters + self._guard).astype(np.float32)
        self.next = end
        keep = min(max(end * self.hop - self._half - self._start, 0), len(buffer))
        self._pieces = [buffer[keep:].copy()]
        self._start += keep
        return frames
