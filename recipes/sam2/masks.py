"""Masks without torch: the reference processor's arithmetic in numpy, COCO's run lengths, boxes, suppression.

Logits are float32 `[h, w]` at the decoder's resolution, masks bool `[H, W]` at the picture's. A picture may be large,
so logits are enlarged a band of rows at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from zoo.pictures import as_square

_BAND = 2**22  # pixels that are enlarged at once
_SURE = 10.0  # logit that stands for a pixel of a given mask: SAM 2 takes 20 * mask - 10


def as_pixels(picture: np.ndarray, size: int) -> np.ndarray:
    """A picture uint8 `[H, W, 3]` as the encoder takes it: uint8 `[1, size, size, 3]`, resized as by the reference's
    image processor."""
    return as_square(picture, size, Image.Resampling.BILINEAR)


def as_mask_prompt(mask: np.ndarray, side: int) -> np.ndarray:
    """A mask bool `[H, W]` as logits `[side, side]` of a mask prompt; bilinear with antialiasing, as the reference."""
    logits = np.where(mask, np.float32(_SURE), np.float32(-_SURE))
    return np.asarray(Image.fromarray(logits).resize((side, side), Image.Resampling.BILINEAR))


def _places(size: int, out: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each of `out` results the element before it, the one behind and the share of that, as torch has them."""
    scale = np.float32(size) / np.float32(out)
    at = np.maximum((np.arange(out, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5), 0)
    before = np.minimum(at.astype(np.int64), size - 1)
    return before, np.minimum(before + 1, size - 1), (at - before).astype(np.float32)


def enlarge(logits: np.ndarray, height: int, width: int) -> Iterator[np.ndarray]:
    """Logits at `height` × `width`, band by band: bilinear with corners not aligned, `F.interpolate`'s formula."""
    left, right, share = _places(logits.shape[1], width)
    rows = (1 - share) * logits[:, left] + share * logits[:, right]
    upper, lower, share = _places(logits.shape[0], height)
    share = share[:, None]
    step = max(1, _BAND // width)
    for top in range(0, height, step):
        band = slice(top, top + step)
        yield (1 - share[band]) * rows[upper[band]] + share[band] * rows[lower[band]]


def mask_of(logits: np.ndarray, height: int, width: int) -> np.ndarray:
    """The mask at the picture's size: logits resized first, then compared with 0."""
    mask = np.empty((height, width), bool)
    top = 0
    for band in enlarge(logits, height, width):
        mask[top : top + len(band)] = band > 0
        top += len(band)
    return mask


def stability(logits: np.ndarray, height: int, width: int, offset: float = 1.0) -> float:
    """How little a mask changes with its threshold: pixels above `offset` by pixels above `-offset`; 0 for none."""
    inner = outer = 0
    for band in enlarge(logits, height, width):
        inner += int((band > offset).sum())
        outer += int((band > -offset).sum())
    return inner / outer if outer else 0.0


# --- run lengths ------------------------------------------------------------------------------------------------------


def run_lengths(mask: np.ndarray) -> list[int]:
    """Lengths of the runs of a mask in column order, background first (0 when the first pixel is of the mask)."""
    flat = np.asarray(mask, dtype=bool).T.reshape(-1)
    ends = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    lengths: list[int] = np.diff(np.concatenate([[0], ends, [flat.size]])).tolist()
    return [0, *lengths] if flat.size and flat[0] else lengths


def compress(lengths: Sequence[int]) -> str:
    """COCO's string of run lengths: from the fourth on the difference to the last but one; groups of 5 bits, the lowest
    first, bit 5 for "more follow", from the character `0` on."""
    text = bytearray()
    for index, length in enumerate(lengths):
        rest = length - lengths[index - 2] if index > 2 else length
        more = True
        while more:
            group, rest = rest & 31, rest >> 5
            more = rest != (-1 if group & 16 else 0)
            text.append(48 + group + (32 if more else 0))
    return text.decode("ascii")


def rle(mask: np.ndarray) -> dict[str, Any]:
    """The mask as COCO writes it: `size` (height, width) and `counts`, the compressed string."""
    return {"size": [int(side) for side in mask.shape], "counts": compress(run_lengths(mask))}


# --- boxes and suppression --------------------------------------------------------------------------------------------


def box_of(mask: np.ndarray) -> tuple[int, int, int, int]:
    """First and last column and row of a mask: x1, y1, x2, y2, all inclusive; zeros for an empty one."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if not rows.size:
        return 0, 0, 0, 0
    return int(columns[0]), int(rows[0]), int(columns[-1]), int(rows[-1])


def suppress(boxes: np.ndarray, scores: np.ndarray, threshold: float) -> list[int]:
    """Non-maximum suppression: indices, best first, of boxes `[n, 4]` (x1, y1, x2, y2) that overlap no better one by
    an IoU above `threshold`. Among equal scores the first is the better."""
    order = np.argsort(-scores, kind="stable")
    boxes = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    kept: list[int] = []
    while order.size:
        best, rest = order[0], order[1:]
        kept.append(int(best))
        low, high = np.maximum(boxes[best, :2], boxes[rest, :2]), np.minimum(boxes[best, 2:], boxes[rest, 2:])
        common = np.clip(high - low, 0, None).prod(1)
        union = areas[best] + areas[rest] - common
        overlap = np.divide(common, union, out=np.zeros_like(common), where=union > 0)
        order = rest[overlap <= threshold]
    return kept


@dataclass(frozen=True)
class Found:
    """One mask of an answer, as logits: many masks of a large picture would not fit the memory.

    `shape`: height and width of the picture; `score`: the IoU that the model predicts; `point`: that it was found by,
    where a grid asked.
    """

    logits: np.ndarray
    shape: tuple[int, int]
    score: float
    stability: float | None = None
    point: tuple[float, float] | None = None

    @property
    def mask(self) -> np.ndarray:
        """The mask bool `[H, W]`, made anew each time."""
        return mask_of(self.logits, *self.shape)

    @functools.cached_property
    def box(self) -> tuple[int, int, int, int]:
        return box_of(self.mask)

    @functools.cached_property
    def annotation(self) -> dict[str, Any]:
        """As COCO has it: `bbox` is x, y, width, height in pixels, `area` a count of pixels."""
        mask = self.mask
        x1, y1, x2, y2 = box_of(mask)
        area = int(mask.sum())
        entry: dict[str, Any] = {
            "segmentation": rle(mask),
            "area": area,
            "bbox": [x1, y1, x2 - x1 + 1, y2 - y1 + 1] if area else [0, 0, 0, 0],
            "predicted_iou": round(self.score, 6),
        }
        if self.stability is not None:
            entry["stability_score"] = round(self.stability, 6)
        if self.point is not None:
            entry["point_coords"] = [[round(place, 3) for place in self.point]]
        return entry
