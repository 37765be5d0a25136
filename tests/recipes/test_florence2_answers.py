"""Florence-2: answers as boxes, polygons, phrases and pictures: pytest tests/recipes/test_florence2_answers.py"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from recipes.florence2 import standin
from recipes.florence2.answers import parse
from recipes.florence2.draw import draw, save
from recipes.florence2.runner import Answer, found, lines
from recipes.florence2.tasks import TASKS
from recipes.recipe import UserError

PIECES = [f"<loc_{n}>" for n in (0, 5, 77, 500, 999)]
MARKS = ["<poly>", "</poly>", "<sep>"]
WORDS = [
    "cat", " a dog", "it", "the image", "<od>", "<ground>", "<obj>", "</s>", "<s>", "<pad>", "naïve ☃", "\n", " ",
    "<and>", "<", "text",
]  # fmt: skip


@pytest.fixture(scope="module")
def processor() -> Any:
    return standin.make_processor(1401, 96)


def both(processor: Any, task: str, text: str, size: tuple[int, int]) -> tuple[Any, Any]:
    kind = processor.tasks_answer_post_processing_type[task]
    ours = parse(kind, text, size, processor.post_processor.banned_grounding_tokens)
    return ours, processor.post_process_generation(text, task=task, image_size=size)[task]


F1 = {
    "a whole picture": "cat<loc_0><loc_0><loc_999><loc_999>",
    "two boxes a label": "cat<loc_0><loc_0><loc_999><loc_999><loc_1><loc_2><loc_3><loc_4>d<loc_5><loc_6><loc_7><loc_8>",
    "three of four tokens": "cat<loc_0><loc_0><loc_999>",
    "seven of eight tokens": "cat<loc_0><loc_0><loc_999><loc_999><loc_1><loc_2><loc_3>",
    "empty": "",
    "ends alone": "</s><s></s>",
}


@pytest.mark.parametrize("name", F1)
def test_f1_location_tokens(processor: Any, name: str) -> None:
    for task in TASKS:
        ours, theirs = both(processor, task, F1[name], (640, 427))
        assert ours == theirs, task
    boxes = parse("description_with_bboxes", F1[name], (640, 427))
    counts = {"a whole picture": 1, "two boxes a label": 3, "seven of eight tokens": 1}
    assert len(boxes["bboxes"]) == len(boxes["labels"]) == counts.get(name, 0)
    if name == "a whole picture":
        assert boxes == {"bboxes": [[0, 0, 639, 426]], "labels": ["cat"]}


def test_answers_equal_the_processor_bit_for_bit(processor: Any) -> None:
    """Random texts of places, marks and words, of all tasks, at several sizes."""
    draws = random.Random(1)
    weights = [6.0] * len(PIECES) + [2.0] * len(MARKS) + [1.0] * len(WORDS)
    places = 0
    for _ in range(400):
        text = "".join(draws.choices(PIECES + MARKS + WORDS, weights, k=draws.randint(0, 40)))
        size = draws.choice([(640, 427), (720, 1280), (1, 1), (12000, 9000)])
        for task in TASKS:
            ours, theirs = both(processor, task, text, size)
            assert ours == theirs, (task, text, size)
            places += 0 if isinstance(ours, str) else sum(map(len, ours.values()))
    assert places > 1000


def answer(kind: str, text: str, pixels: np.ndarray, task: str = "<OD>") -> Answer:
    height, width = pixels.shape[:2]
    return Answer(task, width, height, text, parse(kind, text, (width, height)))


POLYGON = "<loc_100><loc_200><loc_400><loc_200><loc_400><loc_300><loc_100><loc_300>"
TURNED = "<loc_200><loc_100><loc_200><loc_400><loc_300><loc_400><loc_300><loc_100>"


@pytest.mark.parametrize("kind", ["polygons", "description_with_bboxes", "ocr"])
def test_m1_width_and_height_are_not_swapped(kind: str) -> None:
    """1280×720 and 720×1280: the same pixels before and after transposing, in numbers and in what is drawn."""
    label = "" if kind == "polygons" else "x"
    box = {"description_with_bboxes": ("<loc_100><loc_200><loc_400><loc_300>", "<loc_200><loc_100><loc_300><loc_400>")}
    wide, tall = box.get(kind, (POLYGON, TURNED))
    pixels = np.zeros((720, 1280, 3), np.uint8)
    ((_, across),) = found(first := answer(kind, label + wide, pixels))
    ((_, down),) = found(second := answer(kind, label + tall, pixels.transpose(1, 0, 2)))
    points = [np.reshape(place[0] if kind == "polygons" else place, (-1, 2)) for place in (across, down)]
    np.testing.assert_array_equal(points[0], points[1][:, ::-1])
    assert points[0].min(0).tolist() == [128, 144] and points[0].max(0).tolist() == [512, 216]
    drawn = np.asarray(draw(pixels, first))[:720, :1280]
    turned = np.asarray(draw(np.ascontiguousarray(pixels.transpose(1, 0, 2)), second))[:1280, :720]
    for y, x in ((144, 300), (216, 300), (180, 128), (180, 512), (180, 300), (100, 300), (180, 700)):
        assert (drawn[y, x].any() == turned[x, y].any()) and drawn[y, x].tolist() == turned[x, y].tolist(), (y, x)
    assert drawn[216, 300].any() and not drawn[100, 300].any() and (kind == "polygons") == bool(drawn[180, 300].any())


@pytest.mark.parametrize("size", [(1, 1), (3, 900), (50, 70)])
def test_any_size_is_drawn(size: tuple[int, int]) -> None:
    """Every kind of answer; what is outside of shapes keeps its pixels, and the legend names each label once."""
    pixels = np.full((*size, 3), 7, np.uint8)
    texts = {
        "description_with_bboxes": "cat<loc_0><loc_0><loc_999><loc_999>ünder cat<loc_5><loc_5><loc_9><loc_9>" * 3,
        "polygons": POLYGON + "<sep><loc_1><loc_2>",
        "ocr": "NASA" + POLYGON,
        "pure_text": "a caption that is longer than any small picture is wide",
        "description_with_bboxes_or_polygons": "nothing",
    }
    for kind, text in texts.items():
        drawn = draw(pixels, one := answer(kind, text, pixels))
        assert drawn.height > size[0] and drawn.width >= size[1] and drawn.mode == "RGB"
        assert lines(one).endswith("\n") and len(lines(one)) > 1
    boxed = answer("description_with_bboxes", texts["description_with_bboxes"], pixels)
    assert len(list(found(boxed))) == 6 and len({label for label, _ in found(boxed)}) == 2


def test_saved_in_the_format_of_the_ending(tmp_path: Path) -> None:
    pixels = np.zeros((20, 30, 3), np.uint8)
    one = answer("description_with_bboxes", "cat<loc_0><loc_0><loc_999><loc_999>", pixels)
    for ending, kind in ((".png", "PNG"), (".JPG", "JPEG"), (".webp", "WEBP")):
        save(tmp_path / f"out{ending}", pixels, one)
        with Image.open(tmp_path / f"out{ending}") as image:
            assert image.format == kind and image.height > 20
    with pytest.raises(UserError, match=r"choose one of \.png"):
        save(tmp_path / "out.gif", pixels, one)
    with pytest.raises(UserError, match="does not exist"):
        save(tmp_path / "no" / "out.png", pixels, one)
    with pytest.raises(UserError, match=r"use \.png"):
        save(tmp_path / "out.webp", np.zeros((1, 17000, 3), np.uint8), one)
