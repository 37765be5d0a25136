"""What the Florence-2 tests share: a tiny bundle with its assets, a picture, programs that record or are scripted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recipes.eager import EagerProgram
from recipes.florence2.runner import Florence
from recipes.recipe import Bundle

PICTURE = np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8)


@dataclass
class Ready:
    bundle: Bundle
    assets: Path
    program: EagerProgram

    def florence(self, program: Any = None, pixels: np.ndarray = PICTURE) -> Florence:
        florence = Florence(program or self.program, self.assets)
        florence.see(pixels)
        return florence

    def scripted(self, text: str, pixels: np.ndarray = PICTURE) -> Florence:
        """A program that answers every prompt with `text`."""
        tokenizer = Florence(self.program, self.assets).tokenizer
        return self.florence(Scripted(tokenizer.encode(f"<s>{text}</s>", add_special_tokens=False).ids), pixels)


class Scripted:
    """Finds the tokens of a script likeliest, one after the other, whatever it is shown."""

    def __init__(self, script: Iterable[int], vocabulary: int = 1408):
        self._script, self._vocabulary = list(script), vocabulary

    def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
        logits = np.zeros((arrays[0].shape[-1], self._vocabulary), np.float32)
        if method == "step":
            logits[:, self._script[min(int(arrays[1][0]), len(self._script) - 1)]] = 50
        return [logits]


class Recorded:
    """A program whose calls are counted by method; `slots` and `visible` are those of each step."""

    def __init__(self, program: EagerProgram):
        self.methods: list[str] = []
        self.slots: list[np.ndarray] = []
        self._program = program

    def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
        self.methods.append(method)
        if method == "step":
            self.slots.append(arrays[2])
        return self._program.run(method, *arrays)
