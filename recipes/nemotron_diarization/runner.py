"""Who speaks when, from an exported Nemotron diarization model, without torch: samples in, probabilities out.

    samples ─ features.py ─► log-mel frames ─ `stack` ─► encoder frames of 80 ms
    chunk = cached frames (cache.py) + frames + look-ahead ─ `encode` ─► probabilities, one row each 10 ms

Chunks are cut by the number of samples that have arrived, never by how they were fed. `offline` cuts a recording as
transformers' forward does (27 s each, 3 s look-ahead); the streaming modes as its processor does (0.24 to 0.72 s).
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np

from recipes.nemotron_diarization.cache import SpeakerCache
from recipes.nemotron_diarization.features import LogMel
from recipes.recipe import Runnable, UserError

OFFLINE = "offline"


def read_metadata(assets: Path) -> dict[str, Any]:
    """The metadata in `assets`. Raises `UserError` when it is missing or unreadable."""
    try:
        metadata: dict[str, Any] = json.loads((assets / "recipe.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {assets / 'recipe.json'}: {error}; export again") from error
    return metadata


def modes(metadata: dict[str, Any]) -> tuple[str, ...]:
    """The modes that a program has: offline, then the checkpoint's streaming modes."""
    return (OFFLINE, *metadata["streaming_modes"])


