"""Masks into files: a PNG for each, the picture with them laid over it, COCO's JSON. All appear, or none."""

from __future__ import annotations

import colorsys
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from recipes.recipe import UserError
from recipes.sam2.masks import Found
from recipes.sam2.prompts import NEGATIVE, Prompt
from zoo.files import check_output, staged

# The most pixels of a side that each format can say.
_LIMITS = {".png": 2**31 - 1, ".jpg": 65500, ".jpeg": 65500, ".webp": 16383}
_BAND = 256  # rows that are blended at once
_MOST_LABELS = 65535


@dataclass(frozen=True)
class Outputs:
    """Where to write: `mask` (a PNG; several masks get numbers), `overlay`, `rle` (JSON)."""

    mask: Path | None = None
    overlay: Path | None = None
    rle: Path | None = None

    def check(self, width: int = 1, height: int = 1) -> None:
        """Raises `UserError` for what cannot be written; called before the work."""
        if self.mask is not None and self.mask.suffix.lower() != ".png":
            raise UserError(f"{self.mask}: a mask is written as .png")
        if self.overlay is not None:
            limit = _LIMITS.get(self.overlay.suffix.lower())
            if limit is None:
                raise UserError(f"{self.overlay}: the ending decides the format: choose one of {', '.join(_LIMITS)}")
            if max(width, height) > limit:
                kind = self.overlay.suffix[1:]
                raise UserError(f"{self.overlay}: {width}×{height} is more than {kind} can hold: use .png")
        if self.rle is not None and self.rle.suffix.lower() != ".json":
            raise UserError(f"{self.rle}: run lengths are written as .json")
        paths = self.paths
        for path in paths:
            check_output(path)
        if len({path.absolute() for path in paths}) < len(paths):
            raise UserError("two outputs have the same name")

    @property
    def paths(self) -> list[Path]:
        return [path for path in (self.mask, self.overlay, self.rle) if path is not None]

    def masks(self, count: int) -> list[Path]:
        """Names of the mask files: `mask.png`, or with several masks `mask-1.png` (the best), `mask-2.png`, …"""
        if self.mask is None:
            return []
        if count == 1:
            return [self.mask]
        return [self.mask.with_name(f"{self.mask.stem}-{number + 1}.png") for number in range(count)]


def write(
    outputs: Outputs,
    picture: np.ndarray,
    found: Sequence[Found],
    document: dict[str, Any],
    prompt: Prompt | None,
    labels: bool = False,
) -> list[Path]:
    """Writes what `outputs` names and returns the paths; with `labels` one PNG of numbers in place of the masks."""
    masks = outputs.masks(1 if labels else len(found))
    for path in masks:
        check_output(path)
    paths = [*masks, *(path for path in (outputs.overlay, outputs.rle) if path is not None)]
    if not paths:
        return []
    with ExitStack() as stack:
        parts = dict(zip(paths, stack.enter_context(staged(*paths)), strict=True))
        if labels and masks:
            _save(Image.fromarray(label_picture(found, picture.shape[:2])), parts[masks[0]], masks[0])
        elif masks:
            for path, one in zip(masks, found, strict=True):
                _save(Image.fromarray(one.mask.astype(np.uint8) * np.uint8(255)), parts[path], path)
        if outputs.overlay is not None:
            _save(overlay(picture, found, prompt), parts[outputs.overlay], outputs.overlay)
        if outputs.rle is not None:
            parts[outputs.rle].write_text(json.dumps(document, allow_nan=False) + "\n", encoding="utf-8")
    return paths


def _save(image: Image.Image, part: Path, path: Path) -> None:
    kind = {".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}.get(path.suffix.lower(), "PNG")
    with open(part, "wb") as file:  # the temporary name has no ending that would say the format
        image.save(file, kind, **({"quality": 95} if kind != "PNG" else {}))


def label_picture(found: Sequence[Found], shape: tuple[int, ...]) -> np.ndarray:
    """uint16 `[H, W]`: at each pixel the number of the smallest mask that covers it, from 1 on, 0 where none does."""
    if len(found) > _MOST_LABELS:
        raise UserError(f"{len(found)} masks are more than a PNG of numbers can hold: use --rle")
    labels = np.zeros(shape, np.uint16)
    for index in sorted(range(len(found)), key=lambda index: -found[index].annotation["area"]):
        labels[found[index].mask] = index + 1
    return labels


def colour(index: int) -> np.ndarray:
    """Colours that differ from their neighbours in the order: hues a golden section apart."""
    return np.rint(255 * np.array(colorsys.hsv_to_rgb((0.58 + 0.618034 * index) % 1, 0.85, 1.0)))


def overlay(picture: np.ndarray, found: Sequence[Found], prompt: Prompt | None) -> Image.Image:
    """The picture with the masks over it in colour, their edges in white, and what was asked: points of the object
    green, of the background red, the box yellow."""
    out = picture.copy()
    # The largest first, so that small ones lie on top.
    for index in sorted(range(len(found)), key=lambda index: -found[index].annotation["area"]):
        mask, paint = found[index].mask, colour(index)
        for top in range(0, len(out), _BAND):
            low, high = max(top - 1, 0), min(top + _BAND + 1, len(mask))
            around = mask[low:high]
            part = mask[top : top + _BAND]
            if not around.any():
                continue
            band = out[top : top + _BAND]
            band[part] = np.rint(0.5 * band[part] + 0.5 * paint).astype(np.uint8)
            band[part & ~_inner(around)[top - low : top - low + len(part)]] = 255
    image = Image.fromarray(out)
    if prompt is not None:
        _draw(ImageDraw.Draw(image), prompt, max(2, round(min(picture.shape[:2]) / 100)))
    return image


def _inner(mask: np.ndarray) -> np.ndarray:
    """Pixels all whose four neighbours belong to the mask; beyond the border everything does."""
    inner = mask.copy()
    inner[1:] &= mask[:-1]
    inner[:-1] &= mask[1:]
    inner[:, 1:] &= mask[:, :-1]
    inner[:, :-1] &= mask[:, 1:]
    return inner


def _draw(draw: ImageDraw.ImageDraw, prompt: Prompt, radius: int) -> None:
    line = max(1, radius // 3)
    if prompt.box is not None:
        x1, y1, x2, y2 = prompt.box
        draw.rectangle((x1, y1, x2 - 1, y2 - 1), outline="yellow", width=line)
    for (x, y), label in zip(prompt.points, prompt.labels, strict=True):
        if label >= 0:
            fill = "red" if label == NEGATIVE else "lime"
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill, outline="white", width=line)
