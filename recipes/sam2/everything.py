"""`--everything`: a grid of points, each asked for its three masks; what is sure, steady and not found twice remains.

The reference's mask generation on one crop: predicted IoU, stability under a shifted threshold, suppression by boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from recipes.recipe import UserError
from recipes.sam2.masks import Found, stability, suppress
from recipes.sam2.runner import Segmenter
from zoo.console import progress


@dataclass(frozen=True)
class Limits:
    """`grid` points a side; the least predicted IoU and stability of a mask that is kept; the most that the boxes of
    two masks may overlap (IoU)."""

    grid: int = 32
    min_iou: float = 0.88
    min_stability: float = 0.95
    max_overlap: float = 0.7

    def __post_init__(self) -> None:
        if not 1 <= self.grid <= 256:
            raise UserError(f"--grid {self.grid}: give the points of a side, 1 to 256")
        for name in ("min_iou", "min_stability", "max_overlap"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise UserError(f"--{name.replace('_', '-')} {value}: give a number from 0 to 1")


def grid(side: int) -> np.ndarray:
    """Centres of `side` × `side` equal cells of the unit square, float32 `[side², 2]`, row by row."""
    line = (np.arange(side, dtype=np.float32) + np.float32(0.5)) / np.float32(side)
    return np.stack(np.meshgrid(line, line), axis=-1).reshape(-1, 2)


def candidates(segmenter: Segmenter, limits: Limits, advance: Callable[[int], None]) -> Iterator[Found]:
    height, width = segmenter.shape
    places = grid(limits.grid)
    batch = min(segmenter.metadata["max_objects"], len(places))
    for start in range(0, len(places), batch):
        part = places[start : start + batch]
        asked = part[np.arange(batch) % len(part)]  # always as many, so that one plan serves all
        answers = segmenter.run(segmenter.size * asked[None, :, None], np.ones((1, batch, 1), np.int64))
        for place, answer in zip(part, answers, strict=False):
            for logits, score in zip(answer.logits[1:], answer.scores[1:], strict=True):
                if score <= limits.min_iou:
                    continue
                steady = stability(logits, height, width)
                if steady <= limits.min_stability:
                    continue
                at = (float(place[0]) * width, float(place[1]) * height)
                yield Found(logits.copy(), (height, width), float(score), steady, at)
        advance(len(part))


def everything(segmenter: Segmenter, limits: Limits) -> list[Found]:
    """All masks of the picture, the surest first."""
    with progress("every point", limits.grid**2, "point") as advance:
        found = list(candidates(segmenter, limits, advance))
    boxes = np.array([one.box for one in found], np.float64).reshape(-1, 4)
    scores = np.array([one.score for one in found])
    return [found[index] for index in suppress(boxes, scores, limits.max_overlap)]
