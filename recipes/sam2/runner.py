"""SAM 2 from pictures and prompts to masks, with an exported program and without torch.

picture ─ masks.as_pixels ─► encode (kept by the program) ─┐     bytes in, nothing out where results can stay on the GPU
prompt ─ prompts.Prompt.tokens ─► prompt(points, labels, mask) → logits, predicted IoU ─ masks.mask_of ─► masks
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from backend.graph import ShapeError
from backend.runtime.errors import DeviceError
from recipes.recipe import Runnable, UserError
from recipes.sam2.masks import Found, as_mask_prompt, as_pixels
from recipes.sam2.prompts import Prompt
from zoo.program import keep


@dataclass(frozen=True)
class Answer:
    """To one prompt: logits `[4, h, w]`, predicted IoU `[4]` (first the mask for an unambiguous prompt, then three for
    an ambiguous one), and the logit that there is an object."""

    logits: np.ndarray
    scores: np.ndarray
    object_score: float

    def choice(self, multimask: bool, rule: dict[str, Any]) -> list[int]:
        """Which masks answer, best first: the three, or the one that the reference takes.

        That is the first, unless its area depends much on the threshold; then the best of the three.
        """
        several = [1 + int(index) for index in np.argsort(-self.scores[1:], kind="stable")]
        if multimask:
            return several
        if not rule["use"]:
            return [0]
        outer = (self.logits[0] > -rule["delta"]).sum()
        steady = (self.logits[0] > rule["delta"]).sum() / outer if outer else 1.0
        return [0] if steady >= rule["threshold"] else several[:1]


class Segmenter:
    """Answers prompts with one loaded program, which keeps the picture. `assets` is the folder beside the `.pte`."""

    def __init__(self, program: Runnable, assets: Path):
        try:
            self.metadata: dict[str, Any] = json.loads((assets / "recipe.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {assets / 'recipe.json'}: {error}; export again") from error
        self.size: int = self.metadata["size"]
        self.mask_size: int = self.metadata["mask_size"]
        self._program = program
        self._shape: tuple[int, int] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the picture. Raises `UserError` before there is one."""
        if self._shape is None:
            raise UserError("there is no picture yet")
        return self._shape

    def look(self, picture: np.ndarray) -> None:
        """Encodes a picture uint8 `[H, W, 3]`, which the prompts that follow are about.

        Does not wait for the GPU where the program's results can stay on it: what goes wrong there is told by the first
        prompt. Raises `UserError` for a program of an older version.
        """
        self._shape = None
        try:
            keep(self._program, "encode", as_pixels(picture, self.size))
        except ShapeError as error:  # it took normalised floats
            raise UserError("the program is one of an older version: export again") from error
        self._shape = (picture.shape[0], picture.shape[1])

    def ask(self, prompt: Prompt) -> Answer:
        """The answer to one prompt. Raises `UserError` for one that does not fit the picture."""
        height, width = self.shape
        prompt.check(width, height, self.metadata["max_points"])
        return self.run(*prompt.tokens(width, height, self.size), prompt.mask)[0]

    def run(self, points: np.ndarray, labels: np.ndarray, mask: np.ndarray | None = None) -> list[Answer]:
        """Answers to P prompts at once: points `[1, P, N, 2]` in pixels of the encoder's square, labels `[1, P, N]`.

        Raises `DeviceError` when the GPU fails, after which there is no picture.
        """
        side = self.mask_size
        dense = np.zeros((1, 1, side, side), np.float32) if mask is None else mask.reshape(1, 1, side, side)
        has_mask = np.array([mask is not None])
        try:
            logits, scores, present = self._program.run("prompt", points, labels, dense.astype(np.float32), has_mask)
        except DeviceError:
            self._shape = None  # it may not have been encoded, and a new device has nothing of it
            raise
        if not (np.isfinite(logits).all() and np.isfinite(scores).all()):
            raise UserError("the program produced masks that are not finite: nothing is written")
        return [
            Answer(logits[0, index], scores[0, index], float(present[0, index, 0])) for index in range(points.shape[1])
        ]

    def masks(self, answer: Answer, multimask: bool) -> list[Found]:
        """The chosen masks of an answer at the picture's size, best first."""
        chosen = answer.choice(multimask, self.metadata["stability"])
        return [Found(answer.logits[index], self.shape, float(answer.scores[index])) for index in chosen]

    def mask_prompt(self, mask: np.ndarray) -> np.ndarray:
        return as_mask_prompt(mask, self.mask_size)
