"""The streaming state in numpy: the arrival-order speaker cache and the FIFO queue of recent encoder frames.

`SpeakerCache` does what transformers' `Nemotron3DiarizationSpeakerCache` does for one stream, to the bit in float32:
the same sums in the same order, and the same frame where scores are equal. It takes probabilities, as the exported
program returns them, where transformers takes logits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from recipes.nemotron_diarization.topk import top_indices


class SpeakerCache:
    """`policy` holds the fields of `Nemotron3DiarizationStreamingConfig`; `silence` is the learned embedding `[H]`.

    Frames are encoder frames (80 ms in the released model), each `factor` frames of probabilities.
    """

    def __init__(
        self,
        policy: dict[str, Any],
        silence: np.ndarray,
        fifo_length: int,
        update_period: int,
        speakers: int,
        factor: int,
    ):
        self.fifo_length, self.update_period = fifo_length, update_period
        self.length: int = policy["speaker_cache_length"]
        self.silence_frames: int = policy["speaker_cache_silence_frames_per_speaker"]
        self.score_threshold: float = policy["prediction_score_threshold"]
        self.latest_boost: float = policy["latest_frames_score_boost"]
        self.factor = factor
        # What every speaker may keep, less the slots of silence; the policy spends shares of it.
        budget = self.length // speakers - self.silence_frames
        self.min_positive = math.floor(budget * policy["min_positive_scores_rate"])
        self.strong = math.floor(budget * policy["strong_boost_rate"])
        self.weak = math.floor(budget * policy["weak_boost_rate"])
        self.silence = silence
        self.embeds = np.zeros((0, silence.shape[0]), silence.dtype)
        self.probs = np.zeros((0, speakers), silence.dtype)
        self.fifo = np.zeros((0, silence.shape[0]), silence.dtype)
        self.compressed = False

    def context(self) -> np.ndarray:
        """What every chunk attends to: the cached frames, then the FIFO queue, `[frames, H]`."""
        return np.concatenate([self.embeds, self.fifo])

    def update(self, embeds: np.ndarray, probs: np.ndarray, chunk: int, valid: int, lookback: int = 0) -> None:
        """Pushes the chunk of a step to the FIFO queue; what it cannot hold moves to the speaker cache.

        `embeds` `[frames, H]` are the step's input: `context()`, `lookback` frames, the `chunk` frames, look-ahead.
        `probs` `[frames * factor, speakers]` are what it gave; frames from `valid` on are padding.
        """
        cached, queued = len(self.embeds), len(self.fifo)
        pooled = self._pool(probs)
        pooled[valid:] = 0
        start = cached + queued + lookback
        fifo = np.concatenate([self.fifo, embeds[start : start + chunk]])
        popped = 0
        if len(fifo) > self.fifo_length:
            popped = min(max(self.update_period, len(fifo) - self.fifo_length), len(fifo))
        if popped:
            fifo_probs = np.concatenate([pooled[cached : cached + queued], pooled[start : start + chunk]])
            # A compressed cache is out of order: only what was stored with its frames is known of them. Before,
            # its frames are plain ones, which this step has judged again.
            known = self.probs if self.compressed else pooled[:cached]
            self.embeds = np.concatenate([self.embeds, fifo[:popped]])
            self.probs = np.concatenate([known, fifo_probs[:popped]])
            if len(self.embeds) > self.length:
                self._compress()
        self.fifo = fifo[popped:]

    def _pool(self, probs: np.ndarray) -> np.ndarray:
        """Means over the frames of one encoder frame, added in order."""
        groups = probs.reshape(-1, self.factor, probs.shape[1])
        total = groups[:, 0].copy()
        for index in range(1, self.factor):
            total += groups[:, index]
        pooled: np.ndarray = (total / self.factor).astype(self.silence.dtype)
        return pooled

    def _scores(self, probs: np.ndarray) -> np.ndarray:
        """How much a frame says about a speaker: its own speech, alone. -inf where it says nothing."""
        log_probs = _log(np.maximum(probs, self.score_threshold))
        log_rest = _log(np.maximum(1 - probs, self.score_threshold))
        total = log_rest[:, 0].copy()
        for speaker in range(1, probs.shape[1]):
            total += log_rest[:, speaker]
        scores = log_probs - log_rest + total[:, None] - math.log(0.5)
        speech = probs > 0.5
        scores[~speech] = -np.inf
        positive = scores > 0
        enough = positive.sum(axis=0, keepdims=True) >= self.min_positive
        scores[~positive & speech & enough] = -np.inf
        return scores

    def _compress(self) -> None:
        """Keeps the `length` most telling frames, by speaker and in order of time, among them slots of silence."""
        frames = len(self.probs)
        scores = self._scores(self.probs)
        scores[self.length :] += self.latest_boost
        for count, boost in ((self.strong, -2.0 * math.log(0.5)), (self.weak, -math.log(0.5))):
            for column in scores.T:
                column[top_indices(column, count)] += boost
        silence = np.full((self.silence_frames, scores.shape[1]), np.inf, scores.dtype)
        scores = np.concatenate([scores, silence])
        flat = np.ascontiguousarray(scores.T).reshape(-1)
        chosen = top_indices(flat, self.length)
        # What has no score becomes silence at the end of the cache.
        nothing = flat.size
        chosen = np.sort(np.where(np.isneginf(flat[chosen]), nothing, chosen))
        rows = np.where(chosen == nothing, frames, np.minimum(chosen % len(scores), frames))
        embeds = np.concatenate([self.embeds, self.silence[None]])
        probs = np.concatenate([self.probs, np.zeros_like(self.probs[:1])])
        self.embeds, self.probs = embeds[rows], probs[rows]
        self.compressed = True


def _log(values: np.ndarray) -> np.ndarray:
    # Rounded once, as the library behind torch does for all but a thousandth of its values; numpy's float32 log not.
    logs: np.ndarray = np.log(values.astype(np.float64)).astype(values.dtype)
    return logs
