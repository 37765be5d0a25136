"""SAM 2 without a model: preparing pictures, masks at the picture's size, COCO's run lengths, boxes, outputs.

Run: pytest tests/recipes/test_sam2_masks.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sam2_support import MEAN, STD, normalized
from torch.nn import functional as F

from recipes.recipe import UserError
from recipes.sam2.everything import grid
from recipes.sam2.masks import (
    Found,
    as_mask_prompt,
    as_pixels,
    box_of,
    enlarge,
    mask_of,
    rle,
    run_lengths,
    stability,
    suppress,
)
from recipes.sam2.outputs import Outputs, label_picture, overlay, write
from recipes.sam2.prompts import Prompt, from_options
from zoo.pictures import read_rgb, sample_path


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


# the reference processor's arithmetic


@pytest.mark.parametrize("name", ["chelsea", "astronaut", "camera"])
def test_pixels_are_the_reference_processors(name: str) -> None:
    """torch's antialiased bilinear resize of 8 bits, which the reference's processor calls, then its normalisation."""
    picture = read_rgb(sample_path(f"sample:{name}"))
    resized = F.interpolate(
        torch.from_numpy(picture).permute(2, 0, 1)[None], (1024, 1024), mode="bilinear", antialias=True
    )
    assert (as_pixels(picture, 1024).shape, as_pixels(picture, 1024).dtype) == ((1, 1024, 1024, 3), np.uint8)
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    # Both of the reference's ways: a rounding at each of three steps, and mean and std times 255 first.
    for wanted in ((resized.float() / 255 - mean) / std, (resized.float() - 255 * mean) / (255 * std)):
        np.testing.assert_allclose(normalized(picture, 1024), wanted.numpy(), rtol=0, atol=6e-7)


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (7, 3000), (64, 64)])
def test_pixels_of_odd_shapes(shape: tuple[int, int]) -> None:
    """Within one level of 8 bits, for which the two libraries round sums of many terms differently."""
    picture = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    resized = F.interpolate(torch.from_numpy(picture).permute(2, 0, 1)[None], (64, 64), mode="bilinear", antialias=True)
    levels = as_pixels(picture, 64)[0].astype(int)
    assert np.abs(levels - resized[0].permute(1, 2, 0).numpy()).max() <= 1


@pytest.mark.parametrize("shape", [(1, 1), (2, 900), (32, 32), (300, 451), (17, 5), (720, 1280)])
def test_masks_are_resized_as_logits(shape: tuple[int, int]) -> None:
    logits = noise(32, 32)
    wanted = F.interpolate(torch.from_numpy(logits)[None, None], shape, mode="bilinear", align_corners=False)[0, 0]
    bands = np.concatenate(list(enlarge(logits, *shape)))
    # places up to 32 carry float32 roundings of 2e-6, and so do the shares of neighbours, which differ by a few
    np.testing.assert_allclose(bands, wanted.numpy(), atol=1e-5)
    mask = mask_of(logits, *shape)
    assert mask.shape == shape and not (mask ^ (wanted.numpy() > 0))[np.abs(wanted.numpy()) > 1e-5].any()


def test_bands_are_one_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = noise(9, 9)
    whole = np.concatenate(list(enlarge(logits, 50, 70)))
    monkeypatch.setattr("recipes.sam2.masks._BAND", 210)
    bands = list(enlarge(logits, 50, 70))
    assert [len(band) for band in bands] == [3] * 16 + [2]
    np.testing.assert_array_equal(np.concatenate(bands), whole)


@pytest.mark.parametrize("size", [(1280, 720), (720, 1280)])
def test_m1_height_and_width_of_a_mask(size: tuple[int, int]) -> None:
    """A place of the object is the same before and after transposing; x is scaled by the width, y by the height."""
    width, height = size
    logits = np.full((32, 32), -1.0, np.float32)
    logits[4:8, 20:28] = 1.0  # rows 1/8 to 1/4, columns 5/8 to 7/8
    mask = mask_of(logits, height, width)
    assert mask.shape == (height, width)
    x1, y1, x2, y2 = box_of(mask)
    assert abs(x1 - width * 5 / 8) < width / 32 and abs(x2 - width * 7 / 8) < width / 32
    assert abs(y1 - height / 8) < height / 32 and abs(y2 - height / 4) < height / 32
    np.testing.assert_array_equal(mask_of(logits.T, width, height), mask.T)
    points, _ = Prompt(((0.75 * width, 0.25 * height),), (1,)).tokens(width, height, 1024)
    np.testing.assert_array_equal(points[0, 0], [[768, 256]])


def test_mask_prompt_is_resized_with_antialiasing() -> None:
    mask = noise(211, 300) > 0.3
    logits = torch.where(torch.from_numpy(mask), 10.0, -10.0)[None, None]
    wanted = F.interpolate(logits, (64, 64), mode="bilinear", antialias=True, align_corners=False)[0, 0]
    np.testing.assert_allclose(as_mask_prompt(mask, 64), wanted.numpy(), atol=2e-4)


def test_stability_is_the_references() -> None:
    logits = noise(32, 32)
    big = F.interpolate(torch.from_numpy(logits)[None, None], (90, 80), mode="bilinear", align_corners=False)
    assert stability(logits, 90, 80) == pytest.approx(float((big > 1).sum() / (big > -1).sum()), abs=1e-3)
    assert stability(np.full((8, 8), -3.0, np.float32), 20, 20) == 0.0
    assert stability(np.full((8, 8), 3.0, np.float32), 20, 20) == 1.0


# run lengths


def expand(text: str, height: int, width: int) -> np.ndarray:
    """COCO's string back to a mask, character by character."""
    lengths: list[int] = []
    at = 0
    while at < len(text):
        value = shift = 0
        more = True
        while more:
            code = ord(text[at]) - 48
            value |= (code & 31) << shift
            shift += 5
            more = bool(code & 32)
            at += 1
            if not more and code & 16:
                value -= 1 << shift
        lengths.append(value + (lengths[-2] if len(lengths) > 2 else 0))
    flat = [bit for index, length in enumerate(lengths) for bit in [index % 2 == 1] * length]
    return np.array(flat, bool).reshape(width, height).T


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (37, 64), (1, 500), (300, 2), (120, 90)])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.97, 1.0])
def test_run_lengths_round_trip(shape: tuple[int, int], share: float) -> None:
    mask = np.random.default_rng(3).random(shape) < share
    entry = rle(mask)
    assert entry["size"] == list(shape) and sum(run_lengths(mask)) == mask.size
    np.testing.assert_array_equal(expand(entry["counts"], *shape), mask)


