"""SAM 2 beyond its methods: conversations, everything, the command.

Run: pytest tests/recipes/test_sam2_run.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sam2_support import HEIGHT, PICTURE, WIDTH

from recipes.eager import EagerProgram
from recipes.recipe import UserError
from recipes.sam2 import RECIPE
from recipes.sam2.everything import Limits, everything
from recipes.sam2.prompts import Prompt
from recipes.sam2.runner import Segmenter
from recipes.sam2.session import Conversation
from tests.cli.harness import environ, one_error_line

pytestmark = pytest.mark.usefixtures("one_thread")


# conversations


def talk(segmenter: Segmenter, *requests: Any, picture: np.ndarray | None = PICTURE) -> list[dict[str, Any]]:
    lines = [request if isinstance(request, str) else json.dumps(request) for request in requests]
    return list(Conversation(segmenter, picture).answers(iter(lines)))


def test_conversation(segmenter: Segmenter, tmp_path: Path) -> None:
    answers = talk(
        segmenter,
        {"id": 7, "points": [[50, 40]]},
        "\n",
        {"points": [[50, 40], [5, 5]], "labels": [1, 0], "multimask": True},
        {"points": [[50, 40]], "mask": "previous", "output": str(tmp_path / "m.png")},
        {"box": [10, 10, 90, 80], "overlay": str(tmp_path / "o.png")},
    )
    assert answers[0]["id"] == 7 and [len(answer["masks"]) for answer in answers] == [1, 3, 1, 1]
    assert (answers[0]["height"], answers[0]["width"]) == (HEIGHT, WIDTH)
    scores = [mask["predicted_iou"] for mask in answers[1]["masks"]]
    assert scores == sorted(scores, reverse=True)
    assert answers[2]["masks"] != answers[0]["masks"] and answers[2]["written"] == [str(tmp_path / "m.png")]
    assert Image.open(tmp_path / "m.png").size == (WIDTH, HEIGHT) and (tmp_path / "o.png").is_file()
    assert (np.array(Image.open(tmp_path / "m.png")) > 0).sum() == answers[2]["masks"][0]["area"]


def test_conversation_goes_on_after_mistakes(segmenter: Segmenter, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"\xff\xd8\xff\xe0 not a picture")
    mistakes: list[tuple[Any, str]] = [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ({"id": "a", "point": [1, 2]}, "unknown key point"),
        ({}, "nothing is asked"),
        ({"points": [[1000, 2]]}, "outside the picture"),
        ({"points": [[1]]}, "give x,y"),
        ({"points": [1, 2]}, "list of [x, y]"),
        ({"points": [["a", None]]}, "give x,y"),
        ({"points": [[1, 2]], "labels": [True]}, "labels"),
        ({"points": [[1, 2]], "labels": [1, 1]}, "1 points and 2 labels"),
        ({"box": [1, 2, 3]}, "give x1,y1,x2,y2"),
        ({"mask": "previous"}, "no previous mask"),
        ({"mask": 3}, "previous"),
        ({"points": [[1, 2]], "multimask": 1}, "true or false"),
        ({"points": [[1, 2]], "output": str(tmp_path / "missing" / "m.png")}, "does not exist"),
        ({"points": [[1, 2]], "output": 5}, "path of a file"),
        ({"mask": str(broken)}, "broken.jpg"),
    ]
    answers = talk(segmenter, *(line for line, _ in mistakes), {"points": [[1, 2]]})
    for answer, (_, said) in zip(answers, mistakes, strict=False):
        assert said in answer["error"], answer
    assert answers[2]["id"] == "a" and "masks" in answers[-1]


def test_conversation_changes_pictures(segmenter: Segmenter, tmp_path: Path) -> None:
    other = tmp_path / "other.png"
    Image.fromarray(np.ascontiguousarray(PICTURE[::-1, :100])).save(other)
    point = {"points": [[50, 40]]}
    without, first, changed, second, lost, third = talk(
        segmenter,
        point,
        {"picture": str(other)} | point,
        {"picture": "sample:camera"},
        point,
        {"picture": str(tmp_path / "missing.png")},
        point,
        picture=None,
    )
    assert "no picture yet" in without["error"] and first["width"] == 100
    assert (changed["height"], changed["width"]) == (512, 512) and "masks" not in changed
    assert second["width"] == 512 and "no such file" in lost["error"]
    assert third["masks"] == second["masks"]  # the last picture that could be read stays


# everything


class Discs:
    """A program that sees three discs; a point in one gives it, sure and steady, twice, and a vague mask."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.discs = [(32.0, 32.0, 20.0), (96.0, 40.0, 16.0), (64.0, 100.0, 24.0)]

    def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
        if method == "encode":
            return []
        points = arrays[0]
        self.calls.append(points.shape)
        count = points.shape[1]
        rows, columns = 4 * np.mgrid[:32, :32] + 1.5
        logits = np.full((1, count, 4, 32, 32), -9, np.float32)
        scores = np.zeros((1, count, 4), np.float32)
        for index, (x, y) in enumerate(points[0, :, 0]):
            for cx, cy, radius in self.discs:
                if np.hypot(x - cx, y - cy) < radius:
                    disc = radius - np.hypot(columns - cx, rows - cy)
                    logits[0, index, 1] = logits[0, index, 2] = 20 * disc
                    logits[0, index, 3] = 0.05 * disc
                    scores[0, index, 1:] = 0.95, 0.95 + 1e-4 * x, 0.99
        return [logits, scores, np.ones((1, count, 1), np.float32)]


