"""From the text of an answer to boxes, polygons and phrases, as `Florence2Processor.post_process_generation`, no torch.

transformers does this with torch tensors. Here it is arithmetic on the same float32 values, so that coordinates are
equal bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from recipes.florence2.tasks import BINS

Size = tuple[int, int]  # width, height in pixels

_LOC = r"<loc_(\d+)>"
_BOX = re.compile(_LOC * 4)
_QUAD = re.compile(r"(.+?)" + _LOC * 8)
_PHRASE_END = r"<od>|</od>|<box>|</box>|<bbox>|</bbox>|<loc_"
_PHRASE = re.compile(rf"^\s*(.*?)(?={_PHRASE_END})")
_PHRASE_OR_POLYGON = re.compile(rf"^\s*(.*?)(?={_PHRASE_END}|<poly>)")
_BOXES = r"(?:<loc_\d+>){4,}"
_PLACES = r"(?:<loc_\d+>|<sep>|<poly>|</poly>){4,}"
_WITH_BOXES, _BOXES_ALONE = re.compile(rf"[^<]+{_BOXES}"), re.compile(_BOXES)
_WITH_PLACES, _PLACES_ALONE = re.compile(rf"[^<]+{_PLACES}"), re.compile(_PLACES)
_POLYGON = re.compile(r"<poly>(.*?)</poly>")
_RING = re.compile(r"((?:<loc_\d+>)+)(?:<sep>|$)")


def parse(kind: str, text: str, size: Size, banned: Collection[str] = ()) -> Any:
    """The answer `text` of a task whose answers are of `kind`, for a picture of `size`.

    `kind` is one of the processor's: pure_text (a string), ocr, phrase_grounding, description_with_bboxes, bboxes,
    polygons, description_with_bboxes_or_polygons (a dict of lists, with the processor's names). `banned`: phrases that
    are nothing to be found. What is malformed gives no box.
    """
    if kind == "pure_text":
        return text.replace("<s>", "").replace("</s>", "").strip()
    for mark in ("<s>", "</s>", "<pad>"):
        text = text.replace(mark, "")
    if kind == "ocr":
        quads = [(_pixels(match.groups()[1:], size), match[1].strip()) for match in _QUAD.finditer(text)]
        return {"quad_boxes": [quad for quad, _ in quads], "labels": [label for _, label in quads]}
    if kind in ("description_with_bboxes", "bboxes", "phrase_grounding"):
        return _pairs("bboxes", "labels", _boxes(text, size, kind, banned))
    if kind == "polygons":
        return _pairs("polygons", "labels", _polygons(text, size, alone=True))
    if kind == "description_with_bboxes_or_polygons":
        is_polygons = "<poly>" in text
        polygons = _polygons(text, size, alone=False) if is_polygons else []
        boxes = [] if is_polygons else _boxes(text, size, "description_with_bboxes", banned)
        return {**_pairs("bboxes", "bboxes_labels", boxes), **_pairs("polygons", "polygons_labels", polygons)}
    raise ValueError(f"unknown kind of answer {kind!r}")


def _pairs(places: str, labels: str, found: list[tuple[str, Any]]) -> dict[str, list[Any]]:
    return {places: [place for _, place in found], labels: [label for label, _ in found]}


def _pixels(bins: Sequence[str], size: Size) -> list[int]:
    """x, y, x, y, …: the middles of bins as pixels, in float32 and cut to whole numbers as the processor does."""
    centres = np.array([int(bin_) for bin_ in bins], dtype=np.float32) + np.float32(0.5)
    steps = np.array([side / BINS for side in size], dtype=np.float32)
    pixels: list[int] = (centres * np.resize(steps, len(centres))).astype(np.int64).tolist()
    return pixels


def _boxes(text: str, size: Size, kind: str, banned: Collection[str]) -> list[tuple[str, list[int]]]:
    """(label, box) for every four places after a phrase; of `bboxes` also without one."""
    found = []
    for match in (_BOXES_ALONE if kind == "bboxes" else _WITH_BOXES).finditer(text):
        part = match[0].replace("<ground>", "", 1).replace("<obj>", "", 1)
        phrase = _PHRASE.search(part)
        if phrase is None or (kind == "phrase_grounding" and phrase[0].strip() in banned):
            continue
        label = phrase[0].strip().encode("ascii", "ignore").decode("ascii")
        found += [(label, _pixels(box.groups(), size)) for box in _BOX.finditer(part)]
    return found


def _polygons(text: str, size: Size, alone: bool) -> list[tuple[str, list[list[int]]]]:
    """(label, rings) for every polygon, rings as x, y, x, y, …; `alone`: also without a phrase before it."""
    found = []
    for match in (_PLACES_ALONE if alone else _WITH_PLACES).finditer(text):
        # The first place, if nothing is before it, is not part of the phrase.
        phrase = _PHRASE_OR_POLYGON.search(re.sub(r"^<loc_\d+>", "", match[0], count=1))
        if phrase is None:
            continue
        marked = "<poly>" in match[0] and "</poly>" in match[0]
        for part in _POLYGON.findall(match[0]) if marked else [match[0]]:
            rings = []
            for ring in _RING.findall(part):
                bins = re.findall(_LOC, ring)
                rings.append(_pixels(bins[: len(bins) // 2 * 2], size))
            if rings:
                found.append((phrase[0].strip(), rings))
    return found