def test_run_lengths_are_cocos() -> None:
    """Strings that pycocotools 2.0.11 writes for the same masks."""
    mask = np.zeros((40, 60), bool)
    mask[10:30, 20:50] = mask[0, 0] = mask[5, 7:9] = True
    assert rle(mask) == {"size": [40, 60], "counts": "01l80[H0m=c0`A" + 57 * "0" + "V<"}
    assert rle(np.zeros((3, 4), bool))["counts"] == "<" and rle(np.ones((3, 4), bool))["counts"] == "0<"
    rows, columns = np.mgrid[:40, :50]
    assert rle((rows - 20) ** 2 + (columns - 25) ** 2 < 300)["counts"] == (
        "a:7n06K4L4M2N2N2N2O0O2O0O2O000O2O000000000001N10001N101N101N2N2N2N3L4L5JZ8"
    )
    mask = np.zeros((3000, 40), bool)
    mask[:, ::20] = mask[5:8, 3] = True
    assert rle(mask)["counts"] == "0hm2ek5[RMkm[1em2hk5"


# boxes


def test_boxes() -> None:
    mask = np.zeros((9, 14), bool)
    assert box_of(mask) == (0, 0, 0, 0)
    mask[2:5, 3] = mask[4, 3:11] = True
    assert box_of(mask) == (3, 2, 10, 4)
    logits = np.where(mask, 5.0, -5.0).astype(np.float32)
    entry = Found(logits, (9, 14), 0.5).annotation
    assert entry["bbox"] == [3, 2, 8, 3] and entry["area"] == mask.sum() == 10
    assert Found(-np.ones((4, 4), np.float32), (9, 14), 0.5).annotation["bbox"] == [0, 0, 0, 0]


def test_suppression_is_the_plain_rule() -> None:
    rng = np.random.default_rng(5)
    corner = rng.uniform(0, 60, (120, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(0, 30, (120, 2))], 1)
    scores = np.round(rng.random(120), 1)  # many are equal

    def iou(a: np.ndarray, b: np.ndarray) -> float:
        sides = np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2])
        common = float(max(sides[0], 0) * max(sides[1], 0))
        return common / (np.prod(a[2:] - a[:2]) + np.prod(b[2:] - b[:2]) - common)

    for threshold in (0.0, 0.3, 0.7):
        kept: list[int] = []
        for index in sorted(range(120), key=lambda index: -scores[index]):
            if all(iou(boxes[index], boxes[other]) <= threshold for other in kept):
                kept.append(index)
        assert suppress(boxes, scores, threshold) == kept and 1 < len(kept) < 120
    assert suppress(np.zeros((0, 4)), np.zeros(0), 0.7) == []


def test_grid_is_the_references() -> None:
    line = torch.linspace(1 / 8, 7 / 8, 4)
    wanted = torch.stack([line.repeat(4), line.repeat_interleave(4)], -1)
    np.testing.assert_allclose(grid(4), wanted.numpy(), atol=1e-7)


# outputs


def disc(radius: float = 0.3) -> np.ndarray:
    rows, columns = np.mgrid[:32, :32] / 31 - 0.5
    return (40 * (radius - np.hypot(rows, columns))).astype(np.float32)


