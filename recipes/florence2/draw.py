"""An answer drawn on its picture, with Pillow: boxes, quads and polygons, numbered, and a legend below."""

from __future__ import annotations

import colorsys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from recipes.florence2.runner import Answer, found
from recipes.recipe import UserError
from zoo import files

_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
_LIMITS = {"PNG": 2**31 - 1, "JPEG": 65500, "WEBP": 16383}  # pixels of a side
_FILL = 70  # of 255: how much of a polygon's colour covers what is under it
_NARROWEST = 20  # letters that a line of the legend has room for
Colour = tuple[int, int, int]


def check_output(path: Path, pixels: np.ndarray) -> None:
    """Raises `UserError` when the picture, uint8 `[H, W, 3]`, cannot be written at `path`; before the work."""
    kind = _FORMATS.get(path.suffix.lower())
    if kind is None:
        raise UserError(f"{path}: the ending decides the format: choose one of {', '.join(_FORMATS)}")
    if max(pixels.shape[:2]) > _LIMITS[kind]:
        height, width = pixels.shape[:2]
        raise UserError(f"{path}: {width}×{height} is more than {path.suffix[1:]} can hold: use .png")
    files.check_output(path)


def save(path: Path, pixels: np.ndarray, answer: Answer) -> None:
    """Writes the picture with the answer on it. Raises `UserError`; what was at `path` stays then."""
    check_output(path, pixels)
    drawn = draw(pixels, answer)
    check_output(path, np.asarray(drawn))  # the legend makes it taller
    kind = _FORMATS[path.suffix.lower()]
    with files.atomic_file(path) as file:
        drawn.save(file, kind, **({} if kind == "PNG" else {"quality": 95}))


def draw(pixels: np.ndarray, answer: Answer) -> Image.Image:
    """The picture, uint8 `[H, W, 3]`, with what was found on it and a legend below it, which may be wider."""
    things = list(found(answer))
    labels = list(dict.fromkeys(label for label, _ in things))
    colours = dict(zip(labels, _colours(len(labels)), strict=True))
    picture = Image.fromarray(pixels)
    size = max(10, round(max(picture.size) / 55))
    font = ImageFont.load_default(size)
    picture = _filled(picture, [(colours[label], place) for label, place in things if _is_rings(place)])
    pen = ImageDraw.Draw(picture)
    for number, (label, place) in enumerate(things, 1):
        rings = [ring for ring in place if len(ring) >= 4] if _is_rings(place) else [_corners(place)]
        for ring in rings:
            pen.line([*ring, *ring[:2]], fill=colours[label], width=max(2, size // 6), joint="curve")
        if rings:
            _tag(pen, str(number), rings[0], colours[label], font, picture.size)
    heading = answer.result if isinstance(answer.result, str) else "" if things else "nothing found"
    counts = {label: [n for n, (other, _) in enumerate(things, 1) if other == label] for label in labels}
    rows = [(colours[label], f"{', '.join(map(str, counts[label]))}: {label or '(no label)'}") for label in labels]
    return _with_legend(picture, f"{answer.task} {heading}".strip(), rows, font, size)


def _colours(count: int) -> list[Colour]:
    """Colours far from each other: steps of the golden angle around the wheel."""
    wheel = [colorsys.hsv_to_rgb(0.618034 * n % 1, 0.85, 1.0 - 0.25 * (n % 3 == 2)) for n in range(count)]
    return [(round(255 * r), round(255 * g), round(255 * b)) for r, g, b in wheel]


def _is_rings(place: list[Any]) -> bool:
    return not place or isinstance(place[0], list)


def _corners(place: list[int]) -> list[int]:
    """A box x0, y0, x1, y1 as four corners; a quad as it is."""
    if len(place) != 4:
        return place
    x0, y0, x1, y1 = place
    return [x0, y0, x1, y0, x1, y1, x0, y1]


def _filled(picture: Image.Image, polygons: list[tuple[Colour, list[list[int]]]]) -> Image.Image:
    for colour, rings in polygons:
        cover = Image.new("L", picture.size)
        pen = ImageDraw.Draw(cover)
        for ring in rings:
            if len(ring) >= 6:
                pen.polygon(ring, fill=_FILL)
        picture.paste(colour, (0, 0), cover)
    return picture


def _tag(
    pen: ImageDraw.ImageDraw, text: str, ring: list[int], colour: Colour, font: Any, size: tuple[int, int]
) -> None:
    """A number at the first corner of a shape, moved into the picture where it would leave it."""
    left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
    width, height = right - left + 4, bottom - top + 4
    x = max(0, min(ring[0], size[0] - width))
    y = max(0, min(ring[1] - height, size[1] - height))
    pen.rectangle((x, y, x + width, y + height), fill=colour)
    pen.text((x + 2 - left, y + 2 - top), text, fill=_ink(colour), font=font)


def _ink(colour: Colour) -> Colour:
    """Black or white, whichever is easier to read on `colour`."""
    red, green, blue = colour
    return (0, 0, 0) if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else (255, 255, 255)


def _with_legend(
    picture: Image.Image, heading: str, rows: list[tuple[Colour, str]], font: Any, size: int
) -> Image.Image:
    """The picture at the top left of a white one, with the heading and a row for each colour below it."""
    line, margin = round(size * 1.4), size // 2
    width = max(picture.width, _NARROWEST * size)
    texts: list[tuple[Colour | None, str]] = [(None, part) for part in _wrapped(heading, font, width - size)]
    for colour, text in rows:
        parts = _wrapped(text, font, width - 3 * size)
        texts += [(colour, parts[0]), *((None, f"     {part}") for part in parts[1:])]
    whole = Image.new("RGB", (width, picture.height + line * len(texts) + 2 * margin), "white")
    whole.paste(picture, (0, 0))
    pen = ImageDraw.Draw(whole)
    for number, (mark, text) in enumerate(texts):
        y = picture.height + margin + number * line
        if mark is not None:
            pen.rectangle((margin, y, margin + size, y + size), fill=mark)
        pen.text((margin + (size * 3 // 2 if mark is not None else 0), y), text, fill="black", font=font)
    return whole


def _wrapped(text: str, font: Any, width: int) -> list[str]:
    """Lines of `text` that fit `width` pixels; a word that is wider has a line of its own."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
