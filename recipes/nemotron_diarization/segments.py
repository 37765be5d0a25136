"""From probabilities to segments as they end, and their forms: RTTM, JSON lines, text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from recipes.recipe import UserError


@dataclass(frozen=True)
class Segment:
    """One speaker speaks from `start` to `end`, in seconds of the audio."""

    start: float
    end: float
    speaker: int

    def json(self) -> str:
        return json.dumps({"start": self.start, "end": self.end, "speaker": self.speaker})

    def text(self) -> str:
        return f"{self.start:10.2f} {self.end:10.2f}  speaker {self.speaker}"

    def rttm(self, recording: str) -> str:
        length = self.end - self.start
        return f"SPEAKER {recording} 1 {self.start:.2f} {length:.2f} <NA> <NA> speaker_{self.speaker} <NA> <NA>"


def rttm(segments: Iterable[Segment], name: str) -> str:
    """An RTTM document; the name of a recording holds no blanks there."""
    recording = re.sub(r"\s+", "_", name) or "audio"
    return "".join(segment.rttm(recording) + "\n" for segment in segments)


@dataclass(frozen=True)
class Decision:
    """When a speaker counts as speaking. The defaults are transformers': a threshold, and every frame by itself.

    Speech begins above `threshold` and lasts while above `release` (default: the same). Pauses shorter than `min_gap`
    seconds are filled, then what is shorter than `min_speech` seconds is dropped.
    """

    threshold: float = 0.5
    release: float | None = None
    min_speech: float = 0.0
    min_gap: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("threshold", self.threshold), ("release threshold", self.release)):
            if value is not None and not 0 <= value < 1:
                raise UserError(f"the {name} is a probability, at least 0 and below 1, not {value}")
        if self.release is not None and self.release > self.threshold:
            raise UserError(f"the release threshold ({self.release}) is above the threshold ({self.threshold})")
        for name, value in (("shortest speech", self.min_speech), ("shortest gap", self.min_gap)):
            if not 0 <= value < float("inf"):
                raise UserError(f"the {name} is a number of seconds, not {value}")


class Segmenter:
    """Takes blocks of probabilities in order and gives each segment once it can change no more.

    Blocks may be of any size; the segments do not depend on it. `frame` is the length of one row in seconds.
    """

    def __init__(self, speakers: int, frame: float, decision: Decision):
        self._frame = frame
        self._decision = decision
        self._gap = round(decision.min_gap / frame)
        self._shortest = round(decision.min_speech / frame)
        self._now = 0
        self._active = np.zeros(speakers, bool)
        self._begun = [0] * speakers  # of the run that is active
        self._waiting: list[tuple[int, int] | None] = [None] * speakers  # ended, may still grow over a short gap

    def push(self, probs: np.ndarray) -> list[Segment]:
        """Takes probabilities `[frames, speakers]`; returns the segments that are over, by start and speaker."""
        active = self._decide(probs)
        changes = np.diff(np.concatenate([self._active[None], active]).astype(np.int8), axis=0)
        done: list[tuple[int, int, int]] = []
        for speaker in range(active.shape[1]):
            for row in np.flatnonzero(changes[:, speaker]):
                at = self._now + int(row)
                if changes[row, speaker] > 0:
                    self._begin(speaker, at, done)
                else:
                    self._waiting[speaker] = (self._begun[speaker], at)
        self._now += len(active)
        if len(active):
            self._active = active[-1]
        for speaker, waiting in enumerate(self._waiting):
            if waiting is not None and self._now - waiting[1] >= self._gap:
                self._close(speaker, done)
        return self._segments(done, float("inf"))

    def finish(self, duration: float) -> list[Segment]:
        """The audio is over after `duration` seconds: what is still open ends there."""
        done: list[tuple[int, int, int]] = []
        for speaker, active in enumerate(self._active):
            if active:
                self._waiting[speaker] = (self._begun[speaker], self._now)
            self._close(speaker, done)
        self._active[:] = False
        return self._segments(done, duration)

    def _decide(self, probs: np.ndarray) -> np.ndarray:
        decision = self._decision
        above = probs > decision.threshold
        if decision.release is None or decision.release == decision.threshold or not len(probs):
            return above
        # Between the two thresholds a frame is what the frame before it was.
        known = above | (probs <= decision.release)
        rows = np.where(known, np.arange(len(probs))[:, None], -1)
        latest = np.maximum.accumulate(rows, axis=0)
        decided = np.take_along_axis(above, np.maximum(latest, 0), axis=0)
        return np.where(latest < 0, self._active, decided)

    def _begin(self, speaker: int, at: int, done: list[tuple[int, int, int]]) -> None:
        waiting = self._waiting[speaker]
        if waiting is not None and at - waiting[1] < self._gap:
            self._begun[speaker] = waiting[0]
            self._waiting[speaker] = None
            return
        self._close(speaker, done)
        self._begun[speaker] = at

    def _close(self, speaker: int, done: list[tuple[int, int, int]]) -> None:
        waiting, self._waiting[speaker] = self._waiting[speaker], None
        if waiting is not None and waiting[1] - waiting[0] >= max(self._shortest, 1):
            done.append((waiting[0], speaker, waiting[1]))

    def _segments(self, done: list[tuple[int, int, int]], duration: float) -> list[Segment]:
        def second(frame: int) -> float:
            return min(round(frame * self._frame, 6), duration)

        found = (Segment(second(start), second(end), speaker) for start, speaker, end in sorted(done))
        return [segment for segment in found if segment.start < segment.end]