def test_everything_is_written_together(tmp_path: Path) -> None:
    picture = np.full((60, 90, 3), 100, np.uint8)
    found = [Found(disc(), (60, 90), 0.9), Found(disc(0.1), (60, 90), 0.8)]
    outputs = Outputs(tmp_path / "m.png", tmp_path / "o.jpg", tmp_path / "r.json")
    prompt = Prompt(((45, 30),), (1,), (10, 10, 80, 50))
    document: dict[str, Any] = {"masks": [one.annotation for one in found]}
    paths = write(outputs, picture, found, document, prompt)
    assert [path.name for path in paths] == ["m-1.png", "m-2.png", "o.jpg", "r.json"]
    for path, one in zip(paths, found, strict=False):
        image = Image.open(path)
        assert image.mode == "L" and image.size == (90, 60)
        np.testing.assert_array_equal(np.array(image), 255 * one.mask.astype(np.uint8))
    assert Image.open(paths[2]).format == "JPEG" and json.loads(paths[3].read_text()) == document
    # The second file cannot be encoded: the first does not appear either.
    before = sorted(path.name for path in tmp_path.iterdir())
    outputs = Outputs(tmp_path / "n.png", None, tmp_path / "n.json")
    with pytest.raises(ValueError, match="JSON"):
        write(outputs, picture, found[:1], {"score": float("nan")}, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_overlay_shows_mask_edge_and_prompt() -> None:
    picture = np.full((200, 300, 3), 100, np.uint8)
    found = Found(disc(), (200, 300), 0.9)
    painted = np.array(overlay(picture, [found], Prompt(((150, 100), (5, 5)), (1, 0), (20, 20, 280, 190))))
    assert (painted[100, 150] == (0, 255, 0)).all() and (painted[5, 5] == (255, 0, 0)).all()
    assert (painted[20, 100] == (255, 255, 0)).all()
    mask = found.mask
    plain = np.array(overlay(picture, [found], None))
    np.testing.assert_array_equal(plain[~mask], picture[~mask])
    edge = (plain == 255).all(2)
    assert edge.any() and not (edge & ~mask).any() and not edge[100, 150]
    monochrome = plain[mask & ~edge]
    assert (monochrome == monochrome[0]).all() and (monochrome[0] != 100).any()
    np.testing.assert_array_equal(picture, 100)


def test_labels_keep_the_smallest() -> None:
    found = [Found(disc(0.1), (60, 90), 0.7), Found(disc(), (60, 90), 0.9)]
    labels = label_picture(found, (60, 90))
    small, large = (one.mask for one in found)
    np.testing.assert_array_equal(labels, np.where(small, 1, np.where(large, 2, 0)))


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        (("m.jpg", None, None), "written as .png"),
        ((None, "o.gif", None), "choose one of .png"),
        ((None, None, "r.txt"), "written as .json"),
        (("missing/m.png", None, None), "does not exist"),
        (("a.png", "a.png", None), "same name"),
    ],
)
def test_bad_outputs(outputs: tuple[str | None, ...], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        Outputs(*(None if name is None else tmp_path / name for name in outputs)).check()
    with pytest.raises(UserError, match="more than jpg can hold"):
        Outputs(overlay=tmp_path / "o.jpg").check(70000, 10)


# prompts


@pytest.mark.parametrize(
    ("points", "negatives", "boxes", "said"),
    [
        (["12"], [], [], "--point 12: give x,y"),
        (["1,2,3"], [], [], "give x,y"),
        ([], ["a,b"], [], "--negative a,b"),
        (["nan,1"], [], [], "give x,y"),
        ([], [], ["1,2,3"], "give x1,y1,x2,y2"),
        ([], [], ["1,2,3,4", "5,6,7,8"], "one object"),
    ],
)
def test_malformed_prompts(points: list[str], negatives: list[str], boxes: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        from_options(points, negatives, boxes)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (Prompt(((100, 5),), (1,)), r"point 100,5 lies outside the picture, which is 100×50"),
        (Prompt(((-1, 5),), (0,)), "outside"),
        (Prompt(((5, 50),), (1,)), "outside"),
        (Prompt(box=(5, 5, 101, 20)), "box 5,5,101,20 lies outside"),
        (Prompt(box=(20, 5, 10, 20)), "x1 < x2"),
        (Prompt(box=(20, 5, 20, 20)), "x1 < x2"),
        (Prompt(((1, 1),) * 9, (1,) * 9), "9 points are too many: the program takes 8"),
    ],
)
def test_prompts_that_do_not_fit(prompt: Prompt, said: str) -> None:
    with pytest.raises(UserError, match=said):
        prompt.check(100, 50, 8)


def test_prompts_that_fit() -> None:
    Prompt(((0, 0), (99.9, 49.9)), (1, 0), (0, 0, 100, 50)).check(100, 50, 8)
    Prompt(((0, 0), (500, 500)), (1, -1)).check(100, 50, 8)  # what is no point has no place
    with pytest.raises(UserError, match="nothing is asked"):
        Prompt()
    with pytest.raises(UserError, match="2 points and 1 labels"):
        Prompt(((0, 0), (1, 1)), (1,))
    with pytest.raises(UserError, match="label 7"):
        Prompt(((0, 0),), (7,))
