"""A conversation of invented voices, for samples and checks: harmonics under moving formants, noise, pauses.

Nobody would take it for people, but it has what a diarization model listens to: pitch, formants, syllables, turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RATE = 16000
# First three formants (Hz) of five vowels, of an average adult man.
VOWELS = np.array([[730, 1090, 2440], [270, 2290, 3010], [300, 870, 2240], [530, 1840, 2480], [570, 840, 2410]])
WIDTHS = np.array([80.0, 100.0, 140.0])  # of the formants, Hz
VOICES = ((110.0, 1.0), (205.0, 1.17), (150.0, 0.92))  # pitch (Hz), how much shorter the vocal tract is
TOP = 5000.0  # the highest harmonic, Hz


@dataclass(frozen=True)
class Turn:
    """One voice speaks from `start` to `end`, in seconds."""

    voice: int
    start: float
    end: float


def conversation(seconds: float, voices: int = 2, seed: int = 0) -> tuple[np.ndarray, list[Turn]]:
    """float32 samples at 16 kHz of `seconds` seconds, and who speaks when. Some turns overlap."""
    rng = np.random.default_rng(seed)
    total = round(seconds * RATE)
    samples = np.zeros(total, np.float32)
    turns: list[Turn] = []
    start, voice = 0.4, 0
    while start < seconds - 0.5:
        end = min(start + rng.uniform(1.2, 4.0), seconds - 0.2)
        first, last = round(start * RATE), round(end * RATE)
        samples[first:last] += speech(last - first, voice, rng)
        turns.append(Turn(voice, start, end))
        voice = (voice + int(rng.integers(1, voices))) % voices if voices > 1 else 0
        start = end + rng.uniform(-0.3, 0.8)
    samples += 1e-4 * rng.standard_normal(total, dtype=np.float32)
    return samples, turns


def speech(length: int, voice: int, rng: np.random.Generator) -> np.ndarray:
    """`length` samples of one voice: syllables of 120 to 260 ms, each a hiss and a vowel."""
    pitch, scale = VOICES[voice]
    out = np.zeros(length, np.float32)
    at = 0
    while at < length:
        count = min(round(rng.uniform(0.12, 0.26) * RATE), length - at)
        if count < 400:
            break
        glide = np.linspace(rng.uniform(0.94, 1.08), rng.uniform(0.9, 1.02), count)
        phase = 2 * np.pi * np.cumsum(pitch * glide) / RATE
        harmonics = np.arange(1, int(TOP / pitch))[:, None]
        formants = VOWELS[rng.integers(len(VOWELS))] * scale
        gains = (1 / (1 + ((harmonics * pitch - formants) / WIDTHS) ** 2)).sum(1, keepdims=True) / harmonics**0.5
        envelope = np.sin(np.pi * np.linspace(0, 1, count)) ** 0.6
        vowel = (gains * np.sin(harmonics * phase)).sum(0) * envelope
        hiss = rng.standard_normal(count) * np.exp(-np.arange(count) / (0.02 * RATE)) * 0.15
        out[at : at + count] = 0.12 * (vowel + hiss)
        at += count
    return out
