"""A picture of who spoke when: one lane a speaker, over the waveform, with a scale in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from recipes.nemotron_diarization.segments import Segment

WIDTH, MARGIN = 1600, 110  # of the timeline; left of it the names
WAVE, LANE, SCALE = 160, 34, 40  # heights
COLUMNS = 2 * WIDTH
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#777777")


class Envelope:
    """Least and largest sample of each of at most `COLUMNS` stretches, whatever the length of the audio."""

    def __init__(self, block: int = 64):
        self._block = block
        self._low: list[float] = []
        self._high: list[float] = []
        self._rest = np.zeros(0, np.float32)
        self.samples = 0

    def push(self, samples: np.ndarray) -> None:
        self.samples += len(samples)
        rest = np.concatenate([self._rest, samples])
        whole = len(rest) // self._block
        blocks = rest[: whole * self._block].reshape(whole, self._block)
        self._rest = rest[whole * self._block :].copy()
        self._low += blocks.min(1).tolist() if whole else []
        self._high += blocks.max(1).tolist() if whole else []
        while len(self._low) > COLUMNS:
            # Every two stretches become one; an odd last one goes back to what waits.
            if len(self._low) % 2:
                edge = np.array([self._low.pop(), self._high.pop()], np.float32)
                filler = np.resize(edge, self._block)
                self._rest = np.concatenate([filler, self._rest])
            self._low = [min(pair) for pair in zip(self._low[::2], self._low[1::2], strict=True)]
            self._high = [max(pair) for pair in zip(self._high[::2], self._high[1::2], strict=True)]
            self._block *= 2

    def columns(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Least and largest sample for each of `count` columns of the whole length."""
        low, high = np.array([*self._low, 0.0]), np.array([*self._high, 0.0])
        if len(self._rest):
            low[-1], high[-1] = self._rest.min(), self._rest.max()
        edges = np.linspace(0, max(self.samples / self._block, 1e-9), count + 1)
        first = np.minimum(edges[:-1].astype(int), len(low) - 1)
        last = np.maximum(np.minimum(np.ceil(edges[1:]).astype(int), len(low)), first + 1)
        ranges = list(zip(first, last, strict=True))
        return np.array([low[a:b].min() for a, b in ranges]), np.array([high[a:b].max() for a, b in ranges])


def draw(file: BinaryIO, segments: Sequence[Segment], envelope: Envelope, duration: float) -> None:
    """Writes the picture as PNG."""
    speakers = sorted({segment.speaker for segment in segments})
    height = WAVE + LANE * max(len(speakers), 1) + SCALE
    image = Image.new("RGB", (MARGIN + WIDTH + 60, height), "white")
    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default(16)
    scale = WIDTH / max(duration, 1e-9)

    def x(second: float) -> int:
        return MARGIN + min(round(second * scale), WIDTH - 1)

    for index, speaker in enumerate(speakers):
        top = index * LANE
        color = COLORS[speaker % len(COLORS)]
        pen.text((10, top + 8), f"speaker {speaker}", fill=color, font=font)
        pen.line((MARGIN, top + LANE - 1, MARGIN + WIDTH, top + LANE - 1), fill="#dddddd")
        for segment in segments:
            if segment.speaker == speaker:
                pen.rectangle((x(segment.start), top + 6, x(segment.end), top + LANE - 8), fill=color)
    if not speakers:
        pen.text((MARGIN + 10, 8), "nobody speaks", fill="#777777", font=font)
    top = height - SCALE - WAVE
    low, high = envelope.columns(WIDTH)
    peak = max(float(np.abs(low).max()), float(np.abs(high).max()), 1e-9)
    middle = top + WAVE // 2
    for column in range(WIDTH):
        reach = (middle - high[column] / peak * (WAVE // 2 - 6), middle - low[column] / peak * (WAVE // 2 - 6))
        pen.line((MARGIN + column, reach[0], MARGIN + column, reach[1]), fill="#555555")
    _draw_scale(pen, font, duration, scale, height - SCALE)
    image.save(file, format="PNG")


def _draw_scale(pen: ImageDraw.ImageDraw, font: Any, duration: float, scale: float, top: int) -> None:
    steps = (0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400)
    step = next((step for step in steps if step * scale >= 90), duration)
    pen.line((MARGIN, top, MARGIN + WIDTH, top), fill="#999999")
    for index in range(int(duration / step) + 1):
        second = index * step
        at = MARGIN + round(second * scale)
        label = f"{second:g} s" if duration < 120 else f"{int(second // 60)}:{int(second % 60):02d}"
        pen.line((at, top, at, top + 6), fill="#999999")
        pen.text((at + 3, top + 8), label, fill="#555555", font=font)
