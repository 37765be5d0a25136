"""`zoo check`: encoder, prompts of every kind and the masks at the picture's size, against float64 eager.

Each side prompts the picture as it has encoded it itself, so the errors of both methods are in the masks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from recipes.eager import EagerProgram, in_float64
from recipes.recipe import Bundle, Comparison, ExportRequest, Runnable, Tolerance
from recipes.sam2.build import build
from recipes.sam2.masks import as_mask_prompt, as_pixels, mask_of
from recipes.sam2.prompts import Prompt
from recipes.sam2.runner import Answer
from zoo.pictures import SAMPLE, read_rgb, sample_path

PICTURES = ("chelsea", "astronaut")  # 451×300 and 512×512; the second shows that the first is forgotten
AGAIN = ("point", "box and points", "mask")  # kinds of prompts about the second
MAPS = ("embedding", "high_1", "high_0")


def golden_bundle(request: ExportRequest) -> Bundle:
    """The methods in float64 on the values that the program's weights stand for, rounded or quantized as they are.

    So the check sees the errors of the arithmetic and of quantized activations, not those of the weights' grid.
    """
    from recipes.sam2 import RECIPE

    return in_float64(RECIPE, request, build(request))


def prompts(width: int, height: int, side: int) -> dict[str, Prompt]:
    """One of every kind, for a picture of this size and a mask prompt of `side` logits."""

    def at(*shares: tuple[float, float]) -> tuple[tuple[float, float], ...]:
        return tuple((round(x * (width - 1), 1), round(y * (height - 1), 1)) for x, y in shares)

    box = (0.2 * width, 0.15 * height, 0.8 * width, 0.9 * height)
    several = at((0.5, 0.5), (0.1, 0.2), (0.9, 0.8), (0.4, 0.6), (0.0, 1.0))
    rows, columns = np.mgrid[:height, :width]
    disc = np.hypot(rows / height - 0.5, columns / width - 0.5) < 0.3
    return {
        "point": Prompt(at((0.5, 0.45)), (1,)),
        "two points": Prompt(at((0.5, 0.5), (0.1, 0.1)), (1, 0)),
        "five points": Prompt(several, (1, 0, 0, 1, 0)),
        "no point": Prompt(at((0.3, 0.6), (0.0, 0.0)), (1, -1)),
        "box": Prompt(box=box),
        "box and points": Prompt(at((0.4, 0.5), (0.9, 0.1)), (1, 0), box),
        "mask": Prompt(mask=as_mask_prompt(disc, side)),
        "mask and point": Prompt(at((0.6, 0.3)), (1,), mask=as_mask_prompt(disc, side)),
    }


def check(program: Runnable, request: ExportRequest) -> list[Comparison]:
    """Rows of the encoder and of every kind of prompt, on two pictures."""
    bounds = _bounds(request)
    bundle = golden_bundle(request)
    meta, golden = bundle.metadata, EagerProgram(bundle, torch.float64)
    rows = []
    for name in PICTURES:
        picture = read_rgb(sample_path(SAMPLE + name))
        height, width = picture.shape[:2]
        pixels = as_pixels(picture, meta["size"])
        sides = [side.run("encode", pixels) for side in (program, golden)]
        for map_name, ours, theirs in zip(MAPS, *sides, strict=True):
            rows.append(Comparison(f"{name}.{map_name}", ours, theirs, bounds["maps"]))
        for kind, prompt in prompts(width, height, meta["mask_size"]).items():
            if name != PICTURES[0] and kind not in AGAIN:
                continue
            rows += _prompt_rows(f"{name}.{kind}", program, golden, prompt, (height, width), bundle, bounds)
    if meta["max_objects"] > 1:
        rows += _batch_rows(program, golden, meta["size"], meta["max_objects"], bounds)
    return rows


def _bounds(request: ExportRequest) -> Mapping[str, Tolerance]:
    from recipes.sam2 import tolerances

    return tolerances(request.backend, request.dtype, request.qlinear)


def _prompt_rows(
    name: str,
    program: Runnable,
    golden: Runnable,
    prompt: Prompt,
    shape: tuple[int, int],
    bundle: Bundle,
    bounds: Mapping[str, Tolerance],
) -> list[Comparison]:
    meta = bundle.metadata
    side = meta["mask_size"]
    points, labels = prompt.tokens(shape[1], shape[0], meta["size"])
    mask = np.zeros((side, side), np.float32) if prompt.mask is None else prompt.mask
    inputs = (points, labels, mask[None, None], np.array([prompt.mask is not None]))
    ours, theirs = program.run("prompt", *inputs), golden.run("prompt", *inputs)
    rows = [
        Comparison(f"{name}.{what}", a, b, bounds[what])
        for what, a, b in zip(("masks", "scores", "object"), ours, theirs, strict=True)
    ]
    masks = [[mask_of(one, *shape) for one in logits[0, 0].astype(np.float32)] for logits, *_ in (ours, theirs)]
    missed = np.array([1 - overlap(a, b) for a, b in zip(*masks, strict=True)])
    rows.append(Comparison(f"{name}.iou", missed, np.zeros_like(missed), bounds["iou"]))
    if "choice" in bounds:
        best, expected = (
            np.array(Answer(logits[0, 0], scores[0, 0], 0.0).choice(True, meta["stability"])[:1])
            for logits, scores, _ in (ours, theirs)
        )
        rows.append(Comparison(f"{name}.choice", best, expected, bounds["choice"]))
    return rows


def _batch_rows(
    program: Runnable, golden: Runnable, size: int, most: int, bounds: Mapping[str, Tolerance]
) -> list[Comparison]:
    """As many prompts as one call takes, about the last picture."""
    rng = np.random.default_rng(0)
    points = (size * rng.random((1, most, 1, 2))).astype(np.float32)
    inputs = (points, np.ones((1, most, 1), np.int64), np.zeros((1, 1, size // 4, size // 4), np.float32))
    ours, theirs = (side.run("prompt", *inputs, np.zeros(1, bool)) for side in (program, golden))
    return [
        Comparison(f"{most} objects.{what}", a, b, bounds[what])
        for what, a, b in zip(("masks", "scores", "object"), ours, theirs, strict=True)
    ]


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    """IoU of two masks; 1 when both are empty."""
    union = int((a | b).sum())
    return int((a & b).sum()) / union if union else 1.0
