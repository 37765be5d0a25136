"""What `zoo bench phonon` times: the first frame of a text, and speech, in seconds for each second of audio.

Sides: the exported programs; where results stay on the GPU (`--runtime direct`), `<backend>, in turn` too, which makes
one call after the other from arrays to arrays; and `eager`, PyTorch in float32 on the CPU. All make the same samples.
"""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from recipes.eager import EagerProgram
from recipes.phonon import checkpoint as checkpoints
from recipes.phonon.build import make_bundle
from recipes.phonon.runner import Speaker
from recipes.recipe import ExportRequest, Runnable, UserError, Workload

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 3
FRAMES = 25
SEED = 7


@dataclass(frozen=True)
class _Side:
    """A speaker, and the folder from which it reads the voice at every text."""

    speaker: Speaker
    folder: tempfile.TemporaryDirectory[str]

    def speak(self, frames: int) -> np.ndarray:
        stream = self.speaker.stream(TEXT, seed=SEED)
        with contextlib.closing(stream):
            made = list(islice(stream, frames))
        if len(made) < frames:
            raise UserError(f"the text ended after {len(made)} frames of {frames}")
        if self.speaker.works_ahead and frames > 1:
            from backend.runtime.device import get_device

            # The frame that was begun ahead and dropped is this side's work, not that of the next one.
            get_device().flush()
        return np.concatenate(made)


def workloads(programs: Mapping[str, Runnable], request: ExportRequest) -> list[Workload]:
    """The first frame, and `FRAMES` of them."""
    bundle = make_bundle(checkpoints.load(request.weights))
    folder = tempfile.TemporaryDirectory()
    assets = Path(folder.name)
    bundle.write_assets(assets)
    (assets / "recipe.json").write_text(json.dumps(bundle.metadata), encoding="utf-8")
    speakers = {side: Speaker(program, assets) for side, program in programs.items()}
    for side, program in programs.items():
        if speakers[side].works_ahead:
            speakers[f"{side}, in turn"] = Speaker(program, assets, ahead=False)
    speakers["eager"] = Speaker(EagerProgram(bundle), assets)
    sides = {name: _Side(speaker, folder) for name, speaker in speakers.items()}

    def calls(frames: int) -> dict[str, Callable[[], object]]:
        return {name: functools.partial(side.speak, frames) for name, side in sides.items()}

    seconds = FRAMES / bundle.metadata["frame_rate"]
    return [
        Workload("first audio", "frame", 1, calls(1)),
        Workload(f"{FRAMES} frames", "second of audio", seconds, calls(FRAMES)),
    ]
