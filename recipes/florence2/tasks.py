"""The tasks of Florence-2 and what stands after them: a phrase, a part of the picture, or nothing. No torch."""

from __future__ import annotations

import re
from typing import Literal

import numpy as np

from recipes.recipe import UserError

BINS = 1000  # a place is a token: one of so many steps along an axis

Needs = Literal["nothing", "text", "region"]
TASKS: dict[str, Needs] = {
    "<CAPTION>": "nothing",
    "<DETAILED_CAPTION>": "nothing",
    "<MORE_DETAILED_CAPTION>": "nothing",
    "<OD>": "nothing",
    "<DENSE_REGION_CAPTION>": "nothing",
    "<REGION_PROPOSAL>": "nothing",
    "<OCR>": "nothing",
    "<OCR_WITH_REGION>": "nothing",
    "<CAPTION_TO_PHRASE_GROUNDING>": "text",
    "<REFERRING_EXPRESSION_SEGMENTATION>": "text",
    "<OPEN_VOCABULARY_DETECTION>": "text",
    "<REGION_TO_SEGMENTATION>": "region",
    "<REGION_TO_CATEGORY>": "region",
    "<REGION_TO_DESCRIPTION>": "region",
    "<REGION_TO_OCR>": "region",
}
_LOCATIONS = re.compile(r"(?:<loc_\d{1,3}>){4}")
_NUMBER = r"\s*(\d+(?:\.\d+)?)\s*"
_PIXELS = re.compile(",".join([_NUMBER] * 4))


def task_name(text: str) -> str:
    """The task that `text` names, with or without brackets, in either case. Raises `UserError` for an unknown one."""
    name = f"<{text.strip().strip('<>').upper().replace('-', '_')}>"
    if name not in TASKS:
        raise UserError(f"unknown task {text!r}: choose one of {', '.join(TASKS)}")
    return name


def check_text(task: str, text: str | None) -> None:
    """Raises `UserError` when `text` is missing, or is not what `task` takes."""
    needs = TASKS[task]
    if needs == "nothing":
        if text is not None:
            raise UserError(f"{task} takes no --text")
        return
    if text is None or not text.strip():
        what = "a region of the picture: X0,Y0,X1,Y1 in pixels" if needs == "region" else "a phrase"
        raise UserError(f"{task} needs --text: {what}")
    if needs == "region" and not (_LOCATIONS.fullmatch(text.strip()) or _PIXELS.fullmatch(text)):
        raise UserError(
            f"{task}: --text {text!r} is no region: give X0,Y0,X1,Y1 in pixels, or four of <loc_0> to <loc_999>"
        )


def task_input(task: str, text: str | None, width: int, height: int) -> str:
    """What stands after the task: `text`, a region in pixels as four location tokens.

    Raises `UserError` as `check_text` does, and for a region that is empty or not in the picture.
    """
    check_text(task, text)
    if text is None:
        return ""
    match = _PIXELS.fullmatch(text) if TASKS[task] == "region" else None
    if match is None:
        return text.strip()
    x0, y0, x1, y1 = (float(value) for value in match.groups())
    if not (x0 < x1 <= width and y0 < y1 <= height):
        raise UserError(f"{task}: the region {text.strip()} is not within the picture of {width}×{height} pixels")
    # As the processor's `quantize`, in float32: the bin that holds the value, the last one for the far edge.
    places = np.array((x0, y0, x1, y1), np.float32)
    steps = np.array((width / BINS, height / BINS) * 2, np.float32)
    bins = np.minimum(places / steps, BINS - 1).astype(int)
    return "".join(f"<loc_{bin_}>" for bin_ in bins)