class Diarizer:
    """One stream of mono samples at `sample_rate` through one loaded program. A new stream is a new `Diarizer`.

    `assets` is the folder beside the `.pte`. `feed` and `finish` return blocks of probabilities, float
    `[frames, speakers]`, in order and each as soon as it is decided; speakers are numbered by first arrival.
    `dtype` is the float type of the program's inputs, where it is another than the assets say: eager PyTorch's.
    """

    def __init__(
        self, program: Runnable, assets: Path, mode: str = OFFLINE, dtype: type[np.floating[Any]] | None = None
    ):
        self.metadata = meta = read_metadata(assets)
        if mode not in modes(meta):
            raise UserError(f"unknown mode {mode!r}: this model has {', '.join(modes(meta))}")
        self.sample_rate: int = meta["sampling_rate"]
        self.speakers: int = meta["num_speakers"]
        self.frame_seconds: float = meta["hop_length"] / meta["sampling_rate"]
        self._program = program
        self._inputs = np.dtype(dtype or meta["input_dtype"])
        self._host = np.dtype(dtype or np.float32)
        self._factor: int = meta["subsampling_factor"]
        self._streaming = mode != OFFLINE
        sizes: dict[str, int] = meta["offline"] if mode == OFFLINE else meta["streaming"]
        self._chunk, self._ahead, self._back = (
            (*meta["streaming_modes"][mode], 0)
            if self._streaming
            else (sizes["chunk_length"], sizes["chunk_right_context"], sizes["chunk_left_context"])
        )
        self._mel = LogMel(meta, _load(assets, "window"), _load(assets, "mel_filters"))
        silence = _load(assets, "silence").astype(self._host)
        self._cache = SpeakerCache(
            meta["streaming"],
            silence,
            sizes["fifo_length"],
            sizes["speaker_cache_update_period"],
            self.speakers,
            self._factor,
        )
        self._embeds = np.zeros((0, len(silence)), self._host)
        self._first = 0  # the encoder frame that `_embeds` begins with
        self._start = 0  # the encoder frame that the next chunk begins with
        self._finished = False

    def copy(self, program: Runnable | None = None) -> Diarizer:
        """The same stream once more, which goes on by itself, in `program` when one is given."""
        # The program is shared, not copied.
        return copy.deepcopy(self, {id(self._program): program or self._program})

    @property
    def seconds(self) -> float:
        """Of audio, received so far."""
        return self._mel.received / self.sample_rate

    @property
    def latency(self) -> float:
        """Seconds of audio that a chunk waits for: itself and its look-ahead."""
        return (self._chunk + self._ahead) * self._factor * self.frame_seconds

    def feed(self, samples: np.ndarray) -> list[np.ndarray]:
        """Takes samples `[n]`, any number at a time. Raises `UserError` where one is not a finite number."""
        if self._finished:
            raise ValueError("the stream is finished")
        samples = np.asarray(samples)
        if not np.isfinite(samples).all():
            second = (self._mel.received + int(np.argmin(np.isfinite(samples)))) / self.sample_rate
            raise UserError(f"the audio holds a sample that is not a finite number, at {second:.3f} s")
        self._mel.push(samples)
        blocks = []
        while self._mel.received >= self._needed():
            end = self._start + self._chunk
            self._extend(end + self._ahead, (end + self._ahead) * self._factor)
            blocks.append(self._step(end, end + self._ahead, end + self._ahead))
        return blocks

    def finish(self) -> list[np.ndarray]:
        """The rest: what waited for samples that never came. Audio of less than one frame (10 ms) has none."""
        if self._finished:
            return []
        self._finished = True
        total = self._mel.total
        valid = -(-total // self._factor)
        # Offline, transformers' feature extractor adds one frame, masked: where it begins an encoder frame of its
        # own, nothing attends to that one, but the upsampling of the last frame sees it.
        last = valid if self._streaming else -(-(total + 1) // self._factor)
        blocks = []
        if total:
            self._extend(last, total)
        while self._start * self._factor < total:
            start = self._start
            end = last if self._streaming else min(start + self._chunk, last)
            blocks.append(self._step(end, min(end + self._ahead, last), valid)[: total - start * self._factor])
        return blocks

    def _needed(self) -> int:
        """Samples that must have arrived before the next chunk may run."""
        frames = (self._start + self._chunk + self._ahead) * self._factor
        needed = self._mel.needed(frames)
        if self._streaming and self._start:
            # The processor cuts later chunks half a transform before their first frame and one window longer.
            meta = self.metadata
            needed = frames * self._mel.hop - meta["n_fft"] // 2 + meta["win_length"]
        return needed

    def _extend(self, end: int, frames: int) -> None:
        """Makes encoder frames up to `end`, of the log-mel frames below `frames` and zeros after them."""
        have = self._first + len(self._embeds)
        limit: int = self.metadata["max_stack"]
        while have < end:
            upto = min(have + limit, end)
            mel = self._mel.take(min(upto * self._factor, frames))
            padded = np.zeros(((upto - have) * self._factor, mel.shape[1]), self._inputs)
            padded[: len(mel)] = mel
            (made,) = self._program.run("stack", padded.reshape(1, upto - have, self._factor, -1))
            self._embeds = np.concatenate([self._embeds, made[0].astype(self._host)])
            have = upto

    def _step(self, end: int, ahead: int, valid: int) -> np.ndarray:
        """Runs the chunk from the next frame to `end`, look-ahead to `ahead`; frames from `valid` on are masked."""
        start, factor = self._start, self._factor
        lookback = min(self._back, start)
        begin = start - lookback
        context = self._cache.context()
        chunk = self._embeds[begin - self._first : ahead - self._first]
        inputs = np.concatenate([context, chunk])
        attended = len(context) + min(valid, ahead) - begin
        # Few lengths instead of many: a plan is kept for each.
        multiple: int = self.metadata["length_multiple"]
        padded = np.zeros((-(-len(inputs) // multiple) * multiple, inputs.shape[1]), self._inputs)
        padded[: len(inputs)] = inputs
        lengths = np.array([attended, len(inputs)], np.int64)
        (output,) = self._program.run("encode", padded[None], lengths)
        probs = output[0, : len(inputs) * factor].astype(self._host)
        if not np.isfinite(probs).all():
            raise UserError("the program produced probabilities that are not finite: nothing more is written")
        self._cache.update(inputs, probs, end - start, attended, lookback)
        self._start = end
        drop = max(end - self._back, 0) - self._first
        self._embeds, self._first = self._embeds[drop:], self._first + drop
        offset = (len(context) + lookback) * factor
        return probs[offset : offset + (end - start) * factor]


def _load(assets: Path, name: str) -> np.ndarray:
    path = assets / f"{name}.npy"
    try:
        array: np.ndarray = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}; export again") from error
    return array
