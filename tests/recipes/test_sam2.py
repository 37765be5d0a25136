"""SAM 2 in eager PyTorch on tiny weights: the methods, prompts, conversations, everything.

Run: pytest tests/recipes/test_sam2.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from recipes import recipe as registry
from recipes.recipe import ExportRequest, UserError
from recipes.sam2 import RECIPE, standin
from recipes.sam2.bench import Reference, workloads
from recipes.sam2.blocks import Block
from recipes.sam2.build import build
from recipes.sam2.check import EagerProgram, overlap, prompts
from recipes.sam2.checkpoint import Checkpoint
from recipes.sam2.everything import Limits, everything
from recipes.sam2.masks import as_pixels
from recipes.sam2.modules import EncodeMethod, Features, PromptMethod
from recipes.sam2.prompts import Prompt
from recipes.sam2.runner import Answer, Segmenter
from recipes.sam2.session import Conversation
from tests.cli.harness import environ, one_error_line
from zoo.check import compare
from zoo.pictures import read_rgb, sample_path

PICTURE = read_rgb(sample_path("sample:chelsea"))[::2, ::2]
HEIGHT, WIDTH = PICTURE.shape[:2]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models of this size lose more time in waiting for threads than they win, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sam2")
    (folder / "recipe.json").write_text(json.dumps(build(ExportRequest("webgpu", "tiny")).metadata), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def eager() -> EagerProgram:
    return EagerProgram(build(ExportRequest("webgpu", "tiny")))


@pytest.fixture
def segmenter(eager: EagerProgram, assets: Path) -> Segmenter:
    segmenter = Segmenter(eager, assets)
    segmenter.look(PICTURE)
    return segmenter


# the methods against transformers


def reference(prompt: Prompt, multimask: bool = True) -> Any:
    """transformers' answer, prompted as its processor would: boxes apart from points, in pixels of the square."""
    model = standin.tiny().model
    program = Reference(Checkpoint(model))
    program.run("encode", as_pixels(PICTURE, 128, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    scale = torch.tensor([128 / WIDTH, 128 / HEIGHT])
    given: dict[str, Any] = {}
    if prompt.points:
        given["input_points"] = (torch.tensor(prompt.points).float() * scale)[None, None]
        given["input_labels"] = torch.tensor(prompt.labels)[None, None]
    if prompt.box is not None:
        given["input_boxes"] = (torch.tensor(prompt.box).float().reshape(2, 2) * scale).reshape(1, 1, 4)
    if prompt.mask is not None:
        given["input_masks"] = torch.from_numpy(prompt.mask.copy())[None, None]
    with torch.no_grad():
        return model(image_embeddings=list(program._features), multimask_output=multimask, **given)


@pytest.mark.parametrize("kind", prompts(WIDTH, HEIGHT, 32))
def test_m2_any_prompt_is_as_the_reference(kind: str, segmenter: Segmenter) -> None:
    """1, 2 and 5 points, a point that is none, a box, a box with points, a mask, a mask with a point."""
    prompt = prompts(WIDTH, HEIGHT, 32)[kind]
    answer, wanted = segmenter.ask(prompt), reference(prompt)
    # float32 in another order of sums
    np.testing.assert_allclose(answer.logits[1:], wanted.pred_masks[0, 0].numpy(), atol=2e-5)
    np.testing.assert_allclose(answer.scores[1:], wanted.iou_scores[0, 0].numpy(), atol=2e-6)
    np.testing.assert_allclose(answer.object_score, wanted.object_score_logits.item(), atol=1e-5)
    single = reference(prompt, multimask=False)
    (chosen,) = answer.choice(False, segmenter.metadata["stability"])
    np.testing.assert_allclose(answer.logits[chosen], single.pred_masks[0, 0, 0].numpy(), atol=2e-5)
    np.testing.assert_allclose(answer.scores[chosen], single.iou_scores[0, 0, 0].numpy(), atol=2e-6)


def test_padding_changes_nothing_but_is_not_nothing(segmenter: Segmenter) -> None:
    """-10 pads as the reference's processor does: a token of zeros, which attention does see."""
    points = np.array([[[[40, 50], [0, 0]]]], np.float32)
    padded = segmenter.run(points, np.array([[[1, -10]]]))[0]
    model = standin.tiny().model
    with torch.no_grad():
        wanted = model(
            input_points=torch.from_numpy(points),
            input_labels=torch.tensor([[[1, -10]]]),
            image_embeddings=[torch.from_numpy(np.array(map)) for map in _maps(segmenter)],
        )
    np.testing.assert_allclose(padded.logits[1:], wanted.pred_masks[0, 0].numpy(), atol=2e-5)


def _maps(segmenter: Segmenter) -> list[np.ndarray]:
    features = segmenter._program._methods["prompt"].features  # type: ignore[attr-defined]
    return [map.numpy() for map in features.maps()[::-1]]


def test_objects_at_once_are_as_alone(segmenter: Segmenter) -> None:
    points = np.random.default_rng(0).uniform(0, 128, (1, 5, 3, 2)).astype(np.float32)
    labels = np.array([[[1, 0, -1], [1, 1, 1], [2, 3, 1], [0, -1, 1], [1, -10, -10]]])
    together = segmenter.run(points, labels)
    for index, one in enumerate(together):
        (alone,) = segmenter.run(points[:, index : index + 1], labels[:, index : index + 1])
        np.testing.assert_allclose(one.logits, alone.logits, atol=2e-5)
        np.testing.assert_allclose(one.scores, alone.scores, atol=2e-6)


def test_stability_rule_is_the_references(segmenter: Segmenter) -> None:
    decoder = standin.tiny().model.mask_decoder
    rng = np.random.default_rng(1)
    taken = set()
    for steepness in (0.1, 1.0, 2.0, 4.0, 50.0):
        for _ in range(4):
            logits = (steepness * rng.standard_normal((4, 16, 16))).astype(np.float32)
            scores = rng.random(4).astype(np.float32)
            masks, ious = decoder._dynamic_multimask_via_stability(
                torch.from_numpy(logits)[None, None], torch.from_numpy(scores)[None, None]
            )
            (index,) = Answer(logits, scores, 0.0).choice(False, segmenter.metadata["stability"])
            taken.add(index)
            np.testing.assert_array_equal(masks[0, 0, 0].numpy(), logits[index])
            assert ious.item() == scores[index]
    assert taken == {0, 1, 2, 3}
    nothing = Answer(np.full((4, 8, 8), -9, np.float32), np.arange(4.0), 0.0)
    assert nothing.choice(False, segmenter.metadata["stability"]) == [0]
    assert nothing.choice(True, segmenter.metadata["stability"]) == [3, 2, 1]
    assert nothing.choice(False, {"use": False}) == [0]


def test_every_kind_of_block() -> None:
    """Windows that fit and that stand over, pooled or not, global ones, and linears that are split."""
    from transformers.models.sam2.modeling_sam2 import Sam2MultiScaleBlock

    model = standin.tiny().model
    seen = set()
    for source in model.vision_encoder.backbone.blocks:
        assert isinstance(source, Sam2MultiScaleBlock)
        for height, limit in ((24, 128 * 2**20), (22, 128 * 2**20), (22, 2**18)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("recipes.sam2.blocks.MAX_BYTES", limit)
                block = Block(source, height, 2 * height)
            seen.add((block.window, any(block.padding), block.stride is not None, len(block.qkv), len(block.mlp.wide)))
            x = torch.randn(1, height, 2 * height, source.dim, generator=torch.Generator().manual_seed(0))
            with torch.no_grad():
                np.testing.assert_allclose(block(x).numpy(), source(x).numpy(), atol=2e-5)
    # windows that fit or not, pooled or not
    assert {row[1:3] for row in seen if row[0]} == {(True, True), (True, False), (False, True), (False, False)}
    assert any(row[0] == 0 for row in seen) and {row[3] for row in seen} == {1, 3} and max(row[4] for row in seen) > 1


def test_half_precision_keeps_places(assets: Path) -> None:
    bundle = build(ExportRequest("webgpu", "tiny", "fp16"))
    encode, prompt = (bundle.methods[name].module for name in ("encode", "prompt"))
    assert isinstance(encode, EncodeMethod) and isinstance(prompt, PromptMethod)
    assert encode.features is prompt.features and encode.features.embedding.dtype == torch.float16
    assert prompt.points.projection.dtype == torch.float32 and prompt.tokens.dtype == torch.float16
    outputs = EagerProgram(bundle).run("encode", np.zeros((1, 3, 128, 128), np.float32))
    assert all(output.dtype == np.float32 for output in outputs)


def test_features_of_the_real_size() -> None:
    """What a prompt needs of a picture of 1024 × 1024 pixels: 16 MiB."""
    shapes = [tuple(map.shape) for map in Features(256, 64).maps()]
    assert shapes == [(1, 256, 64, 64), (1, 64, 128, 128), (1, 32, 256, 256)]


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


def test_everything_finds_each_thing_once(assets: Path) -> None:
    program = Discs()
    segmenter = Segmenter(program, assets)
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


def test_runner_works_without_torch(assets: Path) -> None:
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
    run = [sys.executable, "-c", code, str(assets)]
    done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1200"]


def test_masks_that_are_not_finite_are_refused(eager: EagerProgram, assets: Path) -> None:
    class Broken:
        def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
            return [output * np.nan for output in eager.run(method, *arrays)]

    segmenter = Segmenter(Broken(), assets)
    segmenter.look(PICTURE)
    with pytest.raises(UserError, match="not finite"):
        segmenter.ask(Prompt(((1, 1),), (1,)))


def test_one_pixel(segmenter: Segmenter) -> None:
    segmenter.look(np.full((1, 1, 3), 90, np.uint8))
    (found,) = segmenter.masks(segmenter.ask(Prompt(((0, 0),), (1,))), False)
    assert found.mask.shape == (1, 1) and found.annotation["area"] in (0, 1)
    with pytest.raises(UserError, match="outside the picture, which is 1×1"):
        segmenter.ask(Prompt(((1, 0),), (1,)))


# declaration, check, bench


def test_declaration() -> None:
    assert registry.load("sam2") is RECIPE
    assert RECIPE.modes("webgpu") == ("none", "4w", "8w", "8da4w", "8da8w")
    assert RECIPE.modes("xnnpack") == ("none", "8da4w", "8da8w")
    assert all(bound.why for bounds in RECIPE.tolerances.values() for bound in bounds.values())
    exact = RECIPE.tolerances["webgpu", "fp32", "none"]
    assert {exact[name].bound(100.0) for name in ("maps", "masks", "scores", "object")} == {1e-4}
    assert exact["iou"].bound(1.0) == 1e-3


def test_check_of_eager_passes(eager: EagerProgram) -> None:
    rows = RECIPE.check(eager, ExportRequest("webgpu", "tiny"))
    outcomes = {row.name: compare(row) for row in rows}
    assert all(outcome.passed for outcome in outcomes.values()), outcomes
    assert {"chelsea.box.choice", "astronaut.high_0", "8 objects.masks"} <= set(outcomes)
    logits = [row.golden for row in rows if row.name.endswith(".masks")]
    shares = np.concatenate([(golden > 0).mean((-1, -2)).ravel() for golden in logits])
    assert ((shares > 0.02) & (shares < 0.98)).mean() > 0.9  # masks have an inside and an outside


@pytest.mark.parametrize("fault", ["first picture stays", "mask is ignored", "corners are points"])
def test_check_sees_faults(fault: str, eager: EagerProgram) -> None:
    request = ExportRequest("portable", "tiny")
    program = eager
    encoded: list[list[np.ndarray]] = []

    class Faulty:
        def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
            if method == "encode" and fault == "first picture stays":
                if not encoded:
                    encoded.append(program.run(method, *arrays))
                return encoded[0]
            if method == "prompt" and fault == "mask is ignored":
                arrays = (*arrays[:3], np.array([False]))
            if method == "prompt" and fault == "corners are points":
                arrays = (arrays[0], np.minimum(arrays[1], 1), *arrays[2:])
            return program.run(method, *arrays)

    failed = {row.name for row in RECIPE.check(Faulty(), request) if not compare(row).passed}
    expected = {
        "first picture stays": {"astronaut.embedding", "astronaut.point.masks"},
        "mask is ignored": {"chelsea.mask.masks", "chelsea.mask and point.masks"},
        "corners are points": {"chelsea.box.masks", "astronaut.box and points.masks"},
    }[fault]
    assert expected <= failed and (fault == "first picture stays" or "chelsea.point.masks" not in failed)


def test_overlap() -> None:
    a = np.arange(10) < 6
    assert overlap(a, a[::-1]) == 0.2 and overlap(a, a) == overlap(a & ~a, a & ~a) == 1.0


def test_workloads(eager: EagerProgram) -> None:
    found = workloads({"webgpu": eager, "xnnpack": eager}, ExportRequest("webgpu", "tiny"))
    assert [(workload.name, workload.unit, workload.amount) for workload in found] == [
        ("encode", "picture", 1),
        ("prompt, 1 at once", "prompt", 1),
        ("prompt, 8 at once", "prompt", 8),
    ]
    for workload in found:
        assert list(workload.calls) == ["webgpu", "xnnpack", "eager", "eager-cuda"]
        for side in ("webgpu", "xnnpack", "eager"):
            workload.calls[side]()
        if not torch.cuda.is_available():
            with pytest.raises(UserError, match="CUDA"):
                workload.calls["eager-cuda"]()