def test_everything_finds_each_thing_once(sam2_assets: Path) -> None:
    program = Discs()
    segmenter = Segmenter(program, sam2_assets)
    segmenter.look(np.zeros((64, 256, 3), np.uint8))
    found = everything(segmenter, Limits(grid=9))
    assert program.calls == [(1, 8, 1, 2)] * 11  # 81 points, the last call filled up
    assert len(found) == 3 and [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    for one in found:
        assert one.stability is not None and one.stability > 0.95 and one.point is not None
        x, y = one.point
        assert one.mask[int(y), int(x)]  # in pixels of the picture
        cx, cy, radius = min(program.discs, key=lambda disc: np.hypot(2 * disc[0] - x, disc[1] / 2 - y))
        assert abs(one.annotation["area"] - np.pi * radius**2) < 0.1 * np.pi * radius**2
        assert np.allclose(np.mean(np.reshape(one.box, (2, 2)), 0), (2 * cx, cy / 2), atol=3)
    assert len(everything(segmenter, Limits(grid=9, min_stability=0.0))) >= 3
    assert everything(segmenter, Limits(grid=9, min_iou=1.0)) == []


@pytest.mark.parametrize("wrong", [{"grid": 0}, {"min_iou": 1.5}, {"min_stability": -1}, {"max_overlap": float("nan")}])
def test_limits_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong)).replace("_", "-")):
        Limits(**wrong)


# the command


@pytest.fixture
def zoo(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = "from zoo.cli import main; main()"
        return subprocess.run(
            [sys.executable, "-c", code, "run", "sam2", *arguments],
            cwd=tmp_path, env=environ(), capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    return run


def test_mistakes_are_told_before_the_export(zoo: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0\x00\x10JFIF" + bytes(40))
    point = ("--point", "10,10")
    for arguments, said in [
        (
            ("sample:chelsea", "--point", "451,10", "-o", "m.png"),
            "point 451,10 lies outside the picture, which is 451×",
        ),
        (("broken.jpg", *point, "-o", "m.png"), "broken.jpg"),
        (("sample:chelsea", *point, "-o", "none/m.png"), "none does not exist"),
    ]:
        one_error_line(zoo(*arguments), said)
    assert [path.name for path in tmp_path.iterdir()] == ["broken.jpg"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"interactive": True, "point": ["1,1"]}, "from its lines"),
        ({"everything": True, "picture": "sample:chelsea", "box": ["1,1,5,5"]}, "asks by itself"),
        ({"picture": None, "point": ["1,1"]}, "give a picture"),
        ({"picture": "sample:chelsea", "output": Path("m.png")}, "nothing is asked"),
        ({"picture": "sample:chelsea", "point": ["1,1"]}, "nothing would be written"),
        ({"picture": "photo.png", "point": ["1,1"], "overlay": Path("./photo.png")}, "would be overwritten"),
        ({"picture": "missing.png", "point": ["1,1"], "as_json": True}, "no such file"),
        ({"picture": "sample:chelsea", "point": ["1,1"], "as_json": True, "size": "huge"}, "unknown size"),
        ({"picture": "sample:chelsea", "mask": Path("x.png"), "as_json": True}, "no such file: x.png"),
        ({"picture": "sample:chelsea", "everything": True, "grid": 0, "as_json": True}, "--grid 0"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        RECIPE.run(**{"picture": None, **options})


def test_mask_must_be_of_the_pictures_size(tmp_path: Path) -> None:
    Image.new("L", (10, 10), 255).save(tmp_path / "m.png")
    with pytest.raises(UserError, match="is 10×10, the picture 451×300"):
        RECIPE.run(picture="sample:chelsea", mask=tmp_path / "m.png", as_json=True)


def test_runner_works_without_torch(sam2_assets: Path) -> None:
    """In a process where torch, transformers and executorch cannot be imported."""
    code = """
import sys
for name in ("torch", "transformers", "executorch"):
    sys.modules[name] = None
import numpy as np
from pathlib import Path
import recipes.sam2, recipes.sam2.session, recipes.sam2.everything
from recipes.sam2.runner import Segmenter
from recipes.sam2.prompts import Prompt
class Fake:
    def run(self, method, *arrays):
        logits = np.full((1, 1, 4, 32, 32), 5, np.float32)
        return [logits, np.ones((1, 1, 4), np.float32), np.ones((1, 1, 1), np.float32)]
segmenter = Segmenter(Fake(), Path(sys.argv[1]))
segmenter.look(np.zeros((30, 40, 3), np.uint8))
print(segmenter.masks(segmenter.ask(Prompt(((1, 2),), (1,))), False)[0].annotation["area"])
"""
    run = [sys.executable, "-c", code, str(sam2_assets)]
    done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1200"]


def test_masks_that_are_not_finite_are_refused(sam2_eager: EagerProgram, sam2_assets: Path) -> None:
    class Broken:
        def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
            return [output * np.nan for output in sam2_eager.run(method, *arrays)]

    segmenter = Segmenter(Broken(), sam2_assets)
    segmenter.look(PICTURE)
    with pytest.raises(UserError, match="not finite"):
        segmenter.ask(Prompt(((1, 1),), (1,)))


def test_one_pixel(segmenter: Segmenter) -> None:
    segmenter.look(np.full((1, 1, 3), 90, np.uint8))
    (found,) = segmenter.masks(segmenter.ask(Prompt(((0, 0),), (1,))), False)
    assert found.mask.shape == (1, 1) and found.annotation["area"] in (0, 1)
    with pytest.raises(UserError, match="outside the picture, which is 1×1"):
        segmenter.ask(Prompt(((1, 0),), (1,)))
