"""What can be asked of a picture: points, a box, a mask; from options of the command line and from JSON lines.

Coordinates are x, y in pixels of the picture, from its upper left corner. Raises `UserError` for what is malformed or
lies outside the picture.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recipes.recipe import UserError
from zoo.pictures import read_rgb

POSITIVE, NEGATIVE, CORNERS = 1, 0, (2, 3)


@dataclass(frozen=True)
class Prompt:
    """One object. `labels`: 1 for a point of it, 0 for one of the background, -1 for none; `box`: x1, y1, x2, y2;
    `mask`: logits of a mask prompt at the decoder's resolution."""

    points: tuple[tuple[float, float], ...] = ()
    labels: tuple[int, ...] = ()
    box: tuple[float, float, float, float] | None = None
    mask: np.ndarray | None = None

    def __post_init__(self) -> None:
        if len(self.points) != len(self.labels):
            raise UserError(f"{len(self.points)} points and {len(self.labels)} labels: give one label for each point")
        for label in self.labels:
            if label not in (-1, NEGATIVE, POSITIVE):
                raise UserError(f"label {label}: 1 is a point of the object, 0 one of the background, -1 none")
        if not self.points and self.box is None and self.mask is None:
            raise UserError("nothing is asked: give a point, a box or a mask")

    def check(self, width: int, height: int, most: int) -> None:
        """Raises `UserError` for coordinates outside a picture of this size and for more than `most` points."""
        size = f"the picture, which is {width}×{height}"
        for (x, y), label in zip(self.points, self.labels, strict=True):
            if label >= 0 and not (0 <= x < width and 0 <= y < height):
                raise UserError(f"point {x:g},{y:g} lies outside {size}")
        if self.box is not None:
            x1, y1, x2, y2 = self.box
            if not (x1 < x2 and y1 < y2):
                raise UserError(f"box {_text(self.box)}: give x1,y1,x2,y2 with x1 < x2 and y1 < y2")
            if min(x1, y1) < 0 or x2 > width or y2 > height:
                raise UserError(f"box {_text(self.box)} lies outside {size}")
        count = len(self.points) + (2 if self.box is not None else 0)
        if count > most:
            raise UserError(f"{count} points are too many: the program takes {most}")

    def tokens(self, width: int, height: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Points float32 `[1, 1, N, 2]` in pixels of the encoder's square, labels int64 `[1, 1, N]`, corners last."""
        points, labels = list(self.points), list(self.labels)
        if self.box is not None:
            points += [self.box[:2], self.box[2:]]
            labels += CORNERS
        if not points:  # the reference prompts a mask alone with one place that is no point
            points, labels = [(0.0, 0.0)], [-1]
        scale = np.array([size / width, size / height], np.float32)
        return np.asarray(points, np.float32)[None, None] * scale, np.asarray(labels, np.int64)[None, None]


def _text(numbers: Sequence[float]) -> str:
    return ",".join(f"{number:g}" for number in numbers)


def _numbers(values: Sequence[Any], count: int, what: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError, OverflowError):
        numbers = ()
    if len(numbers) != count or not all(math.isfinite(number) for number in numbers):
        form = "x,y" if count == 2 else "x1,y1,x2,y2"
        raise UserError(f"{what}: give {form} in pixels, as in {'420,310' if count == 2 else '10,20,200,220'}")
    return numbers


def _point(values: Sequence[Any], what: str) -> tuple[float, float]:
    x, y = _numbers(values, 2, what)
    return x, y


def _box(values: Sequence[Any], what: str) -> tuple[float, float, float, float]:
    x1, y1, x2, y2 = _numbers(values, 4, what)
    return x1, y1, x2, y2


def parse_point(text: str, option: str) -> tuple[float, float]:
    return _point(text.split(","), f"{option} {text}")


def parse_box(text: str) -> tuple[float, float, float, float]:
    return _box(text.split(","), f"--box {text}")


def from_options(points: Sequence[str], negatives: Sequence[str], boxes: Sequence[str]) -> Prompt | None:
    """The prompt of the options, None when there is none of them."""
    if len(boxes) > 1:
        raise UserError(f"{len(boxes)} boxes: one --box is one object; ask for several with --interactive")
    if not points and not negatives and not boxes:
        return None
    places = [parse_point(text, "--point") for text in points]
    places += [parse_point(text, "--negative") for text in negatives]
    labels = [POSITIVE] * len(points) + [NEGATIVE] * len(negatives)
    return Prompt(tuple(places), tuple(labels), parse_box(boxes[0]) if boxes else None)


KEYS = ("points", "labels", "box", "mask", "multimask", "picture", "output", "overlay", "id")


def read_line(line: str) -> dict[str, Any]:
    """The JSON object of a line of `--interactive`."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not JSON: {error}") from None
    if not isinstance(request, dict):
        raise UserError('not a JSON object: give {"points": [[x, y], …]} or {"box": [x1, y1, x2, y2]}')
    return request


def check_request(request: dict[str, Any]) -> None:
    """Raises `UserError` for keys that there are not, and for values of the wrong kind."""
    if unknown := sorted(set(request) - set(KEYS)):
        raise UserError(f"unknown key {', '.join(unknown)}: choose from {', '.join(KEYS)}")
    for name in ("picture", "output", "overlay"):
        if not isinstance(request.get(name, ""), str):
            raise UserError(f"{name}: give the path of a file")
    if not isinstance(request.get("multimask", False), bool):
        raise UserError("multimask: give true or false")


def from_json(request: dict[str, Any], mask: np.ndarray | None) -> Prompt:
    """The prompt of a JSON object; `mask` is what its key of this name stands for."""
    points, box = request.get("points", []), request.get("box")
    if not isinstance(points, list) or not all(isinstance(point, list) for point in points):
        raise UserError("points: give a list of [x, y]")
    labels = request.get("labels", [POSITIVE] * len(points))
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise UserError("labels: give a list of 1, 0 or -1, one for each point")
    if box is not None and not isinstance(box, list):
        raise UserError("box: give [x1, y1, x2, y2]")
    places = tuple(_point(point, f"point {point}") for point in points)
    corners = None if box is None else _box(box, f"box {box}")
    return Prompt(places, tuple(labels), corners, mask)


def read_mask(path: Path, width: int, height: int) -> np.ndarray:
    """A mask bool `[H, W]` from a picture: light is the object. It must be of the picture's size."""
    pixels = read_rgb(path)
    if pixels.shape[:2] != (height, width):
        raise UserError(f"mask {path} is {pixels.shape[1]}×{pixels.shape[0]}, the picture {width}×{height}")
    return pixels.max(2) > 127
