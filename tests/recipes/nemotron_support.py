"""What the tests of Nemotron diarization share: audio, and a tiny checkpoint that is ready to run in eager PyTorch."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support import write_assets

from recipes.eager import EagerProgram
from recipes.nemotron_diarization import checkpoint, voices
from recipes.nemotron_diarization.build import make_bundle
from recipes.nemotron_diarization.runner import Diarizer
from recipes.recipe import Bundle

RATE = 16000
MODES = ("offline", "low_latency", "very_low_latency", "ultra_low_latency")


def talk(seconds: float) -> np.ndarray:
    """Two espeak-ng voices in turn over noise; invented voices where espeak-ng is not installed."""
    if shutil.which("espeak-ng") is None:
        return voices.conversation(seconds, seed=5)[0]
    turns: list[np.ndarray] = []
    while sum(map(len, turns)) < seconds * RATE:
        voice, text = (("en-us+m3", "So who is coming tonight?"), ("en-gb+f2", "Nobody told me yet."))[len(turns) % 2]
        wav = subprocess.run(["espeak-ng", "-v", voice, "--stdout", text], capture_output=True, check=True).stdout
        samples = np.frombuffer(wav[44:], "<i2").astype(np.float32) / 32768  # 22.05 kHz
        turns.append(np.interp(np.arange(0, len(samples), 22050 / RATE), np.arange(len(samples)), samples))
    noise = np.random.default_rng(0).standard_normal(round(seconds * RATE))
    return (np.concatenate(turns)[: len(noise)] + 1e-3 * noise).astype(np.float32)


@dataclass
class Ready:
    """A tiny checkpoint, and its bundle with assets on disk, run in eager PyTorch."""

    model: Any
    processor: Any
    bundle: Bundle
    assets: Path
    program: EagerProgram

    def run(self, samples: np.ndarray, mode: str = "offline", size: int | None = None) -> np.ndarray:
        diarizer = Diarizer(self.program, self.assets, mode)
        pieces = [samples] if size is None else [samples[at : at + size] for at in range(0, len(samples), size)]
        blocks = [block for piece in pieces for block in diarizer.feed(piece)] + diarizer.finish()
        return np.concatenate([np.zeros((0, diarizer.speakers), np.float32), *blocks])


def make_ready(source: checkpoint.Checkpoint, folder: Path) -> Ready:
    bundle = make_bundle(source)
    return Ready(source.model, source.processor, bundle, write_assets(bundle, folder), EagerProgram(bundle))


def offline(ready: Ready, samples: np.ndarray) -> np.ndarray:
    """transformers' own result for a whole recording: probabilities `[frames, speakers]`."""
    inputs = ready.processor(samples, sampling_rate=RATE)
    with torch.no_grad():
        probs = ready.model(**inputs).logits.sigmoid()[0]
    return probs[inputs["attention_mask"][0].bool()].numpy()
